"""The demo's clients: what they count, when they try another gateway, and whom they blame."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web
from aiohttp.test_utils import TestServer

from sentinel.sim.client import Load, Record, Traffic
from sentinel.sim.engine import Engine, Server, Shape

LOAD = Load(sessions=4, turns=2, tokens=(5, 10), pause_s=(0.0, 0.01), first_token_s=0.5, stall_s=0.3)
NOWHERE = "http://127.0.0.1:1"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def doors(*names: str, **handlers: Handler) -> AsyncIterator[tuple[dict[str, str], dict[str, Engine]]]:
    """Addresses by name, each with a simulated engine behind it; ``handlers`` answer in place of single ones."""
    urls: dict[str, str] = {}
    engines: dict[str, Engine] = {}
    async with AsyncExitStack() as stack:
        for name in names:
            engine = engines[name] = Engine(Shape(f"decode-{name}", step_s=0.005))
            stepping = asyncio.create_task(engine.run())
            stack.callback(stepping.cancel)
            app = Server(engine).app()
            if name in handlers:
                app = web.Application()
                app.router.add_post("/v1/chat/completions", handlers[name])
            server = TestServer(app, handler_cancellation=True)
            await server.start_server()
            stack.push_async_callback(server.close)
            urls[name] = str(server.make_url("")).rstrip("/")
        yield urls, engines


async def flow(gateways: Mapping[str, str], until: int, load: Load = LOAD) -> Traffic:
    """Let traffic flow until so many requests have settled."""
    traffic = Traffic(gateways, load, model="sim-moe")
    await traffic.start()
    async with asyncio.timeout(20):
        while len(traffic.settled) < until:
            await asyncio.sleep(0.01)
    await traffic.stop()
    return traffic


async def test_requests_go_round_the_gateways_and_are_counted_once() -> None:
    """Every request is ok, was sent to one gateway, names the worker that streamed it, and got the tokens it asked for."""
    async with doors("a", "b", "c") as (urls, _):
        traffic = await flow(urls, 20)
    counts = traffic.counts()
    assert counts["sent"] == counts["ok"] >= 20
    assert (counts["failed"], counts["refused"], counts["retried"], counts["flowing"]) == (0, 0, 0, 0)
    assert {r.gateways[0] for r in traffic.settled} == {"a", "b", "c"}
    assert all(r.gateways == [r.worker.removeprefix("decode-")] and 5 <= r.tokens <= 10 for r in traffic.settled)
    assert len(traffic.first_tokens()) == counts["ok"]
    assert traffic.tokens == sum(r.tokens for r in traffic.records)


async def test_a_gateway_that_cannot_be_reached_costs_a_try_not_a_request() -> None:
    """Whoever would have gone to it is sent to the next one, and counts as ok and retried."""
    async with doors("b", "c") as (urls, _):
        traffic = await flow({"a": NOWHERE, **urls}, 12)
    assert traffic.counts()["failed"] == 0
    tried = [r.gateways for r in traffic.settled]
    assert ["a", "b"] in tried and ["c"] in tried
    assert all(len(names) == 1 + (names[0] == "a") for names in tried)


async def test_no_gateway_at_all_is_a_failure_that_says_so() -> None:
    """Each was tried once, and the request failed in one sentence."""
    traffic = await flow({"a": NOWHERE, "b": NOWHERE}, 3)
    assert all(r.failed == "no gateway could be reached" and sorted(r.gateways) == ["a", "b"] for r in traffic.settled)


async def test_a_stream_that_is_cut_is_the_gateways() -> None:
    """What was streamed cannot be unsent: no second try, the gateway is blamed, and the record counts the tokens."""

    async def cuts(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"id": "chatcmpl-decode-01-1"}\n\n')
        await asyncio.sleep(0.02)
        assert request.transport is not None
        request.transport.abort()
        return response

    async with doors("a", a=cuts) as (urls, _):
        traffic = await flow(urls, 5)
    assert all((r.failed_on, r.worker, r.tokens, r.retried) == ("a", "decode-01", 1, False) for r in traffic.settled)
    assert all("cut after 1 of" in r.failed for r in traffic.settled)


async def test_what_a_gateway_tells_of_a_stream_is_the_workers() -> None:
    """An error inside a stream fails the request with the gateway's own sentence, on the worker that streamed."""

    async def tells(request: web.Request) -> web.StreamResponse:
        frames = b'data: {"id":"chatcmpl-decode-01-1"}\n\ndata: {"error":{"message":"the worker is gone"}}\n\ndata: [DONE]\n\n'
        return web.Response(body=frames, content_type="text/event-stream")

    async with doors("a", a=tells) as (urls, _):
        traffic = await flow(urls, 5)
    assert all(r.failed_on == "decode-01" and r.failed.endswith("the worker is gone") for r in traffic.settled)


async def test_a_refusal_is_no_failure_and_is_heeded() -> None:
    """503 with Retry-After counts as refused; its session comes again when it was told to, and no other gateway is asked."""

    async def refuses(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "full"}}, status=503, headers={"Retry-After": "1"})

    async with doors("a", "b", a=refuses, b=refuses) as (urls, _):
        traffic = await flow(urls, 6, Load(sessions=3, pause_s=(0.0, 0.0)))
    assert traffic.counts()["refused"] == len(traffic.settled) and not traffic.counts()["failed"]
    assert all(r.retry_after_s == 1 and "full" in r.refused and len(r.gateways) == 1 for r in traffic.settled)
    ends: dict[str, float] = {}
    for record in traffic.records:
        seat = record.session.partition(".")[0]
        assert record.at - ends.get(seat, 0) >= 0.9
        ends[seat] = record.ended_at or 0


async def test_other_answers_are_failures() -> None:
    """A 502 is the answer: it is not sent again, and says what the gateway said."""

    async def fails(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no worker answered"}}, status=502)

    async with doors("a", "b", a=fails, b=fails) as (urls, _):
        traffic = await flow(urls, 4)
    assert all(r.failed.endswith("answered 502: no worker answered") and not r.retried for r in traffic.settled)


async def test_silence_ends() -> None:
    """Streams that stop are failures of their worker, and what never begins one of the gateway."""
    async with doors("a") as (urls, engines):

        def first(record: Record) -> None:
            engines["a"].frozen = True

        traffic = Traffic(urls, LOAD, model="sim-moe", on_first_token=first)
        await traffic.start()
        async with asyncio.timeout(20):
            while {bool(r.tokens) for r in traffic.records if r.failed} != {True, False}:
                await asyncio.sleep(0.01)
        await traffic.stop()
    for record in (r for r in traffic.records if r.failed):
        assert record.failed_on == ("decode-a" if record.tokens else "a")
        assert ("stalled after" if record.tokens else "no first token") in record.failed


async def test_a_surge_keeps_its_pace() -> None:
    """What comes besides does so at its own rate, whatever becomes of it, and ends when it is told to."""
    async with doors("a") as (urls, engines):
        engines["a"].frozen = True
        traffic = Traffic(urls, Load(sessions=0, first_token_s=30), model="sim-moe")
        await traffic.start()
        began = time.monotonic()
        traffic.surge(100)
        async with asyncio.timeout(20):
            while len(traffic.records) < 20:
                await asyncio.sleep(0.01)
        assert time.monotonic() - began >= 0.19
        traffic.surge(0)
        await asyncio.sleep(0.1)
        sent = len(traffic.records)
        await asyncio.sleep(0.1)
        assert len(traffic.records) == sent
        await traffic.stop(0.0)


async def test_what_the_demo_cuts_off_itself_is_not_counted() -> None:
    """Requests still flowing when the traffic is stopped without patience are neither ok nor failed nor sent."""
    async with doors("a") as (urls, engines):
        engines["a"].frozen = True
        traffic = Traffic(urls, Load(sessions=3, first_token_s=30), model="sim-moe")
        await traffic.start()
        async with asyncio.timeout(10):
            while not traffic.records:
                await asyncio.sleep(0.01)
        await traffic.stop(0.0)
    assert traffic.counts()["sent"] == 0
    assert traffic.counts()["flowing"] == 0

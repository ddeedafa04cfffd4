"""The demo's clients: what they count, when they try again, and whom they blame."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web
from aiohttp.test_utils import TestServer

from sentinel.model import Role, RouteEntry, WorkerState
from sentinel.sim.client import Load, Pick, Record, Traffic
from sentinel.sim.engine import Engine, Server, Shape

LOAD = Load(sessions=4, turns=2, tokens=(5, 10), pause_s=(0.0, 0.01), first_token_s=0.5, stall_s=0.3)


class Fleet:
    """Engines served in this loop, by name."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self.urls: dict[str, str] = {}

    def entry(self, name: str) -> RouteEntry:
        role = Role.PREFILL if name.startswith("prefill") else Role.DECODE
        return RouteEntry(worker=name, url=self.urls[name], role=role, state=WorkerState.ACTIVE)

    def pick(self, role: Role, session: str, left_out: frozenset[str]) -> RouteEntry | None:
        """The first by name that may be taken."""
        free = sorted(n for n in self.urls if n.startswith(role.value) and n not in left_out)
        return self.entry(free[0]) if free else None


@asynccontextmanager
async def fleet(*names: str, **apps: web.Application) -> AsyncIterator[Fleet]:
    """A fleet of simulated engines; ``apps`` replace the surface of single ones."""
    made = Fleet()
    async with AsyncExitStack() as stack:
        for name in names:
            engine = made.engines[name] = Engine(Shape(name, step_s=0.005))
            stepping = asyncio.create_task(engine.run())
            stack.callback(stepping.cancel)
            server = TestServer(apps.get(name.replace("-", "_"), Server(engine).app()), handler_cancellation=True)
            await server.start_server()
            stack.push_async_callback(server.close)
            made.urls[name] = str(server.make_url("")).rstrip("/")
        yield made


async def flow(pick: Pick, until: int, load: Load = LOAD) -> Traffic:
    """Let traffic flow until so many requests have settled."""
    traffic = Traffic(pick, load, model="sim-moe")
    await traffic.start()
    async with asyncio.timeout(20):
        while len(traffic.settled) < until:
            await asyncio.sleep(0.01)
    await traffic.stop()
    return traffic


async def test_every_turn_is_prefilled_then_decoded_and_counted_once() -> None:
    """On a healthy fleet every request is ok, names one prefill worker and one decoder, and got the tokens it asked for."""
    async with fleet("prefill-1", "decode-01") as made:
        traffic = await flow(made.pick, 20)
    counts = traffic.counts()
    assert counts["sent"] == counts["ok"] >= 20
    assert (counts["failed"], counts["retried"], counts["flowing"]) == (0, 0, 0)
    assert all(r.prefill == ["prefill-1"] and r.decode == ["decode-01"] and 5 <= r.tokens <= 10 for r in traffic.settled)


async def test_a_worker_that_refuses_costs_a_retry_not_a_request() -> None:
    """Before the first token a request is tried on another worker, once, and then counts as ok and retried."""
    async with fleet("prefill-1", "decode-01", "decode-02") as made:
        made.urls["decode-01"] = "http://127.0.0.1:1"
        traffic = await flow(made.pick, 10)
    assert traffic.counts()["failed"] == 0
    assert all(r.retried and r.decode == ["decode-01", "decode-02"] for r in traffic.settled)


async def test_the_second_failure_is_final_and_names_its_worker() -> None:
    """With two dead decoders a request fails after its one retry, and says on which worker and why."""
    async with fleet("prefill-1", "decode-01", "decode-02", "decode-03") as made:
        made.urls["decode-01"] = made.urls["decode-02"] = "http://127.0.0.1:1"
        traffic = await flow(made.pick, 5)
    assert traffic.counts()["ok"] == 0
    assert {r.failed_on for r in traffic.settled} == {"decode-02"}
    assert all("broke before the first token" in r.failed for r in traffic.settled)


async def test_no_worker_at_all_is_a_failure_that_says_so() -> None:
    """An empty route table fails requests in one sentence; it never hangs or raises."""
    traffic = await flow(lambda role, session, left_out: None, 5)
    assert all(r.failed == "no prefill worker: the route table has none to give" for r in traffic.settled)


async def test_a_stream_that_breaks_after_its_first_token_has_failed() -> None:
    """What was streamed to the client cannot be unsent: no retry, and the record counts its tokens."""

    async def breaks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        assert request.transport is not None
        request.transport.abort()
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", breaks)
    async with fleet("prefill-1", "decode-01", "decode-02", decode_01=app) as made:
        traffic = await flow(made.pick, 5)
    assert all(r.failed_on == "decode-01" and r.tokens == 1 and not r.retried for r in traffic.settled)
    assert all("broke after 1 of" in r.failed for r in traffic.settled)


async def test_a_frozen_decoder_stalls_streams_and_holds_up_new_requests() -> None:
    """Streams that had begun fail as stalled; requests without a token move to another decoder after the first-token limit."""
    async with fleet("prefill-1", "decode-01", "decode-02") as made:
        frozen = made.engines["decode-01"]

        def first(record: Record) -> None:
            frozen.frozen = True

        traffic = Traffic(made.pick, LOAD, model="sim-moe", on_first_token=first)
        await traffic.start()
        async with asyncio.timeout(20):
            while sum(r.retried and r.ok for r in traffic.settled) < 3 or not any(r.failed for r in traffic.settled):
                await asyncio.sleep(0.01)
        await traffic.stop()
    failed = [r for r in traffic.records if r.failed]
    assert failed
    assert all(r.failed_on == "decode-01" and "stalled after" in r.failed for r in failed)


async def test_a_5xx_is_tried_elsewhere() -> None:
    """A worker that is shutting down answers 500; the request goes to another one."""
    async with fleet("prefill-1", "decode-01", "decode-02") as made:
        made.engines["decode-01"].closing = True
        traffic = await flow(made.pick, 8)
    assert traffic.counts()["failed"] == 0
    assert all(r.retried for r in traffic.settled)


async def test_what_the_demo_cuts_off_itself_is_not_counted() -> None:
    """Requests still flowing when the traffic is stopped without patience are neither ok nor failed nor sent."""
    async with fleet("prefill-1", "decode-01") as made:
        made.engines["decode-01"].frozen = True
        traffic = Traffic(made.pick, Load(sessions=3, first_token_s=30), model="sim-moe")
        await traffic.start()
        async with asyncio.timeout(10):
            while not any(r.decode for r in traffic.records):
                await asyncio.sleep(0.01)
        await traffic.stop(0.0)
    assert traffic.counts()["sent"] == 0
    assert traffic.counts()["flowing"] == 0

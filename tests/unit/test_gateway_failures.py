"""Workers that fail: one second try before the first byte, a clean error after it, and nothing kept of either."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any

import pytest
from aiohttp import web

from sentinel.durations import Duration
from sentinel.gateway.guards import Outcome, Permit
from sentinel.model import WorkerState
from tests.gateway_site import Site


class Heard:
    """What breakers were told, beside what they do with it."""

    def __init__(self, site: Site) -> None:
        self.outcomes: list[tuple[str, Outcome]] = []
        told = site.breakers.ended

        def ended(permit: Permit, outcome: Outcome) -> None:
            self.outcomes.append((permit.worker, outcome))
            told(permit, outcome)

        site.breakers.ended = ended  # type: ignore[method-assign]


def events(body: bytes) -> list[Any]:
    return [json.loads(part[6:]) if part != b"data: [DONE]" else "DONE" for part in body.split(b"\n\n")[:-1]]


async def home_of(site: Site, user: str) -> str:
    async with site.post(user=user) as answer:
        return str((await answer.json())["id"]).removeprefix("chatcmpl-")


async def _refuse(site: Site, home: str) -> None:
    await site.stands[home].stop()


async def _reset(site: Site, home: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.transport
        request.transport.abort()
        return web.Response()

    site.stands[home].handler = handler


async def _freeze(site: Site, home: str) -> None:
    site.stands[home].freeze_after = 0


async def _freeze_behind_a_head(site: Site, home: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        await site.stands[home].thawed.wait()
        return out

    site.stands[home].handler = handler


async def _garble(site: Site, home: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.transport
        request.transport.write(b"\x00\x01 what is this\r\n\r\n")
        return web.Response()

    site.stands[home].handler = handler


async def _fail(site: Site, home: str) -> None:
    site.stands[home].status = 500


@pytest.mark.parametrize(
    ("broken", "stream"),  # an answer that is not streamed has no head before it is there
    [(b, s) for b in (_refuse, _reset, _freeze, _garble, _fail) for s in (False, True)] + [(_freeze_behind_a_head, True)],
)
async def test_a_failure_before_the_first_byte_is_retried_elsewhere(broken: Any, stream: bool) -> None:
    """Whatever goes wrong there, the client gets the other worker's answer, the first is blamed once, and the session moves."""
    async with Site("a", "b", first_byte=Duration(0.3), answer=Duration(0.3)) as site:
        home = await home_of(site, "u")
        other = "b" if home == "a" else "a"
        await broken(site, home)
        heard = Heard(site)
        async with site.post(user="u", stream=stream) as answer:
            body = await answer.read()
            assert answer.status == 200, body
        assert f"chatcmpl-{other}".encode() in body
        await site.free()
        assert sorted(heard.outcomes) == sorted([(home, Outcome.FAILED), (other, Outcome.FINE)])
        retries = {k: v for k, v in (await site.metrics()).items() if k.startswith("sentinel_gateway_retries_total") and v}
        assert sum(retries.values()) == 1 and f'worker="{home}"' in next(iter(retries))
        site.stands[home].handler, site.stands[home].status, site.stands[home].freeze_after = None, 200, None
        assert await home_of(site, "u") == other


async def test_there_is_one_second_try_and_no_third() -> None:
    """With every worker failing a request is tried twice, and the client gets the last worker's own words."""
    async with Site("a", "b", "c") as site:
        for stand in site.stands.values():
            stand.status = 500
        async with site.post() as answer:
            assert answer.status == 500
            assert "says 500" in (await answer.json())["error"]["message"]
        assert sum(len(s.requests) for s in site.stands.values()) == 2
        await site.free()


async def test_second_tries_are_bounded() -> None:
    """A budget that is used up leaves failures as they are, and says so."""
    async with Site("a", "b", retry_reserve=2, retry_share=0.0) as site:
        for stand in site.stands.values():
            stand.status = 500
        for n in range(5):
            async with site.post(content=f"{n}") as answer:
                assert answer.status == 500
        assert sum(len(s.requests) for s in site.stands.values()) == 5 + 2
        assert (await site.metrics())['sentinel_gateway_unretried_total{why="budget"}'] == 3


async def test_what_reached_nobody_is_tried_elsewhere_without_a_budget() -> None:
    """A worker that takes no connection has had nothing of a request, so going elsewhere asks nobody twice: none of them fails."""
    async with Site("a", "b", retry_reserve=0, retry_share=0.0) as site:
        await site.stands["a"].stop()
        for n in range(20):
            async with site.post(content=f"{n}") as answer:
                assert answer.status == 200
        assert (await site.metrics())['sentinel_gateway_retries_total{pool="p",why="refused",worker="a"}'] > 0
        assert (await site.metrics())['sentinel_gateway_unretried_total{why="budget"}'] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_what_came_while_this_process_did_not_run_is_heard_before_anybody_is_blamed(stream: bool) -> None:
    """Past every patience in one stop of the process, an answer is passed on, and no worker has failed; a silent one still does."""
    short = Duration(0.4)
    async with Site("a", first_byte=short, answer=short, stall=short) as site:
        heard = Heard(site)
        site.stands["a"].events, site.stands["a"].pause_s = 40, 0.02
        asking = asyncio.create_task(ask(site, stream=stream))
        while not site.stands["a"].requests:
            await asyncio.sleep(0)
        time.sleep(1.0)
        if stream:
            await asyncio.sleep(0.1)
            time.sleep(1.0)
        assert await asking == (200, True)
        await site.free()
        assert Outcome.FAILED not in {outcome for _, outcome in heard.outcomes}
        site.stands["a"].freeze_after = 0
        assert (await ask(site, stream=stream))[0] == 504


async def ask(site: Site, *, stream: bool) -> tuple[int, bool]:
    """The status, and whether the answer was whole."""
    async with site.post(stream=stream) as answer:
        body = await answer.read()
        return answer.status, body.endswith(b"[DONE]\n\n") if stream else b"hello" in body


@pytest.mark.parametrize(("status", "outcome"), [(s, Outcome.FINE) for s in (400, 403, 422, 501)])
async def test_a_clients_mistake_is_passed_on_and_blames_nobody(status: int, outcome: Outcome) -> None:
    """No second try, no failure."""
    async with Site("a", "b") as site:
        for stand in site.stands.values():
            stand.status = status
        heard = Heard(site)
        async with site.post() as answer:
            assert answer.status == status
        await site.free()
        assert [o for _, o in heard.outcomes] == [outcome]


@pytest.mark.parametrize("status", [404, 401, 403])
async def test_a_worker_that_does_not_serve_it_yet_costs_nothing(status: int) -> None:
    """A Dynamo frontend that has just started says 404 to everything; a worker with another key says 401. Others are asked, without
    any budget, the first is asked last for a while, and is neither blamed nor taken for one that works."""
    async with Site("a", "b", retry_reserve=0, retry_share=0.0) as site:
        site.gateway.desk.worker_key = b"k"
        home = await home_of(site, "u")
        site.stands[home].status = status
        heard = Heard(site)
        for n in range(4):
            async with site.post(user="u" if n % 2 else "u2") as answer:
                assert answer.status == 200
        await site.free()
        assert [o for w, o in heard.outcomes if w == home] == [Outcome.BUSY]
        retries = [k for k, v in (await site.metrics()).items() if k.startswith("sentinel_gateway_retries_total") and v]
        assert len(retries) == 1 and 'why="absent"' in retries[0]


async def test_what_nobody_serves_is_not_asked_twice_each_time() -> None:
    """Where two workers do not know it (embeddings of a chat model), the client gets their 404, and the next requests of this kind
    cost one try each; other kinds keep their second tries, and an earlier response that is not there is its client's own matter."""
    async with Site("a", "b") as site:
        for stand in site.stands.values():
            stand.status = 404
        for n in range(5):
            async with site.post("/v1/embeddings", input=f"{n}") as answer:
                assert answer.status == 404
        tries = [r for s in site.stands.values() for r in s.requests]
        assert len(tries) == 5 + 1
        async with site.post("/v1/responses", input="x", previous_response_id="resp_none") as answer:
            assert answer.status == 404
        assert sum(len(s.requests) for s in site.stands.values()) == 5 + 1 + 1
        async with site.post() as answer:
            assert answer.status == 404
        assert sum(len(s.requests) for s in site.stands.values()) == 5 + 1 + 1 + 2
        counted: Counter[str] = Counter()
        for name, n in (await site.metrics()).items():
            if name.startswith("sentinel_gateway_requests_total"):
                counted[name.partition('outcome="')[2].partition('"')[0]] += int(n)
        assert counted == {"absent": 6, "client_error": 1}
        await site.free()


@pytest.mark.parametrize("status", [429, 503])
async def test_back_pressure_steers(status: int) -> None:
    """A busy worker is not blamed; the request goes elsewhere, and so do the next ones for a while. All busy: Retry-After."""
    async with Site("a", "b") as site:
        home = await home_of(site, "u")
        other = "b" if home == "a" else "a"
        site.stands[home].status = status
        heard = Heard(site)
        for _ in range(4):
            async with site.post(user="u2") as answer:
                assert answer.status == 200
            async with site.post(user="u") as answer:
                assert answer.status == 200
        assert (home, Outcome.BUSY) in heard.outcomes and Outcome.FAILED not in {o for _, o in heard.outcomes}
        assert len([1 for w, _ in heard.outcomes if w == home]) == 1
        site.stands[other].status = status
        async with site.post(user="u") as answer:
            assert answer.status == status and answer.headers["Retry-After"] == "1"


async def test_a_worker_that_left_rotation_is_not_blamed() -> None:
    """vLLM answers 500 behind a green /health after SIGTERM: a request on its way there is tried elsewhere, nothing is counted."""
    async with Site("a", "b") as site:
        home = await home_of(site, "u")
        reached = asyncio.Event()

        async def handler(_: web.Request) -> web.Response:
            site.route(2, **{home: WorkerState.OUT})
            reached.set()
            return web.json_response({"error": "cannot schedule new futures after shutdown"}, status=500)

        site.stands[home].handler = handler
        heard = Heard(site)
        async with site.post(user="u") as answer:
            assert answer.status == 200
        assert reached.is_set() and (home, Outcome.IGNORED) in heard.outcomes


@pytest.mark.parametrize(("how", "why"), [("freeze", "stall"), ("cut", "closed_early")])
async def test_a_failure_after_the_first_byte_ends_the_stream_cleanly(how: str, why: str) -> None:
    """What came stays, then one error event in OpenAI's shape and [DONE]; the worker is blamed, nothing is tried again."""
    async with Site("a", "b", stall=Duration(0.3)) as site:
        for stand in site.stands.values():
            stand.freeze_after, stand.cut_after = (2, None) if how == "freeze" else (None, 2)
        heard = Heard(site)
        async with site.post(stream=True) as answer:
            got = events(await answer.read())
        await site.free()
        assert [g["choices"][0]["delta"]["content"] for g in got[:2]] == ["word0 ", "word1 "]
        assert got[2]["error"]["code"] in (f"upstream_{why}", "upstream_reset") and got[3:] == ["DONE"]
        assert [o for _, o in heard.outcomes] == [Outcome.FAILED]
        assert sum(len(s.requests) for s in site.stands.values()) == 1
        broken = {k: v for k, v in (await site.metrics()).items() if k.startswith("sentinel_gateway_stream_errors_total") and v}
        assert sum(broken.values()) == 1


@pytest.mark.parametrize("garbage", [b"zz\r\n{}\r\n", b"3\r\nabcdef\r\n", b"\xff" * 5000, b"1000000000000000000\r\n"])
async def test_garbage_in_the_middle_ends_the_stream_cleanly(garbage: bytes) -> None:
    """What no reader could make sense of never reaches the client: complete events, then the error; and the worker is blamed."""

    async def handler(request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        await out.write(b'data: {"a": 1}\n\n')
        await asyncio.sleep(0.02)
        assert request.transport
        request.transport.write(garbage)
        await asyncio.sleep(0.5)
        return out

    async with Site("a", stall=Duration(0.4)) as site:
        site.stands["a"].handler = handler
        heard = Heard(site)
        async with site.post(stream=True) as answer:
            got = events(await answer.read())
        await site.free()
        assert got[0] == {"a": 1} and got[1]["error"]["code"] in ("upstream_garbled", "upstream_stall") and got[2:] == ["DONE"]
        assert heard.outcomes == [("a", Outcome.FAILED)]


async def test_half_an_event_is_never_shown() -> None:
    """A worker that dies within an event: the client sees complete events only, then the error."""

    async def handler(request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        await out.write(b'data: {"a": 1}\n\ndata: {"b"')
        await asyncio.sleep(0.05)
        assert request.transport
        request.transport.abort()
        return out

    async with Site("a") as site:
        site.stands["a"].handler = handler
        async with site.post(stream=True) as answer:
            got = events(await answer.read())
        assert got[0] == {"a": 1} and "error" in got[1] and got[2] == "DONE"


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("code", "outcome"),
    [(400, Outcome.FINE), (404, Outcome.FINE), (499, Outcome.FAILED), (500, Outcome.FAILED), (None, Outcome.FAILED)],
)
async def test_an_error_that_a_stream_tells_is_judged_by_its_status(
    after: int, code: int | None, outcome: Outcome, *, apart: bool
) -> None:
    """A client's mistake says nothing about the worker when it is told within a stream either (vLLM: behind a 200, as ``code``);
    the client gets the worker's own words."""

    async def handler(request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for _ in range(after):
            await out.write(b'data: {"choices": []}\n\n')
            await asyncio.sleep(0.005)
        await out.write(b"data: " + json.dumps({"error": {"message": "own words", "code": code}}).encode() + b"\n\n")
        if apart:
            await asyncio.sleep(0.02)
        await out.write(b"data: [DONE]\n\n")
        return out

    async with Site("a") as site:
        site.stands["a"].handler = handler
        heard = Heard(site)
        async with site.post(stream=True) as answer:
            got = events(await answer.read())
        await site.free()
        assert got[after]["error"]["message"] == "own words" and got[after + 1 :] == ["DONE"]
        assert heard.outcomes == [("a", outcome)]
        word, where = "client_error" if outcome is Outcome.FINE else "broken", 'pool="p",tenant="anonymous",worker="a"'
        assert (await site.metrics())[f'sentinel_gateway_requests_total{{outcome="{word}",{where}}}'] == 1


async def test_an_answer_that_speaks_of_errors_is_none() -> None:
    """Text in which a model writes what an error event looks like blames no worker."""

    async def handler(request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        text = json.dumps({"choices": [{"delta": {"content": 'event: error\ndata: {"error": {"code": 500}}\n\n'}}]})
        await out.write(f"data: {text}\n\n".encode())
        await out.write(b"data: [DONE]\n\n")
        return out

    async with Site("a") as site:
        site.stands["a"].handler = handler
        heard = Heard(site)
        async with site.post(stream=True) as answer:
            assert len(events(await answer.read())) == 2
        await site.free()
        assert heard.outcomes == [("a", Outcome.FINE)]


async def test_responses_end_with_their_own_kind_of_error() -> None:
    """/v1/responses: a typed ``error`` event, and no [DONE]."""
    async with Site("a") as site:
        site.stands["a"].cut_after = 1
        async with site.post("/v1/responses", input="x", stream=True) as answer:
            last = (await answer.read()).split(b"\n\n")[-2]
        name, _, data = last.partition(b"\n")
        told = json.loads(data[6:])
        assert name == b"event: error" and told["type"] == "error" and told["message"] and told["sequence_number"] == 1


async def test_an_answer_that_cannot_be_mended_is_cut() -> None:
    """A large answer with a length that breaks midway: a broken connection, never a short answer that looks whole."""

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport
        request.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 500_000)
        await asyncio.sleep(0.05)
        request.transport.abort()
        return web.StreamResponse()

    async with Site("a") as site:
        site.stands["a"].handler = handler
        with pytest.raises(Exception, match=r"payload|Connection|reset"):
            async with site.post() as answer:
                await answer.read()
        await site.free()


async def test_a_kept_connection_that_died_is_no_failure() -> None:
    """A worker that was restarted between two requests, or closed its idle connection, answers the next one; nobody is blamed."""
    async with Site("a") as site:
        async with site.post() as answer:
            await answer.read()
        port = site.stands["a"].port
        await site.stands["a"].stop()
        await site.stands["a"].start(port)
        heard = Heard(site)
        async with site.post() as answer:
            assert answer.status == 200
        assert heard.outcomes == [("a", Outcome.FINE)]


async def test_many_streams_survive_what_can_be_survived() -> None:
    """A hundred streams while a worker is cut off: none fails that had not begun, the others end in one error event."""
    async with Site("a", "b", "c", stall=Duration(1.0), first_byte=Duration(1.0)) as site:
        for stand in site.stands.values():
            stand.events, stand.pause_s = 30, 0.01

        async def one(n: int) -> bytes:
            await asyncio.sleep(n * 0.003)
            async with site.post(content=f"{n}", stream=True) as answer:
                assert answer.status == 200
                return bytes(await answer.read())

        tasks = [asyncio.create_task(one(n)) for n in range(100)]
        await asyncio.sleep(0.15)
        victim = site.stands["a"]
        await victim.stop()
        ended = [events(await task) for task in tasks]
        broken = [got for got in ended if any(g != "DONE" and "error" in g for g in got)]
        assert 0 < len(broken) <= len(victim.requests)
        assert all("choices" in got[0] and "error" in got[-2] for got in broken), "it had not begun, and could have been saved"
        assert all(got[-1] == "DONE" for got in ended)
        assert all(len(got) == 31 for got in ended if got not in broken)
        await site.free()



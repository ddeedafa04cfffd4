"""What goes through the gateway: bytes, headers, streams, models, sessions; with real servers on both sides."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from msgspec.structs import replace

from sentinel.gateway.alone import Limits
from sentinel.model import WorkerState
from sentinel.tokens import digest
from tests.gateway_site import MODEL, Site


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"])
async def test_requests_reach_a_worker_as_they_are(path: str) -> None:
    """Body, path, query, unknown fields and headers arrive byte for byte; the answer comes back as the worker gave it."""
    body = b'{"model": "m",  "unknown": {"x": [1, 2.50]}, "input": "\\u00e9", "prompt": "p", "messages": []}'
    async with Site("a") as site:
        headers = {"X-Own": "kept", "Authorization": "Bearer mine", "Content-Type": "application/json; charset=utf-8"}
        async with site.http.post(f"{site.url}{path}?a=b%20c", data=body, headers=headers) as answer:
            assert answer.status == 200
            assert (await answer.json())["id"] == "chatcmpl-a"
        seen, got = site.stands["a"].requests[0]
        assert got == body
        assert {name: seen[name] for name in headers} == headers
        assert seen["Content-Length"] == str(len(body)) and "Transfer-Encoding" not in seen
        await site.free()


async def test_hop_by_hop_headers_end_here() -> None:
    """What belongs to one connection is not passed on, in either direction; a chunked request arrives with a length."""

    async def handler(request: web.Request) -> web.Response:
        headers = {"Connection": "keep-alive, X-Hop", "X-Hop": "1", "X-Own": "2", "Keep-Alive": "timeout=9"}
        return web.json_response({}, headers=headers)

    async with Site("a") as site:
        site.stands["a"].handler = handler
        body = b'{"model": "m", "messages": []}'
        raw = await site.raw(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: outside\r\nConnection: close, X-Mine\r\nX-Mine: 1\r\nTE: trailers\r\n"
            b"Proxy-Authorization: secret\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        )
        seen, got = site.stands["a"].requests[0]
        assert got == body and seen["Host"] == f"127.0.0.1:{site.stands['a'].port}"
        left = {name.lower() for name in seen}
        assert not {"x-mine", "te", "proxy-authorization", "upgrade", "transfer-encoding", "connection"} & left
        head = raw.partition(b"\r\n\r\n")[0].lower()
        assert b"x-own: 2" in head and b"x-hop" not in head and b"keep-alive" not in head and b"connection: close" in head


async def test_request_ids_and_trace_context_are_carried() -> None:
    """Made when missing, kept when valid, and the id comes back, with errors too."""
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with Site("a") as site:
        async with site.post() as answer:
            made = answer.headers["x-request-id"]
        async with site.post(headers={"X-Request-Id": "mine-1", "traceparent": trace, "tracestate": "a=b"}) as answer:
            assert answer.headers["x-request-id"] == "mine-1"
        async with site.post(headers={"traceparent": "nonsense", "tracestate": "a=b"}):
            pass
        async with site.post(model="other", headers={"X-Request-Id": "mine-2"}) as answer:
            assert (answer.status, answer.headers["x-request-id"]) == (404, "mine-2")
        first, second, third = (seen for seen, _ in site.stands["a"].requests)
        assert first["x-request-id"] == made and re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", first["traceparent"])
        assert (second["x-request-id"], second["traceparent"], second["tracestate"]) == ("mine-1", trace, "a=b")
        assert third["traceparent"] != "nonsense" and "tracestate" not in third


async def test_streams_are_not_buffered() -> None:
    """Each event is with the client before the worker makes the next one, and all of them are the worker's own bytes."""
    step = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for number in range(3):
            await out.write(b'data: {"n": %d}\n\n' % number)
            await step.wait()
            step.clear()
        await out.write(b"data: [DONE]\n\n")
        return out

    async with Site("a") as site:
        site.stands["a"].handler = handler
        async with site.post(stream=True) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream" and "Content-Length" not in answer.headers
            for number in range(3):
                assert await answer.content.readuntil(b"\n\n") == b'data: {"n": %d}\n\n' % number
                step.set()
            assert await answer.content.read() == b"data: [DONE]\n\n"
        await site.free()


async def test_answers_of_every_framing_arrive_whole() -> None:
    """By length, in chunks, or ended by the connection, small and large: the same payload; HTTP/1.0 clients get it too."""
    large = bytes(range(256)) * 4096
    shape = ""

    async def handler(request: web.Request) -> web.StreamResponse:
        if shape == "length":
            return web.Response(body=large)
        out = web.StreamResponse()
        if shape == "chunks":
            out.enable_chunked_encoding()
        else:
            assert request.transport
            request.transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: x/y\r\n\r\n" + large)
            request.transport.close()
            return out
        await out.prepare(request)
        await out.write(large)
        return out

    async with Site("a") as site:
        site.stands["a"].handler = handler
        for shape in ("length", "chunks", "close"):
            async with site.post() as answer:
                assert await answer.read() == large
            body = b'{"model": "m", "messages": []}'
            got = await site.raw(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            head, _, payload = got.partition(b"\r\n\r\n")
            assert payload == large and b"chunked" not in head.lower(), shape
        await site.free()


async def test_a_client_that_leaves_ends_the_workers_work_at_once() -> None:
    """Before the first byte and in the middle of a stream: the worker's connection ends, the slot comes back, nobody is blamed."""
    async with Site("a") as site:
        stand = site.stands["a"]
        for stand.freeze_after, stand.pause_s in ((0, 0.01), (None, 0.02)):
            stand.events, before = 100_000, stand.gone
            reader, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port)
            body = json.dumps({"model": MODEL, "messages": [], "stream": True}).encode()
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            if stand.freeze_after is None:
                await reader.readuntil(b"\n\n")
            else:
                while not stand.requests:
                    await asyncio.sleep(0.01)
            writer.transport.abort()
            await site.free()
            for _ in range(200):
                if stand.gone > before:
                    break
                await asyncio.sleep(0.01)
            assert stand.gone == before + 1
        metrics = await site.metrics()
        assert metrics['sentinel_gateway_requests_total{outcome="gone",pool="p",tenant="anonymous",worker="a"}'] == 2
        assert all(value == 0 for name, value in metrics.items() if name.startswith("sentinel_gateway_stream_errors_total"))


async def test_a_client_that_reads_slowly_holds_its_worker_back() -> None:
    """What a client does not take is not piled up here: the worker stops, and goes on when the client does."""
    sent = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for _ in range(2000):
            await out.write(b"data: " + b"x" * 32768 + b"\n\n")
            sent += 32768
        return out

    async with Site("a") as site:
        site.stands["a"].handler = handler
        reader, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port, limit=65536)
        body = json.dumps({"model": MODEL, "messages": [], "stream": True}).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        before = -1
        while before != sent or not sent:
            before = sent
            await asyncio.sleep(0.3)
        assert sent < 2000 * 32768 / 2
        got = 0
        while got < 2000 * 32768:
            part = await reader.read(1 << 20)
            assert part
            got += len(part)
        writer.close()
        await site.free()


async def test_models_are_what_can_be_served_now() -> None:
    """A model is listed while a worker of it would take a request, and by its name alone likewise."""
    async with Site("a") as site:
        async with site.http.get(site.url + "/v1/models") as answer:
            assert [m["id"] for m in (await answer.json())["data"]] == [MODEL]
        async with site.http.get(site.url + "/v1/models/m") as answer:
            assert (await answer.json())["object"] == "model"
        site.route(2, a=WorkerState.OUT)
        async with site.http.get(site.url + "/v1/models") as answer:
            assert (await answer.json())["data"] == []
        async with site.http.get(site.url + "/v1/models/m") as answer:
            assert answer.status == 404
        async with site.post() as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "overloaded")
            assert int(answer.headers["Retry-After"]) >= 1


async def test_a_models_name_may_have_a_slash() -> None:
    """As those of Hugging Face have, which OpenAI's SDK quotes, and curl does not."""
    name = "Qwen/Qwen3-0.6B"
    async with Site("a") as site, openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="x", max_retries=0) as sdk:
        fleet = site.gateway.desk.fleet
        site.gateway.reconfigure(replace(fleet, pools=(replace(fleet.pools[0], model=name),)), ())
        assert (await sdk.models.retrieve(name)).id == name
        async with site.http.get(f"{site.url}/v1/models/{name}") as answer:
            assert (await answer.json())["id"] == name
        with pytest.raises(openai.NotFoundError, match="'Qwen/other' is not served here"):
            await sdk.models.retrieve("Qwen/other")


async def test_sessions_stay_where_they_are() -> None:
    """By header, by user, by the conversation's beginning: the same worker, also while it is cordoned; never one that is out."""
    async with Site("a", "b", "c") as site:

        async def served(headers: Any = None, **more: Any) -> str:
            async with site.post(headers=headers, **more) as answer:
                return str((await answer.json())["id"]).removeprefix("chatcmpl-")

        for ask in ({"headers": {"x-session-id": "s1"}}, {"user": "u1"}, {"content": "how are you?"}):
            homes = {await served(**ask) for _ in range(6)}
            assert len(homes) == 1
        spread = {await served(content=f"question {n}") for n in range(40)}
        assert spread == {"a", "b", "c"}
        home = await served(user="u2")
        site.route(2, **{home: WorkerState.CORDONED})
        assert await served(user="u2") == home
        assert home not in {await served(content=f"new {n}") for n in range(20)}
        site.route(3, **{home: WorkerState.OUT})
        assert await served(user="u2") != home


async def test_a_cordoned_workers_conversation_is_found_by_a_gateway_that_never_saw_it() -> None:
    """A later turn goes where the conversation would have gone; a first turn does not."""
    async with Site("a", "b") as site:
        site.route(2, a=WorkerState.CORDONED)
        begun: set[str] = set()
        later: set[str] = set()
        for n in range(20):
            messages = [{"role": "user", "content": f"hello {n}"}]
            async with site.post(messages=messages) as answer:
                begun.add((await answer.json())["id"])
            messages = [{"role": "user", "content": f"other {n}"}, {"role": "assistant", "content": "yes"}, *messages]
            async with site.post(messages=messages) as answer:
                later.add((await answer.json())["id"])
        assert begun == {"chatcmpl-b"}
        assert later == {"chatcmpl-a", "chatcmpl-b"}


async def test_what_belongs_to_no_session_goes_to_whoever_has_the_least_to_do() -> None:
    """Embeddings avoid a worker that is busy with other requests."""
    async with Site("a", "b") as site:
        site.gateway.desk.guards.load["a"] = 5
        for _ in range(6):
            async with site.post("/v1/embeddings", input="text"):
                pass
        assert not site.stands["a"].requests and len(site.stands["b"].requests) == 6
        del site.gateway.desk.guards.load["a"]


async def test_keys_tell_tenants_apart(tmp_path: Path) -> None:
    """No key and an unknown one are 401 in OpenAI's shape; a key's tenant is on the metrics; workers never see the key."""
    keys, secret = tmp_path / "keys", tmp_path / "worker"
    keys.write_text(f"alice {digest('key-a')}\n", "utf-8")
    secret.write_text("for-workers\n", "utf-8")
    async with Site("a", keys=keys) as site:
        site.gateway.desk.worker_key = b"for-workers"
        for headers in (None, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic key-a"}):
            async with site.post(headers=headers) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (401, "invalid_api_key")
        async with site.http.get(site.url + "/v1/models") as answer:
            assert answer.status == 401
        async with site.post(headers={"Authorization": "Bearer key-a"}) as answer:
            assert answer.status == 200
        assert site.stands["a"].requests[0][0]["Authorization"] == "Bearer for-workers"
        metrics = await site.metrics()
        assert metrics['sentinel_gateway_requests_total{outcome="ok",pool="p",tenant="alice",worker="a"}'] == 1


async def test_a_key_for_the_workers_replaces_whatever_the_client_sent() -> None:
    """SDKs always send a key; where this gateway asks for none and has its own, the worker gets that one and no other."""
    async with Site("a") as site:
        site.gateway.desk.worker_key = b"for-workers"
        async with site.post(headers={"Authorization": "Bearer dummy"}) as answer:
            assert answer.status == 200
        (headers, _), *_ = site.stands["a"].requests
        assert headers.getall("Authorization") == ["Bearer for-workers"]  # type: ignore[attr-defined]


async def test_a_page_of_text_for_a_session_fills_no_memory() -> None:
    """What is remembered of a session is short, whatever the client calls it, and it still stays where it is."""
    async with Site("a", "b", body_max=1 << 24) as site:
        for user in ("x" * 1_000_000, "y" * 65):
            seen = set()
            for n in range(4):
                async with site.post(user=user, content=f"{n}") as answer:
                    seen.add((await answer.json())["id"])
            assert len(seen) == 1
        assert all(len(session) < 100 for session in site.gateway.desk.homes._homes)


async def test_every_line_of_a_list_header_counts() -> None:
    """All ``connection`` lines name hop-by-hop headers, whatever bytes they have; several ``tracestate`` lines are one list."""
    async with Site("a") as site:
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: keep-alive\r\nconnection: x-mine, \xff\r\nx-mine: 1\r\n"
            b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\ntracestate: a=1\r\ntracestate: b=2\r\n"
        )
        body = json.dumps({"model": MODEL, "messages": []}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port)
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert b" 200 " in await reader.readline()
        writer.close()
        ((headers, _),) = site.stands["a"].requests
        assert "x-mine" not in headers and headers["tracestate"].replace(" ", "") == "a=1,b=2"
        await site.free()


async def test_limits_refuse_quickly_and_in_shape() -> None:
    """Past a limit: 503 with Retry-After when no place becomes free in time, and a place that does is taken by whoever waits."""
    async with Site("a", limits=Limits(pool=1), queue=0.2) as site:
        stand = site.stands["a"]
        stand.freeze_after = 0
        first = asyncio.create_task(site.post().__aenter__())
        while not stand.requests:
            await asyncio.sleep(0.01)
        async with site.post() as answer:
            assert answer.status == 503 and answer.headers["Retry-After"]
            assert (await answer.json())["error"]["code"] == "overloaded"
        second = asyncio.create_task(site.post().__aenter__())
        await asyncio.sleep(0.05)
        stand.freeze_after = None
        stand.thawed.set()
        for waiting in (first, second):
            answer = await waiting
            assert answer.status == 200
            answer.release()
        await site.free()


async def test_measurements_are_of_what_the_client_got() -> None:
    """First byte, gaps and rate of a stream are counted once each, per pool and worker."""
    async with Site("a") as site:
        async with site.post(stream=True) as answer:
            await answer.read()
        await site.free()
        metrics = await site.metrics()
        place = '{pool="p",worker="a"}'
        assert metrics[f"sentinel_gateway_first_byte_seconds_count{place}"] == 1
        assert metrics[f"sentinel_gateway_gap_seconds_count{place}"] >= 4
        assert metrics[f"sentinel_gateway_tokens_per_second_count{place}"] == 1
        assert metrics[f"sentinel_gateway_in_flight{place}"] == 0


async def test_a_stop_lets_answers_end() -> None:
    """After stop begins: not ready, no new connection, and streams that are under way arrive to their end."""
    async with Site("a", unready=0.2) as site:
        site.stands["a"].events = 30
        answer = await site.post(stream=True).__aenter__()
        idle = await site.http.get(site.url + "/v1/models")
        await idle.read()
        stopping = asyncio.create_task(site.gateway.stop())
        await asyncio.sleep(0.05)
        async with site.http.get(f"http://127.0.0.1:{site.gateway.admin_port}/healthz") as health:
            assert health.status == 503
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        await stopping
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", site.gateway.port)
        assert site.held == (0, 0)


async def test_a_stop_does_not_wait_for_ever() -> None:
    """What is not over when the drain is gets an error as its last event."""
    async with Site("a", drain=0.2) as site:
        site.stands["a"].events = 100_000
        answer = await site.post(stream=True).__aenter__()
        began = time.monotonic()
        await site.gateway.stop()
        assert time.monotonic() - began < 5
        last = (await answer.read()).split(b"\n\n")
        assert last[-2] == b"data: [DONE]" and json.loads(last[-3][6:])["error"]["code"] == "upstream_stopping"
        assert site.held == (0, 0)

"""Clients that mean no good or know no better: the right status, one error in OpenAI's shape, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sentinel.durations import Duration
from sentinel.gateway.alone import Limits
from sentinel.tokens import digest
from tests.gateway_site import MODEL, Site


def shaped(body: bytes) -> dict[str, Any]:
    """The error in an answer's body; it has every field that the SDKs read."""
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return dict(error)


def split(raw: bytes) -> tuple[int, bytes]:
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/unknown", 404), ("GET", "/", 404), ("POST", "/v1/chat/completions/x", 404), ("GET", "/metrics", 404),
        ("GET", "/v1/chat/completions", 405), ("DELETE", "/v1/embeddings", 405), ("OPTIONS", "/v1/completions", 405),
        ("POST", "/v1/models", 404),
    ],
)  # fmt: skip
async def test_what_is_not_there_is_said_in_openais_shape(method: str, path: str, status: int) -> None:
    """Unknown paths and methods; the admin port's pages are not on the public one."""
    async with Site("a") as site, site.http.request(method, site.url + path) as answer:
        assert answer.status == status
        shaped(await answer.read())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400), (b"{", 400), (b"[]", 400), (b'"x"', 400), (b"null", 400), (b"{}", 400), (b'{"model": 3}', 400),
        (b'{"model": ""}', 400), (b'{"model": "m", "messages": "\xff\xfe"}', 400), (b'{"model": "m"}{}', 400),
        (b"[" * 100_000, 400), (b'{"model": "m", "messages": ' + b"[" * 100_000, 400), (b'{"model": "other"}', 404),
        (b'{"model": "' + b"x" * 100_000 + b'"}', 404), (b"\x1f\x8b\x08", 400), (b'\xef\xbb\xbf{"model": "m"}', 400),
        (b'{"model": "m", "max_tokens": 1e999, "messages": []}', 400),
    ],
)  # fmt: skip
async def test_bodies_that_cannot_be_used(body: bytes, status: int) -> None:
    """No JSON, no object, no model, no UTF-8, nesting without end: a sentence, and no worker ever sees it."""
    async with Site("a") as site:
        async with site.http.post(site.url + "/v1/chat/completions", data=body) as answer:
            assert answer.status == status
            assert len(shaped(await answer.read())["message"]) < 500
        assert not site.stands["a"].requests and site.held == (0, 0)


async def test_a_body_that_is_too_large_is_refused_before_it_is_read() -> None:
    """By its length at once, without a length as soon as it is too much; the answer arrives, and the connection ends."""
    async with Site("a", body_max=100_000) as site:
        raw = await site.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 104857600\r\n\r\n" + b"x" * 50_000)
        status, body = split(raw)
        assert status == 413 and shaped(body)["code"] == "body_too_large"
        chunks = b"".join(b"%x\r\n%b\r\n" % (50_000, b"x" * 50_000) for _ in range(3))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        status, body = split(await site.raw(head + chunks))
        assert status == 413
        shaped(body)
        large = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x" * 90_000}]}).encode()
        async with site.http.post(site.url + "/v1/chat/completions", data=large) as answer:
            assert answer.status == 200


async def test_expect_continue_is_answered() -> None:
    """A client that asks before it sends a large body is told to go on (curl asks); a body that is refused is refused at once."""
    async with Site("a", body_max=10_000) as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port)
        body = b'{"model": "m", "messages": []}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()
        raw = await site.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 20000\r\n\r\n")
        assert split(raw)[0] == 413


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(5000)) + b"\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: nan\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_heads_that_are_none_or_too_much(request_: bytes) -> None:
    """400 (or a closed connection where not even a head came), in OpenAI's shape, and the next client is served."""
    async with Site("a") as site:
        raw = await site.raw(request_)
        if raw:
            status, body = split(raw)
            assert status == 400
            shaped(body)
        assert not site.stands["a"].requests
        async with site.post() as answer:
            assert answer.status == 200


async def test_slow_clients_are_let_go() -> None:
    """A head that never ends, and a body that never comes, hold nothing for long."""
    async with Site("a", keepalive=Duration(0.3), receive=Duration(0.3)) as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port)

        async def trickle() -> None:
            for _ in range(100):
                writer.write(b"X")
                await asyncio.sleep(0.05)

        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n")
        typing = asyncio.create_task(trickle())
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        typing.cancel()
        raw = await site.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        status, body = split(raw)
        assert status == 408
        shaped(body)


async def test_pipelined_requests_are_answered_in_order() -> None:
    """Two requests in one packet get two answers, the first first."""
    one = b'{"model": "m", "messages": []}'
    two = b'{"model": "other", "messages": []}'
    async with Site("a") as site:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
        raw = await site.raw(b"".join(head % (len(body), body) for body in (one, two)))
        assert [int(part[:3]) for part in raw.split(b"HTTP/1.1 ")[1:]] == [200, 404]


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n%b\r\n"


async def test_a_trailer_is_never_the_next_requests_header(tmp_path: Path) -> None:
    """Behind a proxy the next request of a connection may be another user's: it must not be asked with the key of the one before.
    So a request in chunks is the last of its connection, and its answer says that."""
    keys = tmp_path / "keys"
    keys.write_text(f"alice {digest('key-a')}\n", "utf-8")
    body = b'{"model": "m", "messages": []}'
    async with Site("a", keys=keys) as site:
        for key, status in ((b"Authorization: Bearer key-a\r\n", b"200"), (b"", b"401")):
            chunked = CHUNKED % key + b"%x\r\n%b\r\n0\r\nAuthorization: Bearer key-a\r\n\r\n" % (len(body), body)
            raw = await site.raw(chunked + b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert raw.count(b"HTTP/1.1 ") == 1 and raw.startswith(b"HTTP/1.1 " + status)
            assert b"\r\nconnection: close\r\n" in raw.lower()
        assert len(site.stands["a"].requests) == 1


@pytest.mark.parametrize("first", [b"", b"2\r\n{}\r\n"])
async def test_broken_chunks_are_told_at_once(first: bytes) -> None:
    """Also when the request's head, or part of its body, had come in order: 400, long before a body is given up as too late."""
    async with Site("a", receive=Duration(60.0)) as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port)
        writer.write(CHUNKED % b"" + first)
        await asyncio.sleep(0.05)
        writer.write(b"nonsense\r\n")
        async with asyncio.timeout(5):
            status, body = split(await reader.read())
        assert status == 400 and "chunk" in shaped(body)["message"]
        writer.close()


@pytest.mark.parametrize(
    ("path", "status"), [(b"/v1/models", 200), (b"/v1/models/none", 404), (b"/v1/completions", 405), (b"/", 404)]
)
async def test_head_has_no_body(path: bytes, status: int) -> None:
    """What came after the head would be read as the beginning of the next answer on that connection."""
    async with Site("a") as site:
        head = b"HEAD " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n"
        raw = await site.raw(head + b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        first, second, body = raw.split(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 %d " % status) and b"content-length: 0" not in first
        assert second.startswith(b"HTTP/1.1 200 ") and json.loads(body)["data"]


async def test_what_is_refused_without_a_worker_is_counted() -> None:
    """By status, which is of the gateway's own choosing; also what is no HTTP at all."""
    async with Site("a") as site:
        await site.raw(b"nonsense\r\n\r\n")
        for body, status in ((b"{", 400), (b'{"model": "other"}', 404)):
            async with site.http.post(site.url + "/v1/completions", data=body) as answer:
                assert answer.status == status
        async with site.http.get(site.url + "/nowhere") as answer:
            assert answer.status == 404
        metrics = await site.metrics()
        counted = {status: metrics[f'sentinel_gateway_errors_total{{status="{status}"}}'] for status in (400, 401, 404, 413, 500)}
        assert counted == {400: 2, 401: 0, 404: 2, 413: 0, 500: 0}


steps = st.lists(
    st.tuples(
        st.sampled_from(["ok", "status", "busy", "cut", "freeze", "garbage", "garbage later", "half an event", "slow"]),
        st.booleans(),  # streamed
        st.sampled_from(["stays", "leaves", "leaves late", "no JSON", "no UTF-8", "no model", "too large"]),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps)
def test_nothing_is_ever_held_in_the_end(plan: list[tuple[str, bool, str, int]]) -> None:
    """Whatever workers and clients do to each other, when all is over no slot is held, and nothing counts as in flight."""

    async def run() -> None:
        times = {"stall": Duration(0.1), "first_byte": Duration(0.1), "answer": Duration(0.1), "queue": Duration(0.05)}
        async with Site("a", "b", limits=Limits(pool=3), body_max=10_000, **times) as site:

            async def one(streamed: bool, client: str) -> None:
                task = asyncio.create_task(_fetch(site, streamed, _BODIES.get(client)))
                if client.startswith("leaves"):
                    await asyncio.sleep(0.001 if client == "leaves" else 0.03)
                    task.cancel()
                await asyncio.gather(task, return_exceptions=True)

            waiting = []
            for how, streamed, client, after in plan:
                for stand in site.stands.values():
                    stand.status = {"status": 500, "busy": 503}.get(how, 200)
                    stand.freeze_after = after if how == "freeze" else None
                    stand.cut_after = after if how == "cut" else None
                    stand.pause_s = 0.05 if how == "slow" else 0.001
                    stand.handler = _HANDLERS.get(how)
                waiting.append(asyncio.create_task(one(streamed, client)))
                await asyncio.sleep(0.002)
            await asyncio.gather(*waiting)
            for stand in site.stands.values():
                stand.thawed.set()
            await site.free()

    asyncio.run(run())


_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n"


def _writes(*parts: bytes) -> Any:
    async def handler(request: Any) -> Any:
        for part in parts:
            request.transport.write(part)
            await asyncio.sleep(0.005)
        request.transport.close()

    return handler


_HANDLERS = {
    "garbage": _writes(_HEAD + b"3\r\nabcdef"),
    "garbage later": _writes(_HEAD + b"9\r\ndata: 1\n\n\r\n", b"\xff\xfe\r\n\r\n"),
    "half an event": _writes(_HEAD + b"9\r\ndata: 1\n\n\r\n", b"6\r\ndata: \r\n"),
}
_BODIES = {"no JSON": b"{", "no UTF-8": b'{"model": "m", "messages": "\xff"}', "no model": b"{}", "too large": b"x" * 20_000}


async def _fetch(site: Site, streamed: bool, body: bytes | None) -> None:
    url = site.url + "/v1/chat/completions"
    async with site.post(stream=streamed) if body is None else site.http.post(url, data=body) as answer:
        await answer.read()

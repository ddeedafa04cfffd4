"""Answers that break after they have begun, in each form that an answer has: whose failure it was, and what its client sees."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from aiohttp import web

from sentinel.durations import Duration
from sentinel.gateway.framing import chunk
from sentinel.gateway.guards import Outcome
from tests.gateway_site import MODEL, Handler, Site, piece
from tests.unit.test_gateway_failures import Heard, events, home_of
from tests.unit.test_gateway_opening import ANNOUNCED, stream

LARGE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 1000
IN_CHUNKS = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNKED = IN_CHUNKS + chunk(b"[1, " * 90_000)
SHORT = IN_CHUNKS + chunk(b'{"id": "')
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
COUNTED = 'pool="p",tenant="anonymous",worker="a"'


def begins(with_: bytes, how: str) -> Handler:
    """A worker whose answer begins so, and then breaks."""

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport
        request.transport.write(with_)
        await asyncio.sleep(0.05)
        if how == "reset":
            request.transport.abort()
        elif how == "closed":
            request.transport.close()
        elif how == "garbled":
            request.transport.write(b"zz\r\n")
        await asyncio.sleep(5)
        return web.Response()

    return handler


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory, program: Callable[[str], Path]) -> dict[str, Any]:
    """A certificate for the gateway's public port."""
    cert, key = (tmp_path_factory.mktemp("tls") / name for name in ("cert", "key"))
    new = [program("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*new, "-subj", "/CN=gateway", "-keyout", key, "-out", cert], check=True, capture_output=True)
    return {"tls_cert": cert, "tls_key": key}


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize(
    ("begun", "how", "tls"),
    [
        (CHUNKED, "reset", False), (CHUNKED, "closed", False), (CHUNKED, "stall", False), (CHUNKED, "garbled", False),
        (LARGE, "reset", False), (LARGE, "stall", False), (CHUNKED, "reset", True), (LARGE, "stall", True),
    ],
)  # fmt: skip
def test_an_answer_that_is_no_stream_and_breaks_is_its_workers_failure(
    begun: bytes, how: str, loop: Any, certified: dict[str, Any], *, tls: bool
) -> None:
    """Its client sees a broken connection, never an end; the breaker hears of it, and it is counted as broken."""

    async def run() -> None:
        async with Site("a", stall=Duration(0.3), **certified if tls else {}) as site:
            site.stands["a"].handler = begins(begun, how)
            heard = Heard(site)
            url = f"http{'s' if tls else ''}://127.0.0.1:{site.gateway.port}/v1/chat/completions"
            with pytest.raises(aiohttp.ClientError):
                async with site.http.post(url, json={"model": MODEL, "messages": []}, ssl=False) as answer:
                    await answer.read()
            await site.free()
            assert heard.outcomes == [("a", Outcome.FAILED)]
            assert (await site.metrics())[f'sentinel_gateway_requests_total{{outcome="broken",{COUNTED}}}'] == 1

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


def failed(code: str) -> bytes:
    """How Dynamo 1.6.1 ends a response whose worker was killed (as recorded, shortened)."""
    error = {"code": code, "message": "own words"}
    told = {"type": "response.failed", "response": {"id": "resp_1", "error": error, "status": "failed"}}
    return b"event: response.failed\ndata: " + json.dumps(told).encode() + b"\n\n"


DELTA = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"x"}\n\n'


@pytest.mark.parametrize("before", [b"", b":\n\n", b":\n\n" * 12])
async def test_a_response_that_fails_before_its_first_word_is_tried_elsewhere(before: bytes) -> None:
    """Announced, kept alive and failed: nothing was shown, so the client gets the other worker's answer."""
    async with Site("a", "b") as site:
        home = await home_of(site, "u")
        other = "b" if home == "a" else "a"
        site.stands[home].handler = stream(ANNOUNCED, before or ANNOUNCED, failed("server_error"))
        site.stands[other].handler = stream(ANNOUNCED, DELTA)
        heard = Heard(site)
        async with site.post("/v1/responses", user="u", stream=True, input="hi") as answer:
            assert await answer.read() == ANNOUNCED + DELTA + b"data: [DONE]\n\n"
        await site.free()
        assert sorted(heard.outcomes) == sorted([(home, Outcome.FAILED), (other, Outcome.FINE)])


@pytest.mark.parametrize(
    ("code", "outcome", "word"),
    [
        ("server_error", Outcome.FAILED, "broken"),
        ("rate_limit_exceeded", Outcome.BUSY, "broken"),
        ("invalid_prompt", Outcome.FINE, "client_error"),
        ("invalid_image_url", Outcome.FINE, "client_error"),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
async def test_a_response_that_fails_after_it_has_begun_is_judged_by_its_code(
    code: str, outcome: Outcome, word: str, *, apart: bool
) -> None:
    """The client gets the worker's own words; a client's mistake says nothing about the worker."""
    ending = [failed(code)] if apart else [DELTA + failed(code)]
    async with Site("a") as site:
        site.stands["a"].handler = stream(ANNOUNCED, DELTA, DELTA, DELTA, *ending)
        heard = Heard(site)
        async with site.post("/v1/responses", stream=True, input="hi") as answer:
            assert (await answer.read()).endswith(DELTA + failed(code) + b"data: [DONE]\n\n")
        await site.free()
        assert heard.outcomes == [("a", outcome)]
        assert (await site.metrics())[f'sentinel_gateway_requests_total{{outcome="{word}",{COUNTED}}}'] == 1


async def test_a_response_that_ends_at_its_limit_is_fine() -> None:
    """``response.incomplete`` says that the tokens were used up."""
    ending = b'event: response.incomplete\ndata: {"type":"response.incomplete","response":{"error":null}}\n\n'
    async with Site("a") as site:
        site.stands["a"].handler = stream(ANNOUNCED, DELTA, ending)
        heard = Heard(site)
        async with site.post("/v1/responses", stream=True, input="hi") as answer:
            assert ending in await answer.read()
        await site.free()
        assert heard.outcomes == [("a", Outcome.FINE)]


async def test_garbage_before_the_first_word_is_tried_elsewhere() -> None:
    """A stream's head, and then no HTTP: nothing was shown."""
    async with Site("a", "b") as site:
        home = await home_of(site, "u")
        site.stands[home].handler = begins(EVENTS + b"zz\r\n", "garbled")
        heard = Heard(site)
        async with site.post(user="u", stream=True) as answer:
            assert b"chatcmpl-" in await answer.read()
        await site.free()
        assert (home, Outcome.FAILED) in heard.outcomes


async def test_an_engine_that_stands_still_behind_a_frontend_that_keeps_alive_has_stalled() -> None:
    """Comments (Dynamo's DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS) are passed on, and are no word of the engine."""

    async def handler(request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        await out.write(f"data: {json.dumps(piece('word', 'a'))}\n\n".encode())
        for _ in range(100):
            await asyncio.sleep(0.05)
            await out.write(b":\n\n")
        return out

    async with Site("a", stall=Duration(0.4)) as site:
        site.stands["a"].handler = handler
        heard = Heard(site)
        async with site.post(stream=True) as answer:
            body = await answer.read()
        assert 1 < body.count(b":\n\n") < 100
        assert events(body.replace(b":\n\n", b""))[1]["error"]["code"] == "upstream_stall"
        await site.free()
        assert heard.outcomes == [("a", Outcome.FAILED)]


@pytest.mark.parametrize("coding", ["gzip", "identity"])
async def test_a_compressed_stream_is_passed_on_as_it_comes(coding: str) -> None:
    """Where events end cannot be seen in it, so nothing is held back and nothing added; one that says identity is a stream."""
    pieces = [f'data: {{"n": {n}}}\n\n'.encode() for n in range(3)]
    coded = [gzip.compress(part) for part in pieces] if coding == "gzip" else pieces
    taken = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Content-Encoding": coding})
        await out.prepare(request)
        for part in coded[:2]:
            await out.write(part)
            await taken.wait()
            taken.clear()
        assert request.transport
        request.transport.abort()
        return out

    async with Site("a") as site, aiohttp.ClientSession(auto_decompress=False) as http:
        site.stands["a"].handler = handler
        heard = Heard(site)
        body = {"model": MODEL, "messages": [], "stream": True}
        async with http.post(site.url + "/v1/chat/completions", json=body) as answer:
            for part in coded[:2]:
                assert await asyncio.wait_for(answer.content.readexactly(len(part)), 2) == part
                taken.set()
            if coding == "gzip":
                with pytest.raises(aiohttp.ClientError):
                    await answer.read()
            else:
                assert b'"error"' in await answer.read()
        await site.free()
        assert heard.outcomes == [("a", Outcome.FAILED)]


async def pour(request: web.Request) -> web.StreamResponse:
    """20 MB of events, far more than sockets and transports hold."""
    out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await out.prepare(request)
    for _ in range(40_000):
        await out.write(b"data: " + b"x" * 500 + b"\n\n")
    return out


def asking(port: int, *, tls: bool) -> socket.socket:
    """A client that has asked for a stream, and takes little ahead of its reader."""
    bare = socket.socket()
    bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    bare.connect(("127.0.0.1", port))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client = context.wrap_socket(bare) if tls else bare
    body = json.dumps({"model": MODEL, "messages": [], "stream": True}).encode()
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    return client


def sip(client: socket.socket) -> None:
    for _ in range(75):
        assert client.recv(4096)
        time.sleep(0.03)


@pytest.mark.parametrize("tls", [False, True])
async def test_a_client_that_reads_slowly_is_not_one_that_takes_nothing(certified: dict[str, Any], *, tls: bool) -> None:
    """Far slower than its worker, it goes on reading past many stalls; when it stops, it is let go, and nobody is blamed."""
    async with Site("a", stall=Duration(0.6), **certified if tls else {}) as site:
        site.stands["a"].handler = pour
        heard = Heard(site)
        client = await asyncio.to_thread(asking, site.gateway.port, tls=tls)
        await asyncio.to_thread(sip, client)
        assert site.gateway.active and not heard.outcomes
        await site.free()
        assert heard.outcomes == [("a", Outcome.IGNORED)]
        client.close()


@pytest.mark.parametrize("code", [503, 529])
async def test_an_answer_that_had_begun_was_not_turned_away(code: int) -> None:
    """What is back-pressure at first is a failure later: Dynamo tells 503 of a worker that died in the middle."""
    told = b'data: {"error": {"message": "gone", "code": %d}}\n\n' % code
    async with Site("a") as site:
        site.stands["a"].handler = stream(b'data: {"choices": []}\n\n', told)
        heard = Heard(site)
        async with site.post(stream=True) as answer:
            await answer.read()
        await site.free()
        assert heard.outcomes == [("a", Outcome.FAILED)]


@pytest.mark.parametrize("how", ["reset", "closed", "garbled"])
async def test_a_whole_answer_in_chunks_is_saved_as_a_whole(how: str) -> None:
    """Dynamo sends JSON in chunks: where it breaks midway nothing was shown, and another worker makes it."""
    async with Site("a", "b") as site:
        home = await home_of(site, "u")
        site.stands[home].handler = begins(SHORT, how)
        heard = Heard(site)
        async with site.post(user="u") as answer:
            assert answer.status == 200 and (await answer.json())["id"] != f"chatcmpl-{home}"
        await site.free()
        assert (home, Outcome.FAILED) in heard.outcomes

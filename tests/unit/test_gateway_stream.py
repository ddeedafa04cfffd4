"""Streams as they pass: a client that takes nothing holds its worker back, and an error that a worker tells is counted."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, cast

import pytest
from aiohttp import web

from sentinel.gateway.classify import Trouble
from sentinel.gateway.framing import LAST_CHUNK, Body, chunk, parse_head
from sentinel.gateway.meters import Flow
from sentinel.gateway.stream import Relay
from tests.gateway_site import MODEL, Site

if TYPE_CHECKING:
    from sentinel.gateway.front import Client
    from sentinel.gateway.upstream import Connection

EVENT = b"data: " + b"x" * 500 + b"\n\n"
EVENTS = 40_000  # 20 MB: far more than sockets and transports hold


async def test_a_slow_client_holds_the_worker_back() -> None:
    """While a client reads nothing the worker cannot write on; when it reads again it gets every event, and all is given back."""
    written = 0

    async def pour(request: web.Request) -> web.StreamResponse:
        nonlocal written
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for _ in range(EVENTS):
            await out.write(EVENT)
            written += 1
        await out.write(b"data: [DONE]\n\n")
        return out

    async with Site("a") as site:
        site.stands["a"].handler = pour
        reader, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port, limit=1 << 16)
        body = json.dumps({"model": MODEL, "messages": [], "stream": True}).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        seen = -1
        while seen != written or not written:  # until it stands still
            seen = written
            await asyncio.sleep(0.2)
        assert written < EVENTS, "it wrote on although nobody read"
        got = bytearray()
        while not got.endswith(b"0\r\n\r\n"):
            part = await reader.read(1 << 16)
            assert part
            got += part
        assert written == EVENTS and got.count(EVENT) == EVENTS and b"[DONE]" in got[-40:]
        await site.free()
        writer.close()


async def test_an_error_that_the_worker_tells_is_counted_however_its_end_arrives() -> None:
    """An error event is passed on as it is and counted as the worker's, also where the last chunk comes by itself."""

    async def fail(request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        await out.write(EVENT)
        await out.write(b'data: {"error": {"message": "out of memory"}}\n\n')
        await asyncio.sleep(0.05)
        return out

    async with Site("a") as site:
        site.stands["a"].handler = fail
        async with site.post(stream=True) as answer:
            assert (await answer.read()).endswith(b'"out of memory"}}\n\n')
        await site.free()
        counted = await site.metrics()
        assert counted['sentinel_gateway_stream_errors_total{pool="p",why="worker_error",worker="a"}'] == 1.0


DELTA = b'data: {"id":"1","choices":[{"delta":{"content":"x"}}]}\n\n'
ERROR = b'data: {"error":{"message":"out of memory"}}\n\n'
DONE = b"data: [DONE]\n\n"
RESPONSE = b'event: response.output_text.delta\ndata: {"delta":"x"}\n\n'


@pytest.mark.parametrize(
    ("pieces", "events", "told"),
    [
        ([DELTA] * 5 + [DONE], 6, False),
        ([DELTA] * 5 + [ERROR], 6, True),
        ([DELTA] * 5 + [ERROR, DONE], 7, True),
        ([DELTA, DELTA + DELTA, DELTA + ERROR, DONE], 6, True),
        ([DELTA, ERROR, DELTA, DELTA, DONE], 5, False),
        ([part.replace(b"\n", b"\r\n") for part in (DELTA, DELTA, DELTA, ERROR, DONE)], 5, True),
        ([RESPONSE] * 4 + [RESPONSE + RESPONSE, b'event: error\ndata: {"message":"x"}\n\n'], 7, True),
        ([RESPONSE] * 4 + [b'event: response.failed\ndata: {"response":{}}\n\n'], 5, True),
        ([RESPONSE] * 4 + [b'event: response.failed\ndata: {"response":{}}\n\n', DONE], 6, True),
        ([RESPONSE] * 4 + [b'event: response.incomplete\ndata: {"response":{}}\n\n', DONE], 6, False),
        ([RESPONSE] * 4 + [b'event: response.completed\ndata: {"response":{}}\n\n'], 5, False),
    ],
)
@pytest.mark.parametrize("size", [0, 1, 7, 40])
async def test_events_are_counted_and_an_error_is_seen_however_they_arrive(
    pieces: list[bytes], events: int, told: bool, size: int
) -> None:
    """Whichever way through the relay its bytes take (``size`` at a time; 0: a chunk), a stream's events all count, what arrives is
    what was sent, and only an error at its end is the worker's."""
    chunks = [*map(chunk, pieces), LAST_CHUNK]
    arrived = [b"".join(chunks)[at : at + size] for at in range(0, len(b"".join(chunks)), size)] if size else chunks
    flow, ends = Flow(), Ends()
    head = parse_head(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked")
    relay = Relay(cast("Client", ends), cast("Connection", ends), head, flow, stall_s=60.0)
    relay.start()
    for part in arrived:
        relay.data_received(part)
    assert (relay.events, relay.ended.result()) == (events, Trouble.WORKER_ERROR if told else None)
    body = Body(head)
    assert body.feed(bytes(ends.got)) == b"".join(pieces) and body.done
    flow.fold()
    if not size:
        assert sum(flow.gaps.counts) == len(pieces) - 1


@pytest.mark.parametrize("kind", [b"text/event-stream", b"application/json"])
async def test_only_streams_have_gaps(kind: bytes) -> None:
    """The pieces of a large answer are no tokens, and nothing of them is in the histogram of what lies between two."""
    flow, ends = Flow(), Ends()
    head = parse_head(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked" % kind)
    relay = Relay(cast("Client", ends), cast("Connection", ends), head, flow, stall_s=60.0)
    relay.start()
    for part in (chunk(DELTA), chunk(DELTA), chunk(DELTA) + LAST_CHUNK):
        relay.data_received(part)
    flow.fold()
    assert sum(flow.gaps.counts) == (2 if kind.startswith(b"text") else 0)


class Ends:
    """Both connections of a relay, as far as it uses them."""

    writing_paused = closed = False
    relay: Relay | None = None

    def __init__(self) -> None:
        self.got = bytearray()
        self.out = self

    def write(self, data: bytes) -> None:
        self.got += data

    def take(self, relay: Relay) -> bytes:
        return b""

    def done(self) -> None:
        """The worker's connection may be kept."""

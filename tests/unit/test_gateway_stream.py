"""Streams as they pass: a client that takes nothing holds its worker back, and an error that a worker tells is counted."""

from __future__ import annotations

import asyncio
import json

from aiohttp import web

from tests.gateway_site import MODEL, Site

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

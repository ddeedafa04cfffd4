"""Which connections, to a worker and of a client, are kept for the next request, and which are not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from sentinel.durations import Duration
from sentinel.gateway.framing import parse_head
from sentinel.gateway.opening import opening
from sentinel.model import Routes
from tests.gateway_site import MODEL, Site

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Raw:
    """A worker that writes ``answer`` for every request, as it is. ``asked``: requests by connection; ``go``: before it answers."""

    def __init__(self, answer: bytes) -> None:
        self.answer, self.go = answer, asyncio.Event()
        self.asked: list[int] = []
        self.closed = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append(0)
        mine = len(self.asked) - 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
                await reader.readexactly(int(length.partition(b":")[2]))
                self.asked[mine] += 1
                await self.go.wait()
                writer.write(self.answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed += 1
        finally:
            writer.close()


@asynccontextmanager
async def raw(site: Site, answer: bytes) -> AsyncIterator[Raw]:
    """In place of the site's only worker."""
    worker = Raw(answer)
    stand = site.stands["a"]
    await stand.stop()
    server = await asyncio.start_server(worker.handle, "127.0.0.1", 0)
    stand.port = server.sockets[0].getsockname()[1]
    site.route(2)
    try:
        yield worker
    finally:
        worker.go.set()
        server.close()


async def ask(site: Site) -> int:
    async with site.post() as answer:
        await answer.read()
        return int(answer.status)


@pytest.mark.parametrize(
    ("answer", "connections"),
    [
        (OK, 1), (b"HTTP/1.1 204 No Content\r\n\r\n", 1), (OK + b"HTTP/1.1", 3), (b"HTTP/1.1 204 No Content\r\n\r\n" + OK, 3),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n" + OK, 3),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n" + OK, 3),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", 1),
    ],
)  # fmt: skip
async def test_a_connection_with_something_behind_the_answer_is_not_used_again(answer: bytes, connections: int) -> None:
    """Nobody asked for it, so it would be taken for the next answer."""
    async with Site("a") as site, raw(site, answer) as worker:
        worker.go.set()
        assert len({await ask(site) for _ in range(3)}) == 1
        assert len(worker.asked) == connections and sum(worker.asked) == 3


async def test_a_worker_that_left_the_table_keeps_no_connection() -> None:
    """What was in flight goes to its end, and is not kept for a next request that never comes."""
    async with Site("a") as site, raw(site, OK) as worker:
        asking = asyncio.create_task(ask(site))
        while not sum(worker.asked):
            await asyncio.sleep(0.01)
        site.gateway.obey(Routes(version=3))
        worker.go.set()
        assert await asking == 200
        async with asyncio.timeout(5):
            while not worker.closed:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["cut", "stall", "error"])
async def test_a_client_keeps_its_connection_behind_a_broken_stream(how: str) -> None:
    """Nothing in its head said that the connection would end, and its end was told: the next request on it is answered, too."""

    async def handler(request: web.Request) -> web.StreamResponse:
        if not (await request.json()).get("stream"):
            return web.json_response({"id": "next"})
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        await out.write(b'data: {"a": 1}\n\n')
        await asyncio.sleep(0.02)
        if how == "error":
            await out.write(b'data: {"error": {"message": "out of memory"}}\n\n')
            return out
        if how == "stall":
            await asyncio.sleep(5)
        assert request.transport
        request.transport.abort()
        return out

    async with Site("a", stall=Duration(0.3)) as site:
        site.stands["a"].handler = handler
        bodies = [json.dumps({"model": MODEL, "messages": [], "stream": stream}).encode() for stream in (True, False)]
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
        got = await site.raw(b"".join(head % (len(body), body) for body in bodies))
        assert got.count(b"HTTP/1.1 200 OK") == 2 and b'"error"' in got and b'{"id": "next"}' in got
        assert b"connection: close" not in got.lower()


@pytest.mark.parametrize(("method", "path", "status"), [("POST", "/v1/nothing", 404), ("PUT", "/v1/completions", 405)])
@pytest.mark.parametrize("sent", [100, 100_000])
async def test_a_refusal_says_whether_the_connection_ends(method: str, path: str, status: int, sent: int) -> None:
    """A request that is refused before all of it came ends its connection, and the answer says so; one that came whole does not."""
    async with Site("a") as site:
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n".encode()
        after = b"" if sent < 100_000 else b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port)
        for part in (head[:20], head[20:] + b"x" * sent):
            writer.write(part)
            await asyncio.sleep(0.02)
        first = await reader.readuntil(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 %d" % status)
        if b"connection: close" not in first.lower():
            assert sent == 100_000
            writer.write(after)
            assert b"HTTP/1.1 200 OK" in await reader.readuntil(b"HTTP/1.1 200 OK")
        writer.close()


def test_who_announces_for_ever_has_answered() -> None:
    """What is held back before an answer stays short, however much a worker announces."""
    head = parse_head(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked")
    event = b"event: response.in_progress\ndata: {}\n\n"
    early, pieces = b"", 0
    while opening(head, early) is None:
        early += b"%x\r\n%b\r\n" % (len(event), event)
        pieces += 1
        assert pieces < 100
    assert opening(head, early) == 0 and pieces > 3

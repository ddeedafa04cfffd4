"""Two proxies to compare with: what one writes in an afternoon with aiohttp, and what this machine makes any Python proxy pay.

``naive``: aiohttp's server and client on uvloop, worker by worker in turn, nothing else. ``bare``: bytes from socket to socket,
one connection to a worker behind each of a client's; it parses nothing and so could not even choose a worker: a floor, no gateway.
Run as a script: ``plain.py naive|bare PORT '[worker ports]'``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys

import aiohttp
import uvloop
from aiohttp import web


async def naive(port: int, behind: list[int]) -> None:
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))
    turn = itertools.cycle(behind)

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length")}
        url = f"http://127.0.0.1:{next(turn)}{request.path_qs}"
        async with session.request(request.method, url, headers=headers, data=body) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in ("transfer-encoding", "connection")}
            out = web.StreamResponse(status=answer.status, headers=kept)
            await out.prepare(request)
            async for part in answer.content.iter_any():
                await out.write(part)
            await out.write_eof()
            return out

    app = web.Application(client_max_size=1 << 25)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    await asyncio.Event().wait()


class Up(asyncio.Protocol):
    def __init__(self, down: asyncio.Transport) -> None:
        self.down = down

    def data_received(self, data: bytes) -> None:
        self.down.write(data)


class Down(asyncio.Protocol):
    """One connection of a client, with one to a worker behind it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.up: asyncio.Task[asyncio.Transport] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.up = asyncio.get_running_loop().create_task(self.dial())

    async def dial(self) -> asyncio.Transport:
        made, _ = await asyncio.get_running_loop().create_connection(lambda: Up(self.transport), "127.0.0.1", self.port)
        return made

    def data_received(self, data: bytes) -> None:
        assert self.up
        if self.up.done():
            self.up.result().write(data)
        else:
            self.up.add_done_callback(lambda up: up.result().write(data))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.up and self.up.done() and not self.up.cancelled():
            self.up.result().abort()


async def bare(port: int, behind: list[int]) -> None:
    turn = itertools.cycle(behind)
    await asyncio.get_running_loop().create_server(lambda: Down(next(turn)), "127.0.0.1", port, backlog=1024)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run({"naive": naive, "bare": bare}[sys.argv[1]](int(sys.argv[2]), json.loads(sys.argv[3])))

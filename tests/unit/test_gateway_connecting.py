"""Connecting to a worker: how long is waited for one that takes no connection, and that a connection nobody wants is closed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

import pytest

from sentinel.gateway.classify import Trouble
from sentinel.gateway.upstream import Broken, Origin


class Listening:
    """Takes connections; ``open`` are those that their client has not closed."""

    def __init__(self) -> None:
        self.taken = self.open = 0
        self.port = 0

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.taken, self.open = self.taken + 1, self.open + 1
        try:
            with contextlib.suppress(ConnectionError):
                await reader.read()
        finally:
            self.open -= 1
            writer.close()


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[Listening]:
    made = Listening()
    server = await asyncio.start_server(made.take, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made


def origin(port: int, connect_s: float) -> Origin:
    return Origin(f"http://127.0.0.1:{port}", connect_s=connect_s, idle_s=4.0)


async def starve(seconds: float) -> None:
    """Let every turn of the loop take so long."""
    while True:
        time.sleep(seconds)
        await asyncio.sleep(0)


async def test_a_process_that_hardly_runs_still_sees_that_it_was_taken() -> None:
    """Where a turn of the loop takes longer than its whole patience, a worker that takes connections is not said to take none."""
    async with listening() as worker:
        starving = asyncio.create_task(starve(0.3))
        try:
            made = await origin(worker.port, 0.25).connection()
        finally:
            starving.cancel()
        made.abort()


async def test_a_worker_that_takes_no_connection_is_told_in_time() -> None:
    """Its queue is full, as of a process that hangs: that is a refusal after its patience, and not before."""
    with socket.socket() as hung, contextlib.ExitStack() as stack:
        hung.bind(("127.0.0.1", 0))
        hung.listen(0)
        for _ in range(4):  # fill what the kernel queues
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(hung.getsockname())
        began = time.monotonic()
        with pytest.raises(Broken, match=r"no connection within 0\.6 s") as broken:
            await origin(hung.getsockname()[1], 0.6).connection()
        assert broken.value.trouble is Trouble.REFUSED and time.monotonic() - began >= 0.59


@pytest.mark.parametrize("turns", range(8))
async def test_a_connection_that_nobody_wants_any_more_is_closed(turns: int) -> None:
    """Whoever leaves while it is made, in whatever moment, leaves no connection behind."""
    async with listening() as worker:
        asking = asyncio.create_task(origin(worker.port, 2.0).connection())
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        try:
            (await asking).abort()
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
        while worker.open:
            await asyncio.sleep(0.01)

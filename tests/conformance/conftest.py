"""The servers that the store's one suite runs on: Debian's Redis 7.0 and the embedded Valkey, each a real process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio
from redis.asyncio import Redis
from redis.exceptions import RedisError

from sentinel.config import Duration, StoreSettings
from sentinel.store import Store, StoreError, open_store
from sentinel.store.embedded import Embedded

T = TypeVar("T")


class StoreServer:
    """One server of this test's own, with append-only persistence, that may be paused, killed and filled with garbage."""

    def __init__(self, directory: Path, redis_server: Path | None) -> None:
        self._directory = directory
        self._program = redis_server
        self._process: subprocess.Popen[bytes] | None = None
        self._embedded = Embedded(directory)
        self._stores: list[Store] = []
        socket = directory / ("redis.sock" if redis_server else "valkey.sock")
        self.url = f"unix://{socket}" if redis_server else f"embedded:{directory}"
        self.raw = Redis(unix_socket_path=str(socket))
        self.pid = 0

    async def start(self) -> None:
        if self._program:
            argv = [self._program, "--port", "0", "--unixsocket", "redis.sock", "--appendonly", "yes", "--save", ""]
            self._process = subprocess.Popen(argv, cwd=self._directory, stdout=subprocess.DEVNULL)
        elif self._embedded.pid is None:
            await self._embedded.start()
        await self.answers()

    async def answers(self) -> None:
        """Wait until it answers, and know which process that is."""
        while True:
            try:
                self.pid = int((await self.raw.info("server"))["process_id"])
                return
            except (RedisError, OSError):
                await asyncio.sleep(0.01)

    async def open(self, timeout: float = 2.0, prefix: str = "sentinel") -> Store:
        """One more store on this server, as another process would open it; closed when the test ends."""
        store = await open_store(StoreSettings(url=self.url, prefix=prefix, timeout=Duration(timeout)))
        self._stores.append(store)
        return store

    async def told(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The first answer that is one: asks again for as long as the store could not tell."""
        while True:
            try:
                return await ask()
            except StoreError:
                await asyncio.sleep(0.02)

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL. The embedded one is started anew by whoever uses it; Redis stays away until ``start``."""
        os.kill(self.pid, signal.SIGKILL)
        if self._process:
            self._process.wait()

    async def restart(self) -> None:
        if self._program:
            await self.start()
        else:
            await self.answers()

    async def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.resume()
        for store in self._stores:
            await store.close()
        await self.raw.aclose()
        await self._embedded.stop()
        if self._process:
            self._process.kill()
            self._process.wait()


@pytest_asyncio.fixture(params=["redis", "embedded"])
async def store_server(request: pytest.FixtureRequest, program: Callable[[str], Path]) -> AsyncIterator[StoreServer]:
    redis_server = program("redis-server") if request.param == "redis" else None
    directory = Path(tempfile.mkdtemp(prefix="sentinel-"))  # short enough for a unix socket, which tmp_path may not be
    server = StoreServer(directory, redis_server)
    try:
        await server.start()
        yield server
    finally:
        await server.close()
        shutil.rmtree(directory, ignore_errors=True)

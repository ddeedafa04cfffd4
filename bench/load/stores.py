"""The stores that benchmarks run on: Debian's redis-server where there is one, and the embedded Valkey.

What always holds: both are append-only and on a unix socket; a store that is handed out answers, and its server ends with it. The
embedded one syncs to disk before each answer, redis-server once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

from sentinel.config import StoreSettings
from sentinel.durations import Duration
from sentinel.store import Store, StoreError, open_store

ANSWERS_S = 30.0


def redis_program() -> str | None:
    """Debian keeps it in sbin, which an ordinary user's PATH leaves out."""
    return shutil.which("redis-server", path="/usr/local/bin:/usr/bin:/usr/sbin")


@contextlib.asynccontextmanager
async def opened(url: str, timeout_s: float = 5.0) -> AsyncIterator[Store]:
    """A client of it, once it answers. The embedded server is then this process's, and no child's."""
    store = await open_store(StoreSettings(url=url, timeout=Duration(timeout_s)))
    try:
        async with asyncio.timeout(ANSWERS_S):
            while True:
                with contextlib.suppress(StoreError):
                    await store.ping()
                    break
                await asyncio.sleep(0.02)
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def redis(program: str, folder: Path, timeout_s: float = 5.0) -> AsyncIterator[tuple[str, Store]]:
    """A redis-server of its own in ``folder``: its URL and a client."""
    argv = [program, "--port", "0", "--unixsocket", "redis.sock", "--appendonly", "yes", "--save", ""]
    server = subprocess.Popen(argv, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        url = f"unix://{folder}/redis.sock"
        async with opened(url, timeout_s) as store:
            yield url, store
    finally:
        server.kill()
        server.wait()


@contextlib.asynccontextmanager
async def embedded(folder: Path, timeout_s: float = 5.0) -> AsyncIterator[tuple[str, Store]]:
    url = f"embedded:{folder}/store"
    async with opened(url, timeout_s) as store:
        yield url, store


async def each(folder: Path) -> AsyncIterator[tuple[str, str]]:
    """``("redis", url)`` where there is one, then ``("embedded", url)``; each runs until the next is asked for."""
    if program := redis_program():
        async with redis(program, folder) as (url, _):
            yield "redis", url
    async with embedded(folder) as (url, _):
        yield "embedded", url


@contextlib.asynccontextmanager
async def likely(folder: Path) -> AsyncIterator[tuple[str, str, Store]]:
    """What a site would have: redis-server, else the embedded one; says which, its URL, and a client."""
    if program := redis_program():
        async with redis(program, folder) as (url, store):
            yield "redis-server", url, store
    else:
        async with embedded(folder) as (url, store):
            yield "embedded Valkey", url, store

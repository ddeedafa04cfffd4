"""What the store costs the controller: commits, lease renewals, loading, and how soon a published route is seen.

One process, one client, one question at a time, as the leading controller asks; the embedded Valkey, and Debian's
redis-server beside it where there is one, both on a unix socket and append-only. The embedded one syncs to disk before each
answer; ``embedded_everysec`` is the same with a sync every second, as redis-server does by default, to know what that costs.
Medians of three runs; the last line is one JSON object. Rates are per second, times are milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from redis.asyncio import Redis

from sentinel.config import Duration, StoreSettings
from sentinel.model import Drain, Response, Role, RouteEntry, RoutePool, Routes, WorkerState
from sentinel.store import PublishRoutes, Put, Store, StoreError, open_store

DRAIN = Drain(id="d", worker="decode-01", response=Response.DRAIN, reason="row remap pending on GPU 2", requested_at=1.8e9)
TABLE = tuple(
    RoutePool(
        pool=f"pool-{p}",
        weight=0.5,
        workers=tuple(
            RouteEntry(worker=f"w-{p}-{n}", url=f"http://10.0.{p}.{n}:8000", role=Role.DECODE, state=WorkerState.ACTIVE)
            for n in range(100)
        ),
    )
    for p in range(2)
)


async def rate(count: int, ask: Callable[[int], Awaitable[object]]) -> tuple[float, float]:
    """Answers per second, and the 99th percentile of one answer in milliseconds."""
    took = []
    for n in range(count):
        began = time.perf_counter()
        await ask(n)
        took.append(time.perf_counter() - began)
    return count / sum(took), sorted(took)[int(count * 0.99)] * 1000


async def measure(store: Store, version: int) -> dict[str, float]:
    epoch = await store.lease.acquire("bench", "http://bench", 600)
    assert epoch
    batch = [Put("drain", f"d{n}", DRAIN) for n in range(20)]
    one, one_p99 = await rate(1500, lambda n: store.decisions.commit(epoch, [Put("drain", f"d{n % 100}", DRAIN)]))
    twenty, _ = await rate(400, lambda _: store.decisions.commit(epoch, batch))
    renew, renew_p99 = await rate(1500, lambda _: store.lease.renew(epoch, 600))

    seen: asyncio.Queue[float] = asyncio.Queue()

    async def watch() -> None:
        async for _ in store.watch_routes(60):
            seen.put_nowait(time.perf_counter())

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0.1)
    while not seen.empty():
        seen.get_nowait()
    pushes = []
    for n in range(100):
        began = time.perf_counter()
        await store.decisions.commit(epoch, [PublishRoutes(Routes(version=version + n, pools=TABLE))])
        pushes.append(await seen.get() - began)
    watcher.cancel()

    many = [Put("pending", f"e{n}", msgspec.json.encode({"id": f"e{n}"})) for n in range(10_000)]
    began = time.perf_counter()
    await store.decisions.commit(epoch, many)
    large = time.perf_counter() - began
    began = time.perf_counter()
    assert len((await store.decisions.load()).pending) >= 10_000
    loaded = time.perf_counter() - began
    return {
        "commits_per_s": one, "commit_p99_ms": one_p99, "commits_of_20_per_s": twenty, "renewals_per_s": renew,
        "renewal_p99_ms": renew_p99, "route_seen_p50_ms": statistics.median(pushes) * 1000,
        "route_seen_p99_ms": sorted(pushes)[98] * 1000, "commit_of_10000_ms": large * 1000, "load_of_10000_ms": loaded * 1000,
    }  # fmt: skip


async def medians(store: Store) -> dict[str, float]:
    runs = [await measure(store, 1 + 1000 * n) for n in range(3)]
    return {k: round(statistics.median(r[k] for r in runs), 3) for k in runs[0]}


async def main() -> None:
    directory = Path(tempfile.mkdtemp(prefix="sentinel-"))
    result: dict[str, object] = {"bench": "store", "routes": 200}
    timeout = Duration(10.0)
    try:
        store = await open_store(StoreSettings(url=f"embedded:{directory}/store", timeout=timeout))
        result["embedded"] = await medians(store)
        raw = Redis(unix_socket_path=f"{directory}/store/valkey.sock")
        await raw.config_set("appendfsync", "everysec")
        await raw.flushall()
        result["embedded_everysec"] = await medians(store)
        await raw.aclose()
        await store.close()
        if program := shutil.which("redis-server", path="/usr/local/bin:/usr/bin:/usr/sbin"):
            argv = [program, "--port", "0", "--unixsocket", "redis.sock", "--appendonly", "yes", "--save", ""]
            server = subprocess.Popen(argv, cwd=directory, stdout=subprocess.DEVNULL)
            store = await open_store(StoreSettings(url=f"unix://{directory}/redis.sock", timeout=timeout))
            while True:
                try:
                    await store.ping()
                    break
                except StoreError:
                    await asyncio.sleep(0.02)
            result["redis"] = await medians(store)
            await store.close()
            server.kill()
            server.wait()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())

"""What the store costs the controller: commits, lease renewals, loading, and how soon a published route is seen.

One process, one client, one question at a time, as the leading controller asks; the embedded Valkey, and Debian's
redis-server beside it where there is one, both on a unix socket and append-only. The embedded one syncs to disk before each
answer; ``embedded_everysec`` is the same with a sync every second, as redis-server does by default, to know what that costs.
``through_sentinel`` is redis-server with a replica and three Redis Sentinels over TCP: every answer waits for the replica and
for most of the Sentinels. Medians of three runs. ``failover`` kills that primary under two controllers and an operator who asks
for a drain at once: until the Sentinels agree on the new primary, and until the drain is decided and durable; here Sentinels
suspect after half a second, so add what ``down-after-milliseconds`` is more than that. The last line is one JSON object. Rates
are per second, times are milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
import structlog
from load.stores import embedded, redis, redis_program
from redis.asyncio import Redis

from sentinel.config import Duration
from sentinel.decide.decider import Decider
from sentinel.decide.rules.policy_file import default_policy
from sentinel.model import Drain, Response, Role, RouteEntry, RoutePool, Routes, WorkerState
from sentinel.store import PublishRoutes, Put, Store
from sentinel.testing.control import running_controller
from sentinel.testing.decisions import rack
from sentinel.testing.failover import DOWN_AFTER_MS, FAILOVER_TIMEOUT_MS, RedisPair

TIMEOUT_S = 10.0
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


async def failovers(pair: RedisPair, times: int = 5) -> dict[str, object]:
    """Milliseconds from the primary's death: to the new one, to the next decided drain. The dead one is back each time.

    Sentinels begin no second failover, and vote again after a split vote, only after twice their failover-timeout: it is waited
    for between two deaths, and what is far above the rest was a split vote."""
    promoted, decided = [], []
    directory = Path(tempfile.mkdtemp(prefix="sentinel-"))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    stores = [await pair.open(2.0) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        pairs = [
            await stack.enter_async_context(
                running_controller(
                    store, directory, fleet=rack(decoders=times), decider=partial(Decider, default_policy()), name=name,
                    settings={"lease": Duration(3.0), "tick": Duration(0.5), "watch": Duration(2.0)},
                )
            )
            for store, name in zip(stores, ("c1", "c2"), strict=True)
        ]
        for n in range(times):
            while not any(controller.term for controller, _ in pairs):
                await asyncio.sleep(0.01)
            await pair.whole()
            await asyncio.sleep(2.5 * FAILOVER_TIMEOUT_MS / 1000 if n else 0)
            old = await pair.primary()
            began = time.perf_counter()
            pair.kill(old)
            changing = asyncio.create_task(pair.changed(old))
            changing.add_done_callback(lambda _, began=began: promoted.append(time.perf_counter() - began))  # type: ignore[misc]
            ask = {"verb": "drain", "target": f"decode-{n + 1}", "reason": "bench"}
            while not any([(await caller.post("/v1/ask", ask))[0] == 200 for _, caller in pairs]):
                await asyncio.sleep(0.01)
            decided.append(time.perf_counter() - began)
            await changing
            pair.begin(old, replica=True)
    for store in stores:
        await store.close()
    shutil.rmtree(directory, ignore_errors=True)
    return {
        "sentinels_suspect_after_ms": DOWN_AFTER_MS, "lease_ms": 3000,
        "new_primary_ms": [round(s * 1000) for s in sorted(promoted)],
        "next_drain_decided_ms": [round(s * 1000) for s in sorted(decided)],
    }  # fmt: skip


async def main() -> None:
    result: dict[str, object] = {"bench": "store", "routes": 200}
    with tempfile.TemporaryDirectory(prefix="sentinel-") as name:
        folder = Path(name)
        async with embedded(folder, TIMEOUT_S) as (_, store):
            result["embedded"] = await medians(store)
            raw = Redis(unix_socket_path=f"{folder}/store/valkey.sock")
            await raw.config_set("appendfsync", "everysec")
            await raw.flushall()
            result["embedded_everysec"] = await medians(store)
            await raw.aclose()
        if program := redis_program():
            async with redis(program, folder, TIMEOUT_S) as (_, store):
                result["redis"] = await medians(store)
            pair = RedisPair(Path(program))
            try:
                await pair.start()
                store = await pair.open(TIMEOUT_S)
                result["through_sentinel"] = await medians(store)
                await pair.ask(await pair.primary(), "FLUSHALL")
                await store.close()
                result["failover"] = await failovers(pair)
            finally:
                pair.close()
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())

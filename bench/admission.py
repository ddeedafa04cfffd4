"""What admission costs, in blocks and singly, and how soon what a dead gateway held is back, on Redis and the embedded Valkey.

One process with 50 clients that admit and give back as fast as they can, four limits to pass each (pool, worker, tenant, tokens).
In blocks most admissions touch no network; singly each one waits for an answer of the store, and those that wait at the same time
share it (``one_by_one``: a single client, so that nobody shares). Then three gateways that each could use everything, three times
what a pool can carry, and a process that holds 50 slots and is killed -9. Medians of three runs; the last line is one JSON
object. Rates are per second, times are milliseconds. The embedded server syncs to disk before each answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop
from load.stores import each

from sentinel import logs
from sentinel.config import StoreSettings
from sentinel.durations import Duration
from sentinel.gateway.admission import LeaseAdmission
from sentinel.gateway.guards import Slot
from sentinel.settings_gateway import AdmissionSettings, PoolLimits, TenantLimits
from sentinel.store import open_store
from sentinel.store.admission import AdmissionRecords

LEASE = 2.0
SECONDS = 1.5


async def gateway(url: str, owner: str, block: int, limits: PoolLimits, tenant: TenantLimits | None = None) -> LeaseAdmission:
    store = await open_store(StoreSettings(url=url, timeout=Duration(5.0)))
    settings = AdmissionSettings(lease=Duration(LEASE), margin=Duration(0.4), replicas=1, block=block, default=limits)
    made = LeaseAdmission(AdmissionRecords(store, LEASE), settings, {"default": tenant or TenantLimits()}, owner=owner)
    await made.start()
    while made.tenure.settling:
        await asyncio.sleep(0.02)
    return made


async def rate(url: str, block: int, clients: int) -> tuple[float, float, float, float]:
    """Admissions per second, p50 and p99 of one admission in ms, and statements to the store per second."""
    limits = PoolLimits(requests=500, tokens=10**7, worker_requests=200)
    a = await gateway(url, f"rate-{block}-{clients}-{time.monotonic()}", block, limits, TenantLimits(requests=400))
    took: list[float] = []
    began, before = time.perf_counter(), a.tenure.statements
    ends = began + SECONDS

    async def client(n: int) -> None:
        worker, count = f"w{n % 4}", 0
        while (at := time.perf_counter()) < ends:
            slot = await a.admit("p", worker, "t", 1000, 5.0)
            took.append(time.perf_counter() - at)
            assert isinstance(slot, Slot), slot
            count += 1
            if count % 16 == 0 or not block:
                await asyncio.sleep(0)  # others have their turn while this one holds its slot
            a.release(slot)

    await asyncio.gather(*(client(n) for n in range(clients)))
    spent = time.perf_counter() - began
    told = a.tenure.statements - before
    await a.stop()
    took.sort()
    return len(took) / spent, took[len(took) // 2] * 1000, took[int(len(took) * 0.99)] * 1000, told / spent


async def fairness(url: str) -> float:
    """Three gateways that each could use everything: how far the worst is from a third, in percent."""
    made = [await gateway(url, f"fair-{n}-{time.monotonic()}", 64, PoolLimits(requests=60)) for n in range(3)]
    done, ends = [0, 0, 0], time.monotonic() + 4.0

    async def client(n: int) -> None:
        while time.monotonic() < ends:
            slot = await made[n].admit("p", "w", "t", 1, 0.5)
            if isinstance(slot, Slot):
                await asyncio.sleep(random.uniform(0.02, 0.08))
                made[n].release(slot)
                if time.monotonic() > ends - 3.0:
                    done[n] += 1

    await asyncio.gather(*(client(n) for n in range(3) for _ in range(60)))
    for a in made:
        await a.stop()
    mean = sum(done) / 3
    return max(abs(d - mean) for d in done) / mean * 100


async def overload(url: str) -> tuple[float, float, float, float]:
    """Three times what a pool of 60 can carry arrives by chance at one gateway; each waits 0.25 s at most. Refusals: p50
    and p99 in ms, and the share answered within 10 ms; then goodput against what the pool can carry at most. The first second, in
    which the gateway learns how fast things end, does not count."""
    a = await gateway(url, f"over-{time.monotonic()}", 64, PoolLimits(requests=60))
    refused: list[float] = []
    done, began, tasks = 0, time.monotonic(), set()

    async def request() -> None:
        nonlocal done
        at = time.monotonic()
        slot = await a.admit("p", "w", f"t{len(tasks) % 5}", 1, 0.25)
        if isinstance(slot, Slot):
            await asyncio.sleep(random.uniform(0.1, 0.3))
            a.release(slot)
            done += time.monotonic() > began + 1.0
        elif at > began + 1.0:
            refused.append((time.monotonic() - at) * 1000)

    due = began
    while (now := time.monotonic()) < began + 4.0:
        while due <= now:
            due += random.expovariate(3 * 60 / 0.2)
            task = asyncio.create_task(request())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
    goodput = done / (3.0 * 60 / 0.2)
    await asyncio.gather(*tasks)
    await a.stop()
    refused.sort()
    quick = sum(r < 10 for r in refused) / len(refused)
    return refused[len(refused) // 2], refused[int(len(refused) * 0.99)], quick, goodput


async def back(url: str) -> float:
    """Seconds from kill -9 of a process that holds all 50 slots until this one has all of them."""
    a = await gateway(url, f"heir-{time.monotonic()}", 64, PoolLimits(requests=50))
    child = subprocess.Popen([sys.executable, __file__, "hold", url], stdout=subprocess.PIPE)
    assert child.stdout and child.stdout.readline() == b"50\n"
    os.kill(child.pid, signal.SIGKILL)
    killed = time.monotonic()
    child.wait()
    while a.held < 50:
        await asyncio.gather(*(a.admit("p", "w", "t", 1, 0.1) for _ in range(50 - a.held)))
    spent = time.monotonic() - killed
    await a.stop()
    return spent


async def hold(url: str) -> None:
    a = await gateway(url, f"hold-{os.getpid()}", 64, PoolLimits(requests=50))
    while a.held < 50:
        await a.admit("p", "w", "t", 1, 1.0)
    print(a.held, flush=True)
    await asyncio.sleep(600)


async def measure(url: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, block, clients in (("blocks", 64, 50), ("singly", 0, 50), ("one_by_one", 0, 1)):
        runs = [await rate(url, block, clients) for _ in range(3)]
        keys = (f"{name}_per_s", f"{name}_p50_ms", f"{name}_p99_ms", f"{name}_statements_per_s")
        found |= {key: round(statistics.median(r[i] for r in runs), 4) for i, key in enumerate(keys)}
    found["uneven_percent"] = round(statistics.median([await fairness(url) for _ in range(3)]), 2)
    runs = [await overload(url) for _ in range(3)]
    keys = ("refusal_p50_ms", "refusal_p99_ms", "refused_within_10_ms", "goodput_of_most")
    found |= {key: round(statistics.median(r[i] for r in runs), 4) for i, key in enumerate(keys)}
    found["slots_back_s"] = round(statistics.median([await back(url) for _ in range(3)]), 3)
    return found


async def main() -> None:
    result: dict[str, object] = {"bench": "admission", "lease_s": LEASE}
    with tempfile.TemporaryDirectory(prefix="sentinel-") as folder:
        async for kind, url in each(Path(folder)):
            result[kind] = await measure(url)
    print(json.dumps(result))


if __name__ == "__main__":
    logs.configure("json", "critical")
    uvloop.run(hold(sys.argv[2]) if sys.argv[1:2] == ["hold"] else main())

"""How soon three gateways stop sending to a worker that fails, and how many requests a half-open one gets from all of them.

Real: three processes with the shared breakers of a gateway each, on hosts of their own by name, and one store (redis-server, then
the embedded Valkey, which syncs to disk before each answer). Simulated: the requests, which are told as failed. By themselves the
processes look at the store once a minute, so what they see is pushed. Per trip, in milliseconds:

* trip: from the last failure that two of them see until none of the three sends there any more
* probes: of 300 requests at the three at once, when the worker's time is over, how many go through; the policy says 3

Medians and worst of twenty trips; the last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from load.stores import each

from sentinel import logs
from sentinel.config import StoreSettings
from sentinel.durations import Duration
from sentinel.gateway.breakers import SharedBreakers
from sentinel.gateway.guards import Outcome
from sentinel.settings_gateway import BreakerSettings
from sentinel.store import open_store
from sentinel.store.breakers import BreakerRecords

GATEWAYS, TRIPS, RUSH = 3, 20, 100
POLICY = BreakerSettings(base_open=Duration(1.0), jitter=0.0, poll=Duration(60), min_requests=6)
POOLS = {f"p{n}": tuple(f"p{n}.w{i}" for i in range(4)) for n in range(TRIPS)}  # one of four may be open, and nothing is panic


class Gateway:
    """What one process does when it is told to, a line each; times are of CLOCK_MONOTONIC, which all processes share."""

    def __init__(self, breakers: SharedBreakers) -> None:
        self.breakers = breakers
        self.watching: asyncio.Task[float] | None = None

    async def watch(self, worker: str) -> bool:
        self.watching = asyncio.create_task(self._opened(worker))
        return True

    async def fail(self, worker: str, count: int) -> float:
        """When the last of them was told."""
        for _ in range(count):
            if permit := await self.breakers.permit(worker):
                self.breakers.ended(permit, Outcome.FAILED)
        return time.monotonic()

    async def seen(self) -> float:
        assert self.watching is not None
        return await self.watching

    async def rush(self, worker: str, count: int) -> int:
        return sum(p is not None for p in await asyncio.gather(*(self.breakers.permit(worker) for _ in range(count))))

    async def _opened(self, worker: str) -> float:
        while self.breakers.closed(worker):
            await asyncio.sleep(0.0005)
        return time.monotonic()


async def child(url: str, name: str) -> None:
    store = await open_store(StoreSettings(url=url, timeout=Duration(5.0)))
    breakers = SharedBreakers(BreakerRecords(store, POLICY), host=name, process=f"{os.getpid()}")
    breakers.members(POOLS)
    await breakers.start()
    gateway, lines = Gateway(breakers), asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await asyncio.sleep(0.5)  # until it listens
    print(json.dumps("ready"), flush=True)
    while line := await lines.readline():
        verb, *args = json.loads(line)
        print(json.dumps(await getattr(gateway, verb)(*args)), flush=True)


class Child:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def do(self, *words: Any) -> Any:
        if words:
            assert self.process.stdin
            self.process.stdin.write(json.dumps(words).encode() + b"\n")
        assert self.process.stdout
        return json.loads(await self.process.stdout.readline())


async def measure(url: str) -> dict[str, Any]:
    children = []
    for n in range(GATEWAYS):
        argv = [sys.executable, __file__, "child", url, f"h{n}"]
        pipe = asyncio.subprocess.PIPE
        children.append(Child(await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)))
    trips: list[float] = []
    probes: list[int] = []
    try:
        await asyncio.gather(*(c.do() for c in children))
        for workers in POOLS.values():
            await asyncio.gather(*(c.do("watch", workers[0]) for c in children))
            told = await asyncio.gather(*(c.do("fail", workers[0], 3) for c in children[:2]))
            seen = await asyncio.gather(*(c.do("seen") for c in children))
            trips.append((max(seen) - max(told)) * 1000)
            await asyncio.sleep(POLICY.base_open + 0.05)
            probes.append(sum(await asyncio.gather(*(c.do("rush", workers[0], RUSH) for c in children))))
    finally:
        for one in children:
            one.process.kill()
            await one.process.wait()
    trips.sort()
    return {
        "trip_p50_ms": round(trips[len(trips) // 2], 2), "trip_worst_ms": round(trips[-1], 2),
        "probes_least": min(probes), "probes_most": max(probes),
    }  # fmt: skip


async def main() -> None:
    result: dict[str, Any] = {"bench": "breakers", "gateways": GATEWAYS, "trips": TRIPS, "probes": POLICY.probes}
    with tempfile.TemporaryDirectory(prefix="sentinel-") as folder:
        async for kind, url in each(Path(folder)):
            result[kind] = await measure(url)
    print(json.dumps(result | {"load_beside": os.getloadavg()[0]}))


if __name__ == "__main__":
    logs.configure("json", "critical")
    uvloop.run(child(*sys.argv[2:]) if sys.argv[1:2] == ["child"] else main())

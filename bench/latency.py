"""From a kernel line to a worker out of rotation: milliseconds, p50 and p99.

The way: a line with Xid 79 is written into a tray's (simulated) kernel log; the real agent reads, judges and reports it; the
real controller decides, commits to the embedded store and publishes; a client sees the pushed route table. One sample is
the time from just before the write to that push. The worker is evicted (really killed), then ``undrain`` brings it back
before it is used again. Everything runs on this one host, over loopback.

Two passes, without and with streaming traffic. ``python bench/latency.py [--samples 100] [--sessions 24]``; the last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import time

import uvloop

from sentinel.model import Role, Routes, WorkerState
from sentinel.sim.client import Load
from sentinel.sim.rack import GPUS, PLACES
from sentinel.sim.scenarios import xid
from sentinel.sim.stage import Stage, StageError

BACK_S = 30.0  # until an evicted worker must be in rotation again
WORKERS = [p.name for p in PLACES.values() if p.role is Role.DECODE and not p.standby]


class Watch:
    """When each worker last left the pushed table, and who is in it now."""

    def __init__(self, stage: Stage) -> None:
        self.left: dict[str, float] = {}
        self.news = asyncio.Event()
        self._stage = stage
        stage.on_routes = self._routed

    def _routed(self, old: Routes | None, new: Routes) -> None:
        now = time.time()
        before = states(old) if old else {}
        for worker, state in states(new).items():
            if state is WorkerState.OUT and before.get(worker) is WorkerState.ACTIVE:
                self.left[worker] = now
        self.news.set()

    async def until_active(self, worker: str) -> None:
        async with asyncio.timeout(BACK_S):
            while self._stage.routes is None or states(self._stage.routes)[worker] is not WorkerState.ACTIVE:
                self.news.clear()
                await self.news.wait()

    async def until_left(self, worker: str) -> float:
        async with asyncio.timeout(BACK_S):
            while worker not in self.left:
                self.news.clear()
                await self.news.wait()
        return self.left.pop(worker)


def states(routes: Routes) -> dict[str, WorkerState]:
    return {e.worker: e.state for p in routes.pools for e in p.workers}


async def undrain(stage: Stage, worker: str) -> None:
    """Wait until it is stopped, as a person would, then ask for it back."""
    async with asyncio.timeout(BACK_S):
        while True:
            with contextlib.suppress(StageError):
                drains = (await stage.status())["drains"]
                if any(d["worker"] == worker and d.get("state") == "out" for d in drains):
                    await stage.ask("undrain", worker, "bench/latency.py goes on")
                    return
            await asyncio.sleep(0.1)


async def measure(samples: int, sessions: int) -> list[float]:
    """Milliseconds of each sample."""
    took: list[float] = []
    async with Stage(Load(sessions=sessions)) as stage:
        watch = Watch(stage)
        if sessions:
            await stage.start_traffic()
        await asyncio.sleep(2)
        returning: set[asyncio.Task[None]] = set()
        for n in range(samples):
            worker = WORKERS[n % len(WORKERS)]
            await watch.until_active(worker)
            watch.left.pop(worker, None)
            written = await stage.inject_kernel_line(PLACES[worker].nodes[0], xid(GPUS[n % 4], 79, "GPU has fallen off the bus."))
            took.append((await watch.until_left(worker) - written) * 1000)
            task = asyncio.create_task(undrain(stage, worker))
            returning.add(task)
            task.add_done_callback(returning.discard)
            await asyncio.sleep(0.25)
    return took


def told(took: list[float]) -> dict[str, float]:
    ordered = sorted(took)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    return {"p50_ms": round(statistics.median(ordered), 2), "p99_ms": round(p99, 2), "max_ms": round(ordered[-1], 2)}


async def main(samples: int, sessions: int) -> None:
    result: dict[str, object] = {"bench": "latency", "samples": samples, "cores": os.cpu_count(), "sessions": sessions}
    for name, load in (("idle", 0), ("busy", sessions)):
        result[name] = told(await measure(samples, load))
        print(f"{name}: {result[name]}", flush=True)
    result["target"] = {"p50_ms": 25, "p99_ms": 100}
    print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--sessions", type=int, default=24)
    given = parser.parse_args()
    uvloop.run(main(given.samples, given.sessions))

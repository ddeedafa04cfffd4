"""A gateway's guards in a process of their own, told by lines on standard input what to do; answers are JSON, one line each.

``guard_process.py URL NAME LEASE_S LIMIT``. Times are of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from sentinel import logs
from sentinel.config import StoreSettings
from sentinel.durations import Duration
from sentinel.gateway.admission import LeaseAdmission
from sentinel.gateway.breakers import SharedBreakers
from sentinel.gateway.guards import Outcome, Slot
from sentinel.settings_gateway import AdmissionSettings, BreakerSettings, PoolLimits
from sentinel.store import open_store
from sentinel.store.admission import AdmissionRecords
from sentinel.store.breakers import BreakerRecords

WORKERS = ("w1", "w2", "w3", "w4")


class Process:
    def __init__(self, admission: LeaseAdmission, breakers: SharedBreakers) -> None:
        self.admission, self.breakers = admission, breakers
        self.watching: asyncio.Task[float] | None = None

    async def take(self, count: int, wait_s: float) -> int:
        """How many slots of that many requests; they are kept."""
        asked = await asyncio.gather(*(self.admission.admit("p", "w1", "t", 1, wait_s) for _ in range(count)))
        return sum(isinstance(slot, Slot) for slot in asked)

    async def take_all(self, count: int) -> float:
        """Ask until there are that many; when that was."""
        while self.admission.held < count:
            await self.take(count - self.admission.held, 0.1)
        return time.monotonic()

    async def spin(self, seconds: float) -> list[float]:
        """Admit and give back without pause; when each admission was."""
        times, ends = [], time.monotonic() + seconds
        while time.monotonic() < ends:
            slot = await self.admission.admit("p", "w1", "t", 1, 0.01)
            if isinstance(slot, Slot):
                times.append(time.monotonic())
                self.admission.release(slot)
            await asyncio.sleep(0.001)
        return times

    async def fail(self, worker: str, count: int) -> bool:
        for _ in range(count):
            permit = await self.breakers.permit(worker)
            if permit:
                self.breakers.ended(permit, Outcome.FAILED)
        return True

    async def watch(self, worker: str) -> bool:
        """Look from now on for the moment at which this process stops sending requests there."""
        self.watching = asyncio.create_task(self._open(worker))
        return True

    async def opened(self, worker: str) -> float:
        """That moment, if it was looked for; else wait for it."""
        return await (self.watching or self._open(worker))

    async def _open(self, worker: str) -> float:
        while self.breakers.closed(worker):
            await asyncio.sleep(0.0005)
        return time.monotonic()

    async def rush(self, worker: str, count: int) -> int:
        """How many of that many requests at once go through; they are not ended."""
        return sum(p is not None for p in await asyncio.gather(*(self.breakers.permit(worker) for _ in range(count))))

    async def probe(self, worker: str) -> float:
        """Ask until one goes through; when that was."""
        while await self.breakers.permit(worker) is None:
            await asyncio.sleep(0.01)
        return time.monotonic()


async def main(url: str, name: str, lease: float, limit: int) -> None:
    store = await open_store(StoreSettings(url=url, timeout=Duration(1.0)))
    settings = AdmissionSettings(
        lease=Duration(lease), margin=Duration(lease / 5), tick=Duration(0.05), replicas=1, default=PoolLimits(requests=limit)
    )
    policy = BreakerSettings(base_open=Duration(1.0), jitter=0.0, probe_lease=Duration(lease), poll=Duration(60), min_requests=6)
    admission = LeaseAdmission(AdmissionRecords(store, lease), settings, {}, owner=f"{name}-{os.getpid()}")
    breakers = SharedBreakers(BreakerRecords(store, policy), host=name, process=str(os.getpid()))
    breakers.members({"p": WORKERS})
    await admission.start()
    await breakers.start()
    while admission.tenure.settling:
        await asyncio.sleep(0.01)
    process = Process(admission, breakers)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print(json.dumps("ready"), flush=True)
    while line := await lines.readline():
        verb, *args = json.loads(line)
        answer: Any = await getattr(process, verb)(*args)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    logs.configure("json", "critical")
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])))

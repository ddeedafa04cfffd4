"""The shared guards over real processes that are killed, stopped and woken: what one of them held, and what the others see."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

LEASE = 2.0
LIMIT = 50


class Child:
    """One gateway process; ``do`` sends a line and waits for the answer."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def answer(self) -> Any:
        assert self.process.stdout
        line = await self.process.stdout.readline()
        assert line, "the process ended"
        return json.loads(line)

    def tell(self, *words: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(words).encode() + b"\n")

    async def do(self, *words: Any) -> Any:
        self.tell(*words)
        return await self.answer()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


Start = Callable[[int], Any]

pytestmark = pytest.mark.long  # real processes that wait for real leases; what the scripts do is in CI with the other guards' tests


@pytest_asyncio.fixture
async def start(store_server: Any) -> AsyncIterator[Start]:
    """``start(n)``: that many gateways, each on a host of its own, on the test's server."""
    children: list[Child] = []

    async def make(count: int) -> list[Child]:
        await store_server.open()  # the embedded server is run by the test, not by one of its children
        script = str(Path(__file__).with_name("guard_process.py"))
        for n in range(count):
            argv = [sys.executable, script, store_server.url, f"h{n}", str(LEASE), str(LIMIT)]
            process = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
            children.append(Child(process))
        for child in children:
            while await child.answer() != "ready":
                pass
        return children

    yield make
    for child in children:
        if child.process.returncode is None:
            child.signal(signal.SIGKILL)
        await child.process.wait()


async def test_slots_of_a_killed_gateway_come_back_within_a_lease(start: Start) -> None:
    """kill -9 of a gateway that holds all fifty slots: another one has all fifty when the lease is over."""
    a, b = await start(2)
    assert await a.do("take_all", LIMIT)
    assert await b.do("take", 5, 0.1) == 0
    a.signal(signal.SIGKILL)
    killed = time.monotonic()
    took = await b.do("take_all", LIMIT) - killed
    print(f"all {LIMIT} slots back {took:.2f} s after kill -9, lease {LEASE} s")
    assert took < LEASE + 1.0


async def test_a_killed_probe_holders_permit_comes_back(start: Start) -> None:
    """kill -9 of the process that holds every probe of a half-open breaker: others probe when the lease of those is over."""
    a, b, _ = await start(3)
    await asyncio.gather(a.do("fail", "w1", 3), b.do("fail", "w1", 3))
    await asyncio.gather(a.do("opened", "w1"), b.do("opened", "w1"))
    await a.do("probe", "w1")
    assert await a.do("rush", "w1", 20) == 2
    a.signal(signal.SIGKILL)
    killed = time.monotonic()
    took = await b.do("probe", "w1") - killed
    print(f"a probe free again {took:.2f} s after kill -9, lease {LEASE} s")
    assert took < LEASE + 1.0


async def test_a_failing_worker_is_out_for_all_at_once(start: Start) -> None:
    """A worker whose breaker trips gets nothing more from three processes, by push: by themselves they look once a minute."""
    children = await start(3)
    await asyncio.gather(*(c.do("watch", "w1") for c in children))
    await children[0].do("fail", "w1", 3)
    began = time.monotonic()
    await children[1].do("fail", "w1", 3)
    seen = await asyncio.gather(*(c.do("opened", "w1") for c in children))
    print(f"out for all {(max(seen) - began) * 1000:.1f} ms after the last failure; {(max(seen) - min(seen)) * 1000:.1f} ms apart")
    assert max(seen) - began < 5.0


async def test_half_open_lets_exactly_so_many_of_a_fleet_through(start: Start) -> None:
    """Three processes with a hundred requests each: three of them reach a half-open worker, and no more."""
    children = await start(3)
    await asyncio.gather(*(c.do("fail", "w1", 2) for c in children))
    await asyncio.gather(*(c.do("opened", "w1") for c in children))
    await asyncio.sleep(1.05)
    assert sum(await asyncio.gather(*(c.do("rush", "w1", 100) for c in children))) == 3


async def test_a_stopped_gateway_admits_nothing_when_it_wakes(start: Start) -> None:
    """SIGSTOP for longer than its lease, while it admits: another takes everything, and it gives out nothing after SIGCONT."""
    a, b = await start(2)
    a.tell("spin", 4.0)
    await asyncio.sleep(0.5)
    a.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    await b.do("take_all", LIMIT)
    woken = time.monotonic()
    a.signal(signal.SIGCONT)
    admitted = await a.answer()
    assert len([t for t in admitted if t < stopped + 0.05]) > 20
    assert [t for t in admitted if t > woken] == []

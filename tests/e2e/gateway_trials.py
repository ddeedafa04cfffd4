"""What is done to workers under load behind the gateway, and what came of it: one trial after the other, by name.

This module exists so that the long tests and ``bench/gateway_serving.py`` do the same things to the same workers. What always
holds: a trial ends with everything back in service and every request that was under way ended, so that the next one starts from
the same; its numbers are what clients saw, and the differences of the gateways' and the frontends' own counters.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

import aiohttp

from sentinel.model import WorkerState
from sentinel.serving.adapters import open_discovery
from sentinel.serving.dynamo import DynamoAdapter
from tests.e2e.dynamo import DynamoRig, MemoryKeep, RigHands
from tests.e2e.gateway_clients import Load
from tests.e2e.gateway_serving import BROKEN, REFUSED, RETRIES, UNRETRIED, Front, samples, total
from tests.e2e.vllm import Vllm

MIGRATED = "dynamo_frontend_model_migration_total"
Fault = Callable[[], Awaitable[None]]

MOCKERS = ("--speedup-ratio", "0.1")  # about 60 ms a token
MIGRATE = {"DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS": "3"}  # unset, a frozen worker's streams hang for as long as it does
TOKENS = 200  # of a stream of vLLM's; a stream of the mockers' has 60
# How long the gateway waits here: longer than a worker that is well takes on a machine that has too little CPU for all of them.
PATIENCE = 'first_byte = "10s"\nanswer = "20s"\nstall = "6s"'
PATIENCE_VLLM = 'first_byte = "25s"\nanswer = "35s"\nstall = "10s"'


async def trial(
    front: Front, load: Load, fault: Fault, *, migrates: bool, frontends: Callable[[], list[str]] = list
) -> dict[str, Any]:
    """Do it, wait until what was under way has ended, and say what clients and counters saw."""
    await load.busy()
    await front.spread(load.streams // (len(front.asked) * 2))
    before, moved, began = await front.counted(), await migrations(frontends()), monotonic()
    await fault()
    await load.turned()
    after, moved_after = await front.counted(), await migrations(frontends())
    return {
        **load.since(began).summary(migrates=migrates),
        "retried": total(after, RETRIES) - total(before, RETRIES),
        "more": {k: v - before[k] for k, v in after.items() if k.startswith((RETRIES, UNRETRIED, REFUSED)) and v > before[k]},
        "migrated": max(0, moved_after - moved),
        "broken_after_the_first_byte": total(after, BROKEN) - total(before, BROKEN),
    }  # fmt: skip


async def migrations(frontends: list[str]) -> int:
    found = 0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as http:
        for url in frontends:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with http.get(f"{url}/metrics") as answer:
                    found += total(samples(await answer.text()), MIGRATED)
    return found


class DynamoTrials:
    """``rig``: frontends ``front.workers`` over the same mockers. Each method is a fault and the way back from it."""

    def __init__(self, rig: DynamoRig, front: Front) -> None:
        self._rig, self._front = rig, front
        discovery = open_discovery(rig.settings, rig.http)
        assert discovery
        self._adapter = DynamoAdapter(rig.settings, discovery, RigHands(rig), MemoryKeep(), rig.http)
        self._second = next(iter(rig.others))
        self._name = next((name for name, url in front.workers.items() if url == self._second), "")

    def frontends(self) -> list[str]:
        return [self._rig.frontend, *self._rig.others]

    async def worker_drained(self) -> None:
        """Out of discovery, idle, ended, started, proved, back: what the controller does."""
        worker = self._rig.workers[0].worker
        assert await self._adapter.deroute(worker)
        quiet = 0
        while quiet < 2:  # a request may be on its way when the entry goes
            quiet = quiet + 1 if await self._adapter.in_flight(worker) == 0 else 0
            await asyncio.sleep(0.05)
        assert await self._adapter.stop(worker, hard=False, key="stop")
        assert await self._adapter.start(worker, key="start")
        ok, why = await self._adapter.verify(worker, 20)
        assert ok, why
        await self._adapter.reroute(worker)

    async def worker_killed(self) -> None:
        """SIGKILL without anybody's help; its entry in discovery stays until its lease ends."""
        await self._rig.kill(self._rig.workers[1].name)
        await asyncio.sleep(12)
        await self._rig.restart(self._rig.workers[1].name)

    async def worker_frozen(self) -> None:
        """SIGSTOP: connections stay, nothing is answered. Ended after 15 s, as the controller would have before."""
        name = self._rig.workers[2].name
        await self._rig.kill(name, signal.SIGSTOP)
        await asyncio.sleep(15)
        await self._rig.kill(name)
        await self._rig.restart(name)

    async def frontend_drained(self) -> None:
        """By the route table: out, idle, SIGTERM, started, back."""
        await self._front.publish(**{self._name: WorkerState.OUT})
        await self._front.idle(self._name)
        self._process.send_signal(signal.SIGTERM)
        await self._process.wait()
        await self._rig.another_frontend(self._second)
        await self._front.publish()

    async def frontend_killed(self) -> None:
        """SIGKILL: what it was passing on cannot be moved by anybody."""
        self._process.kill()
        await self._process.wait()
        await asyncio.sleep(5)
        await self._rig.another_frontend(self._second)

    async def frontend_frozen(self) -> None:
        """SIGSTOP for longer than every patience of the gateway."""
        self._process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(25)
        self._process.send_signal(signal.SIGCONT)

    @property
    def _process(self) -> asyncio.subprocess.Process:
        return self._rig.others[self._second]


class VllmTrials:
    """``servers``: what the gateway routes to, by the same names; faults come to ``victim``."""

    def __init__(self, servers: dict[str, Vllm], front: Front, victim: str) -> None:
        self._servers, self._front, self._victim = servers, front, victim

    async def worker_drained(self) -> None:
        """By the route table: out, idle by its own gauges, SIGTERM, started anew, back."""
        await self._front.publish(**{self._victim: WorkerState.OUT})
        await self._front.idle(self._victim)
        async with aiohttp.ClientSession() as http:
            while await self._server.running(http):
                await asyncio.sleep(0.1)
        assert self._server.process
        self._server.process.terminate()
        await asyncio.to_thread(self._server.process.wait, 60)
        await self._again()
        await self._front.publish()

    async def engine_frozen(self) -> None:
        """SIGSTOP of the engine's processes: /health stays green (vLLM 0.32)."""
        self._server.signal(signal.SIGSTOP, engine=True)
        await asyncio.sleep(50)
        self._server.signal(signal.SIGCONT, engine=True)

    async def engine_killed(self) -> None:
        """SIGKILL of the engine's processes: the server tells its clients, and ends."""
        self._server.signal(signal.SIGKILL, engine=True)
        await asyncio.sleep(5)
        await self._again()

    async def server_killed(self) -> None:
        """SIGKILL of everything."""
        self._server.end()
        await asyncio.sleep(5)
        await self._again()

    async def _again(self) -> None:
        self._server.end()
        self._server.start()
        await asyncio.to_thread(self._server.ready)

    @property
    def _server(self) -> Vllm:
        return self._servers[self._victim]

"""Plain vLLM servers: the published route table is their rotation switch.

This module exists because vLLM has no drain that a client could rely on: after SIGTERM ``/health`` stays 200 while every new
request gets a 500, and ``/pause`` makes requests hang (measured on 0.32). What always holds:

* The controller publishes the route table in the same commit that decided; ``deroute`` and ``reroute`` only confirm that the
  published table says so, and change nothing themselves.
* A worker is only ever ended through its node's agent, after it left the table.
* A worker that refuses connections has nothing in flight: vLLM closes its port when the last stream has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp

from probes import engine
from probes.engine import Answer, Metrics
from sentinel.model import Role, Routes, Worker, WorkerSeen, WorkerState
from sentinel.serving import AdapterError, Hands
from sentinel.serving.hands import start, stop

LOOK_S = 1.0  # one look; /health and /metrics answer in milliseconds even while the engine is frozen
RETRY_S = 0.1


class VllmAdapter:
    """All verbs of sentinel.serving.Adapter. ``routes`` is the newest durable table; None: there is none yet."""

    def __init__(self, hands: Hands, routes: Callable[[], Awaitable[Routes | None]], session: aiohttp.ClientSession) -> None:
        self._hands, self._routes, self._session = hands, routes, session

    async def list_workers(self) -> list[WorkerSeen]:
        """Every worker that the published table sends requests to."""
        table = await self._routes()
        return [
            WorkerSeen(worker=e.worker, url=e.url, engine="vllm")
            for pool in (table.pools if table else ())
            for e in pool.workers
            if e.state is WorkerState.ACTIVE
        ]

    async def deroute(self, worker: Worker) -> bool:
        return await self._state(worker) is not WorkerState.ACTIVE

    async def reroute(self, worker: Worker) -> bool:
        return await self._state(worker) is WorkerState.ACTIVE

    async def look(self, worker: Worker) -> WorkerSeen | None:
        health, (metrics, answer) = await asyncio.gather(
            engine.ask(self._session, "GET", f"{_base(worker)}/health", deadline_s=LOOK_S, limit=65536), self._metrics(worker)
        )
        if "answered" not in (health.how, answer.how):
            if "refused" in (health.how, answer.how):
                return None
            raise AdapterError(f"{worker.name} at {_base(worker)}: {health.why}")
        return WorkerSeen(
            worker=worker.name,
            url=worker.url,
            engine="vllm",
            healthy=engine.healthy("vllm", health),
            running=metrics.running,
            waiting=metrics.waiting,
            progress=metrics.progress,
        )

    async def in_flight(self, worker: Worker) -> int | None:
        metrics, answer = await self._metrics(worker)
        return 0 if answer.how == "refused" else metrics.load

    async def verify(self, worker: Worker, deadline_s: float) -> tuple[bool, str]:
        """One token by /v1/completions. A worker that still loads, or is busy, is asked again until the deadline."""
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_s
        while True:
            token = await engine.one_token(self._session, _base(worker), deadline_s=max(0.001, until - loop.time()))
            if token.ok:
                return True, f"{worker.name}: {token.why} in {token.seconds * 1000:.0f} ms"
            if token.ok is False and token.how == "answered":
                return False, f"{worker.name}: {token.why}"
            if loop.time() + RETRY_S >= until:
                return False, f"{worker.name}: no right answer within {deadline_s:g} s ({token.why})"
            await asyncio.sleep(RETRY_S)

    async def stop(self, worker: Worker, *, hard: bool, key: str) -> bool:
        return await stop(self._hands, worker, hard=hard, key=key)

    async def start(self, worker: Worker, *, key: str) -> bool:
        return await start(self._hands, worker, key=key)

    async def scale_to(self, pool: str, role: Role, count: int) -> bool:
        """A plain vLLM has no means to make more of itself; standby workers are started one by one."""
        return False

    async def _state(self, worker: Worker) -> WorkerState:
        table = await self._routes()
        if table is None:
            raise AdapterError(f"no route table has been published, so it cannot be told whether {worker.name} takes requests")
        states = (e.state for pool in table.pools for e in pool.workers if e.worker == worker.name)
        return next(states, WorkerState.OUT)  # what no table names gets nothing

    async def _metrics(self, worker: Worker) -> tuple[Metrics, Answer]:
        answer = await engine.ask(self._session, "GET", f"{_base(worker)}/metrics", deadline_s=LOOK_S)
        return (engine.parse(answer.body) if answer.how == "answered" and answer.status == 200 else Metrics()), answer


def _base(worker: Worker) -> str:
    return worker.url.rstrip("/")

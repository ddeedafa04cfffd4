"""The controller's own look at every worker over the network.

This module exists so that a silent node is a question before it is a verdict: do its workers still answer? What always
holds: each worker is looked at on its own, so that one that hangs delays no other; at most ``AT_ONCE`` looks run at a time;
``reachable`` None means that it could not be told. A large fleet's looks are spread so that those at workers which answer are
``PER_S`` in all; one that did not answer, or that the decider asked about within ``SOON_S``, is looked at every ``every``, unless
there are so many of them that they make ``PER_S`` by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable

import structlog

from sentinel.controller.core import DeciderFailed, SteppedDown
from sentinel.decide.state.events import AnyInstruction, Watched
from sentinel.model import Worker
from sentinel.serving import Adapter, AdapterError
from sentinel.store import StoreError

log = structlog.get_logger(__name__)

AT_ONCE = 32
PER_S = 100  # looks at workers that answer, and as many at those that do not
SOON_S = 60.0
DEADLINE = 10.0  # seconds for one look; adapters keep shorter ones of their own


class Watch:
    """One leadership's looks. ``feed`` submits a Watched event and waits until what it caused is durable."""

    def __init__(
        self,
        *,
        serving: Adapter,
        every: float,
        feed: Callable[[Watched], Awaitable[list[AnyInstruction]]],
        new_id: Callable[[], str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._serving, self._every, self._feed, self._new_id, self._clock = serving, every, feed, new_id, clock
        self._room = asyncio.Semaphore(AT_ONCE)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._soon: dict[str, float] = {}  # worker that did not answer or was asked about → until when it is looked at often
        self._wake: dict[str, asyncio.Event] = {}

    def follow(self, workers: tuple[Worker, ...]) -> None:
        """Watch exactly these from now on."""
        wanted = {w.name: w for w in workers}
        for task in self._tasks.values():
            task.cancel()
        self._wake = {n: asyncio.Event() for n in wanted}
        self._soon = {n: until for n, until in self._soon.items() if n in wanted}
        self._tasks = {n: asyncio.create_task(self._run(w), name=f"watch {n}") for n, w in wanted.items()}

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def asked(self, worker: Worker) -> bool | None:
        """The decider's question: look now, and often for the next minute."""
        self._soon[worker.name] = time.monotonic() + SOON_S
        if worker.name in self._wake:
            self._wake[worker.name].set()
        return await self.look(worker)

    async def look(self, worker: Worker) -> bool | None:
        """Look once, feed what was seen, and say whether the worker was reachable."""
        seen = None
        reachable: bool | None = None
        try:
            async with asyncio.timeout(DEADLINE):
                seen = await self._serving.look(worker)
            reachable = seen is not None
        except (AdapterError, StoreError, TimeoutError):
            pass  # could not tell
        except Exception:
            log.exception("looking at a worker failed in a way that nobody foresaw", worker=worker.name)
        event = Watched(id=self._new_id(), at=self._clock(), worker=worker.name, reachable=reachable, seen=seen)
        await self._feed(event)
        return reachable

    async def _run(self, worker: Worker) -> None:
        await self._pause(worker, max(self._every, len(self._wake) / PER_S) * random.random())  # noqa: S311  (spreads the looks)
        while True:
            reachable = None
            try:
                async with self._room:
                    reachable = await self.look(worker)
            except DeciderFailed:
                pass  # logged and journaled by the core
            except SteppedDown:
                return
            now = time.monotonic()
            if not reachable:
                self._soon[worker.name] = max(self._soon.get(worker.name, 0.0), now)
            elif self._soon.get(worker.name, now) <= now:
                self._soon.pop(worker.name, None)
            soon = worker.name in self._soon
            await self._pause(worker, max(self._every, (len(self._soon) if soon else len(self._wake)) / PER_S))

    async def _pause(self, worker: Worker, seconds: float) -> None:
        """Wait, but not once the decider has asked."""
        wake = self._wake[worker.name]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await wake.wait()
        wake.clear()

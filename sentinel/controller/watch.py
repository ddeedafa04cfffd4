"""The controller's own look at every worker over the network.

This module exists so that a silent node is a question before it is a verdict: do its workers still answer? What always
holds: each worker is looked at on its own, so that one that hangs delays no other; at most ``AT_ONCE`` looks run at a time;
``reachable`` None means that it could not be told.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

import structlog

from sentinel.controller.core import DeciderFailed, SteppedDown
from sentinel.decide.events import AnyInstruction, Watched
from sentinel.model import Worker
from sentinel.serving import Adapter, AdapterError
from sentinel.store import StoreError

log = structlog.get_logger(__name__)

AT_ONCE = 32
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

    def follow(self, workers: tuple[Worker, ...]) -> None:
        """Watch exactly these from now on."""
        wanted = {w.name: w for w in workers}
        for task in self._tasks.values():
            task.cancel()
        self._tasks = {n: asyncio.create_task(self._run(w), name=f"watch {n}") for n, w in wanted.items()}

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

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
        await asyncio.sleep(self._every * random.random())  # noqa: S311  (spreads the looks over the period)
        while True:
            try:
                async with self._room:
                    await self.look(worker)
            except DeciderFailed:
                pass  # logged and journaled by the core
            except SteppedDown:
                return
            await asyncio.sleep(self._every)

"""The copy of all breakers that one gateway keeps: pushed by the store, with a slow poll, and its own while the store is away.

This module exists so that what is known of the breakers, and since when, stands apart from what is done with it (``breakers``).
What always holds: what is newer wins, by the version, which rises with the server's clock; a listing also says what is not there
any more; what was decided while the store was away is forgotten when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from typing import TypeVar

import structlog

from sentinel.gateway.breaker_copy import Copy, Panics
from sentinel.store import StoreError
from sentinel.store.breakers import CHUNK, BreakerRecords, Standing

log = structlog.get_logger(__name__)

T = TypeVar("T")


class BreakerView:
    """Everything that one gateway knows of the breakers of its workers."""

    def __init__(self, records: BreakerRecords, clock: Callable[[], float]) -> None:
        self._records, self._policy, self._clock = records, records.policy, clock
        self._copies: dict[str, Copy] = {}
        self._panics = Panics()
        self._probes: dict[str, str] = {}  # probe that we hold → worker
        self._serial = itertools.count(1)
        self._look = asyncio.Event()
        self._new: set[str] = set()  # workers of which nothing is known yet
        self._due = 0.0  # of the loop's clock: when all are asked about next
        self.away = False  # the store does not answer: this gateway decides alone
        self.trips = self.trips_alone = self.questions = 0  # counters for the metrics

    def members(self, pools: Mapping[str, Iterable[str]], apart: Collection[str] = ()) -> None:
        """The workers in rotation, by pool: those whose share may be open, and whose breakers are looked after. ``apart``: of them,
        those that prefill for the others. Their share is reckoned among themselves: a pool of two prefill workers and eight
        decoders is lost with the two."""
        wanted = {worker: pool for pool, workers in pools.items() for worker in workers}
        for worker in self._copies.keys() - wanted.keys():
            del self._copies[worker]
        for worker, pool in wanted.items():
            copy = self._copies.get(worker)
            if copy is None or copy.pool != pool:
                self._new.add(worker)
            if copy is None:
                copy = self._copies[worker] = Copy(worker, pool, self._clock())
            copy.pool, copy.apart = pool, worker in apart
        if self._new:
            self._look.set()  # what stands for these, before the next round

    def states(self) -> dict[str, str]:
        """Worker → closed, open or half_open, as this gateway goes by it now; for metrics and the admin port."""
        now = self._clock()
        return {worker: copy.effective(now) for worker, copy in self._copies.items()}

    def panics(self) -> list[str]:
        """Pools of which too many workers fail: all are tried, and a person is wanted."""
        return self._panics.all(self._clock())

    def pools(self) -> list[str]:
        return sorted({copy.pool for copy in self._copies.values()})

    async def _asked(self, question: Coroutine[object, object, T]) -> T:
        self.questions += 1
        return await question

    async def _watch(self) -> None:
        async for standing in self._records.watch():
            if not self.away:
                self._adopt(standing)

    async def _poll(self) -> None:
        """Rounds that ask about all, and between them at once about whoever is new: a round of ten thousand takes its time."""
        now = asyncio.get_running_loop().time
        while True:
            self._look.clear()
            new, self._new = self._new, set()
            whole = self.away or now() >= self._due
            workers = [(copy.worker, copy.pool) for w in (self._copies if whole else new) if (copy := self._copies.get(w))]
            if whole:
                self._due = now() + self._policy.poll
            listed: list[Standing] = []
            try:
                for at in range(0, len(workers), CHUNK):
                    listed += await self._asked(self._records.listing(dict(workers[at : at + CHUNK])))
                    if not self.away or at + CHUNK >= len(workers):  # a store that was away is back when it has told of all
                        self._found(listed)
                        listed = []
            except StoreError as error:
                self._lost(error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._due):
                    await self._look.wait()

    def _found(self, listed: list[Standing]) -> None:
        """Listings: each of one moment, so it also says what is not there any more; where a push overtook it, the push stands."""
        if self.away:
            log.info("the store answers again: its breakers stand", decided_alone=self.trips_alone)
            self._due = 0.0  # what was pushed meanwhile was not heard
        back, self.away = self.away, False
        for standing in listed:
            copy = self._copies.get(standing.worker)
            if copy is None:
                continue
            if back or copy.alone:
                copy.alone, copy.version = None, -1
            self._adopt(standing, lost=copy.version < standing.now)

    def _adopt(self, standing: Standing, *, lost: bool = False) -> None:
        now = self._clock()
        if standing.pool and self._panics.mark(standing.pool, now, standing.panic_left / 1000, standing.now):
            log.error("too many of a pool's workers fail: all are tried", pool=standing.pool)
        copy = self._copies.get(standing.worker)
        if copy is None or copy.alone or (standing.version < copy.version and not lost):
            return
        if standing.state != copy.state and standing.version != copy.version:
            seen = now - copy.since >= (standing.now - standing.since) / 1000  # else it opened before this gateway looked
            self.trips += standing.state == "open" and seen
            log.info("breaker", worker=copy.worker, pool=copy.pool, was=copy.state, now=standing.state, why=standing.why)
        copy.adopt(
            standing.state, standing.version, now + standing.left / 1000 if standing.state == "open" else 0.0,
            standing.pin, now + standing.pin_left / 1000,
        )  # fmt: skip

    def _lost(self, error: StoreError) -> None:
        if not self.away:
            self.away = True
            log.warning("the store is away: breakers go on from what was known, by this gateway alone", error=str(error))
        for copy in self._copies.values():
            copy.leave(self._policy, self._clock(), [p for p, worker in self._probes.items() if worker == copy.worker])

    def _follow(self, copy: Copy) -> None:
        copy.follow(self._clock(), -next(self._serial))

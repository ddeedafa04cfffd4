"""The guards of one gateway without a store: the same contracts, one process's own truth.

This module exists for a site that runs a single gateway, and for whoever measures the proxy by itself. What always holds:

* The rules are those of the shared guards where one process can keep them: minimum volume and rate before a breaker opens,
  half-open permits that expire and are counted, a cap on how much of a pool may be open, growing back-off.
* There are no other reporters here, so one is enough; there is no lease, so nothing is ever fenced.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from sentinel.gateway.guards import Outcome, Permit, Refusal, Slot


class BreakerRules(msgspec.Struct, frozen=True, kw_only=True):
    window_s: float = 10.0
    volume: int = 5  # outcomes in the window before a rate means anything
    rate: float = 0.5  # of failures, that opens
    open_s: float = 5.0  # times the number of trips
    open_max_s: float = 300.0
    probes: int = 3  # permits of a half-open breaker at one time, and successes that close it
    probe_s: float = 60.0  # after which a permit is given to somebody else
    share: float = 0.5  # of a pool that may be open; past it everything is routed to again (panic)


class _Record:
    __slots__ = ("begun", "good", "half", "pool", "probes", "seen", "trips", "until", "version")

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self.seen: deque[tuple[float, bool]] = deque()  # when, failed
        self.until = 0.0  # open until then, half-open after; 0: closed
        self.trips = self.good = self.version = 0
        self.half = -1  # the version from which it closed
        self.probes: dict[str, float] = {}  # id → when it expires
        self.begun: set[str] = set()  # probes that succeeded, whose answers go on


class AloneBreakers:
    """Implements ``guards.Breakers``. ``members`` tells which worker is in which pool, for the cap."""

    def __init__(self, rules: BreakerRules = BreakerRules(), clock: Callable[[], float] = time.monotonic) -> None:  # noqa: B008
        self._rules, self._clock = rules, clock
        self._records: dict[str, _Record] = {}
        self._size: Counter[str] = Counter()
        self._ids = itertools.count(1)

    def members(self, pools: Mapping[str, Iterable[str]], apart: Collection[str] = ()) -> None:
        """The workers in rotation, by pool; what is not among them is forgotten. ``apart`` changes nothing here."""
        pool_of = {worker: pool for pool, workers in pools.items() for worker in workers}
        self._size = Counter(pool_of.values())
        self._records = {w: r for w, r in self._records.items() if pool_of.get(w) == r.pool}
        for worker, pool in pool_of.items():
            self._records.setdefault(worker, _Record(pool))

    def closed(self, worker: str) -> bool:
        record = self._records.get(worker)
        return record is None or not record.until or self._panic(record.pool)

    async def permit(self, worker: str) -> Permit | None:
        record = self._records.get(worker)
        if record is None or not record.until or self._panic(record.pool):
            return Permit(worker=worker, version=record.version if record else 0)
        now = self._clock()
        if now < record.until:
            return None
        record.probes = {name: end for name, end in record.probes.items() if end > now}
        if len(record.probes) >= self._rules.probes:
            return None
        probe = f"p{next(self._ids)}"
        record.probes[probe] = now + self._rules.probe_s
        return Permit(worker=worker, probe=probe, version=record.version)

    def last(self, worker: str) -> Permit | None:
        record = self._records.get(worker)
        return Permit(worker=worker, version=record.version if record else 0)

    def begun(self, permit: Permit) -> None:
        record = self._records.get(permit.worker)
        if record is not None and record.probes.pop(permit.probe, None) is not None and permit.version == record.version:
            record.begun.add(permit.probe)
            self._probed(record, failed=False)

    def ended(self, permit: Permit, outcome: Outcome) -> None:
        record = self._records.get(permit.worker)
        if record is None:
            return
        begun, failed, now = permit.probe in record.begun, outcome is Outcome.FAILED, self._clock()
        record.begun.discard(permit.probe)
        held = record.probes.pop(permit.probe, None) is not None if permit.probe else False
        fits = permit.version == record.version or (begun and permit.version == record.half)
        if outcome not in (Outcome.FINE, Outcome.FAILED) or not fits or (begun and not failed):
            return
        if record.until:
            if held or begun:
                self._probed(record, failed=failed)
            return
        if not failed and not record.seen:
            return  # the usual case: nothing to weigh it against
        record.seen.append((now, failed))
        while record.seen[0][0] < now - self._rules.window_s or len(record.seen) > 1000:
            record.seen.popleft()
        failures = sum(bad for _, bad in record.seen)
        if failed and failures >= self._rules.volume and failures >= self._rules.rate * len(record.seen):
            self._open(record)
        elif not failures:
            record.seen.clear()

    def states(self) -> dict[str, str]:
        """Worker → closed, open or half_open."""
        now = self._clock()
        return {w: "closed" if not r.until else "open" if now < r.until else "half_open" for w, r in self._records.items()}

    def _probed(self, record: _Record, *, failed: bool) -> None:
        if failed:
            self._open(record)
            return
        record.good += 1
        if record.good >= self._rules.probes:
            record.until = 0.0
            record.good = record.trips = 0
            record.half, record.version = record.version, record.version + 1

    def _open(self, record: _Record) -> None:
        record.trips += 1
        record.version += 1
        record.good = 0
        record.seen.clear()
        record.probes.clear()
        pause = min(self._rules.open_max_s, self._rules.open_s * record.trips)
        record.until = self._clock() + pause * random.uniform(1.0, 1.2)  # noqa: S311  (spreads probes, hides nothing)

    def _panic(self, pool: str) -> bool:
        opened = sum(r.pool == pool and bool(r.until) for r in self._records.values())
        return opened > self._rules.share * self._size[pool]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Requests at one time; 0: no limit."""

    pool: int = 0
    worker: int = 0
    tenant: int = 0
    queue: int = 100  # that wait, per pool


class AloneAdmission:
    """Implements ``guards.Admission``: counts, and one queue per pool in order of arrival."""

    def __init__(self, limits: Limits = Limits()) -> None:  # noqa: B008
        self._limits = limits
        self._kept = [(n, most) for n in ("pool", "worker", "tenant") if (most := int(getattr(limits, n)))]
        self._held: dict[str, Slot] = {}
        self._count: Counter[tuple[str, str]] = Counter()
        self._queues: dict[str, deque[tuple[Slot, asyncio.Future[None]]]] = {}
        self._ids = itertools.count(1)

    @property
    def held(self) -> int:
        return len(self._held)

    async def enter(self, tenant: str) -> Refusal | None:
        return None  # there are no rates here

    async def admit(self, pool: str, worker: str, tenant: str, tokens: int, wait_s: float) -> Slot | Refusal:
        slot = Slot(id=f"s{next(self._ids)}", pool=pool, worker=worker, tenant=tenant, tokens=tokens)
        queue = self._queues.setdefault(pool, deque())
        limit = self._full(slot)
        if not limit and not queue:
            self._give(slot)
            return slot
        limit = limit or "queue"
        if wait_s <= 0 or len(queue) >= self._limits.queue:
            return Refusal(limit=limit, why=f"the limit of requests at one time is reached ({limit})", retry_after_s=1.0)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append((slot, turn))
        try:
            async with asyncio.timeout(wait_s):
                await turn
            return slot
        except BaseException as error:
            if (slot, turn) in queue:
                queue.remove((slot, turn))
            self.release(slot)  # it may have been given in the moment in which the wait was given up
            self._call(pool)
            if isinstance(error, TimeoutError):
                return Refusal(limit="queue", why=f"no place became free within {wait_s:g} s ({limit})", retry_after_s=1.0)
            raise

    def release(self, slot: Slot) -> None:
        if self._held.pop(slot.id, None) is None:
            return
        for name, _ in self._kept:
            self._count[name, getattr(slot, name)] -= 1
        self._call(slot.pool)

    def _give(self, slot: Slot) -> None:
        self._held[slot.id] = slot
        for name, _ in self._kept:
            self._count[name, getattr(slot, name)] += 1

    def _call(self, pool: str) -> None:
        """Let in whoever waits and fits now, the first first; who is held up by a worker or tenant holds up nobody else."""
        queue = self._queues.get(pool)
        for waiting in tuple(queue or ()):
            slot, turn = waiting
            if not turn.done() and not self._full(slot):
                assert queue is not None  # noqa: S101  (it was just gone through)
                queue.remove(waiting)
                self._give(slot)
                turn.set_result(None)

    def _full(self, slot: Slot) -> str:
        """The limit that it does not fit under; "" when it fits."""
        return next((name for name, most in self._kept if self._count[name, getattr(slot, name)] >= most), "")

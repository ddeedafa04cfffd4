"""The gateways' own word: who they are, which route table they obey, how the breakers stand that they share.

This module exists so that the decider hears what clients feel, and the shell knows when no gateway sends to a worker any more. What
always holds:

* The decider is told of changes only (``Relayed``), and every round that the gateways are still heard. A store that does not answer
  is told as nothing, and the decider draws its own conclusion from that.
* A breaker's transition is looked at as soon as it is pushed; the rounds behind it are slow, and a large fleet's are spread.
* Where there is no gateway that is said once, and nothing else is asked of the store.
* ``behind`` answers by the store's own clock; whoever fell silent while others spoke is not waited for.
* Pins that the store has lost are set again (``pinned``).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable
from typing import Literal, Protocol

import structlog

from sentinel.controller.core import DeciderFailed, SteppedDown
from sentinel.controller.pinned import Pin, Pinned
from sentinel.decide.state.events import AnyInstruction, Relay, Relayed, Replica
from sentinel.gateway.models import frontend_name
from sentinel.model import Fleet, Worker
from sentinel.store import StoreError
from sentinel.store.breakers import CHUNK, BreakerRecords, Standing
from sentinel.store.gateways import Gateways, Presence

log = structlog.get_logger(__name__)

EVERY_S = 1.0  # seconds between two rounds; less than store.gateways.AWAY_S
PER_ROUND = 1000  # workers asked about in one; more than these take turns
GATHER_S = 0.05  # what is pushed within this long is looked at together
WHY_MAX = 300  # characters of a pin's reason


class Obeyed(Protocol):
    """All that effects know of the gateways."""

    def version(self) -> int:
        """Of the route table that was published last."""
        ...

    async def behind(self, version: int) -> list[str]:
        """Names of the gateways that are there and obey an older one. Raises StoreError, also when nobody can know."""
        ...

    async def pin(self, worker: Worker, state: Literal["open", "closed", ""], *, lasts_s: float, by: str, why: str) -> str:
        """Hold the worker's breaker; returns why not, "" when it was done. Raises StoreError."""
        ...


class GatewayWatch:
    """One leadership's ear at the gateways; implements ``Obeyed``. ``feed`` submits an event and waits until it is durable."""

    def __init__(
        self,
        presences: Gateways,
        records: BreakerRecords,
        *,
        version: Callable[[], int],
        feed: Callable[[Relayed], Awaitable[list[AnyInstruction]]],
        new_id: Callable[[], str],
        clock: Callable[[], float],
        valid: Callable[[], bool] = lambda: True,
        pins: dict[str, Pin] | None = None,
        every: float = EVERY_S,
        frontends: int = 1,
        per_round: int = PER_ROUND,
    ) -> None:
        """``valid``: whether the lease can still be ours. ``pins``: see ``Pinned``. ``frontends``: how many Dynamo frontends the
        site has, each with a breaker of its own in every pool."""
        self._presences, self._records, self.version = presences, records, version
        self._pinned = Pinned(records, {} if pins is None else pins, clock=clock, valid=valid)
        self._feed, self._new_id, self._clock, self._every = feed, new_id, clock, every
        self._frontends = range(1, max(1, frontends) + 1)
        self._pool_of: dict[str, str] = {}  # whom the gateways ask → pool
        self._per_round = per_round
        self._turn = 0  # of so many workers each
        self._told: dict[str, Relay] = {}  # as they were told last; of those that left as well, since the decider keeps it
        self._replicas: tuple[Replica, ...] | None = None  # as they were told last
        self._panics: dict[str, bool] = {}
        self._pushed: set[str] = set()
        self._news = asyncio.Event()
        self._away = False

    # -- for effects --------------------------------------------------------------------------------------------------

    async def behind(self, version: int) -> list[str]:
        return await self._presences.behind(version, self.version())

    async def pin(self, worker: Worker, state: Literal["open", "closed", ""], *, lasts_s: float, by: str, why: str) -> str:
        stands = await self._pinned.hold(worker.name, worker.pool, state, lasts_s=lasts_s, by=by, why=why[:WHY_MAX])
        return "" if stands.pin == state else f"{stands.pin_by} holds the breaker of {worker.name} {stands.pin}"

    # -- for the decider ----------------------------------------------------------------------------------------------

    def follow(self, fleet: Fleet) -> None:
        """Ask about these from now on: each worker, and in the place of those behind Dynamo frontends the frontends themselves."""
        self._pool_of = {w.name: w.pool for w in fleet.workers if w.adapter != "dynamo"}
        behind = dict.fromkeys(w.pool for w in fleet.workers if w.adapter == "dynamo")
        self._pool_of |= {frontend_name(pool, number): pool for pool in behind for number in self._frontends}
        self._panics = {pool: on for pool, on in self._panics.items() if pool in self._pool_of.values()}

    async def run(self) -> None:
        """Listen and look until this is cancelled, or the leadership ends (SteppedDown)."""
        listening = asyncio.create_task(self._listen(), name="gateways pushed")
        try:
            while True:
                await self._look(self._round)
                end = asyncio.get_running_loop().time() + self._every
                while (left := end - asyncio.get_running_loop().time()) > 0 and await self._woken(left):
                    await self._look(self._at_once)
        finally:
            listening.cancel()

    async def _listen(self) -> None:
        async for standing in self._records.watch():
            self._pushed.add(standing.worker)
            self._news.set()

    async def _woken(self, seconds: float) -> bool:
        """Whether anything was pushed within so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        await asyncio.sleep(GATHER_S)
        self._news.clear()
        return True

    async def _look(self, how: Callable[[], Awaitable[None]]) -> None:
        try:
            await how()
            self._away = False
        except StoreError as error:
            if not self._away:
                log.warning("what the gateways see could not be told", error=str(error))
            self._away = True
        except DeciderFailed:
            pass  # logged and journaled by the core
        except SteppedDown:
            raise
        except Exception:
            log.exception("looking at the gateways failed in a way that nobody foresaw")

    async def _round(self) -> None:
        at = self._clock()
        replicas = _replicas(await self._presences.all())
        if not replicas and not self._replicas:
            if self._replicas is None:
                await self._tell(at, (), [])
            return
        names = list(self._pool_of)
        turns = max(1, -(-len(names) // self._per_round))
        self._turn = (self._turn + 1) % turns
        asked = names[self._turn :: turns]
        self._pushed.difference_update(asked)  # whoever else was pushed is looked at right after this round
        await self._tell(at, replicas, await self._listing(asked))

    async def _at_once(self) -> None:
        pushed, self._pushed = self._pushed & self._pool_of.keys(), set()
        if pushed and self._replicas:
            at = self._clock()
            await self._tell(at, self._replicas, await self._listing(sorted(pushed)))

    async def _listing(self, names: Iterable[str]) -> list[Standing]:
        found, left = [], iter(names)
        while some := {name: self._pool_of[name] for name in itertools.islice(left, CHUNK)}:
            found += await self._pinned.kept(await self._records.listing(some, evidence=True))
        return found

    async def _tell(self, at: float, replicas: tuple[Replica, ...], standings: list[Standing]) -> None:
        """Say what is news in it."""
        for standing in standings:
            self._panics[standing.pool] = standing.panic_left > 0
        changed: list[Relay] = []
        window = float(self._records.policy.window)
        for relay in (_relay(standing, window) for standing in standings):
            if relay != self._told.get(relay.worker, Relay(worker=relay.worker)):
                changed.append(relay)
                self._told[relay.worker] = relay
        news = replicas if replicas != self._replicas else None
        self._replicas = replicas
        panics = tuple(sorted(pool for pool, on in self._panics.items() if on))
        await self._feed(
            Relayed(id=self._new_id(), at=at, window=window, replicas=news, workers=tuple(changed), panics=panics)
        )


def _replicas(presences: Iterable[Presence]) -> tuple[Replica, ...]:
    """Processes of one name as one; of those that are there, the one that is furthest behind speaks."""
    found: dict[tuple[str, bool], list[int]] = {}
    for p in presences:
        found.setdefault((p.name, p.left_s > 0), []).append(p.version)
    there = {name for name, is_there in found if is_there}
    kept = ((name, is_there, obeyed) for (name, is_there), obeyed in found.items() if is_there or name not in there)
    return tuple(Replica(name=n, version=min(v), newest=max(v), there=is_there) for n, is_there, v in sorted(kept))


def _relay(s: Standing, window: float) -> Relay:
    lately = s.now - s.since <= window * 1000  # when a probe succeeded is not kept: certainly after the breaker went half-open
    due = s.state == "open" and s.left <= 0  # the next request is a probe
    return Relay(
        worker=s.worker,
        breaker="half_open" if due else s.state,
        why=s.why if s.state != "closed" or s.pin else "",
        hosts=tuple(s.hosts.split()) if s.state != "closed" else (),
        answers=s.volume > s.failed or (s.wins > 0 and lately),
        pin=s.pin,
        pin_by=s.pin_by if s.pin else "",
        pin_until=round((s.now + s.pin_left) / 1000, 3) if s.pin else 0.0,
    )

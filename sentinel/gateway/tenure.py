"""One gateway's lease on its parts of the limits: renewed, told in batches, and not trusted for longer than it lasts.

This module exists so that admission never has to ask whether it may go on. What always holds here:

* ``until`` is the moment to which what is held may be handed out: reckoned from before the last conclusive question was asked, by a
  clock that goes on while this process is stopped or the machine sleeps. A process that wakes up after it hands out nothing until
  it has asked again.
* While a statement is on its way nothing is handed out beyond what it promises to keep.
* A store that cannot be reached leaves each gateway its static share of every limit: the limit by the gateways known last, and of
  tokens one request that is larger. What was leased before stays ours until the lease ends: the store gives it to nobody before.
* One statement is on its way at a time; it carries everything that changed since the one before it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import structlog

from sentinel.gateway.guards import told_if_broken
from sentinel.gateway.scopes import Scope
from sentinel.settings_gateway import AdmissionSettings
from sentinel.store import StoreError
from sentinel.store.admission import AdmissionRecords, Need

log = structlog.get_logger(__name__)

AGAIN_S = 0.2  # after a question that failed
SLOW_S = 0.005  # a statement that takes longer leaves those that wait to the limits as they are known


class Tenure:
    """The lease of one process. ``scopes`` are shared with the admission, which is told (``changed``) when they got a new cap."""

    def __init__(
        self,
        records: AdmissionRecords,
        settings: AdmissionSettings,
        owner: str,
        scopes: dict[str, Scope],
        changed: Callable[[Sequence[Scope]], None],
        *,
        clock: Callable[[], float],
    ) -> None:
        self._records, self._owner, self._scopes, self._changed, self._clock = records, owner, scopes, changed, clock
        self.settings = settings
        self.until = 0.0
        self.away = False  # the store does not answer
        self.owners, self.fence, self.statements = settings.replicas, 0, 0
        self.settling = False  # the store does not know yet what everybody holds
        self._leased = 0.0  # to when the lease itself may be trusted
        self._renewed = -settings.lease
        self._full = True
        self._asked: float | None = None  # when the statement on its way was sent
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def ask(self) -> None:
        """Somebody needs more than is held: do not wait for the next tick."""
        self._wake.set()

    def slow(self, now: float) -> bool:
        """Whether more can not be expected from the store right now."""
        return self.away or (self._asked is not None and now - self._asked > SLOW_S)

    def _patience(self) -> float:
        """How long one question may take: so that, alone, the next one is over well before what this one allowed is."""
        return max(AGAIN_S, (self.settings.lease - self.settings.margin - AGAIN_S) / 3)

    def left(self) -> float:
        """Seconds for which what is held may still be handed out; below 0: not any more."""
        return self.until - self._clock()

    def share(self, limit: int) -> int:
        """This gateway's static share."""
        return max(1, limit // self.owners) if limit else 0

    def large(self, scope: Scope, amount: int) -> bool:
        """Whether one request may go beyond it: alone, of a limit of which nothing is in use here, so that what is larger than the
        share is not kept out, and with it who stands behind it, for as long as the store is away."""
        return self.away and not scope.used and amount <= scope.limit

    async def start(self) -> None:
        """Ask once, so that the first request finds a lease or a static share, and go on asking."""
        await self._state(full=True)
        self._task = asyncio.create_task(self._run(), name="tenure")
        self._task.add_done_callback(told_if_broken)

    async def stop(self) -> None:
        """Hand out nothing more, and give everything back."""
        self.until = 0.0
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if not self.away:
            with contextlib.suppress(StoreError):
                await self._records.leave(self._owner)

    async def _run(self) -> None:
        while True:
            lease = self.settings.lease
            if await self._state(full=self._full or self._clock() - self._renewed >= lease / 3):
                await self._pause(max(0.0, min(self.settings.tick, self._renewed + lease / 3 - self._clock())))
            elif self.away:
                await asyncio.sleep(AGAIN_S)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    async def _state(self, *, full: bool) -> bool:
        """Say what is held and wanted, if there is anything to say. False: it has to be said again."""
        self._wake.clear()
        sent = self._clock()
        said = self._said(sent, full=full)
        if not said and not full:
            return True
        self._asked = sent
        self.statements += 1
        try:
            needs = [need for _, need in said]
            async with asyncio.timeout(self._patience()):
                grant = await self._records.state(self._owner, self.statements, needs, full=full, owners=self.owners)
        except (StoreError, TimeoutError) as error:
            self._lost(error, sent)
            return False
        finally:
            self._asked = None
        if grant is None:
            log.warning("the lease was over: nothing is admitted until it is renewed")
            self.until = self._leased = 0.0
            self._full = True
            return False
        if self.away:
            log.info("the store answers again: the lease is renewed", owners=grant.owners)
        self.away, self._full, self.settling = False, False, grant.settling_s > 0
        self.owners, self.fence = max(grant.owners, self.owners if self.settling else 1), grant.fence
        self.until = self._leased = sent + self.settings.lease - self.settings.margin
        if full:
            self._renewed = sent
        now = self._clock()
        for (scope, need), cap in zip(said, grant.caps, strict=True):
            # What was kept but may not be used is nobody's until it is said: again then, at the next tick.
            scope.cap, scope.said = cap, None if cap < need.keep else (need.demand, need.want, need.head)
            scope.short_until = now + 2 * self.settings.tick if cap < need.demand else 0.0
        self._changed([scope for scope, _ in said])
        return True

    def _said(self, now: float, *, full: bool) -> list[tuple[Scope, Need]]:
        """What there is to say, and from now on nothing beyond it is handed out. Alone, the static share is kept meanwhile: whether
        the question will be answered is not known."""
        told: list[tuple[Scope, Need]] = []
        for scope in self._scopes.values():
            need = scope.need(now, self.settings.block)
            if self.away:
                need = need._replace(keep=max(need.keep, scope.cap))
            news = (need.demand, need.want, need.head) != scope.said or need.keep < scope.cap or scope.cap < need.demand
            if news or (full and (scope.cap or need.want)):
                scope.cap, scope.said = need.keep, None  # whether it was heard is not known before the answer is there
                told.append((scope, need))
        return told

    def _lost(self, error: Exception, sent: float) -> None:
        if not self.away:
            why = str(error) or f"no answer within {self._patience():g} s"
            log.warning("the store is away: each limit goes on with this gateway's static share", error=why, owners=self.owners)
        self.away = self._full = True
        leased = self._clock() < self._leased
        for scope in self._scopes.values():
            scope.cap = max(scope.cap if leased else 0, self.share(scope.limit))
        self.until = max(self._leased, sent + self.settings.lease - self.settings.margin)
        self._changed(list(self._scopes.values()))

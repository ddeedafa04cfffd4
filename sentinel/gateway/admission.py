"""Who may send a request now: slots handed out from memory, a short fair queue, and refusals that say when to come back.

This module exists so that overload is a plateau and not a collapse. What always holds here:

* An ordinary admission compares a few numbers; the store hears of it later, with everything else (``tenure``).
* A request that cannot be expected to get its turn in time is refused at once, from what is known of how fast things end.
* What was given is given back once, however often it is released, and also when whoever waited for it went away meanwhile.
* Tenants take turns in every queue; what is reserved for one of them is lent to nobody.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from sentinel.boottime import boottime
from sentinel.gateway.guards import Refusal, Slot
from sentinel.gateway.lanes import Lanes
from sentinel.gateway.rates import Rates
from sentinel.gateway.scopes import Lane, Scope, Waiter
from sentinel.gateway.tenure import Tenure
from sentinel.settings_gateway import AdmissionSettings, TenantLimits
from sentinel.store.admission import AdmissionRecords
from sentinel.store.rates import RateRecords

RETRY_MAX_S = 30.0
RETRY_UNKNOWN_S = 1.0  # nothing ended here yet, so nobody knows how long it takes
HOPE = 0.5  # of the time that it would wait, what is expected at most: who is let in line is then hardly ever refused late
ASK_S = 0.05  # even who does not want to wait waits for one answer of the store, this long at most
_KINDS = {"pool": "the pool", "worker": "the worker", "tenant": "this tenant"}


class LeaseAdmission:
    """Implements ``guards.Admission``. ``start`` before use, ``stop`` at the end, ``configure`` when the limits change."""

    def __init__(
        self,
        records: AdmissionRecords,
        settings: AdmissionSettings,
        tenants: Mapping[str, TenantLimits],
        *,
        owner: str,
        rates: RateRecords | None = None,
        clock: Callable[[], float] = boottime,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """``owner``: this process, never used by another one (a boot id). ``rates``: for tenants that have one; without it there is
        no limit on those."""
        self._settings, self._owner, self._clock, self._draw = settings, owner, clock, draw
        self._lanes = Lanes(settings, tenants, lambda limit: self.tenure.share(limit) if self.tenure.away else 0)
        self._held: dict[str, tuple[Lane, int]] = {}
        self._fence = Scope("fence", "fenced", 0)  # who waits for the lease
        self._serial = itertools.count(1)
        self._waiting = 0
        self.refused: Counter[str] = Counter()  # by limit
        self._rates = Rates(rates, tenants, lambda: self.tenure.owners, clock=clock, draw=draw) if rates else None
        self.tenure = Tenure(records, settings, owner, self._lanes.scopes, self._changed, clock=clock)

    # -- guards.Admission ---------------------------------------------------------------------------------------------

    async def enter(self, tenant: str) -> Refusal | None:
        if self._rates is None or self._rates.free(tenant):
            return None
        over = await self._rates.ask(tenant)
        if over is not None:
            self.refused[over.limit] += 1
        return over

    async def admit(self, pool: str, worker: str, tenant: str, tokens: int, wait_s: float) -> Slot | Refusal:
        lane = self._lanes.known.get((pool, worker, tenant)) or self._lanes.make(pool, worker, tenant)
        now = self._clock()
        if now < self.tenure.until or not lane.limited:
            short = self._short(lane, tokens)
            if short is None:
                return self._take(lane, tokens, now)
        else:
            short = self._fence
        return await self._wait(lane, tokens, short, now, wait_s)

    def release(self, slot: Slot) -> None:
        held = self._held.pop(slot.id, None)
        if held is None:
            return
        lane, tokens = held
        now = self._clock()
        freed = [*lane.counts, *lane.sizes]
        for scope in freed:
            scope.gave(scope.amount(tokens), now)
        if lane.own:
            freed.append(lane.own.give(now))
        if not self._settings.block:
            for scope in freed:
                scope.cap = min(scope.cap, scope.used)
            self.tenure.ask()
        for scope in freed:
            self._serve(scope, now)

    # -- what others ask ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self.tenure.start()

    async def stop(self) -> None:
        """Refuse who waits, hand out nothing more, give everything back. What still runs is not counted any more."""
        await self.tenure.stop()
        for scope in [self._fence, *self._lanes.scopes.values()]:
            while scope.waiters:
                self._refuse(next(scope.heads()), scope, self._clock())

    def configure(self, settings: AdmissionSettings, tenants: Mapping[str, TenantLimits]) -> None:
        """Other limits from now on; what runs keeps its slots."""
        self._settings = self.tenure.settings = settings
        self._lanes.configure(settings, tenants)
        if self._rates:
            self._rates.configure(tenants)
        now = self._clock()
        waiters = [w for scope in self._lanes.scopes.values() for line in scope.queue.values() for w in line]
        for waiter in waiters:
            if waiter.scope:
                waiter.scope.leave(waiter)
            waiter.lane = self._lanes.make(waiter.lane.pool, waiter.lane.worker, waiter.lane.tenant)
            self._line_up(waiter, self._fence, now)
        self._serve(self._fence, now)

    @property
    def held(self) -> int:
        """Requests that are admitted and not given back."""
        return len(self._held)

    @property
    def waiting(self) -> int:
        return self._waiting

    def picture(self) -> dict[str, dict[str, int]]:
        """Limit → what it is, what this gateway may hold of it, uses, and has waiting for it; for metrics and the admin port."""
        return {
            s.name: {"limit": s.limit, "cap": s.cap, "used": s.used, "waiting": s.waiters}
            for s in [*self._lanes.scopes.values(), self._fence]
        }

    # -- handing out --------------------------------------------------------------------------------------------------

    def _short(self, lane: Lane, tokens: int, served: Scope | None = None) -> Scope | None:
        """The first limit that leaves no room, or that others wait for already (but for ``served``, whose turn it is)."""
        for scope in lane.counts:
            if scope.used >= scope.cap or (scope.waiters and scope is not served):
                return scope
        for scope in lane.sizes:
            if scope.used + tokens > scope.cap and not self.tenure.large(scope, tokens):
                return scope
            if scope.waiters and scope is not served:
                return scope
        return lane.own.short(served) if lane.own else None

    def _take(self, lane: Lane, tokens: int, now: float) -> Slot:
        for scope in lane.counts:
            scope.used += 1
            scope.active = now
        for scope in lane.sizes:
            scope.used += tokens
            scope.active = now
            scope.unit += (tokens - scope.unit) * 0.05
        if lane.own:
            lane.own.take(now)
        lane.used_at = now
        name = f"{self._owner}:{next(self._serial)}"
        self._held[name] = (lane, tokens)
        return Slot(id=name, pool=lane.pool, worker=lane.worker, tenant=lane.tenant, tokens=tokens, fence=self.tenure.fence)

    async def _wait(self, lane: Lane, tokens: int, short: Scope, now: float, wait_s: float) -> Slot | Refusal:
        amount = short.amount(tokens)
        for scope in lane.needs(short):
            if scope.amount(tokens) > scope.limit:
                wants = f"{tokens} tokens" if scope.sized else "a slot"
                why = f"It wants {wants}, and {_KINDS[scope.kind]} never has more than {scope.limit}."
                self.refused[scope.kind] += 1
                return Refusal(limit=scope.kind, why=why, retry_after_s=RETRY_MAX_S, never=scope.sized)
        # While the store is slow the last answer stands; a limit of which it never said that it is used up is not known to be.
        known = now < short.short_until or (self.tenure.slow(now) and (self.tenure.away or short.short_until > 0))
        known = known or 0 < short.limit <= short.cap  # all of it is here
        expected = short.wait(lane.tenant, amount, now) if known else None
        if self._waiting >= self._settings.queue or (known and (wait_s <= 0 or (expected or 0.0) > wait_s * HOPE)):
            return self._refusal(short if self._waiting < self._settings.queue else None, expected)
        deadline = now + max(wait_s, ASK_S)
        loop = asyncio.get_running_loop()
        waiter = Waiter(lane, tokens, deadline, loop.create_future(), patient=wait_s > 0)
        waiter.timer = loop.call_later(deadline - now, self._expire, waiter)
        self._waiting += 1
        self._line_up(waiter, short, now)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            self._gone(waiter)
            raise

    def _line_up(self, waiter: Waiter, scope: Scope, now: float, *, first: bool = False) -> None:
        hopeful = scope is not self._fence and now >= scope.short_until and not self.tenure.away
        scope.line_up(waiter, all_of_it=hopeful, first=first)
        for claimed in waiter.claims:
            claimed.active = now
        if hopeful:
            self.tenure.ask()

    def _serve(self, scope: Scope, now: float, only: str = "") -> None:
        """Let in whoever waits here and now fits, by turns; who is kept out by another limit goes to wait for that one.
        ``only``: one tenant's, in the common queue, since something of its own came free."""
        full = now >= self.tenure.until  # who waits is let in by the answer that renews the lease
        while scope.waiters and not full:
            for waiter in scope.heads(only):
                if waiter.future.done():  # the client left in this very round of the loop: on to the next of its tenant
                    scope.leave(waiter)
                    self._waiting -= 1
                    break
                short = self._short(waiter.lane, waiter.tokens, scope)
                if short is scope:
                    full = True
                    break
                scope.leave(waiter)
                scope.turned(waiter.lane.tenant)
                if short is None:
                    self._waiting -= 1
                    self._end(waiter, self._take(waiter.lane, waiter.tokens, now))
                else:
                    self._line_up(waiter, short, now, first=True)
            full = full or (bool(only) and only not in scope.queue)
        if scope.beside is not None and scope.beside[1] in scope.beside[0].queue:
            self._serve(scope.beside[0], now, scope.beside[1])

    def _end(self, waiter: Waiter, outcome: Slot | Refusal) -> None:
        if waiter.timer:
            waiter.timer.cancel()
        if not waiter.future.done():  # who left meanwhile is refused in vain, but never let in (``_serve``)
            waiter.future.set_result(outcome)

    def _gone(self, waiter: Waiter) -> None:
        """The client left: out of the queue, or the slot that it was just given comes back."""
        if waiter.timer:
            waiter.timer.cancel()
        if waiter.scope is not None:
            scope = waiter.scope
            scope.leave(waiter)
            self._waiting -= 1
            self._serve(scope, self._clock())
        elif waiter.future.done() and not waiter.future.cancelled() and isinstance(slot := waiter.future.result(), Slot):
            self.release(slot)

    def _expire(self, waiter: Waiter) -> None:
        scope = waiter.scope
        if scope is not None:
            now = self._clock()
            self._refuse(waiter, scope, now)
            self._serve(scope, now)

    def _refuse(self, waiter: Waiter, scope: Scope, now: float) -> None:
        expected = scope.wait(waiter.lane.tenant, 0, now)
        scope.leave(waiter)
        self._waiting -= 1
        self._end(waiter, self._refusal(scope, expected))

    def _refusal(self, scope: Scope | None, expected: float | None) -> Refusal:
        seconds = min(RETRY_MAX_S, max(0.1, RETRY_UNKNOWN_S if expected is None else expected)) * (1 + self._draw() / 2)
        if scope is None:
            limit, why = "queue", "Too many requests wait already."
        elif scope is self._fence:
            limit, why = "fenced", "This gateway has to renew its lease before it admits anything."
        else:
            limit, why = (
                scope.kind,
                f"All of what {_KINDS[scope.kind]} may {'hold in tokens' if scope.sized else 'run at once'} is in use.",
            )
        self.refused[limit] += 1
        return Refusal(limit=limit, why=why, retry_after_s=round(seconds, 3))

    # -- limits -------------------------------------------------------------------------------------------------------

    def _changed(self, scopes: Sequence[Scope]) -> None:
        """The store answered, or cannot be reached: whoever fits goes in, who has no chance any more is told so now."""
        now = self._clock()
        if self._fence.waiters and now < self.tenure.until:
            self._serve(self._fence, now)
        for scope in scopes:
            self._serve(scope, now)
            if scope.waiters and (now < scope.short_until or self.tenure.away):
                self._prune(scope, now)
        self._lanes.sweep(now, (lane for lane, _ in self._held.values()))

    def _prune(self, scope: Scope, now: float) -> None:
        """There is no more of it for now: whoever still waits for it waits for what ends here, and wants nothing else meanwhile."""
        for waiter in [w for line in scope.queue.values() for w in line if not w.patient]:
            self._refuse(waiter, scope, now)
        for tenant, line in list(scope.queue.items()):
            while line and (wait := scope.wait(tenant, 0, now)) is not None and wait > line[-1].deadline - now:
                self._refuse(line[-1], scope, now)
            for waiter in line:
                scope.claim(waiter, (scope,))

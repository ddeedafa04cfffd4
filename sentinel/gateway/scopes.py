"""One limit as one gateway sees it: what it may hold, what it uses, who waits for it, and how fast it comes free.

This module exists so that admitting from memory is a few comparisons, and so that the arithmetic of waiting stands in one place.
What always holds: ``used`` is exactly what the requests that run here took; who waits, waits in the queue of the one limit that
keeps it out; within a queue tenants take turns, and a tenant's own requests stay in order.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Iterator

from sentinel.gateway.guards import Refusal, Slot
from sentinel.store.admission import Need

RATE_S = 5.0  # time constant of the measured release rate
IDLE_S = 1.0  # a limit that nobody used for this long holds nothing ready


class Waiter:
    """A request that is not admitted yet. ``deadline``: by the admission's clock. ``patient``: it waits for what ends here, too,
    not only for the store's word."""

    __slots__ = ("claims", "deadline", "future", "lane", "patient", "scope", "timer", "tokens")

    def __init__(
        self, lane: Lane, tokens: int, deadline: float, future: asyncio.Future[Slot | Refusal], *, patient: bool
    ) -> None:
        self.lane, self.tokens, self.deadline, self.future, self.patient = lane, tokens, deadline, future, patient
        self.scope: Scope | None = None  # in whose queue it is
        self.claims: tuple[Scope, ...] = ()  # the limits of which the store hears that this one wants some
        self.timer: asyncio.TimerHandle | None = None


class Scope:
    """One limit. ``sized``: counted in tokens, else in requests. ``cap``: what this gateway may hold now."""

    __slots__ = (
        "active", "beside", "cap", "claimed", "first", "kind", "limit", "name", "queue", "rate", "rate_at", "said", "short_until",
        "sized", "unit", "used", "waiters", "waiting",
    )  # fmt: skip

    def __init__(self, name: str, kind: str, limit: int, *, sized: bool = False) -> None:
        self.name, self.kind, self.limit, self.sized = name, kind, limit, sized
        self.cap = self.used = 0
        self.waiters = self.waiting = 0  # how many are in the queue, and how much is wanted by those and by others
        self.claimed: dict[Waiter, None] = {}  # who wants it, in this queue and in others
        self.queue: OrderedDict[str, deque[Waiter]] = OrderedDict()  # tenant → its requests
        self.said: tuple[int, int, int] | None = None  # demand, want, head, as the store heard them last; None: not known
        self.beside: tuple[Scope, str] | None = None  # of a reserved part: the common part, and whose this is
        self.short_until = 0.0  # until then more is not to be had from the store
        self.active = -math.inf  # when it was used last
        self.unit = 1.0  # what one request takes, on average
        self.rate, self.rate_at, self.first = 0.0, 0.0, 0.0

    # -- using it -----------------------------------------------------------------------------------------------------

    def amount(self, tokens: int) -> int:
        return tokens if self.sized else 1

    def gave(self, amount: int, now: float) -> None:
        """Something ended: it is free again, and counts for the rate at which things end."""
        self.used -= amount
        if not self.first:
            self.first = self.rate_at = now
        self.rate = self.rate * math.exp((self.rate_at - now) / RATE_S) + amount / RATE_S
        self.rate_at = now

    def per_second(self, now: float) -> float:
        """Units that come free in a second, as measured of late; 0.0: not known."""
        known = 1.0 - math.exp((self.first - now) / RATE_S) if self.first else 0.0
        return self.rate * math.exp((self.rate_at - now) / RATE_S) / known if known > 0.01 else 0.0

    # -- waiting for it -----------------------------------------------------------------------------------------------

    def line_up(self, waiter: Waiter, *, all_of_it: bool, first: bool = False) -> None:
        """Into the queue. ``all_of_it``: the store may well have what is missing here, so everything that the request needs is
        wanted from it at once; else it wants nothing of other limits that it could not use yet."""
        line = self.queue.setdefault(waiter.lane.tenant, deque())
        (line.appendleft if first else line.append)(waiter)
        waiter.scope = self
        self.waiters += 1
        self.claim(waiter, waiter.lane.needs(self) if all_of_it else (self,))

    def leave(self, waiter: Waiter) -> None:
        line = self.queue[waiter.lane.tenant]
        if line[0] is waiter:
            line.popleft()
        else:
            line.remove(waiter)
        if not line:
            del self.queue[waiter.lane.tenant]
        waiter.scope = None
        self.waiters -= 1
        self.claim(waiter, ())

    @staticmethod
    def claim(waiter: Waiter, scopes: tuple[Scope, ...]) -> None:
        for scope in waiter.claims:
            scope.waiting -= scope.amount(waiter.tokens)
            del scope.claimed[waiter]
        for scope in scopes:
            scope.waiting += scope.amount(waiter.tokens)
            scope.claimed[waiter] = None
        waiter.claims = scopes

    def heads(self, only: str = "") -> Iterator[Waiter]:
        """The first of each tenant, or of one, in the order of their turns; a tenant whose turn is over goes last (``turned``)."""
        lines = [line for tenant, line in self.queue.items() if only in ("", tenant)]
        return (line[0] for line in lines if line)

    def turned(self, tenant: str) -> None:
        if tenant in self.queue:
            self.queue.move_to_end(tenant)

    def wait(self, tenant: str, amount: int, now: float) -> float | None:
        """Seconds that one more request of this tenant has to wait, by what ends here; None: nothing is known of that."""
        rate = self.per_second(now)
        if rate <= 0.0:
            return None
        line = self.queue.get(tenant)
        mine = sum(self.amount(w.tokens) for w in line) if line and self.sized else len(line or ())
        turns = len(self.queue) + (line is None)
        return min(self.waiting + amount, (mine + amount) * turns) / rate

    # -- towards the store --------------------------------------------------------------------------------------------

    def need(self, now: float, block: int) -> Need:
        """What to say of it. ``keep`` is a promise: no more is held until the answer is there. What is no limit any more is given
        up, also what still runs of it."""
        if not self.limit:
            return Need(self.name, 0, 0, 0, 0, 0)
        ready = math.ceil(block * self.unit) if now - self.active < IDLE_S else 0
        demand = self.used + self.waiting
        keep = max(self.used, min(self.cap, self.used + ready))
        if self.sized and self.claimed and not self.used:
            keep = 0  # what is ready is too little for who waits, and in its way: who holds nothing may have one that is large
        heads = self.heads() if self.waiters else itertools.islice(self.claimed, 1)
        head = min((self.amount(w.tokens) for w in heads), default=0)
        return Need(self.name, self.limit, keep, demand, demand + ready, head)


class Lane:
    """What one pool, worker and tenant together need; made once, so that an ordinary admission looks nothing up."""

    __slots__ = ("counts", "own", "pool", "sizes", "tenant", "used_at", "worker")

    def __init__(self, pool: str, worker: str, tenant: str) -> None:
        self.pool, self.worker, self.tenant = pool, worker, tenant
        self.counts: tuple[Scope, ...] = ()  # limits of requests
        self.sizes: tuple[Scope, ...] = ()  # limits of tokens
        self.own: Own | None = None  # in place of the pool's limit of requests, for a tenant with reserved capacity
        self.used_at = 0.0

    @property
    def limited(self) -> bool:
        """Without any limit nothing is leased, and so a lease that is over keeps nobody out."""
        return bool(self.counts or self.sizes or self.own)

    def needs(self, missing: Scope) -> tuple[Scope, ...]:
        """Every limit that it needs some of, ``missing`` among them."""
        own = (self.own.missing(missing),) if self.own else ()
        return (*self.counts, *self.sizes, *own)


class Own:
    """A tenant's reserved part of a pool, beside the part that is for all. What ends gives back the common part first, so that a
    tenant never holds common slots while its own are idle."""

    __slots__ = ("common", "common_used", "reserved")

    def __init__(self, reserved: Scope, common: Scope) -> None:
        self.reserved, self.common, self.common_used = reserved, common, 0

    def short(self, served: Scope | None = None) -> Scope | None:
        """The limit to wait for; None when there is room that nobody waits for (but for ``served``, whose turn it is)."""
        reserved, common = self.reserved, self.common
        if reserved.used < reserved.cap and (not reserved.waiters or served in (reserved, common)):
            return None
        if common.used < common.cap and (not common.waiters or served is common):
            return None
        if served in (reserved, common):
            return served
        return self.missing()

    def missing(self, known: Scope | None = None) -> Scope:
        """Of which of the two to want more."""
        if known is self.reserved or known is self.common:
            return known
        enough = self.reserved.used + self.reserved.waiting >= self.reserved.limit
        return self.common if enough and self.common.limit else self.reserved

    def take(self, now: float) -> None:
        scope = self.reserved if self.reserved.used < self.reserved.cap else self.common
        scope.used += 1
        scope.active = now
        self.common_used += scope is self.common

    def give(self, now: float) -> Scope:
        scope = self.common if self.common_used else self.reserved
        scope.gave(1, now)
        self.common_used -= scope is self.common
        return scope

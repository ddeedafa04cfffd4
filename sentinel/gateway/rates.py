"""How many requests a tenant may make in a while, over all gateways: taken from the store in small blocks, counted from memory.

This module exists so that a rate costs an ordinary request nothing but a subtraction. What always holds here:

* The windows are those of the ``limits`` package: shared ones in the store, or, while that is away, one of our own for this
  gateway's part of the rate.
* Nobody may use a block for longer than a tenth of the window, so that an idle gateway keeps next to nothing from the others.
* While a tenant is over its rate the store is asked about it once in the time in which one more request becomes due.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from sentinel.gateway.guards import Refusal
from sentinel.settings_gateway import TenantLimits, parse_rate
from sentinel.store import StoreError
from sentinel.store.rates import RateRecords

if TYPE_CHECKING:
    from limits.aio.strategies import SlidingWindowCounterRateLimiter

BLOCK = 64  # requests that one gateway takes at once, at most
PATIENCE_S = 0.25  # that a request waits for the store, and with it those of its tenant that came meanwhile
AWAY_S = 1.0  # after a question that the store did not answer, none is asked for so long


class Meter:
    """One tenant's rate as one gateway knows it."""

    def __init__(self, tenant: str, rate: str) -> None:
        self.tenant = tenant
        self.amount, self.seconds = parse_rate(rate)
        self.credit, self.until = 0, 0.0  # requests in hand, and to when they may be used
        self.over_until = 0.0
        self.turn = asyncio.Lock()


class Rates:
    """``free`` for what is in hand; ``ask`` when that said no."""

    def __init__(
        self,
        records: RateRecords,
        tenants: Mapping[str, TenantLimits],
        owners: Callable[[], int],
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """``owners``: how many gateways there are, as far as is known."""
        self._records, self._tenants, self._owners, self._clock, self._draw = records, tenants, owners, clock, draw
        self._meters: dict[str, Meter | None] = {}  # None: no rate
        self._alone: SlidingWindowCounterRateLimiter | None = None
        self._away_until = 0.0
        self.configure(tenants)

    def configure(self, tenants: Mapping[str, TenantLimits]) -> None:
        self._tenants = tenants
        self._meters.clear()
        if any(limits.rate for limits in tenants.values()):
            self._records.load()  # takes a fifth of a second, for which no request should stand still

    def free(self, tenant: str) -> bool:
        """Whether one more request may go, from memory; if so it is counted."""
        meter = self._meters[tenant] if tenant in self._meters else self._meter(tenant)
        if meter is None:
            return True
        if meter.credit > 0 and self._clock() < meter.until:
            meter.credit -= 1
            return True
        return False

    async def ask(self, tenant: str) -> Refusal | None:
        """One more request; None: it may go."""
        meter = self._meters[tenant]
        if meter is None:
            return None
        async with meter.turn:  # whoever asked first brings a block for those behind
            now = self._clock()
            if self.free(tenant):
                return None
            if now >= meter.over_until:
                meter.credit = await self._taken(meter)
                meter.until = now + meter.seconds / 10
                if meter.credit:
                    meter.credit -= 1
                    return None
                meter.over_until = now + min(1.0, meter.seconds / meter.amount)
        after = max(0.1, meter.seconds / meter.amount) * (1 + self._draw())
        why = f"This tenant may make {meter.amount} requests in {meter.seconds} s, and has."
        return Refusal(limit="rate", why=why, retry_after_s=round(after, 3))

    async def _taken(self, meter: Meter) -> int:
        """How many requests are ours now: a block, or the last single one, or none."""
        block = max(1, min(BLOCK, meter.amount // (10 * self._owners())))
        if self._clock() >= self._away_until:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    for count in dict.fromkeys((block, 1)):
                        if await self._records.take(meter.tenant, meter.amount, meter.seconds, count):
                            return count
                    return 0
            except (StoreError, TimeoutError):
                self._away_until = self._clock() + AWAY_S
        return int(await self._taken_alone(meter))

    async def _taken_alone(self, meter: Meter) -> bool:
        from limits import RateLimitItemPerSecond  # noqa: PLC0415  (slow to load, and only for those who have rates)
        from limits.aio.storage import MemoryStorage  # noqa: PLC0415
        from limits.aio.strategies import SlidingWindowCounterRateLimiter  # noqa: PLC0415

        if self._alone is None:
            self._alone = SlidingWindowCounterRateLimiter(MemoryStorage())
        part = RateLimitItemPerSecond(max(1, meter.amount // self._owners()), meter.seconds)
        return await self._alone.hit(part, meter.tenant)

    def _meter(self, tenant: str) -> Meter | None:
        limits = self._tenants.get(tenant) or self._tenants.get("default")
        meter = self._meters[tenant] = Meter(tenant, limits.rate) if limits and limits.rate else None
        return meter

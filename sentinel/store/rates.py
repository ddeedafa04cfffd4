"""Rates that all gateways share: how much of a tenant's window is used up, counted by the ``limits`` package on our own connection.

This module exists so that the package's storage goes through the one door like everything else. What always holds: the window is
a sliding one and ends by the server's clock (``limits``' sliding-window counter reckons with the keys' own time to live); what was
taken is never given back, since a rate is of requests that were made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limits.aio.strategies import SlidingWindowCounterRateLimiter

    from sentinel.store.client import Store


class RateRecords:
    """The windows. Raises StoreError when it could not be told. ``limits`` is loaded by ``load`` or the first question: who has no
    rates does without."""

    def __init__(self, store: Store) -> None:
        self._door = store._door  # of this package
        self._pool: Any = store._client.connection_pool
        self._limiter: SlidingWindowCounterRateLimiter | None = None

    def load(self) -> SlidingWindowCounterRateLimiter:
        """Have the package ready."""
        self._limiter = self._limiter or self._loaded()
        return self._limiter

    def _loaded(self) -> SlidingWindowCounterRateLimiter:
        from limits.aio.storage import RedisStorage  # noqa: PLC0415
        from limits.aio.strategies import SlidingWindowCounterRateLimiter  # noqa: PLC0415

        prefix = self._door.key("rate")
        storage = RedisStorage("redis://", implementation="redispy", key_prefix=prefix, connection_pool=self._pool)
        return SlidingWindowCounterRateLimiter(storage)

    async def take(self, tenant: str, amount: int, seconds: int, count: int) -> bool:
        """``count`` requests of the ``amount`` that the tenant may make in ``seconds``: all of them, or False and none."""
        from limits import RateLimitItemPerSecond  # noqa: PLC0415

        limiter = self.load()
        async with self._door._asking(f"the rate of {tenant}"):
            return await limiter.hit(RateLimitItemPerSecond(amount, seconds), tenant, cost=count)

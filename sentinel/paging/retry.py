"""The retry stage: when to ask a receiver again, and when to give up for now.

What always holds here: only ``again`` is tried again; a Retry-After is honoured by every page for that receiver, not only by
the one that was told; waits grow exponentially and are spread at random, so that many pages do not come back together; and
it ends within ``patience_s``, because the page is in the controller's outbox and can be handed in again. Whoever may not send
any more when a wait is over (a controller that was paused and is leader no more) does not.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

import msgspec

from sentinel.paging.receiver import Verdict


class Retry:
    """The waiting of one receiver. Times are seconds; ``clock`` only needs to move forward."""

    def __init__(
        self,
        *,
        attempts: int = 6,
        first_s: float = 0.5,
        longest_s: float = 15.0,
        patience_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._attempts, self._first, self._longest, self._patience = attempts, first_s, longest_s, patience_s
        self._clock, self._sleep, self._chance = clock, sleep, chance
        self._not_before = -float("inf")  # the receiver asked to be left alone until then

    async def run(self, attempt: Callable[[], Awaitable[Verdict]], still: Callable[[], bool] = lambda: True) -> Verdict:
        """Attempt until there is a final answer, while ``still`` says so. A verdict of ``again`` means: given up for now."""
        end = self._clock() + self._patience
        maybe = False
        wait = self._not_before - self._clock()
        verdict = Verdict(state="again", reason="it asked to be left alone")
        for turn in range(self._attempts):
            if wait > 0:
                if self._clock() + wait > end:
                    return msgspec.structs.replace(verdict, retry_after_s=wait, maybe=maybe)
                await self._sleep(wait)
            if not still():
                return Verdict(state="again", reason="it is not this process's to send any more", maybe=maybe)
            verdict = await attempt()
            if verdict.state != "again":
                return verdict
            maybe = maybe or verdict.maybe
            if verdict.retry_after_s > 0:
                self._not_before = max(self._not_before, self._clock() + verdict.retry_after_s)
            spread = 0.5 + self._chance() / 2
            wait = max(min(self._longest, self._first * 2**turn) * spread, self._not_before - self._clock())
        return msgspec.structs.replace(verdict, retry_after_s=wait, maybe=maybe)

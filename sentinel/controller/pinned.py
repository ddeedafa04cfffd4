"""The pins of breakers as they stand, so that a store that loses its data gets them back.

This module exists because a pin stands in the breaker's record alone, and a worker that a person holds out would get requests as
soon as that is gone. What always holds:

* Pins come and go by the leader's hand only, which is ``hold``: one that is missing although nobody took it away here was lost, and
  is set again with what is left of its time, in the name of whoever had set it.
* What was taken away, or may have been, never comes back: it is forgotten before the store is asked.
* A person's pin outranks sentinel's, also while the store has lost it.
* Nothing is set again once another controller may lead: somebody may have taken it away there.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec
import structlog

from sentinel.store.breakers import PINS_BY, BreakerRecords, Standing

log = structlog.get_logger(__name__)

LEAST_S = 1.0  # what has less time left may be over by the store's clock, and is not missed


class Pin(msgspec.Struct, frozen=True):
    """``until``: seconds, by the controller's clock. ``at``: milliseconds, by the server's, when it was known to stand."""

    state: Literal["", "open", "closed"] = ""
    by: str = ""
    why: str = ""
    until: float = 0.0
    at: float = math.inf


class Pinned:
    """One leadership's hand on the breakers. ``pins``: worker → what stands, taken over from the leadership before where it was
    this process's, and kept up to date for the next one. Every method raises StoreError when it could not be told."""

    def __init__(
        self, records: BreakerRecords, pins: dict[str, Pin], *, clock: Callable[[], float], valid: Callable[[], bool]
    ) -> None:
        self._records, self._pins, self._clock, self._valid = records, pins, clock, valid
        self._turn = asyncio.Lock()  # nothing is set again while it is being taken away

    async def hold(
        self, worker: str, pool: str, state: Literal["open", "closed", ""], *, lasts_s: float, by: str, why: str
    ) -> Standing:
        """See ``BreakerRecords.pin``."""
        async with self._turn:
            pin = self._in_force(worker) if by == PINS_BY else None
            persons = pin if pin is not None and pin.by != PINS_BY else None
            if not state and persons is None:
                self._pins[worker] = Pin()
            stands = await self._records.pin(worker, pool, state, lasts_s=lasts_s, by=by, why=why)
            if persons is not None and stands.pin_by in ("", PINS_BY):
                return await self._again(worker, pool, persons)
            self._learn(stands)
            return stands

    async def kept(self, standings: Iterable[Standing]) -> list[Standing]:
        """What stands, after what was lost of it is set again."""
        found: list[Standing] = []
        async with self._turn:
            for stands in standings:
                found.append(stands)
                known = self._pins.get(stands.worker)
                if known is not None and stands.now <= known.at:  # read before the last word was said
                    continue
                pin = self._in_force(stands.worker)
                if pin is not None and (not stands.pin or (stands.pin_by == PINS_BY != pin.by)):
                    if self._valid():
                        found[-1] = await self._again(stands.worker, stands.pool, pin)
                else:
                    self._learn(stands)
        return found

    def _in_force(self, worker: str) -> Pin | None:
        pin = self._pins.get(worker)
        return pin if pin is not None and pin.state and pin.until - self._clock() >= LEAST_S else None

    def _learn(self, stands: Standing) -> None:
        if stands.pin:
            known, until = self._pins.get(stands.worker), self._clock() + stands.pin_left / 1000
            same = known is not None and (known.state, known.by) == (stands.pin, stands.pin_by)
            why = known.why if known is not None and same else stands.why  # a breaker that opens meanwhile says why it did
            self._pins[stands.worker] = Pin(stands.pin, stands.pin_by, why, until, stands.now)
        elif stands.worker in self._pins:
            self._pins[stands.worker] = Pin(at=stands.now)

    async def _again(self, worker: str, pool: str, pin: Pin) -> Standing:
        left = pin.until - self._clock()
        stands = await self._records.pin(worker, pool, pin.state, lasts_s=left, by=pin.by, why=pin.why)
        log.warning(
            "the store has lost who holds a breaker; it is held again", worker=worker, pin=pin.state, by=pin.by, left_s=round(left)
        )  # fmt: skip
        self._learn(stands)
        return stands

"""The leader lease: at most one controller decides, and it knows by its own clock when it may no longer.

This module exists so that the shell can ask ``valid()`` before every commit and effect. What always holds:

* The lease counts from *before* the call that got or renewed it was sent, minus a margin: we stop before the store lets go.
* The clock is CLOCK_BOOTTIME: a process that was stopped, or a machine that slept, wakes up knowing that time has passed.
* A renewal that says False ends the leadership at once; StoreError does not, until the lease has run out.
* A leadership that ends cleanly gives the lease back, so that a standby need not wait for it to run out.
* Being busy costs no lease: it is renewed in a thread (``aside``). Standing still does: it is not renewed for a loop that has not
  come round for ``STILL`` leases. A process that is stopped renews nothing, and ends its leadership when it awakes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import structlog

from sentinel.boottime import boottime
from sentinel.controller.aside import Aside
from sentinel.store import StoreError

log = structlog.get_logger(__name__)

MARGIN = 0.1  # of the lease: clocks that drift, and a commit that is already on its way
STILL = 3.0  # leases without a round of the loop: whoever leads cannot lead


class Renews(Protocol):
    """The part that is asked aside (``Store.apart``)."""

    async def renew(self, epoch: int, ttl_s: float) -> bool: ...


class Leases(Protocol):
    """All that this module knows of the store (``Store.lease``)."""

    async def acquire(self, holder: str, url: str, ttl_s: float) -> int | None: ...

    async def release(self, epoch: int) -> bool: ...


class Lease:
    """One leadership's lease: its fencing epoch and until when it can be relied on. Once ended it stays so, whoever renews it."""

    def __init__(self, epoch: int, ttl: float, asked_at: float, clock: Callable[[], float]) -> None:
        self.epoch = epoch
        self._ttl, self._clock = ttl, clock
        self._until = 0.0
        self._ended = False
        self._came_round = asked_at  # when the loop that leads last did
        self.renewed(asked_at)

    def renewed(self, asked_at: float) -> None:
        self._until = asked_at + self._ttl * (1 - MARGIN)

    def end(self) -> None:
        self._ended = True

    def came_round(self) -> None:
        """To be said by the loop that leads."""
        self._came_round = self._clock()

    @property
    def stands_still(self) -> bool:
        return self._clock() - self._came_round > STILL * self._ttl

    @property
    def left(self) -> float:
        """Seconds for which we may still act; zero or less: none."""
        return 0.0 if self._ended else self._until - self._clock()

    def valid(self) -> bool:
        return self.left > 0


class Leader:
    """Runs ``lead(lease)`` whenever this controller holds the lease, one leadership after the other.

    ``lead`` must end soon after it is cancelled. When it returns False the lease is given back and, after a pause, asked for
    again; when it returns True the next leadership begins at once, under a new epoch, with nobody in between.
    """

    def __init__(
        self,
        store: Leases,
        *,
        apart: Callable[[], AbstractAsyncContextManager[Renews]],
        holder: str,
        url: str,
        ttl: float,
        lead: Callable[[Lease], Awaitable[bool]],
        on_error: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = boottime,
    ) -> None:
        """``apart``: the same lease over connections of the loop that opens it."""
        self._store, self._apart, self._holder, self._url, self._ttl = store, apart, holder, url, ttl
        self._lead, self._on_error, self._clock = lead, on_error, clock
        self._store_away = False

    async def run(self) -> None:
        """Stand by, lead, stand by … until cancelled; cancelled while leading, the lease is given back."""
        async with Aside("lease") as aside:
            await self._run(aside)

    async def _run(self, aside: Aside) -> None:
        while True:
            lease = await self._acquire()
            if lease is None:
                await asyncio.sleep(self._ttl / 3 * random.uniform(0.9, 1.0))  # noqa: S311  (spreads two standbys)
                continue
            log.info("this controller leads", epoch=lease.epoch, holder=self._holder)
            again = False
            try:
                again = await self._reign(lease, aside) and lease.valid()
            finally:
                held = lease.valid()
                lease.end()
                if held and not again:
                    await self._release(lease)
                log.info("this controller leads no more", epoch=lease.epoch, given_back=held and not again)
            if not again:
                await asyncio.sleep(self._ttl / 3)

    async def _acquire(self) -> Lease | None:
        asked = self._clock()
        try:
            epoch = await self._store.acquire(self._holder, self._url, self._ttl)
        except StoreError as error:
            self._failed("the store cannot be asked for the lease", error)
            return None
        self._store_away = False
        if epoch is None:
            return None
        lease = Lease(epoch, self._ttl, asked, self._clock)
        return lease if lease.valid() else None  # an answer that came too late is no lease

    async def _reign(self, lease: Lease, aside: Aside) -> bool:
        lead = asyncio.ensure_future(self._lead(lease))
        renew = asyncio.create_task(aside.run(self._renew(lease)), name="renew")
        pulse = asyncio.create_task(self._come_round(lease), name="pulse")
        try:
            await asyncio.wait({lead, renew}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (renew, lead, pulse):
                task.cancel()
            ends = await asyncio.gather(renew, lead, pulse, return_exceptions=True)
        if isinstance(ends[0], Exception):
            log.error("the lease is renewed no more", error=str(ends[0]) or type(ends[0]).__name__, exc_info=ends[0])
        if lead.cancelled():
            return False
        if error := lead.exception():
            log.error("a leadership ended with an error", error=str(error) or type(error).__name__, exc_info=error)
            return False
        return lead.result()

    async def _come_round(self, lease: Lease) -> None:
        while True:
            lease.came_round()
            await asyncio.sleep(self._ttl / 10)

    async def _renew(self, lease: Lease) -> None:
        """Returns when the lease is lost or has run out. Runs aside."""
        pause = self._ttl / 3
        async with self._apart() as leases:
            while lease.valid():
                await asyncio.sleep(min(pause, max(lease.left, 0)))
                asked = self._clock()
                if not lease.valid():
                    break
                if lease.stands_still:
                    log.error("the controller's loop stands still, so its lease is not renewed", epoch=lease.epoch)
                    return
                try:
                    # Not past the lease's end: what comes later cannot help, and stepping down must not wait for it.
                    async with asyncio.timeout(lease.left):
                        held = await leases.renew(lease.epoch, self._ttl)
                except (StoreError, TimeoutError) as error:
                    self._failed("the lease could not be renewed", error)
                    pause = self._ttl / 20
                    continue
                self._store_away = False
                if not held:
                    log.warning("the lease went to another controller", epoch=lease.epoch)
                    lease.end()
                    return
                lease.renewed(asked)
                pause = self._ttl / 3
        log.warning("the lease ran out before it could be renewed", epoch=lease.epoch)

    async def _release(self, lease: Lease) -> None:
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(self._ttl):
                await self._store.release(lease.epoch)

    def _failed(self, what: str, error: Exception) -> None:
        self._on_error()
        if not self._store_away:
            log.error(what, error=str(error) or type(error).__name__)
        self._store_away = True

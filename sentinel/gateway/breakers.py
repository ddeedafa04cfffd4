"""The breakers as one gateway knows them: a local copy, pushed by the store, and outcomes told in batches.

This module exists so that an ordinary request costs a look into a dictionary. What always holds here:

* A closed breaker is answered from memory. The store is asked for a probe only, and not again while it said that there is none.
* Outcomes are gathered: fine ones are told every ``flush``, a failure at once, one question on its way at a time.
* While the store is away the copy goes on from what it knew, by the same rules and thresholds, for this gateway alone
  (``alone``); when the store is back, what it says stands, and what was decided alone is forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Literal

from sentinel.gateway.breaker_copy import Copy, milliseconds
from sentinel.gateway.breaker_view import BreakerView
from sentinel.gateway.guards import Outcome, Permit, told_if_broken
from sentinel.store import StoreError
from sentinel.store.breakers import CHUNK, BreakerRecords, Standing

DRY = 0.1  # seconds, at least, without asking again for a probe after there was none; a push or a poll ends them sooner
PATIENCE = 0.25  # seconds that a request waits to hear whether it may be a probe; one that is given later is given back
_PROBE_END: dict[Outcome, Literal["fine", "failed", "neutral"]] = {Outcome.FINE: "fine", Outcome.FAILED: "failed"}

Question = asyncio.Task[tuple[Standing, bool]]


class SharedBreakers(BreakerView):
    """Implements ``guards.Breakers``. ``start`` before use, ``stop`` at the end; ``members`` whenever the route table changes."""

    def __init__(
        self,
        records: BreakerRecords,
        *,
        host: str,
        process: str,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """``host``, ``process``: who reports. Hosts must agree before a breaker opens, so the processes of one host share
        its name; ``process`` is never used twice (a boot id)."""
        super().__init__(records, clock)
        self._reporter, self._draw = f"{host}/{process}", draw
        self._told: set[str] = set()  # workers with something to tell
        self._sick: set[str] = set()  # … with failures
        self._ended: list[tuple[Permit, Outcome]] = []  # of probes
        self._begun: set[str] = set()  # probes that succeeded, whose answers go on
        self._questions: set[Question] = set()  # for a probe, not answered yet
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.stale = 0  # outcomes of requests from before a breaker changed

    # -- guards.Breakers ----------------------------------------------------------------------------------------------

    def closed(self, worker: str) -> bool:
        copy = self._copies.get(worker)
        if copy is None or not copy.shut:
            return True
        now = self._clock()
        if copy.effective(now) == "closed":
            return True
        return copy.may_probe(now) or (self._panics.on(copy.pool, now) and not copy.pinned(now))

    async def permit(self, worker: str) -> Permit | None:
        copy = self._copies.get(worker)
        if copy is None:
            return Permit(worker=worker)
        if not copy.shut:
            return copy.plain
        now = self._clock()
        if copy.effective(now) == "closed":
            return copy.plain
        if copy.may_probe(now) and copy.asking < self._policy.probes:
            probe = await self._probe(copy)
            if probe is not None:
                return probe
        return copy.plain if self._panics.on(copy.pool, now) and not copy.pinned(now) else None

    def last(self, worker: str) -> Permit | None:
        copy = self._copies.get(worker)
        if copy is None:
            return Permit(worker=worker)
        return None if copy.pin == "open" and copy.pinned(self._clock()) else copy.plain

    def begun(self, permit: Permit) -> None:
        if permit.probe and self._probes.pop(permit.probe, None) is not None:
            self._begun.add(permit.probe)
            self._end_probe(permit, Outcome.FINE)

    def ended(self, permit: Permit, outcome: Outcome) -> None:
        if permit.probe:
            if self._probes.pop(permit.probe, None) is not None:
                self._end_probe(permit, outcome)
            elif permit.probe in self._begun:
                self._begun.discard(permit.probe)
                if outcome is Outcome.FAILED:
                    self._end_probe(permit, outcome)
            return
        if outcome is Outcome.BUSY or outcome is Outcome.IGNORED:
            return
        copy = self._copies.get(permit.worker)
        if copy is None or not copy.counts(permit.version):
            self.stale += 1
        elif copy.state != "closed":
            return  # sent in panic: only probes speak for it now
        elif outcome is Outcome.FINE:
            copy.fine += 1
            if copy.fine == 1:
                self._told.add(permit.worker)
        else:
            copy.failed += 1
            self._sick.add(permit.worker)
            self._wake.set()

    def _end_probe(self, permit: Permit, outcome: Outcome) -> None:
        self._ended.append((permit, outcome))
        self._wake.set()

    # -- running ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        parts: dict[str, Coroutine[object, object, None]] = {
            "told": self._watch(), "look": self._poll(), "flush": self._flush(), "renew": self._renew(),
        }  # fmt: skip
        self._tasks = [asyncio.create_task(part, name=f"breakers-{name}") for name, part in parts.items()]
        for task in self._tasks:
            task.add_done_callback(told_if_broken)

    async def stop(self) -> None:
        """Tell what is left, once, and end."""
        for task in (*self._tasks, *self._questions):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._questions, return_exceptions=True)
        self._tasks = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await self._tell()

    # -- towards the store --------------------------------------------------------------------------------------------

    async def _probe(self, copy: Copy) -> Permit | None:
        name, left = f"{self._reporter}#{next(self._serial)}", 0.0
        if copy.alone is not None:
            given = copy.alone.permit(milliseconds(self._clock()), name)
            self._follow(copy)
        else:
            copy.asking += 1
            question = asyncio.create_task(self._asked(self._records.permit(copy.worker, copy.pool, name)), name="breakers-probe")
            self._questions.add(question)
            question.add_done_callback(partial(self._answered, copy))
            try:
                async with asyncio.timeout(PATIENCE):
                    standing, given = await asyncio.shield(question)
                left = standing.left / 1000
                self._adopt(standing)
            except TimeoutError:
                question.add_done_callback(partial(self._unused, copy, name))
                given = False
            except asyncio.CancelledError:
                question.add_done_callback(partial(self._unused, copy, name))
                raise
            except StoreError as error:
                self._lost(error)
                return None
        if given:
            self._probes[name] = copy.worker
            return Permit(worker=copy.worker, probe=name, version=copy.version)
        now = self._clock()
        copy.dry = now + max(DRY, left)
        return copy.plain if copy.effective(now) == "closed" else None

    def _answered(self, copy: Copy, question: Question) -> None:
        copy.asking -= 1
        self._questions.discard(question)

    def _unused(self, copy: Copy, probe: str, question: Question) -> None:
        """Whoever asked for it did not wait for the answer: a probe that was given is at once free for others."""
        if not question.cancelled() and question.exception() is None:
            standing, given = question.result()
            self._adopt(standing)
            if given:
                self._end_probe(Permit(worker=copy.worker, probe=probe), Outcome.IGNORED)

    async def _flush(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._policy.flush):
                    await self._wake.wait()
            self._wake.clear()
            await self._tell()

    async def _tell(self) -> None:
        """Everything that is to be told, in one go; what the store does not take is judged here, alone."""
        ended, self._ended = self._ended, []
        for permit, outcome in ended:
            if copy := self._copies.get(permit.worker):
                if outcome is Outcome.FAILED and copy.state == "closed" and copy.counts(permit.version):
                    copy.failed += 1  # it broke after it had closed the breaker: a failure like any other
                    self._sick.add(permit.worker)
                else:
                    await self._tell_probe(copy, permit.probe, outcome)
        sick, self._sick = self._sick, set()
        fine, self._told = self._told - sick, set()
        for worker in sick:
            if copy := self._copies.get(worker):
                await self._tell_failed(copy)
        copies = [copy for worker in fine if (copy := self._copies.get(worker)) and copy.fine]
        for at in range(0, len(copies), CHUNK):
            await self._tell_fine(copies[at : at + CHUNK])

    async def _tell_probe(self, copy: Copy, probe: str, outcome: Outcome) -> None:
        how = _PROBE_END.get(outcome, "neutral")
        if copy.alone is None:
            try:
                return self._adopt(await self._asked(self._records.ended(copy.worker, copy.pool, probe, how, self._draw())))
            except StoreError as error:
                self._lost(error)
        if copy.alone:
            copy.alone.ended(milliseconds(self._clock()), probe, how, self._draw())
            self._follow(copy)
        return None

    async def _tell_failed(self, copy: Copy) -> None:
        version, (fine, failed) = copy.version, copy.take()
        peers = (c for c in self._copies.values() if (c.pool, c.apart) == (copy.pool, copy.apart))
        others = [c for c in peers if c is not copy]
        if copy.alone is None:
            try:
                standing = await self._asked(
                    self._records.failed(
                        copy.worker, copy.pool, [c.worker for c in others], self._reporter,
                        version=version, fine=fine, failed=failed, draw=self._draw(),
                    )
                )  # fmt: skip
                return self._adopt(standing)
            except StoreError as error:
                self._lost(error)
        if copy.alone:
            now = self._clock()
            heard = copy.alone.failed(
                milliseconds(now), self._reporter, copy.alone.version, fine, failed, draw=self._draw(),
                others_out=sum(c.effective(now) != "closed" for c in others), total=len(others) + 1,
            )  # fmt: skip
            if heard == "panic":
                self._panics.mark(copy.pool, now, self._policy.window, 0.0)
            self.trips_alone += heard == "opened"
            self._follow(copy)
        return None

    async def _tell_fine(self, copies: list[Copy]) -> None:
        told = [(c.worker, c.version, c.take()[0]) for c in copies]
        if not self.away:
            try:
                versions = await self._asked(self._records.seen(self._reporter, told))
            except StoreError as error:
                self._lost(error)
            else:
                if any(versions[worker] != version for worker, version, _ in told):
                    self._due = 0.0
                    self._look.set()  # a push was missed, or the store lost its data
                return
        for c, (_, _, fine) in zip(copies, told, strict=True):
            if c.alone:
                c.alone.seen(milliseconds(self._clock()), self._reporter, c.alone.version, fine)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._policy.probe_lease / 3)
            held: dict[str, list[str]] = {}
            for probe, worker in self._probes.items():
                held.setdefault(worker, []).append(probe)
            for worker, probes in held.items():
                copy = self._copies.get(worker)
                if copy and copy.alone:
                    copy.alone.renew(milliseconds(self._clock()), probes)
                elif copy:
                    with contextlib.suppress(StoreError):  # the poll says that the store is away
                        await self._asked(self._records.renew(worker, copy.pool, probes))

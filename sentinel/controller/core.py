"""The one task that owns the decider: events in, decisions made durable, and only then acknowledged and acted upon.

This module exists so that order and durability are argued in one place. What always holds:

* Only ``run`` calls the decider, one event after the other; nothing else of the program touches it but to read.
* What a batch decided is one fenced commit. Until it is durable no future is resolved and no effect begins.
* StoreError (could not tell) repeats the *same* commit while our lease can still be valid; False (lost) ends this leadership.
* A store that turns out to hold less than it had told us was done gets all of it again, from the ledger, in the same commit. It
  is asked at least once a second, so that this is noticed while somebody still knows what was decided.
* A batch is what is already queued and nothing is waited for, so that a lone kernel line is decided at once.
* Reports without news of weight wait behind all else and are turned away first, while the queue is a quarter full: a snapshot
  comes again, and says by then what is so by then. Reports of one node never overtake each other: ingest hands in one at a time.
* News of weight and a person's word go before the rest, as if that had taken longer: the last of a storm's nodes leaves rotation
  before the first one's page is filed. After ``NEWS_FIRST`` of them one of the rest is taken, so that work goes on in any storm.
* An event the decider fails on is journaled, counted and answered with an error; it takes nothing else down with it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from sentinel.controller.journal import Entry, Journal
from sentinel.controller.ledger import Ledger
from sentinel.controller.metrics import Metrics
from sentinel.decide.state.events import AnyEffect, AnyEvent, AnyInstruction, Asked, Done, Effect, Forget, Record, Reported
from sentinel.model import Component, Routes
from sentinel.store import Change, Drop, PublishRoutes, Put, Stored, StoreError, WentBack

log = structlog.get_logger(__name__)

ASK_EVERY = 1.0  # seconds without a commit after which an empty one asks whether the store still has what it had
BATCH = 256  # events: bounds the commit's size
TURN_S = 0.05  # seconds after which no further event joins a batch: the lease must be renewed, too
NEWS_FIRST = 8
TELL_AGAIN = 10.0  # seconds before the same failure of the decider is logged again
BACKOFF = (0.02, 0.05, 0.1, 0.25, 0.5)  # seconds between two tries of one commit; the last one repeats


class Decides(Protocol):
    """All that the shell knows of the decider."""

    def handle(self, event: AnyEvent) -> list[AnyInstruction]: ...

    def explain(self, target: str) -> dict[str, Any]: ...

    def status(self) -> dict[str, Any]: ...

    def held_back(self) -> frozenset[str]: ...

    def nodes_of(self, target: str) -> list[str]: ...

    def watch(self, node: str) -> Mapping[tuple[Component, str], bool]: ...


class Durable(Protocol):
    """All that a leadership knows of the store (``Store.decisions``)."""

    @property
    def head(self) -> tuple[int, int]: ...

    async def commit(self, epoch: int, changes: Sequence[Change], *, anew: bool = False) -> bool: ...

    async def load(self) -> Stored: ...


class SteppedDown(Exception):
    """This controller does not lead (any more); what was submitted took no durable effect that this one knows of."""


class Busy(Exception):
    """There is too much to do; nothing was taken: come back in ``after_s``."""

    def __init__(self, after_s: float = 1.0) -> None:
        super().__init__()
        self.after_s = after_s


class DeciderFailed(Exception):
    """The decider raised on this event: a bug, and the event is in the journal."""


@dataclass(slots=True)
class _Item:
    event: AnyEvent
    future: asyncio.Future[list[AnyInstruction]]
    queued: float
    instructions: list[AnyInstruction] = field(default_factory=list)
    error: str = ""


class Core:
    """One leadership's core. ``valid`` says whether the lease can still be ours; ``begin`` starts effects."""

    def __init__(
        self,
        *,
        decider: Decides,
        store: Durable,
        epoch: int,
        valid: Callable[[], bool],
        ledger: Ledger,
        journal: Journal,
        metrics: Metrics,
        begin: Callable[[Sequence[AnyEffect]], None],
        capacity: int = 4096,
    ) -> None:
        self.decider = decider
        self._store, self._epoch, self._valid = store, epoch, valid
        self._ledger, self._journal, self._metrics, self._begin = ledger, journal, metrics, begin
        self._capacity = capacity
        self._news: deque[_Item] = deque()  # reports with news of weight, and what people ask for
        self._queue: deque[_Item] = deque()  # what the shell itself has to say: ticks, looks, what effects came to
        self._later: deque[_Item] = deque()  # reports without news of weight
        self._batch: list[_Item] = []
        self._ahead = 0  # news taken since one of the queue was
        self._more = asyncio.Event()
        self._ended = False
        self._told = ("", 0.0)  # the latest failure of the decider that was logged, and when
        self._turn_began: float | None = None
        self._asked = time.monotonic()  # when the store last took a commit

    def stuck_for(self) -> float:
        """Seconds since the batch that is under way began; 0 when there is none."""
        return 0.0 if self._turn_began is None else time.monotonic() - self._turn_began

    @property
    def backlog(self) -> int:
        return len(self._news) + len(self._queue) + len(self._later)

    @property
    def full(self) -> bool:
        """Whether any report would be turned away."""
        return self.backlog >= self._capacity

    def submit(self, event: AnyEvent) -> asyncio.Future[list[AnyInstruction]]:
        """Queue one event. The future resolves to its instructions once they are durable.

        Raises SteppedDown, or Busy for a report when the queue is full (the shell's own events always fit: there are only
        as many of them as there are effects, workers and ticks). The future may fail with SteppedDown or DeciderFailed.
        """
        if self._ended:
            raise SteppedDown
        later = isinstance(event, Reported) and not any(f.of_weight for f in event.report.findings)
        if isinstance(event, Reported) and self.backlog >= (self._capacity // 4 if later else self._capacity):
            raise Busy
        future: asyncio.Future[list[AnyInstruction]] = asyncio.get_running_loop().create_future()
        # Whoever asked may have hung up; a failure nobody waits for any more is not an error.
        future.add_done_callback(lambda f: f.cancelled() or f.exception())
        queue = self._later if later else self._news if isinstance(event, Reported | Asked) else self._queue
        queue.append(_Item(event, future, time.perf_counter()))
        self._more.set()
        return future

    async def run(self) -> None:
        """Work until the leadership ends. Raises SteppedDown then; cancelling it ends it too."""
        try:
            while True:
                await self._more.wait()
                self._more.clear()
                while self.backlog:
                    self._turn_began = time.monotonic()
                    await self._turn()
                    self._turn_began = None
                    await asyncio.sleep(0)  # let the answers go out between two batches
        finally:
            self._ended = True
            for item in (*self._batch, *self._news, *self._queue, *self._later):
                if not item.future.done():
                    item.future.set_exception(SteppedDown())
            for queue in (self._news, self._queue, self._later):
                queue.clear()

    async def _turn(self) -> None:
        batch = self._batch = []
        began = time.perf_counter()
        while self.backlog and len(batch) < BATCH and time.perf_counter() - began < TURN_S:
            batch.append(self._next())
            self._handle(batch[-1])
        changes = changes_of([(i.event, i.instructions) for i in batch if not i.error])
        if changes or time.monotonic() - self._asked > ASK_EVERY:
            await self._commit(changes)
        elif not self._valid():
            # Nothing to write, but a report that is judged by a leader of yesterday must not be taken off its agent.
            raise SteppedDown
        self._journal.write([Entry(event=i.event, instructions=tuple(i.instructions), error=i.error) for i in batch])
        for item in batch:
            if not item.error:
                for ended in self._ledger.apply(item.event, item.instructions):
                    self._metrics.drains.labels(ended.response.value, ended.state.value).inc()
        now = time.perf_counter()
        for item in batch:
            self._metrics.decision.observe(now - item.queued)
            if item.future.done():
                continue
            if item.error:
                item.future.set_exception(DeciderFailed(item.error))
            else:
                item.future.set_result(item.instructions)
        self._batch = []
        effects = [n for i in batch for n in i.instructions if isinstance(n, Effect)]
        if effects:
            self._begin(effects)

    def _next(self) -> _Item:
        if self._news and (not self._queue or self._ahead < NEWS_FIRST):
            self._ahead += 1
            return self._news.popleft()
        self._ahead = 0
        return (self._queue or self._later).popleft()

    def _handle(self, item: _Item) -> None:
        try:
            item.instructions = self.decider.handle(item.event)
        except Exception as error:
            item.error = f"{type(error).__name__}: {error}"
            self._metrics.decider_errors.inc()
            now = time.monotonic()
            if item.error != self._told[0] or now - self._told[1] >= TELL_AGAIN:  # a failure on every tick is said once
                self._told = (item.error, now)
                log.exception("the decider failed on an event: a bug in sentinel; the event is in the journal", id=item.event.id)

    async def _commit(self, changes: Sequence[Change]) -> None:
        tries = 0
        lost = False  # the store went back in time: what it lost goes with the rest
        while self._valid():
            try:
                again = self._ledger.changes(await self._store.load()) if lost else []
                if await self._store.commit(self._epoch, [*again, *changes], anew=lost):
                    self._ledger.head, self._asked = self._store.head, time.monotonic()
                    return
            except WentBack as error:
                lost = True
                self._metrics.store_errors.inc()
                log.error("the store has lost what was decided; it is written again from memory", error=str(error))
            except StoreError as error:
                self._metrics.store_errors.inc()
                if tries == 0:
                    log.warning("a commit could not be told done; it is tried again", error=str(error), epoch=self._epoch)
                await asyncio.sleep(BACKOFF[min(tries, len(BACKOFF) - 1)])
                tries += 1
            else:
                log.warning("another controller leads now; this one steps down", epoch=self._epoch)
                raise SteppedDown
        log.warning("the lease ran out before a commit was done; this controller steps down", epoch=self._epoch)
        raise SteppedDown


def changes_of(batch: Sequence[tuple[AnyEvent, Sequence[AnyInstruction]]]) -> list[Change]:
    """One batch's decisions as store changes, the last word on each key only."""
    last: dict[tuple[str, str], Change] = {}

    def note(kind: str, key: str, change: Change) -> None:
        last.pop((kind, key), None)  # a later word goes to the end: the order of decisions is kept
        last[kind, key] = change

    for event, instructions in batch:
        if isinstance(event, Done):
            note("pending", event.instruction, Drop("pending", event.instruction))
        for n in instructions:
            if isinstance(n, Record):
                if isinstance(n.value, Routes):
                    note("routes", "", PublishRoutes(n.value))
                elif n.kind != "routes":
                    note(n.kind, n.key, Put(n.kind, n.key, n.value))
            elif isinstance(n, Forget):
                note(n.kind, n.key, Drop(n.kind, n.key))
            else:
                note("pending", n.id, Put("pending", n.id, n))
    return list(last.values())


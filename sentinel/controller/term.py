"""One leadership, from taking over to stepping down.

This module exists so that nothing of one leadership leaks into the next: the decider, the queue, the lanes and what nodes
said are made anew each time and thrown away together. What always holds: the first events are PolicyLoaded, FleetLoaded and
Restored, so that a journal replays under the rules of its time; the effects that an earlier leader left pending are carried out
again after that and before the API answers.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import structlog

from sentinel.controller.commands import CommandDesk
from sentinel.controller.core import BACKOFF, Core, DeciderFailed, Decides, Durable, SteppedDown
from sentinel.controller.effects import Effects, Pager
from sentinel.controller.gateways import GatewayWatch
from sentinel.controller.ingest import Ingest
from sentinel.controller.journal import Journal
from sentinel.controller.leader import Lease
from sentinel.controller.ledger import Ledger
from sentinel.controller.metrics import Metrics
from sentinel.controller.watch import Watch
from sentinel.decide.state.events import AnyEvent, AnyInstruction, FleetLoaded, PolicyLoaded, Restored, Tick
from sentinel.model import Component, Fleet, Report, Worker, WorkerSeen
from sentinel.serving import Adapter
from sentinel.store import Stored, StoreError

log = structlog.get_logger(__name__)

LOADS = 5  # tries to read what was decided before, then another controller may try


class Serves(Adapter, Protocol):
    """The adapter of all workers; it also takes in what agents report of them (Dynamo's instance ids change at each start)."""

    def learn(self, seen: Iterable[WorkerSeen]) -> None: ...


class Term:
    """One leadership. ``decider`` is fresh. Everything outside reads ``ready`` before it asks for anything."""

    def __init__(
        self,
        *,
        lease: Lease,
        decider: Decides,
        fleet: Fleet,
        policy: str,
        store: Durable,
        serving: Serves,
        desk: CommandDesk,
        pager: Pager,
        journal: Journal,
        metrics: Metrics,
        tick: float,
        watch: float,
        runbooks: str = "",
        memory: Ledger | None = None,
        gateways: Callable[..., GatewayWatch] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``policy``: the text of the rules, already checked. ``memory``: what this process had made durable under the epoch just
        before this one, where it led then. ``gateways`` makes the ear at the gateways; None: there is none."""
        self.lease, self.began_at, self._memory = lease, clock(), memory
        self.ready = False
        self.led = False  # has been ready: its ledger is what was decided
        self._policy, self._journal = policy, journal
        self._store, self._serving, self._tick, self._clock = store, serving, tick, clock
        numbers = itertools.count(1)
        self.new_id: Callable[[], str] = lambda: f"ev-{lease.epoch}-{next(numbers)}"  # unique, because an epoch has one term
        self.ledger = Ledger(fleet)
        if memory is not None:
            self.ledger.pins = memory.pins
        self._watch = Watch(serving=serving, every=watch, feed=self.feed, new_id=self.new_id, clock=clock)
        self._gateways = gateways and gateways(
            version=self._version, feed=self.feed, new_id=self.new_id, clock=clock, valid=lease.valid, pins=self.ledger.pins
        )  # fmt: skip
        self._effects = Effects(
            serving=serving, hands=desk, pager=pager, worker=self._worker, look=self._watch.asked, done=self.feed,
            valid=lease.valid, new_id=self.new_id, gateways=self._gateways, runbooks=runbooks, clock=clock,
        )
        self.core = Core(
            decider=decider, store=store, epoch=lease.epoch, valid=lease.valid, ledger=self.ledger, journal=journal,
            metrics=metrics, begin=self._effects.begin,
        )
        self.ingest = Ingest(
            submit=self.core.submit, new_id=self.new_id, metrics=metrics, learn=self._learn, own=self.ledger.own,
            watch=decider.watch, clock=clock,
        )  # fmt: skip

    async def feed(self, event: AnyEvent) -> list[AnyInstruction]:
        """Submit one event and wait until what it caused is durable."""
        return await self.core.submit(event)

    async def run(self) -> None:
        """Lead until the lease is lost or this is cancelled."""
        core = asyncio.create_task(self.core.run(), name="core")
        tasks: list[asyncio.Task[Any]] = [core]
        try:
            await self._take_over()
            tasks.append(asyncio.create_task(self._ticks(), name="ticks"))
            if self._gateways is not None:
                tasks.append(asyncio.create_task(self._gateways.run(), name="gateways"))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except SteppedDown:
            pass
        finally:
            self.ready = False
            self._journal.checkpoint = None
            for task in tasks:
                task.cancel()
            await self._effects.close()
            await self._watch.close()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception) and not isinstance(end, SteppedDown):
                raise end

    async def reload(self, fleet: Fleet, policy: str) -> None:
        """Go on under these rules, already checked, and with this configured fleet."""
        if policy != self._policy:
            self._policy = policy
            await self.feed(PolicyLoaded(id=self.new_id(), at=self._clock(), text=policy))
        self.ledger.load_fleet(fleet)
        await self.feed(FleetLoaded(id=self.new_id(), at=self._clock(), fleet=fleet))
        self._watch.follow(fleet.workers)
        if self._gateways is not None:
            self._gateways.follow(fleet)

    def last_reports(self) -> Iterable[tuple[str, float]]:
        return ((node, heard.at) for node, heard in self.ingest.nodes.items() if heard.at)

    def _learn(self, report: Report) -> None:
        """Tell the adapters what a node says of the workers that run on it, and of no others."""
        workers = self.ledger.workers
        here = (Component(node=report.node, device=f"worker@{s.worker}") for s in report.workers)
        mine = [s for s, c in zip(report.workers, here, strict=True) if s.worker in workers and self.ledger.own(report.node, c)]
        if mine:
            self._serving.learn(mine)

    def _worker(self, name: str) -> Worker | None:
        return self.ledger.workers.get(name)

    def _version(self) -> int:
        return self.ledger.routes.version if self.ledger.routes is not None else 0

    async def _take_over(self) -> None:
        loaded = await self._load()
        if self._memory is not None and self._memory.is_newer(loaded):
            loaded = await self._write_again(self._memory, loaded)
        pending = self.ledger.restore(loaded)
        for told in [self.core.submit(event) for event in self._known()]:
            await told
        self._journal.checkpoint = self._known
        if pending:
            log.info("carrying out what an earlier leader left pending", effects=[f"{type(e).__name__} {e.id}" for e in pending])
        self._effects.begin(pending)
        self._watch.follow(self.ledger.fleet.workers)
        if self._gateways is not None:
            self._gateways.follow(self.ledger.fleet)
        self.ready = self.led = True

    def _known(self) -> list[AnyEvent]:
        """The rules, the fleet and what is durable, as the events with which a leadership begins."""
        now, ledger = self._clock(), self.ledger
        return [
            PolicyLoaded(id=self.new_id(), at=now, text=self._policy),
            FleetLoaded(id=self.new_id(), at=now, fleet=ledger.fleet),
            Restored(
                id=self.new_id(), at=now, epoch=self.lease.epoch, incidents=tuple(ledger.incidents.values()),
                drains=tuple(ledger.drains.values()), holds=tuple(ledger.holds.values()), routes=ledger.routes,
                pending=tuple(ledger.pending),
            ),
        ]

    async def _load(self) -> Stored:
        for tries in itertools.count():
            if not self.lease.valid():
                raise SteppedDown
            try:
                return await self._store.load()
            except StoreError as error:
                log.warning("what was decided before could not be loaded; it is tried again", error=str(error))
                if tries >= LOADS:  # perhaps another version can read it: whoever cannot must not keep the lease from them
                    log.error("what was decided before cannot be read by this controller; it steps down", error=str(error))
                    raise SteppedDown from None
                await asyncio.sleep(BACKOFF[min(tries, len(BACKOFF) - 1)])
        raise AssertionError  # pragma: no cover

    async def _write_again(self, memory: Ledger, loaded: Stored) -> Stored:
        """The store was emptied, or came back with what it held some time ago: what we know to have been decided stands."""
        log.error(
            "the store has lost what was decided; it is written again from memory",
            incidents=len(memory.incidents), drains=len(memory.drains), holds=len(memory.holds),
        )  # fmt: skip
        for tries in itertools.count():
            if not self.lease.valid():
                raise SteppedDown
            try:
                if not await self._store.commit(self.lease.epoch, memory.changes(loaded)):
                    raise SteppedDown
                return await self._load()
            except StoreError as error:
                log.warning("what was decided before could not be written again; it is tried again", error=str(error))
                await asyncio.sleep(BACKOFF[min(tries, len(BACKOFF) - 1)])
        raise AssertionError  # pragma: no cover

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(self._tick)
            try:
                await self.feed(Tick(id=self.new_id(), at=self._clock()))
            except DeciderFailed:
                continue

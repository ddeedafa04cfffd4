"""Effects carried out: one task per lane, in order within it, each ending in a ``Done`` event.

This module exists so that acting on the world is one table from effect to verb. What always holds:

* A worker counts as idle, and may be stopped gently, only after every gateway that is there obeys a table without it: what one
  of them still sends would be answered with an error by a server that is ending. Where that cannot be told it is not so.
* An effect begins only after it is durable as pending, and only while the lease can still be ours. So does each try of a page:
  a controller that was paused wakes up in the middle of its waits.
* The next effect of a lane begins after the Done of the one before is durable: an effect that a crash makes us repeat is
  never repeated *after* a later one of its lane.
* Whatever goes wrong becomes Done(ok=None) with a sentence. Cancelled (another leader takes over), an effect stays pending.
* A page that nobody could take now stays pending and is tried again; it is never dropped for the network's sake. One that
  is over before it got through is given up: nobody is woken for what has ended an hour ago.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec
import structlog

from sentinel.controller.core import DeciderFailed, SteppedDown
from sentinel.controller.gateways import Obeyed
from sentinel.decide.state.events import (
    AnyEffect,
    AnyInstruction,
    AwaitIdle,
    Deroute,
    Done,
    Look,
    PinBreaker,
    Repair,
    Reroute,
    ScaleOut,
    SendPage,
    StartWorker,
    StopWorker,
    Verify,
)
from sentinel.decide.state.picture import effect_key
from sentinel.decide.ways.repair import COMES_BACK_S
from sentinel.model import Action, Component, Page, Worker
from sentinel.paging import PagerError
from sentinel.serving import Adapter, AdapterError, Hands
from sentinel.store import StoreError

log = structlog.get_logger(__name__)

IDLE_POLL = (0.1, 1.0)  # seconds: first and longest pause between two looks at what is in flight
PAGE_RETRY = (1.0, 60.0)  # seconds: first and longest pause before a page is tried again
# How long the node's agent may take. A reset of a GPU with its NVLinks retrained is under two minutes.
REPAIR_DEADLINE = {Action.REBOOT_NODE: COMES_BACK_S, Action.POWER_CYCLE: COMES_BACK_S}
REPAIR_DEADLINE_ELSE = 180.0


class Pager(Protocol):
    async def send(self, page: Page, still: Callable[[], bool]) -> bool: ...


Outcome = tuple[bool | None, str, dict[str, Any]]


class Effects:
    """One leadership's effects. ``done`` submits an event to the core; ``look`` looks at a worker and feeds what it saw;
    ``gateways`` None: there are none that could be asked."""

    def __init__(
        self,
        *,
        serving: Adapter,
        hands: Hands,
        pager: Pager,
        worker: Callable[[str], Worker | None],
        look: Callable[[Worker], Awaitable[bool | None]],
        done: Callable[[Done], Awaitable[list[AnyInstruction]]],
        valid: Callable[[], bool],
        new_id: Callable[[], str],
        gateways: Obeyed | None = None,
        runbooks: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._serving, self._hands, self._pager = serving, hands, pager
        self._worker, self._look, self._done, self._valid = worker, look, done, valid
        self._new_id, self._gateways, self._runbooks, self._clock = new_id, gateways, runbooks, clock
        self._lanes: dict[str, deque[AnyEffect]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._known: set[str] = set()  # ids queued or running: a restored effect that is decided again is the same one

    def begin(self, effects: Sequence[AnyEffect]) -> None:
        """Queue effects that are durable as pending."""
        for effect in effects:
            if effect.id in self._known:
                continue
            self._known.add(effect.id)
            log.info("decided", effect=_name(effect), of=effect.lane, why=effect.why, effect_id=effect.id, cause=effect.cause)
            self._lanes.setdefault(effect.lane, deque()).append(effect)
            if effect.lane not in self._tasks:
                task = asyncio.create_task(self._run_lane(effect.lane), name=f"lane {effect.lane}")
                self._tasks[effect.lane] = task

    async def close(self) -> None:
        """Cancel what runs; it stays pending for the next leader."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_lane(self, lane: str) -> None:
        queue = self._lanes[lane]
        try:
            while queue:
                effect = queue[0]
                if not self._valid():
                    return
                ok, detail, facts = await self._carry_out(effect)
                if not self._valid():
                    return  # what we did stays pending; the next leader does it again, which is harmless
                event = Done(
                    id=self._new_id(), at=self._clock(), instruction=effect.id, ok=ok, detail=detail, facts=facts
                )
                queue.popleft()
                self._known.discard(effect.id)
                try:
                    await self._done(event)
                except DeciderFailed:
                    continue  # logged and journaled by the core; it stays pending and is carried out again by the next leader
        except SteppedDown:
            return
        finally:
            self._lanes.pop(lane, None)
            self._tasks.pop(lane, None)

    async def _carry_out(self, effect: AnyEffect) -> Outcome:
        try:
            return await self._act(effect)
        except SteppedDown:
            raise
        except (AdapterError, StoreError) as error:
            return None, str(error), {}
        except TimeoutError:
            return None, f"{_name(effect)} took too long and it cannot be told whether it took effect", {}
        except Exception as error:
            log.exception("an effect failed in a way that nobody foresaw", effect=_name(effect), effect_id=effect.id)
            return None, f"{_name(effect)} failed: {type(error).__name__}: {error}", {}

    async def _act(self, effect: AnyEffect) -> Outcome:
        match effect:
            case SendPage():
                return await self._page(effect)
            case Repair():
                return await self._repair(effect)
            case ScaleOut():
                ok = await self._serving.scale_to(effect.pool, effect.role, effect.count)
                what = f"{effect.count} {effect.role} workers of {effect.pool}"
                return ok, f"asked for {what}" if ok else f"{what}: refused, or no [controller] scale_out is set", {}
        worker = self._worker(effect.worker)
        if worker is None:
            return False, f"no worker is called {effect.worker!r} in the configuration any more", {}
        match effect:
            case Deroute():
                ok = await self._serving.deroute(worker)
                return ok, "" if ok else f"{worker.name} could not be taken out of rotation", {}
            case Reroute():
                ok = await self._serving.reroute(worker)
                return ok, "" if ok else f"{worker.name} could not be put back into rotation", {}
            case AwaitIdle():
                return await self._idle(worker, effect.until)
            case StopWorker():
                ok = await self._serving.stop(worker, hard=effect.hard, key=effect_key(effect))
                return ok, "" if ok else f"{worker.name} was not stopped", {}
            case StartWorker():
                ok = await self._serving.start(worker, key=effect_key(effect))
                return ok, "" if ok else f"{worker.name} was not started", {}
            case Verify():
                async with asyncio.timeout(effect.deadline_s + 5):  # the adapter keeps the deadline; this is for one that hangs
                    ok, sentence = await self._serving.verify(worker, effect.deadline_s)
                return ok, sentence, {}
            case PinBreaker():
                return await self._pin(effect, worker)
            case Look():
                told = await self._look(worker) is not None
                return told, "" if told else f"it could not be told whether {worker.name} answers", {}
        raise TypeError(f"no such effect: {_name(effect)}")

    async def _idle(self, worker: Worker, until: float) -> Outcome:
        """First nobody sends any more, and only then does nothing in flight mean anything."""
        pause, count, trouble = IDLE_POLL[0], None, ""
        version = 0
        behind: list[str] | None = None  # gateways that still may send; None: could not be told
        while True:
            if behind is None and self._gateways:
                version = self._gateways.version()  # published: it names the worker no more, nor does any later one
            if behind != []:
                behind, trouble = await self._behind(version)
            if behind == []:
                try:
                    count = await self._serving.in_flight(worker)
                except AdapterError as error:
                    count, trouble = None, str(error)
                if count == 0:
                    return True, f"{worker.name} has nothing in flight", {"in_flight": 0}
            left = until - self._clock()
            if left <= 0:
                undone = f"the deadline passed {_undone(worker, version, behind, count)}"
                return False, undone + (f" ({trouble})" if trouble else ""), _facts(behind, count)
            await asyncio.sleep(min(pause, left))
            if behind == []:
                pause = min(pause * 1.5, IDLE_POLL[1])

    async def _behind(self, version: int) -> tuple[list[str] | None, str]:
        """Gateways that obey an older table; None and why where it could not be told."""
        try:
            return (await self._gateways.behind(version) if self._gateways else []), ""
        except StoreError as error:
            return None, str(error)

    async def _pin(self, effect: PinBreaker, worker: Worker) -> Outcome:
        lasts = effect.until - self._clock()
        if self._gateways is None:
            return False, "there is no gateway whose breaker could be held", {}
        if effect.state and lasts <= 0:
            return False, "its time was over before it could be carried out", {}
        why_not = await self._gateways.pin(worker, effect.state, lasts_s=max(lasts, 0.0), by=effect.by, why=effect.why)
        return not why_not, why_not, {}

    async def _repair(self, effect: Repair) -> Outcome:
        args = {"target": effect.target}
        try:
            gpu = Component.parse(effect.target).gpu
        except ValueError:
            gpu = None
        if gpu:
            args["gpu"] = gpu
        deadline = REPAIR_DEADLINE.get(effect.action, REPAIR_DEADLINE_ELSE)
        result = await self._hands.run(
            effect.node, effect.action.value, args, key=effect_key(effect), why=effect.why, deadline_s=deadline
        )
        facts = {"seconds": result.seconds, "refused": result.refused}
        return result.ok, result.detail or ("" if result.ok else f"{effect.action} on {effect.node} failed"), facts

    async def _page(self, effect: SendPage) -> Outcome:
        page, pause = effect.page, PAGE_RETRY[0]
        if not page.runbook and page.fault and self._runbooks:
            page = msgspec.structs.replace(page, runbook=f"{self._runbooks}/{page.fault}")
        while True:
            try:
                delivered = await self._pager.send(page, self._valid)
            except PagerError as error:
                if page.event != "resolve" and self._resolved(effect):
                    return False, f"it was over before it got through: {error}", {}
                pause = max(pause, min(error.retry_after_s, PAGE_RETRY[1]))
                log.warning("a page was not delivered yet; it is tried again", page=page.id, error=str(error), in_s=pause)
                await asyncio.sleep(pause)
                if not self._valid():  # paused past the lease, and awake again: another leader sends it
                    raise SteppedDown from None
                pause = min(pause * 2, PAGE_RETRY[1])
                continue
            return delivered, "" if delivered else "the page was rejected for good; see the log for what the receiver said", {}

    def _resolved(self, effect: SendPage) -> bool:
        """Whether the end of what this page is about waits behind it."""
        behind = itertools.islice(self._lanes[effect.lane], 1, None)
        return any(isinstance(e, SendPage) and e.page.event == "resolve" for e in behind)


def _undone(worker: Worker, version: int, behind: list[str] | None, count: int | None) -> str:
    """What an idle worker lacked at its deadline, as the end of a sentence."""
    if behind is None:
        return f"and it could not be told whether every gateway obeys table {version}, which is without {worker.name}"
    if behind:
        return f"before {', '.join(behind)} obeyed table {version}, which is without {worker.name}"
    if count is None:
        return f"and what {worker.name} has in flight could not be measured"
    return f"with {count} requests in flight on {worker.name}"


def _facts(behind: list[str] | None, count: int | None) -> dict[str, Any]:
    return ({"in_flight": count} if count is not None else {}) | ({"gateways": behind} if behind else {})


def _name(effect: AnyEffect) -> str:
    return type(effect).__name__

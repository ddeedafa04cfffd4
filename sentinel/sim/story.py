"""One run of one scenario: what was watched, what was waited for, what was expected, and the document that says so.

This module exists so that a scenario reads as what it does and what must hold, and nothing else. What always holds:

* The timeline is made from what the controller wrote down, what the pager received, what was published as routes and what
  the client saw; the scenario itself only says "injected".
* An expectation is one sentence that held or did not, with the detail that shows it. A wait that ran out makes the
  expectations that needed it fail; it never raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sentinel.model import Drain, DrainState, Incident, RouteEntry, Routes, Step, WorkerState
from sentinel.sim.client import Record
from sentinel.sim.rack import OVERFLOW, PLACES
from sentinel.sim.stage import Stage, StageError
from sentinel.sim.timeline import Timeline
from sentinel.store.breakers import Standing

SIMULATED = (
    "GPU readings (no NVML, no GPU)",
    "kernel log lines (written by the demo, read by the real kernel-log probe)",
    "workers' engines (the HTTP servers, streams, kills and restarts are real)",
    "what the IMEX tool prints (a program that prints it)",
    "GPU reset and node reboot",
    "clients (their HTTP is real; they go round the three gateways as behind a load balancer, and take another one when a "
    "connection fails before an answer)",
    "the pager (a local server that speaks PagerDuty Events v2)",
)
POLL_S = 0.1
_ENDED = (DrainState.DONE, DrainState.CANCELLED)
# What a drain's step is called by the decider → what the timeline calls it.
STEPS = {"decided": "decided", "repairing": "repairing", "verified": "verified", "back": "back", "held out": "held out"}


@dataclass(frozen=True)
class Expectation:
    name: str
    held: bool
    detail: str = ""


@dataclass
class Story:
    """Watches a running Stage. ``deadline``: monotonic seconds past which no wait goes on."""

    scenario: str
    stage: Stage
    timeline: Timeline
    deadline: float
    expectations: list[Expectation] = field(default_factory=list)
    incidents: dict[str, Incident] = field(default_factory=dict)
    drains: dict[str, Drain] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    gateways: Mapping[str, int] = field(default_factory=dict)  # their counters, added up at the end
    opened: set[str] = field(default_factory=set)  # workers whose breaker has been open since the injection
    failed: str = ""  # why the run itself broke off
    _at_end: list[tuple[str, Callable[[], tuple[bool, str]]]] = field(default_factory=list)
    _watching: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _left: dict[str, float] = field(default_factory=dict)  # worker → when the pushed routes took it out
    _homes: dict[str, str] = field(default_factory=dict)  # session → the decoder that its stream last came from

    # -- watching ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Story:
        self.stage.on_routes = self._routed
        self.stage.on_page = self._paged
        self.stage.on_breaker = self._heard
        self.stage.on_first_token = self._served
        self._watching = asyncio.create_task(self._watch(), name="story")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(StageError):  # a controller that is busy for a moment is asked again
                await self._look()
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), POLL_S)

    def _hurry(self) -> None:
        """Something was pushed: what led to it is asked for at once."""
        self._news.set()
        self._changed.set()

    async def _look(self) -> None:
        self.incidents = {i.id: i for i in await self.stage.incidents()}
        self.status = await self.stage.status()
        listed = msgspec.convert(self.status.get("drains", []), list[Drain], strict=False)
        ended = [i for i, d in self.drains.items() if d.state not in _ENDED and i not in {d.id for d in listed}]
        for drain in (*listed, *[await self.stage.drain(i) for i in ended]):
            self.drains[drain.id] = drain
        for incident in self.incidents.values():
            self._found(incident)
        for drain in self.drains.values():
            self._drained(drain)
        self._changed.set()

    def _found(self, incident: Incident) -> None:
        if self.timeline.zero is None or incident.opened_at < self.timeline.zero:
            return
        seen = min((f.at for f in incident.findings), default=incident.opened_at)
        whose = f"{incident.fault} at {incident.culprit}"
        self.timeline.mark("found", f"{whose}: {incident.summary}", at=seen, key=f"found {incident.id}")
        for n, step in enumerate(incident.history):
            if n and step.what not in ("decided", "paged", "closed"):  # told by the drain, the pager, and below
                key = f"{incident.id} {step.what} {step.at}"
                self.timeline.mark(step.what, _sentence(incident.culprit, step), at=step.at, key=key)
        if incident.closed_at is not None and not incident.merged_into:
            self.timeline.mark("closed", whose, at=incident.closed_at, key=f"closed {incident.id}")

    def _drained(self, drain: Drain) -> None:
        if self.timeline.zero is None or drain.requested_at < self.timeline.zero:
            return
        before = ""
        for step in drain.history:
            what = STEPS.get(step.what, "")
            if before == "repairing" and step.what == "starting":
                what = "repaired"
            elif before == "starting" and step.what == "verifying":
                what = "restarted"
            if what:
                self.timeline.mark(what, _sentence(drain.worker, step), at=step.at, key=f"{drain.id} {what} {step.at}")
            before = step.what

    def _routed(self, old: Routes | None, new: Routes) -> None:
        """The pushed table: this is the moment from which clients send a worker nothing new."""
        now = time.time()
        before = _entries(old) if old else {}
        for name, entry in _entries(new).items():
            was = before.get(name)
            if self.timeline.zero is None or was is None or was.state == entry.state:
                continue
            if was.state is WorkerState.ACTIVE:
                self._left[name] = now
                told = f"{name}: {new.why}" if new.why else name
                self.timeline.mark("out of rotation", told, at=now, key=f"out {name} {new.version}")
            elif entry.state is WorkerState.ACTIVE:
                self.timeline.mark("in rotation", name, at=now, key=f"in {name} {new.version}")
        weights = {p.pool: p.weight for p in new.pools}
        if self.timeline.zero is not None and old and weights != {p.pool: p.weight for p in old.pools}:
            told = ", ".join(f"{p} {w:.0%}" for p, w in weights.items())
            self.timeline.mark("weights", f"new sessions: {told}", at=now)
        self._hurry()

    def _heard(self, standing: Standing) -> None:
        """A breaker that all gateways share has opened or closed; those of before the injection are nobody's."""
        if self.timeline.zero is None or standing.state == "half_open":
            return
        if standing.state == "open":
            self.opened.add(standing.worker)
        elif standing.worker not in self.opened:
            return
        what = "breaker opened" if standing.state == "open" else "breaker closed"
        key = f"breaker {standing.worker} {standing.since}"  # a pin is no transition
        self.timeline.mark(what, f"{standing.worker}: {standing.why}", at=standing.since / 1000, key=key)

    def _paged(self, page: dict[str, Any]) -> None:
        what = "paged" if page["event"] == "trigger" else f"page {page['event']}d"
        detail = f"{page['urgency']}: {page['summary']}" if page["urgency"] else page["dedup_key"]
        self.timeline.mark(what, f"simulated pager: {detail}", at=page["at"])
        self._hurry()

    def _served(self, record: Record) -> None:
        """A first token: traffic has shifted when a session of the worker that left streams from another one."""
        worker = record.worker
        if worker not in PLACES:
            return
        home = self._homes.get(record.session)
        self._homes[record.session] = worker
        at = record.first_token_at or time.time()
        if home and home != worker and home in self._left:
            self.timeline.mark("traffic shifted", f"session {record.session}: {home} → {worker}", at=at, key=f"shifted {home}")
        if self._left and PLACES[worker].pool == OVERFLOW:
            self.timeline.mark("overflow serves", f"session {record.session} on {worker}", at=at, key="overflow serves")

    # -- waiting ----------------------------------------------------------------------------------------------------

    async def until(self, condition: Callable[[], bool], within_s: float = 60.0) -> bool:
        """Wait until it holds, the time is over, or the whole run's is. Says whether it holds."""
        last = min(self.deadline, time.monotonic() + within_s)
        while not condition():
            left = last - time.monotonic()
            if left <= 0:
                return condition()
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left, POLL_S))
        return True

    async def flow(self, seconds: float) -> None:
        """Let traffic flow on."""
        await asyncio.sleep(max(0.0, min(seconds, self.deadline - time.monotonic())))

    # -- asking -----------------------------------------------------------------------------------------------------

    def state(self, worker: str) -> WorkerState | None:
        entry = _entries(self.stage.routes).get(worker) if self.stage.routes else None
        return entry.state if entry else None

    def active(self, worker: str) -> bool:
        return self.state(worker) is WorkerState.ACTIVE

    def new_drains(self) -> list[Drain]:
        """Drains that took something out since the injection (a standby's start is none)."""
        zero = self.timeline.zero or 0.0
        return [d for d in self.drains.values() if d.requested_at >= zero and d.kind == "drain"]

    def drain_of(self, worker: str, state: DrainState | None = None) -> Drain | None:
        """The newest drain of this worker, when it is in ``state`` (None: whatever its state)."""
        mine = [d for d in self.new_drains() if d.worker == worker]
        return mine[-1] if mine and state in (None, mine[-1].state) else None

    def new_incidents(self, fault: str = "") -> list[Incident]:
        zero = self.timeline.zero or 0.0
        return [i for i in self.incidents.values() if i.opened_at >= zero and (not fault or i.fault == fault) and not i.merged_into]

    def open_incidents(self, but: list[Incident]) -> list[Incident]:
        return [i for i in self.new_incidents() if i.closed_at is None and i not in but]

    def pages(self, event: str = "trigger") -> list[dict[str, Any]]:
        return [p for p in self.stage.pages if p["event"] == event]

    def failures(self) -> list[Record]:
        return [r for r in self.stage.traffic.records if r.failed]

    def refusals(self) -> list[Record]:
        return [r for r in self.stage.traffic.records if r.refused]

    def first_token_ms(self) -> dict[str, float]:
        """Time to first token as the clients measured it."""
        took = self.stage.traffic.first_tokens()
        return {f"p{p}": round(took[min(len(took) - 1, len(took) * p // 100)] * 1000, 1) for p in (50, 99)} if took else {}

    # -- expecting --------------------------------------------------------------------------------------------------

    def expect(self, name: str, held: bool, detail: str = "") -> None:
        self.expectations.append(Expectation(name, bool(held), detail))

    def expect_at_end(self, name: str, check: Callable[[], tuple[bool, str]]) -> None:
        """An expectation about requests: judged by ``settle``, when the last of them has ended."""
        self._at_end.append((name, check))

    def settle(self) -> None:
        """Judge what could only be judged now that traffic has ended."""
        for name, check in self._at_end:
            self.expect(name, *check())
        self._at_end.clear()

    @property
    def ok(self) -> bool:
        return not self.failed and bool(self.expectations) and all(e.held for e in self.expectations)

    def document(self) -> dict[str, Any]:
        """The whole run as plain JSON values."""
        failures = [
            {"request": r.id, "session": r.session, "on": r.failed_on, "why": r.failed, "tokens": r.tokens,
             "ms": self.timeline.ms(r.ended_at or r.at)}
            for r in self.failures()
        ]
        return {
            "scenario": self.scenario,
            "simulated": list(SIMULATED),
            "faster": self.stage.faster,
            "timeline": self.timeline.document(),
            "requests": {**self.stage.traffic.counts(), "first_token_ms": self.first_token_ms(), "failures": failures},
            "gateways": dict(self.gateways),
            "pages": [{**p, "ms": self.timeline.ms(p["at"])} for p in self.stage.pages],
            "expectations": [{"name": e.name, "held": e.held, "detail": e.detail} for e in self.expectations],
            "failed": self.failed,
            "ok": self.ok,
        }


def _sentence(subject: str, step: Step) -> str:
    return f"{subject}: {step.why}" if step.why else subject


def _entries(routes: Routes) -> dict[str, RouteEntry]:
    return {e.worker: e for p in routes.pools for e in p.workers}

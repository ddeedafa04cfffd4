"""Reports taken in: each exactly once, with times that can be believed.

This module exists so that what a node says reaches the decider once, however often it is sent, and so that a node whose
clock is wrong is still heard. What always holds:

* The reports of one node are taken one after the other; a repeated one waits for the first and is then acknowledged
  without effect.
* ``seq`` is remembered only once its report is durable: a report that failed can be sent again.
* A gap, or a session this leader does not know, takes what came and asks for a snapshot.
* A report whose clock is off by more than ``CLOCK_LIMIT`` is accepted; the times of its findings become its arrival's.
* A finding about what is not the node's own, or one more than a node can have, is left out, counted, and told once in the log.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import structlog

from sentinel.controller.bounds import bounded
from sentinel.controller.core import Busy
from sentinel.controller.metrics import Metrics
from sentinel.decide.events import AnyEvent, AnyInstruction, Reported
from sentinel.model import Ack, Component, Finding, Report, gpu_component

log = structlog.get_logger(__name__)

CLOCK_LIMIT = 300.0  # seconds
SESSIONS = 4  # remembered per node: an agent that restarts may still send what its last run spooled
COMPONENTS = 2048  # remembered per node: 4 GPUs x 18 links, and room
FAULTS = 1024  # different (component, check) that a node may have bad within FAULTS_S: a handful of checks on each link
FAULTS_S = 3600.0
AT_ONCE = 8  # reports of one node under way; an agent sends one at a time


@dataclass
class NodeHeard:
    """What this leader has heard of one node."""

    at: float = 0.0  # when its latest report arrived; 0: none yet
    clock_off: float = 0.0  # report.at - arrival, of the latest report; positive: its clock is ahead
    version: str = ""
    probes: dict[str, bool | None] = field(default_factory=dict)
    components: set[Component] = field(default_factory=set)
    sessions: OrderedDict[str, int] = field(default_factory=OrderedDict)  # session → latest seq that is durable
    faults: dict[tuple[Component, str], float] = field(default_factory=dict)  # what it has bad → when that was last said
    told: set[str] = field(default_factory=set)  # oddities of it that are in the log already
    inside: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def clock_trusted(self) -> bool:
        return abs(self.clock_off) <= CLOCK_LIMIT


class Ingest:
    """One leadership's intake. ``submit`` is the core's; it raises Busy and SteppedDown. ``learn`` hears of workers first;
    ``own`` says whether a node may speak of a component."""

    def __init__(
        self,
        *,
        submit: Callable[[AnyEvent], asyncio.Future[list[AnyInstruction]]],
        new_id: Callable[[], str],
        metrics: Metrics,
        learn: Callable[[Report], None] = lambda report: None,
        own: Callable[[str, Component], bool] = lambda node, component: component.node == node,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._submit, self._new_id, self._metrics, self._clock = submit, new_id, metrics, clock
        self._learn, self._own = learn, own
        self.nodes: dict[str, NodeHeard] = {}

    async def take(self, report: Report) -> Ack:
        """Take one authenticated report; returns once everything it caused is durable.

        Raises Busy, SteppedDown or DeciderFailed, and then nothing is remembered of it.
        """
        heard = self.nodes.setdefault(report.node, NodeHeard())
        if heard.inside >= AT_ONCE:
            raise Busy
        heard.inside += 1
        try:
            return await self._take(heard, report)
        finally:
            heard.inside -= 1

    async def _take(self, heard: NodeHeard, report: Report) -> Ack:
        async with heard.turn:
            last = heard.sessions.get(report.session)
            if last is not None and report.seq <= last:
                self._metrics.reports.labels("repeated").inc()
                return Ack(session=report.session, seq=report.seq)
            arrived = self._clock()
            report = self._sifted(heard, bounded(report), arrived)
            if report.workers:
                self._learn(report)  # before deciding: what is decided may need a worker's newest instance at once
            await self._submit(Reported(id=self._new_id(), at=arrived, report=believable(report, arrived)))
            gap = last is None or report.seq != last + 1
            self._remember(heard, report, arrived)
            self._metrics.reports.labels("accepted").inc()
            if gap and not report.snapshot:
                self._metrics.reports.labels("gap").inc()
            if not heard.clock_trusted:
                self._metrics.reports.labels("clock_off").inc()
            return Ack(session=report.session, seq=report.seq, want_snapshot=gap and not report.snapshot)

    def _sifted(self, heard: NodeHeard, report: Report, arrived: float) -> Report:
        """The report without the findings that this node cannot have."""
        kept: list[Finding] = []
        for f in report.findings:
            if not self._own(report.node, f.component):
                self._odd(heard, "foreign", report, f)
            elif f.present and not _fits(heard.faults, (f.component, f.check), arrived):
                self._odd(heard, "absurd", report, f)
            else:
                kept.append(f)
        return report if len(kept) == len(report.findings) else msgspec.structs.replace(report, findings=tuple(kept))

    def _odd(self, heard: NodeHeard, outcome: str, report: Report, finding: Finding) -> None:
        self._metrics.reports.labels(outcome).inc()
        if outcome not in heard.told:
            heard.told.add(outcome)
            why = "it is about what is not the node's own" if outcome == "foreign" else f"a node cannot have more than {FAULTS}"
            log.warning(
                "a finding is left out; more of the kind are only counted",
                why=why, node=report.node, check=finding.check, component=str(finding.component),
            )  # fmt: skip

    def components(self, node: str) -> Iterable[Component]:
        """Every device and part that a node reported about."""
        heard = self.nodes.get(node)
        return heard.components if heard else ()

    @staticmethod
    def _remember(heard: NodeHeard, report: Report, arrived: float) -> None:
        heard.sessions[report.session] = report.seq
        heard.sessions.move_to_end(report.session)
        while len(heard.sessions) > SESSIONS:
            heard.sessions.popitem(last=False)
        heard.at, heard.clock_off, heard.version = arrived, report.at - arrived, report.version
        if report.probes:
            heard.probes = report.probes
        if len(heard.components) < COMPONENTS:
            heard.components.update(f.component for f in report.findings if f.component.node == report.node and f.component.device)
            for seen in report.workers:
                for pci in seen.gpus:
                    try:
                        heard.components.add(gpu_component(report.node, pci))
                    except ValueError:
                        continue  # a site's own probe may write what it likes there; it is only a hint for names


def _fits(faults: dict[tuple[Component, str], float], key: tuple[Component, str], now: float) -> bool:
    if key not in faults and len(faults) >= FAULTS:
        for old in [k for k, at in faults.items() if now - at > FAULTS_S]:
            del faults[old]
        if len(faults) >= FAULTS:
            return False
    faults[key] = now
    return True


def believable(report: Report, arrived: float) -> Report:
    """The report with finding times that the decider may reckon with. ``report.at`` stays: it shows how far the clock is off."""
    off = abs(report.at - arrived) > CLOCK_LIMIT
    if not off and all(0 <= f.at <= arrived + CLOCK_LIMIT for f in report.findings):
        return report
    findings = tuple(
        f if not off and 0 <= f.at <= arrived + CLOCK_LIMIT else msgspec.structs.replace(f, at=arrived) for f in report.findings
    )
    return msgspec.structs.replace(report, findings=findings)

"""Reports taken in: each exactly once, with times that can be believed.

This module exists so that what a node says reaches the decider once, however often it is sent, and so that a node whose
clock is wrong is still heard. What always holds:

* The reports of one node are taken one after the other; a repeated one waits for the first and is then acknowledged
  without effect.
* ``seq`` is remembered only once its report is durable: a report that failed can be sent again.
* A gap, or a session this leader does not know, takes what came and asks for a snapshot.
* A report whose clock is off by more than ``CLOCK_LIMIT`` is accepted; the times of its findings become its arrival's.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from sentinel.controller.metrics import Metrics
from sentinel.decide.events import AnyEvent, AnyInstruction, Reported
from sentinel.model import Ack, Component, Report, gpu_component

CLOCK_LIMIT = 300.0  # seconds
SESSIONS = 4  # remembered per node: an agent that restarts may still send what its last run spooled
COMPONENTS = 2048  # remembered per node: 4 GPUs x 18 links, and room


@dataclass
class NodeHeard:
    """What this leader has heard of one node."""

    at: float = 0.0  # when its latest report arrived; 0: none yet
    clock_off: float = 0.0  # report.at - arrival, of the latest report; positive: its clock is ahead
    version: str = ""
    probes: dict[str, bool | None] = field(default_factory=dict)
    components: set[Component] = field(default_factory=set)
    sessions: OrderedDict[str, int] = field(default_factory=OrderedDict)  # session → latest seq that is durable
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def clock_trusted(self) -> bool:
        return abs(self.clock_off) <= CLOCK_LIMIT


class Ingest:
    """One leadership's intake. ``submit`` is the core's; it raises Busy and SteppedDown. ``learn`` hears of workers first."""

    def __init__(
        self,
        *,
        submit: Callable[[AnyEvent], asyncio.Future[list[AnyInstruction]]],
        new_id: Callable[[], str],
        metrics: Metrics,
        learn: Callable[[Report], None] = lambda report: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._submit, self._new_id, self._metrics, self._learn, self._clock = submit, new_id, metrics, learn, clock
        self.nodes: dict[str, NodeHeard] = {}

    async def take(self, report: Report) -> Ack:
        """Take one authenticated report; returns once everything it caused is durable.

        Raises Busy, SteppedDown or DeciderFailed, and then nothing is remembered of it.
        """
        heard = self.nodes.setdefault(report.node, NodeHeard())
        async with heard.turn:
            last = heard.sessions.get(report.session)
            if last is not None and report.seq <= last:
                self._metrics.reports.labels("repeated").inc()
                return Ack(session=report.session, seq=report.seq)
            arrived = self._clock()
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

    def components(self) -> Iterator[Component]:
        """Every device and part that nodes reported about."""
        for heard in self.nodes.values():
            yield from heard.components

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


def believable(report: Report, arrived: float) -> Report:
    """The report with finding times that the decider may reckon with. ``report.at`` stays: it shows how far the clock is off."""
    off = abs(report.at - arrived) > CLOCK_LIMIT
    if not off and all(f.at <= arrived + CLOCK_LIMIT for f in report.findings):
        return report
    findings = tuple(
        msgspec.structs.replace(f, at=arrived) if off or f.at > arrived + CLOCK_LIMIT else f for f in report.findings
    )
    return msgspec.structs.replace(report, findings=findings)

"""Reports taken in: each exactly once, with times that can be believed.

This module exists so that what a node says reaches the decider once, however often it is sent, so that a node whose clock is
wrong is still heard, and so that ten thousand nodes that have nothing to say cost next to nothing. What always holds:

* The reports of one node are taken one after the other; a repeated one waits for the first and is then acknowledged
  without effect.
* ``seq`` is remembered only once its report is durable: a report that failed can be sent again.
* A gap, a session this leader does not know, or a heartbeat upon a snapshot that it does not hold takes what came and asks for a
  snapshot.
* One measurement of a state is one sample, however often it is told; and a fine state that was never bad is not passed on: the
  decider makes nothing of it. So a snapshot and a heartbeat of the same node come out as the same event but for what the
  decider passes over, and neither it nor the journal sees what cannot change anything.
* A heartbeat that has nothing to say is acknowledged at once, and told to the decider with those of other nodes in one event,
  ``HEARD_S`` later at most: there is nothing of it that could be lost.
* Snapshots are taken in at a bounded rate, for when a new leader wants them of all nodes at once. One that is turned away says
  all the same that its node is there, and a leader that lacks a snapshot asks for it only when there is room for it.
* A report whose clock is off by more than ``CLOCK_LIMIT`` is accepted; the times of its findings become its arrival's.
* A finding about what is not the node's own, or one more than a node can have, is left out, counted, and told once in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import structlog

from sentinel.controller.bounds import bounded, decode, is_snapshot
from sentinel.controller.core import Busy, SteppedDown
from sentinel.controller.metrics import Metrics
from sentinel.decide.state.events import AnyEvent, AnyInstruction, Heard, Reported
from sentinel.model import Ack, Component, Finding, Kind, Report, gpu_component

log = structlog.get_logger(__name__)

State = tuple[Component, str]  # what a finding is about: component and check
Parts = frozenset[tuple[str, str]]  # device and part

CLOCK_LIMIT = 300.0  # seconds
SESSIONS = 4  # remembered per node: an agent that restarts may still send what its last run spooled
ALIKE = 1024  # different sets of parts that are kept once
COMPONENTS = 2048  # remembered per node: 4 GPUs x 18 links, and room
FAULTS = 1024  # different (component, check) that a node may have bad within FAULTS_S: a handful of checks on each link
FAULTS_S = 3600.0
SNAPSHOTS_AT_ONCE = 50
SNAPSHOTS_PER_S = 250  # a snapshot of 300 states costs about a millisecond: a quarter of a core at most
SNAPSHOT_AGAIN_S = 5.0  # when one that was turned away is to come again
HEARD_S = 0.5  # heartbeats without news are gathered for so long
CLOCK_MOVED = 5.0  # seconds: a clock that has moved by more since the decider heard of it is news
AT_ONCE = 8  # reports of one node under way; an agent sends one at a time


@dataclass
class NodeHeard:
    """What this leader has heard of one node."""

    at: float = 0.0  # when its latest report arrived; 0: none yet
    clock_off: float = 0.0  # report.at - arrival, of the latest report; positive: its clock is ahead
    version: str = ""
    probes: dict[str, bool | None] = field(default_factory=dict)
    parts: Parts = frozenset()  # what it reported about
    sessions: OrderedDict[str, int] = field(default_factory=OrderedDict)  # session → latest seq that is durable
    held: tuple[str, int] = ("", 0)  # session and seq of its latest snapshot
    asked: bool = False  # for a snapshot, which has not come yet
    clock_told: float = 0.0  # clock_off as the decider knows it
    sampled: dict[State, tuple[float, bool]] = field(default_factory=dict)  # what matters of it → its latest sample: at, present
    faults: dict[State, float] = field(default_factory=dict)  # what it has bad → when that was last said
    told: set[str] = field(default_factory=set)  # oddities of it that are in the log already
    inside: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def clock_trusted(self) -> bool:
        return abs(self.clock_off) <= CLOCK_LIMIT


class Ingest:
    """One leadership's intake. ``submit`` is the core's; it raises Busy and SteppedDown. ``learn`` hears of workers first;
    ``own`` says whether a node may speak of a component; ``watch`` is the decider's: of which states a fine sample matters."""

    def __init__(
        self,
        *,
        submit: Callable[[AnyEvent], asyncio.Future[list[AnyInstruction]]],
        new_id: Callable[[], str],
        metrics: Metrics,
        learn: Callable[[Report], None] = lambda report: None,
        own: Callable[[str, Component], bool] = lambda node, component: component.node == node,
        watch: Callable[[str], Mapping[State, bool]] = lambda node: {},
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._submit, self._new_id, self._metrics, self._clock = submit, new_id, metrics, clock
        self._learn, self._own, self._watch = learn, own, watch
        self.nodes: dict[str, NodeHeard] = {}
        self._alike: dict[Parts, Parts] = {}  # nodes of one kind have the same parts: kept once
        self._monotonic = monotonic
        self._room, self._room_at = float(SNAPSHOTS_AT_ONCE), monotonic()  # snapshots that may be taken now, and as of when
        self._quiet: dict[str, None] = {}  # nodes with a heartbeat that the decider has not been told of

    def admitted(self, node: str, body: bytes) -> Report:
        """The report of a node. Raises NotAReport, and Busy when it is a snapshot that nobody asked for while too many come."""
        if not self._has_room() and not self.nodes.setdefault(node, NodeHeard()).asked and is_snapshot(body):
            self._tell_later(node)
            raise Busy(SNAPSHOT_AGAIN_S)
        return decode(body)

    def _has_room(self) -> bool:
        now = self._monotonic()
        self._room = min(self._room + (now - self._room_at) * SNAPSHOTS_PER_S, float(SNAPSHOTS_AT_ONCE))
        self._room_at = now
        return self._room >= 1

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
                return self._ack(heard, report, lacks=_upon_nothing(heard, report))  # the first answer may be lost
            arrived = self._clock()
            gap = last is None or report.seq != last + 1 or _upon_nothing(heard, report)
            told = self._sifted(heard, bounded(report), arrived)
            if not gap and _says_nothing(told) and abs(report.at - arrived - heard.clock_told) <= CLOCK_MOVED:
                self._tell_later(report.node)
            else:
                if told.workers:
                    self._learn(told)  # before deciding: what is decided may need a worker's newest instance at once
                await self._submit(Reported(id=self._new_id(), at=arrived, report=believable(told, arrived)))
                heard.clock_told = report.at - arrived
            self._remember(heard, report, told, arrived)
            self._metrics.accepted.inc()
            if gap and not report.snapshot:
                self._metrics.reports.labels("gap").inc()
            if not heard.clock_trusted:
                self._metrics.reports.labels("clock_off").inc()
            return self._ack(heard, report, lacks=gap and not report.snapshot)

    def _ack(self, heard: NodeHeard, report: Report, *, lacks: bool) -> Ack:
        """``lacks``: a snapshot is needed. It is asked for as soon as there is room for it; until then heartbeats go on upon the
        one that they build on."""
        session, held = heard.held
        if lacks and not heard.asked and self._has_room():
            heard.asked = True
            self._room -= 1
        watch = self._watch(report.node)
        return Ack(
            session=report.session, seq=report.seq, want_snapshot=lacks and heard.asked,
            same=report.same if lacks else held if session == report.session else 0,
            watch=tuple(state for state, soon in watch.items() if soon) if watch else (),
        )  # fmt: skip

    def _tell_later(self, node: str) -> None:
        if not self._quiet:
            asyncio.get_running_loop().call_later(HEARD_S, self.tell)
        self._quiet[node] = None

    def tell(self) -> None:
        """Tell the decider of the heartbeats that were gathered."""
        nodes, self._quiet = tuple(self._quiet), {}
        if nodes:
            with contextlib.suppress(SteppedDown):
                self._submit(Heard(id=self._new_id(), at=self._clock(), nodes=nodes))

    def _sifted(self, heard: NodeHeard, report: Report, arrived: float) -> Report:
        """The report without the findings that this node cannot have, and without those that say nothing new."""
        kept: list[Finding] = []
        watch, bad = self._watch(report.node), set()
        for f in report.findings:
            state = (f.component, f.check)
            if f.present:
                bad.add(state)
            elif state not in watch and state not in bad:
                continue  # never was bad
            if not self._own(report.node, f.component):
                self._odd(heard, "foreign", report, f)
            elif f.present and not _fits(heard.faults, state, arrived):
                self._odd(heard, "absurd", report, f)
            elif f.kind is Kind.EVENT or heard.sampled.get(state) != (f.at, f.present):
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
        return (Component(node=node, device=device, part=part) for device, part in heard.parts) if heard else ()

    def _remember(self, heard: NodeHeard, report: Report, told: Report, arrived: float) -> None:
        """It is durable. ``told``: what of it the decider was told."""
        heard.sessions[report.session] = report.seq
        heard.sessions.move_to_end(report.session)
        while len(heard.sessions) > SESSIONS:
            heard.sessions.popitem(last=False)
        heard.at, heard.clock_off, heard.version = arrived, report.at - arrived, report.version or heard.version
        if report.snapshot:
            heard.held = (report.session, report.seq)
            self._room -= not heard.asked
            heard.asked = False
        if len(heard.sampled) > 2 * COMPONENTS:
            heard.sampled.clear()  # an agent that invents components; costs the others one sample told twice
        for f in told.findings:
            if f.kind is Kind.STATE:  # news may be older than what a snapshot has already told
                state = (f.component, f.check)
                heard.sampled[state] = max(heard.sampled.get(state, (f.at, f.present)), (f.at, f.present))
        if report.probes:
            heard.probes = report.probes
        if (report.findings or report.workers) and len(heard.parts) < COMPONENTS:
            parts = heard.parts.union(_parts(report))
            heard.parts = self._alike.setdefault(parts, parts) if len(self._alike) < ALIKE else parts


def _upon_nothing(heard: NodeHeard, report: Report) -> bool:
    """Whether it is a heartbeat that builds on a snapshot which this leader does not hold."""
    return report.same != 0 and (report.session, report.same) != heard.held


def _parts(report: Report) -> Iterator[tuple[str, str]]:
    for f in report.findings:
        if f.component.node == report.node and f.component.device:
            yield f.component.device, f.component.part
    for seen in report.workers:
        for pci in seen.gpus:
            with contextlib.suppress(ValueError):  # a site's own probe may write what it likes there; it is only a hint for names
                yield gpu_component(report.node, pci).device, ""


def _says_nothing(told: Report) -> bool:
    """A heartbeat of a node of which everything is as it was."""
    return told.same != 0 and not (told.findings or told.workers or told.probes or told.place)


def _fits(faults: dict[State, float], key: State, now: float) -> bool:
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

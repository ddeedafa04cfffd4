"""A recorded period decided again: under the rules of its time, to prove it; under other rules, to see what they would change.

This module exists so that a change of policy can be tried on what really happened. Pure: events in, decisions out. What always
holds:

* A stretch is replayed from where a leader took over; what comes before the first take-over is left out and counted.
* Under its own rules (``prove``) every instruction must come out as it was recorded (``brief``), to the letter; those that do not
  are named.
* Under other rules (``retry``) the world cannot be asked again. An effect ends as the same one did in the record, with the same
  delay, and one that was never carried out is assumed to succeed after ``ASSUMED_S``. What the record says of a worker
  while sentinel had it stopped is left out where it would not be stopped now. A checkpoint is good enough to begin from.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import msgspec

from sentinel.decide.state.brief import Brief
from sentinel.decide.state.events import (
    AnyEvent,
    AnyInstruction,
    Done,
    Effect,
    FleetLoaded,
    PolicyLoaded,
    Record,
    Repair,
    Reported,
    Restored,
    ScaleOut,
    SendPage,
    Watched,
)
from sentinel.decide.state.picture import ENDED
from sentinel.model import Drain, Incident

_APART = 1_000_000  # epochs
ASSUMED_S = 1.0  # an effect that the record knows nothing of: done after this long (an assumption, and said so)


class Recorded(Protocol):
    """One line of a journal."""

    @property
    def event(self) -> AnyEvent: ...

    @property
    def instructions(self) -> tuple[AnyInstruction, ...]: ...

    @property
    def checkpoint(self) -> bool: ...


class Decides(Protocol):
    def handle(self, event: AnyEvent) -> list[AnyInstruction]: ...


Line = tuple[AnyEvent, Sequence[AnyInstruction]]
Maker = Callable[[], Decides]  # a fresh decider for each stretch


@dataclass
class Proof:
    """How a replay under the rules of its time went."""

    stretches: int = 0
    events: int = 0
    left_out: int = 0  # before the first take-over or checkpoint
    differ: int = 0  # events whose decisions came out otherwise
    differing: list[tuple[AnyEvent, tuple[AnyInstruction, ...], tuple[AnyInstruction, ...]]] = field(default_factory=list)

    @property
    def same(self) -> bool:
        return not self.differ


@dataclass(frozen=True)
class Deed:
    """Something of weight that was decided: an incident opened, a page sent, a worker taken out, a repair."""

    what: str  # "incident", "page", "drain", "repair", "scale-out"
    of: str  # what tells it from others of its kind
    at: float
    why: str = ""


def take_overs(lines: Iterable[Recorded]) -> Iterator[tuple[int, bool, Recorded]]:
    """(stretch, whole, line): stretches are numbered from 1, each from where a leader took over; 0: before anything can be decided.

    Not ``whole``: the take-over is not kept any more and a checkpoint stands in for it, which knows what was durable and not
    what was only heard. Later checkpoints are left out.
    """
    number, whole = 0, False
    ahead: deque[Recorded] = deque()
    for line in lines:
        if line.checkpoint and number:
            continue
        ahead.append(line)
        if len(ahead) == 3:
            if [type(x.event) for x in ahead] == [PolicyLoaded, FleetLoaded, Restored]:
                number, whole = number + 1, not line.checkpoint
            yield number, whole, ahead.popleft()
    for line in ahead:
        yield number, whole, line


def prove(lines: Iterable[Recorded], make: Maker, *, most: int = 20) -> Proof:
    """Replay under the rules of its time; the differing ones (at most ``most`` of them) are kept."""
    proof = Proof()
    decider: Decides | None = None
    brief = Brief()
    latest = 0
    for stretch, whole, line in take_overs(lines):
        if not whole:
            proof.left_out += 1
            continue
        if decider is None or stretch != latest:
            decider, latest = make(), stretch
            proof.stretches += 1
        proof.events += 1
        whole_ones = _decided(decider, line.event)
        decided = brief.of(line.event, whole_ones)  # as a journal keeps it
        kept = tuple(map(_written, line.instructions))  # what comes straight from a decider says besides what changed
        if kept != decided and kept != tuple(map(_written, whole_ones)):
            proof.differ += 1
            if len(proof.differing) < most:
                proof.differing.append((line.event, line.instructions, decided))
    return proof


def retry(lines: Iterable[Recorded], make: Maker, text: str) -> tuple[list[Deed], list[Deed]]:
    """(what was decided then, what would have been decided under these rules)."""
    then: list[Deed] = []
    now: list[Deed] = []
    for number, group in groupby(take_overs(lines), key=lambda numbered: numbered[0]):
        if number:
            stretch = [line for _, _, line in group]
            then += deeds((x.event, x.instructions) for x in stretch)
            now += deeds(_again(stretch, make(), text))
    return then, now


def deeds(lines: Iterable[Line]) -> list[Deed]:
    """What of weight these decisions contain, each once, in order."""
    found: dict[tuple[str, str], Deed] = {}
    names: dict[str, str] = {}  # incident id → fault

    def note(what: str, of: str, at: float, why: str) -> None:
        found.setdefault((what, of), Deed(what, of, at, why))

    opened: set[str] = set()
    for event, instructions in lines:
        if isinstance(event, Restored):
            opened |= {i.id for i in event.incidents} | {d.id for d in event.drains}
            names |= {i.id: i.fault for i in event.incidents}
        names |= {n.value.id: n.value.fault for n in instructions if isinstance(n, Record) and isinstance(n.value, Incident)}
        for n in instructions:
            match n:
                case Record(value=Incident() as i):
                    if i.id not in opened:
                        note("incident", f"{i.fault} on {i.culprit}", event.at, i.summary)
                case Record(value=Drain() as d) if d.kind == "drain" and d.id not in opened:
                    whose = names.get(d.incident, "") or f"asked by {d.by}"
                    note("drain", f"{d.response.value} {d.worker} ({whose})", event.at, d.reason)
                    opened.add(d.id)  # a response that grows is the same drain
                case SendPage(page=page) if page.event == "trigger":
                    note("page", f"{page.urgency.value} {page.dedup_key}", event.at, page.summary)
                case Repair():
                    note("repair", f"{n.action.value} of {n.target}", event.at, n.why)
                case ScaleOut():
                    note("scale-out", f"{n.pool} {n.role.value} to {n.count}", event.at, n.why)
    return list(found.values())


def _decided(decider: Decides, event: AnyEvent) -> tuple[AnyInstruction, ...]:
    try:
        return tuple(decider.handle(event))
    except Exception:
        return ()  # recorded as an error then; what was owed comes with the next event


def _written(n: AnyInstruction) -> AnyInstruction:
    """As a journal kept it that held tables whole."""
    return msgspec.structs.replace(n, news=None) if isinstance(n, Record) else n


# ---------------------------------------------------------------------------------------------------------------------
# Under other rules


def _again(stretch: Sequence[Recorded], decider: Decides, text: str) -> Iterator[Line]:
    """The same stretch under other rules, with a world that answers as it did."""
    world = _World(stretch)
    for line in stretch:
        for event in (*world.due(line.event.at), line.event):
            if isinstance(event, Done) and event is line.event:
                continue  # of the record; ours come from the world
            kept = world.as_it_would_be(event)
            if isinstance(kept, PolicyLoaded):
                kept = msgspec.structs.replace(kept, text=text)
            elif isinstance(kept, Restored) and line.checkpoint:  # in the middle of a leadership: its ids are taken
                kept = msgspec.structs.replace(kept, epoch=kept.epoch + _APART)
            out = _decided(decider, kept)
            world.decided(kept.at, out)
            yield kept, out
        world.recorded(line)


class _World:
    """How effects end, and which workers are stopped in the record and here."""

    def __init__(self, stretch: Sequence[Recorded]) -> None:
        self._ends: dict[tuple[str, ...], deque[tuple[float, Done]]] = defaultdict(deque)
        begun: dict[str, tuple[float, tuple[str, ...]]] = {}
        for line in stretch:
            if isinstance(line.event, Done) and line.event.instruction in begun:
                at, gist = begun.pop(line.event.instruction)
                self._ends[gist].append((line.event.at - at, line.event))
            for n in line.instructions:
                if isinstance(n, Effect):
                    begun[n.id] = (line.event.at, _gist(n))
        self._due: list[tuple[float, int, Done]] = []
        self._count = 0
        self._then: dict[str, str] = {}  # worker → its drain that stopped it, in the record
        self._now: dict[str, str] = {}

    def due(self, at: float) -> Iterator[Done]:
        while self._due and self._due[0][0] <= at:
            yield heapq.heappop(self._due)[2]

    def decided(self, at: float, instructions: Iterable[AnyInstruction]) -> None:
        for n in instructions:
            if isinstance(n, Effect):
                ends = self._ends.get(_gist(n))
                delay, end = ends.popleft() if ends else (ASSUMED_S, Done(id="", at=0.0, instruction="", ok=True, detail="assumed"))
                self._count += 1
                done = msgspec.structs.replace(end, id=f"assumed-{self._count}", at=at + delay, instruction=n.id)
                heapq.heappush(self._due, (at + delay, self._count, done))
            _stopped(self._now, n)

    def recorded(self, line: Recorded) -> None:
        for n in line.instructions:
            _stopped(self._then, n)

    def as_it_would_be(self, event: AnyEvent) -> AnyEvent:
        """The event without what only our own action of that time had made so."""
        only_then = self._then.keys() - self._now.keys()
        if not only_then:
            return event
        if isinstance(event, Watched) and event.worker in only_then:
            return msgspec.structs.replace(event, reachable=None, seen=None)
        if isinstance(event, Reported):
            findings = tuple(f for f in event.report.findings if f.component.worker not in only_then)
            return msgspec.structs.replace(event, report=msgspec.structs.replace(event.report, findings=findings))
        return event


def _stopped(stopped: dict[str, str], n: AnyInstruction) -> None:
    if isinstance(n, Record) and isinstance(n.value, Drain):
        drain = n.value
        if drain.stopped and drain.state not in ENDED:
            stopped[drain.worker] = drain.id
        elif stopped.get(drain.worker) == drain.id:
            del stopped[drain.worker]


def _gist(effect: Effect) -> tuple[str, ...]:
    """What an effect does, whatever it is called: the same deed in the record and here."""
    match effect:
        case SendPage(page=page):
            return ("SendPage", page.dedup_key, page.event)
        case Repair():
            return ("Repair", effect.action.value, effect.target)
        case ScaleOut():
            return ("ScaleOut", effect.pool, effect.role.value)
    return (type(effect).__name__, getattr(effect, "worker", ""))

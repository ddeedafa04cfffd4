"""What a row of the scenario table says, and how it is tried: what happens to a simulated fleet, and what must come of it.

This module exists so that a scenario is data that a person can read and a machine can check. What always holds:

* Every row is compared exactly: all incidents that were not merged into another, all pages, all workers that sentinel took out or
  started. What a row does not name must not happen.
* Beside what it names, every row must keep what always holds: nothing healthy is stopped or repaired, no incident pages twice, no
  doubtful drain crosses a floor, and the same events decided again give the same instructions.
* A row that does not hold yet says why in ``awaits``; then it must fail, so that nobody forgets to take that away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from sentinel.decide.decider import Decider
from sentinel.decide.replay import prove
from sentinel.decide.state.events import AnyEvent, AnyInstruction, Repair, StopWorker
from sentinel.model import Component, DrainState
from sentinel.sim.fleet import SimFleet

QUIET_S = 10.0  # before anything happens
Script = Callable[[SimFleet], object]
Check = tuple[str, Callable[[SimFleet], bool]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row. ``incidents``: ``fault culprit``; ``pages``: ``urgency fault``; ``drains``: ``worker response state`` at the end."""

    name: str
    happens: str
    script: Script | tuple[Script, ...]  # what happens, one after the other
    incidents: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    drains: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()  # standbys that were started
    also: tuple[Check, ...] = ()  # what else must hold, each as a sentence
    lasts: float = 300.0  # seconds after what happens
    fleet: Callable[[], SimFleet] = field(default=SimFleet)
    awaits: str = ""


def play(case: Case) -> SimFleet:
    """The fleet after the scenario."""
    f = case.fleet()
    f.run(QUIET_S)
    for script in case.script if isinstance(case.script, tuple) else (case.script,):
        script(f)
    f.run(case.lasts)
    return f


def problems(case: Case, f: SimFleet) -> list[str]:
    """What is not as the row says, each as a sentence; empty when everything is."""
    incidents = [f"{i.fault} {i.culprit}" for i in f.told()]
    pages = [f"{p.urgency.value} {p.fault}" for p in f.pages()]
    drains = [f"{d.worker} {d.response.value} {d.state.value}" for d in f.taken()]
    starts = [d.worker for d in f.drains.values() if d.kind == "start"]
    said = [
        *_differ("incidents", case.incidents, incidents),
        *_differ("pages", case.pages, pages),
        *_differ("drains", case.drains, drains),
        *_differ("starts", case.starts, starts),
    ]
    said += [f"it does not hold that {sentence}" for sentence, holds in case.also if not holds(f)]
    return [*said, *_always(f)]


def _differ(what: str, wanted: tuple[str, ...], found: list[str]) -> Iterator[str]:
    missing, more = Counter(wanted) - Counter(found), Counter(found) - Counter(wanted)
    if missing or more:
        lacks = f"missing {', '.join(sorted(missing.elements()))}" if missing else ""
        extra = f"not wanted {', '.join(sorted(more.elements()))}" if more else ""
        yield f"{what}: {'; '.join(s for s in (lacks, extra) if s)}"


# -- what holds whatever happens ------------------------------------------------------------------------------------------------


def _always(f: SimFleet) -> Iterator[str]:
    for drain in f.wrong_drains():
        yield f"{drain.worker} was taken out though nothing is wrong with it: {drain.reason}"
    hurt = {w for fault in f.faults for w in fault.hurts}
    for stop in f.world.did(StopWorker):
        by = [d for d in f.drains.values() if d.id == stop.id.partition("/")[0]]
        if stop.worker not in hurt and all(d.by == "sentinel" and d.kind == "drain" for d in by):  # type: ignore[union-attr]
            yield f"{stop.worker} was stopped though nothing is wrong with it"  # type: ignore[union-attr]
    broken = [Component.parse(fault.where) for fault in f.faults if fault.hurts]
    for repair in f.world.did(Repair):
        target = Component.parse(repair.target)  # type: ignore[union-attr]
        if not any(target.covers(b) or b.covers(target) for b in broken):
            yield f"{repair.action.value} of {target}, which nothing is wrong with"  # type: ignore[union-attr]
    for incident_id, times in Counter(p.id.partition("/")[0] for p in f.pages()).items():
        if times > 1:
            yield f"incident {incident_id} paged {times} times"
    for drain in f.taken():
        states = [s.what for s in drain.history]
        if drain.state is DrainState.DONE and "verifying" in states and "active test passed" not in states:
            yield f"{drain.worker} returned without a passed test"
    proof = prove((_Line(event, tuple(out)) for event, out in f.world.journal), lambda: Decider(f.world.policy))
    if not proof.same or not proof.events:
        said = [f"{type(event).__name__} {event.id}" for event, _, _ in proof.differing[:3]]
        yield f"decided again, other instructions come out: {', '.join(said) or 'nothing was replayed'}"


class _Line(NamedTuple):
    event: AnyEvent
    instructions: tuple[AnyInstruction, ...]
    checkpoint: bool = False

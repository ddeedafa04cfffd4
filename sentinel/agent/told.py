"""What the controller has been told in this session, and therefore what a heartbeat has to carry.

This module exists so that a node that is as it was costs a few dozen bytes every five seconds instead of everything it knows.
What always holds:

* A heartbeat builds on a snapshot that the controller says it holds (``Ack.same``). Without one, and every ``FULL_S``, a snapshot
  goes; a controller that does not know heartbeats never says so and gets snapshots only.
* A state is carried when it was measured since it was told last and is bad, is watched by the controller, or differs from what
  was told. So whatever a snapshot would say that can change a decision, the heartbeat says; a state that nobody could measure
  again is in neither as something new.
* What was told is what a report carried that was taken at its first attempt. After a retry it cannot be known which attempt
  arrived: then what either may have carried counts as not told.

Why that is the same to the decider: of a fine state it makes something only where it keeps a condition, and those states are
what it watches; of a bad one it counts each measurement once. Both are carried with every measurement that a snapshot would
have carried. ``tests/property/test_heartbeat_property.py`` holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from sentinel.agent.known import Known
from sentinel.model import Ack, Component, Finding, Place, Report, WorkerSeen

FULL_S = 300.0

State = tuple[Component, str]


class Said(NamedTuple):
    """What a heartbeat leaves out while it has not changed."""

    workers: tuple[WorkerSeen, ...]
    probes: dict[str, bool | None]
    place: Place | None


class Told:
    """Makes the snapshots and heartbeats of one session, and hears what became of them."""

    def __init__(
        self,
        known: Known,
        *,
        probes: Callable[[], dict[str, bool | None]],
        place: Callable[[], Place | None],
        full_s: float = FULL_S,
    ) -> None:
        self._known, self._probes, self._place, self._full_s = known, probes, place, full_s
        self._states: dict[State, Finding] = {}
        self._said: Said | None = None
        self._watch: frozenset[State] = frozenset()
        self._same = 0  # the snapshot that the controller holds
        self._full_at = float("-inf")  # when it was sent
        self._sent: tuple[Report, Said] | None = None
        self._unsure = False  # an earlier attempt of the report under way may have arrived

    def report(self, blank: Report, now: float) -> Report:
        """``blank``, which names node, session and seq, as the snapshot or heartbeat that is due. ``now``: seconds, any clock."""
        self._unsure = self._sent is not None
        said = Said(self._known.workers, self._probes(), self._place())
        if not self._same or now - self._full_at >= self._full_s:
            self._full_at = now
            report = msgspec.structs.replace(
                blank, snapshot=True, same=0, findings=self._known.snapshot(blank.at), workers=said.workers, probes=said.probes,
                place=said.place,
            )  # fmt: skip
        else:
            before = self._said or Said((), {}, None)
            report = msgspec.structs.replace(
                blank, same=self._same, boot_id="", version="", findings=self._news(blank.at),
                workers=said.workers if list(map(_lasting, said.workers)) != list(map(_lasting, before.workers)) else (),
                probes=said.probes if said.probes != before.probes else {},
                place=said.place if said.place != before.place else None,
            )  # fmt: skip
        self._sent = report, said
        return report

    def heard(self, ack: Ack) -> None:
        """An answer, to any report of this session: what the controller holds now, and what it watches."""
        self._same, self._watch = 0 if ack.want_snapshot else ack.same, frozenset(ack.watch)

    def taken(self) -> None:
        """The latest report that was made here has been acknowledged."""
        if self._sent is None:
            return
        report, said = self._sent
        self._sent = None
        if report.snapshot:
            self._states.clear()
        if self._unsure:
            for finding in report.findings:
                self._states.pop((finding.component, finding.check), None)
            self._said = None
            return
        self._states.update({(f.component, f.check): f for f in report.findings})
        self._said = said

    def dropped(self) -> None:
        """It was not taken, for certain, and is not sent again."""
        self._sent = None

    def _news(self, now: float) -> tuple[Finding, ...]:
        known = {(f.component, f.check): f for f in self._known.snapshot(now)}
        for gone in self._states.keys() - known.keys():
            del self._states[gone]
        return tuple(f for state, f in known.items() if self._is_news(state, f))

    def _is_news(self, state: State, now: Finding) -> bool:
        told = self._states.get(state)
        if told is None or told.present != now.present:
            return True
        return told.at != now.at and (now.present or state in self._watch)


def _lasting(seen: WorkerSeen) -> WorkerSeen:
    """Without what is different at every look: the controller looks for itself how busy a worker is."""
    return msgspec.structs.replace(seen, running=None, waiting=None, progress=None)

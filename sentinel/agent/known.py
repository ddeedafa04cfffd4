"""What this node knows now, and what of it is news.

This module exists so that the controller hears of a change at once and of everything else with the next snapshot. What
always holds:

* Of a state, the latest finding per (component, check) is kept; it stays until it is measured again, since "not measured"
  neither clears nor raises anything.
* News is: an event not seen before or whose count has grown, a state that appears, ends, or changes its severity, action or
  suspect. The same again is not news.
* Memory is bounded: states measured as fine leave after ``forget_s`` without a new measurement, ids of events are a window.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from sentinel.model import Component, Finding, Kind, WorkerSeen

_EVENTS = 8192  # ids of events remembered, so that one found twice is queued once


class News(NamedTuple):
    """A finding to tell, and how many occurrences of it are new (of an event; a state counts once)."""

    finding: Finding
    times: int


class Known:
    """The node's latest states and workers. Pure: no I/O, time comes in with the findings."""

    def __init__(self, *, forget_s: float = 900.0, limit: int = 10_000) -> None:
        self.states: dict[tuple[Component, str], Finding] = {}
        self._owner: dict[tuple[Component, str], str] = {}
        self._events: OrderedDict[tuple[str, str], int] = OrderedDict()  # (id, severity) → count told
        self._workers: dict[str, tuple[WorkerSeen, ...]] = {}
        self._forget_s = forget_s
        self._limit = limit

    def seen(self, findings: Iterable[Finding]) -> None:
        """Remember events that an earlier run already spooled."""
        for finding in findings:
            if finding.kind is Kind.EVENT:
                self._remember(finding)

    def take(self, probe: str, findings: Iterable[Finding]) -> list[News]:
        """Take in what one reading showed; returns what of it is news, in order."""
        news = []
        for finding in findings:
            if finding.kind is Kind.EVENT:
                if times := self._remember(finding):
                    news.append(News(finding, times))
                continue
            key = (finding.component, finding.check)
            before = self.states.get(key)
            if before is None and len(self.states) >= self._limit:
                self._make_room()
            self.states[key] = finding
            self._owner[key] = probe
            if _changed(before, finding):
                news.append(News(finding, 1))
        return news

    def snapshot(self, now: float) -> tuple[Finding, ...]:
        """Every known state. One that is fine carries no more than that: it is the bulk of what a fleet sends."""
        old = [k for k, f in self.states.items() if not f.present and now - f.at > self._forget_s]
        for key in old:
            self._forget(key)
        return tuple(
            f if f.present else Finding(id=f.id, check=f.check, component=f.component, at=f.at, present=False)
            for f in self.states.values()
        )

    def take_workers(self, probe: str, seen: Any) -> None:
        """Keep a probe's list of workers. Raises ValueError when it is not one, or could not be told as JSON."""
        try:
            self._workers[probe] = msgspec.json.decode(msgspec.json.encode(seen), type=tuple[WorkerSeen, ...])
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            self.forget_workers(probe)
            raise ValueError(str(error)) from None

    def forget_workers(self, probe: str) -> None:
        """The probe could not look: what it saw earlier is not what is there now."""
        self._workers.pop(probe, None)

    def keep_only(self, probes: Iterable[str]) -> None:
        """After a reload: states of probes that no longer run are not measured any more, so they are no longer told."""
        stay = set(probes)
        for key in [k for k, owner in self._owner.items() if owner not in stay]:
            self._forget(key)
        for probe in [p for p in self._workers if p not in stay]:
            self.forget_workers(probe)

    @property
    def workers(self) -> tuple[WorkerSeen, ...]:
        return tuple(w for seen in self._workers.values() for w in seen)

    def gpus(self) -> Iterator[str]:
        """PCI addresses of every GPU that anything was found about."""
        yield from dict.fromkeys(c.gpu for c, _ in self.states if c.gpu)

    def _remember(self, finding: Finding) -> int:
        """How many occurrences of this event are new; a kernel line found again after a restart has none."""
        key = (finding.id, finding.severity.value)
        before = self._events.pop(key, 0)
        self._events[key] = max(before, finding.count)
        if len(self._events) > _EVENTS:
            self._events.popitem(last=False)
        return max(0, finding.count - before)

    def _make_room(self) -> None:
        """A check that invents components without end must not take all memory: the oldest fine state goes, else the oldest."""
        key = next((k for k, f in self.states.items() if not f.present), next(iter(self.states)))
        self._forget(key)

    def _forget(self, key: tuple[Component, str]) -> None:
        self.states.pop(key, None)
        self._owner.pop(key, None)


def _changed(before: Finding | None, now: Finding) -> bool:
    if before is None or before.present != now.present:
        return now.present or before is not None
    return now.present and (before.severity, before.action, before.suspect) != (now.severity, now.action, now.suspect)

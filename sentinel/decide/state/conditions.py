"""Conditions: findings folded over time, so that one odd sample neither raises nor clears anything.

What always holds:

* An event (a kernel line) counts once per id, however often it is sent.
* A state is raised after ``confirm`` present samples in a row and cleared after ``clear_confirm`` fine ones; a sample that
  is missing because nothing could be measured moves neither.
* A state that has come and gone ``flap_count`` times stays present until it was fine for ``flap_hold`` (flap memory), where nothing
  is drained for it: what is drained is repaired and proven, and has a memory of its own.
* A state that grows worse, so that another rule of the policy takes it, is raised anew under that rule, with its own count.
* Conditions are soft: a new leader starts with those of the open incidents only, and learns the rest from the agents' next
  snapshots. A state that was never bad has no condition.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from sentinel.decide.rules.policy import Hysteresis, Rule
from sentinel.model import Component, Finding, Kind, Response

WATCHED_S = 3600.0  # after it was last bad, a state is still heard with every heartbeat for so long, then with snapshots only
_REMEMBERED_EVENTS = 20_000  # ids of events already counted; bounded so that a storm cannot grow it


class Change(StrEnum):
    """What one finding did to its condition."""

    RAISED = "raised"
    AGAIN = "again"
    CLEARED = "cleared"
    NOTHING = "nothing"


@dataclass
class Condition:
    finding: Finding  # the latest one that was present
    present: bool = False
    rule: object = None  # the policy's rule that takes it
    raised: bool = False  # under that rule
    bad: int = 0  # present samples in a row, under that rule
    good: int = 0  # fine samples in a row
    since: float = 0.0  # when it was raised
    measured_at: float = 0.0  # latest sample, fine or not
    bad_at: float = 0.0  # latest present sample
    came: tuple[float, ...] = ()  # when it was raised, the latest ``flap_count`` times


class Conditions:
    def __init__(self, hysteresis: Hysteresis) -> None:
        self.hysteresis = hysteresis
        self._all: dict[tuple[Component, str], Condition] = {}
        self._of: dict[str, dict[tuple[Component, str], None]] = {}  # node → what was ever bad of it, in order
        self._events: OrderedDict[str, int] = OrderedDict()

    def get(self, component: Component, check: str) -> Condition | None:
        return self._all.get((component, check))

    def present(self, check: str | None = None) -> list[Condition]:
        return [c for c in self._all.values() if c.present and (check is None or c.finding.check == check)]

    def under(self, component: Component) -> list[Condition]:
        return [c for (where, _), c in self._all.items() if component.covers(where)]

    def fold(self, finding: Finding, at: float, confirm: int, clear_confirm: int, rule: object = None) -> Change:
        key = (finding.component, finding.check)
        if finding.kind is Kind.EVENT and finding.present:
            return self._fold_event(key, finding, at)
        condition = self._all.get(key)
        if not finding.present:
            if condition is None:
                return Change.NOTHING  # never was bad: millions of fine states are not worth remembering
            condition.good += 1
            condition.bad = 0
            condition.measured_at = at
            needed = 1 if finding.kind is Kind.EVENT else clear_confirm  # an event that says "recovered" says it once
            if condition.present and condition.good >= needed and not self._flaps(condition, at):
                condition.present = condition.raised = False
                return Change.CLEARED
            return Change.NOTHING
        if condition is None:
            condition = self._keep(key, Condition(finding))
        condition.finding = finding
        if condition.present and condition.rule is None:  # restored: an earlier leader has raised it
            condition.rule, condition.raised = rule, True
        if rule != condition.rule:
            condition.rule, condition.raised, condition.bad = rule, False, 0
        condition.bad += 1
        condition.good = 0
        condition.measured_at = condition.bad_at = at
        if condition.raised:
            return Change.AGAIN
        if condition.bad >= confirm:
            if not condition.present:
                condition.since = at
                condition.came = (*condition.came, at)[-self.hysteresis.flap_count :]
            condition.present = condition.raised = True
            return Change.RAISED
        return Change.NOTHING

    def rules_changed(self, rule_for: Callable[[Finding], object | None], alike: Callable[[object, object], bool]) -> None:
        """Other rules are in force: what is treated ``alike`` keeps its count, the rest is raised anew under its new rule."""
        for condition in self._all.values():
            if condition.rule is not None:
                now = rule_for(condition.finding)
                if now is not None and alike(condition.rule, now):
                    condition.rule = now

    def _fold_event(self, key: tuple[Component, str], finding: Finding, at: float) -> Change:
        counted = self._events.get(finding.id)
        if counted is not None and finding.count <= counted:
            return Change.NOTHING
        self._events[finding.id] = finding.count
        if len(self._events) > _REMEMBERED_EVENTS:
            self._events.popitem(last=False)
        known = self._all.get(key)
        since = known.since if known and known.present else at
        self._keep(key, Condition(finding, present=True, bad=1, since=since, measured_at=at, bad_at=at))
        if counted is not None:
            return Change.AGAIN
        return Change.AGAIN if known and known.present else Change.RAISED

    def restore(self, finding: Finding, opened_at: float | None, at: float, rule: object) -> None:
        """What an earlier leader acted on, by this ``rule``: an event is counted already, a state of an incident that is open
        since ``opened_at`` stands until it is measured fine, and is raised anew when it grows worse."""
        if finding.kind is Kind.EVENT:
            self._events[finding.id] = finding.count
        elif opened_at is not None:
            key = (finding.component, finding.check)
            since = max(opened_at, min(finding.at, at))  # the node's clock may be off by hours
            self._keep(key, Condition(finding, present=True, rule=rule, raised=rule is not None, since=since, bad_at=at))

    def watch(self, node: str, now: float) -> dict[tuple[Component, str], bool]:
        """The node's states of which a fine sample counts for something, and whether it is needed soon: while the state is bad,
        is being confirmed, or may be asked whether it is clean since a repair."""
        found = ((key, self._all[key]) for key in self._of.get(node, ()))
        return {key: c.present or c.bad > 0 or now - c.bad_at < WATCHED_S for key, c in found}

    def _keep(self, key: tuple[Component, str], condition: Condition) -> Condition:
        self._all[key] = condition
        self._of.setdefault(key[0].node, {})[key] = None
        return condition

    def _flaps(self, condition: Condition, at: float) -> bool:
        """Whether it has come and gone so often lately that being fine for a moment says nothing."""
        memory, rule = self.hysteresis, condition.rule
        if condition.finding.kind is Kind.EVENT or not isinstance(rule, Rule) or rule.response in (Response.DRAIN, Response.EVICT):
            return False
        often = len(condition.came) >= memory.flap_count and at - condition.came[0] <= memory.flap_window
        return often and at - condition.bad_at < memory.flap_hold

    def anew(self, component: Component, check: str = "") -> None:
        """What (of this check) is still so there counts from its next sample as if it had just been found; it has not flapped."""
        for condition in self.under(component):
            if condition.finding.kind is Kind.STATE and check in ("", condition.finding.check):
                condition.raised, condition.bad = False, 0

    def quiet_since(self, finding: Finding) -> float:
        """Since when a finding of an incident has been measured fine, or has not happened again; inf: it stands."""
        condition = self._all.get((finding.component, finding.check))
        if condition is None:
            return finding.at if finding.kind is Kind.EVENT else float("inf")
        return float("inf") if condition.present and finding.kind is Kind.STATE else condition.bad_at

    def end(self, component: Component, check: str) -> None:
        """An event is over: repaired and verified, or aged away."""
        condition = self._all.get((component, check))
        if condition:
            condition.present = False
            condition.good = 1

    def clean_since(self, component: Component, check: str, kind: Kind, at: float) -> bool:
        """Whether it has been proven fine after ``at``: a state by a fine sample, an event by not happening again."""
        condition = self._all.get((component, check))
        if kind is Kind.EVENT:
            return condition is None or not condition.present or condition.measured_at <= at
        return condition is not None and not condition.present and condition.bad == 0 and condition.measured_at >= at

    def stands(self, finding: Finding) -> bool:
        """Whether a finding of an open incident is still so: an event is until its incident ends, a state while measured bad."""
        condition = self._all.get((finding.component, finding.check))
        return finding.kind is Kind.EVENT or (condition is not None and condition.present)

"""One check turning many nodes bad within minutes is one thing: a rollout, a bug of the monitor, a cut network.

What always holds: while a check is systemic, no budgeted drain rests on it and nobody is paged for its single nodes; the
incidents of those nodes are merged into one whose culprit is the fleet. It ends when the check is no longer present, or when no
node has turned bad for a whole window and fewer are left than make one: two nodes that wait for a part must not hide the next
fault for a week. Those that are left are judged one by one again.

One cause may show as several checks. Two checks that have turned bad on the same two nodes within a window count together, node by
node: each is systemic when the nodes of both make one, or when the other is already, and then nobody is called a second time; nor
is anybody for what is systemic on the workers of a pool whose panic has called already. One node that shows both is no reason: a
rollout over the whole fleet must not hide an engine that freezes by itself meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

from sentinel.decide.faults.incidents import Incidents
from sentinel.decide.rules.policy import Rule
from sentinel.decide.state.mode import quiet
from sentinel.decide.state.picture import Picture
from sentinel.decide.state.relayed import PANIC
from sentinel.model import Component, Finding, Incident, Kind, Response, Severity, Step, Urgency

_TOGETHER = 2  # nodes that show both make two checks one cause (judgement: one is chance)
_PART = "part of a cause"  # step: it was not called for, since another of the same cause was
_TURNED = ("found", "also found")  # steps: a node has turned bad


class Systemic:
    def __init__(self, picture: Picture, incidents: Incidents) -> None:
        self.p = picture
        self.incidents = incidents
        self._turned: dict[str, dict[str, float]] = {}  # check → node → when it turned bad
        self._folded: dict[str, dict[Component, float]] = {}  # frozen check → what its incident was told of → since when that is so

    def incident_of(self, check: str) -> Incident | None:
        key = f"systemic/{check}"
        return next((i for i in self.p.incidents_on("fleet") if i.key == key and i.closed_at is None), None)

    def frozen(self, check: str) -> bool:
        return self.incident_of(check) is not None

    def rests(self, incident: Incident, rule: Rule, frozen: frozenset[str]) -> bool:
        """Whether what this rule would do because of the incident rests on one of the frozen checks, by itself or as an echo."""
        said = (f for f in incident.findings if f.check in frozen)
        return rule.budgeted and any((r := self.p.rules.rule_for(f)) is not None and r.fault == rule.fault for f in said)

    def checks(self) -> frozenset[str]:
        """All that are frozen."""
        return frozenset(check for i in self.p.open_incidents() if (check := systemic_check(i)))

    def turned(self, rule: Rule, finding: Finding, among: int = 0, *, echo: Incident | None = None) -> Incident | None:
        """A check was raised on a node. Returns the systemic incident when that made, or keeps, it one.

        ``among``: of how many NVLink domains (or leaf switches), where it is about these and not about nodes. ``echo``: the open
        incident of the same fault class that has said so by another check; it counts under that one.
        """
        if rule.response is Response.NONE and not rule.page:
            return None  # a crash that spreads over many trays is on record, not an emergency
        known = self.incident_of(finding.check)
        if known and not self._news(finding):
            return known
        nodes = self._turned.setdefault(finding.check, {})
        nodes.pop(finding.component.node, None)  # the latest stands last, so that what is too old stands first
        nodes[finding.component.node] = self.p.now
        # What arrived before a person ended it may be judged after that, since news go first: it counts itself.
        since = min(self.p.now, max(self.p.now - self.p.policy.systemic.window, self._over_at(finding.check)))
        while nodes[first := next(iter(nodes))] < since:
            del nodes[first]
        if known:
            return self.incidents.fold(known, finding)
        if echo is not None:
            return next((s for f in echo.findings if (s := self.incident_of(f.check)) is not None), None)
        expected = max(among or len(self.p.nodes), 1)
        together = {} if among else self._together(finding.check)
        cause = next((i for check in together if (i := self.incident_of(check)) is not None), None)
        seen = set(nodes).union(*together.values()) if cause is None else set(nodes)
        if cause is None and len(seen) < self._many(expected):
            return None
        cause = cause or self._panic_of(finding)
        beside = f" (with {', '.join(together)})" if together else ""
        return self._open(rule, finding, f"{len(seen)} of {expected} {'domains' if among else 'nodes'}{beside}", cause)

    def _panic_of(self, finding: Finding) -> Incident | None:
        """The panic of this worker's pool, which is the same cause as the gateways see it."""
        worker = self.p.workers.get(finding.component.worker or "")
        found = (i for i in self.p.open_incidents() if worker is not None and i.culprit == worker.pool)
        return next((i for i in found if any(f.check == PANIC for f in i.findings)), None)

    def _over_at(self, check: str) -> float:
        """When this check was last said to be over, by a person too: what had turned bad until then counts no more."""
        key = f"systemic/{check}"
        return max((i.closed_at for i in self.p.incidents_on("fleet") if i.key == key and i.closed_at is not None), default=0.0)

    def _together(self, check: str) -> dict[str, set[str]]:
        """The other checks that have turned bad on the same nodes lately → all nodes of each. What a pattern says joins nothing."""
        mine, since = set(self._turned[check]), self.p.now - self.p.policy.systemic.window
        found: dict[str, set[str]] = {}
        for other, turned in self._turned.items():
            if other == check or other.startswith("rack.") or check.startswith("rack."):
                continue
            theirs = {node for node, at in turned.items() if at >= since}
            both = len(mine & theirs)
            if both >= _TOGETHER and 2 * both >= min(len(mine), len(theirs)):
                found[other] = theirs
        return found

    def _news(self, finding: Finding) -> bool:
        """Whether this has turned bad since its incident was told of it: a node that goes on being bad is written down once."""
        condition = self.p.conditions.get(finding.component, finding.check)
        since, folded = condition.since if condition is not None else 0.0, self._folded.setdefault(finding.check, {})
        news = folded.get(finding.component) != since
        folded[finding.component] = since
        return news

    def _open(self, rule: Rule, finding: Finding, many: str, cause: Incident | None) -> Incident:
        """``cause``: the systemic incident of another check that this one is part of, if any."""
        at, by = self.p.now, self.p.cause
        summary = f"{finding.check} on {many} within {self.p.policy.systemic.window / 60:g} min"
        steps = [
            Step(at=at, what="found", why=f"{summary}: one cause, not so many faults", cause=by, rule="systemic"),
            Step(at=at, what="frozen", why=_frozen(rule, finding.check), cause=by),
        ]
        called = cause is not None and self._calls(cause, rule)
        if cause is not None and called:
            check = systemic_check(cause)
            why = f"{check} came to the same nodes" if check else f"{cause.fault} of {cause.culprit}"
            steps.append(Step(at=at, what=_PART, why=f"{cause.id}: {why}", cause=by))
        incident = Incident(
            id=self.p.new_id("inc"),
            key=f"systemic/{finding.check}",
            fault=rule.fault,
            culprit="fleet",
            opened_at=self.p.now,
            severity=Severity.WARNING,
            summary=summary,
            findings=(finding,),
            history=tuple(steps),
        )
        incident = self.p.put_incident(incident)
        for other in self.p.open_incidents():
            if other.id != incident.id and other.findings and all(f.check == finding.check for f in other.findings):
                drains = self.incidents.drains_of(other)
                # A fact is acted on one by one, and stays on record for whoever cannot be drained (a standby) or is held in.
                if not drains and (rule.budgeted or not self.incidents.demands(other)):
                    self.incidents.close(other, f"part of {incident.id}: {summary}", merged_into=incident.id)
        if cause is None or not called:
            return self._call(incident, rule)
        cause = self.incidents.note(cause, "also seen as", f"{finding.check}: {incident.id}")
        if cause.paged in ("triggered", "acknowledged"):
            self.incidents.update(cause, Urgency(_rule_page(self.p.rules.rule_for(cause.findings[0]))), f"also seen as {summary}")
        return incident

    def _call(self, incident: Incident, rule: Rule) -> Incident:
        check = systemic_check(incident)
        ask = f"one cause for all of them: stop the rollout or mend the monitor; {_frozen(rule, check)}"
        return self.incidents.page(incident, _rule_page(rule), ask, rule=rule)

    def _calls(self, cause: Incident, rule: Rule) -> bool:
        """Whether somebody is called for ``cause``, and as urgently as this rule would."""
        other = self.p.rules.rule_for(cause.findings[0]) if cause.findings else None
        loudness = list(Urgency).index
        return not quiet(self.p, cause, other) and loudness(Urgency(_rule_page(other))) <= loudness(Urgency(_rule_page(rule)))

    def call(self, incident: Incident) -> None:
        """On ticks: call for it where the mode forbade that until now, or the call for its cause is over."""
        part = next((s.why.partition(":")[0] for s in incident.history if s.what == _PART), "")
        cause = self.p.incidents.get(part)
        rule = self.p.rules.rule_for(incident.findings[0]) if incident.findings else None
        if not incident.paged and rule is not None and (cause is None or cause.closed_at is not None):
            self._call(incident, rule)

    def _many(self, expected: int) -> float:
        rules = self.p.policy.systemic
        return max(rules.min_nodes, rules.share * expected)

    def over(self, incident: Incident) -> str:
        """Why it has ended; "" while it has not."""
        check, window = systemic_check(incident), self.p.policy.systemic.window
        if any(f.check == PANIC and self._there(f) for f in incident.findings):
            return ""  # the gateways still send to all of the pool: as long as that is so it is the same emergency
        alone = self._alone(check)
        # An event says once that it is there and never that it is over: without an incident of its own it ages away.
        left = [
            c for c in self.p.conditions.present(check)
            if c.finding.kind is Kind.STATE or c.finding.component in alone or self.p.now - c.measured_at <= window
        ]  # fmt: skip
        if not left:
            return f"{check} is no longer reported anywhere"
        few = len({c.finding.component.node for c in left})
        quiet = self.p.now - max(incident.opened_at, *(s.at for s in incident.history if s.what in _TURNED))
        if check.startswith("rack.") or few >= self._many(len(self.p.nodes)) or quiet <= window:
            return ""
        left_on = f"{check} is left on {few} of {len(self.p.nodes)} nodes and has come to no other for {quiet / 60:.0f} min"
        return f"{left_on}: each is judged by itself again"

    def end(self, incident: Incident, why: str) -> None:
        """What is still so on a node, and has no incident of its own, counts as if it had just been found."""
        check = systemic_check(incident)
        alone = self._alone(check)
        self.incidents.close(incident, why)
        self._turned.pop(check, None)
        self._folded.pop(check, None)
        for condition in self.p.conditions.present(check):
            if condition.finding.component not in alone:
                self.p.conditions.anew(condition.finding.component, check)

    def _alone(self, check: str) -> set[Component]:
        """What has an incident of its own."""
        return {f.component for i in self.p.open_incidents() if not systemic_check(i) for f in i.findings if f.check == check}

    def covers(self) -> Callable[[Incident], bool]:
        """Whether a systemic incident has already been paged for one like this: one cause, one page.

        One that is over has been for what is over as well; what is still there is somebody's.
        """
        spans = [
            (systemic_check(i), i.opened_at - self.p.policy.systemic.window, i.closed_at)
            for i in self.p.incidents.values()
            if systemic_check(i) and not i.merged_into
        ]
        return lambda incident: any(
            since <= incident.opened_at <= (self.p.now if until is None else until)
            and any(f.check == check and (until is None or not self._there(f)) for f in incident.findings)
            for check, since, until in spans
        )

    def explained(self, check: str, nodes: set[str]) -> bool:
        """Whether all the nodes that turned bad are among these, which something else explains."""
        turned = self._turned.get(check)
        return bool(turned) and set(turned or ()) <= nodes

    def discount(self, check: str, nodes: set[str]) -> None:
        """Something else explains why this check is bad on these nodes."""
        turned = self._turned.get(check, {})
        for node in nodes & turned.keys():
            del turned[node]

    def _there(self, finding: Finding) -> bool:
        condition = self.p.conditions.get(finding.component, finding.check)
        return condition is not None and condition.present


def _rule_page(rule: Rule | None) -> str:
    return (rule.page if rule is not None else "") or Urgency.WARNING.value


def _frozen(rule: Rule, check: str) -> str:
    """What is held back while a check is systemic, and what is done all the same."""
    if rule.response is Response.NONE:
        return f"nobody is drained for {check} at any time, nor called for single nodes until it ends"
    if rule.budgeted:
        facts = "facts (a GPU that is gone, a process that is not there) still leave"
        return f"nobody is taken out on {check} alone until it ends; {facts}"
    return f"{check} is a fact: whoever shows it still leaves service at once; only the calls for single nodes are held back"


def systemic_check(incident: Incident) -> str:
    """The check a systemic incident is about; "" for any other incident."""
    return incident.key.removeprefix("systemic/") if incident.culprit == "fleet" and incident.key.startswith("systemic/") else ""

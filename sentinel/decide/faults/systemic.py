"""One check turning many nodes bad within minutes is one thing: a rollout, a bug of the monitor, a cut network.

What always holds: while a check is systemic, no budgeted drain rests on it and nobody is paged for its single nodes; the
incidents of those nodes are merged into one whose culprit is the fleet. It ends when the check is no longer present, or when no
node has turned bad for a whole window and fewer are left than make one: two nodes that wait for a part must not hide the next
fault for a week. Those that are left are judged one by one again.
"""

from __future__ import annotations

from collections.abc import Callable

from sentinel.decide.faults.incidents import Incidents
from sentinel.decide.rules.policy import Rule
from sentinel.decide.state.picture import Picture
from sentinel.model import Component, Finding, Incident, Kind, Response, Severity, Step

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
        if echo is not None and not self.frozen(finding.check):
            return next((s for f in echo.findings if (s := self.incident_of(f.check)) is not None), None)
        nodes = self._turned.setdefault(finding.check, {})
        nodes.pop(finding.component.node, None)  # the latest stands last, so that what is too old stands first
        nodes[finding.component.node] = self.p.now
        while self.p.now - nodes[first := next(iter(nodes))] > self.p.policy.systemic.window:
            del nodes[first]
        known = self.incident_of(finding.check)
        if known:
            return self.incidents.fold(known, finding) if self._news(finding) else known
        expected = max(among or len(self.p.nodes), 1)
        if len(nodes) < self._many(expected):
            return None
        return self._open(rule, finding, f"{len(nodes)} of {expected} {'domains' if among else 'nodes'}")

    def _news(self, finding: Finding) -> bool:
        """Whether this has turned bad since its incident was told of it: a node that goes on being bad is written down once."""
        condition = self.p.conditions.get(finding.component, finding.check)
        since, folded = condition.since if condition is not None else 0.0, self._folded.setdefault(finding.check, {})
        news = folded.get(finding.component) != since
        folded[finding.component] = since
        return news

    def _open(self, rule: Rule, finding: Finding, many: str) -> Incident:
        at, cause = self.p.now, self.p.cause
        summary = f"{finding.check} on {many} within {self.p.policy.systemic.window / 60:g} min"
        incident = Incident(
            id=self.p.new_id("inc"),
            key=f"systemic/{finding.check}",
            fault=rule.fault,
            culprit="fleet",
            opened_at=self.p.now,
            severity=Severity.WARNING,
            summary=summary,
            findings=(finding,),
            history=(
                Step(at=at, what="found", why=f"{summary}: one cause, not so many faults", cause=cause, rule="systemic"),
                Step(at=at, what="frozen", why=f"no automatic drain on {finding.check} until it ends", cause=cause),
            ),
        )
        incident = self.p.put_incident(incident)
        for other in self.p.open_incidents():
            if other.id != incident.id and other.findings and all(f.check == finding.check for f in other.findings):
                drains = self.incidents.drains_of(other)
                # A fact is acted on one by one, and stays on record for whoever cannot be drained (a standby) or is held in.
                if not drains and (rule.budgeted or not self.incidents.demands(other)):
                    self.incidents.close(other, f"part of {incident.id}: {summary}", merged_into=incident.id)
        ask = "one cause for all of them: stop the rollout or mend the monitor"
        return self.incidents.page(incident, rule.page or "warning", ask, rule=rule)

    def _many(self, expected: int) -> float:
        rules = self.p.policy.systemic
        return max(rules.min_nodes, rules.share * expected)

    def over(self, incident: Incident) -> str:
        """Why it has ended; "" while it has not."""
        check, window = systemic_check(incident), self.p.policy.systemic.window
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


def systemic_check(incident: Incident) -> str:
    """The check a systemic incident is about; "" for any other incident."""
    return incident.key.removeprefix("systemic/") if incident.culprit == "fleet" and incident.key.startswith("systemic/") else ""

"""One check turning many nodes bad within minutes is one thing: a rollout, a bug of the monitor, a cut network.

What always holds: while a check is systemic, no budgeted drain rests on it and nobody is paged for its single nodes; the
incidents of those nodes are merged into one whose culprit is the fleet; it ends when the check is no longer present.
"""

from __future__ import annotations

from sentinel.decide.incidents import Incidents
from sentinel.decide.picture import Picture
from sentinel.decide.policy import Rule
from sentinel.model import Finding, Incident, Response, Severity, Step


class Systemic:
    def __init__(self, picture: Picture, incidents: Incidents) -> None:
        self.p = picture
        self.incidents = incidents
        self._turned: dict[str, dict[str, float]] = {}  # check → node → when it turned bad

    def incident_of(self, check: str) -> Incident | None:
        key = f"systemic/{check}"
        return next((i for i in self.p.open_incidents() if i.key == key), None)

    def frozen(self, check: str) -> bool:
        return self.incident_of(check) is not None

    def turned(self, rule: Rule, finding: Finding) -> Incident | None:
        """A check was raised on a node. Returns the systemic incident when that made, or keeps, it one."""
        if rule.response is Response.NONE and not rule.page:
            return None  # a crash that spreads over many trays is on record, not an emergency
        nodes = self._turned.setdefault(finding.check, {})
        nodes[finding.component.node] = self.p.now
        for node in [n for n, at in nodes.items() if self.p.now - at > self.p.policy.systemic.window]:
            del nodes[node]
        known = self.incident_of(finding.check)
        if known:
            return self.incidents.fold(known, finding)
        rules = self.p.policy.systemic
        expected = max(len(self.p.nodes), 1)
        if len(nodes) < max(rules.min_nodes, rules.share * expected):
            return None
        return self._open(rule, finding, sorted(nodes), expected)

    def _open(self, rule: Rule, finding: Finding, nodes: list[str], expected: int) -> Incident:
        at, cause = self.p.now, self.p.cause
        summary = f"{finding.check} on {len(nodes)} of {expected} nodes within {self.p.policy.systemic.window / 60:g} min"
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
                Step(at=at, what="found", why=f"{summary}: one cause, not {len(nodes)} faults", cause=cause, rule="systemic"),
                Step(at=at, what="frozen", why=f"no automatic drain on {finding.check} until it ends", cause=cause),
            ),
        )
        incident = self.p.put_incident(incident)
        for other in self.p.open_incidents():
            if other.id != incident.id and other.findings and all(f.check == finding.check for f in other.findings):
                drains = self.incidents.drains_of(other)
                if not drains:
                    self.incidents.close(other, f"part of {incident.id}: {summary}", merged_into=incident.id)
        ask = "one cause for all of them: stop the rollout or mend the monitor"
        return self.incidents.page(incident, rule.page or "warning", ask)

    def over(self, incident: Incident) -> bool:
        """Whether none of its nodes reports the check any more."""
        check = incident.key.removeprefix("systemic/")
        return not self.p.conditions.present(check)

    def forget(self, check: str) -> None:
        self._turned.pop(check, None)


def systemic_check(incident: Incident) -> str:
    """The check a systemic incident is about; "" for any other incident."""
    return incident.key.removeprefix("systemic/") if incident.culprit == "fleet" else ""

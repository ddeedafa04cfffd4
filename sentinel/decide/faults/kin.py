"""One thing said in several ways: a state that grows worse and meets another rule, a silence that becomes a verdict, an engine that
stops because its GPU is gone.

This module exists so that one fault stays one incident while it is told of ever more clearly. What always holds:

* What says more takes over what said less about the same part; the page of that goes on under its key, as an update.
* What says less, or is the consequence, joins what says more; what is done about it is still its own rule's.
* Only the same component is kin, or an engine and the GPU under it that nothing runs on any more.
"""

from __future__ import annotations

from collections.abc import Iterator

from sentinel.decide.faults.culprit import culprit_of, is_pattern
from sentinel.decide.faults.incidents import Incidents
from sentinel.decide.faults.revise import merge
from sentinel.decide.faults.systemic import systemic_check
from sentinel.decide.rules.policy import Rule
from sentinel.decide.state.moves import rank
from sentinel.model import Finding, Incident, Kind, Response, Urgency

_FAMILIES = (
    ("agent.silent", "node.unreachable", "node.down"),
    ("worker.stalled", "gateway.failing", "worker.frozen", "worker.dead", "worker.unreachable"),
)  # fmt: skip
_LOUDNESS = ["", *reversed([u.value for u in Urgency])]


class Kin:
    def __init__(self, incidents: Incidents) -> None:
        self.p, self.incidents = incidents.p, incidents

    def told(self, rule: Rule, finding: Finding) -> Incident | None:
        """The open incident that says as much as this finding or more about the same thing."""
        mine = _weight(rule)
        for incident in self._about(finding):
            rules = (self.p.rules.rule_for(f) for f in incident.findings if _akin(f, finding))
            if any(r is not None and _weight(r) >= mine for r in rules):
                return incident
        return next(self._under(finding), None)

    def take_over(self, rule: Rule, finding: Finding) -> None:
        """A new incident about this finding says more than those that are now part of it."""
        into = self.incidents.open_as(rule, finding)
        if into is None:
            return
        mine = _weight(rule)
        for part in [i for i in self._about(finding) if i.id != into.id]:
            rules = [self.p.rules.rule_for(f) for f in part.findings if _akin(f, finding)]
            if len(rules) == len(part.findings) and all(r is not None and _weight(r) < mine for r in rules):
                merge(self.incidents, part, into)
        if finding.component.gpu is not None and rule.response is Response.EVICT:
            for worker in into.victims:
                for part in [i for i in self.p.incidents_on(worker) if i.closed_at is None and i.culprit == worker]:
                    if all(f.component.worker == worker for f in part.findings):
                        merge(self.incidents, part, into)

    def _about(self, finding: Finding) -> Iterator[Incident]:
        there = self.p.incidents_on(culprit_of(finding))
        return (i for i in there if i.closed_at is None and i.findings and not is_pattern(i) and not systemic_check(i))

    def _under(self, finding: Finding) -> Iterator[Incident]:
        """What has taken away a GPU under the engine that this is about."""
        worker = self.p.workers.get(finding.component.worker or "")
        for node in dict.fromkeys((*worker.nodes, *(g.node for g in self.p.gpus_of(worker)))) if worker is not None else ():
            for i in self.p.incidents_on(node):
                gone = i.closed_at is None and worker is not None and worker.name in i.victims and not is_pattern(i)
                if gone and any(f.component.gpu and r.response is Response.EVICT for f, r in self.incidents.demands(i)):
                    yield i


def _akin(one: Finding, other: Finding) -> bool:
    if one.component != other.component or Kind.EVENT in (one.kind, other.kind):
        return False
    return one.check == other.check or any(one.check in family and other.check in family for family in _FAMILIES)


def _weight(rule: Rule) -> tuple[int, int]:
    return rank(rule.response), _LOUDNESS.index(rule.page)

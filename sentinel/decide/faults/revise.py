"""An incident that turns out to be something else, and two that turn out to be one.

What always holds: a revised incident keeps its id, and its page keeps the dedup key under which it went out, so that nobody is
notified again: a receiver takes a further trigger with a known key as an update. Only a changed fault class or culprit is worth
an update, and its urgency never falls. Of two paged incidents the one that goes on keeps its page and the other's is resolved; of
one that is paged and one that is not, the page goes over.
"""

from __future__ import annotations

import msgspec

from sentinel.decide.faults.culprit import culprit_of, is_pattern
from sentinel.decide.faults.incidents import Incidents
from sentinel.decide.rules.policy import Rule
from sentinel.decide.state.picture import ENDED
from sentinel.model import Finding, Incident, Urgency

_FINDINGS = 20  # kept, as of any incident


def revise(
    incidents: Incidents, incident: Incident | None, rule: Rule, finding: Finding, *,
    members: tuple[Finding, ...], victims: tuple[str, ...], scope: tuple[str, ...], confidence: float, keep: bool,
) -> Incident:  # fmt: skip
    """Make an incident, or a new one (None), be about what ``finding`` says. ``members``: findings that are its evidence.

    ``keep``: it is about its own fault already, and only who else shows it, and how sure that is, has changed.
    """
    p = incidents.p
    if incident is None:
        incident = incidents.open(rule, finding)
    elif keep:
        new = [n for n in scope if n not in incident.scope]
        incident = msgspec.structs.replace(incident, scope=scope, confidence=confidence)
        if new:
            return incidents.note(incident, "seen by others", f"{len(new)} more: {', '.join(new[:5])}")
        return incident if incident == p.incidents[incident.id] else p.put_incident(incident)
    before, culprit = incident, culprit_of(finding)
    same = (before.fault, before.culprit) == (rule.fault, culprit)
    told = before.findings[0].summary == finding.summary if same and before.findings else False
    if told and (before.scope, before.confidence, before.victims) == (scope, confidence, victims) and len(before.findings) > 1:
        return before
    known = {f.id for f in (finding, *members)}
    others = before.findings[1:] if is_pattern(before) else before.findings
    incident = msgspec.structs.replace(
        before,
        key=f"{rule.fault}/{culprit}",
        fault=rule.fault,
        culprit=culprit,
        summary=finding.summary,
        severity=finding.severity if not same else max(before.severity, finding.severity, key=lambda s: s.rank),
        findings=(finding, *members, *(f for f in others if f.id not in known))[:_FINDINGS],
        victims=victims,
        scope=scope,
        confidence=confidence,
        page_key=before.page_key or (before.key if before.paged and not same else ""),
    )
    if same:
        return p.put_incident(incident) if told else incidents.note(incident, "revised", finding.summary, rule=rule.fault)
    incidents.unask(before)
    incident = incidents.note(incident, "revised", f"was {before.fault} on {before.culprit}: {finding.summary}", rule=rule.fault)
    if incident.paged in ("triggered", "acknowledged"):
        incidents.update(incident, _loudest(incidents, before, incident))
    return incident


def _loudest(incidents: Incidents, *told: Incident) -> Urgency:
    """The most urgent of what the rules for these ask."""
    rules = [incidents.p.rules.rule_for(i.findings[0]) for i in told if i.findings]
    return min((Urgency(r.page) for r in rules if r is not None and r.page), key=list(Urgency).index, default=Urgency.WARNING)


def merge(incidents: Incidents, part: Incident, into: Incident) -> Incident:
    """Two are one: ``part`` ends, and its drains and what it has open elsewhere go over."""
    p = incidents.p
    into = p.incidents[into.id]
    if part.paged in ("triggered", "acknowledged") and not into.paged:
        into = p.put_incident(msgspec.structs.replace(into, paged=part.paged, page_key=part.page_key or part.key))
        part = msgspec.structs.replace(part, paged="")  # its page goes on as that one's
        incidents.note(into, "paged", f"with the page of {part.id}")
        if into.fault != part.fault or into.culprit != part.culprit:
            incidents.update(p.incidents[into.id], _loudest(incidents, part, into))
    for drain in incidents.drains_of(part):
        if drain.state not in ENDED:
            p.put_drain(msgspec.structs.replace(drain, incident=into.id))
    incidents.unask(part)
    return incidents.close(part, f"part of {into.id}: {into.fault} on {into.culprit}", merged_into=into.id)

"""Incidents: one fault, one culprit, one page.

What always holds:

* An incident's key is (fault class, culprit); as long as one with that key is open, findings fold into it.
* A finding about something that is already being handled (the same GPU, a worker already on its way out) is an echo: it
  joins that incident, and only a stronger fault class changes what is done.
* A page is triggered at most once per incident and resolved exactly when the incident ends, with the same dedup key.
* An incident ends when its drains have ended and everything it was made of is proven fine; never by mere silence.
"""

from __future__ import annotations

import msgspec

from sentinel.decide.events import SendPage
from sentinel.decide.picture import ENDED, Picture, with_step
from sentinel.decide.policy import Rule
from sentinel.model import Action, Component, Drain, Finding, Incident, Kind, Page, Response, Step, Urgency

_FINDINGS = 20  # kept per incident: the first five and the latest


def culprit_of(finding: Finding) -> str:
    """Whom a finding accuses: the GPU and not its link, the worker and not its node, else the node."""
    c = finding.component
    if c.worker is not None:
        return c.worker
    if c.gpu is not None:
        return str(Component(node=c.node, device=c.device))
    return c.node


class Incidents:
    def __init__(self, picture: Picture) -> None:
        self.p = picture

    # -- opening and folding ----------------------------------------------------------------------------------------

    def find(self, rule: Rule, finding: Finding) -> Incident | None:
        """The open incident that this finding belongs to, or None."""
        culprit = culprit_of(finding)
        handled = None
        for incident in self.p.open_incidents():
            if incident.key == f"{rule.fault}/{culprit}":
                return incident
            if incident.culprit == culprit and finding.component.gpu and self.drains_of(incident):
                handled = incident  # the same GPU is being dealt with: an echo, or worse news
        if handled is None and finding.component.worker:
            drain = self.p.open_drain(finding.component.worker)
            handled = self.p.incidents.get(drain.incident) if drain else None
        return handled if handled and handled.closed_at is None else None

    def open(self, rule: Rule, finding: Finding) -> Incident:
        culprit = culprit_of(finding)
        incident = Incident(
            id=self.p.new_id("inc"),
            key=f"{rule.fault}/{culprit}",
            fault=rule.fault,
            culprit=culprit,
            opened_at=self.p.now,
            severity=finding.severity,
            summary=finding.summary or f"{finding.check} on {finding.component}",
            victims=tuple(w.name for w in self.p.touching(finding.component)),
            findings=(finding,),
        )
        what = "found" if rule.response is not Response.NONE else "on record"
        return self.note(incident, what, f"{finding.check} on {finding.component}: {incident.summary}", rule=rule.fault)

    def fold(self, incident: Incident, finding: Finding) -> Incident:
        """Add a finding; the same occurrence (same id) replaces itself, so that a repeated report changes nothing."""
        known = {f.id: f for f in incident.findings}
        same = known.get(finding.id)
        if same is not None and same.count == finding.count:
            return incident
        state = next((f for f in incident.findings if _place(f) == _place(finding) and f.kind is Kind.STATE), None)
        if same is not None or state is not None:
            old = same or state
            findings = tuple(finding if f is old else f for f in incident.findings)
            return self.p.put_incident(msgspec.structs.replace(incident, findings=findings))
        findings = (*incident.findings, finding)
        if len(findings) > _FINDINGS:
            findings = (*findings[:5], *findings[-(_FINDINGS - 5) :])
        severity = max(incident.severity, finding.severity, key=lambda s: s.rank)
        incident = msgspec.structs.replace(incident, findings=findings, severity=severity)
        return self.note(incident, "also found", f"{finding.check} on {finding.component}: {finding.summary}")

    def note(self, incident: Incident, what: str, why: str, rule: str = "") -> Incident:
        return self.p.put_incident(with_step(incident, Step(at=self.p.now, what=what, why=why, cause=self.p.cause, rule=rule)))

    # -- paging -----------------------------------------------------------------------------------------------------

    def page(self, incident: Incident, urgency: str, ask: str = "") -> Incident:
        """Trigger the page once. ``ask`` says what a person must do when sentinel itself is at its end."""
        if incident.paged or not urgency:
            return incident
        summary = f"{incident.fault}: {incident.summary}" + (f" ({ask})" if ask else "")
        self._send(incident, "trigger", Urgency(urgency), summary, ask)
        incident = msgspec.structs.replace(incident, paged="triggered")
        return self.note(incident, "paged", ask or f"{urgency}: a person should know")

    def acknowledge(self, incident: Incident, by: str) -> Incident:
        if incident.paged != "triggered":
            return incident
        self._send(incident, "acknowledge", Urgency.INFO, f"{incident.fault}: acknowledged by {by}", "")
        return self.note(msgspec.structs.replace(incident, paged="acknowledged"), "acknowledged", f"by {by}")

    def _send(self, incident: Incident, event: str, urgency: Urgency, summary: str, ask: str) -> None:
        actions = dict.fromkeys(f.action.value for f in incident.findings if f.action.rank > Action.WAIT.rank)
        page = Page(
            id=f"{incident.id}/{event}",
            dedup_key=incident.key,
            event=event,  # type: ignore[arg-type]
            at=self.p.now,
            urgency=urgency,
            summary=summary,
            source=incident.culprit.partition("/")[0],
            component=incident.culprit,
            fault=incident.fault,
            details={
                "incident": incident.id,
                "victims": list(incident.victims),
                "evidence": [line for f in incident.findings[:5] for line in f.evidence[:3]],
                "first_thing_to_do": ask or ", ".join(actions) or "read the runbook",
                "explain": f"sentinel explain {incident.id}",
            },
        )
        self.p.effect(SendPage(id=f"page/{page.id}", cause=self.p.cause, lane=f"page:{incident.key}", why=summary, page=page))

    # -- ending -----------------------------------------------------------------------------------------------------

    def drains_of(self, incident: Incident) -> list[Drain]:
        return [d for d in self.p.drains.values() if d.incident == incident.id]

    def close(self, incident: Incident, why: str, merged_into: str = "") -> Incident:
        if incident.closed_at is not None:
            return incident
        incident = msgspec.structs.replace(incident, closed_at=self.p.now, merged_into=merged_into)
        if incident.paged in ("triggered", "acknowledged"):
            self._send(incident, "resolve", Urgency.INFO, f"{incident.fault}: over: {why}", "")
            incident = msgspec.structs.replace(incident, paged="resolved")
        for finding in incident.findings:
            if finding.kind is Kind.EVENT:
                self.p.conditions.end(finding.component, finding.check)
        return self.note(incident, "merged" if merged_into else "closed", why)

    def over(self, incident: Incident, close_after: float) -> str:
        """Why this incident has ended; "" while it has not."""
        drains = self.drains_of(incident)
        if any(d.state not in ENDED for d in drains):
            return ""
        returned = [d for d in drains if d.state in ENDED]
        for f in incident.findings:
            if f.kind is Kind.EVENT:
                last = self.p.conditions.get(f.component, f.check)
                age = self.p.now - max(incident.opened_at, last.measured_at if last and last.present else 0.0)
                if not returned and age < close_after:
                    return ""
            elif not self.p.conditions.clean_since(f.component, f.check, f.kind, incident.opened_at):
                return ""
        return "repaired, verified and back" if returned else "no longer reported"


def _place(finding: Finding) -> tuple[Component, str, Kind]:
    return (finding.component, finding.check, finding.kind)

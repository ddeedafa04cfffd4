"""Incidents: one fault, one culprit, one page.

What always holds:

* An incident's key is (fault class, culprit); as long as one with that key is open, findings fold into it.
* A finding about something that is already being handled (the same GPU, a worker already on its way out) is an echo: it
  joins that incident, and only a stronger fault class changes what is done.
* A page is triggered at most once per incident and resolved exactly when the incident ends, with the same dedup key.
* An incident ends when its drains have ended and everything it was made of is proven fine; never by mere silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from sentinel.decide.faults.called import called_with
from sentinel.decide.faults.culprit import culprit_of, is_pattern
from sentinel.decide.rules.policy import Rule
from sentinel.decide.state import past
from sentinel.decide.state.events import SendPage
from sentinel.decide.state.mode import quiet
from sentinel.decide.state.moves import GENTLE
from sentinel.decide.state.picture import ENDED, Picture, with_step
from sentinel.decide.state.planned import known_to
from sentinel.model import Action, Component, Drain, Finding, Incident, Kind, Page, Response, Step, Urgency

_FINDINGS = 20  # kept per incident: the first five and the latest
_LOUDER = list(Urgency).index
GIVEN_BACK = "given back"  # step of a drain: it was called off, and what asked for it still does


class Incidents:
    def __init__(self, picture: Picture) -> None:
        self.p = picture
        self.settling: Callable[[Incident], bool] = lambda incident: False  # its page waits: others may tell of the same
        self._asked: dict[str, tuple[str, str, Finding | None, str, Rule | None]] = {}  # incident → the page that waits
        self._settled: dict[str, float] = {}  # key → when a person resolved it

    # -- opening and folding ----------------------------------------------------------------------------------------

    def find(self, rule: Rule, finding: Finding) -> Incident | None:
        """The open incident that this finding belongs to, or None."""
        culprit = culprit_of(finding)
        handled = None
        for incident in self.p.incidents_on(culprit):
            if incident.closed_at is not None:
                continue
            if incident.key == f"{rule.fault}/{culprit}":
                return incident
            if finding.check in past.CHECKS:
                continue  # what the last day says is news beside whatever is being done about today
            if incident.culprit == culprit and finding.component.gpu and (is_pattern(incident) or self.drains_of(incident)):
                handled = incident  # the same GPU is being dealt with: an echo, or worse news
        if handled is None and finding.component.worker:
            drain = self.p.open_drain(finding.component.worker)
            handled = self.p.incidents.get(drain.incident) if drain else None
        return handled if handled and handled.closed_at is None else None

    def open_as(self, rule: Rule, finding: Finding) -> Incident | None:
        """The open incident of exactly this fault class and culprit."""
        culprit = culprit_of(finding)
        there = self.p.incidents_on(culprit)
        return next((i for i in there if i.closed_at is None and i.key == f"{rule.fault}/{culprit}"), None)

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

    def would(self, incident: Incident, deed: str, why: str, rule: str = "") -> Incident:
        """Write down, once, what the mode forbids."""
        if any(s.what == "would have" and s.why.startswith(f"{deed}: ") for s in incident.history):
            return incident
        return self.note(incident, "would have", f"{deed}: {why}", rule)

    # -- paging -----------------------------------------------------------------------------------------------------

    def page(
        self,
        incident: Incident,
        urgency: str,
        ask: str = "",
        *,
        found: Finding | None = None,
        fault: str = "",
        rule: Rule | None = None,
    ) -> Incident:
        """Trigger the page once. ``ask`` says what a person must do when sentinel itself is at its end.

        ``found`` and ``fault``: what makes it worth a page, where that joined an incident that was not. ``rule``: who asks for
        it; None: whatever the incident is made of.
        """
        if incident.paged or not urgency or known_to(self.p, incident.culprit) or called_with(self.p, incident):
            return incident
        if self.settling(incident):
            waits = self._asked.get(incident.id)
            if waits is None or _LOUDER(Urgency(urgency)) < _LOUDER(Urgency(waits[0])) or (ask and not waits[1]):
                self._asked[incident.id] = (urgency, ask, found, fault, rule)
            return incident
        if quiet(self.p, incident, rule):
            return self.would(incident, "page somebody", f"{urgency}{': ' if ask else ''}{ask}", fault)
        fault = fault or incident.fault
        summary = f"{fault}: {found.summary if found and found.summary else incident.summary}" + (f" ({ask})" if ask else "")
        other = self.p.paged_as(incident.key)
        if other is not None and other.id != incident.id:  # its key rings for another already: that one's end is not this one's
            incident = msgspec.structs.replace(incident, page_key=f"{incident.key}/{incident.id}")
        self._send(incident, "trigger", Urgency(urgency), summary, ask, fault=fault)
        incident = msgspec.structs.replace(incident, paged="triggered")
        return self.note(incident, "paged", ask or f"{urgency}: a person should know")

    def page_settled(self, covers: Callable[[], Callable[[Incident], bool]]) -> None:
        """On ticks: send what has waited long enough for others to tell of the same. ``covers``: who is called for already."""
        covered = covers() if self._asked else lambda incident: False
        for incident_id, waits in list(self._asked.items()):
            incident = self.p.incidents.get(incident_id)
            if incident is None or incident.closed_at is not None:
                del self._asked[incident_id]
            elif not self.settling(incident):
                del self._asked[incident_id]
                urgency, ask, found, fault, rule = waits
                if not covered(incident) and any(map(self.p.conditions.stands, incident.findings)):
                    self.page(incident, urgency, ask, found=found, fault=fault, rule=rule)

    def unask(self, incident: Incident) -> None:
        """It has turned out to be something else: what waited to be asked about it is asked no more."""
        self._asked.pop(incident.id, None)

    def update(self, incident: Incident, urgency: Urgency, ask: str = "") -> None:
        """Tell the open page, without a new notification, what it has turned out to be about, or what a person must do now."""
        summary = f"{incident.fault}: {incident.summary}" + (f" ({ask})" if ask else "")
        self._send(incident, f"update/{self.p.new_id('u')}", urgency, summary, ask)

    def acknowledge(self, incident: Incident, by: str) -> Incident:
        if incident.paged != "triggered":
            return incident
        self._send(incident, "acknowledge", Urgency.INFO, f"{incident.fault}: acknowledged by {by}", "")
        return self.note(msgspec.structs.replace(incident, paged="acknowledged"), "acknowledged", f"by {by}")

    def _send(self, incident: Incident, event: str, urgency: Urgency, summary: str, ask: str, *, fault: str = "") -> None:
        actions = dict.fromkeys(f.action.value for f in incident.findings if f.action.rank > Action.WAIT.rank)
        page = Page(
            id=f"{incident.id}/{event}",
            dedup_key=incident.page_key or incident.key,
            event="trigger" if event.startswith("update/") else event,  # type: ignore[arg-type]
            at=self.p.now,
            urgency=urgency,
            summary=summary,
            source=incident.culprit.partition("/")[0],
            component=incident.culprit,
            fault=fault or incident.fault,
            details={
                "incident": incident.id,
                "victims": list(incident.victims),
                **({"update": True} if event.startswith("update/") else {}),
                **({"confidence": incident.confidence} if incident.confidence < 1.0 else {}),
                **({"also_seen_by": list(incident.scope[:20])} if incident.scope else {}),
                "evidence": [line for f in incident.findings[:5] for line in f.evidence[:3]],
                "first_thing_to_do": ask or ", ".join(actions) or "read the runbook",
                "explain": f"sentinel explain {incident.id}",
            },
        )
        self.p.effect(SendPage(id=f"page/{page.id}", cause=self.p.cause, lane=f"page:{page.dedup_key}", why=summary, page=page))

    # -- ending -----------------------------------------------------------------------------------------------------

    def drains_of(self, incident: Incident) -> list[Drain]:
        return [d for d in self.p.drains.values() if d.incident == incident.id]

    def demands(self, incident: Incident, *, eases: bool = True) -> list[tuple[Finding, Rule]]:
        """Its findings that would take a worker out of service, or (``eases``) only ease it, each with the rule that says so."""
        speak = incident.findings[:1] if is_pattern(incident) else incident.findings
        ruled = ((f, self.p.rules.rule_for(f)) for f in speak)
        no = (Response.NONE,) if eases else (Response.NONE, *GENTLE)
        return [(f, r) for f, r in ruled if r is not None and r.response not in no]

    def to_clear(self, incident: Incident) -> tuple[Finding, ...]:
        """What of it must be proven fine before a worker that left because of it returns: nothing, where another is to blame."""
        return () if is_pattern(incident) and not self.demands(incident) else incident.findings

    def about(self, worker: str, *, eases: bool = False) -> list[Incident]:
        """Open incidents about something that would take this worker out of service, or (``eases``) only ease it."""
        mine = [(i, self.demands(i, eases=eases)) for i in self.p.open_incidents() if worker in i.victims]
        # What is found where it no longer runs says nothing about it.
        return [i for i, asking in mine if any(self.p.may_run(worker, f.component.node) for f, _ in asking)]

    def answering(self, incident: Incident, among: Mapping[str, Sequence[Drain]] | None = None) -> list[Drain]:
        """The drains that answer for it: its own, and those that already had its victims out for another reason.

        ``among``: all drains by incident and by worker (``by_place``), where many incidents are asked about.
        """
        among = by_place(self.p.drains.values()) if among is None else among
        own = [d for d in among.get(incident.id, ()) if not _called_off(d)]
        if not self.demands(incident):
            return own
        others = (d for name in incident.victims for d in among.get(f"worker:{name}", ()) if not _called_off(d))
        return own + [
            d for d in others
            if d.incident != incident.id and d.kind == "drain" and (d.state not in ENDED or d.since >= incident.opened_at)
        ]  # fmt: skip

    def settle(self, incident: Incident) -> None:
        """A person says that it is over: the same state, still reported, is no news for a while."""
        self._settled[incident.key] = self.p.now

    def settled_as(self, incident: Incident) -> bool:
        """Whether a person has said that this one is over, not long ago."""
        rule = self.p.rules.rule_for(incident.findings[0]) if incident.findings else None
        return rule is not None and self.p.now - self._settled.get(incident.key, float("-inf")) < rule.close_after

    def settled(self, rule: Rule, finding: Finding) -> bool:
        told = (self._settled.get(key) for key in (f"{rule.fault}/{culprit_of(finding)}", f"systemic/{finding.check}"))
        return any(at is not None and self.p.now - at < rule.close_after for at in told)

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

    def over(self, incident: Incident, close_after: float, drains: Sequence[Drain], *, kept: bool = False) -> str:
        """Why this incident has ended; "" while it has not. ``kept``: something would still be taken out because of it."""
        if any(d.state not in ENDED for d in drains):
            return ""
        returned = not kept and any(d.verified for d in drains)
        for f in incident.findings:
            if f.kind is Kind.EVENT:
                last = self.p.conditions.get(f.component, f.check)
                age = self.p.now - max(incident.opened_at, last.measured_at if last and last.present else 0.0)
                if not returned and age < close_after:
                    return ""
            elif not self.p.conditions.clean_since(f.component, f.check, f.kind, incident.opened_at):
                return ""
        return "repaired, verified and back" if returned else "no longer reported"


def _called_off(drain: Drain) -> bool:
    """Whether it ended without having taken anybody out, since facts left the pool too little."""
    return drain.state in ENDED and not drain.verified and any(s.what == GIVEN_BACK for s in drain.history[-5:])


def by_place(drains: Iterable[Drain]) -> dict[str, list[Drain]]:
    """Drains by their incident's id and by ``worker:NAME``."""
    found: dict[str, list[Drain]] = {}
    for d in drains:
        found.setdefault(d.incident, []).append(d)
        found.setdefault(f"worker:{d.worker}", []).append(d)
    return found


def _place(finding: Finding) -> tuple[Component, str, Kind]:
    return (finding.component, finding.check, finding.kind)

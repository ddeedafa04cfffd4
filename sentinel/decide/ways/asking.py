"""sentinel is at its end with a drain: the worker stays where it is, and a person is asked.

This module exists because whoever was called for the fault was told of the fault, not that its repair has failed since. What always
holds: a person is asked in the incident that took the worker out, or in one of its own where that is over; a page that rings
already is told once for each time, under its own key and never less urgently, and calls nobody a second time.
"""

from __future__ import annotations

import msgspec

from sentinel.decide.faults.called import NEEDS_A_PERSON
from sentinel.decide.faults.incidents import Incidents
from sentinel.decide.state.mode import quiet
from sentinel.decide.state.picture import Picture
from sentinel.decide.state.planned import known_to
from sentinel.model import Drain, Incident, Urgency


def ask_person(p: Picture, incidents: Incidents, drain: Drain, sentence: str) -> None:
    """Say it in the history, and to whoever is on call."""
    incident = p.incidents.get(drain.incident)
    if incident is None or incident.closed_at is not None:
        incident = Incident(
            id=p.new_id("inc"),
            key=f"repair-failed/{drain.worker}",
            fault="repair-failed",
            culprit=drain.worker,
            opened_at=p.now,
            summary=sentence,
            victims=(drain.worker,),
        )
        p.put_drain(msgspec.structs.replace(p.drains[drain.id], incident=incident.id))
    incident = incidents.note(incident, NEEDS_A_PERSON, sentence)
    ask = f"repair-failed: {sentence}"
    if incident.paged not in ("triggered", "acknowledged"):
        incidents.page(incident, Urgency.ERROR.value, ask)
    elif not known_to(p, incident.culprit) and not quiet(p, incident, None):
        incidents.update(incident, _urgency(p, incident), ask)


def _urgency(p: Picture, incident: Incident) -> Urgency:
    """At least an error; more where a rule for what it is made of says so."""
    rules = [p.rules.rule_for(f) for f in incident.findings]
    asked = [Urgency.ERROR, *(Urgency(r.page) for r in rules if r is not None and r.page)]
    return min(asked, key=list(Urgency).index)

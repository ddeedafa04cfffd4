"""What stood while the mode forbade to call, when calling is allowed again: one call for all of it.

This module exists so that whoever ends ``observe`` in the afternoon is not rung twenty times for what has been so for days.
What always holds:

* More than ``FEW`` open incidents that would have called or acted, and now may, are one incident (``standing-faults``) with one
  page, as loud as the loudest of them; each of them is written down as called with it. A few call by themselves.
* Such an incident is acted on as ever. It does not call for what it was, nor for a budget that holds it back; it does
  for whatever is found on it since, and when sentinel is at its end with it.
* Which incidents were called with it stands in their own histories, so that a new leader, with or without another policy, goes on.
* It ends when the last of them has; nobody can be drained for it.
"""

from __future__ import annotations

from collections import Counter

from sentinel.decide.faults.called import CALLED, called_with
from sentinel.decide.faults.incidents import Incidents
from sentinel.decide.state.mode import quiet
from sentinel.decide.state.picture import Picture
from sentinel.decide.state.planned import known_to
from sentinel.model import Incident, Severity, Urgency

FEW = 3  # as many pages at once a person reads one by one (judgement)
FAULT = "standing-faults"


def is_standing(incident: Incident) -> bool:
    return incident.fault == FAULT and incident.culprit == "fleet"


class Standing:
    def __init__(self, picture: Picture, incidents: Incidents) -> None:
        self.p, self.incidents = picture, incidents

    def look(self) -> None:
        """The rules, or the leader, have just changed: call once for all that nobody was called for."""
        many = [i for i in self.p.open_incidents() if self._waits(i)]
        if len(many) <= FEW:
            return
        kinds = ", ".join(f"{n} {fault}" for fault, n in Counter(i.fault for i in many).most_common())
        incident = Incident(
            id=(name := self.p.new_id("inc")),
            key=f"{FAULT}/{name}",
            fault=FAULT,
            culprit="fleet",
            opened_at=self.p.now,
            severity=max((i.severity for i in many), key=lambda s: s.rank, default=Severity.WARNING),
            summary=f"{len(many)} faults stand that nobody was called for while the mode forbade it: {kinds}",
        )
        incident = self.incidents.note(incident, "found", incident.summary, rule="mode")
        for each in many:
            self.incidents.unask(each)
            self.incidents.note(each, CALLED, f"{incident.id}: one page for {len(many)} faults that stood already")
        ask = "sentinel incidents --open; each of them is acted on within the budgets from now on"
        self.incidents.page(incident, self._loudest(many), ask)

    def over(self, incident: Incident) -> str:
        """Why it has ended; "" while one that was called with it is open."""
        mine = f"{incident.id}:"
        left = (i for i in self.p.open_incidents() for s in i.history if s.what == CALLED and s.why.startswith(mine))
        return "" if next(left, None) is not None else "all of them are over"

    def _waits(self, incident: Incident) -> bool:
        """Whether the mode alone has kept it from calling, and does so no more."""
        would = not incident.paged and any(s.what == "would have" for s in incident.history)
        if not would or is_standing(incident) or called_with(self.p, incident) or known_to(self.p, incident.culprit):
            return False
        rules = [self.p.rules.rule_for(f) for f in incident.findings]
        worth = any(r is not None and r.page for r in rules) or bool(self.incidents.demands(incident))
        return worth and not quiet(self.p, incident, None)

    def _loudest(self, many: list[Incident]) -> str:
        """As urgent as the most urgent of them; at least an error where a budget may hold one back."""
        rules = [r for i in many for f in i.findings if (r := self.p.rules.rule_for(f)) is not None]
        asked = [Urgency(r.page) for r in rules if r.page] + [Urgency.ERROR for i in many if self.incidents.demands(i)]
        return min(asked, key=list(Urgency).index, default=Urgency.WARNING).value

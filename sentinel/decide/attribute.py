"""From a pattern's answer to incidents: one open incident for each culprit, revised, merged, and what was done in error undone.

This module exists so that what an explanation changes stands apart from how it is found. What always holds:

* An explanation takes over the oldest incident that it explains as a whole, one that was paged before the others; that one keeps
  its id and its page. The others are merged into it, their drains with them.
* An incident that has anything of its own beside what is explained stays; only its signs are counted elsewhere.
* A drain made on a victim's own word is called off while it can be, and leads back without a repair while it is on its way; what
  has something of its own against it, or is being repaired already, goes on, and the incident says so.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from sentinel.decide.faults import blame
from sentinel.decide.faults.blame import Blame
from sentinel.decide.faults.culprit import culprit_of, is_pattern
from sentinel.decide.faults.revise import merge, revise
from sentinel.decide.faults.signs import Key, Signs
from sentinel.decide.faults.systemic import Systemic, systemic_check
from sentinel.decide.rules.policy import Rule
from sentinel.decide.state.picture import ENDED
from sentinel.decide.ways.drain import Drains
from sentinel.decide.ways.waiting import Waiting
from sentinel.model import Action, DrainState, Finding, Incident, Response, Worker

_SCOPE_MOST = 256  # names kept in an incident; its summary tells how many there are
_MEMBERS_MOST = 19  # findings of signs kept in an incident beside the pattern's own
_ON_ITS_WAY_BACK = (DrainState.STARTING, DrainState.VERIFYING, DrainState.RETURNING)


class Attribution:
    def __init__(self, signs: Signs, drains: Drains, *, waiting: Waiting, systemic: Systemic) -> None:
        self.p, self.signs, self.incidents, self.drains = signs.p, signs, drains.incidents, drains
        self.waiting, self.systemic = waiting, systemic
        self.respond: Callable[[Incident, Rule, Finding], None] = lambda incident, rule, finding: None

    def explain(self, found: Blame) -> Incident | None:
        """Make one explanation so. Returns its incident; None when there is none to revise and none to open."""
        rule = self.p.rules.rule_for(found.finding)
        if rule is None:
            return None
        pattern = found.finding.check.startswith("rack.")
        into = self.incidents.open_as(rule, found.finding) if pattern else self.incidents.find(rule, found.finding)
        if into is not None and is_pattern(into) and not pattern:
            into = None  # the culprit's own fault outranks what its links told of it
        parts = self._parts(found, into)
        if into is None and not parts and (not pattern or self.incidents.settled(rule, found.finding)):
            return None  # the decider opens a fault of its own; what a person has ended is not opened again
        steady = into is not None and not parts and {s.incident for s in found.members} == {into.id}
        takes_over = into is None
        if into is None and parts:
            into = min(parts, key=lambda i: (not i.paged, i.opened_at, i.id))
            parts.remove(into)
            if rule.response is Response.NONE:
                self.waiting.forget(into)
        lost = {s.incident for s in found.members if s.incident and (into is None or s.incident != into.id)}
        into = revise(
            self.incidents,
            into,
            rule,
            found.finding,
            members=tuple(s.finding for s in found.members[:_MEMBERS_MOST]) if pattern else (),
            victims=self._victims(found, rule),
            scope=self._scope(found, into),
            confidence=found.confidence,
            keep=not pattern and not takes_over,
        )
        for part in parts:
            merge(self.incidents, part, into)
        for s in found.members:
            s.incident, s.guessed = into.id, False
        for incident_id in sorted(lost):
            self._shrink(incident_id)
        if pattern:
            for check in dict.fromkeys(s.finding.check for s in found.members):
                self.systemic.discount(check, {s.node for s in found.members if s.finding.check == check})
            self.p.conditions.fold(found.finding, self.p.now, 1, self.p.policy.timing.clear_confirm, rule)
            if rule.response is not Response.NONE:
                if takes_over:
                    self.respond(into, rule, found.finding)
            elif not steady:
                self._give_back(into)
        return self.p.incidents[into.id]

    # -- which incidents --------------------------------------------------------------------------------------------

    def _parts(self, found: Blame, into: Incident | None) -> list[Incident]:
        """The other open incidents that this explains as a whole."""
        there: dict[str, Incident] = {}
        for s in found.members:
            for incident in (self.signs.explained(s) or self.incidents.find(s.rule, s.finding), self._systemic(s.finding)):
                if incident is not None and (into is None or incident.id != into.id):
                    there[incident.id] = incident
        keys, nodes = {s.key for s in found.members}, {s.node for s in found.members}
        return [i for i in there.values() if self._wholly(i, keys, nodes)]

    def _systemic(self, finding: Finding) -> Incident | None:
        return self.systemic.incident_of(finding.check)

    def _wholly(self, incident: Incident, keys: set[Key], nodes: set[str]) -> bool:
        check = systemic_check(incident)
        if check:
            return self.systemic.explained(check, nodes)
        if is_pattern(incident):
            mine = (s for s in self.signs.field(str(incident.findings[0].facts.get("field", ""))) if s.incident == incident.id)
            return all(s.key in keys for s in mine if self.signs.lives(s))
        return all((f.component, f.check) in keys for f in incident.findings)

    # -- what it says -----------------------------------------------------------------------------------------------

    def _scope(self, found: Blame, into: Incident | None) -> tuple[str, ...]:
        """Who shows it and is not to blame: GPUs where it is about links, else nodes."""
        by_gpu = found.finding.check in (blame.SWITCH, blame.CARTRIDGE)
        culprit = culprit_of(found.finding)
        mine = {s.place if by_gpu else s.node for s in found.members if culprit not in (s.place, s.node)}
        known = set(into.scope) if into is not None and into.culprit == culprit else set()
        return tuple(sorted(mine | known)[:_SCOPE_MOST])

    def _shrink(self, incident_id: str) -> None:
        """It has lost signs to another explanation: whoever showed only those is in its scope no more."""
        incident = self.p.incidents.get(incident_id)
        if incident is None or incident.closed_at is not None or not incident.scope:
            return
        mine = {n for s in self.signs if s.incident == incident_id for n in (s.node, s.place)}
        scope = tuple(n for n in incident.scope if n in mine)
        if scope != incident.scope:
            self.p.put_incident(msgspec.structs.replace(incident, scope=scope, confidence=incident.confidence if scope else 1.0))

    def _victims(self, found: Blame, rule: Rule) -> tuple[str, ...]:
        """The workers it takes capacity from: where somebody is drained for it, those on the culprit; else those that show it."""
        on_culprit = rule.response is not Response.NONE or found.finding.check == blame.IMEX
        where = [found.finding.component] if on_culprit else [s.finding.component for s in found.members]
        workers: dict[str, Worker] = {w.name: w for c in where for w in self.p.touching(c)}
        return tuple(sorted(workers))

    def count(self, incident: Incident) -> None:
        """A pattern has lasted long enough to be one: many of its kind at once have one cause, and page once."""
        found = incident.findings[0]
        rule = self.p.rules.rule_for(found)
        if rule is not None:
            self.systemic.turned(rule, found, among=self._units(found.check))

    def _units(self, check: str) -> int:
        """How many of what it is about the fleet has; 0: it is about nodes."""
        domains = sum(1 for _ in self.p.topology.domains())
        leaves = len(list(self.p.topology.leaves()))
        return {blame.SWITCH: domains, blame.PEER: domains, blame.LEAF: leaves or domains}.get(check, 0)

    # -- undoing ----------------------------------------------------------------------------------------------------

    def _give_back(self, incident: Incident) -> None:
        """Its culprit is somewhere else: nobody stays out for it who can still be brought back."""
        for drain in self.incidents.drains_of(incident):
            if drain.state in ENDED or drain.kind != "drain" or drain.by != "sentinel":
                continue
            incident, worker = self.p.incidents[incident.id], drain.worker
            own = [i for i in self.incidents.about(worker) if i.id != incident.id]
            if own:
                self.p.put_drain(msgspec.structs.replace(drain, incident=own[0].id))
                self.incidents.note(incident, "not given back", f"{worker}: {own[0].fault} on {own[0].culprit} stands against it")
            elif drain.state is DrainState.REPAIRING:
                self.incidents.note(incident, "not given back", f"{worker}: {drain.repair.value} is under way; it returns after it")
            elif drain.state not in _ON_ITS_WAY_BACK:
                why = f"{incident.culprit} is to blame, and nothing of its own stands against {worker}"
                self.incidents.note(incident, "given back", f"{worker}: {why}")
                drain_back = msgspec.structs.replace(drain, repair=Action.NONE, target="", returns=True)
                self.drains.give_up(self.p.put_drain(drain_back), why)

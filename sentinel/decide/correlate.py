"""Correlation: the smallest explanation of what was reported in a window, kept up as more arrives.

This module exists so that one fault in a rack is one incident with the right culprit, in whatever order its signs arrive. What
always holds:

* A sign is judged alone until a pattern (``patterns``, ``cover``) explains it; then it joins that one's incident: no drain and no
  page of its own. The page of what may be part of a pattern waits ``correlation.settle``, and so does the drain for a lone link;
  no other acting is delayed.
* The same signs in any order end in the same open incidents: each look starts from all signs that are fresh or still explained.
* An incident is revised and keeps its id and its page (``attribute``). Of two that turn out to be one, one stays.
* An explanation that no longer holds is given up after ``correlation.window``, and what is left of it is judged alone; with no
  sign left it ends like any other incident.
* Signs are soft. A leader who takes over knows them from its open incidents, and hears the states again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from sentinel.decide.attribute import Attribution
from sentinel.decide.faults import blame, patterns
from sentinel.decide.faults.culprit import culprit_of, is_pattern
from sentinel.decide.faults.signs import APPLICATIONS, Sign, Signs, Sort, domain_of, field_of, links_of, sort_of
from sentinel.decide.rules.policy import Rule
from sentinel.decide.state.conditions import Change
from sentinel.model import Finding, Incident, Kind

_LOOK_AGAIN = 10.0  # seconds between looks at an explanation about which nothing new was heard


class Correlation:
    def __init__(self, signs: Signs, attribution: Attribution) -> None:
        self.p, self.signs, self.incidents, self.attribution = signs.p, signs, attribution.incidents, attribution
        self.incidents.settling = self._settling
        self._patterns: dict[str, dict[str, None]] = {}  # field → its open incidents that are a pattern's
        self._held: dict[str, float] = {}  # such an incident → when a look last confirmed it
        self._counted: set[str] = set()  # such incidents that have lasted, and were told to the systemic guard
        self._looked: dict[str, float] = {}  # field → last look
        self._news: dict[str, None] = {}  # fields with something new since

    # -- the seam ---------------------------------------------------------------------------------------------------

    def take(self, rule: Rule, finding: Finding, change: Change) -> Incident | None:
        """The incident that explains a finding which was raised, or came again; None: it is judged alone."""
        again = change is Change.AGAIN and finding.kind is Kind.STATE
        sign = self.signs.get(finding)
        if sign is not None and sort_of(finding) is not sign.sort:  # it accuses somebody else now
            self.signs.drop(sign)
            sign = None
        if sign is None:
            sign = None if again else self.signs.read(rule, finding)
            if sign is None:
                return None
        before = self.p.incidents.get(sign.incident)
        if before is not None and before.closed_at is not None:
            if again and self._ended_by_hand(sign):
                return before  # a person said that it is over
            sign.incident, again = "", False  # what explained it is over, and it is not: news
        sign.finding, sign.rule = finding, rule
        if not again:
            sign.at = self.p.now
            if sign.incident or (not sign.alone and self._covered(sign)):
                self._news[sign.field] = None
            elif sign.sort is Sort.APP:  # a fleet's applications are many: here those beside it, all of them on the tick
                self._look(sign.field, self.signs.beside(sign))
                self._news[sign.field] = None
            else:
                self._look(sign.field)
        # A fault of its own is the decider's: it opens an incident, or finds the one that has just been revised into it.
        return None if sign.sort is Sort.OWN else self.signs.explained(sign)

    def accuses(self, incident: Incident, finding: Finding) -> bool:
        """Whether the finding is the culprit's own: then it is acted on."""
        return incident.closed_at is None and incident.culprit == culprit_of(finding)

    def tick(self) -> Iterator[tuple[Rule, Finding]]:
        """Look again where something is new, give up what no longer holds. Yields what is to be judged alone again."""
        for sign in self.signs:
            if sign.field.startswith("node:"):
                field = field_of(self.p, sign.finding, sign.sort)
                if field and field != sign.field:  # its node has said by now where it stands
                    self.signs.move(sign, field)
                    self._news[field] = None
        waited = {f for f in self._patterns if self.p.now - self._looked.get(f, 0.0) >= _LOOK_AGAIN}
        for field in sorted({*self._news, *waited}):
            self._look(field)
        alone: list[Sign] = []
        for sign in self.signs:
            if sign.guessed:
                sign.incident, sign.guessed, sign.alone = "", False, True
                alone.append(sign)
            elif self.signs.explained(sign) is None and not self.signs.fresh(sign) and not self._ended_by_hand(sign):
                self.signs.drop(sign)
        for incident_id in list(self._held):
            alone += self._tend(incident_id)
        for sign in alone:
            yield sign.rule, sign.finding

    def restore(self) -> None:
        """Go on with the patterns that an earlier leader had found."""
        for incident in self.p.open_incidents():
            if is_pattern(incident):
                field = str(incident.findings[0].facts.get("field", ""))
                self._keep(incident, field)
                self._counted.add(incident.id)
                for finding in incident.findings[1:]:
                    rule = self.p.rules.rule_for(finding)
                    sign = self.signs.read(rule, finding, field=field) if rule is not None else None
                    if sign is not None:
                        sign.at, sign.incident = min(self.p.now, finding.at), incident.id

    def _ended_by_hand(self, sign: Sign) -> bool:
        """Whether a person has said that what explained it is over, not long ago."""
        before = self.p.incidents.get(sign.incident)
        return before is not None and before.closed_at is not None and self.incidents.settled_as(before)

    def _settling(self, incident: Incident) -> bool:
        """Whether its page waits for others to tell of the same: it may turn out to be part of something."""
        if self.p.now - incident.opened_at >= self.p.policy.correlation.settle or not incident.findings:
            return False
        return is_pattern(incident) or any(sort_of(f) not in (None, Sort.OWN) for f in incident.findings)

    # -- looking ----------------------------------------------------------------------------------------------------

    def _look(self, field: str, among: Sequence[Sign] = ()) -> None:
        """From all signs of a field that live, or those named, to the incidents that explain them."""
        self._news.pop(field, None)
        self._looked[field] = self.p.now
        signs = [s for s in among or self.signs.field(field) if self.signs.lives(s)]
        kind = field.partition(":")[0]
        if kind in ("leaf", "rail"):
            found = patterns.rails(self.p, field, signs)
        elif kind == APPLICATIONS:
            found = patterns.applications(self.p, field, signs, self._culprits)
        else:
            found = patterns.of_domain(self.p, field, signs)
        for each in found:
            incident = self.attribution.explain(each)
            if incident is None and not each.finding.check.startswith("rack."):
                self._news[field] = None  # the decider is about to open it
            elif incident is not None and is_pattern(incident):
                self._keep(incident, field)
        if kind != APPLICATIONS and any(s.sort is Sort.OWN for s in signs) and self.signs.field(APPLICATIONS):
            self._look(APPLICATIONS)  # who tore their channels down may be known now

    def _culprits(self, domain: str) -> list[Sign]:
        fresh = [s for s in self.signs.field(f"domain:{domain}") if self.signs.fresh(s)]
        own = [s for s in patterns.own_faults(self.p, fresh) if s.finding.check != "node.unreachable"]
        return own or patterns.lone_link(fresh)

    def _covered(self, sign: Sign) -> bool:
        """Whether an open explanation covers a new sign: then it joins at once, to be confirmed with the others on a tick."""
        for incident in self.p.incidents_on(sign.node):  # somebody's fault that this node has seen before
            if incident.closed_at is None and sign.node in incident.scope and not is_pattern(incident) and sign.sort is Sort.PEER:
                sign.incident = incident.id
                return True
        for incident_id in self._patterns.get(sign.field, ()):
            pattern = self.p.incidents.get(incident_id)
            held = self.p.now - self._held.get(incident_id, 0.0) <= self.p.policy.correlation.window
            if pattern is not None and pattern.closed_at is None and held and self._covers(pattern.findings[0], sign):
                sign.incident, sign.guessed = incident_id, True
                return True
        return False

    def _covers(self, found: Finding, sign: Sign) -> bool:
        down = links_of(sign.finding)
        match found.check:
            case blame.SWITCH:
                asics = found.facts.get("asics", ())
                return sign.sort is Sort.LINK and all(self.p.topology.asic(sign.node, n) in asics for n in down)
            case blame.CARTRIDGE:
                its = found.facts.get("links", ())
                return sign.sort is Sort.LINK and sign.node == found.component.node and all(n in its for n in down)
            case blame.PEER:
                return sign.sort is Sort.PEER
            case blame.LEAF:
                return sign.sort is Sort.RAIL
            case blame.APP:
                return not found.component.device and bool(domain_of(self.p, sign.node))
        return False

    # -- keeping up -------------------------------------------------------------------------------------------------

    def _keep(self, incident: Incident, field: str) -> None:
        self._patterns.setdefault(field, {})[incident.id] = None
        self._held[incident.id] = self.p.now

    def _tend(self, incident_id: str) -> list[Sign]:
        """End what has no sign left, give up what no longer holds; returns the signs that nobody explains any more."""
        incident = self.p.incidents.get(incident_id)
        if incident is None or incident.closed_at is not None or not is_pattern(incident):
            self._forget(incident_id)
            return []
        found = incident.findings[0]
        mine = [s for s in self.signs.field(str(found.facts.get("field", ""))) if s.incident == incident_id and self.signs.lives(s)]
        if mine and incident_id not in self._counted and not self._settling(incident):
            self._counted.add(incident_id)
            self.attribution.count(incident)
        if not mine:
            condition = self.p.conditions.get(found.component, found.check)
            if condition is not None and condition.present:
                over = msgspec.structs.replace(found, at=self.p.now, present=False)
                self.p.conditions.fold(over, self.p.now, 1, self.p.policy.timing.clear_confirm)
            return []
        states = [s for s in mine if s.finding.kind is Kind.STATE]
        if not states or self.p.now - self._held[incident_id] <= self.p.policy.correlation.window:
            return []
        self._forget(incident_id)
        where = ", ".join(sorted({s.place for s in states})[:4])
        self.incidents.close(incident, f"no longer explains what is left: {where}")
        for s in states:
            s.incident, s.alone = "", True
        return states

    def _forget(self, incident_id: str) -> None:
        self._held.pop(incident_id, None)
        self._counted.discard(incident_id)
        for field, ids in list(self._patterns.items()):
            ids.pop(incident_id, None)
            if not ids:
                del self._patterns[field]

"""What would be taken out and is kept in, by a budget, by a person's hold or until its turn, and is tried again on every tick.

This module exists so that a fault that may not be acted on now is acted on as soon as it may. What always holds:

* What is kept in is said once, and paged once; then it is only looked at again.
* It is tried again for as long as its incident is open and its state is still measured bad.
* When a hold ends, whatever it kept in or brought back counts as if it had just been found.
* A new leader, a changed fleet and GPUs that are learned late each find what nobody has answered for yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sentinel.decide.faults.incidents import Incidents, by_place
from sentinel.decide.faults.silence import unheard
from sentinel.decide.faults.systemic import systemic_check
from sentinel.decide.rules.policy import Mode, Rule
from sentinel.decide.state.mode import mode_of
from sentinel.decide.state.picture import Picture
from sentinel.decide.supply.pace import Pace
from sentinel.model import DrainState, Finding, Hold, Incident, Response, Urgency, Worker

PATIENCE_S = 300.0  # a turn comes within seconds; when it has not by then, what is configured does not fit what happens


class Case(NamedTuple):
    """One worker that one incident would take out of service, for what was found and by which rule."""

    incident: Incident
    rule: Rule
    finding: Finding
    worker: Worker

class Kept(NamedTuple):
    """What keeps one worker in that one incident would take out."""

    rule: Rule
    finding: Finding
    why: str  # "budget", "pace", "hold", "later", the mode that forbids it, or "" while nobody has judged it yet
    since: float = 0.0  # when that reason began to keep it in


class Waiting:
    def __init__(self, picture: Picture, incidents: Incidents) -> None:
        self.p = picture
        self.incidents = incidents
        self._kept: dict[tuple[str, str], Kept] = {}  # (incident, worker)

    def workers(self, why: str) -> frozenset[str]:
        return frozenset(worker for (_, worker), kept in self._kept.items() if kept.why == why)

    def incidents_kept(self) -> frozenset[str]:
        return frozenset(incident for incident, _ in self._kept)

    def budget(self, incident: Incident, rule: Rule, finding: Finding, worker: Worker, blocked: str) -> None:
        """A budget keeps it in."""
        if self._known(incident, rule, finding, worker, "budget"):
            return
        incident = self.incidents.note(incident, "held back", f"{worker.name}: {blocked}", rule="budget")
        urgency = rule.page if rule.page in (Urgency.ERROR, Urgency.CRITICAL) else Urgency.ERROR.value
        self.incidents.page(incident, urgency, f"budget-blocked: {blocked}", rule=rule)

    def given_back(self, worker: Worker, why: str) -> None:
        """A drain of it on doubt was called off for the budget's sake: what asked for it is kept in."""
        for incident in self.incidents.about(worker.name, eases=True):
            asking = (d for d in self.incidents.demands(incident) if worker in self.p.touching(d[0].component))
            finding, rule = next(((f, r) for f, r in asking if self.p.conditions.stands(f)), (None, None))
            if finding is not None and rule is not None:
                self.budget(incident, rule, finding, worker, why)

    def hold(self, incident: Incident, rule: Rule, finding: Finding, worker: Worker, hold: Hold) -> None:
        """A person keeps it in."""
        if self._known(incident, rule, finding, worker, "hold"):
            return
        incident = self.incidents.note(incident, "held in", f"{hold.by} keeps {worker.name} in: {hold.reason}")
        said = f"{worker.name} is held in service by {hold.by}"
        self.incidents.page(incident, rule.page or Urgency.WARNING.value, said, rule=rule)

    def later(self, incident: Incident, rule: Rule, finding: Finding, worker: Worker, why: str) -> None:
        """Time keeps it in: it has to last, or has just been back."""
        if not self._known(incident, rule, finding, worker, "later"):
            self.incidents.note(incident, "waits", why, rule=rule.fault)

    def paced(self, case: Case, pace: Pace) -> bool:
        """Whether it waits for its turn to move its sessions: the most certain first, then the oldest."""
        first = min((_turn(k) for k in self._kept.values() if k.why == "pace"), default=None)
        mine = self._kept.get((case.incident.id, case.worker.name))
        since = mine.since if mine is not None and mine.why == "pace" else self.p.now
        why = pace.waits(case.worker)
        if not why and first is not None and first < (-case.finding.certainty, since):
            why = f"{case.worker.name}: others have waited longer or are more certain"
        if why and not self._known(*case, "pace"):
            self.incidents.note(case.incident, "waits its turn", why, rule="pace")
        return bool(why)

    def mode(self, incident: Incident, rule: Rule, finding: Finding, worker: Worker) -> None:
        """The mode keeps it in: judged anew when that changes."""
        self._known(incident, rule, finding, worker, mode_of(self.p.policy, rule).value)

    def take(self, incident: Incident, rule: Rule, finding: Finding) -> None:
        """Other rules would take these workers out: on the next tick, within the budgets."""
        for worker in self.p.touching(finding.component):
            self._kept[(incident.id, worker.name)] = Kept(rule, finding, "")

    def drop(self, incident: Incident, worker: Worker) -> None:
        """It is taken out, or somebody else has answered for it."""
        self._kept.pop((incident.id, worker.name), None)

    def forget(self, incident: Incident) -> None:
        """It is about something else now, for which nobody is taken out."""
        for key in [k for k in self._kept if k[0] == incident.id]:
            del self._kept[key]

    def again(self) -> Iterator[Case]:
        """On ticks: what is to be tried again now."""
        self._brought_back()
        queue: list[tuple[tuple[float, float], tuple[str, str], Case]] = []
        for (incident_id, name), kept in list(self._kept.items()):
            incident, worker = self.p.incidents.get(incident_id), self.p.workers.get(name)
            if incident is None or incident.closed_at is not None or worker is None or not self.p.conditions.stands(kept.finding):
                del self._kept[incident_id, name]
            elif worker not in self.p.touching(kept.finding.component):
                if not self.p.may_run(name, kept.finding.component.node):
                    del self._kept[incident_id, name]  # it has moved away
            elif unheard(self.p, kept.finding):
                continue
            elif kept.why == "budget" and (own := self.p.open_drain(name)) and own.state is DrainState.RETURNING:
                continue  # given back, and not there yet
            elif kept.why == mode_of(self.p.policy, kept.rule).value and not self.p.open_drain(name):
                continue  # said once already
            elif kept.why == "pace":
                self._overdue(incident, kept, worker)
                queue.append((_turn(kept), (incident_id, name), Case(incident, kept.rule, kept.finding, worker)))
            elif kept.why != "hold" or not self.p.held(worker, "in"):
                yield Case(incident, kept.rule, kept.finding, worker)
        for _, key, case in sorted(queue, key=lambda q: q[:2]):
            if key in self._kept:
                yield case
                if key in self._kept and self._kept[key].why == "pace":
                    break  # its turn has not come, so that of those behind it has not

    def _overdue(self, incident: Incident, kept: Kept, worker: Worker) -> None:
        if self.p.now - kept.since >= PATIENCE_S:
            said = f"{worker.name} has waited {PATIENCE_S / 60:g} min for its turn to move its sessions; or drain it by hand"
            urgency = kept.rule.page or Urgency.WARNING.value
            self.incidents.page(self.p.incidents[incident.id], urgency, f"budget-blocked: {said}", rule=kept.rule)

    def take_up(self, node: str = "") -> None:
        """Look for open incidents (of one node) that nobody answers for, though they would take a worker out."""
        mine = [i for i in self.p.open_incidents() if not node or any(f.component.node == node for f in i.findings)]
        drains = by_place(self.p.drains.values()) if mine else {}
        for incident in mine:
            if systemic_check(incident) or self.incidents.answering(incident, drains):
                continue
            for finding, rule in self.incidents.demands(incident):
                if self.p.conditions.stands(finding):
                    for worker in self.p.touching(finding.component):
                        self._kept.setdefault((incident.id, worker.name), Kept(rule, finding, ""))

    def rules_changed(self) -> None:
        """Other rules are in force: what is kept in is kept by them, or by nobody."""
        for key, kept in list(self._kept.items()):
            rule = self.p.rules.rule_for(kept.finding)
            if rule is None or rule.response is Response.NONE:
                del self._kept[key]
            else:
                self._kept[key] = kept._replace(rule=rule, why="" if kept.why in set(Mode) else kept.why)

    def _brought_back(self) -> None:
        """A person who holds a worker in may have called its drain off: the fault stands all the same."""
        for hold in self.p.holds.values():
            if hold.keep == "in" and (hold.until is None or hold.until > self.p.now):
                for worker in self.p.meant(hold.target):
                    for incident in self.incidents.about(worker.name, eases=True):
                        for finding, rule in self.incidents.demands(incident):
                            self._kept.setdefault((incident.id, worker.name), Kept(rule, finding, "hold"))

    def _known(self, incident: Incident, rule: Rule, finding: Finding, worker: Worker, why: str) -> bool:
        key = (incident.id, worker.name)
        before = self._kept.get(key)
        same = before is not None and before.why == why
        self._kept[key] = Kept(rule, finding, why, before.since if before is not None and same else self.p.now)
        return same


def _turn(kept: Kept) -> tuple[float, float]:
    """Where it stands in the queue of those who wait for their turn."""
    return (-kept.finding.certainty, kept.since)

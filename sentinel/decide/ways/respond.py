"""From a rule to one worker: which response fits it now, and everything that may hold it back, in the order in which it is asked.

This module exists so that there is one door through which sentinel takes a worker out of service. What always holds:

* The fault class chooses the response (the policy's rule); whether the engine can still finish what it has may change it
  (``fitting``), and nothing else does.
* A person's hold comes first, then what is being done already, then time (``Ease``), the budget, the pace, and the mode.
* Nothing is begun twice for one worker: worse news makes what is under way stronger.
"""

from __future__ import annotations

import msgspec

from sentinel.decide.faults.incidents import Incidents
from sentinel.decide.faults.signs import Sort, sort_of
from sentinel.decide.rules.policy import Rule
from sentinel.decide.state.mode import acts
from sentinel.decide.state.moves import GENTLE, gentle, rank
from sentinel.decide.state.picture import Picture
from sentinel.decide.state.planned import CANNOT_FINISH
from sentinel.decide.supply.budget import Budget
from sentinel.decide.ways.drain import Drains
from sentinel.decide.ways.ease import Ease
from sentinel.decide.ways.guard import Modes
from sentinel.decide.ways.repair import repair_target
from sentinel.decide.ways.waiting import Case, Waiting
from sentinel.model import Action, Component, Drain, DrainState, Finding, Incident, Response, Worker, WorkerState


def fitting(p: Picture, rule: Rule, finding: Finding, worker: Worker) -> tuple[Response, str]:
    """The response for this worker, and why it is another than the rule's; "" when it is the rule's own.

    A drain waits for what is in flight: where the engine is frozen or gone that only prolongs it, so it becomes an eviction.
    An eviction stops what is in flight: where the accusation is of the engine alone, its GPU is fine and the controller itself
    or a gateway has got an answer of the engine since the accusation, it becomes a drain.
    """
    if rule.response is Response.DRAIN:
        state = next((c for c in CANNOT_FINISH if _stands(p, worker, c)), None)
        return (Response.EVICT, f"{state}: nothing in flight would end") if state else (Response.DRAIN, "")
    if rule.response is Response.EVICT and finding.component.worker is not None and finding.check != "worker.frozen":
        view, condition = p.view(worker.name), p.conditions.get(finding.component, finding.check)
        if view.reachable and condition is not None and view.looked_at > condition.since:
            return Response.DRAIN, "the controller itself has reached it since"
        if condition is not None and p.relays.answered_since(worker.name, condition.since, p.now):
            return Response.DRAIN, "the gateways have had answers from it since"
    return rule.response, ""


def _stands(p: Picture, worker: Worker, check: str) -> bool:
    places = {*worker.nodes, *(g.node for g in p.gpus_of(worker))}
    found = (p.conditions.get(Component(node=n, device=f"worker@{worker.name}"), check) for n in places)
    return any(c is not None and c.raised for c in found)


class Responses:
    def __init__(
        self, picture: Picture, incidents: Incidents, drains: Drains, *, waiting: Waiting, budget: Budget, modes: Modes, ease: Ease
    ) -> None:
        self.p, self.incidents, self.drains, self.waiting = picture, incidents, drains, waiting
        self.budget, self.modes, self.ease = budget, modes, ease

    def respond(self, incident: Incident, rule: Rule, finding: Finding) -> None:
        """Do what the rule says to every worker that lives on what this finding is about."""
        if rule.response is Response.NONE:
            return
        workers = self.p.touching(finding.component)
        if not workers:
            self.incidents.note(incident, "nothing to drain", f"no worker is known on {finding.component}")
        for worker in workers:
            self.take_out(Case(incident, rule, finding, worker))

    def take_out(self, case: Case) -> None:
        """Take this worker out of service, or ease it, unless something holds that back."""
        p, (incident, rule, finding, worker) = self.p, case
        incident = p.incidents[incident.id]
        if worker.name not in incident.victims:  # learned or configured since it was opened
            incident = p.put_incident(msgspec.structs.replace(incident, victims=(*incident.victims, worker.name)))
        drain = p.open_drain(worker.name)
        if drain is None and p.state_of(worker) is WorkerState.STANDBY:
            return
        hold = p.held(worker, "in")
        if hold and (drain is None or drain.by == "sentinel"):
            self.waiting.hold(incident, rule, finding, worker, hold)
            return
        response, why = fitting(p, rule, finding, worker)
        if drain is not None and drain.kind == "drain" and not (gentle(drain) and rank(response) > rank(drain.response)):
            self._under_way(drain, case, response)
            return
        not_yet = self.ease.not_yet(rule, finding, worker, response) or self._shared(incident, finding, worker, response)
        if not_yet:
            self.waiting.later(incident, rule, finding, worker, not_yet)
            return
        doubtful = rule.budgeted or finding.certainty < 1.0
        blocked = (p.topology.disputed(finding.component) or self.budget.blocks(worker, response)) if doubtful else ""
        if blocked:
            self.waiting.budget(incident, rule, finding, worker, blocked)
            return
        if doubtful and response is Response.DRAIN and self.waiting.paced(case._replace(incident=incident), self.drains.pace):
            return
        repair, automatic, why_not = self._repair(case, response)
        price = "" if response in GENTLE else self.drains.pace.estimate(worker)
        told = (f"{finding.check} on {finding.component}: {finding.summary}", why, why_not, price)
        reason = "; ".join(s for s in told if s)
        if not self.modes.lets(case._replace(incident=incident), response, reason, doubtful=doubtful):
            return
        self.waiting.drop(incident, worker)
        wanted = Drain(
            id=drain.id if drain is not None and drain.kind == "drain" else p.new_id("drain"),
            worker=worker.name,
            response=response,
            reason=reason,
            requested_at=p.now,
            incident=incident.id,
            doubtful=doubtful,
            deadline_s=float(rule.deadline),
            repair=repair,
            target=repair_target(finding, worker),
            returns=automatic or response in GENTLE,
        )
        if drain is not None and drain.kind == "drain":
            self.ease.harden(drain, wanted)
        else:
            if drain is not None:  # a standby on its way up or down
                self.drains.drop(drain, reason)
            self.drains.request(self.ease.first(wanted))
        self.incidents.note(p.incidents[incident.id], "decided", f"{response.value} {worker.name}: {reason}", rule=rule.fault)

    def _shared(self, incident: Incident, finding: Finding, worker: Worker, response: Response) -> str:
        """Why the first who reports a link down waits: others would tell of its switch or cable as well, within moments.

        Only while its engine can still finish what it has, and only for links: a GPU's own fatal fault waits for nothing.
        """
        if response is not Response.DRAIN or sort_of(finding) is not Sort.LINK or not self.incidents.settling(incident):
            return ""
        settle = self.p.policy.correlation.settle
        return f"{response.value} of {worker.name} when {settle:g} s have shown no switch or cable behind it"

    def _under_way(self, drain: Drain, case: Case, response: Response) -> None:
        """It is on its way out or back already: worse news makes that stronger."""
        incident, rule, finding, worker = case
        settled = finding.component.worker is not None and drain.state not in (DrainState.REQUESTED, DrainState.DEROUTED)
        worse = not settled and drain.by == "sentinel" and not gentle(drain) and response not in GENTLE
        if worse and not acts(self.p, rule):
            self.waiting.mode(incident, rule, finding, worker)
            return
        if worse:
            repair, automatic, why_not = self._repair(case, response)
            reason = f"{finding.check} on {finding.component}: {finding.summary}" + (f"; {why_not}" if why_not else "")
            self.drains.escalate(drain, response, repair, repair_target(finding, worker), reason, returns=automatic)
        if response in GENTLE and not gentle(drain):
            why = f"{response.value} of {worker.name} if it is still so when that is back"
            self.waiting.later(incident, rule, finding, worker, why)
        else:
            self.waiting.drop(incident, worker)

    def _repair(self, case: Case, response: Response) -> tuple[Action, bool, str]:
        """What repairs it; nothing does while it serves on."""
        if response in GENTLE:
            return Action.NONE, True, ""
        return self.drains.repairs.wanted(case.rule, case.finding, case.worker)

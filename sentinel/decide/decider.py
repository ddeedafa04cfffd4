"""The decider: ``handle(event)`` in, instructions out; the order in which the rules are consulted stands here.

What always holds:

* The same events give the same instructions: nothing here knows a clock, a random number or the world.
* An event that cannot be used (an unknown worker, an effect nobody waits for) changes nothing and raises nothing.
* A person's command is carried out before any rule is consulted, and a hold outranks every rule.
"""

from __future__ import annotations

from typing import Any

from sentinel.decide import explain
from sentinel.decide.attribute import Attribution
from sentinel.decide.capacity import Capacity
from sentinel.decide.correlate import Correlation
from sentinel.decide.faults.failing import Failing
from sentinel.decide.faults.incidents import Incidents
from sentinel.decide.faults.kin import Kin
from sentinel.decide.faults.signs import Signs
from sentinel.decide.faults.silence import Silence
from sentinel.decide.faults.standing import Standing
from sentinel.decide.faults.systemic import Systemic
from sentinel.decide.hearing import Hearing
from sentinel.decide.reload import take_policy
from sentinel.decide.rules.policy import Policy, Rule
from sentinel.decide.state import past
from sentinel.decide.state.conditions import Change
from sentinel.decide.state.events import (
    AnyEvent,
    AnyInstruction,
    Asked,
    Done,
    FleetLoaded,
    Heard,
    PolicyLoaded,
    Relayed,
    Reported,
    Restored,
    Tick,
    Watched,
)
from sentinel.decide.state.old import Old
from sentinel.decide.state.past import Past
from sentinel.decide.state.picture import Picture
from sentinel.decide.state.planned import not_expected_up
from sentinel.decide.supply.budget import Budget
from sentinel.decide.supply.spare import Spare
from sentinel.decide.tending import tend
from sentinel.decide.ways.asking import ask_person
from sentinel.decide.ways.drain import Drains
from sentinel.decide.ways.ease import Ease
from sentinel.decide.ways.guard import Modes
from sentinel.decide.ways.leaving import Leaving
from sentinel.decide.ways.maintenance import Maintenance
from sentinel.decide.ways.people import People
from sentinel.decide.ways.pins import Pins
from sentinel.decide.ways.respond import Responses
from sentinel.decide.ways.waiting import Waiting
from sentinel.decide.ways.yielding import Yielding
from sentinel.model import Component, Finding, Kind


class Decider:
    def __init__(self, policy: Policy) -> None:
        self.p = Picture(policy)
        self.incidents = Incidents(self.p)
        self.drains = Drains(self.p, self.incidents)
        self.kin = Kin(self.incidents)
        self.waiting = Waiting(self.p, self.incidents)
        self.systemic = Systemic(self.p, self.incidents)
        self.standing = Standing(self.p, self.incidents)
        self.silence = Silence(self.p)
        self.failing = Failing(self.p, self.incidents, self.systemic)
        self.spare = Spare(self.p, self.incidents)
        self.past = Past(self.p)
        self.capacity = Capacity(self.p, self.drains)
        self.budget = Budget(self.p, self.capacity.table, self.capacity.needs)
        self.ease = Ease(self.p, self.incidents, self.drains)
        self.yielding = Yielding(self.p, self.drains, waiting=self.waiting, budget=self.budget)
        modes = Modes(self.p, self.incidents, self.waiting)
        self.responses = Responses(
            self.p, self.incidents, self.drains, waiting=self.waiting, budget=self.budget, modes=modes, ease=self.ease
        )
        signs = Signs(self.p)
        attribution = Attribution(signs, self.drains, waiting=self.waiting, systemic=self.systemic)
        attribution.respond = self.responses.respond
        self.correlation = Correlation(signs, attribution)
        self.maintenance = Maintenance(self.p, self.drains)
        self.pins = Pins(self.p, self.incidents, self.drains)
        self.people = People(self.p, self.drains, self.incidents, self.maintenance, self.pins)
        self.leaving = Leaving(self.p, self.incidents, self.drains)
        self.hearing = Hearing(self.p, self.incidents, silence=self.silence, past=self.past, waiting=self.waiting)
        self.old = Old(self.p)
        self._restored = False
        self._owed: list[AnyInstruction] = []  # decided by an event that then failed: told with the next one

    def handle(self, event: AnyEvent) -> list[AnyInstruction]:
        """Fold one event in; returns what to write down and what to do, in that order."""
        self.p.begin(event.id, event.at)
        try:
            self._fold(event)
        except Exception:
            self._owed += self.p.take()  # the picture has changed: what is not written down would be lost, or waited for in vain
            raise
        owed, self._owed = self._owed, []
        return owed + self.p.take()

    def _fold(self, event: AnyEvent) -> None:
        match event:
            case PolicyLoaded():
                take_policy(self.p, self.incidents, self.waiting, self.systemic, event.text)
                self.standing.look()
            case FleetLoaded():
                self.p.load_fleet(event.fleet)
                self.leaving.come_again()
                self.waiting.take_up()
            case Restored():
                self.p.restore(event)
                self.leaving.come_again()
                self.past.restore()
                self.failing.restore()
                self.correlation.restore()
                self.drains.pace.restore()
                self.waiting.take_up()
                self.standing.look()
                self._restored = True
            case Reported():
                for finding in self.hearing.reported(event.report):
                    self._found(finding)
            case Heard():
                for finding in self.hearing.heard(event.nodes):
                    self._found(finding)
            case Watched():
                self.hearing.watched(event)
            case Relayed():
                self.p.relays.fold(event)
                for finding in self.failing.relayed():
                    self._found(finding)
                self.pins.relayed()
            case Done():
                self._done(event)
            case Asked():
                self.people.asked(event)
                self._maintained()
            case Tick():
                self._tick()
        if self._restored and (self.capacity.stale or isinstance(event, Tick)):
            self.yielding.settle()
            self.capacity.refresh()
        self.pins.settle()

    def status(self) -> dict[str, Any]:
        return explain.status(self.p) | {"spare": self.spare.offers()}

    def explain(self, target: str) -> dict[str, Any]:
        return explain.explain(self.p, target)

    def watch(self, node: str) -> dict[tuple[Component, str], bool]:
        """The node's states of which a sample can change anything, and whether it must be heard with every heartbeat."""
        return self.p.conditions.watch(node, self.p.now) | dict.fromkeys(self.p.set_aside.get(node, ()), True)

    def nodes_of(self, target: str) -> list[str]:
        """The nodes that a maintenance window of this name would be of: the node itself, or those of the rack."""
        return self.maintenance.nodes_of(target)

    def held_back(self) -> frozenset[str]:
        """Workers that doubt would take out of service and a budget keeps in."""
        return self.waiting.workers("budget")

    # -- events -----------------------------------------------------------------------------------------------------

    def _done(self, event: Done) -> None:
        if not self.p.ended(event.instruction):
            return
        self.capacity.shortage.done(event)
        up = set(self.p.standby_up)
        ask = self.drains.done(event)
        for name in sorted(self.p.standby_up - up):  # what would only ease it has not kept it from starting
            for node in self.p.workers[name].nodes:
                self.waiting.take_up(node)
        if ask:
            ask_person(self.p, self.incidents, *ask)

    def _tick(self) -> None:
        self.capacity.measure()
        self.maintenance.tick()
        self._maintained()
        silent, short, failing = self.silence.tick(), self.capacity.shortage.tick(), self.failing.tick()
        for finding in (*self.p.topology.over(self.p.now), *silent, *self.past.tick(), *short, *failing):
            self._found(finding)
        for ask in self.drains.tick():
            ask_person(self.p, self.incidents, *ask)
        for alone in self.correlation.tick():
            self._judge(*alone, Change.RAISED)
        self.incidents.page_settled(self.systemic.covers)
        self.ease.tick()
        frozen = self.systemic.checks()
        for kept in self.waiting.again():
            if not (frozen and self.systemic.rests(kept.incident, kept.rule, frozen)):
                self.responses.take_out(kept)
        self.capacity.stand_down()
        self.capacity.shortage.ask()
        self.spare.tell()
        tend(
            self.p, self.incidents, self.waiting, systemic=self.systemic, standing=self.standing, orphaned=self.leaving.orphaned
        )  # fmt: skip
        self.leaving.tick()
        self.old.forget()

    # -- from a finding to a decision ---------------------------------------------------------------------------------

    def _found(self, finding: Finding) -> None:
        p = self.p
        if self.maintenance.takes(finding):
            return
        if not finding.present:
            p.conditions.fold(finding, p.now, 1, p.policy.timing.clear_confirm)
            return
        rule = p.rules.rule_for(finding)
        if rule is None or not_expected_up(p, finding):
            return
        change = p.conditions.fold(finding, p.now, rule.confirm, p.policy.timing.clear_confirm, rule)
        if change is Change.NOTHING:
            return
        if finding.facts.get("history"):  # older than the agent's first look at this node: on record, never acted on
            return
        self._judge(rule, finding, change)

    def _maintained(self) -> None:
        """What was still reported when maintenance or a reboot ended counts as if it had just been found."""
        for finding in self.maintenance.again():
            self._found(finding)

    def _judge(self, rule: Rule, finding: Finding, change: Change) -> None:
        """What was raised, or came again: whose incident it is, and what is done about it."""
        p = self.p
        joined = self.failing.joins(finding)
        if joined is not None:
            self.incidents.fold(joined, finding)
            return
        explained = self.correlation.take(rule, finding, change)
        if explained is not None and not self.correlation.accuses(explained, finding):
            return
        incident = explained or self.incidents.find(rule, finding) or self.kin.told(rule, finding)
        if change is Change.AGAIN and incident is not None:
            self.incidents.fold(incident, finding)
            if finding.kind is Kind.STATE:
                return
        if change is Change.AGAIN and finding.kind is Kind.STATE and self.incidents.settled(rule, finding):
            return
        echo = incident if incident is not None and incident.fault == rule.fault else None
        systemic = self.systemic.turned(rule, finding, echo=echo)
        if systemic is not None and rule.budgeted:
            return
        if incident is None:
            incident = self.incidents.open(rule, finding)
            self.kin.take_over(rule, finding)
            self.failing.taken_over(rule, finding, p.incidents[incident.id])
        elif change is not Change.AGAIN:
            incident = self.incidents.fold(incident, finding)
        self.responses.respond(incident, rule, finding)
        if rule.page and not rule.page_after and systemic is None and explained is None:
            fault, ask = past.worth(p, finding, rule.fault)
            self.incidents.page(p.incidents[incident.id], rule.page, ask, found=finding, fault=fault, rule=rule)

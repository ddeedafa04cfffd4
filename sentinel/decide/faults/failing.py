"""What the gateways tell of workers becomes findings: a breaker that is open, a pool in panic.

This module exists so that what clients feel is evidence beside what agents measure, and weighs what it is worth. What always holds:

* An open breaker is doubt about its worker: two hosts that agree are believed more than one, which may be the fault itself.
* It is measured only on a worker in rotation whose breaker nobody pinned, in a pool that is not in panic. Half-open is neither fine
  nor bad. What was seen before a worker left is over when it has passed its active test: its gateways begin anew, with probes.
* It joins whatever else would take that worker out, and what says more takes it over: one incident, one page.
* A pool in panic is one incident of that pool and a person's: the breakers of its workers are part of it, and nothing is drained.
  Where one check on many of its workers is systemic already, the panic is part of that, and its page says so, louder.
"""

from __future__ import annotations

from collections.abc import Iterator

from sentinel.decide.faults.incidents import Incidents
from sentinel.decide.faults.revise import merge
from sentinel.decide.faults.systemic import Systemic, systemic_check
from sentinel.decide.rules.policy import Rule
from sentinel.decide.state.events import Relay
from sentinel.decide.state.moves import gentle
from sentinel.decide.state.picture import Picture
from sentinel.decide.state.relayed import FAILING, PANIC
from sentinel.model import Action, Component, DrainState, Finding, Incident, Response, Severity, Urgency, Worker

_TAKES = (Response.DRAIN, Response.EVICT)
_SURE, _UNSURE = 0.8, 0.5  # two hosts, one (judgement: a rule of the policy tells them apart)


class Failing:
    def __init__(self, picture: Picture, incidents: Incidents, systemic: Systemic) -> None:
        self.p, self.incidents, self.systemic = picture, incidents, systemic
        self._accused: dict[str, None] = {}  # workers whose breaker was told to be open, in order
        self._panicked: set[str] = set()

    def restore(self) -> None:
        """What an earlier leader was told, and is open still."""
        for incident in self.p.open_incidents():
            for f in incident.findings:
                if f.check == FAILING and f.component.worker:
                    self._accused[f.component.worker] = None
                elif f.check == PANIC:
                    self._panicked.add(f.component.node)

    def relayed(self) -> Iterator[Finding]:
        """One measurement of everything that the gateways told just now."""
        p = self.p
        if not p.relays.heard(p.now):
            return
        for pool in sorted((p.relays.panics | self._panicked) & p.pools.keys()):
            yield self._panic(pool)
        for name in dict.fromkeys((*self._accused, *(r.worker for r in p.relays.odd()))):
            worker = p.workers.get(name)
            if worker is not None and self._in_rotation(worker) and not p.in_panic(worker.pool):
                yield from self._seen(worker, p.relays.of(name))

    def tick(self) -> Iterator[Finding]:
        """What was seen of a worker before it left counts no more once it has passed its test."""
        for name in list(self._accused):
            drain = self.p.open_drain(name)
            if name in self.p.workers and drain is not None and drain.state is DrainState.VERIFYING and drain.verified:
                yield self._finding(self.p.workers[name], Relay(worker=name), present=False)

    def joins(self, finding: Finding) -> Incident | None:
        """The open incident that this is evidence of: about something else that would take this worker out, or out of this pool so
        many that it is in panic."""
        if finding.check == PANIC:
            return self._cause(finding)
        if finding.check != FAILING or finding.component.worker is None:
            return None
        about = self.incidents.about(finding.component.worker)
        return next((i for i in about if any(f.check != FAILING for f, _ in self.incidents.demands(i, eases=False))), None)

    def _cause(self, panic: Finding) -> Incident | None:
        """What is systemic on workers of the pool, and called for; whoever was called hears that the pool is in panic."""
        pool = panic.component.node
        for incident in self.p.open_incidents():
            workers = [w for f in incident.findings if (w := self.p.workers.get(f.component.worker or "")) is not None]
            mine = sum(w.pool == pool for w in workers)
            if systemic_check(incident) in ("", FAILING) or not incident.paged or 2 * mine <= len(workers):
                continue
            rule = self.p.rules.rule_for(panic)
            if rule is not None and rule.page and all(f.check != PANIC for f in incident.findings):
                self.incidents.update(incident, Urgency(rule.page), panic.summary)
            return incident
        return None

    def taken_over(self, rule: Rule, finding: Finding, into: Incident) -> None:
        """A new incident that says more about workers than their breakers did, or about all of their pool."""
        if finding.check == PANIC:
            victims = [w.name for w in self.p.workers.values() if w.pool == finding.component.node]
            told = self.systemic.incident_of(FAILING)
            if told is not None and {f.component.worker for f in told.findings} <= set(victims):
                merge(self.incidents, told, into)
        elif rule.response in _TAKES and finding.check != FAILING:
            victims = list(into.victims)
        else:
            return
        for name in victims:
            for part in self.p.incidents_on(name):
                mine = part.closed_at is None and part.id != into.id and all(f.check == FAILING for f in part.findings)
                if mine and (finding.check != PANIC or not self.incidents.drains_of(part)):
                    merge(self.incidents, part, into)
                    if finding.check == PANIC:  # what is left of it afterwards counts as just found
                        self.p.conditions.end(_where(self.p.workers[name]), FAILING)
                        self.p.conditions.anew(_where(self.p.workers[name]), FAILING)

    def _in_rotation(self, worker: Worker) -> bool:
        drain = self.p.open_drain(worker.name)
        return (drain is None or gentle(drain)) and (not worker.standby or worker.name in self.p.standby_up)

    def _seen(self, worker: Worker, relay: Relay) -> Iterator[Finding]:
        if relay.pin or relay.breaker == "half_open":
            return
        if relay.breaker == "open":
            self._accused[worker.name] = None
            yield self._finding(worker, relay)
        elif worker.name in self._accused:
            yield self._finding(worker, relay, present=False)
            condition = self.p.conditions.get(_where(worker), FAILING)
            if condition is None or not condition.present:
                del self._accused[worker.name]

    def _finding(self, worker: Worker, relay: Relay, *, present: bool = True) -> Finding:
        seen_by = ", ".join(relay.hosts) or "nobody known"
        return Finding(
            id=f"{worker.name}:{FAILING}",
            check=FAILING,
            component=_where(worker),
            at=self.p.now,
            present=present,
            severity=Severity.WARNING,
            action=Action.RESTART_WORKER,
            certainty=_SURE if len(relay.hosts) >= 2 else _UNSURE,
            summary=f"the gateways' breaker is open: {relay.why or 'requests fail'}" if present else "",
            evidence=(f"breaker={relay.breaker} seen by {seen_by}: {relay.why}",) if present else (),
            facts={"hosts": list(relay.hosts)} if present else {},
        )

    def _panic(self, pool: str) -> Finding:
        present = pool in self.p.relays.panics
        where = Component(node=pool, device="pool")
        condition = self.p.conditions.get(where, PANIC)
        if present or (condition is not None and condition.present):
            self._panicked.add(pool)
        else:
            self._panicked.discard(pool)
        open_ones = sorted(r.worker for r in self.p.relays.odd() if r.breaker != "closed" and self._of(r.worker) == pool)
        return Finding(
            id=f"{pool}:{PANIC}",
            check=PANIC,
            component=where,
            at=self.p.now,
            present=present,
            severity=Severity.FATAL,
            action=Action.INSPECT,
            summary=f"so many workers of pool {pool} fail that the gateways try all of them" if present else "",
            evidence=(f"open breakers: {', '.join(open_ones) or 'none'}",) if present else (),
        )

    def _of(self, worker: str) -> str:
        known = self.p.workers.get(worker)
        return known.pool if known is not None else ""


def _where(worker: Worker) -> Component:
    """As the agent of its first node writes it, so that both speak of one thing."""
    nodes = (*worker.nodes, *(g.node for g in worker.gpus), worker.name)
    return Component(node=nodes[0], device=f"worker@{worker.name}")

"""What repairs a fault, on what, what comes next when that did not cure it, and whether sentinel may do it by itself and now.

What always holds:

* A repair goes to the component that wants it. One that would end a neighbour's process, that the policy leaves to a person, that
  has not lasted before, or that is of a GPU which fails again and again, is a person's.
* What did not cure is followed by the policy's ``then`` under the same conditions, never by the same again; the second failure of
  the same repair within ``timing.repair_memory`` is a person's. Each rung is a round of its own (``Drain.attempt``).
* The node lock (``waits_to_repair``, ``waits_to_start``): two repairs never meet on a node, and no worker leaves, starts or is
  tested there while a repair that would hit it runs. It is read from the durable drains, so that it outlives a leader, and it
  does not care whose incident, or which person, wants the other one. Nor is a node repaired that a person keeps for himself.
"""

from __future__ import annotations

from collections.abc import Iterator

from sentinel.decide.faults.incidents import Incidents
from sentinel.decide.rules.policy import Rule
from sentinel.decide.state.mode import acts
from sentinel.decide.state.past import recurs
from sentinel.decide.state.picture import ENDED, Picture
from sentinel.model import Action, Component, Drain, DrainState, Finding, Worker, WorkerState

# Repairs that end every process on the node, whoever it belongs to.
NODE_WIDE = (Action.RESTART_IMEX, Action.RESTART_FABRIC_MANAGER, Action.REBOOT_NODE, Action.POWER_CYCLE)
COMES_BACK_S = 1800.0  # a node that reboots or is power-cycled checks its memory, and is back within half an hour or needs a person

_ON_ITS_WAY = (  # of another worker: what it has in flight, its start or its test would be cut
    DrainState.REQUESTED, DrainState.DEROUTED, DrainState.STOPPING, DrainState.STARTING, DrainState.VERIFYING,
)  # fmt: skip


def repair_target(finding: Finding, worker: Worker | None) -> str:
    """What a repair of this finding acts on: the GPU and not its link; for a worker's fault the node that starts it."""
    c = finding.component
    if c.gpu is not None:
        return str(Component(node=c.node, device=c.device))
    if c.worker is not None:
        return worker.nodes[0] if worker and worker.nodes else c.node
    return c.node if "/" in c.device + c.part else str(c)  # what could not be read back would name nothing


def node_of(drain: Drain) -> str:
    """The node that its repair acts on."""
    return drain.target.partition("/")[0]


def mark(drain: Drain) -> str:
    """Its repair, as ``Drain.tried`` keeps it."""
    return f"{drain.repair.value} {drain.target}"


def done(drain: Drain, by: Drain) -> bool:
    """Whether what this drain wants repaired has been, as part of that one."""
    return drain.target in by.repaired and mark(drain) in by.tried


class Repairs:
    def __init__(self, picture: Picture, incidents: Incidents) -> None:
        self.p = picture
        self.incidents = incidents

    # -- what -------------------------------------------------------------------------------------------------------

    def wanted(self, rule: Rule, finding: Finding, worker: Worker) -> tuple[Action, bool, str]:
        """What repairs it, whether sentinel may do that by itself, and if not, the sentence why."""
        action = self.p.policy.repair_for(rule, finding)
        if action is Action.NONE:
            named = rule.repair == "finding" and finding.action.rank > Action.WAIT.rank
            return Action.NONE, False, f"{finding.action.value} is for a person" if named else "nothing here repairs it by itself"
        if not self.p.policy.automatic(action):
            return Action.NONE, False, f"{action.value} is left to a person"
        times = recurs(self.p, finding.component)
        if times:
            return Action.NONE, False, f"fatal {times} times in a day: {action.value} does not last, left to a person"
        there = {w.name for w in self.p.touching(finding.component)}
        others = [n for n in self.p.in_service_beside(str(finding.component)) if n not in there] if action in NODE_WIDE else []
        if others:
            return Action.NONE, False, f"{action.value} would take {', '.join(others)} with it: left to a person"
        earlier = self._times(action, repair_target(finding, worker), worker.name)
        if earlier >= self.p.policy.timing.repair_tries:
            return Action.NONE, False, f"{action.value} done {earlier} times in {self._days()} days did not last: for a person"
        return action, True, ""

    def next(self, drain: Drain) -> tuple[Action, str] | None:
        """What else on this worker's place wants a repair that sentinel may do: two GPUs of one group can fail together."""
        for incident in self.incidents.about(drain.worker):
            for f, rule in self.incidents.demands(incident):
                action = self.p.policy.repair_for(rule, f)
                if action in (Action.NONE, Action.RESTART_WORKER) or not self.p.policy.automatic(action):
                    continue
                if recurs(self.p, f.component):
                    continue
                target = repair_target(f, self.p.workers.get(drain.worker))
                mended = {target, f.component.node} & set(drain.repaired)
                if not mended and self.p.conditions.stands(f):
                    return action, target
        return None

    def rung(self, drain: Drain) -> tuple[Action, str, str]:
        """Its repair did not cure: what is done next, and on what; or NONE, and why a person is asked ("": nothing is next)."""
        entry = self.p.policy.repair.get(drain.repair.value)
        if entry is None or not entry.then or not drain.returns:
            return Action.NONE, "", ""
        action, failed = Action(entry.then), 1 + self._times(drain.repair, drain.target, drain.worker)
        target = node_of(drain) if action in NODE_WIDE else drain.target
        why = ""
        if failed >= self.p.policy.timing.repair_tries:
            why = f"failure {failed} of {drain.repair.value} in {self._days()} days: {action.value} is next and is left to a person"
        elif not self.p.policy.automatic(action) or (action is Action.RESET_GPU and Component.parse(target).gpu is None):
            why = f"{action.value} is next and is left to a person"
        elif not self._acts(drain):
            why = f"{action.value} is next, and the mode leaves it to a person"
        elif self._recurs(drain):
            why = f"{action.value} is next and would not last either: left to a person"
        elif self._times(action, target, drain.worker) >= self.p.policy.timing.repair_tries:
            why = f"{action.value} is next and has not lasted in {self._days()} days: left to a person"
        elif others := self.with_it(action, target, drain.worker):
            why = f"{action.value} is next and would take {', '.join(others)} with it: left to a person"
        return (Action.NONE, "", why) if why else (action, target, "")

    def _times(self, action: Action, target: str, worker: str) -> int:
        """How often this repair was carried out for the worker, or on the target, and the fault is here again."""
        since = self.p.now - self.p.policy.timing.repair_memory
        earlier = {
            d.incident or d.id
            for d in self.p.drains.values()
            if d.state in ENDED and d.requested_at > since
            for t in d.tried
            if t.startswith(f"{action.value} ") and (d.worker == worker or t == f"{action.value} {target}")
        }
        return len(earlier)

    def _days(self) -> str:
        return f"{self.p.policy.timing.repair_memory / 86_400:g}"

    def _demands(self, drain: Drain) -> list[tuple[Finding, Rule]]:
        incident = self.p.incidents.get(drain.incident)
        return self.incidents.demands(incident) if incident is not None else []

    def _acts(self, drain: Drain) -> bool:
        rules = [rule for _, rule in self._demands(drain)]
        return any(acts(self.p, rule) for rule in rules) if rules else acts(self.p)

    def _recurs(self, drain: Drain) -> bool:
        return any(recurs(self.p, f.component) for f, _ in self._demands(drain))

    # -- when: the node lock ----------------------------------------------------------------------------------------

    def with_it(self, action: Action, target: str, worker: str) -> list[str]:
        """Workers in service that this repair would end, but for the one that it is for."""
        serving = (WorkerState.ACTIVE, WorkerState.CORDONED)
        return [w.name for w in self._hit(action, target) if w.name != worker and self.p.state_of(w) in serving]

    def waits_to_repair(self, drain: Drain) -> str:
        """Why its repair may not begin yet; "" when it may."""
        node = node_of(drain)
        for target in dict.fromkeys((node, drain.target)):
            hold = self.p.holds.get(target)
            if hold is not None and hold.keep == "out" and (hold.until is None or hold.until > self.p.now):
                return f"{hold.by} keeps {target} out: {hold.reason}"
        for other in self._running(node):
            if other.id != drain.id:
                return f"{other.repair.value} of {other.target} is under way"
        for worker in self._hit(drain.repair, drain.target):
            theirs = self.p.open_drain(worker.name)
            if theirs is not None and theirs.id != drain.id and theirs.state in _ON_ITS_WAY:
                return f"{worker.name} is {theirs.state.value}"
        return ""

    def waits_to_start(self, worker: Worker) -> str:
        """Why this worker may neither be started nor tested yet; "" when it may."""
        for node in dict.fromkeys((*worker.nodes, *(g.node for g in self.p.gpus_of(worker)))):
            coming = (d for w in self.p.on_node(node) if w is not worker and (d := self._comes(w, node)) is not None)
            others = (d for d in self._running(node) if d.worker != worker.name)  # its own, which has just ended, holds nothing up
            for other in (*others, *coming):
                if any(w is worker for w in self._hit(other.repair, other.target)):
                    return f"{other.repair.value} of {other.target} for {other.worker} comes first"
        return ""

    def _running(self, node: str) -> Iterator[Drain]:
        """The repairs that run on this node; one for a worker that is configured no more only until it has answered."""
        for d in self.p.open_drains():
            here = d.state is DrainState.REPAIRING and node_of(d) == node
            if here and (d.worker in self.p.workers or f"{d.id}/repair/{d.attempt}" in self.p.outstanding):
                yield d

    def _comes(self, worker: Worker, node: str) -> Drain | None:
        """The repair of the whole node that this worker's drain is about to begin: it would only take a start back out."""
        d = self.p.open_drain(worker.name)
        if d is None or d.state is not DrainState.OUT or not d.returns or d.repair not in NODE_WIDE or done(d, d):
            return None
        return d if node_of(d) == node and not self.p.held(worker, "out") else None

    def _hit(self, action: Action, target: str) -> list[Worker]:
        """Every worker whose process this repair ends."""
        where = Component.parse(target)
        return self.p.on_node(where.node) if action in NODE_WIDE else self.p.touching(where)

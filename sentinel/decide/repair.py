"""What repairs a fault, on what, and whether sentinel may do it by itself.

What always holds: a repair goes to the component that wants it; one that would end a neighbour's process, that the policy
leaves to a person, that has not lasted before, or that is of a GPU which fails again and again, is a person's.
"""

from __future__ import annotations

from sentinel.decide.incidents import Incidents
from sentinel.decide.past import recurs
from sentinel.decide.picture import ENDED, Picture
from sentinel.decide.policy import Rule
from sentinel.model import Action, Component, Drain, Finding, Worker

# Repairs that end every process on the node, whoever it belongs to.
NODE_WIDE = (Action.RESTART_IMEX, Action.RESTART_FABRIC_MANAGER, Action.REBOOT_NODE, Action.POWER_CYCLE)


def repair_target(finding: Finding, worker: Worker | None) -> str:
    """What a repair of this finding acts on: the GPU and not its link; for a worker's fault the node that starts it."""
    c = finding.component
    if c.gpu is not None:
        return str(Component(node=c.node, device=c.device))
    if c.worker is not None:
        return worker.nodes[0] if worker and worker.nodes else c.node
    return c.node if "/" in c.device + c.part else str(c)  # what could not be read back would name nothing


class Repairs:
    def __init__(self, picture: Picture, incidents: Incidents) -> None:
        self.p = picture
        self.incidents = incidents

    def wanted(self, rule: Rule, finding: Finding, worker: Worker) -> tuple[Action, bool, str]:
        """What repairs it, whether sentinel may do that by itself, and if not, the sentence why."""
        timing = self.p.policy.timing
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
        mine = (d for d in self.p.drains.values() if d.worker == worker.name and d.repair is action and d.state in ENDED)
        earlier = [d for d in mine if d.verified and self.p.now - d.requested_at < timing.repair_memory]
        if len(earlier) >= timing.repair_tries:
            days = timing.repair_memory / 86_400
            return Action.NONE, False, f"{action.value} done {len(earlier)} times in {days:g} days did not last: for a person"
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
                done = {target, f.component.node} & set(drain.repaired)
                if not done and self.p.conditions.stands(f):
                    return action, target
        return None

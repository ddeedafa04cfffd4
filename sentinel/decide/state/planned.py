"""What is meant to be as it is, and is no fault: a maintenance window, a reboot that sentinel asked for, a stopped worker.

This module exists so that everything that misses, judges, pages or repairs asks one place whether somebody wants it so. What
always holds: it only reads the picture; a window that has ended counts no more, whoever has yet to notice that; a reboot is
meant from the moment it is asked for until the node reports another boot, or is given up.
"""

from __future__ import annotations

from typing import Any

from sentinel.decide.state.picture import Picture
from sentinel.model import Action, Drain, DrainState, Finding, Hold, Response, Suspect, Worker, WorkerState

S = DrainState

REBOOTS = (Action.REBOOT_NODE, Action.POWER_CYCLE)
# Measured on the worker itself (probes/worker.py): with one of these nothing that is in flight ever ends.
CANNOT_FINISH = ("worker.frozen", "worker.dead", "worker.unreachable", "worker.gone")


STILL_S = 60.0  # what was measured within this long is still so: twice the longest cadence of a probe


def window(p: Picture, node: str) -> Hold | None:
    """The maintenance window that this node is in; None: it is in none."""
    hold = p.holds.get(node)
    if hold is None or not hold.planned or (hold.until is not None and hold.until <= p.now):
        return None
    return hold


def reboot(p: Picture, node: str) -> Drain | None:
    """The drain whose repair is rebooting this node now."""
    for worker in p.on_node(node):
        drain = p.open_drain(worker.name)
        if drain is None or drain.state is not S.REPAIRING or drain.repair not in REBOOTS or drain.target.partition("/")[0] != node:
            continue
        view = p.nodes.get(node)
        if not drain.boot or view is None or view.boot_id == drain.boot:  # it has not come back yet
            return drain
    return None


def planned(p: Picture, node: str) -> bool:
    """Whether what happens on this node now is meant to, and counts as nothing else."""
    return window(p, node) is not None or reboot(p, node) is not None


def whose(p: Picture, finding: Finding) -> str:
    """The node whose maintenance or reboot explains this finding: its own, or the one that a peer misses; "" none does."""
    node = finding.component.node
    if planned(p, node):
        return node
    if finding.check == "imex.peer":
        peer = finding.facts.get("peer")
        named = p.topology.node_at(peer) if isinstance(peer, str) else ""
        return named if named and planned(p, named) else ""
    if finding.suspect is not Suspect.PEER:
        return ""
    there = p.topology.nodes_of_domain(p.topology.domain(node))
    return next((n for n in sorted(there) if n != node and planned(p, n)), "")


def known_to(p: Picture, culprit: str) -> bool:
    """Whether somebody works on what this incident accuses: then nobody else needs to be told."""
    worker = p.workers.get(culprit)
    nodes = _places(p, worker) if worker is not None else {culprit.partition("/")[0]}
    return any(window(p, n) is not None for n in nodes)


def not_expected_up(p: Picture, finding: Finding) -> bool:
    """A worker that stands by, or that was taken out and stopped, is not missed when it does not answer."""
    worker = p.workers.get(finding.component.worker or "")
    if worker is None:
        return False
    drain = p.open_drain(worker.name)
    if drain is None or p.state_of(worker) is WorkerState.STANDBY:
        return drain is not None or p.state_of(worker) is WorkerState.STANDBY
    if not drain.incident:
        return drain.state is not S.REQUESTED
    coming = drain.state in (S.STOPPING, S.STARTING) or (drain.state is S.VERIFYING and not drain.verified)
    return finding.check in CANNOT_FINISH and (coming or (drain.stopped and drain.state in (S.OUT, S.REPAIRING)))


def not_looked_at(p: Picture, worker: Worker, since: float) -> str:
    """After a maintenance window: what of this worker's place has not been looked at since then, or is seen bad and not yet
    confirmed; "" nothing. What is confirmed has an incident, which keeps it out if anything does."""
    for node in sorted(_places(p, worker)):
        view = p.nodes.get(node)
        if view is None or view.heard_at <= since:
            return f"no report of {node}"
        for f in p.to_look_at.get(node, ()):
            seen = p.conditions.get(f.component, f.check)
            unsure = seen is not None and not seen.present and seen.bad > 0 and p.now - seen.measured_at < STILL_S
            if unsure and worker in p.touching(f.component):
                return f"{f.check} on {f.component}, to be confirmed"
    return ""


def told(p: Picture, node: str) -> dict[str, Any] | None:
    """The node's maintenance window and what was found during it, for the eye; None: it is in none."""
    hold = window(p, node)
    if hold is None:
        return None
    aside = (a.finding for a in p.set_aside.get(node, {}).values())
    found = [f"{f.check} on {f.component}" + (f": {f.summary}" if f.summary else "") for f in aside]
    words = {"by": hold.by, "reason": hold.reason, "since": hold.at, "until": hold.until, "of": hold.of}
    return {"node": node, **words, "found": found}


def windows(p: Picture, target: str) -> list[dict[str, Any]]:
    """Those of a node, of the nodes of a worker, or of a rack."""
    worker = p.workers.get(target)
    nodes = _places(p, worker) if worker is not None else {target.partition("/")[0]}
    nodes |= {h.target for h in p.holds.values() if h.planned and h.of == target}
    return [w for w in (told(p, n) for n in sorted(nodes)) if w is not None]


def takes_out(p: Picture, finding: Finding) -> bool:
    rule = p.rules.rule_for(finding)
    return rule is not None and rule.response not in (Response.NONE, Response.STEER, Response.CORDON)


def _places(p: Picture, worker: Worker) -> set[str]:
    return {*worker.nodes, *(g.node for g in p.gpus_of(worker))}


"""Why, in words and as data: the fleet's picture for ``status``, one chain from raw line to action for ``explain``.

What always holds: everything here is read from the picture and changes nothing; values are plain JSON values; a target
that nothing is known about gives an answer that says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from sentinel.decide.rack.placed import placed
from sentinel.decide.state import planned
from sentinel.decide.state.picture import Picture
from sentinel.decide.supply.worth import Standing, given_to, survey, worth
from sentinel.model import Drain, DrainState, Incident, Role, Step, Worker, WorkerState

_LATELY_S = 60.0  # what the mode forbids is tried again on every tick


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value)


def status(p: Picture) -> dict[str, Any]:
    """The whole picture: nodes, workers, pools, open incidents and drains, holds."""
    present: dict[str, set[str]] = {}
    for condition in p.conditions.present():
        present.setdefault(condition.finding.component.node, set()).add(condition.finding.check)
    of_pool: dict[str, list[Worker]] = {}
    for worker in p.workers.values():
        of_pool.setdefault(worker.pool, []).append(worker)
    return {
        "epoch": p.epoch,
        "mode": p.policy.mode.value,
        "would_have": [f"{deed}: {why}" for deed, (at, why) in p.would.items() if p.now - at < _LATELY_S],
        "at": p.now,
        "nodes": [_node(p, name, present.get(name, set())) for name in sorted(p.nodes)],
        "workers": [_worker(p, w) for w in p.workers.values()],
        "pools": [_pool(p, name, standing, of_pool.get(name, ())) for name, standing in survey(p).items()],
        "incidents": [_plain(i) for i in sorted(p.open_incidents(), key=lambda i: i.opened_at)],
        "drains": [_plain(d) for d in p.open_drains()],
        "holds": [_plain(h) for h in p.holds.values()],
        "routes_version": p.routes.version,
        "deaf": p.deaf,
        "gateways": [{"gateway": r.name, "obeys": r.version, "there": r.there} for r in p.relays.replicas],
    }


def _node(p: Picture, name: str, present: set[str]) -> dict[str, Any]:
    view = p.nodes[name]
    return {
        "node": name,
        "reported": view.reported,
        "silent_s": round(p.now - view.heard_at, 3),
        "clock_off_s": round(view.clock_off_s, 3),
        "version": view.version,
        "probes": view.probes,
        "present": sorted(present),
        "place": placed(p.topology, name),
        **({"maintenance": maintained} if (maintained := planned.told(p, name)) else {}),
    }


def _worker(p: Picture, worker: Worker) -> dict[str, Any]:
    drain, view = p.open_drain(worker.name), p.view(worker.name)
    return {
        "worker": worker.name,
        "pool": worker.pool,
        "role": worker.role.value,
        "state": p.state_of(worker).value,
        "reachable": view.reachable,
        "load": view.load,
        "gpus": [str(g) for g in p.gpus_of(worker)],
        "drain": drain.id if drain else None,
        "drain_state": drain.state.value if drain else None,
        "why": drain.reason if drain else "",
        **({"breaker": told} if (told := _breaker(p, worker.name)) else {}),
        **({"waits_for": behind} if (behind := _waits_for(p, drain)) else {}),
    }


def _breaker(p: Picture, worker: str) -> dict[str, Any]:
    """What the gateways told last of its breaker, where that is not plainly closed."""
    relay = p.relays.of(worker)
    if relay.breaker == "closed" and not relay.pin:
        return {}
    pin = {"pin": relay.pin, "by": relay.pin_by, "until": relay.pin_until} if relay.pin else {}
    return {"state": relay.breaker, "why": relay.why, "seen_by": list(relay.hosts), **pin}


def _waits_for(p: Picture, drain: Drain | None) -> list[str]:
    """Gateways that may still send requests to a worker which is about to be stopped, by the table that they obey."""
    waits = drain is not None and drain.kind != "start" and drain.state is DrainState.DEROUTED
    return p.relays.behind(p.routes.version, p.now) if waits else []


def _pool(p: Picture, name: str, standing: Standing, workers: Iterable[Worker]) -> dict[str, Any]:
    weight = next((r.weight for r in p.routes.pools if r.pool == name), None)
    roles: dict[str, dict[str, float]] = {}
    for w in workers:
        sums = roles.setdefault(w.role.value, {"ready": 0.0, "total": 0.0})
        sums["total"] += 0.0 if w.standby else worth(p.pools[name], w)
        sums["ready"] += given_to(p, w)
    return {
        "pool": name,
        "weight": weight,
        "floor": p.pools[name].floor,
        "roles": {role.value: roles[role.value] for role in Role if roles.get(role.value, {}).get("total")},
        "carries": standing.carries,
        "whole": standing.whole,
        "scarce": standing.scarce.value if standing.scarce else None,
        "panic": name in p.relays.panics,
        "surplus": {role.value: n for role, n in standing.surplus().items()},
        "says": standing.sentence(),
    }


def explain(p: Picture, target: str) -> dict[str, Any]:
    """Everything that concerns a node, worker, component or incident, oldest first, each step with its time and rule."""
    incidents = [i for i in p.incidents.values() if _concerns(p, target, i)]
    ids = {i.id for i in incidents}
    drains = [d for d in p.drains.values() if target in (d.worker, d.id) or d.incident in ids]
    told: list[tuple[Step, str]] = [(s, i.id) for i in incidents for s in i.history]
    told += [(s, d.id) for d in drains for s in d.history]
    told.sort(key=lambda pair: pair[0].at)
    return {
        "target": target,
        "known": bool(incidents or drains or target in p.workers or target in p.nodes or target in p.pools),
        "now": _now(p, target),
        "incidents": [_plain(i) for i in incidents],
        "drains": [_plain(d) for d in drains],
        "holds": [_plain(h) for h in p.holds.values() if h.target == target and not h.planned],
        "maintenance": planned.windows(p, target),
        "steps": [{"of": of, **msgspec.structs.asdict(step)} for step, of in told],
    }


def _concerns(p: Picture, target: str, incident: Incident) -> bool:
    if target in (incident.id, incident.culprit, *incident.victims):
        return True
    if incident.culprit.startswith(f"{target}/") or any(n == target or n.startswith(f"{target}/") for n in incident.scope):
        return True
    return any(str(f.component).split("/")[0] == target for f in incident.findings)


def _through(p: Picture, worker: Worker, drain: Drain | None) -> str:
    """What the gateways have to do with it, as the end of a sentence."""
    told, breaker, behind = "", _breaker(p, worker.name), _waits_for(p, drain)
    if breaker.get("pin"):
        told += f"; its breaker is held {breaker['pin']} by {breaker['by']}"
    elif breaker:
        told += f"; its breaker is {breaker['state'].replace('_', '-')}: {breaker['why']}"
    return told + (f"; it is not stopped before these gateways obey the table without it: {', '.join(behind)}" if behind else "")


def _now(p: Picture, target: str) -> str:
    """One sentence on how the target stands now."""
    if target in p.incidents:
        incident = p.incidents[target]
        ended = f"closed ({incident.history[-1].why})" if incident.closed_at and incident.history else "open"
        sure = f", {incident.confidence:.0%} sure" if incident.confidence < 1.0 else ""
        return f"{incident.fault} on {incident.culprit}{sure}: {ended}"
    if target in p.workers:
        worker = p.workers[target]
        drain = p.open_drain(target)
        return f"{target} is {p.state_of(worker).value}" + (f": {drain.reason}" if drain else "") + _through(p, worker, drain)
    if target in p.nodes:
        out = [w.name for w in p.on_node(target) if p.state_of(w) is WorkerState.OUT]
        return f"{target} reported {p.now - p.nodes[target].heard_at:.0f} s ago; out of rotation: {', '.join(out) or 'nothing'}"
    if target in p.pools:
        weight = next((r.weight for r in p.routes.pools if r.pool == target), None)
        panic = "; in panic: the gateways try all of its workers" if target in p.relays.panics else ""
        return f"pool {target} {survey(p)[target].sentence()}" + (f"; weight {weight:.0%}" if weight is not None else "") + panic
    return f"nothing is known about {target}"



"""What the decider knows, and the only way it says what to do.

This module exists so that every rule reads one picture and writes through one hand. What always holds:

* Durable things (incidents, drains, holds, routes) change only through ``put_*`` and ``drop_hold``, which also emit the
  Record; per batch the last value of each wins.
* Soft things (what nodes and workers say) are never recorded; a new leader hears them again.
* ``now`` and ``cause`` come from the event being handled; there is no other clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from sentinel.decide.rack.topology import Topology
from sentinel.decide.rules.policy import Policy, Rulebook
from sentinel.decide.state.conditions import Conditions
from sentinel.decide.state.events import Restored
from sentinel.decide.state.moves import gentle
from sentinel.decide.state.relayed import PANIC, Relays
from sentinel.decide.state.written import ENDED, Written, effect_key, with_step
from sentinel.model import (
    Component,
    DrainState,
    Finding,
    Fleet,
    Hold,
    Pool,
    Response,
    Worker,
    WorkerState,
    gpu_component,
)

__all__ = ["ENDED", "NodeView", "Picture", "Shadow", "WorkerView", "effect_key", "with_step"]

SERVES = (WorkerState.ACTIVE, WorkerState.CORDONED)


@dataclass
class NodeView:
    """What is known of a node: soft."""

    heard_at: float  # when its latest report arrived, or when this leader began to wait for one
    reported: bool = False  # has reported to this leader
    boot_id: str = ""
    version: str = ""
    clock_off_s: float = 0.0
    probes: dict[str, bool | None] = field(default_factory=dict)


class Shadow(NamedTuple):
    """What sentinel would have done to a worker if its mode let it; soft."""

    at: float
    incident: str
    response: Response
    doubtful: bool


class Aside(NamedTuple):
    """What was found on a node during its maintenance window, and counts for nothing; soft."""

    finding: Finding
    at: float


@dataclass
class WorkerView:
    """What is known of a worker beyond its configuration: soft."""

    gpus: tuple[Component, ...] = ()  # learned from reports, by node
    reachable: bool | None = None
    refused: int = 0  # looks in a row that found it unreachable
    unanswered: int = 0  # looks in a row that could not tell: no answer at all in time
    load: int | None = None  # running + waiting; None: not measured
    looked_at: float = 0.0


class Picture(Written):
    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.rules = Rulebook(policy)
        self.fleet = Fleet()
        self.topology = Topology()
        self.workers: dict[str, Worker] = {}
        self.pools: dict[str, Pool] = {}
        self._order: dict[str, int] = {}  # worker → its place in the configuration
        self._on: dict[str, list[Worker]] | None = None  # node or written GPU → workers there; None: to be made anew
        self.nodes: dict[str, NodeView] = {}
        self.views: dict[str, WorkerView] = {}
        self.relays = Relays()
        self.conditions = Conditions(policy.hysteresis)
        self.would: dict[str, tuple[float, str]] = {}  # what the mode forbids and no incident is about → when last, and why
        self.shadows: dict[str, Shadow] = {}  # worker → what would have taken it out, where the mode forbids it
        self.deaf = False  # so many nodes are silent that the fault must be on this side (as of the last tick)
        self.set_aside: dict[str, dict[tuple[Component, str], Aside]] = {}  # node in a maintenance window → what was found there
        self.to_look_at: dict[str, list[Finding]] = {}  # node whose window has ended → what was still reported then
        self.standby_up: set[str] = set()  # standby workers that were started

    def use_policy(self, policy: Policy) -> None:
        self.policy = policy
        self.rules = Rulebook(policy)
        self.conditions.hysteresis = policy.hysteresis
        self.shadows.clear()  # judged anew on the next tick
        self._changed = None  # what a worker is worth in the route table may depend on it

    # -- reading the picture ----------------------------------------------------------------------------------------

    def restore(self, event: Restored) -> None:
        """Take over what is durable. States of open incidents count as present until they are measured fine."""
        self.epoch = event.epoch
        self.incidents = {i.id: i for i in event.incidents}
        self._by_node = {}
        for kept in event.incidents:
            self._place(kept)
            self.taken_over(kept)
        self.drains = {d.id: d for d in event.drains}
        self._open = {d.worker: d.id for d in event.drains if d.state not in ENDED}
        self.holds = {h.target: h for h in event.holds}
        self.topology.restore(event.incidents)
        self.outstanding = {effect_key(i): i for i in event.pending}
        if event.routes:
            self.routes = event.routes
            states = {e.worker: e.state for r in event.routes.pools for e in r.workers}
            up = (*SERVES, WorkerState.OUT)  # one that is out was up before, and is up again when it is back
            self.standby_up = {w.name for w in self.workers.values() if w.standby and states.get(w.name) in up}
        for incident in event.incidents:
            for finding in incident.findings:
                opened_at = incident.opened_at if incident.closed_at is None else None
                self.conditions.restore(finding, opened_at, self.now, self.rules.rule_for(finding))
        for view in self.nodes.values():
            view.heard_at = event.at
        self._changed = None

    def load_fleet(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.topology.load(fleet)
        self._on = self._changed = None
        self.workers = {w.name: w for w in fleet.workers}
        self._order = {w.name: number for number, w in enumerate(fleet.workers)}
        self.pools = {p.name: p for p in fleet.pools}
        self.standby_up &= {w.name for w in fleet.workers if w.standby}  # the others are meant to serve always
        for name in sorted(self.expected_nodes()):  # in one order, whatever Python's hashes are
            self.nodes.setdefault(name, NodeView(heard_at=self.now))

    def expected_nodes(self) -> set[str]:
        return {*self.fleet.nodes, *(n for w in self.fleet.workers for n in w.nodes)}

    def view(self, worker: str) -> WorkerView:
        return self.views.setdefault(worker, WorkerView())

    def gpus_of(self, worker: Worker) -> tuple[Component, ...]:
        """Configured ranks, or what the agents say it holds."""
        return worker.gpus or self.view(worker.name).gpus

    def may_run(self, worker: str | None, node: str) -> bool:
        """Whether this worker is configured, and may run on this node as far as that is configured or known."""
        known = self.workers.get(worker or "")
        if known is None:
            return False
        places = {*known.nodes, *(g.node for g in known.gpus)}
        return not places or node in places

    def learn_gpus(self, worker: str, node: str, pcis: tuple[str, ...]) -> bool:
        """Take in what a node says a worker holds; returns whether that is news. What is no address is left out."""
        view, known = self.view(worker), self.workers[worker]
        before, was = view.gpus, self._places(known)
        view.gpus = tuple(g for g in before if g.node != node) + tuple(_gpus(node, pcis))
        if view.gpus == before:
            return False
        if self._on is not None:  # place by place: a new leader learns ten thousand of them within seconds
            places = self._places(known)
            for place in was - places:
                self._on[place].remove(known)
            for place in places - was:
                there = self._on.setdefault(place, [])
                there.append(known)
                there.sort(key=lambda w: self._order[w.name])
        return True

    def touching(self, component: Component) -> list[Worker]:
        """Every serving group that lives on what this component is: the blast radius, never just the one GPU."""
        if component.worker is not None:
            named = self.workers.get(component.worker)
            return [named] if named else []
        if component.gpu is not None:
            return self._there(str(Component(node=component.node, device=component.device)))
        return self.on_node(component.node)

    def meant(self, target: str) -> list[Worker]:
        """The workers that a person's word means: the one of that name, or all that touch the node or component."""
        if target in self.workers:
            return [self.workers[target]]
        try:
            return self.touching(Component.parse(target))
        except ValueError:
            return []

    def in_service_beside(self, target: str) -> list[str]:
        """Workers on the node of this written component that have traffic or may soon."""
        there = self.on_node(Component.parse(target).node)
        return [w.name for w in there if self.state_of(w) in SERVES]

    def on_node(self, node: str) -> list[Worker]:
        return self._there(node)

    def _there(self, place: str) -> list[Worker]:
        if self._on is None:
            self._on = {}
            for worker in self.workers.values():
                for name in self._places(worker):
                    self._on.setdefault(name, []).append(worker)
        return self._on.get(place, [])

    def _places(self, worker: Worker) -> set[str]:
        gpus = self.gpus_of(worker)
        return {*worker.nodes, *(g.node for g in gpus), *map(str, gpus)}

    def state_of(self, worker: Worker) -> WorkerState:
        drain = self.open_drain(worker.name)
        if drain and drain.state is DrainState.RETURNING:
            return WorkerState.ACTIVE  # verified: the published table is what puts a plain vLLM back, and Reroute confirms it
        if worker.standby and worker.name not in self.standby_up:
            return WorkerState.STANDBY
        if drain and gentle(drain):
            return WorkerState.CORDONED if drain.response is Response.CORDON else WorkerState.ACTIVE
        # A standby that is configured as one no more, in the middle of its start, does not serve yet.
        return WorkerState.OUT if drain and (drain.kind != "start" or not worker.standby) else WorkerState.ACTIVE

    def in_panic(self, pool: str) -> bool:
        """Whether the gateways try all of this pool's workers, or did until moments ago: nothing is known of any single one."""
        condition = self.conditions.get(Component(node=pool, device="pool"), PANIC)
        return pool in self.relays.panics or (condition is not None and condition.present)

    def keeps(self, response: Response) -> float:
        """What part of the new sessions that it is worth a worker is still given under this response."""
        return {Response.NONE: 1.0, Response.STEER: self.policy.pace.steer_share}.get(response, 0.0)

    def share(self, worker: Worker) -> float:
        """What part of them this worker is given while it is ACTIVE."""
        drain = self.open_drain(worker.name)
        return self.keeps(drain.response) if drain and gentle(drain) and drain.response is Response.STEER else 1.0

    def held(self, worker: Worker, keep: str) -> Hold | None:
        """A person's unexpired word about this worker, its node, a GPU of it, or whatever else means it (``meant``)."""
        names = {worker.name, *worker.nodes, *(str(g) for g in self.gpus_of(worker)), *(g.node for g in self.gpus_of(worker))}
        for target, hold in self.holds.items():
            counts = hold.keep == keep and (hold.until is None or hold.until > self.now)
            if counts and (target in names or ("/" in target and worker in self.meant(target))):
                return hold
        return None


def _gpus(node: str, pcis: tuple[str, ...]) -> Iterator[Component]:
    for pci in pcis:
        with suppress(ValueError):  # a site's own probe may write there what it likes
            yield gpu_component(node, pci)

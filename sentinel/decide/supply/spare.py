"""What a group that is down leaves over: its healthy GPUs, and whether a whole group could be made of such.

This module exists because a serving group that loses one rank is down as a whole, and seven good GPUs then wait for the eighth.
What always holds:

* Only what is measured to be clean is offered: the GPU has nothing of weight against it, its node reports, and nothing that
  would take the node out stands. What a person took or holds out is not offered.
* GPUs can be made into a group only within one NVLink domain.
* Nothing here acts. Packing ranks anew is the serving system's and a person's; sentinel says what there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sentinel.decide.faults.incidents import Incidents
from sentinel.decide.state.picture import Picture
from sentinel.model import Component, DrainState, Severity, Suspect, Worker, WorkerState

_DOWN = (DrainState.STOPPING, DrainState.OUT, DrainState.REPAIRING)
_STEP = "spare"


class Spare:
    def __init__(self, picture: Picture, incidents: Incidents) -> None:
        self.p = picture
        self.incidents = incidents
        self._said: set[str] = set()  # drains
        self._against: set[Component] = set()

    def tell(self) -> None:
        """On ticks: say once, in the incident that took a group out, what it leaves over."""
        out = [d for d in self.p.open_drains() if d.state is DrainState.OUT]
        news = [d for d in out if d.id not in self._said]
        self._said = {d.id for d in out}
        if news:
            self._look()
        for drain in news:
            worker, incident = self.p.workers.get(drain.worker), self.p.incidents.get(drain.incident)
            if worker is None or incident is None or drain.kind != "drain":
                continue
            clean, sick = self._split(worker)
            if incident.closed_at is not None or not sick or not clean or any(s.what == _STEP for s in incident.history):
                continue
            where = f" in {domain}" if (domain := self._domain(worker)) else ""
            why = f"{len(clean)} of the {len(clean) + len(sick)} GPUs of {worker.name} are clean{where}: sentinel spare"
            self.incidents.note(incident, _STEP, why)

    def offers(self) -> list[dict[str, Any]]:
        """Per domain and role: the groups that are down, their clean GPUs, and what could be made of them. Plain JSON values."""
        self._look()
        found: dict[tuple[str, str, str], dict[str, Any]] = {}
        for worker in self._down():
            clean, sick = self._split(worker)
            domain = self._domain(worker)
            if not sick or not clean:  # nothing is wrong with its hardware, or nothing is left of it
                continue
            offer = found.setdefault(
                (worker.pool, worker.role.value, domain),
                {"pool": worker.pool, "role": worker.role.value, "domain": domain, "size": 0, "groups": [], "gpus": []},
            )
            offer["groups"].append(worker.name)
            offer["size"] = max(offer["size"], len(clean) + len(sick))
            offer["gpus"] += [self._gpu(g, worker.name) for g in clean]
        for offer in found.values():
            standby, whole = self._standby(offer)
            offer["standby"] = [self._gpu(g, w.name) for w in standby for g in self._split(w)[0]]
            offer["could"] = self._could(offer, whole)
        return list(found.values())

    # -----------------------------------------------------------------------------------------------------------------

    def _down(self) -> Iterator[Worker]:
        for drain in self.p.open_drains():
            worker = self.p.workers.get(drain.worker)
            ours = drain.kind == "drain" and drain.by == "sentinel" and drain.state in _DOWN
            if worker and ours and not self.p.held(worker, "out"):
                yield worker

    def _standby(self, offer: dict[str, Any]) -> tuple[list[Worker], list[Worker]]:
        """Stopped workers of the role in the domain, and those of them that could start as they are."""
        there = [
            w for w in self.p.workers.values()
            if w.standby and w.role.value == offer["role"] and self.p.state_of(w) is WorkerState.STANDBY
            and self.p.open_drain(w.name) is None and not self.p.held(w, "out") and self._domain(w) == offer["domain"] != ""
        ]  # fmt: skip
        return there, [w for w in there if self.p.gpus_of(w) and not self._split(w)[1]]

    def _could(self, offer: dict[str, Any], whole: list[Worker]) -> str:
        spare, size = len(offer["gpus"]), offer["size"]
        kind = f"a whole {offer['role']} group of {size}"
        where = f"in {offer['domain']}" if offer["domain"] else "of one node"
        if not offer["domain"]:
            return f"the NVLink domain is not known, so nothing is said about {kind}"
        if spare >= size:
            return f"{kind} {where} out of these {spare}"
        if whole:
            return f"start {whole[0].name}, a standby {where}, as it is; these {spare} alone are too few for {kind}"
        both = spare + len(offer["standby"])
        if both >= size:
            return f"{kind} {where} out of these {spare} and {len(offer['standby'])} clean GPUs of standbys"
        return f"{both} of the {size} GPUs of {kind} {where}: too few"

    def _split(self, worker: Worker) -> tuple[list[Component], list[Component]]:
        """Its GPUs: those that are measured clean, and the others."""
        clean: list[Component] = []
        other: list[Component] = []
        for gpu in self.p.gpus_of(worker):
            (clean if self._clean(gpu) else other).append(gpu)
        return clean, other

    def _clean(self, gpu: Component) -> bool:
        view = self.p.nodes.get(gpu.node)
        if view is None or not view.reported or self.p.now - view.heard_at >= self.p.policy.timing.silent_after:
            return False
        return not {gpu, Component(node=gpu.node)} & self._against

    def _look(self) -> None:
        """Take in once what all the questions that follow rest on: the GPUs and the nodes that something is said against."""
        weighty = (c.finding for c in self.p.conditions.present() if c.finding.severity is not Severity.INFO)
        mine = [f.component for f in weighty if f.suspect is Suspect.SELF and f.component.gpu is not None]
        mine += [f.component for i in self.p.open_incidents() for f, _ in self.incidents.demands(i) if f.component.worker is None]
        # Another device of a node (its driver, an adapter) is one that all its GPUs stand on.
        self._against = {Component(node=c.node, device=c.device if c.gpu is not None else "") for c in mine}

    def _domain(self, worker: Worker) -> str:
        """Its NVLink domain, if all of it is in one."""
        if worker.domain:
            return worker.domain
        known = {self.p.topology.domain(g.node) for g in self.p.gpus_of(worker)}
        return known.pop() if len(known) == 1 else ""

    def _gpu(self, gpu: Component, group: str) -> dict[str, str]:
        return {"node": gpu.node, "pci": gpu.gpu or "", "group": group}

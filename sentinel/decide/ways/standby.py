"""Standby workers: started for what a pool lacks, stopped again when long unneeded.

What always holds: as many are started as the shortage needs and no more, those of the scarcer role first; one that is held out,
stands on something broken or has just failed to start is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sentinel.decide.state.mode import acts
from sentinel.decide.state.picture import Picture
from sentinel.decide.supply.table import Table
from sentinel.decide.supply.worth import NEAR, roles_of
from sentinel.decide.ways.drain import Drains
from sentinel.model import Drain, DrainState, Response, Role, Worker, WorkerState

_AGAIN_S = 600.0  # after a failed start: what keeps it from starting is rarely over sooner


class Standbys:
    def __init__(self, picture: Picture, drains: Drains, table: Table) -> None:
        self.p = picture
        self.drains = drains
        self.table = table

    def start(self, pool: str, lacks: Mapping[Role, float], why: str) -> dict[Role, float]:
        """Start standbys of this pool for the sessions that each role lacks; returns what is on its way, by role."""
        coming = dict.fromkeys(lacks, 0.0)
        standbys = [self.p.workers[n] for n in self.table.standbys.get(pool, ())]
        for worker in standbys:
            if self._starting(worker):
                self._add(coming, worker)
        for role in sorted(lacks, key=lambda r: lacks[r], reverse=True):
            free = self._free(standbys, role)
            while lacks[role] - coming[role] > NEAR and (chosen := next(free, None)):
                if not acts(self.p):
                    self.p.would[f"start {chosen.name}"] = (self.p.now, why)
                    break
                self.drains.request(self._drain(chosen, "start", Response.NONE, DrainState.STARTING, why))
                self._add(coming, chosen)
        return coming

    def retire(self, worker: Worker, unneeded_since: float, why: str) -> None:
        """Stop it when it has not been needed for long and nothing else is under way with it."""
        after = self.p.policy.capacity.standby_idle_after
        if self.p.now - unneeded_since < after or self.p.open_drain(worker.name) or self.p.held(worker, "in"):
            return
        why = f"{worker.pool} {why} for {after:.0f} s"
        if not acts(self.p):
            self.p.would[f"stop {worker.name}"] = (self.p.now, why)
            return
        self.drains.request(self._drain(worker, "retire", Response.DRAIN, DrainState.REQUESTED, why))

    def _add(self, coming: dict[Role, float], worker: Worker) -> None:
        for role in roles_of(worker):
            if role in coming:
                coming[role] += self.table.worth(worker)

    def _free(self, standbys: list[Worker], role: Role) -> Iterator[Worker]:
        for w in standbys:
            idle = role in roles_of(w) and w.name not in self.p.standby_up and self.p.open_drain(w.name) is None
            if not idle or self.p.held(w, "out") or self._failed_lately(w) or self.drains.incidents.about(w.name):
                continue
            if not self.drains.repairs.waits_to_start(w):
                yield w

    def _starting(self, worker: Worker) -> bool:
        drain = self.p.open_drain(worker.name)
        if drain is None or drain.kind != "start" or drain.state is DrainState.OUT:
            return False
        return self.p.state_of(worker) is WorkerState.STANDBY  # one that returns is counted as ready

    def _failed_lately(self, worker: Worker) -> bool:
        return any(
            d.worker == worker.name and d.kind == "start" and d.state is DrainState.CANCELLED and self.p.now - d.since < _AGAIN_S
            for d in self.p.drains.values()
        )

    def _drain(self, worker: Worker, kind: str, response: Response, state: DrainState, why: str) -> Drain:
        return Drain(
            id=self.p.new_id("start" if kind == "start" else "retire"),
            worker=worker.name,
            kind=kind,  # type: ignore[arg-type]
            response=response,
            state=state,
            reason=why,
            requested_at=self.p.now,
        )

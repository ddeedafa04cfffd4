"""Where new sessions go: the route table, overflow by weight, standby workers started and stood down.

What always holds:

* The table says of every worker what its drain says; its version rises with every change and nothing else.
* Weight leaves a short pool at once and returns gently: only after ``shift_back_after``, a step at a time.
* Short means: what is ready, per role, is less than the measured demand with headroom; demand that could not be measured
  counts as the pool's whole capacity, so that doubt moves traffic to where capacity is certain.
* A standby is started only for a shortage that the running overflow cannot carry, and stopped only when long unneeded.
"""

from __future__ import annotations

from sentinel.decide.budget import IN_SERVICE, roles_of
from sentinel.decide.drain import Drains
from sentinel.decide.picture import Picture
from sentinel.decide.table import Table
from sentinel.model import Drain, DrainState, Pool, Response, Role, RoutePool, Routes, Worker


class Capacity:
    def __init__(self, picture: Picture, drains: Drains) -> None:
        self.p = picture
        self.drains = drains
        self.table = Table(picture)
        self._demand: dict[tuple[str, Role], float] = {}  # sessions running and waiting, as of the last tick
        self._short_at: dict[str, float] = {}  # pool → when its weight last had to fall
        self._stepped_at: dict[str, float] = {}
        self._needed_at: dict[str, float] = {}  # overflow pool → when it last had weight

    def measure(self) -> None:
        """On ticks: sum what the looks at workers say is running and waiting; a pool that nobody could measure is left out."""
        self._demand.clear()
        for worker in self.p.workers.values():
            load = self.p.view(worker.name).load
            if load is not None and self.p.state_of(worker) in IN_SERVICE:
                for role in roles_of(worker):
                    key = (worker.pool, role)
                    self._demand[key] = self._demand.get(key, 0.0) + load

    def share(self, pool: Pool) -> float:
        """What part of its sessions this pool can carry now, by its scarcest role, 0..1."""
        share = 1.0
        for role in (Role.PREFILL, Role.DECODE):
            total = self.table.regular[pool.name, role]
            if total == 0:
                continue
            ready = self.table.ready[pool.name, role]
            if ready >= total:
                continue
            demand = self._demand.get((pool.name, role))
            need = total if demand is None else min(total, max(demand * self.p.policy.capacity.headroom, 1e-9))
            share = min(share, ready / need)
        return max(0.0, share)

    def refresh(self) -> None:
        """Bring the table up to date; publish when it differs from the last one."""
        self.table.refresh()
        weights = self._weights()
        pools = tuple(
            RoutePool(pool=name, weight=round(weights.get(name, 0.0), 4), workers=self.table.rows(name))
            for name in self.p.pools
        )
        if pools != self.p.routes.pools:
            why = self._difference(pools)
            # From the clock where it is ahead, so that a store that lost its data does not send versions backwards.
            version = max(self.p.routes.version + 1, int(self.p.now * 1000))
            self.p.put_routes(Routes(version=version, at=self.p.now, why=why, pools=pools))

    def _weights(self) -> dict[str, float]:
        weights: dict[str, float] = {}
        for pool in self.p.pools.values():
            if not pool.primary:
                continue
            kept = self._gently(pool, self.share(pool) if pool.overflow else 1.0)
            weights[pool.name] = weights.get(pool.name, 0.0) + kept
            rest = 1.0 - kept
            for name in pool.overflow:
                if rest <= 0:
                    break
                ready = self._carries(name, pool.name)
                part = min(rest, ready)
                last = name == pool.overflow[-1]
                weights[name] = weights.get(name, 0.0) + (rest if last and ready > 0 else part)
                self._needed_at[name] = self.p.now
                if part < rest:
                    self._start_standby(name, f"{pool.name} is short by {rest:.0%} and {name} can carry {ready:.0%}")
                rest = 0.0 if last and ready > 0 else rest - part
            weights[pool.name] += max(0.0, rest)  # nowhere else to go: better slow than refused
        return weights

    def _gently(self, pool: Pool, target: float) -> float:
        """Down at once; up only after a hold-down and then a step at a time."""
        current = next((r.weight for r in self.p.routes.pools if r.pool == pool.name), 1.0)
        rules = self.p.policy.capacity
        if target <= current:
            if target < 1.0:
                self._short_at[pool.name] = self.p.now
            return target
        since = self._short_at.setdefault(pool.name, self.p.now)
        if self.p.now - since < rules.shift_back_after:
            return current
        if self.p.now - self._stepped_at.get(pool.name, 0.0) < rules.shift_back_every:
            return current
        self._stepped_at[pool.name] = self.p.now
        return min(target, current + rules.shift_back_step)

    def _carries(self, overflow: str, primary: str) -> float:
        """What part of the primary's sessions the overflow pool's ready workers are worth, by the scarcest role."""
        parts = []
        for role in (Role.PREFILL, Role.DECODE):
            size = self.table.regular[primary, role]
            if size:
                parts.append(self.table.ready[overflow, role] / size)
        return min(parts, default=0.0)

    # -- standby ----------------------------------------------------------------------------------------------------

    def _start_standby(self, pool: str, why: str) -> None:
        """One standby per role at a time: each start may be enough, and starting all at once helps nobody."""
        for role in self.table.roles(pool):
            here = [self.p.workers[e.worker] for e in self.table.rows(pool)]
            standbys = [w for w in here if w.standby and role in roles_of(w)]
            if any(self._starting(w) for w in standbys):
                continue
            idle = [w for w in standbys if w.name not in self.p.standby_up and self.p.open_drain(w.name) is None]
            may = (w for w in idle if not self.p.held(w, "out") and not self._failed_lately(w))
            free = next((w for w in may if not self.drains.incidents.about(w.name)), None)
            if free:
                self.drains.request(self._drain(free, "start", Response.NONE, DrainState.STARTING, why))

    def _starting(self, worker: Worker) -> bool:
        drain = self.p.open_drain(worker.name)
        return drain is not None and drain.kind == "start" and drain.state is not DrainState.OUT

    def _failed_lately(self, worker: Worker) -> bool:
        return any(
            d.worker == worker.name and d.kind == "start" and d.state is DrainState.CANCELLED and self.p.now - d.since < 600
            for d in self.p.drains.values()
        )

    def stand_down(self) -> None:
        """On ticks: stop standbys whose pool has carried no weight for long."""
        idle_after = self.p.policy.capacity.standby_idle_after
        for name in sorted(self.p.standby_up):
            worker = self.p.workers[name]
            weight = next((r.weight for r in self.p.routes.pools if r.pool == worker.pool), 0.0)
            since = self._needed_at.setdefault(worker.pool, self.p.now)
            if weight > 0 or self.p.now - since < idle_after or self.p.open_drain(name) or self.p.held(worker, "in"):
                continue
            why = f"{worker.pool} has carried no traffic for {idle_after:.0f} s"
            self.drains.request(self._drain(worker, "retire", Response.DRAIN, DrainState.REQUESTED, why))

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

    def _difference(self, pools: tuple[RoutePool, ...]) -> str:
        """What changed against the last table, in words."""
        old_weight = {r.pool: r.weight for r in self.p.routes.pools}
        old_rows = {r.pool: r.workers for r in self.p.routes.pools}
        changes = []
        for pool in pools:
            before = old_rows.get(pool.pool, ())
            if len(before) == len(pool.workers) and before is not pool.workers:
                pairs = zip(pool.workers, before, strict=True)  # a row that did not change is the same object
                changes += [f"{e.worker} {e.state.value}" for e, b in pairs if e is not b and e != b]
        changes += [f"{r.pool} at {r.weight:.0%}" for r in pools if old_weight.get(r.pool, r.weight) != r.weight]
        return ", ".join(changes[:8]) + (f" and {len(changes) - 8} more" if len(changes) > 8 else "") or "first table"

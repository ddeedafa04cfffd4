"""Where new sessions go: the route table, overflow by weight, standby workers started and stood down.

What always holds:

* The table says of every worker what its drain says; its version rises with every change, and above whatever gateways obey: a
  store that lost its data, and a leader whose clock is behind, would else publish what they ignore.
* Weight leaves a short pool at once and returns gently: only after ``shift_back_after``, a step at a time.
* Short means: what is ready of the scarcer role is less than the measured demand with headroom; demand that could not be
  measured counts as all that the pool can carry, so that doubt moves traffic to where capacity is certain.
* What a pool lacks is looked for in this order: its own standbys, each overflow pool with its standbys, and more of them
  (``shortage``). A role that has plenty is never added to.
"""

from __future__ import annotations

from sentinel.decide.state.picture import Picture
from sentinel.decide.supply.shortage import Shortage
from sentinel.decide.supply.table import Changed, Table
from sentinel.decide.supply.worth import IN_SERVICE, NEAR, roles_of
from sentinel.decide.ways.drain import Drains
from sentinel.decide.ways.standby import Standbys
from sentinel.model import Pool, Role, RouteEntry, RoutePool, Routes, Worker


class Capacity:
    def __init__(self, picture: Picture, drains: Drains) -> None:
        self.p = picture
        self.table = Table(picture)
        self.standbys = Standbys(picture, drains, self.table)
        self.shortage = Shortage(picture, drains.incidents, self.table)
        self._demand: dict[tuple[str, Role], float] = {}  # sessions running and waiting, as of the last tick
        self._short_at: dict[str, float] = {}  # pool → when its weight last had to fall
        self._stepped_at: dict[str, float] = {}
        self._needed_at: dict[str, float] = {}  # overflow pool → when it last had weight

    def measure(self) -> None:
        """On ticks: sum what the looks at workers say is running and waiting; a role that nobody could measure is left out.

        One that was not measured is taken to be full. While a pool has given weight away, what it is asked for is not all that
        it would be asked for: what was measured before counts on.
        """
        self.table.refresh()
        seen: dict[tuple[str, Role], float] = {}
        for name, view in self.p.views.items():
            worker = self.p.workers.get(name) if view.load is not None else None
            if worker is not None and self.p.state_of(worker) in IN_SERVICE:
                for role in roles_of(worker):
                    key = (worker.pool, role)
                    seen[key] = seen.get(key, self.table.ready[key]) - self.table.worth(worker) + (view.load or 0)
        weights = {r.pool: r.weight for r in self.p.routes.pools}
        before, self._demand = self._demand, {}
        for key, sessions in seen.items():
            pool = self.p.pools.get(key[0])
            if weights.get(key[0], 1.0) >= 1.0 or pool is None or not pool.primary:
                self._demand[key] = sessions
            elif key in before:
                self._demand[key] = max(before[key], sessions)

    def needs(self, pool: str, role: Role) -> float | None:
        """Sessions that a role has to carry, headroom included; None: not measured."""
        demand = self._demand.get((pool, role))
        return None if demand is None else demand * self.p.policy.capacity.headroom

    @property
    def stale(self) -> bool:
        """Whether the published table may differ from what the drains say."""
        return self.p.stale or self.table.touched or self.p.relays.newest > self.p.routes.version

    def share(self, pool: Pool, without: Worker | None = None) -> float:
        """What part of its sessions this pool can carry now, by its scarcest role, 0..1; as if ``without`` did not serve."""
        share, standing = 1.0, self.table.standing(pool.name)
        for role in standing.total:
            ready = standing.ready[role]
            if without is not None and role in roles_of(without):
                ready -= self.table.worth(without)
            need = self._need(pool.name, role, standing.whole)
            if ready <= NEAR:
                return 0.0
            if ready < need - NEAR:
                share = min(share, ready / need)
        return share

    def _need(self, pool: str, role: Role, whole: float) -> float:
        needs = self.needs(pool, role)
        return whole if needs is None else min(whole, needs)

    def refresh(self) -> None:
        """Bring the table up to date; publish when it differs from the last one."""
        self.table.refresh()
        news = self.table.take_news()
        weights = self._weights()
        pools = tuple(
            RoutePool(pool=name, weight=round(weights.get(name, 0.0), 4), workers=self.table.rows(name))
            for name in self.p.pools
        )
        obeyed = self.p.relays.newest
        if pools != self.p.routes.pools or obeyed > self.p.routes.version:
            why = self._difference(pools, news) or (f"above table {obeyed}, which gateways obey" if obeyed else "first table")
            # From the clock where it is ahead, so that a store that lost its data does not send versions backwards.
            version = max(self.p.routes.version + 1, obeyed + 1, int(self.p.now * 1000))
            self.p.put_routes(Routes(version=version, at=self.p.now, why=why, pools=pools), self._changed(pools, news))

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
                rest = 0.0 if last and ready > 0 else rest - part
            weights[pool.name] += max(0.0, rest)  # nowhere else to go: better slow than refused
            self._fill(pool)
        return weights

    def _fill(self, pool: Pool) -> None:
        """Start what carries the sessions that a short pool lacks, and tell what is lacking even then."""
        standing = self.table.standing(pool.name)
        lacks = {r: self._need(pool.name, r, standing.whole) - standing.ready[r] for r in standing.total}
        if all(lack <= NEAR for lack in lacks.values()):
            self.shortage.tell(pool.name, {})
            return
        why = f"{pool.name} {standing.sentence()}"
        coming = self.standbys.start(pool.name, lacks, why)
        lacks = {r: lack - coming[r] for r, lack in lacks.items()}
        for name in pool.overflow:
            lack = max(lacks.values())
            if lack <= NEAR:
                break
            ready = {r: self.table.ready[name, r] for r in lacks}
            coming = self.standbys.start(name, {r: lack - ready[r] for r in lacks}, f"{why}; {name} has to carry {lack:g} of them")
            there = min(ready[r] + coming[r] for r in lacks)  # a session needs both roles in one pool
            lacks = {r: n - there for r, n in lacks.items()}
        self.shortage.tell(pool.name, {r: n for r, n in lacks.items() if n > NEAR})

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
        standing = self.table.standing(primary)
        asked = max((self._need(primary, role, standing.whole) for role in standing.total), default=0.0)
        ready = min((self.table.ready[overflow, role] for role in standing.total), default=0.0)
        return ready / asked if asked > NEAR else 0.0

    def stand_down(self) -> None:
        """On ticks: stop standbys that nobody has needed for long."""
        weights = {r.pool: r.weight for r in self.p.routes.pools}
        for name in sorted(self.p.standby_up):
            worker = self.p.workers[name]
            pool = self.p.pools.get(worker.pool)
            primary = pool is not None and pool.primary
            if self.share(pool, without=worker) < 1.0 if pool and primary else weights.get(worker.pool, 0.0) > 0:
                self._needed_at[worker.pool] = self.p.now
            since = self._needed_at.setdefault(worker.pool, self.p.now)
            self.standbys.retire(worker, since, "has carried no traffic" if not primary else "has been whole without it")

    def _changed(self, pools: tuple[RoutePool, ...], news: list[Changed] | None) -> tuple[RoutePool, ...] | None:
        """The pools in which anything differs from the last table, with the rows that do, in its order."""
        if news is None:
            return None
        rows: dict[str, list[RouteEntry]] = {}
        for old, row in sorted(news, key=lambda pair: self.table.place(pair[1].worker)):
            if row != old:
                rows.setdefault(self.p.workers[row.worker].pool, []).append(row)
        weights = {r.pool: r.weight for r in self.p.routes.pools}
        return tuple(
            RoutePool(pool=p.pool, weight=p.weight, workers=tuple(rows.get(p.pool, ())))
            for p in pools
            if p.pool in rows or p.weight != weights.get(p.pool)
        )

    def _difference(self, pools: tuple[RoutePool, ...], news: list[Changed] | None) -> str:
        """What changed against the last table, in words; "" when nothing did."""
        old_weight = {r.pool: r.weight for r in self.p.routes.pools}
        old_rows = {r.pool: r.workers for r in self.p.routes.pools}
        changes = [f"{e.worker} {e.state.value}" for _, e in news or ()]
        for pool in pools if news is None else ():
            before = old_rows.get(pool.pool, ())
            if len(before) == len(pool.workers) and before is not pool.workers:
                pairs = zip(pool.workers, before, strict=True)  # a row that did not change is the same object
                changes += [f"{e.worker} {e.state.value}" for e, b in pairs if e is not b and e != b]
        changes += [f"{r.pool} at {r.weight:.0%}" for r in pools if old_weight.get(r.pool, r.weight) != r.weight]
        return ", ".join(changes[:8]) + (f" and {len(changes) - 8} more" if len(changes) > 8 else "")

"""How much doubt the fleet can afford: what holds an automatic drain back.

What always holds: a drain that is budgeted never takes a role of a pool below its floor, never more than a share of the role
or of one NVLink domain at once, never more than the configured number per window; a drain of what is already dead is never
held back; and what is held back is said in one sentence with what would unblock it.

The floor is a share of what the pool can carry. A role that has more than the other one can use (the surplus of a pool off its
prefill:decode ratio) may give that much more, but only where its demand is measured and leaves it idle: a ratio that is
configured wrongly must not empty a role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from sentinel.decide.picture import Picture
from sentinel.decide.table import Table
from sentinel.decide.worth import IN_SERVICE, NEAR, roles_of
from sentinel.model import Pool, Role, Worker

Demand = Callable[[str, Role], float | None]  # sessions that a pool's role is asked for, with headroom; None: not measured


class Budget:
    def __init__(self, picture: Picture, table: Table, demand: Demand) -> None:
        self.p = picture
        self.table = table
        self.demand = demand

    def blocks(self, worker: Worker) -> str:
        """Why this worker may not be drained on doubt now; "" when it may."""
        self.table.refresh()
        pool = self.p.pools[worker.pool]
        for role in roles_of(worker):
            why = self._floor(pool, role, worker) or self._share(pool, role, worker)
            if why:
                return why
        return self._count(pool, worker) or self._domain(pool, worker)

    def _floor(self, pool: Pool, role: Role, worker: Worker) -> str:
        total = self._total(pool, role)
        if total <= 0:
            return ""
        standing = self.table.standing(pool.name)
        serves = self.p.state_of(worker) in IN_SERVICE
        left = self.table.ready[pool.name, role] - (self.table.worth(worker) if serves else 0.0)
        line = pool.floor * total
        if standing.whole < total - NEAR:
            needed = self.demand(pool.name, role)
            if needed is not None:
                line = min(line, max(pool.floor * standing.whole, needed))
        if left >= line - NEAR:
            return ""
        carries = min([left, *(n for r, n in standing.ready.items() if r in standing.total and r is not role)])
        back = _names(n for n in self.table.out[pool.name, role] if n != worker.name)
        return (
            f"pool {pool.name} would keep {left:g} of {total:g} {role.value} capacity and carry {carries:g} of "
            f"{standing.whole:g} sessions, below its floor of {pool.floor:.0%} ({line:g}); "
            f"{f'return {back}, add' if back else 'add'} {role.value} workers, or drain {worker.name} by hand"
        )

    def _share(self, pool: Pool, role: Role, worker: Worker) -> str:
        total = self._total(pool, role)
        doubt = {**self.table.doubt[pool.name, role], worker.name: self.table.worth(worker)}
        out = sum(doubt.values())
        if total <= 0 or out <= pool.max_share * total + NEAR:
            return ""
        back = _names(n for n in doubt if n != worker.name)
        return (
            f"pool {pool.name} would have {out:g} of {total:g} {role.value} capacity out on doubt at once "
            f"(limit {pool.max_share:.0%}); {f'return {back} first, or ' if back else ''}drain {worker.name} by hand"
        )

    def _count(self, pool: Pool, worker: Worker) -> str:
        window = self.p.policy.budget.window
        recent: dict[str, float] = {}
        for role in roles_of(worker):
            recent |= self.table.recent(pool.name, role, self.p.now - window)
        if len(recent) < pool.max_doubtful_drains:
            return ""
        wait = min(recent.values()) + window - self.p.now
        return (
            f"{len(recent)} doubtful drains of pool {pool.name} in {window / 60:g} min (limit {pool.max_doubtful_drains}); "
            f"the next is possible in {max(0.0, wait):.0f} s, or drain {worker.name} by hand"
        )

    def _domain(self, pool: Pool, worker: Worker) -> str:
        peers = self.table.domains.get((worker.domain, worker.pool), {}) if worker.domain else {}
        total = sum(peers.values())
        doubt = [n for n in peers if any(n in self.table.doubt[pool.name, r] for r in (Role.PREFILL, Role.DECODE))]
        out = sum(mine for n, mine in peers.items() if n == worker.name or n in doubt)
        if len(peers) < 2 or out <= pool.max_domain_share * total + NEAR:
            return ""
        back = _names(n for n in doubt if n != worker.name)
        return (
            f"NVLink domain {worker.domain} would have {out:g} of {total:g} capacity out on doubt "
            f"(limit {pool.max_domain_share:.0%}); {f'return {back} first, or ' if back else ''}drain {worker.name} by hand"
        )

    def _total(self, pool: Pool, role: Role) -> float:
        """Configured sessions; of a pool that has nothing but standbys, what is started."""
        regular = self.table.regular[pool.name, role]
        if regular > 0:
            return regular
        return self.table.ready[pool.name, role] + sum(self.table.worth(self.p.workers[n]) for n in self.table.out[pool.name, role])


def _names(names: Iterable[str]) -> str:
    """The first three, in words."""
    few = [*islice(names, 4)]
    return ", ".join(few[:3]) + (" or another" if len(few) > 3 else "")

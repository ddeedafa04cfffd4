"""How much doubt the fleet can afford: what holds an automatic drain back.

What always holds: a drain that is budgeted never takes a role of a pool below its floor, never more than a share of the role
at once, no second worker of an NVLink domain past its share, never more than the configured number per window; a drain of what is
already dead is never held back, and where such leave a role below the floor a drain on doubt yields (``ways/yielding``); who is on
the way back counts as back once whatever routes to it has said so; and what is held back is said in one sentence with what would
unblock it.

The floor is a share of what the pool can carry. A role that has more than the other one can use (the surplus of a pool off its
prefill:decode ratio) may give that much more, but only where its demand is measured and leaves it idle: a ratio that is
configured wrongly must not empty a role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from sentinel.decide.state.picture import Picture
from sentinel.decide.supply.table import Table
from sentinel.decide.supply.worth import NEAR, roles_of
from sentinel.model import DrainState, Pool, Response, Role, Worker

Demand = Callable[[str, Role], float | None]  # sessions that a pool's role is asked for, with headroom; None: not measured


class Budget:
    def __init__(self, picture: Picture, table: Table, demand: Demand) -> None:
        self.p = picture
        self.table = table
        self.demand = demand

    def blocks(self, worker: Worker, response: Response = Response.DRAIN) -> str:
        """Why this response to a worker is more doubt than can be afforded now; "" when it is not.

        What only the mode keeps in (``Picture.shadows``) counts as if it were out: observing tells what would happen.
        """
        self.table.refresh()
        pool, keeps = self.p.pools[worker.pool], self.p.keeps(response)
        for role in roles_of(worker):
            why = self._floor(pool, role, worker, keeps) or self._share(pool, role, worker, keeps)
            if why:
                return why
        return self._count(pool, worker, keeps) or self._domain(pool, worker, keeps)

    def short(self, pool: Pool, role: Role) -> str:
        """Why this role gives less now than the floor of what the pool can carry; "" while it does not. Demand is not asked: a new
        leader has not measured any yet, and nobody is given back because of that."""
        standing, ready = self.table.standing(pool.name), self.table.ready[pool.name, role]
        line = pool.floor * standing.whole
        if role not in standing.total or ready >= line - NEAR:
            return ""
        kept = f"pool {pool.name} keeps {ready:g} of {standing.total[role]:g} {role.value} capacity"
        return f"{kept}, below its floor of {pool.floor:.0%} of {standing.whole:g} sessions ({line:g})"

    def _floor(self, pool: Pool, role: Role, worker: Worker, keeps: float) -> str:
        total = self._total(pool, role)
        if total <= 0:
            return ""
        standing = self.table.standing(pool.name)
        left = self.table.ready[pool.name, role] - self.table.given(worker) + self.table.worth(worker) * keeps
        left -= sum(self._shadows(pool, role, worker).values()) + self._unconfirmed(pool, role, worker)
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

    def _unconfirmed(self, pool: Pool, role: Role, but: Worker) -> float:
        """Sessions that the table gives to others of this role of whom nobody has confirmed yet that they take them again."""
        returning = (self.p.workers.get(d.worker) for d in self.p.open_drains() if d.state is DrainState.RETURNING)
        mine = (w for w in returning if w is not None and w is not but and w.pool == pool.name and role in roles_of(w))
        return sum(self.table.given(w) for w in mine)

    def _share(self, pool: Pool, role: Role, worker: Worker, keeps: float) -> str:
        total = self._total(pool, role)
        doubt = {**self.table.doubt[pool.name, role], **self._shadows(pool, role, worker, doubtful=True)}
        doubt[worker.name] = self.table.worth(worker) * (1.0 - keeps)
        out = sum(doubt.values())
        if total <= 0 or out <= pool.max_share * total + NEAR:
            return ""
        back = _names(n for n in doubt if n != worker.name)
        return (
            f"pool {pool.name} would have {out:g} of {total:g} {role.value} capacity out on doubt at once "
            f"(limit {pool.max_share:.0%}); {f'return {back} first, or ' if back else ''}drain {worker.name} by hand"
        )

    def _count(self, pool: Pool, worker: Worker, keeps: float) -> str:
        window, own = self.p.policy.budget.window, self.p.open_drain(worker.name)
        recent: dict[str, float] = {}
        for role in roles_of(worker):
            recent |= self.table.recent(pool.name, role, self.p.now - window)
            shadows = ((f"would/{n}", self.p.shadows[n].at) for n in self._shadows(pool, role, worker, doubtful=True))
            recent |= {n: at for n, at in shadows if self.p.now - at < window}
        if own is not None:
            recent.pop(own.id, None)  # what it is made now, it was not before
        spent = sum(self._cost(i) for i in recent)
        if spent + 1.0 - keeps <= pool.max_doubtful_drains + NEAR:
            return ""
        wait = min(recent.values(), default=self.p.now) + window - self.p.now
        return (
            f"{spent:g} doubtful drains of pool {pool.name} in {window / 60:g} min (limit {pool.max_doubtful_drains}); "
            f"the next is possible in {max(0.0, wait):.0f} s, or drain {worker.name} by hand"
        )

    def _cost(self, drain_id: str) -> float:
        """What a recent drain counts for: one, and one that only steers the part that it takes away."""
        kind, _, name = drain_id.partition("/")
        known = self.p.shadows.get(name) if kind == "would" else self.p.drains.get(drain_id)
        return 1.0 - self.p.keeps(known.response) if known else 1.0

    def _domain(self, pool: Pool, worker: Worker, keeps: float) -> str:
        peers = self.table.domains.get((worker.domain, worker.pool), {}) if worker.domain else {}
        total = sum(peers.values())
        doubt: dict[str, float] = {}
        for role in (Role.PREFILL, Role.DECODE):
            doubt |= self.table.doubt[pool.name, role] | self._shadows(pool, role, worker, doubtful=True)
        others = {n: cost for n, cost in doubt.items() if n in peers and n != worker.name}
        out = peers.get(worker.name, 0.0) * (1.0 - keeps) + sum(others.values())
        if not others or out <= pool.max_domain_share * total + NEAR:
            return ""  # the first one of a domain may be larger than the share (a prefill group is): the floor protects then
        back = _names(others)
        return (
            f"NVLink domain {worker.domain} would have {out:g} of {total:g} capacity out on doubt "
            f"(limit {pool.max_domain_share:.0%}); {f'return {back} first, or ' if back else ''}drain {worker.name} by hand"
        )

    def _shadows(self, pool: Pool, role: Role, but: Worker, *, doubtful: bool = False) -> dict[str, float]:
        """Sessions that the other workers of this role would lose to what the mode keeps in."""
        found: dict[str, float] = {}
        for name, shadow in self.p.shadows.items():
            w, incident = self.p.workers.get(name), self.p.incidents.get(shadow.incident)
            stands = incident is not None and incident.closed_at is None and self.p.open_drain(name) is None
            mine = w is not None and w is not but and w.pool == pool.name and role in roles_of(w)
            if w is not None and mine and stands and shadow.doubtful >= doubtful:
                found[name] = self.table.worth(w) * (1.0 - self.p.keeps(shadow.response))
        return found

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

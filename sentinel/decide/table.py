"""The route table's rows and each pool's sums, kept up to date worker by worker.

This module exists so that a storm of drains costs what changed and not what there is: with ten thousand workers, making the
whole table anew for each of 750 evictions would take half a minute. What always holds: after ``refresh`` every row and sum
says of every worker what its drain says.
"""

from __future__ import annotations

from collections import defaultdict

from sentinel.decide.budget import IN_SERVICE, roles_of
from sentinel.decide.picture import Picture
from sentinel.model import Role, RouteEntry


class Table:
    def __init__(self, picture: Picture) -> None:
        self.p = picture
        self.regular: dict[tuple[str, Role], float] = defaultdict(float)  # configured capacity, standbys left out
        self.ready: dict[tuple[str, Role], float] = defaultdict(float)  # in service, started standbys included
        self._rows: dict[str, dict[str, RouteEntry]] = {}  # pool → worker → row
        self._pools: dict[str, tuple[RouteEntry, ...]] = {}  # what was last handed out, kept while nothing changed

    def refresh(self) -> None:
        """Fold in what the picture says has changed since the last time."""
        changed = self.p.take_changed()
        if changed is None:
            self._rebuild()
            return
        for name in changed:
            worker = self.p.workers.get(name)
            old = self._rows.get(worker.pool, {}).get(name) if worker else None
            if worker is None or old is None:
                continue
            state = self.p.state_of(worker)
            if state is old.state:
                continue
            for role in roles_of(worker):
                was, now = old.state in IN_SERVICE, state in IN_SERVICE
                self.ready[worker.pool, role] += worker.capacity * (now - was)
            self._put(worker.pool, name)

    def rows(self, pool: str) -> tuple[RouteEntry, ...]:
        if pool not in self._pools:
            self._pools[pool] = tuple(self._rows.get(pool, {}).values())
        return self._pools[pool]

    def roles(self, pool: str) -> list[Role]:
        """The roles that somebody in this pool plays, standbys included."""
        rows = self._rows.get(pool, {})
        return [r for r in (Role.PREFILL, Role.DECODE) if any(e.role in (r, Role.BOTH) for e in rows.values())]

    def _rebuild(self) -> None:
        self.regular.clear()
        self.ready.clear()
        self._rows = {pool: {} for pool in self.p.pools}
        for worker in self.p.workers.values():
            self._put(worker.pool, worker.name)
            serves = self.p.state_of(worker) in IN_SERVICE
            for role in roles_of(worker):
                self.regular[worker.pool, role] += 0.0 if worker.standby else worker.capacity
                self.ready[worker.pool, role] += worker.capacity if serves else 0.0
        self._pools.clear()

    def _put(self, pool: str, name: str) -> None:
        w = self.p.workers[name]
        row = RouteEntry(worker=name, url=w.url, role=w.role, state=self.p.state_of(w), capacity=w.capacity)
        self._rows.setdefault(pool, {})[name] = row
        self._pools.pop(pool, None)

"""The route table's rows and each pool's sums, kept up to date worker by worker.

This module exists so that a storm of drains costs what changed and not what there is: with ten thousand workers, making the
whole table anew for each of 750 evictions would take half a minute. What always holds: after ``refresh`` every row and sum
says of every worker what its drain says; sums are sessions (``worth``).
"""

from __future__ import annotations

from collections import defaultdict

from sentinel.decide.state.picture import Picture
from sentinel.decide.supply.worth import Standing, roles_of, worth
from sentinel.model import Drain, Role, RouteEntry, Worker, WorkerState

Share = tuple[str, Role]  # a role of a pool
Changed = tuple[RouteEntry, RouteEntry]  # a row as it was published last, and as it is


class Table:
    def __init__(self, picture: Picture) -> None:
        self.p = picture
        self.touched = False  # something was folded in since the table was last published
        self._news: dict[str, Changed] | None = None  # the rows that changed since then; None: any of them
        self._place: dict[str, int] = {}  # worker → where its row stands among all
        self.regular: dict[Share, float] = defaultdict(float)  # configured capacity, standbys left out
        self.ready: dict[Share, float] = defaultdict(float)  # what is given, started standbys included
        self.groups: dict[Share, int] = defaultdict(int)  # configured workers, standbys left out
        self.standbys: dict[str, list[str]] = defaultdict(list)  # pool → names
        self.out: dict[Share, dict[str, None]] = defaultdict(dict)  # names of those that are out, the longest first
        self.doubt: dict[Share, dict[str, float]] = defaultdict(dict)  # of whoever has an open drain on doubt
        self.domains: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)  # NVLink domain and pool → its regular workers
        self._doubtful_at: dict[Share, dict[str, float]] = defaultdict(dict)  # drain on doubt → when it was decided
        self._rows: dict[str, dict[str, RouteEntry]] = {}  # pool → worker → row
        self._pools: dict[str, tuple[RouteEntry, ...]] = {}  # what was last handed out, kept while nothing changed

    def refresh(self) -> None:
        """Fold in what the picture says has changed since the last time."""
        changed = self.p.take_changed()
        self.touched = self.touched or changed is None or bool(changed)
        if changed is None:
            self._rebuild()
            return
        for name in sorted(changed):
            worker = self.p.workers.get(name)
            old = self._rows.get(worker.pool, {}).get(name) if worker else None
            if worker is None or old is None:
                continue
            self._judge(worker)
            row = self._row(worker)
            if row.state is old.state and row.capacity == old.capacity:
                continue
            for role in roles_of(worker):
                self.ready[worker.pool, role] += _takes(row) - _takes(old)
            self._put(worker.pool, row)
            if self._news is not None:
                self._news[worker.name] = (self._news.get(worker.name, (old,))[0], row)

    def take_news(self) -> list[Changed] | None:
        """The rows that changed since the last call, for whoever publishes them; None: any of them may have."""
        news, self._news, self.touched = self._news, {}, False
        return None if news is None else list(news.values())

    def place(self, worker: str) -> int:
        return self._place[worker]

    def rows(self, pool: str) -> tuple[RouteEntry, ...]:
        if pool not in self._pools:
            self._pools[pool] = tuple(self._rows.get(pool, {}).values())
        return self._pools[pool]

    def standing(self, pool: str) -> Standing:
        total = {r: n for r in (Role.PREFILL, Role.DECODE) if (n := self.regular[pool, r]) > 0}
        return Standing(total, {r: self.ready[pool, r] for r in (Role.PREFILL, Role.DECODE)})

    def worth(self, worker: Worker) -> float:
        return worth(self.p.pools.get(worker.pool), worker)

    def given(self, worker: Worker) -> float:
        """Sessions that it is given now in each role."""
        row = self._rows.get(worker.pool, {}).get(worker.name)
        return _takes(row) if row else 0.0

    def recent(self, pool: str, role: Role, since: float) -> dict[str, float]:
        """The drains on doubt of this role that were decided after ``since``, and when."""
        known = self._doubtful_at[pool, role]
        for drain_id in [i for i, at in known.items() if at <= since]:
            del known[drain_id]
        return known

    def _rebuild(self) -> None:
        self._news = None
        for sums in (self.regular, self.ready):
            sums.clear()
        self.groups.clear()
        for names in (self.standbys, self.out, self.doubt, self.domains, self._doubtful_at):
            names.clear()
        self._rows = {pool: {} for pool in self.p.pools}
        self._place = {}
        for worker in self.p.workers.values():
            row, mine = self._row(worker), self.worth(worker)
            self._place[worker.name] = len(self._place)
            self._put(worker.pool, row)
            self._judge(worker)
            for role in roles_of(worker):
                self.regular[worker.pool, role] += 0.0 if worker.standby else mine
                self.groups[worker.pool, role] += not worker.standby
                self.ready[worker.pool, role] += _takes(row)
            if worker.standby:
                self.standbys[worker.pool].append(worker.name)
            elif worker.domain:
                self.domains[worker.domain, worker.pool][worker.name] = mine
        for drain in self.p.drains.values():
            self._remember(drain)
        self._pools.clear()

    def _judge(self, worker: Worker) -> None:
        """Whether it is out, and on doubt."""
        drain, out = self.p.open_drain(worker.name), self.p.state_of(worker) is WorkerState.OUT
        for role in roles_of(worker):
            share = worker.pool, role
            if out:
                self.out[share][worker.name] = None
            else:
                self.out[share].pop(worker.name, None)
            if drain is not None and drain.doubtful:
                self.doubt[share][worker.name] = self.worth(worker) * (1.0 - self.p.keeps(drain.response))
            else:
                self.doubt[share].pop(worker.name, None)
        if drain is not None:
            self._remember(drain)

    def _remember(self, drain: Drain) -> None:
        worker = self.p.workers.get(drain.worker)
        if worker is not None and drain.doubtful:
            for role in roles_of(worker):
                self._doubtful_at[worker.pool, role][drain.id] = drain.requested_at

    def _row(self, w: Worker) -> RouteEntry:
        capacity = self.worth(w) * self.p.share(w)
        return RouteEntry(worker=w.name, url=w.url, role=w.role, state=self.p.state_of(w), capacity=capacity)

    def _put(self, pool: str, row: RouteEntry) -> None:
        self._rows.setdefault(pool, {})[row.worker] = row
        self._pools.pop(pool, None)


def _takes(row: RouteEntry) -> float:
    """New sessions that a row lets it have; one that is cordoned keeps what it has and gets none."""
    return row.capacity if row.state is WorkerState.ACTIVE else 0.0

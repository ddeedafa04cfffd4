"""Which model is served where: the published table seen through the configuration's pools and workers. Pure.

This module exists because the table speaks of pools and workers, and clients speak of models. What always holds:

* A request only ever goes to pools of its model; a pool without a ``model`` takes whatever no other pool is named for.
* A pool's Dynamo workers are one worker to the gateway: the frontend, which does its own KV routing (where there are several
  frontends over the same workers, each is one, with its part of what those are worth). It takes requests while
  one that answers (and, where roles are apart, one that prefills) is active, and weighs what those are worth together.
* ``models`` lists what would be answered now, not what is configured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from sentinel.model import Fleet, Role, RouteEntry, RoutePool, Routes, WorkerState

ANY = ""  # the model of pools that name none
_AWAY = frozenset({WorkerState.OUT, WorkerState.STANDBY})


def frontend_name(pool: str, number: int = 1) -> str:
    """What a pool's Dynamo frontend is called as a worker, in breakers, limits and metrics; further ones are numbered from 2."""
    return f"{pool}.frontend" if number == 1 else f"{pool}.frontend{number}"


class Plan:
    """One version of the route table, by model."""

    def __init__(self, routes: Routes, fleet: Fleet, frontends: Sequence[str] = ()) -> None:
        """``frontends``: base URLs of the Dynamo frontends; none: Dynamo workers cannot be reached."""
        self.version = routes.version
        model = {p.name: p.model for p in fleet.pools}
        dynamo = {w.name for w in fleet.workers if w.adapter == "dynamo"}
        by_model: dict[str, list[RoutePool]] = {}
        self.pool_of: dict[str, str] = {}  # worker → pool
        self.url_of: dict[str, str] = {}
        self.state_of: dict[str, WorkerState] = {}
        self.prefills = frozenset(e.worker for p in routes.pools for e in p.workers if e.role is Role.PREFILL)
        for pool in routes.pools:
            entries = tuple(_collapsed(pool, dynamo, frontends))
            shown = RoutePool(pool=pool.pool, weight=pool.weight, workers=entries)
            by_model.setdefault(model.get(pool.pool, ANY), []).append(shown)
            for entry in entries:
                self.pool_of[entry.worker], self.url_of[entry.worker] = pool.pool, entry.url
                self.state_of[entry.worker] = entry.state
        self._by_model = {name: Routes(version=routes.version, pools=tuple(pools)) for name, pools in by_model.items()}

    def pools(self, model: str) -> Routes | None:
        """The part of the table for one model; None: nobody serves it."""
        return self._by_model.get(model) or self._by_model.get(ANY)

    def tables(self) -> list[RoutePool]:
        """Every pool, as this gateway sees it."""
        return [pool for routes in self._by_model.values() for pool in routes.pools]

    def pool(self, name: str) -> Routes | None:
        """The part of the table for one pool, for requests that are in it already: also where it gets no new sessions."""
        return next((Routes(version=self.version, pools=(replace(p, weight=1.0),)) for p in self.tables() if p.pool == name), None)

    def names(self, model: str) -> list[str]:
        """The model's pools."""
        routes = self.pools(model)
        return [p.pool for p in routes.pools] if routes else []

    def members(self) -> dict[str, list[str]]:
        """Pool → workers in rotation."""
        found: dict[str, list[str]] = {}
        for worker, pool in self.pool_of.items():
            if self.state_of[worker] not in _AWAY:
                found.setdefault(pool, []).append(worker)
        return found

    def out(self, worker: str) -> bool:
        """Whether it has left rotation, so that its errors say nothing."""
        return self.state_of.get(worker, WorkerState.OUT) in _AWAY

    def models(self, closed: Callable[[str], bool]) -> list[str]:
        """Models with a worker that would take a request. ``closed``: of a worker's breaker."""
        return sorted(name for name, routes in self._by_model.items() if name and _served(routes.pools, closed))


def configured(fleet: Fleet) -> Routes:
    """What the configuration itself says, as a table of version 0."""
    return Routes(
        why="configuration",
        pools=tuple(
            RoutePool(
                pool=pool.name,
                weight=1.0 if pool.primary else 0.0,
                workers=tuple(
                    RouteEntry(
                        worker=w.name, url=w.url, role=w.role, capacity=w.capacity,
                        state=WorkerState.STANDBY if w.standby else WorkerState.ACTIVE,
                    )
                    for w in fleet.workers
                    if w.pool == pool.name
                ),
            )
            for pool in fleet.pools
        ),
    )  # fmt: skip


def _served(pools: Iterable[RoutePool], closed: Callable[[str], bool]) -> bool:
    for pool in pools:
        able = {e.role for e in pool.workers if pool.weight > 0 and e.state is WorkerState.ACTIVE and closed(e.worker)}
        if Role.BOTH in able or able >= {Role.PREFILL, Role.DECODE}:
            return True
    return False


def _collapsed(pool: RoutePool, dynamo: set[str], frontends: Sequence[str]) -> Iterable[RouteEntry]:
    behind = [e for e in pool.workers if e.worker in dynamo]
    yield from (e for e in pool.workers if e.worker not in dynamo)
    if not behind or not frontends:
        return
    active = [e for e in behind if e.state is WorkerState.ACTIVE]
    roles = {e.role for e in active}
    answers = [e for e in active if e.role is not Role.PREFILL]
    serves = bool(answers) and (Role.BOTH in roles or Role.PREFILL in roles or all(e.role is not Role.PREFILL for e in behind))
    for number, url in enumerate(frontends, 1):
        yield RouteEntry(
            worker=frontend_name(pool.pool, number),
            url=url,
            role=Role.BOTH,
            state=WorkerState.ACTIVE if serves else WorkerState.OUT,
            capacity=(sum(e.capacity for e in answers) or 1.0) / len(frontends),
        )

"""What serving groups are worth in sessions, and what a pool can carry with those it has.

This module exists so that a prefill group and a decoder are reckoned in one unit: a session needs both. What always holds:

* A pool carries no more than its scarcer role is worth; what the other role has beyond that is surplus and carries nothing.
* One prefill group and the ``decode_per_prefill`` decoders that it feeds carry ``sessions_per_prefill`` sessions. A worker that
  does both is worth an equal part of such a unit. A capacity other than 1 in the configuration is a worker's own word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sentinel.decide.state.picture import Picture
from sentinel.model import Pool, Role, Worker, WorkerState

IN_SERVICE = (WorkerState.ACTIVE, WorkerState.CORDONED)
UNSAID = 1.0  # the configuration's default
NEAR = 1e-6  # sums of sessions are kept by adding and taking away: two that differ by less are equal


def roles_of(worker: Worker) -> tuple[Role, ...]:
    return (Role.PREFILL, Role.DECODE) if worker.role is Role.BOTH else (worker.role,)


def worth(pool: Pool | None, worker: Worker) -> float:
    """Sessions that this worker carries in each role that it plays."""
    if worker.capacity != UNSAID or pool is None:
        return worker.capacity
    if worker.role is Role.PREFILL:
        return pool.sessions_per_prefill
    parts = pool.decode_per_prefill if worker.role is Role.DECODE else 1.0 + pool.decode_per_prefill
    return pool.sessions_per_prefill / parts


def given_to(p: Picture, worker: Worker) -> float:
    """Sessions that it is given now in each role: its part of what it is worth, while it is ACTIVE."""
    return worth(p.pools.get(worker.pool), worker) * p.share(worker) if p.state_of(worker) is WorkerState.ACTIVE else 0.0


class Standing(NamedTuple):
    """One pool's sessions by role: configured (standbys left out), and in service (started standbys included)."""

    total: Mapping[Role, float]
    ready: Mapping[Role, float]

    @property
    def whole(self) -> float:
        """What it carries when everything serves."""
        return min(self.total.values(), default=0.0)

    @property
    def carries(self) -> float:
        return min((self.ready.get(role, 0.0) for role in self.total), default=0.0)

    @property
    def scarce(self) -> Role | None:
        """The role that bounds what it carries; None where both bound it alike, or where there is one role only."""
        spare = self.surplus()
        return next((r for r in self.total if r not in spare), None) if spare else None

    def surplus(self) -> dict[Role, float]:
        """What a role has in service beyond what the pool can carry."""
        carries = self.carries
        return {r: s - carries for r in self.total if (s := self.ready.get(r, 0.0)) > carries + NEAR}

    def sentence(self) -> str:
        """``carries 49.5 of 66 sessions: decode is scarce, prefill has 16.5 to spare``."""
        said = f"carries {self.carries:g} of {self.whole:g} sessions"
        if self.scarce is None:
            return said
        spare = ", ".join(f"{role.value} has {n:g} to spare" for role, n in self.surplus().items())
        return f"{said}: {self.scarce.value} is scarce, {spare}"


def survey(p: Picture) -> dict[str, Standing]:
    """How every pool stands, counted afresh."""
    total: dict[str, dict[Role, float]] = {name: {} for name in p.pools}
    ready: dict[str, dict[Role, float]] = {name: {} for name in p.pools}
    for worker in p.workers.values():
        if worker.pool not in total:
            continue
        mine, given = worth(p.pools[worker.pool], worker), given_to(p, worker)
        for role in roles_of(worker):
            for sums, part in ((total, 0.0 if worker.standby else mine), (ready, given)):
                if part:
                    sums[worker.pool][role] = sums[worker.pool].get(role, 0.0) + part
    return {name: Standing(total[name], ready[name]) for name in p.pools}

"""Doubt gives way to facts: what was taken out on suspicion comes back when what is certain leaves the pool too little.

This module exists because the budget judges a drain on doubt when it is decided, and a GPU may die a moment later: the budget holds
no fact back, so it is the doubt that has to yield. What always holds:

* No drain on doubt to whose process nothing has been done yet (requested, or its requests still in flight) stands while a role of
  its pool gives less than the floor of what the pool can carry. The latest one yields first, and no more than the floor needs.
* What has been stopped, what a person drains or holds out, and an eviction go on; so does who is only eased, and serves.
* Whoever was given back is held back by the budget, as if nobody had drained it yet: a person is told, and it is tried again.
"""

from __future__ import annotations

import msgspec

from sentinel.decide.faults.incidents import GIVEN_BACK
from sentinel.decide.state.picture import Picture
from sentinel.decide.supply.budget import Budget
from sentinel.decide.ways.drain import Drains
from sentinel.decide.ways.waiting import Waiting
from sentinel.model import Action, Drain, DrainState, Pool, Response, Role


class Yielding:
    def __init__(self, picture: Picture, drains: Drains, *, waiting: Waiting, budget: Budget) -> None:
        self.p, self.drains, self.waiting, self.budget = picture, drains, waiting, budget

    def settle(self) -> None:
        """At the end of an event that has changed what serves, before that is published."""
        doubt = self.budget.table.doubt
        self.budget.table.refresh()
        for pool in self.p.pools.values():
            for role in (Role.PREFILL, Role.DECODE):
                while doubt.get((pool.name, role)) and (short := self.budget.short(pool, role)):
                    drain = self._latest(pool, role)
                    if drain is None:
                        break
                    self._give_back(drain, short)
                    self.budget.table.refresh()

    def _latest(self, pool: Pool, role: Role) -> Drain | None:
        drains = (self.p.open_drain(name) for name in self.budget.table.doubt[pool.name, role])
        return max((d for d in drains if d is not None and self._may_yield(d)), key=lambda d: (d.requested_at, d.id), default=None)

    def _may_yield(self, d: Drain) -> bool:
        worker = self.p.workers.get(d.worker)
        ours = d.kind == "drain" and d.by == "sentinel" and d.doubtful and not d.planned
        free = d.state in (DrainState.REQUESTED, DrainState.DEROUTED) and d.response is Response.DRAIN  # an eviction stops at once
        return worker is not None and ours and free and self.p.held(worker, "out") is None

    def _give_back(self, drain: Drain, short: str) -> None:
        drain = self.drains.note(msgspec.structs.replace(drain, repair=Action.NONE, target=""), GIVEN_BACK, short)
        self.drains.give_up(drain, f"doubt gives way: {short}")
        self.waiting.given_back(self.p.workers[drain.worker], f"{drain.worker} was given back: {short}")

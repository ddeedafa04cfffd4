"""How many sessions move in a second: each of them recomputes or fetches its prefix somewhere else.

This module exists so that taking workers out gently does not become an outage of its own. What always holds:

* A drain on doubt waits until what it moves fits: ``pace.burst`` sessions at once, ``pace.sessions_per_s`` sustained. A worker
  that is worth more than the whole burst goes when all of it is there.
* Facts, evictions and a person's drains never wait. They are counted, so that what can wait leaves them room; what they moved
  is forgotten within minutes, since by then it has been computed anew.
* What moves is an estimate: what was measured to run and wait on the worker, else what it is worth.
"""

from __future__ import annotations

from sentinel.decide.state.picture import Picture
from sentinel.decide.supply.worth import worth
from sentinel.model import Drain, Response, Worker

DEBT_S = 300.0  # of the sustained pace: as much is ever owed
MOVING = (Response.DRAIN, Response.EVICT)


class Pace:
    def __init__(self, picture: Picture) -> None:
        self.p = picture
        self._left = float("inf")  # sessions that may move at once; brought down to the burst when first asked
        self._at = 0.0

    def sessions(self, worker: Worker) -> float:
        """What moves when this worker leaves service."""
        load = self.p.view(worker.name).load
        return worth(self.p.pools.get(worker.pool), worker) if load is None else float(load)

    def estimate(self, worker: Worker) -> str:
        """The price of taking it out, for the decision's reason."""
        pool, sessions = self.p.pools.get(worker.pool), self.sessions(worker)
        if pool is None or sessions <= 0:
            return "moves no session"
        return f"moves about {sessions:g} sessions, {sessions * pool.context_tokens:,.0f} tokens to recompute"

    def waits(self, worker: Worker) -> str:
        """Why a gentle drain of this worker has to wait; "" when it may go now."""
        wanted, rules = self.sessions(worker), self.p.policy.pace
        self._refill()
        missing = min(wanted, rules.burst) - self._left
        if missing <= 1e-6 or wanted <= 0:
            return ""
        turn = f"its turn is in about {missing / rules.sessions_per_s:.0f} s"
        return (
            f"{worker.name} would move {wanted:g} sessions and {max(self._left, 0.0):.0f} may move now "
            f"({rules.sessions_per_s:g} a second, {rules.burst:g} at once); {turn}"
        )

    def moved(self, drain: Drain) -> None:
        """Count what leaves a worker as this drain begins, whether or not it had to wait."""
        worker = self.p.workers.get(drain.worker)
        if worker is not None and moves(drain):
            self._refill()
            self._spend(self.sessions(worker))

    def restore(self) -> None:
        """A new leader counts what the one before has just moved, by what the workers are worth."""
        rules = self.p.policy.pace
        self._left, self._at = rules.burst, 0.0
        horizon = self.p.now - DEBT_S - rules.burst / rules.sessions_per_s
        recent = [d for d in self.p.drains.values() if moves(d) and d.requested_at > horizon]
        for drain in sorted(recent, key=lambda d: (d.requested_at, d.id)):
            worker = self.p.workers.get(drain.worker)
            if worker is not None:
                self._refill(drain.requested_at)
                self._spend(worth(self.p.pools.get(worker.pool), worker))

    def _refill(self, at: float | None = None) -> None:
        rules, at = self.p.policy.pace, self.p.now if at is None else at
        self._left = min(rules.burst, self._left + max(0.0, at - self._at) * rules.sessions_per_s)
        self._at = max(at, self._at)

    def _spend(self, sessions: float) -> None:
        self._left = max(self._left - sessions, -DEBT_S * self.p.policy.pace.sessions_per_s)


def moves(drain: Drain) -> bool:
    """Whether its beginning takes sessions from a worker."""
    return drain.kind != "start" and drain.response in MOVING

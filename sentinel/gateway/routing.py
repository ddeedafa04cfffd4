"""Where a request goes: from the published table, a role and a session to workers in the order to try them.

This module exists so that the gateway and every client that reads the table choose alike. Pure: no clock, no dice, no I/O.
What always holds:

* A worker that is OUT or STANDBY is never named. A CORDONED one is named only for a session that is already there.
* A pool gets its weight's share of the sessions; a pool of weight 0 gets no new ones.
* The same session goes to the same worker while the table stays the same, so that its KV cache is there; when a worker
  leaves or a weight shifts, only sessions that must move do (weighted rendezvous hashing).
* Affinity is bounded: a worker that already has more than ``BOUND`` times its fair share goes behind those that have less
  (consistent hashing with bounded loads, Mirrokni et al. 2016).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b

from sentinel.model import Role, RouteEntry, RoutePool, Routes, WorkerState

BOUND = 1.25  # 1.0 would be perfect balance and no affinity, 2 lets one worker have twice its share
_MASK = 2**64 - 1


def candidates(
    routes: Routes, role: Role, session: str, *, load: Mapping[str, int] | None = None, home: str = "", goes_on: bool = False
) -> list[RouteEntry]:
    """Workers that may take this request, best first; empty when there is none.

    ``load``: requests in flight per worker, as the caller knows them; None: affinity is not bounded. ``home``: the worker
    that served the session before, tried first while it keeps its sessions. ``goes_on``: the session has been answered before,
    by whom is not known here; then it is looked for where it would have gone, also on a cordoned worker. ``role`` BOTH asks for
    a worker that does prefill and decode by itself.
    """
    return list(choose(routes, role, session, load=load, home=home, goes_on=goes_on))


def choose(
    routes: Routes, role: Role, session: str, *, load: Mapping[str, int] | None = None, home: str = "", goes_on: bool = False
) -> Iterator[RouteEntry]:
    """The same one by one: nothing is ranked before it is asked for, and most requests need only the first."""
    serving = [(pool, [e for e in pool.workers if e.role in (role, Role.BOTH) and e.capacity > 0]) for pool in routes.pools]
    stay = _stay([entries for _, entries in serving], home, load) if home else None
    if stay:
        yield stay
    drawn = _draw(session)
    if len(serving) > 1:
        serving.sort(key=lambda p: _score(drawn, p[0].pool, p[0].weight), reverse=True)
    for pool, entries in serving:
        if pool.weight <= 0:
            continue
        if goes_on and not home:
            goes_on = False  # only the pool that the session belongs to is asked
            keeping = [e for e in entries if _keeps(e)]
            best = max(keeping, key=lambda e: _score(drawn, e.worker, e.capacity), default=None)
            if best and best.state is WorkerState.CORDONED and not _Over(keeping, load)(best):
                stay = best
                yield best
        active = [e for e in entries if e.state is WorkerState.ACTIVE]
        over = _Over(active, load)
        ranked = sorted(active, key=lambda e: (not over(e), _score(drawn, e.worker, e.capacity)), reverse=True)
        yield from (e for e in ranked if stay is None or e.worker != stay.worker)


def keeper(routes: Routes, worker: str) -> RouteEntry | None:
    """The worker, for something that it alone has, while it keeps its sessions: however much it has to do, nobody else will do."""
    return next((e for pool in routes.pools for e in pool.workers if e.worker == worker and _keeps(e)), None)


def idlest(routes: Routes, role: Role, draw: str, load: Mapping[str, int]) -> Iterator[RouteEntry]:
    """For requests that belong to no session: by weight to a pool, there to whoever has the least to do for its capacity.

    ``draw``: anything that differs from request to request; it decides between equals.
    """
    drawn = _draw(draw)
    for pool in sorted(routes.pools, key=lambda p: _score(drawn, p.pool, p.weight), reverse=True):
        if pool.weight > 0:
            fit = [e for e in pool.workers if e.state is WorkerState.ACTIVE and e.role in (role, Role.BOTH) and e.capacity > 0]
            yield from sorted(fit, key=lambda e: ((load.get(e.worker, 0) + 1) / e.capacity, -_score(drawn, e.worker, 1.0)))


def shares(pools: Iterable[RoutePool]) -> dict[str, float]:
    """Pool → share of new sessions, of those that have a worker to take them."""
    weights = {p.pool: p.weight for p in pools if p.weight > 0 and any(e.state is WorkerState.ACTIVE for e in p.workers)}
    whole = sum(weights.values())
    return {name: weight / whole for name, weight in weights.items()}


def _stay(serving: list[list[RouteEntry]], home: str, load: Mapping[str, int] | None) -> RouteEntry | None:
    """The worker that has the session, while it keeps its sessions and is within its bound."""
    for entries in serving:
        for entry in entries:
            if entry.worker == home and _keeps(entry):
                return None if load is not None and _Over([e for e in entries if _keeps(e)], load)(entry) else entry
    return None


def _keeps(entry: RouteEntry) -> bool:
    return entry.state in (WorkerState.ACTIVE, WorkerState.CORDONED)


class _Over:
    """Whether one request more would take a worker past its bound among its peers."""

    def __init__(self, peers: Sequence[RouteEntry], load: Mapping[str, int] | None) -> None:
        self._load = load
        if load is not None:
            self._total = sum(load.get(e.worker, 0) for e in peers) + 1
            self._capacity = sum(e.capacity for e in peers)

    def __call__(self, entry: RouteEntry) -> bool:
        if self._load is None:
            return False
        share = entry.capacity / self._capacity
        return self._load.get(entry.worker, 0) + 1 > math.ceil(BOUND * self._total * share)


@lru_cache(maxsize=65_536)
def _name(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest())


def _draw(session: str) -> int:
    return int.from_bytes(blake2b(session.encode(errors="surrogatepass"), digest_size=8, person=b"session").digest())


def _score(drawn: int, name: str, weight: float) -> float:
    """Rendezvous score: the highest wins with a probability proportional to its weight (Schindelhauer, Schomaker 2005).

    Session and name are hashed once each and mixed per pair (the finalizer of splitmix64, Steele, Lea, Flood 2014): with a
    hundred workers, hashing each pair anew would be most of what a request costs here.
    """
    if weight <= 0:
        return -math.inf
    x = drawn ^ _name(name)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return -weight / math.log((((x ^ (x >> 31)) >> 12) + 0.5) / 2**52)  # of a number in (0, 1), exactly

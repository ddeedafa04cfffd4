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
from collections.abc import Iterable, Mapping
from hashlib import blake2b

from sentinel.model import Role, RouteEntry, RoutePool, Routes, WorkerState

BOUND = 1.25  # 1.0 would be perfect balance and no affinity, 2 lets one worker have twice its share


def candidates(
    routes: Routes, role: Role, session: str, *, load: Mapping[str, int] | None = None, home: str = ""
) -> list[RouteEntry]:
    """Workers that may take this request, best first; empty when there is none.

    ``load``: requests in flight per worker, as the caller knows them; None: affinity is not bounded. ``home``: the worker
    that served the session before, tried first while it keeps its sessions. ``role`` BOTH asks for a worker that does
    prefill and decode by itself.
    """
    serving = [(pool, [e for e in pool.workers if e.role in (role, Role.BOTH) and e.capacity > 0]) for pool in routes.pools]
    ordered: list[RouteEntry] = []
    for pool, entries in sorted(serving, key=lambda p: _score(session, p[0].pool, p[0].weight), reverse=True):
        if pool.weight > 0:
            active = [e for e in entries if e.state is WorkerState.ACTIVE]
            ranked = sorted(active, key=lambda e: _score(session, e.worker, e.capacity), reverse=True)
            ordered += _bounded(ranked, load)
    stay = next((e for _, entries in serving for e in entries if e.worker == home and _keeps(e)), None)
    if stay and not _over(stay, [e for _, entries in serving if stay in entries for e in entries if _keeps(e)], load):
        ordered = [stay, *(e for e in ordered if e.worker != home)]
    return ordered


def shares(pools: Iterable[RoutePool]) -> dict[str, float]:
    """Pool → share of new sessions, of those that have a worker to take them."""
    weights = {p.pool: p.weight for p in pools if p.weight > 0 and any(e.state is WorkerState.ACTIVE for e in p.workers)}
    whole = sum(weights.values())
    return {name: weight / whole for name, weight in weights.items()}


def _keeps(entry: RouteEntry) -> bool:
    return entry.state in (WorkerState.ACTIVE, WorkerState.CORDONED)


def _bounded(ranked: list[RouteEntry], load: Mapping[str, int] | None) -> list[RouteEntry]:
    full = [e for e in ranked if _over(e, ranked, load)]
    return [e for e in ranked if e not in full] + full


def _over(entry: RouteEntry, peers: list[RouteEntry], load: Mapping[str, int] | None) -> bool:
    """Whether one request more would take it past its bound."""
    if load is None:
        return False
    total = sum(load.get(e.worker, 0) for e in peers) + 1
    share = entry.capacity / sum(e.capacity for e in peers)
    return load.get(entry.worker, 0) + 1 > math.ceil(BOUND * total * share)


def _score(session: str, name: str, weight: float) -> float:
    """Rendezvous score: the highest wins with a probability proportional to its weight (Schindelhauer, Schomaker 2005)."""
    if weight <= 0:
        return -math.inf
    digest = blake2b(f"{session}\0{name}".encode(), digest_size=8).digest()
    drawn = (int.from_bytes(digest) + 0.5) / 2**64  # in (0, 1)
    return -weight / math.log(drawn)

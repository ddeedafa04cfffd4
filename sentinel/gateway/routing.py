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
from itertools import repeat

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
    serving = [(pool, *_peers(pool, role)) for pool in routes.pools]
    stay = _stay([keeping for _, _, keeping in serving], home, load) if home else None
    if stay:
        yield stay
    drawn = _draw(session)
    if len(serving) > 1:
        serving.sort(key=lambda p: _score(drawn, p[0].pool, p[0].weight), reverse=True)
    for pool, active, keeping in serving:
        if pool.weight <= 0:
            continue
        if goes_on and not home:
            goes_on = False  # only the pool that the session belongs to is asked
            best = next(keeping.ranked(drawn, None), None)
            if best and best.state is WorkerState.CORDONED and not keeping.over(best.worker, keeping.total(load), load):
                stay = best
                yield best
        yield from (e for e in active.ranked(drawn, load) if stay is None or e.worker != stay.worker)


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
            yield from _peers(pool, role)[0].idlest(drawn, load)


def shares(pools: Iterable[RoutePool]) -> dict[str, float]:
    """Pool → share of new sessions, of those that have a worker to take them."""
    weights = {p.pool: p.weight for p in pools if p.weight > 0 and any(e.state is WorkerState.ACTIVE for e in p.workers)}
    whole = sum(weights.values())
    return {name: weight / whole for name, weight in weights.items()}


def _stay(serving: Iterable[Peers], home: str, load: Mapping[str, int] | None) -> RouteEntry | None:
    """The worker that has the session, while it keeps its sessions and is within its bound."""
    for keeping in serving:
        entry = keeping.by_name.get(home)
        if entry:
            return None if keeping.over(home, keeping.total(load), load) else entry
    return None


def _keeps(entry: RouteEntry) -> bool:
    return entry.state in (WorkerState.ACTIVE, WorkerState.CORDONED)


class Peers:
    """Workers of which one is chosen, with what choosing needs of them put together once: a pool may have a thousand."""

    def __init__(self, entries: Sequence[RouteEntry]) -> None:
        self.by_name = {e.worker: e for e in entries}
        self._entries = entries
        self._marks = [_name(e.worker) for e in entries]
        self._worth = [e.capacity for e in entries]
        self._alike = len(set(self._worth)) <= 1
        self._whole = sum(self._worth)

    def total(self, load: Mapping[str, int] | None) -> int:
        """What they have to do together, with one request more."""
        return 1 if load is None else sum(map(load.get, self.by_name, repeat(0))) + 1

    def over(self, worker: str, total: int, load: Mapping[str, int] | None) -> bool:
        """Whether one request more would take a worker past its bound among its peers."""
        if load is None:
            return False
        return load.get(worker, 0) + 1 > math.ceil(BOUND * total * self.by_name[worker].capacity / self._whole)

    def ranked(self, drawn: int, load: Mapping[str, int] | None) -> Iterator[RouteEntry]:
        """The best for what was drawn first; those past their bound behind all others."""
        mixed = [drawn * mark & _MASK for mark in self._marks]
        score: list[float] = mixed if self._alike else list(map(_weighed, mixed, self._worth))  # type: ignore[assignment]
        if not score:
            return
        total = self.total(load)
        best = score.index(max(score))
        first = self._entries[best]
        late = [first] if self.over(first.worker, total, load) else []
        if not late:
            yield first
        rest = sorted(range(len(score)), key=score.__getitem__, reverse=True)
        for entry in (self._entries[n] for n in rest if n != best):
            if self.over(entry.worker, total, load):
                late.append(entry)
            else:
                yield entry
        yield from late

    def idlest(self, drawn: int, load: Mapping[str, int]) -> Iterator[RouteEntry]:
        """Who has the least to do for its capacity first; what was drawn decides between equals."""
        busy = [(has + 1) / worth for has, worth in zip(map(load.get, self.by_name, repeat(0)), self._worth, strict=True)]
        if not busy:
            return
        least = min(busy)
        best = max((n for n, much in enumerate(busy) if much == least), key=lambda n: drawn * self._marks[n] & _MASK)
        yield self._entries[best]
        order = sorted(range(len(busy)), key=lambda n: (busy[n], -(drawn * self._marks[n] & _MASK)))
        yield from (self._entries[n] for n in order if n != best)


_made: dict[tuple[str, Role], tuple[tuple[RouteEntry, ...], Peers, Peers]] = {}  # (pool, role) → made of these rows


def _peers(pool: RoutePool, role: Role) -> tuple[Peers, Peers]:
    """(those that take new sessions, those that keep theirs), made anew when the pool's rows are other ones."""
    rows, active, keeping = _made.get((pool.pool, role), ((), _NOBODY, _NOBODY))
    if rows is not pool.workers:
        fit = [e for e in pool.workers if e.role in (role, Role.BOTH) and e.capacity > 0 and _keeps(e)]
        active, keeping = Peers([e for e in fit if e.state is WorkerState.ACTIVE]), Peers(fit)
        _made[pool.pool, role] = pool.workers, active, keeping
    return active, keeping


_NOBODY = Peers(())


@lru_cache(maxsize=65_536)
def _name(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()) | 1


def _draw(session: str) -> int:
    return int.from_bytes(blake2b(session.encode(errors="surrogatepass"), digest_size=8, person=b"session").digest())


def _score(drawn: int, name: str, weight: float) -> float:
    """Rendezvous score: the highest wins with a probability proportional to its weight (Schindelhauer, Schomaker 2005)."""
    return _weighed(drawn * _name(name) & _MASK, weight) if weight > 0 else -math.inf


def _weighed(mixed: int, weight: float) -> float:
    """``mixed``: session and name, hashed once each, multiplied (multiply-shift hashing, Dietzfelbinger et al. 1997: the high
    bits count). With a thousand workers, hashing each pair anew would be most of what a request costs here."""
    return -weight / math.log(((mixed >> 12) + 0.5) / 2**52)  # of a number in (0, 1), exactly

"""What changed from one route table to the next: how a table of ten thousand workers is told when one of them leaves.

This module exists so that whoever writes news and whoever reads them agree on what they say. Pure. What always holds: news name
the version that they build on, and upon that table they give exactly the one that they were made of, in its order.
"""

from __future__ import annotations

from itertools import compress
from operator import is_not

import msgspec

from sentinel.model.serving import RouteEntry, RoutePool, Routes
from sentinel.model.words import Base

MOST = 4  # news that name more than one row of so many are no shorter way to say it


class RouteNews(Base, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """From the table of version ``before`` to that of ``version``. The first fields are the first in JSON, too."""

    version: int
    before: int
    at: float = 0.0
    why: str = ""
    pools: tuple[RoutePool, ...] = ()  # those in which anything changed: the weight, and the rows that differ


def changed_rows(now: RoutePool, before: RoutePool) -> tuple[RouteEntry, ...] | None:
    """Rows that differ; None: the two do not name the same workers in the same order. The same object needs no comparing."""
    if len(now.workers) != len(before.workers):
        return None
    pairs = zip(now.workers, before.workers, strict=True)
    others = list(compress(pairs, map(is_not, now.workers, before.workers)))
    if any(row.worker != old.worker for row, old in others):
        return None
    return tuple(row for row, old in others if row != old)


def difference(before: Routes, now: Routes) -> RouteNews | None:
    """None: the whole table says it better (another fleet, or a large part of this one)."""
    if [p.pool for p in before.pools] != [p.pool for p in now.pools]:
        return None
    changed: list[RoutePool] = []
    for pool, old in zip(now.pools, before.pools, strict=True):
        rows = changed_rows(pool, old)
        if rows is None:
            return None
        if rows or pool.weight != old.weight:
            changed.append(msgspec.structs.replace(pool, workers=rows))
    if MOST * sum(len(p.workers) for p in changed) > sum(len(p.workers) for p in now.pools):
        return None
    return RouteNews(version=now.version, before=before.version, at=now.at, why=now.why, pools=tuple(changed))


def applied(before: Routes, news: RouteNews) -> Routes:
    """The table that the news lead to. Raises ValueError when they build on another one."""
    if news.before != before.version:
        raise ValueError(f"news of version {news.version} build on version {news.before}, not on {before.version}")
    changed = {p.pool: p for p in news.pools}
    pools = tuple(_with(p, changed[p.pool]) if p.pool in changed else p for p in before.pools)
    return Routes(version=news.version, at=news.at, why=news.why, pools=pools)


def _with(pool: RoutePool, news: RoutePool) -> RoutePool:
    rows = {e.worker: e for e in news.workers}
    workers = tuple(rows.get(e.worker, e) for e in pool.workers) if rows else pool.workers
    return msgspec.structs.replace(news, workers=workers)

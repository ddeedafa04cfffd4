"""News of the route table: upon the table that they were made of they give the other one, or there are none."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel.model import Role, RouteEntry, RoutePool, Routes, WorkerState
from sentinel.model.route_news import MOST, RouteNews, applied, difference

rows = st.builds(
    RouteEntry, worker=st.sampled_from("abcdefgh"), url=st.just("http://w"), role=st.sampled_from(Role),
    state=st.sampled_from(WorkerState), capacity=st.sampled_from([0.0, 1.0, 2.5]),
)  # fmt: skip
pools = st.builds(
    RoutePool, pool=st.sampled_from("pq"), weight=st.sampled_from([0.0, 0.25, 1.0]),
    workers=st.lists(rows, max_size=8, unique_by=lambda e: e.worker).map(tuple),
)  # fmt: skip
tables = st.lists(pools, max_size=2, unique_by=lambda p: p.pool).map(tuple)


def _or_out(entry: RouteEntry, *, out: bool) -> RouteEntry:
    return msgspec.structs.replace(entry, state=WorkerState.OUT if out else entry.state)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Routes, Routes]:
    """Two tables: often the same fleet with some rows replaced, some of them by equal ones."""
    before = draw(tables)
    after = draw(tables)
    if draw(st.booleans()):
        after = tuple(
            RoutePool(
                pool=p.pool, weight=draw(st.sampled_from([p.weight, 0.5])),
                workers=tuple(_or_out(e, out=draw(st.booleans())) for e in p.workers),
            )
            for p in before
        )  # fmt: skip
    return Routes(version=4, why="before", pools=before), Routes(version=9, at=1.5, why="after", pools=after)


@given(steps())
def test_news_upon_their_table_give_the_next_one(step: tuple[Routes, Routes]) -> None:
    """Through JSON and back, to the letter; what is not named in the news is what it was; and they are never most of a table."""
    before, now = step
    news = difference(before, now)
    if news is None:
        return
    read = msgspec.json.decode(msgspec.json.encode(news), type=RouteNews)
    assert applied(before, read) == now
    assert MOST * sum(len(p.workers) for p in news.pools) <= sum(len(p.workers) for p in now.pools)


@given(steps())
def test_another_fleet_is_told_whole(step: tuple[Routes, Routes]) -> None:
    """There are news only between tables that name the same pools and workers in the same order."""
    before, now = step
    names = [[(p.pool, [e.worker for e in p.workers]) for p in t.pools] for t in (before, now)]
    if names[0] != names[1]:
        assert difference(before, now) is None


def test_news_upon_another_table_are_refused() -> None:
    """The error names the versions."""
    with pytest.raises(ValueError, match="version 3 build on version 2, not on 1"):
        applied(Routes(version=1), RouteNews(version=3, before=2))

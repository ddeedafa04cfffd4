"""What the journal keeps of decisions: a route table as the rows that changed, everything else whole.

This module exists because each of 750 evictions publishes a table of 10,000 rows, a megabyte each. What always holds: the same
events give the same brief decisions, so that a replay can be held against the record to the letter; the first table of a
leadership is kept whole. What changed is said by the decider, or found by comparing: a storm must not pay for the rows that stay.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from sentinel.decide.state.events import AnyEvent, AnyInstruction, Record, Restored
from sentinel.model import RoutePool, Routes
from sentinel.model.route_news import changed_rows


class Brief:
    """Takes the decisions of one leadership after another, in order."""

    def __init__(self) -> None:
        self._before: dict[str, RoutePool] = {}

    def of(self, event: AnyEvent, instructions: Iterable[AnyInstruction]) -> tuple[AnyInstruction, ...]:
        if isinstance(event, Restored):
            self._before = {}
        return tuple(self._brief(n) for n in instructions)

    def _brief(self, n: AnyInstruction) -> AnyInstruction:
        if not isinstance(n, Record) or not isinstance(n.value, Routes):
            return n
        before, self._before = self._before, {p.pool: p for p in n.value.pools}
        told = n.news if before else None  # the first is whole
        if told is None:
            told = tuple(p for p in (_news(p, before.get(p.pool)) for p in n.value.pools) if p is not None)
        return msgspec.structs.replace(n, value=msgspec.structs.replace(n.value, pools=told), news=None)


def _news(now: RoutePool, before: RoutePool | None) -> RoutePool | None:
    """The pool with the rows that differ, or as a whole where it is of another fleet; None when nothing does."""
    rows = None if before is None else changed_rows(now, before)
    if before is None or rows is None:
        return now
    return msgspec.structs.replace(now, workers=rows) if rows or now.weight != before.weight else None

"""What happened, in order, each with its milliseconds since the fault was injected.

This module exists so that the live view and the JSON document tell the same story. What always holds:

* A mark carries the wall-clock time at which the thing happened by the record of whoever did it (the agent's finding, the
  controller's step, the pager's receipt, the client's first token), not the time at which the demo heard of it.
* The same thing is marked once, however often it is seen.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, order=True)
class Mark:
    """``at``: seconds since the epoch."""

    at: float
    what: str
    detail: str


@dataclass
class Timeline:
    on_mark: Callable[[Mark], None] = lambda _: None
    zero: float | None = None  # the moment of injection; before it milliseconds are negative
    marks: list[Mark] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def mark(self, what: str, detail: str, *, at: float | None = None, key: str = "") -> None:
        """Note one thing; ``key`` (default: ``what`` and ``detail``) makes repeating it harmless."""
        key = key or f"{what}\n{detail}"
        if key in self._seen:
            return
        self._seen.add(key)
        mark = Mark(time.time() if at is None else at, what, detail)
        bisect.insort(self.marks, mark)
        self.on_mark(mark)

    def inject(self, detail: str) -> None:
        """The fault happens now: milliseconds count from here, on the first call."""
        now = time.time()
        if self.zero is None:
            self.zero = now
        self.mark("injected", detail, at=now)

    def ms(self, at: float) -> float:
        return round((at - (self.zero if self.zero is not None else at)) * 1000, 1)

    def first(self, what: str) -> Mark | None:
        return next((m for m in self.marks if m.what == what), None)

    def document(self) -> list[dict[str, Any]]:
        return [{"ms": self.ms(m.at), "what": m.what, "detail": m.detail} for m in self.marks]

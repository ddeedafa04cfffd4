"""Counters over time: how much one rose since it was last read, and in how many of the last windows something was so.

This module exists so that every rate is judged in the same way: a counter that became smaller began anew, and one odd window
among many is told apart from something that goes on. What always holds: all memory is plain JSON values and bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probes.judging import Judge
from sentinel.model import Component

FINE_TOLD = 3  # looks; from then on only a state that was bad is said to be fine


def say(j: Judge, own: dict[str, Any], check: str, component: Component, present: bool, **words: Any) -> None:
    """``Judge.state`` for what is hardly ever bad: fine is said at the first looks (what an earlier agent reported can end) and
    whenever it was bad before, and then no more, since a fleet sends all that is said every five seconds."""
    told: dict[str, int] = own.setdefault("told", {})
    if not present and not j.was(check, component):
        if told.get(check, 0) >= FINE_TOLD:
            return
        told[check] = told.get(check, 0) + 1
    j.state(check, component, present, **words)


def table(value: Any) -> Mapping[str, Any]:
    """A table of a reading; empty for anything else, since a recording may hold anything."""
    return value if isinstance(value, Mapping) else {}


def listed(value: Any) -> list[Any]:
    """A list of a reading; empty for anything else."""
    return value if isinstance(value, list) else []


def moment(value: Any) -> float | None:
    """A time of a reading, seconds."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300 else None


def number(value: Any) -> int | None:
    """A counter's value; None for anything that is not a whole number from zero up."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


class Windows:
    """Remembers, by key, in which of the last ``of`` windows something held. Keys that never hold take no memory."""

    def __init__(self, memory: dict[str, Any]) -> None:
        self._bits: dict[str, int] = memory.setdefault("windows", {})

    def push(self, key: str, holds: bool, of: int) -> None:
        """One more window is over."""
        bits = (self._bits.get(key, 0) << 1 | holds) & (1 << of) - 1
        if bits:
            self._bits[key] = bits
        else:
            self._bits.pop(key, None)

    def count(self, key: str) -> int:
        return self._bits.get(key, 0).bit_count()


class Meter:
    """A counter's rate over windows of at least ``least_s`` seconds; its memory is one small table."""

    def __init__(self, memory: dict[str, Any], key: str, least_s: float) -> None:
        self._meters: dict[str, Any] = memory.setdefault("meters", {})
        self._key, self._least_s = key, least_s

    def read(self, value: int | None, at: float) -> tuple[int, float] | None:
        """(rise, seconds) when a window is over, else None. A value below the last one begins a new count."""
        if value is None:
            return None
        before = self._meters.get(self._key)
        if before is None or value < before["value"] or at < before["at"]:
            self._meters[self._key] = {"value": value, "at": at}
            return None
        if at - before["at"] < self._least_s:
            return None
        self._meters[self._key] = {"value": value, "at": at}
        return value - before["value"], at - before["at"]

"""Counters of hardware between two readings: what rose, what began anew, what stands at its end, what fell within a window.

This module exists because counters of links are narrow, saturate, and are cleared by others. What always holds:

* A value that is not measured (``None``) changes nothing; a first value is where counting begins, never a rise.
* A smaller value began anew (driver reload, firmware reset, ``perfquery -R``): all of it has come since.
* A counter of the InfiniBand architecture stops at its largest value instead of wrapping: there a rise of 0 says nothing.
* Memory is plain JSON values and bounded: one entry per minute in which something rose, for the longest window only.
"""

from __future__ import annotations

from typing import Any

BUCKET_S = 60.0
LONGEST_S = 3 * 3600.0


def rise(memory: dict[str, Any], name: str, value: int | None) -> int | None:
    """How much a counter rose since the last reading; None where either was not measured."""
    if value is None:
        return None
    before = memory.get(name)
    memory[name] = value
    if before is None:
        return None
    return int(value - before if value >= before else value)


def saturated(value: int | None, bits: int) -> bool | None:
    """Whether it stands at the end of its width. A larger value shows that this one is wider than the architecture says."""
    return None if value is None else value == (1 << bits) - 1


def note(memory: dict[str, Any], name: str, at: float, rose: int | None) -> None:
    """Remember a rise, by the minute; what a clock set back has put into the future is forgotten."""
    kept: list[list[float]] = [b for b in memory.get(name, ()) if at - LONGEST_S <= b[0] <= at]
    if rose:
        if kept and at - kept[-1][0] < BUCKET_S:
            kept[-1][1] += rose
        else:
            kept.append([at, rose])
    memory[name] = kept


def within(memory: dict[str, Any], name: str, at: float, window_s: float) -> tuple[int, int]:
    """(sum of the rises, number of minutes in which something rose) in the last ``window_s`` seconds, at most LONGEST_S."""
    fell = [b[1] for b in memory.get(name, ()) if at - b[0] < window_s]
    return int(sum(fell)), len(fell)

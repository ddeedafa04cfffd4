"""Counters of hardware between two readings: what rose, what began anew, what stands at its end, what fell within a window.

This module exists because counters of links are narrow, saturate, and are cleared by others. What always holds:

* A value that is not measured (``None``) changes nothing; a first value is where counting begins, never a rise.
* A smaller value began anew (driver reload, firmware reset, ``perfquery -R``): all of it has come since.
* A counter of the InfiniBand architecture stops at its largest value instead of wrapping: there a rise of 0 says nothing.
* Memory is plain JSON values and bounded: a window is remembered by at most GRAINS + 1 entries.
"""

from __future__ import annotations

from typing import Any

GRAINS = 30  # entries that a window is remembered by


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


def note(memory: dict[str, Any], name: str, at: float, rose: int | None, window_s: float) -> tuple[int, int]:
    """Remember a rise, and say for the last ``window_s`` seconds (sum of the rises, number of separate times it rose).

    Rises less than a ``GRAINS``-th of the window apart are one. What a clock that was set back left in the future is forgotten.
    """
    kept: list[list[float]] = [b for b in memory.get(name, ()) if at - window_s < b[0] <= at]
    if rose:
        if kept and at - kept[-1][0] < window_s / GRAINS:
            kept[-1][1] += rose
        else:
            kept.append([at, rose])
    memory[name] = kept
    return int(sum(b[1] for b in kept)), len(kept)

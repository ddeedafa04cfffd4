"""Durations as people write them, in configuration and policy alike.

What always holds: a duration is written with its unit (``"250ms"``, ``"5s"``, ``"10m"``, ``"2h"``), is never negative, is at
most ten years (what is longer is a slip of the keyboard, and breaks clocks), and is seconds inside sentinel.
"""

from __future__ import annotations

import re
from typing import Any

_PATTERN = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)", re.ASCII)
_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
LONGEST_H = 87_600  # hours: ten years


class Duration(float):
    """Seconds."""


def parse_duration(value: Any) -> Duration:
    """Read one; raises ValueError saying what was wanted and what was found."""
    match = _PATTERN.fullmatch(value) if isinstance(value, str) else None
    if not match:
        raise ValueError(f'expected a duration such as "250ms", "5s", "10m" or "2h", got {_shown(value)}')
    seconds = float(match[1]) * _UNIT[match[2]]
    if seconds > LONGEST_H * 3600:
        raise ValueError(f"expected a duration of at most {LONGEST_H} hours, got {_shown(value)}")
    return Duration(seconds)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"

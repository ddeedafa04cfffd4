"""Durations as people write them, in configuration and policy alike.

What always holds: a duration is written with its unit (``"250ms"``, ``"5s"``, ``"10m"``, ``"2h"``), is never negative, and is
seconds inside sentinel.
"""

from __future__ import annotations

import re
from typing import Any

_PATTERN = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(float):
    """Seconds."""


def parse_duration(value: Any) -> Duration:
    """Read one; raises ValueError saying what was wanted and what was found."""
    match = _PATTERN.fullmatch(value) if isinstance(value, str) else None
    if not match:
        raise ValueError(f'expected a duration such as "250ms", "5s", "10m" or "2h", got {value!r}')
    return Duration(float(match[1]) * _UNIT[match[2]])

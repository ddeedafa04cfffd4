"""The kernel log compared with NVML's own events, where the readings of both probes pass by.

This module exists because neither probe may know the other. What always holds: a fault of the comparison costs its own findings
and nothing else; what the probes found goes its way.
"""

from __future__ import annotations

from typing import Any

import structlog

from probes.crosscheck import compare
from sentinel.model import Finding, Reading

log = structlog.get_logger()


class Comparing:
    """Call it with every reading; it keeps what it needs of them."""

    def __init__(self) -> None:
        self._memory: dict[str, Any] = {}

    def __call__(self, reading: Reading) -> list[Finding]:
        try:
            return compare(reading, self._memory)
        except Exception as error:  # a site's own probe of that name may hold anything
            log.error("the kernel log could not be compared with NVML's events", probe=reading.probe, error=repr(error))
            self._memory.clear()
            return []

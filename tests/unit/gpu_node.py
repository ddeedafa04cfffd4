"""A node under observation, for the tests of the GPU probe: a simulated driver that a test sets and looks at."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from probes import Context
from probes.gpu import GpuProbe
from probes.nvml import SLOW_S
from sentinel.model import Finding, Reading
from sentinel.testing.nvml import FakeDriver
from sentinel.testing.nvml_state import FakeGpu, FakeState

PCI = "0008:01:00.0"
GPU = f"t01/gpu@{PCI}"


class Node:
    """A node under observation: a simulated driver, a clock of its own, and the probe's memory between looks."""

    def __init__(self, state: FakeState, expected: Mapping[str, Any] | None = None, sys: Path = Path("/nowhere")) -> None:
        self.state, self.expected, self.at, self.mono = state, expected or {}, 1_800_000_000.0, 5000.0
        self.memory: dict[str, Any] = {}
        self.driver = FakeDriver(state, lambda: self.at)
        self.probe = GpuProbe(Context(node="t01", sys=sys, proc=Path("/nowhere"), driver=self.driver))

    def look(self, after_s: float = SLOW_S, boot_id: str = "one", **replace: Any) -> list[Finding]:
        self.at, self.mono = self.at + after_s, self.mono + after_s
        read = asyncio.run(self.probe.read())
        reading = Reading(probe="gpu", node="t01", at=self.at, boot_id=boot_id, data={**read.data, "mono": self.mono, **replace})
        return self.probe.assess(reading, self.memory, self.expected)

    def present(self, after_s: float = SLOW_S, **replace: Any) -> dict[str, Finding]:
        """What is wrong now, by check."""
        return {f.check: f for f in self.look(after_s, **replace) if f.present}


def one(gpu: FakeGpu) -> Node:
    return Node(FakeState(gpus=[gpu]))

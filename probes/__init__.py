"""Probes: one file per thing that can be looked at, each in two halves.

``read()`` does I/O only and returns a plain Reading; ``assess()`` is pure and turns a Reading into Findings. So what was
read on a customer's node can be judged again anywhere. What always holds in this package:

* A probe knows only ``sentinel.model``; what it needs of the world comes in through ``Context``.
* What could not be measured is ``None`` in the reading and is never called healthy or sick by ``assess``.
* The runner, not the probe, schedules, times, isolates and counts it.
* A site adds its own probe with an entry point in the group ``sentinel.probes`` that names a class of this shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:  # the driver child reads GPUs with this package and would carry all nouns for nothing: 4 MiB on every node
    from sentinel.model import Finding, Reading


class Driver(Protocol):
    """The way to the GPU driver: somebody else's process, because a call into the driver may never come back."""

    async def read(self) -> dict[str, Any]:
        """Ask once for everything; returns within the driver's own deadline.

        The shape is ``{"error": None | {"code": int, "text": str}, "driver": str | None, "gpus": [...]}``; a GPU whose
        call is past its deadline is ``{"pci": …, "hung_s": seconds}`` and nothing else.
        A driver whose process listens to NVML's Xid events adds ``xid_events``: ``{"now", "listening": {pci: since}, "heard":
        [{"pci", "xid", "count", "since", "after", "at"}, …]}``, times in seconds since boot; without it, nothing was listened to.
        """
        ...


@dataclass(frozen=True)
class Context:
    """The world as a probe may see it. Every root is a parameter so that a test can hand in its own."""

    node: str
    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    kmsg: Path = Path("/dev/kmsg")
    state: Path = Path("/var/lib/sentinel")  # where a probe keeps what must survive a restart (a cursor)
    driver: Driver | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # the probe's own table of the configuration


@runtime_checkable
class Probe(Protocol):
    """What every probe offers. The class is called as ``Cls(context)``."""

    name: str
    interval_s: float  # default cadence, seconds; the configuration may override it

    async def read(self) -> Reading:
        """Look once. Raises OSError or ProbeError when it could not look at all; that is about the monitor."""
        ...

    def assess(self, reading: Reading, memory: dict[str, Any], expected: Mapping[str, Any]) -> list[Finding]:
        """Judge one reading. Pure: ``memory`` (plain JSON values, starts empty, one per probe) is its only state."""
        ...

    def commit(self, reading: Reading) -> None:
        """Called once everything found in this reading is safely spooled: move cursors now, not before."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Woken(Protocol):
    """A probe that also has a file descriptor which turns readable when there is something new (the kernel log)."""

    def fileno(self) -> int: ...


class ProbeError(Exception):
    """The probe could not look; the sentence says what was tried and what stood in the way."""

"""What the driver child may say, and how long anything about it may take.

This module exists so that the bounds of a look at the driver stand in one place: whoever waits for one derives from here how
long. What always holds: a message that is not one of these is a fault of the child, never a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

LINE_BYTES = 1 << 20  # one GPU's answer is about 3 KiB


@dataclass(frozen=True)
class Pauses:
    """Seconds. ``first`` doubles up to ``most`` with every death within ``steady`` of its start."""

    first: float = 1.0
    most: float = 60.0
    steady: float = 60.0
    start: float = 15.0  # a new process may take this long to take its first question, whatever the deadline
    reopen: float = 30.0  # between two tries of a driver that could not be initialised
    refresh: float = 60.0  # a GPU that answers with an error is looked at again by a fresh child this often


GRACE_S = 2.0  # a child that was asked to end may take so long, and one more second once it is killed


def longest_read_s(deadline_s: float, pauses: Pauses | None = None) -> float:
    """Seconds within which ``read`` is over, whatever the driver does: an old child ended, a new one started, NVML initialised
    and every GPU asked. Whoever waits for a reading must wait longer than this, or what hangs is never told."""
    start = (pauses or Pauses()).start
    return GRACE_S + 1.0 + max(start, deadline_s) + 2 * deadline_s


class Opened(msgspec.Struct):
    error: dict[str, int | str | None] | None
    driver: str | None
    count: Annotated[int, msgspec.Meta(ge=0, le=1024)]


class Listens(msgspec.Struct):
    """Which GPUs (PCI addresses) are listened to since when, and whether the listener is inside a call. See ``driver_listener``."""

    since: dict[str, float] = {}
    calling: bool = False


class Said(msgspec.Struct):
    """Whatever the child may say (its module's docstring); anything else is no protocol of ours."""

    ack: int | None = None
    asked: list[int] = []
    opened: Opened | None = None
    gpu: int | None = None
    data: dict[str, Any] = {}
    listens: Listens | None = None
    xids: list[tuple[str | None, int, int, float, float, float]] = []  # GPU, code, how many, listened since, after, at


decode = msgspec.json.Decoder(Said).decode

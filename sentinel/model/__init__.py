"""The nouns every part of sentinel speaks: what was read, what was found, what serves, what was decided.

This module exists so that agents, the decider, the store and the command line exchange one set of plain, immutable values.
What always holds here:

* Every value is a frozen msgspec Struct; JSON made from it reads back equal, and unknown keys are ignored, so that an older
  controller understands a newer agent.
* Nothing here does I/O, reads a clock, or imports the rest of the package but ``sentinel.pci``.
* ``None`` means *not measured*. It never means healthy and never means sick.
* Times are seconds since the Unix epoch as seen by whoever made the value, unless a name says otherwise.
"""

from __future__ import annotations

from sentinel.model.decided import (
    Drain,
    DrainState,
    Hold,
    Incident,
    Page,
    Response,
    Step,
    Urgency,
)
from sentinel.model.found import (
    READING_FORMAT,
    Finding,
    Reading,
    WorkerSeen,
)
from sentinel.model.serving import (
    Fleet,
    NodePlace,
    Pool,
    Role,
    RouteEntry,
    RoutePool,
    Routes,
    Worker,
    WorkerState,
)
from sentinel.model.told import (
    Ack,
    Command,
    CommandResult,
    GpuPlace,
    Place,
    Report,
)
from sentinel.model.words import (
    Action,
    Base,
    Component,
    Kind,
    Severity,
    Suspect,
    gpu_component,
)
from sentinel.pci import pci_address

__all__ = [
    "READING_FORMAT",
    "Ack",
    "Action",
    "Base",
    "Command",
    "CommandResult",
    "Component",
    "Drain",
    "DrainState",
    "Finding",
    "Fleet",
    "GpuPlace",
    "Hold",
    "Incident",
    "Kind",
    "NodePlace",
    "Page",
    "Place",
    "Pool",
    "Reading",
    "Report",
    "Response",
    "Role",
    "RouteEntry",
    "RoutePool",
    "Routes",
    "Severity",
    "Step",
    "Suspect",
    "Urgency",
    "Worker",
    "WorkerSeen",
    "WorkerState",
    "gpu_component",
    "pci_address",
]

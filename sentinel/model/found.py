"""What was read and what was found: a probe's raw reading, one judged fact, a worker as somebody sees it."""

from __future__ import annotations

from typing import Any

from sentinel.model.words import Action, Base, Component, Kind, Severity, Suspect

READING_FORMAT = 1


class Reading(Base, frozen=True, kw_only=True, omit_defaults=True):
    """What the hardware or a program said, raw, so that a recording can be judged anywhere and at any time later.

    ``data`` is made of plain JSON values; its shape belongs to the probe. ``format`` is the version of that shape: a
    probe refuses, in one sentence, a format it does not know.
    """

    probe: str
    node: str
    at: float
    boot_id: str = ""
    format: int = READING_FORMAT
    data: dict[str, Any] = {}


class Finding(Base, frozen=True, kw_only=True, omit_defaults=True):
    """One judged fact about one component.

    ``check`` is a dotted name (``xid.79``, ``gpu.row_remap_pending``, ``worker.frozen``). A state that was measured and
    is fine is reported as ``present=False``; a state that could not be measured is not reported at all, so that "not
    measured" can never clear nor raise anything. ``id`` is the same for the same occurrence however often it is sent.
    """

    id: str
    check: str
    component: Component
    at: float  # of a state: when it was measured, by which one measurement told twice is known; of an event: when it happened
    kind: Kind = Kind.STATE
    present: bool = True
    severity: Severity = Severity.INFO
    action: Action = Action.NONE
    suspect: Suspect = Suspect.SELF
    certainty: float = 1.0  # 0..1; below 1 it is doubt, and doubt is budgeted
    summary: str = ""  # one sentence for a person
    evidence: tuple[str, ...] = ()  # raw lines or field=value, bounded by the probe
    count: int = 1  # occurrences folded into this one
    facts: dict[str, Any] = {}  # machine-readable detail: {"xid": 79}, {"links": [8], "unit": "RLW"}

    @property
    def of_weight(self) -> bool:
        """Sent at once instead of with the next snapshot."""
        return self.present and (self.severity is Severity.FATAL or self.kind is Kind.EVENT)


class WorkerSeen(Base, frozen=True, kw_only=True, omit_defaults=True):
    """A serving process as an agent (on its node) or the controller (over the network) sees it.

    ``None`` in any field: not measured. ``progress`` is a counter that only stands still when no token is made.
    """

    worker: str = ""  # configured name where known
    url: str = ""
    engine: str = ""  # "vllm", "dynamo"
    pid: int | None = None
    gpus: tuple[str, ...] = ()  # PCI addresses it holds on this node
    healthy: bool | None = None  # what its own /health says; never enough by itself
    running: int | None = None
    waiting: int | None = None
    progress: float | None = None
    instance: str = ""  # Dynamo instance id (hex) where it has one

"""What agents and controllers tell each other: where a node stands, reports and their answers, commands and how they ended."""

from __future__ import annotations

from sentinel.model.found import Finding, WorkerSeen
from sentinel.model.words import Base, Component


class GpuPlace(Base, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU by the names that others know it by."""

    pci: str
    uuid: str = ""  # "GPU-…"; "" not measured
    module: int | None = None  # its position on the tray (NVML platform info, moduleId)
    domain: str = ""  # its NVLink domain, "uuid.clique", only where that is not its node's


class Place(Base, frozen=True, kw_only=True, omit_defaults=True):
    """Where a node stands, as its own hardware says (NVML platform and fabric information); empty and None: not measured."""

    chassis: str = ""  # serial number of the chassis: the rack
    slot: int | None = None  # switch trays counted
    tray: int | None = None  # compute trays only
    host: int | None = None  # which of the tray's hosts, where it has more than one
    domain: str = ""  # NVLink domain: cluster UUID, 32 hex digits; "" also while the fabric is not registered
    clique: int | None = None  # NVLink partition within the domain
    gpus: tuple[GpuPlace, ...] = ()
    ports: tuple[str, ...] = ()  # InfiniBand devices: "mlx5_0"
    addresses: tuple[str, ...] = ()  # by which IMEX peers know it: host names and IP addresses


class Report(Base, frozen=True, kw_only=True, omit_defaults=True):
    """What an agent sends. ``seq`` rises by one per report within ``session`` (one run of the agent).

    A report with ``snapshot`` carries every known state (present or not). One with ``same`` is a heartbeat: ``same`` is the
    ``seq`` of a snapshot of this session that the controller holds, and what the heartbeat does not mention is as it was told
    last, or was not measured again. It carries, where measured since they were last told, the states that are bad, those that the
    controller watches (``Ack.watch``) and those that changed; workers, probes and place only when they changed. Others carry
    only what is new and of weight.
    """

    node: str
    session: str
    seq: int
    at: float
    boot_id: str = ""
    version: str = ""
    snapshot: bool = False
    findings: tuple[Finding, ...] = ()
    workers: tuple[WorkerSeen, ...] = ()
    probes: dict[str, bool | None] = {}  # probe → its last read succeeded; None: has not run yet
    place: Place | None = None  # with snapshots; None: nothing about it was measured
    same: int = 0  # heartbeats only


class Ack(Base, frozen=True, kw_only=True, omit_defaults=True):
    """The controller's answer once everything the report caused is durable. ``want_snapshot``: send one now.

    ``same``: the snapshot of this session that heartbeats may build on; 0: none, send snapshots. ``watch``: the node's states
    (component, check) that the controller counts samples of, to be told whenever they are measured, fine ones too.
    """

    session: str
    seq: int
    want_snapshot: bool = False
    same: int = 0
    watch: tuple[tuple[Component, str], ...] = ()


class Command(Base, frozen=True, kw_only=True, omit_defaults=True):
    """A local action for one agent. ``id`` is its idempotency key: an agent carries it out at most once, ever."""

    id: str
    node: str
    action: str  # key of the agent's own allow-list: "reset_gpu", "start_worker", "stop_worker", "kill_worker", …
    args: dict[str, str] = {}  # fills the placeholders of the allowed argument vector
    deadline_s: float = 60.0
    why: str = ""


class CommandResult(Base, frozen=True, kw_only=True, omit_defaults=True):
    """How a command ended. ``refused``: not in the allow-list, or its arguments do not fit; nothing was run."""

    id: str
    node: str
    ok: bool
    refused: bool = False
    detail: str = ""
    seconds: float = 0.0

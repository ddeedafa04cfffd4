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

from enum import StrEnum
from typing import Any, Literal

import msgspec

from sentinel.pci import pci_address as pci_address  # noqa: PLC0414  (a name of the model, like those below)


class Severity(StrEnum):
    """How bad a finding is for the component it names; only ``fatal`` is sent at once."""

    INFO = "info"
    WARNING = "warning"
    FATAL = "fatal"

    @property
    def rank(self) -> int:
        return ("info", "warning", "fatal").index(self.value)


class Action(StrEnum):
    """The first thing to do about a finding. The order is the ladder: a later one is the stronger one."""

    NONE = "none"
    WAIT = "wait"  # a message that decides is still to come (Xid 145 before its 154)
    UNDRAIN = "undrain"
    FIX_MONITOR = "fix_monitor"
    RESTART_WORKER = "restart_worker"
    RESTART_IMEX = "restart_imex"
    RESTART_FABRIC_MANAGER = "restart_fabric_manager"
    INSPECT = "inspect"
    RESET_GPU = "reset_gpu"
    REBOOT_NODE = "reboot_node"
    POWER_CYCLE = "power_cycle"
    CONTACT_SUPPORT = "contact_support"

    @property
    def rank(self) -> int:
        return list(Action).index(self)


class Suspect(StrEnum):
    """Who is to blame, as far as the finding itself can tell."""

    SELF = "self"
    PEER = "peer"
    SWITCH = "switch"
    APP = "app"
    MONITOR = "monitor"


class Kind(StrEnum):
    """A ``state`` is reported until it ends; an ``event`` happened once and ends only by a verified repair or by age."""

    STATE = "state"
    EVENT = "event"


class Base(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Common shape of all nouns: immutable, keyword-only, compact on the wire.

    None can be part of a cycle, so the collector need not walk the hundreds of thousands of them that a fleet makes.
    """


class Component(Base, frozen=True, kw_only=True, omit_defaults=True, order=True):
    """What a finding is about: a node, a device of it, or a part of the device.

    Written as ``node``, ``node/gpu@0009:01:00.0`` or ``node/gpu@0009:01:00.0/nvlink7``.
    """

    node: str
    device: str = ""  # "gpu@0009:01:00.0", "ib@mlx5_0", "worker@decode-03", "driver", "kernel_log"
    part: str = ""  # "nvlink7", "port1"

    def __str__(self) -> str:
        return "/".join(p for p in (self.node, self.device, self.part) if p)

    @classmethod
    def parse(cls, text: str) -> Component:
        """Read the written form back; raises ValueError when it has no node or more than three parts."""
        parts = text.split("/")
        if not parts[0] or len(parts) > 3 or "" in parts:
            raise ValueError(f"not a component: {text!r} (wanted node, node/device or node/device/part)")
        return cls(node=parts[0], device=parts[1] if len(parts) > 1 else "", part=parts[2] if len(parts) > 2 else "")

    @property
    def gpu(self) -> str | None:
        """PCI address of the GPU it names or belongs to; None when it is about something else."""
        return self.device[4:] if self.device.startswith("gpu@") else None

    @property
    def worker(self) -> str | None:
        return self.device[7:] if self.device.startswith("worker@") else None

    def covers(self, other: Component) -> bool:
        """Whether ``other`` is this component or lies inside it."""
        return (
            self.node == other.node
            and self.device in ("", other.device)
            and self.part in ("", other.part)
        )


def gpu_component(node: str, pci: str) -> Component:
    return Component(node=node, device=f"gpu@{pci_address(pci)}")


# ---------------------------------------------------------------------------------------------------------------------
# What was read and what was found


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


# ---------------------------------------------------------------------------------------------------------------------
# Agent ↔ controller


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


# ---------------------------------------------------------------------------------------------------------------------
# What serves


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Worker(Base, frozen=True, kw_only=True, omit_defaults=True):
    """One serving group: everything that lives and dies together (a TP4 decoder, a DEP8 prefill group over two trays)."""

    name: str
    pool: str
    url: str
    adapter: str = "vllm"  # "vllm" or "dynamo"
    role: Role = Role.BOTH
    gpus: tuple[Component, ...] = ()  # its ranks; empty: learned from the agents' reports
    nodes: tuple[str, ...] = ()  # where it runs; the first one carries out start and stop
    domain: str = ""  # NVLink domain (rack)
    capacity: float = 1.0  # sessions it is worth; a share of the pool's capacity
    standby: bool = False  # kept stopped until overflow needs it
    instance: str = ""  # Dynamo instance id (hex), when fixed; otherwise learned
    system_url: str = ""  # Dynamo system server (/health, /metrics) when it differs from url


class Pool(Base, frozen=True, kw_only=True, omit_defaults=True):
    """Workers that can stand in for each other, per role."""

    name: str
    model: str = ""
    floor: float = 0.5  # share of a role's capacity that automatic, doubtful drains never go below
    overflow: tuple[str, ...] = ()  # pools that take over, in order
    primary: bool = True
    max_doubtful_drains: int = 2  # per role in ten minutes
    max_domain_share: float = 0.34  # of one NVLink domain's capacity out at once on doubt
    max_share: float = 1.0  # of one role's capacity out at once on doubt, beside the floor
    decode_per_prefill: float = 4.0  # decode groups that one prefill group feeds; each role's worth is reckoned against it
    sessions_per_prefill: float = 66.0  # at 100 tokens/s/user
    context_tokens: int = 8000  # of an average session: what a moved one has to recompute


class NodePlace(Base, frozen=True, kw_only=True, omit_defaults=True):
    """Where a node stands, as the site says; it completes what the node reports, and where both speak they must agree."""

    node: str
    site: str = ""
    rack: str = ""
    domain: str = ""  # NVLink domain: any name that its nodes share
    tray: int | None = None
    addresses: tuple[str, ...] = ()
    leaves: dict[str, str] = {}  # InfiniBand device → the leaf switch its cable ends at


class Fleet(Base, frozen=True, kw_only=True, omit_defaults=True):
    """The configured picture: pools, workers, the nodes that are expected to report and where they stand."""

    pools: tuple[Pool, ...] = ()
    workers: tuple[Worker, ...] = ()
    nodes: tuple[str, ...] = ()
    places: tuple[NodePlace, ...] = ()
    asics: tuple[str, ...] = ()  # NVLink index → switch ASIC it ends at; empty: identity (not verified on hardware)


class WorkerState(StrEnum):
    """Where a worker stands in the route table."""

    ACTIVE = "active"  # takes requests
    CORDONED = "cordoned"  # keeps its sessions, gets no new ones
    OUT = "out"  # gets nothing new
    STANDBY = "standby"  # stopped, may be started


class RouteEntry(Base, frozen=True, kw_only=True, omit_defaults=True):
    worker: str
    url: str
    role: Role
    state: WorkerState
    capacity: float = 1.0


class RoutePool(Base, frozen=True, kw_only=True, omit_defaults=True):
    pool: str
    weight: float  # share of new sessions, 0..1
    workers: tuple[RouteEntry, ...] = ()


class Routes(Base, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """The published route table; ``version`` only rises. Gateways and clients obey the newest they have seen."""

    version: int = 0
    at: float = 0.0
    why: str = ""
    pools: tuple[RoutePool, ...] = ()


# ---------------------------------------------------------------------------------------------------------------------
# What was decided (durable)


class Response(StrEnum):
    """How traffic leaves: each is gentler than the next."""

    NONE = "none"
    STEER = "steer"  # less traffic
    CORDON = "cordon"  # no new sessions
    DRAIN = "drain"  # no new requests; wait for those in flight until a deadline
    EVICT = "evict"  # it is gone: stop now, let migration and retries move the streams


class Urgency(StrEnum):
    """What a page asks of a person. Maps onto PagerDuty severities."""

    CRITICAL = "critical"
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Step(Base, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a decision's history, readable by itself: when, what, why, and the id of the event that caused it."""

    at: float
    what: str
    why: str = ""
    cause: str = ""
    rule: str = ""


class Incident(Base, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """One fault with one culprit. ``key`` is stable for (fault class, culprit): it is also the page's dedup key."""

    id: str
    key: str
    fault: str  # fault class: the runbook's name
    culprit: str  # written component, worker name, or "fleet"
    opened_at: float
    severity: Severity = Severity.WARNING
    summary: str = ""
    victims: tuple[str, ...] = ()  # workers it takes capacity from
    confidence: float = 1.0  # 0..1: how sure it is that the culprit is the culprit
    scope: tuple[str, ...] = ()  # nodes and components that show the same fault and are not to blame
    page_key: str = ""  # dedup key of the page that was sent, where the culprit has been revised since
    findings: tuple[Finding, ...] = ()  # bounded: the first and the latest
    closed_at: float | None = None
    merged_into: str = ""
    paged: str = ""  # "", "triggered", "acknowledged", "resolved"
    history: tuple[Step, ...] = ()  # bounded


class DrainState(StrEnum):
    """Where a worker's way out and back stands; the table of moves is in sentinel.decide.moves."""

    REQUESTED = "requested"  # decided and durable; not yet carried out
    EASED = "eased"  # steered or cordoned: less or no new traffic, still serving
    DEROUTED = "derouted"  # gets nothing new; waiting for what is in flight
    STOPPING = "stopping"
    OUT = "out"  # stopped or parked; waits for a person, or for the repair to begin
    REPAIRING = "repairing"
    STARTING = "starting"
    VERIFYING = "verifying"
    RETURNING = "returning"
    DONE = "done"  # back in rotation
    CANCELLED = "cancelled"


class Drain(Base, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """One worker's way out of rotation and back."""

    id: str
    worker: str
    response: Response
    reason: str
    requested_at: float
    kind: Literal["drain", "start", "retire"] = "drain"  # a standby's way in and out moves through the same states
    state: DrainState = DrainState.REQUESTED
    since: float = 0.0  # when this state began
    by: str = "sentinel"  # or the operator's name
    incident: str = ""
    doubtful: bool = False
    deadline_s: float = 120.0  # for in-flight requests
    repair: Action = Action.NONE
    target: str = ""  # written component the repair acts on
    repaired: tuple[str, ...] = ()  # what has been repaired since it left service: written components, or a whole node
    tried: tuple[str, ...] = ()  # repairs that were carried out, whether or not they cured: "reset_gpu t03/gpu@0008:01:00.0"
    boot: str = ""  # boot id of the node when its reboot was asked for; "" none was, or it was not known
    attempt: int = 0  # rounds begun: part of every effect's key
    returns: bool = True  # False: stays out until a person says undrain
    planned: bool = False  # asked for by a maintenance window: it returns when that ends
    stopped: bool = False  # its process was stopped, so the way back begins with a start
    verified: bool = False  # the active test passed since the repair
    history: tuple[Step, ...] = ()


class Hold(Base, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A person's word. ``keep="in"``: never take it out; ``keep="out"``: never put it back. Outranks the machine."""

    target: str  # worker, node or written component
    keep: Literal["in", "out"]
    by: str
    reason: str
    at: float
    until: float | None = None
    planned: bool = False  # a maintenance window (keep="out"): what happens there is no fault, and it returns when it ends
    of: str = ""  # the rack that was named, where the window is one of several


class Page(Base, frozen=True, kw_only=True, omit_defaults=True):
    """One notification to a person. ``dedup_key`` is the incident's key: trigger, acknowledge and resolve share it."""

    id: str
    dedup_key: str
    event: Literal["trigger", "acknowledge", "resolve"]
    at: float
    urgency: Urgency = Urgency.ERROR
    summary: str = ""
    source: str = ""  # the component or node
    component: str = ""
    fault: str = ""
    runbook: str = ""  # link
    details: dict[str, Any] = {}

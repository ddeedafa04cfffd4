"""What was decided, durably: incidents, drains, holds, and the pages that go out."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from sentinel.model.found import Finding
from sentinel.model.words import Action, Base, Severity


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
    """Where a worker's way out and back stands; the table of moves is in sentinel.decide.state.moves."""

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
    under: Hold | None = None  # what a person has said of the same target before, and counts again when this is over


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

"""What goes into the decider and what comes out of it, as plain data.

This module exists so that a decision can be written down, sent, replayed and tested without any I/O. What always holds:

* Every event carries its own id and time; the decider has no other clock.
* Every instruction names the event that caused it and says why in one sentence.
* A ``Record`` or ``Forget`` is made durable, under the leader's epoch, before any effect of the same batch is carried out.
* An effect is pending (durably) from the moment it is decided until its ``Done`` event; its id is its idempotency key, so
  carrying it out again after a crash is harmless.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sentinel.model import Action, Drain, Fleet, Hold, Incident, Page, Report, Role, RoutePool, Routes, WorkerSeen

# ---------------------------------------------------------------------------------------------------------------------
# Events


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    id: str
    at: float  # seconds since the epoch, by the controller's clock


class FleetLoaded(Event, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The configured fleet, at start and whenever it changes."""

    fleet: Fleet


class PolicyLoaded(Event, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The rules, already checked (``load_policy``): the first event of every leadership, and again whenever they change, so that
    a decision replays under the rules of its time."""

    text: str


class Restored(Event, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """What an earlier leader had decided; the first event after PolicyLoaded and FleetLoaded on taking over."""

    epoch: int
    incidents: tuple[Incident, ...] = ()
    drains: tuple[Drain, ...] = ()
    holds: tuple[Hold, ...] = ()
    routes: Routes | None = None
    pending: tuple[str, ...] = ()  # ids of the effects the shell is going to carry out again


class Reported(Event, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A node's report, already authenticated. ``at`` is when it arrived; ``report.at`` is what the node's clock said."""

    report: Report


class Heard(Event, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Nodes that reported since the last of these and had nothing to say: they are there."""

    nodes: tuple[str, ...]


class Watched(Event, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The controller's own look at one worker over the network. ``reachable`` None: could not tell."""

    worker: str
    reachable: bool | None
    seen: WorkerSeen | None = None


class Replica(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The gateway processes of one name. ``version``: the oldest route table that one of them obeys, ``newest``: the newest (0:
    told by a controller that did not know it); ``there``: heard of lately."""

    name: str
    version: int
    there: bool = True
    newest: int = 0


class Relay(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker as the gateways together see it. ``breaker``: one that is open and over its time counts as half-open, since the
    next request is a probe. ``hosts``: those that saw what opened its breaker. ``answers``: whether any request to it ended well
    within the window. ``pin_until``: seconds since the epoch, by the store's clock."""

    worker: str
    breaker: Literal["closed", "open", "half_open"] = "closed"
    why: str = ""
    hosts: tuple[str, ...] = ()
    answers: bool = False
    pin: Literal["", "open", "closed"] = ""
    pin_by: str = ""
    pin_until: float = 0.0


class Relayed(Event, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """What the gateways see and obey, as the store had it at ``at``: of ``replicas`` all when any changed (None: as before), of
    ``workers`` those that changed. ``window``: seconds that ``answers`` looks back. ``panics``: all pools that are in panic."""

    window: float
    replicas: tuple[Replica, ...] | None = None
    workers: tuple[Relay, ...] = ()
    panics: tuple[str, ...] = ()


class Tick(Event, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Time passed. Silence, dwell times and deadlines are noticed on ticks only."""


class Done(Event, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """An effect ended. ``ok`` None: it could not be told whether it took effect (then it is tried again or escalated)."""

    instruction: str
    ok: bool | None
    detail: str = ""
    facts: dict[str, Any] = {}


class Asked(Event, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A person's command, already authenticated and its target checked to exist."""

    verb: Literal["drain", "undrain", "hold", "release", "maintain", "pin", "unpin", "acknowledge", "resolve"]
    target: str  # worker name, node name, written component, or incident id
    by: str
    reason: str = ""
    deadline_s: float | None = None
    keep: Literal["in", "out"] = "in"
    until: float | None = None


AnyEvent = FleetLoaded | PolicyLoaded | Restored | Reported | Heard | Watched | Relayed | Tick | Done | Asked

# ---------------------------------------------------------------------------------------------------------------------
# Instructions


class Instruction(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    id: str
    cause: str  # id of the event
    why: str = ""


class Record(Instruction, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Write a decision down. ``value`` is the noun that ``kind`` says; it replaces what stood under ``key``.

    ``news``, of a route table: the pools in which anything changed since the one before, with the rows that did; None: it is not
    known what did. It is for ``brief`` and is not written down.
    """

    kind: Literal["incident", "drain", "hold", "routes"]
    key: str
    value: Incident | Drain | Hold | Routes
    news: tuple[RoutePool, ...] | None = None


class Forget(Instruction, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Remove a decision that is over (a lifted hold, an old closed incident)."""

    kind: Literal["incident", "drain", "hold"]
    key: str


class Effect(Instruction, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Something to do in the world. ``lane`` orders effects: within one lane they run one after the other.

    What stands before a ``#`` in the id is the idempotency key: a second try of the same step differs only after it.
    """

    lane: str


class Deroute(Effect, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    worker: str


class Reroute(Effect, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    worker: str


class AwaitIdle(Effect, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Wait until no gateway obeys a table that still names it, and nothing is in flight. Done(ok=True): so it is; ok=False: the
    deadline passed before."""

    worker: str
    until: float  # seconds since the epoch


class StopWorker(Effect, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """``hard``: kill at once, its GPU or engine is gone; else ask it to end (sent only when idle or past its deadline)."""

    worker: str
    hard: bool = False


class StartWorker(Effect, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    worker: str


class Repair(Effect, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    node: str
    action: Action
    target: str  # written component


class Verify(Effect, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Prove a worker by a request of one token, before it gets traffic. Done(ok=True) when the answer was right."""

    worker: str
    deadline_s: float


class Look(Effect, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Look at a worker over the network now; the answer comes as a Watched event before the Done."""

    worker: str


class PinBreaker(Effect, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Hold the breaker that all gateways share open or closed until a time; "" takes that away. Of a person's pin only a person
    takes anything away: then Done(ok=False) says whose it is."""

    worker: str
    state: Literal["open", "closed", ""]
    until: float = 0.0  # seconds since the epoch
    by: str = "sentinel"


class ScaleOut(Effect, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Ask what runs the pool for more workers of a role (``Serving.scale_to``): standbys and overflow cannot carry it."""

    pool: str
    role: Role
    count: int  # workers of that role wanted in all


class SendPage(Effect, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    page: Page


AnyEffect = (
    Deroute | Reroute | AwaitIdle | StopWorker | StartWorker | Repair | Verify | Look | PinBreaker | ScaleOut | SendPage
)
AnyInstruction = Record | Forget | AnyEffect

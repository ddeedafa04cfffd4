"""What is decided and durable, as the API and the metrics show it.

This module exists so that nobody outside sees a decision before it is durable: the decider runs ahead of the store by one
batch, this ledger does not. What always holds:

* It changes only by what was loaded from the store or by a commit that succeeded.
* Its values are the model's own nouns.
* ``pins`` is no part of that: the breakers' records are their place, and ``pinned`` keeps here what stands in them.
"""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import structlog

from sentinel.controller.pinned import Pin
from sentinel.decide.state.events import AnyEffect, AnyEvent, AnyInstruction, Done, Forget, Record
from sentinel.model import Component, Drain, DrainState, Fleet, Hold, Incident, Routes, Worker, WorkerState
from sentinel.store import Change, Drop, PublishRoutes, Put, Stored
from sentinel.store.decisions import Table

log = structlog.get_logger(__name__)

_effect = msgspec.json.Decoder(AnyEffect)

OVER = (DrainState.DONE, DrainState.CANCELLED)


class Ledger:
    """The durable decisions of this leadership, and the configured fleet they are about."""

    def __init__(self, fleet: Fleet) -> None:
        self.incidents: dict[str, Incident] = {}
        self.drains: dict[str, Drain] = {}
        self.holds: dict[str, Hold] = {}
        self.pending: dict[str, AnyEffect] = {}
        self.routes: Routes | None = None
        self.pins: dict[str, Pin] = {}  # worker → what holds its breaker
        self.head = (0, 0)  # epoch and number of the commit that it is as of (``Stored.head``)
        self.load_fleet(fleet)

    def load_fleet(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.workers: dict[str, Worker] = {w.name: w for w in fleet.workers}
        self.nodes: frozenset[str] = frozenset(fleet.nodes).union(*(w.nodes for w in fleet.workers))

    def restore(self, stored: Stored) -> list[AnyEffect]:
        """Take what an earlier leader decided. Returns its effects still to be carried out, in the order of decision.

        An effect that cannot be read (written by a newer version) is left where it is, and said loudly.
        """
        self.incidents = {i.id: i for i in stored.incidents}
        self.drains = {d.id: d for d in stored.drains}
        self.holds = {h.target: h for h in stored.holds}
        self.routes, self.head = stored.routes, stored.head
        for key, body in stored.pending.items():
            try:
                self.pending[key] = _effect.decode(body)
            except msgspec.DecodeError as error:
                log.warning("a pending effect cannot be read (from a newer version?) and stays", effect=key, error=str(error))
        return list(self.pending.values())

    def is_newer(self, stored: Stored) -> bool:
        """Whether the store went back in time: it was emptied, or came back with what it held some commits ago."""
        return self.head > stored.head

    def changes(self, stored: Stored) -> list[Change]:
        """What makes the store, as it is, hold everything of this and nothing that had ended. What nobody can read stays."""
        ours: dict[Table, dict[str, Any]] = {
            "incident": self.incidents, "drain": self.drains, "hold": self.holds, "pending": self.pending,
        }  # fmt: skip
        theirs: dict[Table, Iterable[str]] = {
            "incident": (i.id for i in stored.incidents), "drain": (d.id for d in stored.drains),
            "hold": (h.target for h in stored.holds), "pending": (k for k, v in stored.pending.items() if _readable(v)),
        }  # fmt: skip
        found: list[Change] = [Drop(kind, key) for kind, keys in theirs.items() for key in keys if key not in ours[kind]]
        found += [Put(kind, key, value) for kind, table in ours.items() for key, value in table.items()]
        return found + ([PublishRoutes(self.routes)] if self.routes and self.routes != stored.routes else [])

    def apply(self, event: AnyEvent, instructions: Sequence[AnyInstruction]) -> list[Drain]:
        """Follow one event whose consequences are durable. Returns the drains that ended with it."""
        ended: list[Drain] = []
        if isinstance(event, Done):
            self.pending.pop(event.instruction, None)
        for n in instructions:
            match n:
                case Record(value=Routes() as routes):
                    self.routes = routes
                case Record(value=Incident() as incident):
                    self.incidents[n.key] = incident
                case Record(value=Hold() as hold):
                    self.holds[n.key] = hold
                case Record(value=Drain() as drain):
                    before = self.drains.get(n.key)
                    if drain.state in OVER and (before is None or before.state not in OVER):
                        ended.append(drain)
                    self.drains[n.key] = drain
                case Forget():
                    tables: dict[str, dict[str, Any]] = {"incident": self.incidents, "drain": self.drains, "hold": self.holds}
                    tables[n.kind].pop(n.key, None)
                case Record():
                    raise TypeError(f"no such record: {n.kind} {type(n.value).__name__}")
                case _:
                    self.pending[n.id] = n
        return ended

    def open_incidents(self) -> list[Incident]:
        return [i for i in self.incidents.values() if i.closed_at is None]

    def open_drains(self) -> list[Drain]:
        return [d for d in self.drains.values() if d.state not in OVER]

    def states(self) -> dict[str, WorkerState]:
        """Where each configured worker stands in the published route table; before there is one, where the fleet puts it."""
        routed = {e.worker: e.state for p in (self.routes.pools if self.routes else ()) for e in p.workers}
        return {
            w.name: routed.get(w.name, WorkerState.STANDBY if w.standby else WorkerState.ACTIVE) for w in self.fleet.workers
        }

    def own(self, node: str, component: Component) -> bool:
        """Whether a node may speak of this component: of itself, and of a configured worker only where that runs."""
        if component.node != node or component.worker is None:
            return component.node == node
        worker = self.workers.get(component.worker)
        places = {*worker.nodes, *(g.node for g in worker.gpus)} if worker else set()
        return not places or node in places

    def unknown(self, target: str, seen: Callable[[str], Iterable[Component]], *, incidents: bool = False) -> str:
        """"" when the target names a worker, a node, a device that is configured or was reported, or an incident.

        Otherwise one sentence for the person who asked, with the names that come close. ``seen``: what a node reported. Only
        one node's devices are looked at: a fleet has a million, and this runs between two renewals of the lease.
        """
        names = set(self.workers) | self.nodes
        if target in names or (incidents and (target in self.incidents or target in self.drains)):
            return ""
        node, slash, _ = target.partition("/")
        if slash:
            devices = {str(c) for w in self.fleet.workers for c in w.gpus if c.node == node} | {str(c) for c in seen(node)}
            if target in devices or any(d.startswith(target + "/") for d in devices):  # itself, or a part of it
                return ""
            names = devices or names
        elif incidents:
            names |= set(self.incidents)
        alike = heapq.nlargest(100, sorted(names), key=lambda n: _ends(n, target))
        close = difflib.get_close_matches(target, alike, n=3, cutoff=0.5)
        kinds = "worker, node, device or incident" if incidents else "worker, node or device"
        hint = f"did you mean {_either(close)}?" if close else f"known are {_some(sorted(self.workers))}"
        return f"no {kinds} is called {target!r}; {hint}"


def _readable(effect: bytes) -> bool:
    try:
        _effect.decode(effect)
    except msgspec.DecodeError:
        return False
    return True


def _ends(name: str, target: str) -> int:
    """How many characters two names have in common at their beginning and at their end."""
    return _run(name, target) + _run(name[::-1], target[::-1])


def _run(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _some(names: Sequence[str]) -> str:
    if not names:
        return "no workers at all: the fleet is empty"
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

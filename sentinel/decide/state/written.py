"""What is decided and written down: the durable half of the picture, and the one hand that writes it.

This module exists so that nothing durable changes without its Record. What always holds:

* Incidents, drains, holds and routes change only through ``put_*`` and ``drop_*``, which also emit the Record or Forget; per
  batch the last value of each wins.
* An effect is emitted once for as long as it has not ended.
* What is looked up by worker or node is kept beside what is written, so that no look-up costs what there is.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from sentinel.decide.state.events import AnyEffect, AnyInstruction, Effect, Forget, Record
from sentinel.model import Drain, DrainState, Hold, Incident, RoutePool, Routes, Step

HISTORY = 120  # steps kept per incident and drain: enough for days of folding, bounded in the store
ENDED = (DrainState.DONE, DrainState.CANCELLED)

Noun = TypeVar("Noun", Incident, Drain)


def with_step(value: Noun, step: Step) -> Noun:
    """Append one step; the first ten and the latest ones are kept when history grows past its bound."""
    history: tuple[Step, ...] = (*value.history, step)
    if len(history) > HISTORY:
        history = (*history[:10], *history[-(HISTORY - 10) :])
    return msgspec.structs.replace(value, history=history)


class Written:
    def __init__(self) -> None:
        self.incidents: dict[str, Incident] = {}
        self.drains: dict[str, Drain] = {}
        self._by_node: dict[str, dict[str, None]] = {}  # node, or culprit → ids of the incidents about it, in order
        self._paged_as: dict[str, str] = {}  # dedup key of a page → the incident that has taken it over
        self._open: dict[str, str] = {}  # worker → its open drain
        self._changed: set[str] | None = None  # workers whose row of the route table may have changed; None: all of them
        self.holds: dict[str, Hold] = {}
        self.routes = Routes()
        self.outstanding: dict[str, str] = {}  # key → id of the effects that have not ended
        self.epoch = 0
        self.now = 0.0
        self.cause = ""
        self._counter = 0
        self._records: dict[tuple[str, str], Record | Forget] = {}
        self._effects: list[AnyEffect] = []

    # -- saying what to do ------------------------------------------------------------------------------------------

    def begin(self, cause: str, at: float) -> None:
        self.cause, self.now = cause, at
        self._records.clear()
        self._effects.clear()

    def take(self) -> list[AnyInstruction]:
        return [*self._records.values(), *self._effects]

    def new_id(self, prefix: str) -> str:
        self._counter += 1
        return f"{prefix}-{self.epoch}-{self._counter}"

    def put_incident(self, incident: Incident) -> Incident:
        before = self.incidents.get(incident.id)
        if before is None or (before.culprit, before.scope) != (incident.culprit, incident.scope):
            gone = _nodes(before) - _nodes(incident) if before is not None else set()
            self._unplace(incident.id, gone)
            self._place(incident)
        self.incidents[incident.id] = incident
        self.taken_over(incident)
        self._record("incident", incident.id, incident)
        return incident

    def taken_over(self, incident: Incident) -> None:
        """Remember whose page goes on under another incident's key."""
        if incident.page_key:
            self._paged_as[incident.page_key] = incident.id

    def paged_as(self, key: str) -> Incident | None:
        """The open incident that has taken over the page with this key, and is not the one of that name."""
        incident = self.incidents.get(self._paged_as.get(key, ""))
        calls = incident is not None and incident.closed_at is None and incident.paged in ("triggered", "acknowledged")
        return incident if calls else None

    def put_drain(self, drain: Drain) -> Drain:
        self.drains[drain.id] = drain
        if drain.state not in ENDED:
            self._open[drain.worker] = drain.id
        elif self._open.get(drain.worker) == drain.id:
            del self._open[drain.worker]
        self._touch(drain.worker)
        self._record("drain", drain.id, drain)
        return drain

    def drains_recorded(self) -> list[Drain]:
        """Those that this event has changed."""
        return [r.value for r in self._records.values() if isinstance(r, Record) and isinstance(r.value, Drain)]

    def put_hold(self, hold: Hold) -> None:
        self.holds[hold.target] = hold
        self._record("hold", hold.target, hold)

    def put_routes(self, routes: Routes, news: tuple[RoutePool, ...] | None) -> None:
        """``news``: see Record."""
        self.routes = routes
        self._record("routes", "routes", routes, news)

    def drop_hold(self, target: str) -> None:
        if self.holds.pop(target, None):
            self._forget("hold", target)

    def drop_incident(self, incident_id: str) -> None:
        incident = self.incidents.pop(incident_id, None)
        if incident:
            self._paged_as.pop(incident.page_key, None)
            self._unplace(incident_id, _nodes(incident))
            self._forget("incident", incident_id)

    def drop_drain(self, drain_id: str) -> None:
        drain = self.drains.pop(drain_id, None)
        if drain:
            if self._open.get(drain.worker) == drain_id:
                del self._open[drain.worker]
            self._touch(drain.worker)
            self._forget("drain", drain_id)

    def effect(self, effect: AnyEffect) -> None:
        """Emit once: while an effect is outstanding, no other try under the same key is."""
        key = effect_key(effect)
        if key not in self.outstanding:
            self.outstanding[key] = effect.id
            self._effects.append(effect)

    def _record(
        self, kind: str, key: str, value: Incident | Drain | Hold | Routes, news: tuple[RoutePool, ...] | None = None
    ) -> None:
        self._records.pop((kind, key), None)
        record = Record(id=f"{kind}/{key}", cause=self.cause, kind=kind, key=key, value=value, news=news)  # type: ignore[arg-type]
        self._records[(kind, key)] = record

    def _forget(self, kind: str, key: str) -> None:
        self._records.pop((kind, key), None)
        self._records[(kind, key)] = Forget(id=f"{kind}/{key}", cause=self.cause, kind=kind, key=key)  # type: ignore[arg-type]

    def ended(self, effect_id: str) -> bool:
        """Take an effect off the outstanding ones; False when nobody waits for it."""
        key = effect_key(effect_id)
        if self.outstanding.get(key) != effect_id:
            return False
        del self.outstanding[key]
        return True

    def _touch(self, worker: str) -> None:
        if self._changed is not None:
            self._changed.add(worker)

    @property
    def stale(self) -> bool:
        """Whether something that the route table is made of has changed since it was last asked for."""
        return self._changed is None or bool(self._changed)

    def take_changed(self) -> set[str] | None:
        """Workers whose row may have changed since the last call; None: any of them."""
        changed, self._changed = self._changed, set()
        return changed

    # -- looking up ---------------------------------------------------------------------------------------------------

    def open_drain(self, worker: str) -> Drain | None:
        return self.drains.get(self._open.get(worker, ""))

    def open_drains(self) -> list[Drain]:
        return [self.drains[i] for i in list(self._open.values())]

    def incidents_on(self, node: str) -> list[Incident]:
        """The kept incidents, open or closed, whose culprit is this node or a part of it, or that it is in the scope of.

        Asked with a culprit ("t03/gpu@0008:01:00.0"): those of exactly that one, however many its node has.
        """
        return [self.incidents[i] for i in self._by_node.get(node, ())]

    def open_incidents(self) -> list[Incident]:
        return [i for i in self.incidents.values() if i.closed_at is None]

    def _place(self, incident: Incident) -> None:
        for node in sorted(_nodes(incident)):
            self._by_node.setdefault(node, {})[incident.id] = None

    def _unplace(self, incident_id: str, nodes: set[str]) -> None:
        for node in nodes:
            there = self._by_node.get(node, {})
            there.pop(incident_id, None)
            if not there:
                self._by_node.pop(node, None)


def _nodes(incident: Incident) -> set[str]:
    """Its culprit, where that is, and who else shows it; a worker, a domain or the fleet stands for itself."""
    return {incident.culprit, *(name.partition("/")[0] for name in (incident.culprit, *incident.scope))}


def effect_key(effect: Effect | str) -> str:
    """The idempotency key of an effect: what stands before ``#`` in its id."""
    return (effect if isinstance(effect, str) else effect.id).partition("#")[0]

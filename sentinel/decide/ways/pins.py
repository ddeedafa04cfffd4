"""The breaker that all gateways share, held open or closed: by sentinel while it stops a worker at once, by a person for a reason.

This module exists so that no gateway has to learn from failing requests what was decided already. What always holds:

* Whoever is stopped at once is pinned open with the decision, and unpinned with the one that gives it traffic again; a pin that
  was forgotten (another leader, a store that was away) is taken away as soon as it is seen.
* A person's pin is never touched, either way, and what a person unpins is not pinned again for the same decision; a pin of
  sentinel's ends by itself after ``LASTS_S``, since by then the route table alone is enough.
* Without a gateway nothing is pinned. A worker behind a Dynamo frontend has no breaker of its own.
"""

from __future__ import annotations

from typing import Literal

from sentinel.decide.faults.incidents import Incidents
from sentinel.decide.state.events import Asked, PinBreaker
from sentinel.decide.state.picture import ENDED, Picture
from sentinel.decide.ways.drain import Drains
from sentinel.model import Drain, DrainState, Response, Worker

OURS = "sentinel"
LASTS_S = 600.0  # a gateway obeys a new table within a second, or is not there any more


class Pins:
    def __init__(self, picture: Picture, incidents: Incidents, drains: Drains) -> None:
        self.p, self.incidents, self.drains = picture, incidents, drains

    def settle(self) -> None:
        """At the end of every event: what it decided about workers that are stopped at once."""
        for drain in self.p.drains_recorded():
            if drain.response is not Response.EVICT or not self.p.relays.heard(self.p.now):
                continue
            if drain.since != self.p.now:  # only written about: a person may have unpinned it since it was decided
                continue
            if drain.state in (DrainState.REQUESTED, DrainState.STOPPING):
                self._pin(drain)
            elif drain.state in (DrainState.RETURNING, *ENDED):
                self._unpin(drain.worker, f"{drain.worker} takes traffic again")

    def relayed(self) -> None:
        """What sentinel holds open although nobody asks for it any more."""
        for relay in self.p.relays.odd():
            if relay.pin and relay.pin_by == OURS and not self._wanted(self.p.open_drain(relay.worker)):
                self._unpin(relay.worker, "nothing asks for it any more")

    def asked(self, ask: Asked) -> None:
        """A person's own word about one worker's breaker."""
        worker = self.p.workers.get(ask.target)
        if worker is None:
            return
        state: Literal["open", "closed", ""] = "" if ask.verb == "unpin" else "open" if ask.keep == "out" else "closed"
        what = f"breaker pinned {state}" if state else "breaker unpinned"
        drain = self.p.open_drain(worker.name)
        if drain is not None:
            self.drains.note(drain, what, f"{ask.by}: {ask.reason}")
        for incident in self.p.incidents_on(worker.name):
            if incident.closed_at is None:
                self.incidents.note(incident, what, f"{ask.by}: {ask.reason}")
        self._emit(worker, state, f"{ask.by}: {ask.reason}", until=ask.until or 0.0, by=ask.by, key=self.p.cause)

    def _wanted(self, drain: Drain | None) -> bool:
        return drain is not None and drain.response is Response.EVICT and drain.state is not DrainState.RETURNING

    def _pin(self, drain: Drain) -> None:
        worker = self.p.workers.get(drain.worker)
        if worker is not None and worker.adapter != "dynamo" and not self.p.relays.of(worker.name).pin:
            key = f"{drain.id}/{drain.attempt}"
            self._emit(worker, "open", drain.reason, until=self.p.now + LASTS_S, by=OURS, key=key)

    def _unpin(self, name: str, why: str) -> None:
        worker = self.p.workers.get(name)
        if worker is not None and worker.adapter != "dynamo":
            self._emit(worker, "", why, until=0.0, by=OURS, key=f"off#{self.p.cause}")

    def _emit(self, worker: Worker, state: Literal["open", "closed", ""], why: str, *, until: float, by: str, key: str) -> None:
        name, lane = worker.name, f"breaker:{worker.name}"
        self.p.effect(
            PinBreaker(id=f"pin/{name}/{key}", cause=self.p.cause, lane=lane, why=why, worker=name, state=state, until=until, by=by)
        )

"""Who leaves the configuration, and who comes again: workers and nodes, with the drains and incidents about them.

This module exists so that nothing stands open for ever about something that nobody has any more. What always holds:

* A drain of a worker that the configuration does not name stands still, since an older file by mistake must not undo a decision;
  after ``timing.keep_closed`` without it the drain is ended. Since when is in its history, so that a new leader counts on.
* An incident about a node or worker that is configured no more, and of which nothing is heard, is closed in one step, and its page
  resolved; what it had out stays out for as long as its drain stands.
* A worker that left while it was out of service and comes again is tested before it serves, however long that took.
"""

from __future__ import annotations

from sentinel.decide.faults.culprit import is_pattern
from sentinel.decide.faults.incidents import Incidents
from sentinel.decide.state.picture import Picture
from sentinel.decide.ways.drain import Drains
from sentinel.model import Drain, DrainState, Fleet, Incident, Response, WorkerState

_LEFT, _AGAIN = "not configured", "configured again"  # steps of a drain


class Leaving:
    def __init__(self, picture: Picture, incidents: Incidents, drains: Drains) -> None:
        self.p, self.incidents, self.drains = picture, incidents, drains
        self._missed: dict[str, float] = {}  # culprit that is configured no more → since when a word of it is waited for
        self._expected: tuple[Fleet, frozenset[str]] = (picture.fleet, frozenset())

    def come_again(self) -> None:
        """The fleet was loaded or restored: drains of who has come again go on; who was out when it left is tested first."""
        for drain in self.p.open_drains():
            if drain.worker in self.p.workers and _left_at(drain) is not None:
                self.drains.note(drain, _AGAIN, f"{drain.worker} is configured again: this goes on")
        last: dict[str, Drain] = {}
        for drain in self.p.drains.values():
            before = last.get(drain.worker)
            if drain.kind == "drain" and (before is None or (before.since, before.id) < (drain.since, drain.id)):
                last[drain.worker] = drain
        for name, drain in sorted(last.items()):
            worker = self.p.workers.get(name)
            gone = drain.state is DrainState.CANCELLED and any(s.what == _LEFT for s in drain.history[-3:])
            if worker is None or not gone or self.p.open_drain(name) is not None or self.p.state_of(worker) is WorkerState.STANDBY:
                continue
            self.drains.request(
                Drain(
                    id=self.p.new_id("drain"), worker=name, response=Response.DRAIN, state=DrainState.OUT,
                    reason=f"{name} was out of service when it left the configuration ({drain.id}): tested before it serves",
                    requested_at=self.p.now, stopped=drain.stopped,
                )
            )  # fmt: skip

    def orphaned(self, incident: Incident) -> str:
        """Why this incident is about nothing that anybody has any more; "" when it is not."""
        name = incident.culprit.partition("/")[0]
        if name in self._known() or self.p.on_node(name) or is_pattern(incident):
            return ""
        worker = any(f.component.worker == name for f in incident.findings)
        if not worker and not any(f.component.node == name for f in incident.findings):
            return ""  # it never was a node or a worker
        limit = self.p.now - self.p.policy.timing.silent_after
        view = None if worker else self.p.nodes.get(name)
        told = (self.p.conditions.get(f.component, f.check) for f in incident.findings)
        if (view is not None and view.heard_at > limit) or any(c is not None and c.measured_at > limit for c in told):
            self._missed.pop(name, None)
            return ""
        if self._missed.setdefault(name, self.p.now) > limit:
            return ""
        return f"{name} is not configured any more, and nothing is heard of it"

    def _known(self) -> frozenset[str]:
        fleet, known = self._expected
        if fleet is not self.p.fleet:
            fleet, known = self._expected = (self.p.fleet, frozenset({*self.p.expected_nodes(), *self.p.workers, *self.p.pools}))
            self._missed = {n: at for n, at in self._missed.items() if n not in known}
        return known

    def tick(self) -> None:
        """Drains whose workers left stand still, and are ended when they have stood for long enough."""
        limit = self.p.policy.timing.keep_closed
        for drain in self.p.open_drains():
            if drain.worker in self.p.workers:
                continue
            since = _left_at(drain)
            if since is None:
                self.drains.note(drain, _LEFT, f"{drain.worker} is not configured: this stands still")
            elif self.p.now - since > limit and not _repairs(self.p, drain):
                self.drains.drop(drain, f"{drain.worker} has not been in the configuration for {limit / 3600:g} h")


def _left_at(drain: Drain) -> float | None:
    """When its worker left the configuration, as its history tells; None: it has not, or has come again."""
    step = next((s for s in reversed(drain.history) if s.what in (_LEFT, _AGAIN)), None)
    return step.at if step is not None and step.what == _LEFT else None


def _repairs(p: Picture, drain: Drain) -> bool:
    """Whether its repair has yet to answer: until then the node is not free."""
    return f"{drain.id}/repair/{drain.attempt}" in p.outstanding

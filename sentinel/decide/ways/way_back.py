"""The way back into service: repair, start, active test, clean look; and what follows when one of them fails.

This module exists so that there is one road back, whoever sent a worker out. What always holds:

* A worker that was out takes traffic only after an active test, and after everything that would take it out again has been
  measured fine since that test began. The exceptions serve all the while: one that was eased, one whose drain is called off
  before anything was done to its process, and one that a person holds in whatever is still reported.
* A repair begins when everything that it would end is out, and nothing else is done on the node (``Repairs.waits_to_repair``).
* A reboot is over when the node reports another boot, not when the command has ended: that ends before the node does, or with it.
* What did not cure is followed by the next rung of the ladder or by a person, and the incident says which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from sentinel.decide.faults.incidents import Incidents
from sentinel.decide.state.moves import MOVES
from sentinel.decide.state.picture import Picture
from sentinel.decide.state.planned import REBOOTS, not_looked_at
from sentinel.decide.ways.repair import COMES_BACK_S, NODE_WIDE, Repairs, done, mark, node_of
from sentinel.model import Action, Drain, DrainState, Response, Step

if TYPE_CHECKING:
    from sentinel.decide.state.events import Done

S = DrainState
Ask = tuple[Drain, str]  # what a person must decide, and why

_REFUSED = 3  # looks in a row: then its process is not there, and is started instead of asked
_REBOOTING, _SAYS_NO = "rebooting", "says no"  # steps: the command has ended, well or not; whether the node has rebooted is seen


class Moves(Protocol):
    """How a drain is moved along the table and written down (``Drains``)."""

    def move(self, drain: Drain, outcome: str, why: str, **changes: object) -> Drain: ...

    def note(self, drain: Drain, what: str, why: str) -> Drain: ...


class WayBack:
    def __init__(self, picture: Picture, incidents: Incidents, drains: Moves, repairs: Repairs) -> None:
        self.p, self.incidents, self.drains, self.repairs = picture, incidents, drains, repairs

    # -- repairing --------------------------------------------------------------------------------------------------

    def begin(self, drain: Drain) -> Ask | None:
        """Out of service and to return: repair when every group on the target is out and the node is free, or start."""
        if drain.repair is Action.NONE or done(drain, drain):
            self.towards(drain, "nothing is left to repair")
            return None
        if drain.repair is Action.RESTART_WORKER:
            self.towards(msgspec.structs.replace(drain, tried=_with(drain)), "restart the worker")
            return None
        siblings = [d for d in self.p.drains.values() if d.incident == drain.incident and d.id != drain.id]
        if any(done(drain, d) and d.since >= drain.requested_at for d in siblings):
            self._repaired(drain, f"{drain.repair.value} of {drain.target} was done for another group on it")
            return None
        leaving = (S.REQUESTED, S.DEROUTED, S.STOPPING)
        if any(d.state in leaving and d.worker in self.p.workers for d in siblings) or self._waits(
            drain, self.repairs.waits_to_repair(drain)
        ):
            return None
        others = self.repairs.with_it(drain.repair, drain.target, drain.worker)
        if others:  # started there since this was decided, or held in
            place = node_of(drain) if drain.repair in NODE_WIDE else drain.target
            sentence = f"{drain.repair.value} of {place} would take {', '.join(others)} with it"
            return self.drains.note(msgspec.structs.replace(drain, returns=False), "left to a person", sentence), sentence
        why = f"{drain.repair.value} of {drain.target}"
        boot = self._boot(drain) if drain.repair in REBOOTS else ""
        self.drains.move(drain, "repair", why, attempt=drain.attempt + 1, boot=boot)
        return None

    def repair_ended(self, drain: Drain, event: Done) -> Ask | None:
        """The command has ended. A refused one was never run: that is a person's, and no rung of the ladder."""
        detail = event.detail or f"{drain.repair.value} of {drain.target} {'done' if event.ok else 'failed'}"
        if not event.ok and event.facts.get("refused"):
            drain = self.drains.move(drain, "failed", f"{drain.repair.value} refused: {detail}", returns=False)
            return drain, f"{drain.repair.value} of {drain.target or drain.worker} was refused: {detail}"
        drain = msgspec.structs.replace(drain, tried=_with(drain))
        if drain.boot:
            self.drains.note(drain, _REBOOTING if event.ok else _SAYS_NO, detail)
            return self.rebooting(self.p.drains[drain.id])
        if event.ok:
            self._repaired(drain, detail)
            return None
        sentence = f"{drain.repair.value} of {drain.target} failed: {detail}"
        return self._fails(drain, f"{drain.repair.value} failed: {detail}", sentence)

    def rebooting(self, drain: Drain) -> Ask | None:
        """On ticks, while a reboot's command has ended: whether the node has come back with another boot."""
        step = self._ended(drain)
        if step is None:
            return None
        node = node_of(drain)
        if self._boot(drain) != drain.boot:
            self._repaired(drain, f"{node} has rebooted")
            return None
        patience = COMES_BACK_S if step.what == _REBOOTING else float(self.p.policy.timing.silent_after)
        if self.p.now - step.at < patience:
            return None
        why = step.why if step.what == _SAYS_NO else f"{node} has not come back with another boot within {patience / 60:g} min"
        return self._fails(drain, f"{drain.repair.value} failed: {why}", f"{drain.repair.value} of {node} failed: {why}")

    def waits_for_boot(self, drain: Drain) -> bool:
        return drain.state is S.REPAIRING and bool(drain.boot) and self._ended(drain) is not None

    def _ended(self, drain: Drain) -> Step | None:
        return next((s for s in reversed(drain.history) if s.what in (_REBOOTING, _SAYS_NO) and s.at >= drain.since), None)

    def _boot(self, drain: Drain) -> str:
        view = self.p.nodes.get(node_of(drain))
        return (view.boot_id if view is not None else "") or drain.boot

    def _repaired(self, drain: Drain, why: str) -> None:
        """One repair is done: the next one that this worker needs, or the way back."""
        node = (node_of(drain),) if drain.repair in NODE_WIDE else ()
        drain = msgspec.structs.replace(drain, repaired=(*drain.repaired, drain.target, *node), tried=_with(drain))
        more = self.repairs.next(drain)
        if more:
            drain = msgspec.structs.replace(drain, repair=more[0], target=more[1])
        if drain.state is S.REPAIRING:
            worker = self.p.workers.get(drain.worker)
            waits = worker is None or self.repairs.waits_to_start(worker)  # another tray of it, say, is being repaired
            self.drains.move(drain, "next" if more or waits else "repaired", why)
        elif more:
            self.drains.note(drain, "repaired", why)
        else:
            self.towards(drain, why)

    # -- starting and proving -----------------------------------------------------------------------------------------

    def towards(self, drain: Drain, why: str) -> Drain:
        """From OUT towards rotation: start it if it was stopped or is not there, then verify. A hold keeps it out."""
        worker = self.p.workers.get(drain.worker)
        hold = self.p.held(worker, "out") if worker is not None else None
        if hold:
            if not drain.history or drain.history[-1].what != "held out":
                drain = self.drains.note(drain, "held out", f"{hold.by}: {hold.reason}")
            return drain
        drain = msgspec.structs.replace(drain, returns=True)
        if worker is not None and self._waits(drain, self.repairs.waits_to_start(worker)):
            return self.p.drains[drain.id]
        # A new attempt: an agent answers a key that it knows with what happened then, and does not act again.
        attempt = drain.attempt + 1
        gone = drain.kind == "drain" and self.p.view(drain.worker).refused >= _REFUSED  # with its node, say
        start = drain.stopped or drain.kind == "start" or gone  # what could not be started is started anew, not merely asked
        return self.drains.move(drain, "start" if start else "verify", why, verified=False, attempt=attempt)

    def not_started(self, drain: Drain, detail: str) -> Ask | None:
        """A start failed. What sentinel has not stopped itself may come up by itself: then its test tells."""
        if drain.kind == "drain" and not drain.stopped:
            self.drains.move(drain, "started", f"start failed: {detail}; it may come up by itself")
            return None
        drain = self.drains.move(drain, "failed", f"start failed: {detail}", returns=False)
        return drain, f"{drain.worker} could not be started: {detail}"

    def untested(self, drain: Drain, detail: str) -> Ask | None:
        """The active test was not passed in time."""
        limit = f"within {self.p.policy.timing.verify_deadline:.0f} s"
        sentence = f"{drain.worker} did not pass its active test {limit}: {detail}"
        return self._fails(drain, f"did not pass its test: {detail}", sentence)

    def when_clean(self, drain: Drain) -> Ask | None:
        """Tested: back when nothing that would take it out is reported any more."""
        worker = self.p.workers.get(drain.worker)
        if worker is None:
            return None
        if not drain.returns:  # said on its way back: by a person, or by a fault that sentinel does not repair
            self.drains.move(drain, "failed", "it is to stay out", stopped=False)
            return None
        hold = self.p.held(worker, "out")
        if hold:  # tested anew when that is over
            self.drains.move(drain, "failed", f"held out by {hold.by}: {hold.reason}", stopped=False)
            return None
        dirty = "" if self.p.held(worker, "in") else self._unclean(drain)
        if not dirty:
            self.drains.move(drain, "passed", "one-token test answered and counters clean")
            return None
        if self.p.now - drain.since < self.p.policy.timing.verify_deadline:
            return None
        return self._fails(
            drain, f"still reported: {dirty}", f"{drain.worker} answers, but {dirty} is still reported after the repair"
        )

    def _unclean(self, drain: Drain) -> str:
        """The first finding about it that has not been proven fine since the test began; "" when all have."""
        if drain.kind != "drain":
            return ""
        if drain.planned and (why := not_looked_at(self.p, self.p.workers[drain.worker], drain.since)):
            return why
        own = self.p.incidents.get(drain.incident)
        found = [*self.incidents.to_clear(own)] if own and own.closed_at is None else []
        others = (i for i in self.incidents.about(drain.worker) if i is not own)
        found += [f for i in others for f, _ in self.incidents.demands(i, eases=False)]
        for f in found:
            if not self.p.may_run(drain.worker, f.component.node):
                continue  # it has moved away from what took it out
            if not self.p.conditions.clean_since(f.component, f.check, f.kind, drain.since):
                return f"{f.check} on {f.component}"
        return ""

    # -- what did not work --------------------------------------------------------------------------------------------

    def _fails(self, drain: Drain, what: str, sentence: str) -> Ask | None:
        """A repair failed, or did not cure: the next rung of the ladder, or a person."""
        action, target, why_not = self.repairs.rung(drain)
        if action is Action.NONE:
            running = {"stopped": False} if drain.state is S.VERIFYING else {}
            drain = self.drains.move(drain, "failed", what, returns=False, **running)
            return drain, f"{sentence}; {drain.repair.value} did not cure it; {why_not}" if why_not else sentence
        why = f"{drain.repair.value} did not cure it ({what}); {action.value} of {target} is next"
        incident = self.p.incidents.get(drain.incident)
        if incident is not None and incident.closed_at is None:
            self.incidents.note(incident, "next repair", why)
        mended = tuple(r for r in drain.repaired if r not in (target, node_of(drain)))
        drain = msgspec.structs.replace(drain, repair=action, target=target, repaired=mended)
        if drain.state is S.REPAIRING:
            self.drains.move(drain, "failed", why)
        elif (drain.state, "evicted") in MOVES:  # it runs, without traffic: nothing is waited for
            self.drains.move(drain, "evicted", why, response=Response.EVICT, verified=False, attempt=drain.attempt + 1)
        return None

    def _waits(self, drain: Drain, why: str) -> bool:
        """Whether there is something to wait for; said once."""
        if why and (not drain.history or drain.history[-1].what != "waits"):
            self.drains.note(drain, "waits", why)
        elif why and self.p.drains[drain.id] != drain:
            self.p.put_drain(drain)
        return bool(why)


def _with(drain: Drain) -> tuple[str, ...]:
    return drain.tried if mark(drain) in drain.tried else (*drain.tried, mark(drain))

"""Gentler than a drain: a worker that serves on with less traffic (steer) or without new sessions (cordon), and when it returns.

This module exists so that a fault which works and gets worse costs users less than a drain would. What always holds:

* Nothing is done to the process. A steered worker stays ACTIVE with ``pace.steer_share`` of its capacity in the route table; a
  cordoned one keeps its sessions and gets no new ones. Dynamo's router knows neither: there a cordoned worker leaves discovery
  (Deroute; what it has in flight finishes, the next turn of a session goes elsewhere), and of a steered one only readers of the
  route table take notice.
* It returns by itself when nothing asks for it any more, or when all that did has been measured fine for ``hysteresis.dwell``.
* What came and went is kept present until it was fine for longer (flap memory, in conditions); who has returned is not eased
  again within ``hysteresis.cool_down`` for the same doubtful check, unless it is worse. Neither ever holds a fact back.
"""

from __future__ import annotations

import msgspec

from sentinel.decide.faults.incidents import Incidents
from sentinel.decide.rules.policy import Rule
from sentinel.decide.state.mode import acts
from sentinel.decide.state.moves import GENTLE, gentle, rank
from sentinel.decide.state.picture import Picture
from sentinel.decide.ways.drain import Drains
from sentinel.model import Drain, DrainState, Finding, Response, Worker


class Ease:
    def __init__(self, picture: Picture, incidents: Incidents, drains: Drains) -> None:
        self.p = picture
        self.incidents = incidents
        self.drains = drains

    # -- before -----------------------------------------------------------------------------------------------------

    def not_yet(self, rule: Rule, finding: Finding, worker: Worker, response: Response) -> str:
        """Why time alone holds this response back; "" when it does not."""
        condition = self.p.conditions.get(finding.component, finding.check)
        if rule.after and condition is not None and self.p.now - condition.since < rule.after:
            return f"{response.value} of {worker.name} when it has lasted {rule.after:g} s"
        if response not in GENTLE or not (rule.budgeted or finding.certainty < 1.0):
            return ""
        cool_down = self.p.policy.hysteresis.cool_down
        for d in self.p.drains.values():
            same = d.worker == worker.name and d.state is DrainState.DONE and self.p.now - d.since < cool_down
            if same and d.response in GENTLE and rank(response) <= rank(d.response) and d.reason.startswith(f"{finding.check} on "):
                return f"{response.value} of {worker.name} not again within {cool_down:g} s of its return ({d.id})"
        return ""

    def first(self, drain: Drain) -> Drain:
        """Where it begins: a steered worker needs nothing done, since the published table is all of it."""
        return msgspec.structs.replace(drain, state=DrainState.EASED) if drain.response is Response.STEER else drain

    def harden(self, drain: Drain, wanted: Drain) -> Drain:
        """Worse news about an eased worker: the same drain, made what is wanted now."""
        drain = msgspec.structs.replace(
            wanted,
            incident=drain.incident if (own := self.p.incidents.get(drain.incident)) and own.closed_at is None else wanted.incident,
            history=drain.history,
            state=drain.state,
        )
        return self.drains.move(drain, "again", f"{wanted.response.value}: {wanted.reason}", attempt=drain.attempt + 1)

    # -- and after ----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let return what may: an eased worker was never stopped, so there is nothing to prove but that the fault is over."""
        for drain in self.p.open_drains():
            if drain.state is DrainState.EASED and drain.worker in self.p.workers and gentle(drain):
                over = self._over(drain)
                if over and not self.p.held(self.p.workers[drain.worker], "out"):
                    self.drains.move(drain, "passed", over)
            now = self.p.drains[drain.id]
            if now.state is DrainState.RETURNING and now.response is Response.STEER:  # it never left: nothing to put back
                self.drains.move(now, "rerouted", "takes its whole share again")

    def _over(self, drain: Drain) -> str:
        """Why it may have its traffic back; "" while it may not."""
        own = self.p.incidents.get(drain.incident)
        about = [*([own] if own is not None and own.closed_at is None else []), *self.incidents.about(drain.worker, eases=True)]
        asking = [f for i in about for f, rule in self.incidents.demands(i) if acts(self.p, rule)]
        asking = [f for f in asking if self.p.may_run(drain.worker, f.component.node)]  # it may have moved away
        if not asking:
            return "nothing asks for it any more"
        dwell = self.p.policy.hysteresis.dwell
        quiet = all(self.p.conditions.quiet_since(f) <= self.p.now - dwell for f in asking)
        return f"all that led to it has been fine for {dwell:g} s" if quiet and self.p.now - drain.since >= dwell else ""

"""The last guard before sentinel acts by itself: what the mode does not let pass is written down, and in ``advise`` told.

What always holds: what passes is done; what does not is a step of its incident, once, and counts against the budgets as if it had
been done.
"""

from __future__ import annotations

from sentinel.decide.faults.incidents import Incidents
from sentinel.decide.rules.policy import Mode
from sentinel.decide.state.mode import acts, mode_of
from sentinel.decide.state.moves import GENTLE
from sentinel.decide.state.picture import Picture, Shadow
from sentinel.decide.ways.waiting import Case, Waiting
from sentinel.model import Incident, Response, Urgency


class Modes:
    """The door's last guard: what passes it is done."""

    def __init__(self, picture: Picture, incidents: Incidents, waiting: Waiting) -> None:
        self.p = picture
        self.incidents = incidents
        self.waiting = waiting

    def lets(self, case: Case, response: Response, reason: str, *, doubtful: bool) -> bool:
        """Whether this may be done to the worker now; if not, it is written down, and in ``advise`` a person is told how."""
        incident, rule, finding, worker = case
        if acts(self.p, rule):
            self.p.shadows.pop(worker.name, None)
            return True
        self.waiting.mode(incident, rule, finding, worker)
        self.p.shadows[worker.name] = Shadow(self.p.now, incident.id, response, doubtful)
        incident = self.incidents.would(incident, f"{response.value} {worker.name}", reason, rule.fault)
        if mode_of(self.p.policy, rule) is Mode.ADVISE and response not in GENTLE:  # those have no command
            urgency = rule.page or Urgency.WARNING.value
            ask = self._command(incident, response)
            self.incidents.page(incident, urgency, ask, found=finding, fault=rule.fault, rule=rule)
        return False

    def _command(self, incident: Incident, response: Response) -> str:
        """What a person types to do it: one command for each worker that the incident takes capacity from."""
        p = self.p
        names = [n for n in incident.victims if n in p.workers and p.open_drain(n) is None and not p.held(p.workers[n], "in")]
        now = " --deadline 1s" if response is Response.EVICT else ""
        return "; ".join(f'sentinel drain {n} --reason "{incident.fault}, {incident.id}"{now}' for n in names)

"""Whether somebody was called for an incident together with others (``standing``), so that it does not call by itself.

What always holds: it stands in the incident's own history, so a new leader reads it there; what is found since, and sentinel's
being at its end, are news that nobody was called for.
"""

from __future__ import annotations

from sentinel.decide.state.picture import Picture
from sentinel.model import Incident

CALLED = "called with"  # step of an incident: the one that calls for it
NEEDS_A_PERSON = "needs a person"  # step of an incident: sentinel is at its end with it


def called_with(p: Picture, incident: Incident) -> bool:
    """Whether somebody was called for it together with others, and nothing has come of it since that they do not know."""
    told = next((s for s in reversed(incident.history) if s.what == CALLED), None)
    if told is None or any(s.what == NEEDS_A_PERSON and s.at > told.at for s in incident.history):
        return False
    conditions = (p.conditions.get(f.component, f.check) for f in incident.findings)
    return all(c is None or not c.present or c.since <= told.at for c in conditions)

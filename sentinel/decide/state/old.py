"""What is kept no longer: holds whose time has passed, incidents and drains that have been over for long.

This module exists so that neither the picture nor the store grows without end. What always holds: nothing that is open is dropped.
"""

from __future__ import annotations

from sentinel.decide.state.picture import ENDED, Picture

KEEP_CLOSED = 2000  # closed incidents that stay readable: a check that flaps all day must not fill the store


class Old:
    def __init__(self, picture: Picture) -> None:
        self.p = picture

    def forget(self) -> None:
        timing = self.p.policy.timing
        for hold in [h for h in self.p.holds.values() if h.until is not None and h.until <= self.p.now]:
            self.p.drop_hold(hold.target)
        closed = sorted((i for i in self.p.incidents.values() if i.closed_at is not None), key=lambda i: i.closed_at or 0.0)
        for number, incident in enumerate(closed):
            if len(closed) - number > KEEP_CLOSED or self.p.now - (incident.closed_at or 0.0) > timing.keep_closed:
                self.p.drop_incident(incident.id)
        for drain in [d for d in self.p.drains.values() if d.state in ENDED and self.p.now - d.since > timing.repair_memory]:
            self.p.drop_drain(drain.id)

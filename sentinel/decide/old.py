"""What is kept no longer: lifted holds, incidents and drains that have been over for long, drains whose worker is gone.

This module exists so that neither the picture nor the store grows without end. What always holds: nothing that is open is
dropped, but for a drain whose worker has been missing from the configuration for longer than a slip with an older file lasts.
"""

from __future__ import annotations

from sentinel.decide.drain import Drains
from sentinel.decide.picture import ENDED, Picture

KEEP_CLOSED = 2000  # closed incidents that stay readable: a check that flaps all day must not fill the store


class Old:
    def __init__(self, picture: Picture, drains: Drains) -> None:
        self.p = picture
        self.drains = drains
        self._gone: dict[str, float] = {}  # open drain → since when its worker is not configured

    def forget(self) -> None:
        timing = self.p.policy.timing
        for hold in [h for h in self.p.holds.values() if h.until is not None and h.until <= self.p.now]:
            self.p.drop_hold(hold.target)
        closed = sorted((i for i in self.p.incidents.values() if i.closed_at is not None), key=lambda i: i.closed_at or 0.0)
        for number, incident in enumerate(closed):
            if len(closed) - number > KEEP_CLOSED or self.p.now - (incident.closed_at or 0.0) > timing.keep_closed:
                self.p.drop_incident(incident.id)
        for drain in self.p.open_drains():
            since = self._gone.get(drain.id, self.p.now) if drain.worker not in self.p.workers else None
            if since is not None and self.p.now - since > timing.keep_closed:  # not a slip with an older file: it is gone
                self.drains.drop(drain, f"{drain.worker} has not been in the configuration for {timing.keep_closed / 3600:g} h")
                since = None
            if since is None:
                self._gone.pop(drain.id, None)
            else:
                self._gone[drain.id] = since
        for drain in [d for d in self.p.drains.values() if d.state in ENDED and self.p.now - d.since > timing.repair_memory]:
            self.p.drop_drain(drain.id)

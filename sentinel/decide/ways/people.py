"""What a person says goes: drain, undrain, hold, release, maintain, pin, unpin, acknowledge, resolve.

What always holds: a person's drain is not budgeted and stays until that person or another says undrain; a hold keeps the
machine from taking out (``in``) or putting back (``out``) until it is released or expires; every command leaves its mark,
with the person's name and reason, in the history of what it touched.
"""

from __future__ import annotations

import msgspec

from sentinel.decide.faults.incidents import Incidents
from sentinel.decide.state.events import Asked
from sentinel.decide.state.moves import gentle
from sentinel.decide.state.picture import Picture
from sentinel.decide.state.planned import window
from sentinel.decide.ways.drain import Drains
from sentinel.decide.ways.maintenance import DEADLINE_S, Maintenance
from sentinel.decide.ways.pins import Pins
from sentinel.model import Drain, DrainState, Hold, Response


class People:
    def __init__(self, picture: Picture, drains: Drains, incidents: Incidents, maintenance: Maintenance, pins: Pins) -> None:
        self.p = picture
        self.drains = drains
        self.incidents = incidents
        self.maintenance = maintenance
        self.pins = pins

    def asked(self, ask: Asked) -> None:
        match ask.verb:
            case "drain":
                self._drain(ask)
            case "undrain":
                self._undrain(ask)
            case "hold":
                self._hold(ask)
            case "maintain":
                self.maintenance.asked(ask)
            case "pin" | "unpin":
                self.pins.asked(ask)
            case "release" if window(self.p, ask.target):
                self.maintenance.end(ask.target, f"{ask.by}: {ask.reason or 'released'}")
            case "release":
                self.p.drop_hold(ask.target)
                for worker in self.p.meant(ask.target):
                    drain = self.p.open_drain(worker.name)
                    if drain:  # a hold that took it out does not bring it back: undrain does
                        self.drains.note(drain, "released", f"{ask.by}: {ask.reason}")
            case "acknowledge" | "resolve":
                incident = self.p.incidents.get(ask.target)
                if incident and ask.verb == "acknowledge":
                    self.incidents.acknowledge(incident, ask.by)
                elif incident:
                    self.incidents.settle(incident)
                    self.incidents.close(incident, f"{ask.by}: {ask.reason or 'resolved by hand'}")

    def _drain(self, ask: Asked, response: Response = Response.DRAIN) -> None:
        for worker in self.p.meant(ask.target):
            drain = self.p.open_drain(worker.name)
            if drain is not None and drain.kind == "drain":
                drain = msgspec.structs.replace(drain, returns=False, planned=False, by=ask.by)
                if drain.state is DrainState.RETURNING or gentle(drain):
                    self.drains.out_again(drain, f"kept out by {ask.by}: {ask.reason}")
                else:
                    self.drains.note(drain, "kept out", f"{ask.by}: {ask.reason}")
                continue
            if drain is not None:
                self.drains.drop(drain, f"drained by {ask.by}: {ask.reason}")
            self.drains.request(
                Drain(
                    id=self.p.new_id("drain"),
                    worker=worker.name,
                    response=response,
                    reason=f"{ask.by}: {ask.reason}",
                    requested_at=self.p.now,
                    by=ask.by,
                    deadline_s=ask.deadline_s if ask.deadline_s is not None else DEADLINE_S,
                    target=ask.target,
                    returns=False,
                )
            )

    def _undrain(self, ask: Asked) -> None:
        for worker in self.p.meant(ask.target):
            drain = self.p.open_drain(worker.name)
            if drain is None:
                continue
            why = f"undrained by {ask.by}: {ask.reason}"
            if drain.kind == "drain" and worker.standby and worker.name not in self.p.standby_up:
                self.drains.drop(drain, why)  # it was never in service: it may be started again, and nothing more
            elif drain.kind == "drain" and any(window(self.p, node) for node in worker.nodes):
                self.drains.give_up(msgspec.structs.replace(drain, planned=True), why)  # when the work is over, by itself
            else:
                self.drains.give_up(drain, why)

    def _hold(self, ask: Asked) -> None:
        if window(self.p, ask.target):
            self.maintenance.end(ask.target, f"{ask.by}: {ask.reason}")
        self.p.put_hold(
            Hold(target=ask.target, keep=ask.keep, by=ask.by, reason=ask.reason, at=self.p.now, until=ask.until),
        )
        for worker in self.p.meant(ask.target):
            drain = self.p.open_drain(worker.name)
            if ask.keep == "in" and drain and drain.kind != "start" and drain.by == "sentinel":
                self.drains.give_up(drain, f"held in by {ask.by}: {ask.reason}")
        if ask.keep == "out":
            self._drain(ask)

"""Maintenance windows: a node that a person works on, for a time that has an end.

This module exists so that work on a rack looks like work and not like eighteen faults. What always holds:

* A window is durable as a hold of the node (``Hold.planned``): its workers are drained as for a person, without budget or pace,
  and stay out until it ends, whatever leader there is. A rack is one window for each of its nodes.
* What is found on the node meanwhile opens no incident, pages nobody and is counted nowhere: not for a check that turns many nodes
  bad, not against a GPU, not as flapping, not as a repair that did not last. Nor is what its peers miss of it. It is shown.
* When it ends, by a person or by time, what was still reported then counts as if it had just been found, silence begins anew, and
  its workers return by the same way as after a repair: a start where they are not there, an active test, a clean look. So does
  what sentinel had taken out before and left to a person; what a person took out before stays out.
* A window lies over what a person has said of the node before (``Hold.under``) and takes nothing of it away: a hold counts again
  when it ends, and the window of a rack neither shortens nor ends one that was opened for the node itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sentinel.decide.state.events import Asked
from sentinel.decide.state.moves import gentle
from sentinel.decide.state.picture import Aside, Picture
from sentinel.decide.state.planned import STILL_S, planned, takes_out, whose, window
from sentinel.decide.ways.drain import Drains
from sentinel.decide.ways.repair import repair_target
from sentinel.model import Component, Drain, DrainState, Finding, Hold, Kind, Response, Worker, WorkerState

S = DrainState

DEADLINE_S = 300.0  # for requests in flight, where the person says nothing: longer than almost any answer
_SHOWN = 200  # findings kept for each node


class Maintenance:
    def __init__(self, picture: Picture, drains: Drains) -> None:
        self.p = picture
        self.drains = drains
        self._again: list[Finding] = []  # what counts from now on

    # -- what people say ----------------------------------------------------------------------------------------------

    def nodes_of(self, target: str) -> list[str]:
        """The nodes that a person's word means: the one of that name, or those of the rack; none where nothing is called so."""
        topology = self.p.topology
        if target in self.p.nodes or target in self.p.expected_nodes():
            return [target]
        named = {h.target for h in self.p.holds.values() if h.planned and h.of == target}
        return sorted(named | {n for n in topology.known() if topology.rack(n) == target})

    def asked(self, ask: Asked) -> None:
        """Begin a window, or give it another end; without an end in time: it is over now."""
        for node in self.nodes_of(ask.target):
            now = window(self.p, node)
            own = now is not None and ask.target not in (node, now.of)  # opened by somebody else's word about less, or another rack
            if ask.until is not None:
                if now is None or not own or (now.until is not None and now.until < ask.until):
                    self._begin(node, ask)
            elif now is not None and not own:
                self.end(node, f"{ask.by}: {ask.reason or 'the work is done'}")

    def _begin(self, node: str, ask: Asked) -> None:
        of = ask.target if ask.target != node else ""
        under = self.p.holds.get(node)
        if under is not None and under.planned and of in ("", under.of):  # the same window, with another end
            under = under.under
        self.p.put_hold(
            Hold(
                target=node, keep="out", by=ask.by, reason=ask.reason, at=self.p.now, until=ask.until, planned=True, of=of,
                under=under if _lasts(under, self.p.now) else None,
            )
        )  # fmt: skip
        self.p.set_aside.setdefault(node, {})
        self.p.to_look_at.pop(node, None)
        for worker in self.p.on_node(node):
            self._out(worker, node, f"maintenance of {node}, {ask.by}: {ask.reason}", ask.by, ask.deadline_s)

    def _out(self, worker: Worker, node: str, why: str, by: str, deadline_s: float | None) -> None:
        drain = self.p.open_drain(worker.name)
        if drain is None and self.p.state_of(worker) is WorkerState.STANDBY:
            return  # the hold alone keeps it from being started
        if drain is not None and drain.kind == "drain" and not gentle(drain):
            if drain.state is S.RETURNING:
                self.drains.out_again(msgspec.structs.replace(drain, planned=True, returns=False, by=by), why)
            else:
                self.drains.note(drain, "maintenance", why)
            return
        if drain is not None:  # steered, cordoned, or a standby on its way up or down
            self.drains.drop(drain, why)
        deadline = DEADLINE_S if deadline_s is None else deadline_s
        self.drains.request(
            Drain(
                id=self.p.new_id("drain"), worker=worker.name, response=Response.DRAIN, reason=why, requested_at=self.p.now,
                by=by, deadline_s=deadline, target=node, returns=False, planned=True,
            )
        )  # fmt: skip

    def end(self, node: str, why: str) -> None:
        """The window is over: what is still reported counts, and who is out because of it comes back."""
        over = self.p.holds.get(node)
        self.p.drop_hold(node)
        if over is not None and over.under is not None and _lasts(over.under, self.p.now):
            self.p.put_hold(over.under)
            if over.under.planned:
                return  # somebody works on it still
        view = self.p.nodes.get(node)
        if view is not None:
            view.heard_at = self.p.now  # a full silence before it is missed
        self.p.conditions.anew(Component(node=node))
        self.p.to_look_at[node] = [f for f in self._counts(node) if takes_out(self.p, f)]
        for worker in self.p.on_node(node):
            drain = self.p.open_drain(worker.name)
            if drain is not None and drain.kind == "drain" and not self.p.held(worker, "out"):
                self._back(worker, self._elsewhere(worker, drain, node), f"maintenance of {node} is over, {why}")

    def _elsewhere(self, worker: Worker, drain: Drain, node: str) -> Drain:
        """The same drain, with what it needs repaired on its other nodes: the work on this one has mended nothing there."""
        more = self.drains.repairs.next(drain) if drain.planned and drain.by != "sentinel" and not drain.returns else None
        if more is None or Component.parse(more[1]).node == node:
            return drain
        about = ((i, f) for i in self.drains.incidents.about(worker.name) for f, _ in self.drains.incidents.demands(i))
        incident = next((i.id for i, f in about if repair_target(f, worker) == more[1]), drain.incident)
        return msgspec.structs.replace(drain, repair=more[0], target=more[1], incident=incident, returns=drain.state is S.OUT)

    def _back(self, worker: Worker, drain: Drain, why: str) -> None:
        if not drain.planned and drain.by != "sentinel":
            self.drains.note(drain, "maintenance over", f"{why}; it stays out until somebody says undrain")
        elif worker.standby and worker.name not in self.p.standby_up:
            self.drains.drop(drain, why)
        elif drain.state is S.OUT and not drain.returns:
            self.drains.give_up(msgspec.structs.replace(drain, planned=True), why)
        elif drain.returns:
            self.drains.note(drain, "maintenance over", why)
        else:  # still on its way out: it is tested all the same, since somebody may have begun to work on it
            self.drains.note(msgspec.structs.replace(drain, planned=True, returns=True), "maintenance over", why)

    # -- what is found and what time brings ---------------------------------------------------------------------------

    def takes(self, finding: Finding) -> bool:
        """Whether a finding counts for nothing now; it is shown with the window that explains it."""
        if not finding.present:
            for aside in self.p.set_aside.values():
                aside.pop((finding.component, finding.check), None)
            return False
        node = whose(self.p, finding)
        if not node:
            return False
        aside = self.p.set_aside.setdefault(node, {})
        aside[(finding.component, finding.check)] = Aside(finding, self.p.now)
        if len(aside) > _SHOWN:
            del aside[next(iter(aside))]
        return True

    def tick(self) -> None:
        """End what is over, and take out who has come to a node since."""
        for hold in [h for h in self.p.holds.values() if h.planned]:
            if window(self.p, hold.target) is None:
                self.end(hold.target, "its time has passed")
                continue
            for worker in self.p.on_node(hold.target):
                if self.p.open_drain(worker.name) is None and not self.p.held(worker, "in"):
                    why = f"maintenance of {hold.target}, {hold.by}: {hold.reason}"
                    self._out(worker, hold.target, why, hold.by, None)

        for node in [n for n in self.p.set_aside if not planned(self.p, n)]:  # a reboot is over, or has failed
            self._counts(node)

    def _counts(self, node: str) -> list[Finding]:
        """What was set aside because of this node, and is still so: it counts from now on."""
        lately = self.p.now - STILL_S
        still = [a.finding for a in self.p.set_aside.pop(node, {}).values() if a.at >= lately and a.finding.kind is Kind.STATE]
        self._again += still
        return still

    def again(self) -> Iterator[Finding]:
        """What was set aside and counts from now on."""
        told, self._again = self._again, []
        yield from (f for f in told if not planned(self.p, f.component.node))


def _lasts(hold: Hold | None, now: float) -> bool:
    return hold is not None and (hold.until is None or hold.until > now)

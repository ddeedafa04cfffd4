"""What agents report and the controller's looks show, folded into the picture; what they find is handed on, one by one.

What always holds: a node speaks for itself only, and of a worker only when it runs there; a look without an answer is counted and
changes nothing else. Findings are handed on lazily, so that each is judged before the next is looked at: the decider must consume
what these methods return.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sentinel.decide.faults.incidents import Incidents
from sentinel.decide.faults.silence import Silence
from sentinel.decide.state.events import Watched
from sentinel.decide.state.past import Past
from sentinel.decide.state.picture import ENDED, NodeView, Picture
from sentinel.decide.ways.waiting import Waiting
from sentinel.model import Finding, Kind, Place, Report


class Hearing:
    def __init__(self, p: Picture, incidents: Incidents, *, silence: Silence, past: Past, waiting: Waiting) -> None:
        self.p, self.incidents, self.silence, self.past, self.waiting = p, incidents, silence, past, waiting

    def reported(self, report: Report) -> Iterator[Finding]:
        """A snapshot, or a heartbeat that carries something."""
        node = report.node
        yield from self._there(node)
        view = self.p.nodes[node]
        if view.boot_id and report.boot_id and view.boot_id != report.boot_id:
            self._rebooted(node)
            self.p.topology.rebooted(node)
        view.version = report.version or view.version
        view.boot_id = report.boot_id or view.boot_id
        view.clock_off_s = report.at - self.p.now
        view.probes = report.probes or view.probes
        yield from self._placed(node, report.place)
        learned = [self.p.learn_gpus(w.worker, node, w.gpus) for w in report.workers if w.gpus and self.p.may_run(w.worker, node)]
        if any(learned):
            self.waiting.take_up(node)
        for finding in report.findings:
            if not finding.present and not self.p.set_aside and self.p.conditions.get(finding.component, finding.check) is None:
                continue  # it never was bad: nearly all of every snapshot
            worker = finding.component.worker
            if finding.component.node == node and (worker not in self.p.workers or self.p.may_run(worker, node)):
                yield finding
        yield from self.past.judge(node, report.findings)

    def heard(self, nodes: Sequence[str]) -> Iterator[Finding]:
        """Heartbeats without a word."""
        for node in nodes:
            yield from self._there(node)
            yield from self._placed(node, None)

    def watched(self, event: Watched) -> None:
        """A look of the controller at one worker."""
        view = self.p.view(event.worker)
        if event.worker not in self.p.workers:
            return
        view.unanswered = view.unanswered + 1 if event.reachable is None else 0
        if event.reachable is None:
            return
        view.reachable, view.looked_at = event.reachable, self.p.now
        view.refused = 0 if event.reachable else view.refused + 1
        seen = event.seen
        if not event.reachable:
            view.load = None
        elif seen and (seen.running is not None or seen.waiting is not None):
            view.load = (seen.running or 0) + (seen.waiting or 0)

    def _there(self, node: str) -> Iterator[Finding]:
        view = self.p.nodes.setdefault(node, NodeView(heard_at=self.p.now))
        yield from self.silence.heard(node)
        view.heard_at, view.reported = self.p.now, True

    def _placed(self, node: str, place: Place | None) -> Iterator[Finding]:
        yield from self.p.topology.heard(node, place, self.p.now)

    def _rebooted(self, node: str) -> None:
        """Kernel events of the last boot are over; what is still wrong will be reported again."""
        for incident in self.p.open_incidents():
            mine = incident.findings and all(f.component.node == node and f.kind is Kind.EVENT for f in incident.findings)
            if mine and all(d.state in ENDED for d in self.incidents.drains_of(incident)):
                self.incidents.close(incident, f"{node} was rebooted")

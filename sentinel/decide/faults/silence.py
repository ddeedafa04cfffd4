"""Silence: a node whose agent no longer reports is first a question and only then, perhaps, a verdict.

What always holds:

* A silent agent drains nothing. Its workers are looked at over the network, and the gateways' recent outcomes are asked; while any
  of them answers either, the finding is about the monitor.
* ``node.down`` needs two sources: the agent is silent *and* every worker of the node has refused several looks in a row.
* ``node.unreachable``: the agent is silent and its workers do not even refuse (a tray without power, or a cut cable between it
  and here). From here the two look alike, so it drains nothing and asks a person at once.
* When a large share of the fleet is silent, or all of it, it is the controller that is deaf: then no node is called down, a
  verdict of before that has not been carried out waits, and whoever answers a look, or a gateway, is taken at its word. What other
  nodes report goes on to count, and so does what the gateways see fail: it was measured. When they are silent, too, nothing is left
  to act upon.
* A verdict is acted on only by a leader that has itself heard the silence, not by one that found it in the store.
* A new leader gives every node one full silence before it asks.
* Only a node that the configuration expects, or on which a worker is known, is missed; one that leaves it is missed no more.
* A node under maintenance, or one that sentinel itself is rebooting, is meant to be silent.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sentinel.decide.state.events import Look
from sentinel.decide.state.moves import gentle
from sentinel.decide.state.picture import NodeView, Picture
from sentinel.decide.state.planned import planned
from sentinel.decide.state.relayed import FAILING
from sentinel.model import Action, Component, Finding, Severity, Suspect, WorkerState

_LOOKS = 3  # refused in a row; one refused connection is a restart
_WEIGHT: dict[str, dict[str, Any]] = {  # how much each of the three says
    "agent.silent": {"severity": Severity.WARNING, "action": Action.FIX_MONITOR, "suspect": Suspect.MONITOR},
    "node.unreachable": {"severity": Severity.WARNING, "action": Action.INSPECT, "certainty": 0.6},
    "node.down": {"severity": Severity.FATAL, "action": Action.POWER_CYCLE, "certainty": 0.9},
}


class Silence:
    def __init__(self, picture: Picture) -> None:
        self.p = picture
        self._asked: set[str] = set()

    def heard(self, node: str) -> list[Finding]:
        """A report arrived: whatever the silence had raised is measured fine."""
        self._asked.discard(node)
        where = Component(node=node)
        return [self._finding(check, node, present=False) for check in _WEIGHT if self.p.conditions.get(where, check)]

    def tick(self) -> list[Finding]:
        """Findings about nodes that have been silent too long; asks for a look at their workers first."""
        found: list[Finding] = []
        expected = self.p.expected_nodes()
        missed = {n: v for n, v in self.p.nodes.items() if (n in expected or self.p.on_node(n)) and not self._meant(n, v)}
        timing, deaf = self.p.policy.timing, self._deaf(missed.values())
        self.p.deaf = deaf
        for node in self.p.nodes.keys() - missed.keys():
            found += self.heard(node)
        for node, view in missed.items():
            silent_for = self.p.now - view.heard_at
            if silent_for < timing.silent_after:
                continue
            workers = [w for w in self.p.on_node(node) if self.p.state_of(w) is not WorkerState.STANDBY]
            if node not in self._asked and not deaf:  # ten thousand looks at once would deafen it further
                self._asked.add(node)
                for w in workers:
                    look = Look(
                        id=f"look/{w.name}/{self.p.cause}",
                        cause=self.p.cause,
                        lane=f"look:{w.name}",
                        why=f"{node} is silent",
                        worker=w.name,
                    )
                    self.p.effect(look)
            if silent_for >= timing.silent_after + timing.silent_page_after:
                found.append(self._finding("agent.silent", node, self._not_reporting(node, silent_for)))
            in_rotation = [w for w in workers if (d := self.p.open_drain(w.name)) is None or gentle(d)]
            if any(self.p.relays.answers(w.name, self.p.now) for w in in_rotation):
                continue  # the gateways reach it
            if in_rotation and not deaf and all(self.p.view(w.name).refused >= _LOOKS for w in in_rotation):
                found.append(self._finding("node.down", node, f"{node} is silent and none of its workers answers"))
            elif in_rotation and not deaf and all(self.p.view(w.name).unanswered >= _LOOKS for w in in_rotation):
                why = f"{node} is silent and its workers give no answer at all: no power, or cut off from this controller"
                found.append(self._finding("node.unreachable", node, why))
        return found

    def _meant(self, node: str, view: NodeView) -> bool:
        """Whether it is meant to be silent: somebody works on it, or sentinel reboots it."""
        return self.p.now - view.heard_at >= self.p.policy.timing.silent_after / 2 and planned(self.p, node)

    def _deaf(self, views: Collection[NodeView]) -> bool:
        """Whether so many nodes have missed a report that the fault must be on this side. Half the silence counts already,
        so that the first node past its limit does not fall before the others are noticed."""
        rules = self.p.policy.systemic
        quiet = sum(self.p.now - v.heard_at >= self.p.policy.timing.silent_after / 2 for v in views)
        return quiet >= max(rules.min_nodes, rules.share * len(views)) or quiet == len(views) > 1

    def _not_reporting(self, node: str, silent_for: float) -> str:
        there, relays = self.p.on_node(node), self.p.relays
        serving = [w.name for w in there if self.p.view(w.name).reachable]
        through = [w.name for w in there if w.name not in serving and relays.answers(w.name, self.p.now)]
        also = f"; {', '.join(serving)} still answering" if serving else ""
        also += f"; {', '.join(through)} still answering through the gateways" if through else ""
        never = "" if self.p.nodes[node].reported else " since this controller leads"
        return f"the agent on {node} has not reported{never} for {silent_for:.0f} s{also}"

    def _finding(self, check: str, node: str, summary: str = "", *, present: bool = True) -> Finding:
        """What this module says of a node; one id for one silence."""
        return Finding(
            id=f"{node}:{check}:{self.p.nodes[node].heard_at:.3f}",
            check=check,
            component=Component(node=node),
            at=self.p.now,
            present=present,
            summary=summary,
            **_WEIGHT[check],
        )


def unheard(p: Picture, finding: Finding) -> bool:
    """Whether this is a verdict that may not be acted on now: on a node's silence, or one whose gateways do not stand by it."""
    if finding.check == FAILING:
        worker = p.workers.get(finding.component.worker or "")
        return worker is None or p.in_panic(worker.pool) or not p.relays.speak_against(worker.name, p.now)
    if finding.check not in _WEIGHT:
        return False
    view = p.nodes.get(finding.component.node)
    return p.deaf or view is None or p.now - view.heard_at < p.policy.timing.silent_after

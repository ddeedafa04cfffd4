"""A pool that is lost as a whole: the gateways' panic and what the agents find are one cause, whoever tells it first."""

from __future__ import annotations

import pytest

from sentinel.decide.state.events import Relay
from sentinel.model import Action, Component, Severity, Suspect
from sentinel.testing.decisions import World, rack

NODES = {f"decode-{n}": f"t{n + 2:02d}" for n in range(1, 9)}
OPEN = [Relay(worker=w, breaker="open", why="6 of 6 failed, seen by g1, g2", hosts=("g1", "g2")) for w in NODES][:4]

CLOSED = [Relay(worker=r.worker, answers=True) for r in OPEN]


def gone(w: World, present: bool = True) -> None:
    words = {"severity": Severity.FATAL, "suspect": Suspect.APP, "action": Action.RESTART_WORKER, "certainty": 1.0}
    for worker, node in NODES.items():
        w.report(w.state("worker.unreachable", Component(node=node, device=f"worker@{worker}"), present, **words))


@pytest.mark.parametrize("panic_first", [True, False])
def test_a_lost_pool_is_one_call(panic_first: bool) -> None:
    """One dedup key, at once, and the page has said by whom it was seen and been critical; every worker is taken out by itself."""
    w = World(rack(decoders=8))
    if panic_first:
        w.relayed(*OPEN, panics=("main",))
        gone(w)
    else:
        gone(w)
        w.relayed(*OPEN, panics=("main",))
    w.pass_time(2)
    w.relayed(*OPEN, panics=("main",))
    w.pass_time(2)
    triggers = [p for p in w.pages if p.event == "trigger"]
    assert len({p.dedup_key for p in triggers}) == 1
    assert "critical" in {p.urgency.value for p in triggers}
    assert any("gateways" in p.summary for p in triggers) and any("worker.unreachable" in p.summary for p in triggers)
    assert all(w.drain_of(worker) is not None for worker in NODES)


@pytest.mark.parametrize("panic_first", [True, False])
def test_it_is_over_when_both_are(panic_first: bool) -> None:
    """Workers that are back before the gateways' panic has run out end nothing: one call, resolved once."""
    w = World(rack(decoders=8))
    if panic_first:
        w.relayed(*OPEN, panics=("main",))
    gone(w)
    for second in range(20):
        if second == 4:
            for _ in range(3):
                gone(w, present=False)
        relays, panics = (OPEN, ("main",)) if second < 10 else (CLOSED, ())
        w.relayed(*relays, panics=panics)
        w.pass_time(2)
    w.relayed()
    w.pass_time(60)
    assert len({p.dedup_key for p in w.pages}) == 1
    assert [p.event for p in w.pages if p.event != "trigger"] == ["resolve"]


def test_what_is_left_when_the_panic_is_over_is_called_for() -> None:
    """Where the workers stay dead, somebody is told of them once the page for the panic is resolved."""
    w = World(rack(decoders=8))
    w.relayed(*OPEN, panics=("main",))
    gone(w)
    for _ in range(20):
        w.relayed()
        w.pass_time(2)
    assert [p.event for p in w.pages if p.fault == "pool-panic"][-1] == "resolve"
    assert [p.event for p in w.pages if p.fault == "worker-down"][-1] == "trigger"

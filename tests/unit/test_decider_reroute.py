"""A serving layer that does not answer costs no capacity: who is well and tested stays on its way back."""

from __future__ import annotations

import pytest

from sentinel.decide.state.events import Reroute
from sentinel.model import Action, DrainState, Finding, WorkerState, gpu_component
from sentinel.testing.decisions import PCIS, World, rack


def remap(w: World, node: str, present: bool = True) -> Finding:
    return w.state("gpu.row_remap_pending", gpu_component(node, PCIS[0]), present, action=Action.RESET_GPU)


def until_returning(outcome: bool | None, floor: float = 0.75) -> World:
    """A decoder that was drained on doubt, reset and tested, and whose reroute ends like this."""
    w = World(rack(floor=floor))
    w.outcomes = lambda e: outcome if isinstance(e, Reroute) else True
    w.report(remap(w, "t03"))
    w.pass_time(5)
    w.report(remap(w, "t03", present=False), remap(w, "t03", present=False))
    w.pass_time(120)
    return w


@pytest.mark.parametrize("outcome", [None, False])
def test_it_stays_on_its_way_back(outcome: bool | None) -> None:
    """However often its reroute is not answered, it keeps its place in the table, is tried on, and one person is told."""
    w = until_returning(outcome)
    drain = w.drain_of("decode-1")
    assert drain is not None
    assert drain.state is DrainState.RETURNING
    assert w.state_of("decode-1") is WorkerState.ACTIVE
    assert [p.event for p in w.pages if not p.details.get("update")] == ["trigger"]
    assert "reroute gave no answer" in w.pages[0].summary
    tries = len(w.did(Reroute))
    w.pass_time(60)
    assert len(w.did(Reroute)) > tries
    w.outcomes = lambda e: True
    w.pass_time(60)
    assert w.drain_of("decode-1").state is DrainState.DONE  # type: ignore[union-attr]
    assert [p.event for p in w.pages if not p.details.get("update")] == ["trigger", "resolve"]
    assert w.open_incidents() == []


def test_it_does_not_count_as_back_meanwhile() -> None:
    """While nobody has confirmed that it takes traffic, the next drain on doubt that would cross the floor without it waits."""
    w = until_returning(None)
    w.report(remap(w, "t04"))
    w.pass_time(3)
    assert w.state_of("decode-2") is WorkerState.ACTIVE
    assert w.decider.held_back() == {"decode-2"}
    w.outcomes = lambda e: True
    w.pass_time(700, step=5)
    assert w.decider.held_back() == frozenset()
    assert w.drain_of("decode-2") is not None


def test_worse_news_still_takes_it_out() -> None:
    """A GPU that falls off the bus on the way back is a fact: it leaves as ever."""
    w = until_returning(None)
    w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
    w.pass_time(10)
    assert w.state_of("decode-1") is WorkerState.OUT


def test_the_next_leader_tries_on() -> None:
    """A leader that takes over goes on with the reroute, and calls nobody a second time."""
    w = until_returning(None)
    w.lead()
    w.pass_time(120)
    assert w.drain_of("decode-1").state is DrainState.RETURNING  # type: ignore[union-attr]
    assert len([p for p in w.pages if p.event == "trigger" and not p.details.get("update")]) == 1

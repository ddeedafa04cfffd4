"""What a person says to keep in or out wins at any moment of a drain, and nothing found meanwhile is lost when it ends."""

from __future__ import annotations

import pytest

from sentinel.decide.state.events import AwaitIdle, Deroute, Repair, Reroute, StartWorker, StopWorker, Verify
from sentinel.model import Action, DrainState, WorkerState
from sentinel.testing.decisions import World
from tests.unit.decider_faults import off_bus, remap


class TestHolds:
    @pytest.mark.parametrize("ends", ["release", "expiry"])
    def test_what_a_hold_kept_in_leaves_when_the_hold_ends(self, ends: str) -> None:
        """A GPU that fell off the bus under a held worker is acted on once the person lets go; nothing of it is lost."""
        w = World()
        w.ask("hold", "decode-1", keep="in", until=w.now + 20 if ends == "expiry" else None)
        w.report(off_bus(w, "t03"))
        w.pass_time(10)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        if ends == "release":
            w.ask("release", "decode-1")
        w.pass_time(15)
        assert w.state_of("decode-1") is WorkerState.OUT
        assert [p.event for p in w.pages] == ["trigger"]

    def test_a_state_found_during_a_hold_is_acted_on_after_it(self) -> None:
        """A pending row remap that is reported all the while is drained when the hold is over."""
        w = World()
        w.ask("hold", "decode-1", keep="in", until=w.now + 20)
        for _ in range(6):
            w.report(remap(w, "t03"))
            w.pass_time(5)
        assert w.state_of("decode-1") is WorkerState.OUT

    def test_a_drain_called_off_by_a_hold_leaves_its_incident_open(self) -> None:
        """A worker that a person brought back unrepaired is not "repaired, verified and back"; released, it is drained again."""
        w = World()
        w.held = lambda e: isinstance(e, AwaitIdle)
        w.report(w.xid(95, "t03"))
        w.ask("hold", "decode-1", keep="in")
        w.held = lambda e: False
        w.settle()
        w.pass_time(4000, step=60)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert len(w.open_incidents()) == 1
        w.ask("release", "decode-1")
        w.pass_time(30)
        assert len(w.did(Repair)) == 1
        assert w.open_incidents() == []

    @pytest.mark.parametrize("at", [Deroute, AwaitIdle, StopWorker, Repair, StartWorker, Verify, Reroute])
    @pytest.mark.parametrize("code", [95, 79])
    def test_held_in_at_any_moment_it_comes_back(self, at: type, code: int) -> None:
        """Wherever the drain stands when a person says hold --in, the worker ends in service and new faults leave it there."""
        w = World()
        w.held = lambda e: isinstance(e, at)
        w.report(w.xid(code, "t03", action=Action.RESET_GPU if code == 95 else Action.REBOOT_NODE))
        w.pass_time(3)
        w.ask("hold", "decode-1", keep="in")
        w.report(w.xid(95, "t03", gpu=1))
        w.held = lambda e: False
        w.settle()
        w.pass_time(60)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert w.decider.p.open_drain("decode-1") is None

    def test_a_hold_outranks_dirty_counters(self) -> None:
        """A person who insists gets the worker back after its active test, whatever is still reported."""
        w = World()
        w.report(remap(w, "t03"))
        w.pass_time(3)
        assert w.drain_of("decode-1").state is DrainState.VERIFYING  # type: ignore[union-attr]
        w.ask("hold", "decode-1", keep="in")
        w.pass_time(2)
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    @pytest.mark.parametrize(("verb", "keep"), [("drain", "in"), ("hold", "out")])
    @pytest.mark.parametrize("at", [Repair, StartWorker, Verify, Reroute])
    def test_a_person_who_wants_it_out_gets_it_out_on_the_way_back_too(self, verb: str, keep: str, at: type) -> None:
        """drain and hold --out win over a return that is under way, even over one that has traffic already."""
        w = World()
        w.held = lambda e: isinstance(e, at)
        w.report(w.xid(95, "t03"))
        w.pass_time(3)
        w.ask(verb, "decode-1", keep=keep)
        w.held = lambda e: False
        w.settle()
        w.pass_time(60)
        assert w.state_of("decode-1") is WorkerState.OUT
        w.ask("release", "decode-1")
        w.ask("undrain", "decode-1")
        w.pass_time(5)
        assert w.state_of("decode-1") is WorkerState.ACTIVE

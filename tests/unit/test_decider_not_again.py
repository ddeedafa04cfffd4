"""What was decided or told once is not done or told again because more say it, or because another leader takes over."""

from __future__ import annotations

from sentinel.decide.state.events import Repair, StopWorker
from sentinel.model import DrainState, Finding, Severity, WorkerState, gpu_component
from sentinel.testing.decisions import PCIS, World, rack
from tests.unit.decider_faults import off_bus, remap


def sick(w: World, node: str, present: bool = True) -> Finding:
    return w.state("gpu.thermal", gpu_component(node, PCIS[0]), present, severity=Severity.FATAL)


class TestSystemicAndNewLeaders:
    def test_a_storm_of_facts_is_one_page_more(self) -> None:
        """Past the first few, nobody is paged for single nodes, on later ticks neither."""
        w = World(rack(decoders=10))
        for tray in range(3, 13):
            w.report(off_bus(w, f"t{tray:02d}"))
            w.pass_time(1)
        w.pass_time(30)
        assert {w.state_of(f"decode-{n}") for n in range(1, 11)} == {WorkerState.OUT}
        keys = [p.dedup_key for p in w.pages]
        assert keys.count("systemic/xid.79") == 1
        assert len(keys) == 4

    def test_a_freeze_outlives_its_leader(self) -> None:
        """A check that is systemic stays so under a new leader, also when agents are slow to find it; nothing more is drained."""
        w = World()
        for node in ("t03", "t04", "t05", "t06"):
            w.report(sick(w, node))
            w.report(sick(w, node))
        before = {x.name: w.state_of(x.name) for x in w.fleet.workers}
        w.lead()
        w.pass_time(40, reporting=[])
        for _ in range(8):
            for node in ("t03", "t04", "t05", "t06"):
                w.report(sick(w, node))
            w.pass_time(5)
        assert {x.name: w.state_of(x.name) for x in w.fleet.workers} == before
        assert [i.closed_at for i in w.incidents() if i.key == "systemic/gpu.thermal"] == [None]

    def test_what_a_budget_keeps_in_is_kept_in_by_the_next_leader(self) -> None:
        """An event that was held back is tried again by whoever leads, without a second page."""
        w = World(rack(floor=1.0))
        w.report(w.xid(95, "t03", certainty=0.9))
        w.lead()
        w.pass_time(5)
        assert w.decider.held_back() == {"decode-1"}
        assert len(w.pages) == 1
        w.reload(rack(floor=0.5))
        w.pass_time(5)
        assert w.decider.held_back() == frozenset()
        assert w.did(StopWorker)

    def test_a_repair_is_not_done_again_because_the_leader_changed(self) -> None:
        """A state that is still reported while the worker is tested is old news to the new leader, too."""
        w = World()
        w.report(remap(w, "t03"))
        w.pass_time(3)
        assert w.drain_of("decode-1").state is DrainState.VERIFYING  # type: ignore[union-attr]
        w.lead()
        w.report(remap(w, "t03"))
        w.pass_time(30)
        assert len(w.did(Repair)) == 1

    def test_resolved_by_hand_is_not_paged_again_at_once(self) -> None:
        """A state that a person has resolved and that is still reported is no news for an hour; then it is."""
        w = World()
        w.report(w.mismatch("t03"))
        w.pass_time(400, step=5)
        w.ask("resolve", w.incidents()[0].id)
        for _ in range(10):
            w.report(w.mismatch("t03"))
            w.pass_time(300, step=60)
        assert [p.event for p in w.pages] == ["trigger", "resolve"]
        for _ in range(10):
            w.report(w.mismatch("t03"))
            w.pass_time(300, step=60)
        assert [p.event for p in w.pages] == ["trigger", "resolve", "trigger"]

"""Maintenance windows: work is no fault, and what was taken out for it comes back by itself, proven."""

from __future__ import annotations

import msgspec
import pytest

from sentinel.decide.state.events import AwaitIdle, Deroute, Repair, StartWorker, StopWorker, Verify
from sentinel.model import (
    Action,
    Component,
    DrainState,
    Finding,
    Fleet,
    Hold,
    NodePlace,
    Severity,
    Suspect,
    WorkerState,
    gpu_component,
)
from sentinel.testing.decisions import PCIS, World, rack

HOUR = 3600.0


def placed() -> Fleet:
    """The rack, with its nodes in one of that name and one NVLink domain."""
    fleet = rack()
    places = tuple(
        NodePlace(node=n, rack="R1" if n < "t05" else "R2", domain="rack-1" if n < "t07" else "rack-2", addresses=(f"ip-{n}",))
        for n in fleet.nodes
    )
    return msgspec.structs.replace(fleet, places=places)


def maintain(w: World, target: str = "t03", lasts: float = HOUR, **more: object) -> None:
    w.ask("maintain", target, reason="new cable", until=w.now + lasts, **more)


def ended(w: World, target: str = "t03") -> None:
    w.ask("maintain", target, reason="done")


def remap(w: World, node: str = "t03", present: bool = True) -> Finding:
    return w.state("gpu.row_remap_pending", gpu_component(node, PCIS[0]), present, action=Action.RESET_GPU)


def thermal(w: World, node: str, present: bool = True) -> Finding:
    return w.state("gpu.thermal", gpu_component(node, PCIS[0]), present, severity=Severity.FATAL)


def but(w: World, *silent: str) -> list[str]:
    return [n for n in w.fleet.nodes if n not in silent]


class TestLeaving:
    def test_workers_leave_gently_and_come_back_tested(self) -> None:
        """What is in flight is waited for; at the end one token is asked for before there is traffic."""
        w = World()
        maintain(w)
        w.pass_time(5)
        assert w.state_of("decode-1") is WorkerState.OUT
        assert [type(e) for e in w.done if getattr(e, "worker", "") == "decode-1"] == [Deroute, AwaitIdle]
        ended(w)
        w.pass_time(5)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert len(w.did(Verify)) == 1
        assert not w.did(StopWorker)
        assert w.pages == []
        assert w.incidents() == []

    def test_it_ends_by_itself(self) -> None:
        """A window that nobody ends is over when its time is."""
        w = World()
        maintain(w, lasts=60)
        w.pass_time(50)
        assert w.state_of("decode-1") is WorkerState.OUT
        w.pass_time(20)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert w.decider.p.holds == {}

    def test_it_survives_its_leader(self) -> None:
        """A new leader knows the window, whose workers are out because of it, and when it ends."""
        w = World()
        maintain(w, lasts=60)
        w.pass_time(5)
        w.lead()
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        w.pass_time(30)
        assert w.incidents() == []
        assert w.state_of("decode-1") is WorkerState.OUT
        w.lead()
        w.pass_time(60)
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_a_person_spends_no_budget(self) -> None:
        """A whole rack leaves at once because somebody says so, and one word brings it back."""
        w = World(placed())
        maintain(w, "R1")
        w.pass_time(5)
        assert {h.target for h in w.decider.p.holds.values()} == {"t01", "t02", "t03", "t04"}
        assert {h.of for h in w.decider.p.holds.values()} == {"R1"}
        assert {n for n in ("prefill-1", "decode-1", "decode-2", "decode-3") if w.state_of(n) is WorkerState.OUT} == {
            "prefill-1", "decode-1", "decode-2",
        }  # fmt: skip
        ended(w, "R1")
        w.pass_time(10)
        assert w.state_of("prefill-1") is w.state_of("decode-1") is w.state_of("decode-2") is WorkerState.ACTIVE

    def test_a_group_over_two_nodes_waits_for_both(self) -> None:
        """The end of one window does not bring back a worker that another one keeps out."""
        w = World()
        maintain(w, "t01")
        maintain(w, "t02")
        w.pass_time(5)
        ended(w, "t01")
        w.pass_time(10)
        assert w.state_of("prefill-1") is WorkerState.OUT
        ended(w, "t02")
        w.pass_time(10)
        assert w.state_of("prefill-1") is WorkerState.ACTIVE

    def test_who_went_with_its_node_is_started(self) -> None:
        """A worker that refuses the controller when the work is done is started, and only then tested."""
        w = World()
        maintain(w)
        w.pass_time(5)
        for _ in range(3):
            w.watched("decode-1", False)
        ended(w)
        w.pass_time(5)
        assert [e.worker for e in w.did(StartWorker)] == ["decode-1"]  # type: ignore[union-attr]
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_where_nothing_may_be_started_it_may_come_up_by_itself(self) -> None:
        """A start that is not allowed after maintenance is no verdict: the test is."""
        w = World()
        maintain(w)
        w.pass_time(5)
        for _ in range(3):
            w.watched("decode-1", False)
        w.outcomes = lambda e: not isinstance(e, StartWorker)
        ended(w)
        w.pass_time(5)
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_it_goes_on_when_it_was_still_leaving(self) -> None:
        """A window that ends while streams are in flight is not cut short: the worker leaves, is tested, and returns."""
        w = World()
        w.held = lambda e: isinstance(e, AwaitIdle)
        maintain(w)
        w.pass_time(2)
        ended(w)
        w.pass_time(2)
        assert w.state_of("decode-1") is WorkerState.OUT
        w.held = lambda e: False
        w.settle()
        w.pass_time(10)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert len(w.did(Verify)) == 1

    def test_a_worker_configured_meanwhile_leaves_too(self) -> None:
        """What comes to a node under maintenance is taken out like what was there."""
        fleet = rack()
        w = World(msgspec.structs.replace(fleet, workers=tuple(x for x in fleet.workers if x.name != "decode-1")))
        maintain(w)
        w.reload(fleet)
        w.pass_time(5)
        assert w.state_of("decode-1") is WorkerState.OUT


class TestNothingCounts:
    @pytest.mark.parametrize("silent", [True, False])
    def test_neither_faults_nor_silence_nor_reboots_are_faults(self, silent: bool) -> None:
        """Lines, states and silence of the node open no incident and page nobody, and leave nothing behind."""
        w = World()
        maintain(w)
        for n in range(6):
            w.report(w.xid(79, "t03", action=Action.REBOOT_NODE), remap(w), w.mismatch("t03"))
            w.pass_time(60, reporting=but(w, "t03") if silent and n else None, step=5)
        assert w.incidents() == []
        assert w.pages == []
        assert not w.did(Repair)
        if not silent:
            told = w.decider.explain("t03")["maintenance"]
            assert told[0]["by"] == "ann"
            assert any("gpu.row_remap_pending" in line for line in told[0]["found"])
            assert next(n for n in w.decider.status()["nodes"] if n["node"] == "t03")["maintenance"] == told[0]

    def test_nothing_of_it_is_remembered_against_the_gpu(self) -> None:
        """Five fatal lines during the work are not the first five of a GPU that fails again and again."""
        w = World()
        maintain(w)
        for _ in range(6):
            w.report(w.xid(95, "t03"))
            w.pass_time(200, step=20)
        ended(w)
        w.pass_time(10)
        w.report(w.xid(95, "t03"))
        w.pass_time(30)
        assert [i.fault for i in w.incidents()] == ["gpu-fatal"]
        assert [e.action for e in w.did(Repair)] == [Action.RESET_GPU]  # type: ignore[union-attr]
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_a_rack_under_work_is_no_systemic_fault(self) -> None:
        """One check on half the fleet's nodes, all of them under maintenance, freezes nothing."""
        w = World(placed())
        maintain(w, "R1")
        for _ in range(2):
            for node in ("t01", "t02", "t03", "t04"):
                w.report(thermal(w, node))
            w.pass_time(5)
        assert w.incidents() == []
        assert not w.decider.systemic.frozen("gpu.thermal")

    def test_a_silent_rack_under_work_does_not_make_the_controller_deaf(self) -> None:
        """Nodes that are meant to be silent say nothing of the controller's ears: another one's silence is still found."""
        w = World(placed())
        maintain(w, "R1")
        w.pass_time(60, reporting=[n for n in w.fleet.nodes if n > "t05"], step=5)
        assert not w.decider.status()["deaf"]
        assert [(i.fault, i.culprit) for i in w.incidents()] == [("agent-silent", "t05")]

    def test_what_its_peers_miss_is_its_work(self) -> None:
        """IMEX peers that miss the node, and the domain's own verdicts, page nobody."""
        w = World(placed())
        maintain(w, "t03")
        for _ in range(3):
            for node in ("t01", "t02", "t04", "t05"):
                where = Component(node=node, device="imex")
                gone = w.state(
                    "imex.peer", msgspec.structs.replace(where, part="ip-t03"), suspect=Suspect.PEER, facts={"peer": "ip-t03"}
                )
                w.report(gone, w.state("imex.domain", where, suspect=Suspect.PEER))
            w.pass_time(60, step=5)
        assert w.incidents() == []
        assert w.pages == []

    def test_other_nodes_are_judged_as_ever(self) -> None:
        """A fault beside the window is found, answered and paged."""
        w = World()
        maintain(w)
        w.report(w.xid(79, "t04", action=Action.REBOOT_NODE))
        w.pass_time(5)
        assert [i.culprit.partition("/")[0] for i in w.open_incidents()] == ["t04"]
        assert len(w.pages) == 1

    def test_what_was_open_before_pages_nobody_meanwhile(self) -> None:
        """An incident whose page was still to come is somebody's already."""
        w = World()
        w.report(w.mismatch("t03"))
        w.pass_time(5)
        maintain(w)
        w.pass_time(1000, step=20)
        assert w.pages == []
        assert len(w.open_incidents()) == 1

    def test_flapping_under_work_is_forgotten(self) -> None:
        """What came and went during the work has not flapped."""
        w = World()
        where = gpu_component("t03", PCIS[0])
        maintain(w)
        for n in range(12):
            w.report(w.state("gpu.nvlink_errors", where, present=n % 3 == 0))
            w.pass_time(10)
        ended(w)
        w.pass_time(5)
        assert w.decider.p.conditions.get(where, "gpu.nvlink_errors") is None


class TestItsEnd:
    def test_what_is_still_reported_counts_as_just_found(self) -> None:
        """A state that outlasts the window opens its incident at the end, and the worker does not return before it is mended."""
        w = World()
        maintain(w)
        for _ in range(5):
            w.report(remap(w))
            w.pass_time(10)
        ended(w)
        (incident,) = w.incidents()
        assert incident.fault == "row-remap-pending"
        assert incident.opened_at == w.now
        w.pass_time(5)
        assert w.state_of("decode-1") is not WorkerState.ACTIVE
        for _ in range(3):
            w.report(remap(w, present=False))
            w.pass_time(5)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert w.open_incidents() == []

    def test_what_was_mended_during_it_does_not_count(self) -> None:
        """A state that was fine again before the end is over."""
        w = World()
        maintain(w)
        w.report(remap(w))
        w.pass_time(10)
        w.report(remap(w, present=False))
        ended(w)
        w.pass_time(10)
        assert w.incidents() == []
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_a_look_is_needed(self) -> None:
        """Without a report of its node the worker stays out, tested or not, and its silence is found anew."""
        w = World()
        maintain(w)
        w.pass_time(100, reporting=but(w, "t03"), step=5)
        ended(w)
        w.pass_time(10, reporting=but(w, "t03"))
        assert w.drain_of("decode-1").state is DrainState.VERIFYING  # type: ignore[union-attr]
        assert w.incidents() == []
        w.pass_time(60, reporting=but(w, "t03"), step=5)
        assert [i.fault for i in w.open_incidents()] == ["agent-silent"]
        w.pass_time(5)
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_what_waits_to_be_confirmed_keeps_it_out(self) -> None:
        """A state that must be seen twice, seen once since the end, is not a clean look."""
        w = World()
        maintain(w)
        for _ in range(4):
            w.report(thermal(w, "t03"))
            w.pass_time(5)
        ended(w)
        w.settle()
        w.pass_time(3)
        assert w.state_of("decode-1") is not WorkerState.ACTIVE

    def test_what_sentinel_had_left_to_a_person_returns_with_it(self) -> None:
        """A GPU off the bus: the person works on the tray, and the end of that is the word that it is mended."""
        w = World()
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        w.pass_time(5)
        assert w.drain_of("decode-1").returns is False  # type: ignore[union-attr]
        maintain(w)
        w.pass_time(20)
        ended(w)
        w.pass_time(10)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert w.open_incidents() == []
        assert [p.event for p in w.pages] == ["trigger", "resolve"]

    @pytest.mark.parametrize("verb", ["drain", "hold"])
    def test_what_a_person_keeps_out_stays_out(self, verb: str) -> None:
        """Before or during the window: another word than the window's outlasts it."""
        w = World()
        w.ask(verb, "decode-1", keep="out")
        maintain(w)
        maintain(w, "t04")
        w.pass_time(5)
        w.ask(verb, "decode-2", keep="out")
        ended(w)
        ended(w, "t04")
        w.pass_time(20)
        assert w.state_of("decode-1") is w.state_of("decode-2") is WorkerState.OUT
        for name in ("decode-1", "decode-2"):
            w.ask("release", name)
            w.ask("undrain", name)
        w.pass_time(10)
        assert w.state_of("decode-1") is w.state_of("decode-2") is WorkerState.ACTIVE

    def test_undrain_does_not_overrule_it(self) -> None:
        """Nobody puts a worker back onto a node that somebody works on; the window has to end."""
        w = World()
        maintain(w)
        w.pass_time(5)
        w.ask("undrain", "decode-1")
        w.pass_time(10)
        assert w.state_of("decode-1") is WorkerState.OUT
        ended(w)
        w.pass_time(10)
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_undrain_takes_back_a_drain_said_meanwhile(self) -> None:
        """Drained by a person and undrained again while the work goes on: back when it ends, without a second word."""
        w = World()
        maintain(w)
        w.pass_time(5)
        w.ask("drain", "decode-1")
        w.ask("undrain", "decode-1")
        w.pass_time(10)
        assert w.state_of("decode-1") is WorkerState.OUT
        ended(w)
        w.pass_time(10)
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_release_ends_it_as_well(self) -> None:
        """Lifting the hold that a window is brings back what left for it."""
        w = World()
        maintain(w)
        w.pass_time(5)
        w.ask("release", "t03")
        w.pass_time(10)
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_it_can_be_given_another_end(self) -> None:
        """A second word extends the window and drains nobody twice."""
        w = World()
        maintain(w, lasts=30)
        w.pass_time(20)
        maintain(w, lasts=60)
        w.pass_time(50)
        assert w.state_of("decode-1") is WorkerState.OUT
        assert len(w.did(Deroute)) == 1
        w.pass_time(30)
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_a_standby_stays_one(self) -> None:
        """A stopped standby is neither drained nor started for a window, and can be used after it."""
        w = World(rack(decoders=2))
        maintain(w, "t06")
        for node in ("t03", "t04"):
            w.report(w.xid(79, node, action=Action.REBOOT_NODE))
        w.pass_time(10)
        assert w.drain_of("spill-2") is None
        assert w.state_of("spill-2") is WorkerState.STANDBY
        ended(w, "t06")
        w.pass_time(10)
        assert w.state_of("spill-2") is WorkerState.ACTIVE


class TestWithRepairs:
    def test_a_repair_does_not_begin_on_a_node_under_work(self) -> None:
        """A reset that was about to begin waits for the person, and follows."""
        w = World()
        w.held = lambda e: isinstance(e, StopWorker)
        w.report(w.xid(95, "t03"))
        w.pass_time(2)
        maintain(w)
        w.held = lambda e: False
        w.settle()
        w.pass_time(20)
        assert w.did(Repair) == []
        ended(w)
        w.pass_time(10)
        assert len(w.did(Repair)) == 1
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_a_repair_that_runs_ends_and_the_worker_waits(self) -> None:
        """What was begun is not torn; the way back goes on after the window."""
        w = World()
        w.held = lambda e: isinstance(e, Repair)
        w.report(w.xid(95, "t03"))
        w.pass_time(3)
        maintain(w)
        w.held = lambda e: False
        w.settle()
        w.pass_time(30)
        assert w.state_of("decode-1") is WorkerState.OUT
        ended(w)
        w.pass_time(10)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert len(w.did(Repair)) == 1

    def test_a_window_is_a_hold_with_an_end(self) -> None:
        """What is durable says so, and reads back."""
        w = World()
        maintain(w)
        (hold,) = w.decider.p.holds.values()
        assert msgspec.json.decode(msgspec.json.encode(hold), type=Hold) == hold
        assert (hold.keep, hold.planned, hold.by) == ("out", True, "ann")
        assert hold.until == w.now + HOUR


class TestWordsThatMeet:
    """Two people, one node: the word about more never undoes the word about less."""

    def test_a_rack_window_does_not_shorten_the_one_of_a_node(self) -> None:
        """Who works on a tray until noon is not surprised by traffic because somebody else's work on the rack ended at ten."""
        w = World(placed())
        w.ask("maintain", "t03", until=w.now + 600)
        w.pass_time(5)
        w.ask("maintain", "R1", until=w.now + 60)
        w.pass_time(100)
        assert w.state_of("decode-1") is WorkerState.OUT
        assert w.state_of("decode-2") is WorkerState.ACTIVE
        w.pass_time(600)
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_the_end_of_a_racks_window_leaves_a_nodes_alone(self) -> None:
        """The rack's work lasts longer and ends early by a word: the tray's own window goes on, whoever leads by then."""
        w = World(placed())
        w.ask("maintain", "t03", until=w.now + 600)
        w.ask("maintain", "R1", until=w.now + 6000)
        w.pass_time(20)
        w.lead()
        w.ask("maintain", "R1")
        w.pass_time(60)
        assert w.state_of("decode-1") is WorkerState.OUT
        assert w.state_of("decode-2") is WorkerState.ACTIVE
        w.ask("maintain", "t03")
        w.pass_time(60)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert not w.decider.p.holds

    @pytest.mark.parametrize("keep", ["in", "out"])
    @pytest.mark.parametrize("target", ["t03", "R1"])
    def test_a_hold_of_the_node_counts_again_after_it(self, target: str, keep: str) -> None:
        """A window lies over what a person has said about the node before, and takes nothing of it away."""
        w = World(placed())
        w.ask("hold", "t03", keep=keep)
        w.ask("maintain", target, until=w.now + 60)
        w.pass_time(10)
        assert w.state_of("decode-1") is WorkerState.OUT
        w.pass_time(120)
        assert [(h.target, h.keep, h.planned) for h in w.decider.p.holds.values()] == [("t03", keep, False)]
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        w.pass_time(5)
        assert w.state_of("decode-1") is (WorkerState.ACTIVE if keep == "in" else WorkerState.OUT)
        w.ask("release", "t03")
        assert not w.decider.p.holds

    @pytest.mark.parametrize("early", [False, True])
    def test_a_fault_on_the_other_tray_of_a_group_is_repaired_before_it_returns(self, early: bool) -> None:
        """While one tray of a group is worked on a GPU of the other turns fatal: it is reset before the group returns, the work on
        the first tray repaired nothing of the second."""
        w = World(placed())
        w.held = w.busy if early else lambda e: False
        maintain(w, "t01", 300)
        w.pass_time(10)
        w.report(w.xid(95, "t02", 1))
        w.pass_time(10)
        ended(w, "t01")
        w.pass_time(5)
        w.held = lambda e: False
        w.pass_time(60)
        assert [e.target for e in w.did(Repair)] == [str(gpu_component("t02", PCIS[1]))]  # type: ignore[union-attr]
        assert w.state_of("prefill-1") is WorkerState.ACTIVE
        assert w.open_incidents() == []

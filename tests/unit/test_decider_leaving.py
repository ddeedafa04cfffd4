"""Nodes and workers that leave the configuration, and those that come again: nothing stays open, and nothing serves untested."""

from __future__ import annotations

import msgspec

from sentinel.decide.state.events import AwaitIdle, Repair, Verify
from sentinel.model import Action, Component, DrainState, Finding, Fleet, Severity, WorkerState, gpu_component
from sentinel.testing.decisions import PCIS, World, rack

HOUR = 3600.0


def without(fleet: Fleet, *gone: str) -> Fleet:
    """The fleet without these workers, and without the nodes that only they were on."""
    workers = tuple(x for x in fleet.workers if x.name not in gone)
    return msgspec.structs.replace(fleet, workers=workers, nodes=tuple(sorted({n for x in workers for n in x.nodes})))


def off_bus(w: World, node: str = "t03") -> Finding:
    return w.xid(79, node, action=Action.REBOOT_NODE)


def gone(w: World, seconds: float, step: float = 5.0) -> None:
    """Time passes, and t03 does not report."""
    w.pass_time(seconds, step=step, reporting=[n for n in w.fleet.nodes if n != "t03"])


class TestIncidents:
    def test_an_incident_of_a_removed_node_is_closed_in_one_step(self) -> None:
        """Its page is resolved, the reason is one sentence, and nothing opens it again."""
        w = World()
        w.report(off_bus(w))
        w.pass_time(5)
        assert [p.event for p in w.pages] == ["trigger"]
        w.reload(without(w.fleet, "decode-1"))
        gone(w, 60)
        (incident,) = w.incidents()
        assert incident.closed_at is not None
        assert incident.history[-1].what == "closed"
        assert "t03 is not configured any more" in incident.history[-1].why
        assert [p.event for p in w.pages] == ["trigger", "resolve"]
        gone(w, 600)
        assert len(w.incidents()) == 1

    def test_a_node_that_goes_on_reporting_is_not_gone(self) -> None:
        """A slip with an older file closes nothing while the agent still speaks."""
        w = World()
        w.report(off_bus(w))
        w.pass_time(5)
        every = w.fleet.nodes
        w.reload(without(w.fleet, "decode-1"))
        w.pass_time(120, step=5, reporting=every)
        assert len(w.open_incidents()) == 1

    def test_a_new_leader_gives_it_time_to_speak(self) -> None:
        """Who takes over does not close what has not had the chance to report, and closes it when it has not used that."""
        w = World()
        w.report(off_bus(w))
        w.pass_time(5)
        w.reload(without(w.fleet, "decode-1"))
        w.lead()
        gone(w, 5, step=1)
        assert len(w.open_incidents()) == 1
        gone(w, 60)
        assert w.open_incidents() == []

    def test_an_incident_of_a_removed_worker_is_closed(self) -> None:
        """Its node stays and reports; nobody watches the worker any more."""
        w = World()
        where = Component(node="t03", device="worker@decode-1")
        down = w.state("worker.unreachable", where, severity=Severity.FATAL, action=Action.RESTART_WORKER)
        w.outcomes = lambda e: not isinstance(e, Verify)
        w.report(down)
        w.pass_time(5)
        assert [i.culprit for i in w.open_incidents()] == ["decode-1"]
        fleet = without(w.fleet, "decode-1")
        w.reload(msgspec.structs.replace(fleet, nodes=w.fleet.nodes))
        w.pass_time(60, step=5)
        assert w.open_incidents() == []

    def test_others_are_left_alone(self) -> None:
        """What is about a node that is still configured stays, however silent it is."""
        w = World()
        w.report(off_bus(w))
        w.report(off_bus(w, "t04"))
        w.pass_time(5)
        w.reload(without(w.fleet, "decode-1"))
        w.pass_time(60, step=5, reporting=[n for n in w.fleet.nodes if n > "t04"])
        assert "t04" in {i.culprit.partition("/")[0] for i in w.open_incidents()}
        assert "t03" not in {i.culprit.partition("/")[0] for i in w.open_incidents()}


class TestDrains:
    def test_its_drain_ends_in_bounded_time_whoever_leads(self) -> None:
        """A day without the worker ends it, counted on over a change of leaders."""
        w = World()
        w.report(off_bus(w))
        w.pass_time(5)
        w.reload(without(w.fleet, "decode-1"))
        gone(w, 20 * HOUR, step=600)
        w.lead()
        drain = w.drain_of("decode-1")
        assert drain is not None
        assert drain.state is DrainState.OUT
        gone(w, 5 * HOUR, step=600)
        assert w.drain_of("decode-1").state is DrainState.CANCELLED  # type: ignore[union-attr]
        assert w.decider.p.open_drains() == []

    def test_removed_while_it_is_repaired(self) -> None:
        """The repair may end as it will: nothing is begun for a worker that is not there, and what comes again goes on."""
        fleet = rack()
        for ok in (True, False):
            w = World(fleet)
            w.held = lambda e: isinstance(e, Repair)
            w.report(w.xid(95, "t03"))
            w.pass_time(3)
            w.reload(without(fleet, "decode-1"))
            w.outcomes = lambda e, ok=ok: ok or not isinstance(e, Repair)  # type: ignore[misc]
            w.held = lambda e: False
            w.settle()
            gone(w, 60)
            assert w.did(Verify) == []
            w.reload(fleet)  # an agent answers the same key as it did before
            w.pass_time(30)
            assert w.state_of("decode-1") is (WorkerState.ACTIVE if ok else WorkerState.OUT)
            assert w.decider.p.outstanding == {}

    def test_what_comes_again_within_the_day_goes_on(self) -> None:
        """An older file by mistake undoes no decision."""
        w = World()
        fleet = w.fleet
        w.report(off_bus(w))
        w.pass_time(5)
        w.reload(without(fleet, "decode-1"))
        gone(w, 2 * HOUR, step=60)
        w.reload(fleet)
        w.pass_time(20)
        assert w.state_of("decode-1") is WorkerState.OUT
        w.ask("undrain", "decode-1")
        w.pass_time(10)
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_what_comes_again_after_it_is_tested_first(self) -> None:
        """A worker that left while it was out is asked for a token before it gets traffic, also under a new leader."""
        for lead in (False, True):
            w = World()
            fleet = w.fleet
            w.report(off_bus(w))
            w.pass_time(5)
            w.reload(without(fleet, "decode-1"))
            gone(w, 30 * HOUR, step=600)
            w.held = lambda e: isinstance(e, Verify)
            if lead:
                w.fleet = fleet
                w.lead()
            else:
                w.reload(fleet)
            w.pass_time(20)
            assert w.state_of("decode-1") is WorkerState.OUT
            w.held = lambda e: False
            w.settle()
            w.pass_time(10)
            assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_one_that_left_in_service_needs_no_test(self) -> None:
        """The configuration's word is enough for what was never taken out."""
        w = World()
        fleet = w.fleet
        w.reload(without(fleet, "decode-1"))
        gone(w, 30 * HOUR, step=600)
        w.reload(fleet)
        w.pass_time(5)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert w.did(Verify) == []


class TestEveryWayBack:
    """Which ways back are tested, as docs/architecture.md lists them."""

    def test_called_off_before_anything_was_done(self) -> None:
        """A drain that a person calls off while requests are still in flight has touched no process: no test."""
        w = World()
        w.held = lambda e: isinstance(e, AwaitIdle)
        w.ask("drain", "decode-1")
        w.ask("undrain", "decode-1")
        w.held = lambda e: False
        w.settle()
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert w.did(Verify) == []

    def test_undrained_by_a_person(self) -> None:
        """What was out is tested, and has to be clean."""
        w = World()
        remap = w.state("gpu.row_remap_pending", gpu_component("t03", PCIS[0]), action=Action.RESET_GPU)
        w.ask("drain", "decode-1")
        w.pass_time(3)
        w.report(remap)
        w.ask("undrain", "decode-1")
        w.pass_time(10)
        assert len(w.did(Verify)) == 1
        assert w.state_of("decode-1") is not WorkerState.ACTIVE
        for _ in range(2):
            w.report(w.state("gpu.row_remap_pending", gpu_component("t03", PCIS[0]), present=False))
        w.pass_time(5)
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_held_out_on_its_way_back_is_tested_anew(self) -> None:
        """A test that was passed before a hold is not what lets it back after the hold."""
        w = World()
        remap = w.state("gpu.row_remap_pending", gpu_component("t03", PCIS[0]), action=Action.RESET_GPU)
        w.report(remap)
        w.pass_time(5)
        assert w.drain_of("decode-1").state is DrainState.VERIFYING  # type: ignore[union-attr]
        w.ask("hold", "t03", keep="out")
        w.pass_time(5)
        assert w.drain_of("decode-1").state is DrainState.OUT  # type: ignore[union-attr]
        before = len(w.did(Verify))
        w.ask("release", "t03")
        w.ask("undrain", "decode-1")
        w.pass_time(5)
        assert len(w.did(Verify)) == before + 1

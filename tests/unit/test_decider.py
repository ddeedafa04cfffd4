"""From a finding to a decision: what is drained, repaired, paged, returned, and what is left alone."""

from __future__ import annotations

import pytest

from sentinel.decide.state.events import Deroute, Look, Repair, Reroute, StartWorker, StopWorker, Verify
from sentinel.model import Action, Component, DrainState, Kind, Severity, Suspect, WorkerSeen, WorkerState, gpu_component
from sentinel.testing.decisions import PCIS, World, rack


def remap(world: World, node: str, present: bool = True):
    return world.state("gpu.row_remap_pending", gpu_component(node, PCIS[0]), present, action=Action.RESET_GPU)


class TestGpuOffBus:
    def test_the_whole_group_is_evicted_at_once(self) -> None:
        """Xid 79 on one GPU takes the decoder that holds it out and stops it hard, without waiting for streams."""
        w = World()
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        assert w.state_of("decode-1") is WorkerState.OUT
        assert [e.hard for e in w.did(StopWorker)] == [True]  # type: ignore[union-attr]
        assert w.drain_of("decode-1").state is DrainState.OUT  # type: ignore[union-attr]

    def test_a_prefill_group_dies_as_one(self) -> None:
        """A dead rank on the second tray takes the DEP8 group over both trays out, and nothing else."""
        w = World()
        w.report(w.xid(79, "t02", gpu=3, action=Action.REBOOT_NODE))
        assert w.state_of("prefill-1") is WorkerState.OUT
        assert {w.state_of(f"decode-{n}") for n in range(1, 5)} == {WorkerState.ACTIVE}

    def test_one_page_however_often_it_is_said(self) -> None:
        """Repeats, echoes and a reset recommendation on the same GPU fold into one incident and one page."""
        w = World()
        first = w.xid(79, "t03", action=Action.REBOOT_NODE)
        w.report(first)
        again = w.xid(79, "t03", action=Action.REBOOT_NODE)
        w.report(first, w.xid(154, "t03", action=Action.REBOOT_NODE), w.xid(119, "t03"), again)
        assert len(w.incidents()) == 1
        assert [(p.event, p.urgency) for p in w.pages] == [("trigger", "critical")]

    def test_it_stays_out_until_a_person_says_so(self) -> None:
        """The reboot is left to a person; undrain starts, verifies and returns it, then the page is resolved."""
        w = World()
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        w.pass_time(3600, step=60)
        assert w.state_of("decode-1") is WorkerState.OUT
        w.ask("undrain", "decode-1", "tray rebooted")
        w.pass_time(5)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert w.did(StartWorker)
        assert w.did(Verify)
        assert [p.event for p in w.pages] == ["trigger", "resolve"]
        assert w.open_incidents() == []

    @pytest.mark.parametrize("at", [StartWorker, Verify, Reroute])
    def test_it_falls_off_again_on_the_way_back(self, at: type) -> None:
        """Undrained too early: it is stopped hard once more, without waiting for its active test, and stays out."""
        w = World()
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        w.held = lambda e: isinstance(e, at)
        w.ask("undrain", "decode-1")
        w.pass_time(2)
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        if at is not Verify:  # a start and a return under way are waited for: they share the worker's lane
            w.held = lambda e: False
        w.pass_time(2)
        assert [e.hard for e in w.did(StopWorker)] == [True, True]  # type: ignore[union-attr]
        w.held = lambda e: False
        w.pass_time(60)
        assert w.drain_of("decode-1").state is DrainState.OUT  # type: ignore[union-attr]
        assert w.state_of("decode-1") is WorkerState.OUT
        assert [p.event for p in w.pages] == ["trigger"]

    def test_a_floor_does_not_keep_the_dead(self) -> None:
        """Facts are not budgeted: a GPU that is gone is taken out even when the pool falls below its floor."""
        w = World(rack(floor=1.0))
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        assert w.state_of("decode-1") is WorkerState.OUT

    def test_undrain_during_an_eviction_starts_what_was_stopped(self) -> None:
        """undrain while the kill is on its way does not declare a dead process returned: it is started and verified first."""
        w = World()
        w.held = lambda effect: True
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        w.ask("undrain", "decode-1")
        w.held = lambda effect: False
        w.settle()
        w.pass_time(5)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert [type(e) for e in w.done if isinstance(e, StopWorker | StartWorker | Verify)] == [StopWorker, StartWorker, Verify]

    def test_a_stop_that_failed_is_asked_for_once_at_a_time(self) -> None:
        """After a refused kill the next one runs under a new key, and never twice under that."""
        w = World()
        w.outcomes = lambda effect: False
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        w.outcomes = lambda effect: True
        w.pass_time(20)
        assert w.drain_of("decode-1").state is DrainState.OUT  # type: ignore[union-attr]
        assert [e.id.partition("#")[0].split("/", 1)[1] for e in w.did(StopWorker)] == ["stop/0", "stop/1"]

    def test_history_is_never_acted_on(self) -> None:
        """A line from before the agent's first look at its node is on record only."""
        w = World()
        w.report(w.xid(79, "t03", facts={"xid": 79, "history": True}))
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert w.pages == []

    def test_a_node_speaks_for_itself_only(self) -> None:
        """A report of one node that names another node's GPU changes nothing."""
        w = World()
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE), node="t04")
        assert w.incidents() == []


class TestRowRemap:
    def test_drain_reset_verify_return(self) -> None:
        """A pending row remap: out of rotation, idle, stopped, reset, started, tested, clean, back; nobody is paged."""
        w = World()
        w.report(remap(w, "t03"))
        kinds = [type(e) for e in w.done]
        order = [Deroute, StopWorker, Repair, StartWorker, Verify]
        w.pass_time(2)
        assert w.state_of("decode-1") is WorkerState.OUT  # tested, but not yet proven clean
        w.report(remap(w, "t03", present=False))
        w.report(remap(w, "t03", present=False))
        w.pass_time(2)
        kinds = [type(e) for e in w.done if type(e) in (*order, Reroute)]
        assert kinds == [*order, Reroute]
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert w.pages == []
        assert w.open_incidents() == []

    def test_streams_in_flight_are_waited_for(self) -> None:
        """Nothing is stopped while requests are in flight and the deadline has not passed."""
        w = World()
        w.held = w.busy
        w.report(remap(w, "t03"))
        w.pass_time(60)
        assert w.drain_of("decode-1").state is DrainState.DEROUTED  # type: ignore[union-attr]
        assert w.did(StopWorker) == []

    def test_worse_news_does_not_wait_for_streams(self) -> None:
        """Xid 79 during a drain stops the worker at once, though its requests are still in flight."""
        w = World()
        w.held = w.busy
        w.report(remap(w, "t03"))
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        w.pass_time(2)
        assert [e.hard for e in w.did(StopWorker)] == [True]  # type: ignore[union-attr]
        assert w.drain_of("decode-1").state is DrainState.OUT  # type: ignore[union-attr]
        assert len(w.incidents()) == 1

    def test_undrain_does_not_wait_for_streams(self) -> None:
        """A person who says undrain while requests are in flight has the worker back at once."""
        w = World()
        w.held = w.busy
        w.report(remap(w, "t03"))
        w.ask("undrain", "decode-1")
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_a_repair_that_fails_goes_to_a_person(self) -> None:
        """A reset that the agent refuses or that fails leaves the worker out and pages once."""
        w = World()
        w.outcomes = lambda e: not isinstance(e, Repair)
        w.report(remap(w, "t03"))
        w.pass_time(30)
        assert w.state_of("decode-1") is WorkerState.OUT
        assert len(w.did(Repair)) == 1
        assert len(w.pages) == 1
        assert "repair-failed" in w.pages[0].summary

    def test_the_third_time_in_a_week_is_for_a_person(self) -> None:
        """A repair that did not last twice in seven days is not done a third time."""
        w = World()
        for _ in range(3):
            w.report(remap(w, "t03"))
            w.pass_time(2)
            w.report(remap(w, "t03", present=False))
            w.report(remap(w, "t03", present=False))
            w.pass_time(700)
        assert len(w.did(Repair)) == 2
        assert "for a person" in w.drain_of("decode-1").reason  # type: ignore[union-attr]

    def test_the_floor_blocks_doubt_and_pages(self) -> None:
        """A drain that would take the pool below its floor is held back, and the page says what would unblock it."""
        w = World(rack(decoders=2, floor=0.9))
        w.report(remap(w, "t03"))
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert len(w.pages) == 1
        assert "below its floor" in w.pages[0].summary
        w.pass_time(120)
        assert len(w.pages) == 1

    def test_what_was_blocked_goes_ahead_when_there_is_room(self) -> None:
        """A blocked drain is tried again as long as its finding stands."""
        w = World(rack(decoders=4, floor=0.75))
        w.ask("drain", "decode-2")
        w.report(remap(w, "t03"))
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert w.decider.held_back() == {"decode-1"}
        w.ask("undrain", "decode-2")
        w.pass_time(5)
        assert w.state_of("decode-1") is WorkerState.OUT
        assert not w.decider.held_back()


class TestLeftAlone:
    def test_app_faults_are_on_record_only(self) -> None:
        """Xid 13, 31 and 43 drain nothing and page nobody, also on many trays at once."""
        w = World()
        for node in w.fleet.nodes:
            app = {"severity": Severity.INFO, "action": Action.RESTART_WORKER, "suspect": Suspect.APP}
            w.report(*[w.xid(code, node, **app) for code in (13, 31, 43)])
        w.pass_time(30)
        assert {w.state_of(f"decode-{n}") for n in range(1, 5)} == {WorkerState.ACTIVE}
        assert w.pages == []
        assert {i.fault for i in w.incidents()} == {"app-fault"}
        w.pass_time(700, step=10)
        assert w.open_incidents() == []

    def test_a_peers_victim_is_not_drained(self) -> None:
        """A fatal line whose suspect is a peer takes nothing out on the reporter's word."""
        w = World()
        w.report(w.xid(149, "t03", suspect=Suspect.PEER))
        w.pass_time(10)
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_a_slow_driver_is_not_a_hung_one(self) -> None:
        """A hang is on record while it is short; only when the probe is sure does the worker leave."""
        w = World()
        hung = {"severity": Severity.FATAL, "action": Action.REBOOT_NODE}
        for certainty, out in ((0.5, False), (0.5, False), (0.8, False), (0.8, True)):
            w.report(w.state("driver.hung", gpu_component("t03", PCIS[0]), certainty=certainty, **hung))
            assert (w.state_of("decode-1") is WorkerState.OUT) is out

    def test_what_is_only_info_opens_nothing(self) -> None:
        """An info finding about the monitor, a peer or a switch pages nobody and opens no incident."""
        w = World()
        for suspect in (Suspect.MONITOR, Suspect.PEER, Suspect.SWITCH, Suspect.SELF):
            w.report(w.state("host.clock_unsynchronised", Component(node="t03"), severity=Severity.INFO, suspect=suspect))
            w.pass_time(120, step=5)
        assert w.incidents() == []
        assert w.pages == []

    def test_one_odd_sample_is_nothing(self) -> None:
        """A fatal state that needs confirmation and is fine at the next look leads to nothing."""
        w = World()
        hot = gpu_component("t03", PCIS[0])
        w.report(w.state("gpu.thermal", hot, severity=Severity.FATAL))
        w.report(w.state("gpu.thermal", hot, present=False))
        w.report(w.state("gpu.thermal", hot, severity=Severity.FATAL))
        assert w.incidents() == []


class TestEngine:
    def frozen(self, w: World, present: bool = True):
        return w.state(
            "worker.frozen",
            Component(node="t03", device="worker@decode-1"),
            present,
            severity=Severity.FATAL,
            action=Action.RESTART_WORKER,
            suspect=Suspect.APP,
            certainty=0.95,
        )

    def test_a_frozen_engine_is_restarted_and_returned(self) -> None:
        """Evict, start, one right token, counters moving again: back, with nobody paged."""
        w = World()
        w.report(self.frozen(w))
        w.pass_time(2)
        gone = w.state("worker.unreachable", Component(node="t03", device="worker@decode-1"), severity=Severity.FATAL)
        w.report(gone)
        for _ in range(2):
            w.report(self.frozen(w, present=False), w.state("worker.unreachable", gone.component, present=False))
        w.pass_time(3)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert [type(e) for e in w.done if isinstance(e, StopWorker | Repair | StartWorker)] == [StopWorker, StartWorker]
        assert w.pages == []

    def test_a_standby_is_not_missed(self) -> None:
        """A stopped standby, or a worker a person has parked, that does not answer is no fault."""
        w = World()
        w.ask("drain", "decode-1")
        for name, node in (("spill-2", "t08"), ("decode-1", "t03")):
            w.report(w.state("worker.unreachable", Component(node=node, device=f"worker@{name}"), severity=Severity.FATAL))
        w.pass_time(5)
        assert w.incidents() == []


class TestSilence:
    def others(self, w: World, *silent: str) -> list[str]:
        return [n for n in w.fleet.nodes if n not in silent]

    def test_a_silent_agent_drains_nothing(self) -> None:
        """Its workers are looked at, one page of low urgency is sent, and it is resolved when the agent is back."""
        w = World()
        w.pass_time(60, reporting=self.others(w, "t03"))
        assert w.did(Look)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert [(p.event, p.urgency, p.fault) for p in w.pages] == [("trigger", "warning", "agent-silent")]
        w.pass_time(30)
        assert [p.event for p in w.pages] == ["trigger", "resolve"]

    def test_two_sources_make_a_verdict(self) -> None:
        """Silent agent and workers that refuse every look: the node is down and its worker evicted."""
        w = World()
        w.outcomes = lambda e: not isinstance(e, Look)
        for _ in range(6):
            w.pass_time(5, reporting=self.others(w, "t03"))
            w.watched("decode-1", reachable=False)
        w.pass_time(5, reporting=self.others(w, "t03"))
        assert w.state_of("decode-1") is WorkerState.OUT
        assert "node-down" in {i.fault for i in w.incidents()}

    def test_a_tray_without_power_is_a_persons_to_judge(self) -> None:
        """Silent agent and looks that time out: nothing is drained, a person is asked at once, and it ends with the next report."""
        w = World()
        w.outcomes = lambda e: None if isinstance(e, Look) else True
        for _ in range(8):
            w.pass_time(5, reporting=self.others(w, "t03"))
            w.watched("decode-1", reachable=None)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert ("error", "node-unreachable") in [(p.urgency, p.fault) for p in w.pages]
        w.outcomes = lambda e: True
        w.pass_time(30)
        assert w.open_incidents() == []

    def test_a_deaf_controller_drains_nothing(self) -> None:
        """Many silent nodes at once are one systemic incident; even unreachable workers stay in the table."""
        w = World()
        for _ in range(8):
            w.pass_time(5, reporting=["t01"])
            for worker in w.fleet.workers:
                w.watched(worker.name, reachable=False)
        assert {w.state_of(f"decode-{n}") for n in range(1, 5)} == {WorkerState.ACTIVE}
        assert sum(p.event == "trigger" for p in w.pages) <= 2


class TestSystemic:
    def test_a_driver_rollout_is_one_incident(self) -> None:
        """Half of the nodes report a mismatch: one page, nothing drained, closed when they are fine again."""
        w = World()
        half = w.fleet.nodes[::2]
        for node in half:
            w.report(w.mismatch(node))
            w.pass_time(3)
        w.pass_time(600, step=5)
        triggers = [p for p in w.pages if p.event == "trigger"]
        assert [p.dedup_key for p in triggers] == ["systemic/driver.version_mismatch"]
        assert len(w.open_incidents()) == 1
        for node in half:
            w.report(w.mismatch(node, present=False))
            w.report(w.mismatch(node, present=False))
        w.pass_time(30)
        assert w.open_incidents() == []

    def test_one_mismatch_is_a_low_page(self) -> None:
        """A single node's mismatch pages after a while and drains nothing."""
        w = World()
        w.report(w.mismatch("t03"))
        w.pass_time(400, step=5)
        assert [(p.urgency, p.fault) for p in w.pages] == [("warning", "driver-upgrade")]
        assert w.state_of("decode-1") is WorkerState.ACTIVE


class TestCapacity:
    def test_overflow_takes_what_is_missing_and_gives_it_back_gently(self) -> None:
        """Losing one of four decoders moves a quarter of the weight; it returns in steps after the hold-down."""
        w = World()
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        assert w.weight("main") == 0.75
        assert w.weight("overflow") == 0.25
        w.ask("undrain", "decode-1")
        w.pass_time(60)
        assert w.weight("main") == 0.75
        w.pass_time(120)
        assert w.weight("main") == 1.0

    def test_standby_is_started_verified_and_used(self) -> None:
        """When the running overflow cannot carry the shortage, a standby is started and takes traffic after its test."""
        w = World(rack(decoders=2, standby=2))
        for node in ("t03", "t04"):
            w.report(w.xid(79, node, action=Action.REBOOT_NODE))
        w.pass_time(5)
        assert w.state_of("spill-2") is WorkerState.ACTIVE
        verified = [e.worker for e in w.did(Verify)]  # type: ignore[union-attr]
        assert "spill-2" in verified

    def test_idle_capacity_needs_no_overflow(self) -> None:
        """With measured demand far below what is left, no traffic moves."""
        w = World()
        for n in range(1, 5):
            w.watched(f"decode-{n}", reachable=True, load=0)
        w.pass_time(1)
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        assert w.weight("main") == 1.0


class TestPeople:
    def test_a_hold_in_outranks_the_machine(self) -> None:
        """A held worker stays in whatever is found, and the page names who holds it."""
        w = World()
        w.ask("hold", "decode-1", keep="in")
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert "ann" in w.pages[0].summary

    def test_a_hold_out_outranks_the_machine(self) -> None:
        """A worker held out is not put back by a repair, only by release and undrain."""
        w = World()
        w.ask("hold", "t03", keep="out")
        w.pass_time(30)
        w.ask("undrain", "decode-1")
        w.pass_time(5)
        assert w.state_of("decode-1") is WorkerState.OUT
        w.ask("release", "t03")
        w.ask("undrain", "decode-1")
        w.pass_time(5)
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_a_hold_expires(self) -> None:
        """After its end a hold holds nothing."""
        w = World()
        w.ask("hold", "decode-1", keep="in", until=w.now + 10)
        w.pass_time(20)
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        assert w.state_of("decode-1") is WorkerState.OUT

    def test_a_persons_drain_is_not_budgeted_and_stops_nothing(self) -> None:
        """drain parks the worker with its process alive; undrain brings it back without a start."""
        w = World(rack(floor=1.0))
        w.ask("drain", "t03")
        assert w.state_of("decode-1") is WorkerState.OUT
        assert w.did(StopWorker) == []
        w.ask("undrain", "decode-1")
        w.pass_time(2)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert w.did(StartWorker) == []


class TestTakingOver:
    def test_a_new_leader_goes_on_where_the_old_one_stopped(self) -> None:
        """Whatever the moment of the take-over, the repair is done once and the worker comes back."""
        for cut in range(12):
            w = World()
            steps = 0
            w.held = lambda e: steps >= cut  # noqa: B023
            original = w._carry_out

            def counted(effect, original=original):
                nonlocal steps
                steps += 1
                original(effect)

            w._carry_out = counted  # type: ignore[method-assign]
            w.report(remap(w, "t03"))
            w.held = lambda e: False
            w.lead()
            w.report(remap(w, "t03", present=steps < 5))
            w.pass_time(10)
            for _ in range(3):
                w.report(remap(w, "t03", present=False))
            w.pass_time(10)
            assert w.state_of("decode-1") is WorkerState.ACTIVE, cut
            assert len(w.did(Repair)) == 1, cut
            assert w.pages == [], cut

    def test_a_fault_reported_again_is_not_a_new_one(self) -> None:
        """After a take-over the agents repeat everything: still one incident and one page."""
        w = World()
        line = w.xid(79, "t03", action=Action.REBOOT_NODE)
        w.report(line)
        w.lead()
        w.report(line)
        w.pass_time(60)
        assert len(w.incidents()) == 1
        assert len(w.pages) == 1


class TestLearning:
    def test_gpus_are_learned_from_reports(self) -> None:
        """A worker configured without GPUs is found by what its node's agent says it holds."""
        import msgspec

        fleet = rack()
        bare = tuple(msgspec.structs.replace(x, gpus=()) if x.name == "decode-1" else x for x in fleet.workers)
        w = World(msgspec.structs.replace(fleet, workers=bare))
        w.report(node="t03", workers=[WorkerSeen(worker="decode-1", gpus=PCIS)])
        w.report(w.xid(79, "t03", gpu=2, action=Action.REBOOT_NODE))
        assert w.state_of("decode-1") is WorkerState.OUT

    def test_explain_tells_the_chain(self) -> None:
        """From the line to the stop, each step with its sentence, for the worker and for the node."""
        w = World()
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE, kind=Kind.EVENT))
        for target in ("decode-1", "t03", w.incidents()[0].id):
            told = w.decider.explain(target)
            assert told["known"]
            whats = [s["what"] for s in told["steps"]]
            assert whats.index("found") < whats.index("out of service")
            assert "paged" in whats

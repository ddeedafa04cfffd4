"""What a 3 a.m. operator, a hostile node or a changed file could make the decider do wrong: each must end in the right place."""

from __future__ import annotations

import msgspec
import pytest

from sentinel.decide.rules.policy_file import default_policy_text, load_policy
from sentinel.decide.state.events import AwaitIdle, Deroute, Repair, Reroute, StartWorker, StopWorker, Verify
from sentinel.decide.state.old import KEEP_CLOSED
from sentinel.model import (
    Action,
    Component,
    DrainState,
    Finding,
    Fleet,
    Severity,
    Worker,
    WorkerSeen,
    WorkerState,
    gpu_component,
)
from sentinel.testing.decisions import PCIS, World, rack


def remap(w: World, node: str, gpu: int = 0, present: bool = True) -> Finding:
    return w.state("gpu.row_remap_pending", gpu_component(node, PCIS[gpu]), present, action=Action.RESET_GPU)


def off_bus(w: World, node: str, gpu: int = 0) -> Finding:
    return w.xid(79, node, gpu, action=Action.REBOOT_NODE)


def sick(w: World, node: str, present: bool = True) -> Finding:
    return w.state("gpu.thermal", gpu_component(node, PCIS[0]), present, severity=Severity.FATAL)


def changed(fleet: Fleet, name: str, **fields: object) -> Fleet:
    workers = tuple(msgspec.structs.replace(x, **fields) if x.name == name else x for x in fleet.workers)
    return msgspec.structs.replace(fleet, workers=workers)


def without(fleet: Fleet, *gone: str) -> Fleet:
    workers = tuple(x for x in fleet.workers if x.name not in gone)
    nodes = tuple(sorted({n for x in workers for n in x.nodes}))
    return msgspec.structs.replace(fleet, workers=workers, nodes=nodes)


def worker_named(fleet: Fleet, name: str) -> Worker:
    return next(x for x in fleet.workers if x.name == name)


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


class TestStandby:
    def test_drain_and_undrain_of_a_standby_never_publish_it(self) -> None:
        """A stopped worker that a person drains and undrains is not tested, not started, and never in the table."""
        w = World()
        w.held = lambda e: isinstance(e, AwaitIdle | Reroute)
        w.ask("drain", "spill-2")
        w.ask("undrain", "spill-2")
        assert w.state_of("spill-2") is WorkerState.STANDBY
        w.held = lambda e: False
        w.settle()
        w.pass_time(5)
        assert w.state_of("spill-2") is WorkerState.STANDBY
        assert w.did(Verify) == []

    def test_a_drained_standby_is_not_started(self) -> None:
        """A person's drain keeps a standby from being used; undrain makes it available again."""
        w = World(rack(decoders=2))
        w.ask("drain", "spill-2")
        for node in ("t03", "t04"):
            w.report(off_bus(w, node))
        w.pass_time(5)
        assert w.state_of("spill-2") is WorkerState.STANDBY
        w.ask("undrain", "spill-2")
        w.pass_time(5)
        assert w.state_of("spill-2") is WorkerState.ACTIVE

    def test_undrain_starts_a_standby_that_could_not_be_started(self) -> None:
        """After a failed start, undrain starts it anew instead of asking a stopped process for a token."""
        w = World(rack(decoders=2))
        w.outcomes = lambda e: not isinstance(e, StartWorker)
        for node in ("t03", "t04"):
            w.report(off_bus(w, node))
        w.pass_time(5)
        w.outcomes = lambda e: True
        w.ask("undrain", "spill-2")
        w.pass_time(5)
        assert w.state_of("spill-2") is WorkerState.ACTIVE
        assert len(w.did(StartWorker)) == 2

    def test_a_standby_on_a_dead_gpu_is_not_started(self) -> None:
        """A fault found under a stopped worker counts when one is wanted, also when the same fault turns systemic."""
        w = World(rack(decoders=2))
        w.report(off_bus(w, "t06"))
        for node in ("t03", "t04"):
            w.report(off_bus(w, node))
        w.pass_time(5)
        assert w.state_of("spill-2") is WorkerState.STANDBY


class TestRepairs:
    def test_every_gpu_that_needs_a_reset_gets_one(self) -> None:
        """Two GPUs of one group fail: both are reset before it returns, and both incidents end with it."""
        w = World()
        w.report(w.xid(95, "t03", 0), w.xid(95, "t03", 1))
        w.pass_time(30)
        assert [e.target for e in w.did(Repair)] == [str(gpu_component("t03", p)) for p in PCIS[:2]]  # type: ignore[union-attr]
        assert len(w.did(StartWorker)) == 1
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert w.open_incidents() == []

    def test_each_tray_of_a_group_is_repaired_where_it_is_sick(self) -> None:
        """A stronger repair goes to the GPU that wants it, not to the one that was found first."""
        w = World()
        w.report(w.xid(95, "t01", 0))
        w.report(w.xid(95, "t02", 3))
        w.pass_time(30)
        assert [e.node for e in w.did(Repair)] == ["t01", "t02"]  # type: ignore[union-attr]

    def test_undrain_ends_both_incidents_of_two_dead_gpus(self) -> None:
        """A second dead GPU under a worker that is out already does not leave a page that nobody can end."""
        w = World()
        w.report(off_bus(w, "t03", 0), off_bus(w, "t03", 1))
        w.ask("undrain", "decode-1")
        w.pass_time(30)
        assert w.open_incidents() == []
        assert sorted(p.event for p in w.pages) == ["resolve", "resolve", "trigger", "trigger"]

    def test_a_fault_under_a_worker_that_a_person_drained_ends_with_its_return(self) -> None:
        """The person repaired it and said undrain; verified and back, the incident and its page are over."""
        w = World()
        w.ask("drain", "decode-1")
        w.report(off_bus(w, "t03"))
        w.ask("undrain", "decode-1")
        w.pass_time(30)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert [p.event for p in w.pages] == ["trigger", "resolve"]

    def test_a_shared_gpu_is_reset_once(self) -> None:
        """Two groups on one GPU: it is reset when both are out, and not again under the one that is back first."""
        fleet = rack()
        twin = msgspec.structs.replace(worker_named(fleet, "decode-1"), name="decode-1b")
        w = World(msgspec.structs.replace(fleet, workers=(*fleet.workers, twin)))
        w.held = lambda e: isinstance(e, Verify)
        w.report(w.xid(95, "t03"))
        w.pass_time(60)
        w.held = lambda e: False
        w.settle()
        w.pass_time(30)
        assert len(w.did(Repair)) == 1
        assert {w.state_of("decode-1"), w.state_of("decode-1b")} == {WorkerState.ACTIVE}

    def test_a_fault_while_it_starts_is_repaired_again(self) -> None:
        """The same Xid during the start is not taken for the one that the reset has mended."""
        w = World()
        w.held = lambda e: isinstance(e, StartWorker)
        w.report(w.xid(95, "t03"))
        w.pass_time(3)
        w.report(w.xid(95, "t03"))
        w.held = lambda e: False
        w.settle()
        w.pass_time(30)
        assert len(w.did(Repair)) == 2
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_an_unrepairable_fault_while_it_starts_keeps_it_out(self) -> None:
        """A fatal line that is for a person, said after the reset, parks the worker although it answers its test."""
        w = World()
        w.held = lambda e: isinstance(e, StartWorker)
        w.report(w.xid(95, "t03"))
        w.pass_time(3)
        w.report(w.xid(140, "t03", action=Action.CONTACT_SUPPORT))
        w.held = lambda e: False
        w.settle()
        w.pass_time(30)
        assert w.state_of("decode-1") is WorkerState.OUT

    def test_a_reboot_does_not_take_a_neighbour_with_it(self) -> None:
        """With reboots allowed, a node that still serves another group is left to a person, who is told which."""
        text = default_policy_text()
        policy = load_policy(text.replace("[repair.reboot_node]\nauto = false", "[repair.reboot_node]\nauto = true"))
        assert policy.automatic(Action.REBOOT_NODE)
        one = worker_named(rack(), "decode-1")
        fleet = changed(rack(), "decode-1", gpus=one.gpus[:2])
        twin = msgspec.structs.replace(one, name="decode-1b", gpus=one.gpus[2:])
        w = World(msgspec.structs.replace(fleet, workers=(*fleet.workers, twin)), policy)
        w.report(off_bus(w, "t03"))
        w.pass_time(5)
        assert w.did(Repair) == []
        assert "decode-1b" in w.drain_of("decode-1").reason  # type: ignore[union-attr]

    def test_a_drain_that_was_called_off_is_no_try(self) -> None:
        """Only what was repaired and came back counts towards "did not last"."""
        w = World()
        for _ in range(2):
            w.held = w.busy
            w.report(remap(w, "t03"))
            w.ask("undrain", "decode-1")
            w.held = lambda e: False
            w.settle()
            for _ in range(2):
                w.report(remap(w, "t03", present=False))
            w.pass_time(700, step=10)  # past the budget's window
        w.report(remap(w, "t03"))
        w.pass_time(3)
        assert len(w.did(Repair)) == 1

    def test_the_page_names_what_is_worth_a_page(self) -> None:
        """A fault that joins a quieter incident on the same GPU pages under its own class, for its own runbook."""
        w = World()
        w.held = w.busy
        w.report(remap(w, "t03"))
        w.report(off_bus(w, "t03"))
        assert [(p.fault, p.urgency) for p in w.pages] == [("gpu-off-bus", "critical")]
        assert w.pages[0].summary == "gpu-off-bus: Xid 79"


class TestWhoSpeaks:
    def dead(self, w: World, node: str) -> Finding:
        where = Component(node=node, device="worker@decode-1")
        return w.state("worker.dead", where, severity=Severity.FATAL, action=Action.RESTART_WORKER)

    def test_a_node_cannot_speak_of_a_worker_elsewhere(self) -> None:
        """A finding about a worker that does not run on the reporting node changes nothing."""
        w = World()
        w.report(self.dead(w, "t09"))
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert w.incidents() == []
        w.report(self.dead(w, "t03"))
        assert w.state_of("decode-1") is WorkerState.OUT

    def test_a_node_cannot_claim_a_worker(self) -> None:
        """A worker whose node is configured learns no GPUs from another node."""
        w = World(changed(rack(), "decode-1", gpus=()))
        w.report(node="t09", workers=[WorkerSeen(worker="decode-1", gpus=PCIS)])
        w.report(off_bus(w, "t09"))
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_addresses_that_are_none_are_left_out(self) -> None:
        """One rank written wrong does not cost the others, nor the report."""
        w = World(changed(rack(), "decode-1", gpus=()))
        w.report(node="t03", workers=[WorkerSeen(worker="decode-1", gpus=("rubbish", PCIS[1]))])
        w.report(off_bus(w, "t03", 1))
        assert w.state_of("decode-1") is WorkerState.OUT

    def test_a_worker_of_no_known_place_is_still_drained(self) -> None:
        """Neither nodes nor GPUs configured: its own agent's word is enough, and nothing fails."""
        w = World(changed(rack(), "decode-1", gpus=(), nodes=()))
        w.report(self.dead(w, "t03"))
        assert w.state_of("decode-1") is WorkerState.OUT

    def test_gpus_that_are_learned_after_the_fault(self) -> None:
        """The fault waits for the worker that turns out to live on its GPU."""
        w = World(changed(rack(), "decode-1", gpus=(), nodes=()))
        w.report(off_bus(w, "t03"))
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        w.report(node="t03", workers=[WorkerSeen(worker="decode-1", gpus=PCIS)])
        w.pass_time(2)
        assert w.state_of("decode-1") is WorkerState.OUT
        assert "decode-1" in w.incidents()[0].victims


class TestReload:
    @pytest.mark.parametrize("at", [Deroute, AwaitIdle, StopWorker, Repair, StartWorker, Verify, Reroute])
    def test_a_worker_that_is_gone_for_a_while_goes_on_where_it_was(self, at: type) -> None:
        """An older file, or a slip in it, loses no drain, asks nobody, and does nothing twice once the worker is named again."""
        w = World()
        w.held = lambda e: isinstance(e, at)
        w.report(w.xid(95, "t03"))
        w.pass_time(3)
        w.reload(without(w.fleet, "decode-1"))
        w.outcomes = lambda e: getattr(e, "worker", "") != "decode-1"  # the shell knows no such worker
        w.held = lambda e: False
        w.settle()
        w.pass_time(100)
        w.lead()
        w.pass_time(5)
        assert len([p for p in w.pages if p.event == "trigger"]) == 1
        w.reload(rack())
        w.outcomes = lambda e: True
        w.pass_time(100)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert len(w.did(Repair)) == 1
        assert len(w.pages) == 2

    def test_a_worker_that_is_gone_for_good_leaves_nothing_behind(self) -> None:
        """A day after it left the configuration, its drain, its incident and its page end."""
        w = World()
        w.report(off_bus(w, "t03"))
        w.reload(without(w.fleet, "decode-1"))
        w.pass_time(100_000, step=1000)
        assert w.decider.p.open_drains() == []
        assert w.open_incidents() == []
        assert [p.event for p in w.pages] == ["trigger", "resolve"]

    def test_a_standby_that_vanishes_while_it_starts(self) -> None:
        """Its start ends, and every tick after it works."""
        w = World(rack(decoders=2))
        w.held = lambda e: isinstance(e, Reroute)
        for node in ("t03", "t04"):
            w.report(off_bus(w, node))
        w.pass_time(3)
        w.reload(without(w.fleet, "spill-2"))
        w.held = lambda e: False
        w.settle()
        w.pass_time(5)
        assert w.decider.p.standby_up == set()

    def test_a_node_that_left_the_configuration_is_not_missed(self) -> None:
        """A decommissioned node that stops reporting pages nobody; one that was missed already is resolved."""
        w = World()
        gone = without(w.fleet, "decode-1")
        w.reload(gone)
        w.pass_time(120)
        assert w.pages == []
        w.reload(rack())
        w.pass_time(60, reporting=gone.nodes)
        assert [p.event for p in w.pages] == ["trigger"]
        w.reload(gone)
        w.pass_time(5)
        assert [p.event for p in w.pages] == ["trigger", "resolve"]

    def test_a_worker_added_on_a_sick_gpu_is_taken_out(self) -> None:
        """What was found before the worker was configured counts for it."""
        w = World(without(rack(), "decode-1"))
        w.report(off_bus(w, "t03"))
        w.reload(rack())
        w.pass_time(2)
        assert w.state_of("decode-1") is WorkerState.OUT

    def test_the_overflow_pool_may_vanish_under_a_shortage(self) -> None:
        """What carried the overflow is out of the table and the primary has all the weight again."""
        w = World()
        w.report(off_bus(w, "t03"))
        main = tuple(msgspec.structs.replace(p, overflow=()) for p in w.fleet.pools if p.name == "main")
        w.reload(msgspec.structs.replace(without(w.fleet, "spill-1", "spill-2"), pools=main))
        w.pass_time(5)
        assert w.weight("main") == 1.0


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


class TestBounds:
    def test_a_flapping_check_does_not_fill_the_store(self) -> None:
        """Closed incidents are kept up to a number; the oldest go first."""
        w = World()
        where = gpu_component("t03", PCIS[0])
        for n in range(KEEP_CLOSED + 50):
            check = f"gpu.flaps_{n // 2}"  # a third time would be remembered as one that flaps, and stay open
            w.report(w.state(check, where), w.state(check, where, False), w.state(check, where, False))
            w.pass_time(1, reporting=())
        assert len([i for i in w.incidents() if i.closed_at is not None]) == KEEP_CLOSED

    def test_what_a_failing_event_decided_is_told_with_the_next(self) -> None:
        """When a bug ends an event half-way, what it changed is written down later: no drain waits for an effect nobody has."""
        w = World()
        page = w.decider.incidents.page

        def bug(*args: object, **more: object) -> None:
            raise RuntimeError("a bug")

        w.decider.incidents.page = bug  # type: ignore[assignment,method-assign]
        with pytest.raises(RuntimeError):
            w.report(off_bus(w, "t03"))
        w.decider.incidents.page = page  # type: ignore[method-assign]
        w.pass_time(5)
        assert set(w.pending) == set(w.decider.p.outstanding.values())
        assert w.state_of("decode-1") is WorkerState.OUT
        assert w.did(StopWorker)

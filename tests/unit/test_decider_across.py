"""What goes wrong between two concerns that are each right by themselves: found by trying to break the decider."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from sentinel.decide.state.events import Deroute, Heard, Reroute, StartWorker, StopWorker, Verify
from sentinel.model import (
    Action,
    Component,
    DrainState,
    Finding,
    Fleet,
    GpuPlace,
    NodePlace,
    Place,
    Response,
    Severity,
    WorkerState,
    gpu_component,
)
from sentinel.testing.decisions import PCIS, World, rack


def off_bus(w: World, node: str) -> Finding:
    return w.xid(79, node, action=Action.REBOOT_NODE)


def remap(w: World, node: str, present: bool = True) -> Finding:
    return w.state("gpu.row_remap_pending", gpu_component(node, PCIS[0]), present, action=Action.RESET_GPU)


def sick(w: World, node: str, present: bool = True, check: str = "gpu.thermal") -> Finding:
    return w.state(check, gpu_component(node, PCIS[0]), present, severity=Severity.FATAL, action=Action.RESET_GPU)


def with_pool(fleet: Fleet, **fields: object) -> Fleet:
    return msgspec.structs.replace(fleet, pools=(msgspec.structs.replace(fleet.pools[0], **fields), *fleet.pools[1:]))


def configured(fleet: Fleet, name: str, **fields: object) -> Fleet:
    workers = tuple(msgspec.structs.replace(x, **fields) if x.name == name else x for x in fleet.workers)
    return msgspec.structs.replace(fleet, workers=workers)


def short(w: World) -> None:
    """Three of four decoders are gone, so that the standby starts."""
    for node in ("t03", "t04", "t05"):
        w.report(off_bus(w, node))
    w.pass_time(30)
    assert w.state_of("spill-2") is WorkerState.ACTIVE


class TestSystemic:
    def fleet(self, **fields: object) -> Fleet:
        return with_pool(rack(decoders=10), floor=0.0, max_domain_share=1.0, **fields)

    def test_what_a_budget_kept_in_is_not_drained_while_its_check_is_frozen(self) -> None:
        """The guard counts for those that were waiting before it began, too: room in the budget is no reason to go on."""
        w = World(self.fleet(max_doubtful_drains=0))
        for node in ("t03", "t04", "t05", "t06", "t07"):
            for _ in range(2):
                w.report(sick(w, node, check="gpu.odd"), sick(w, node))  # two checks: such an incident is not merged
        assert [i for i in w.open_incidents() if i.culprit == "fleet"]
        waited = {"decode-1", "decode-2", "decode-3"}
        assert w.decider.held_back() >= waited
        w.reload(self.fleet(max_doubtful_drains=9))
        w.pass_time(60)
        assert not waited & {d.worker for d in w.decider.p.open_drains()}

    def test_few_that_stay_bad_do_not_hide_the_next_fault(self) -> None:
        """Hours after a wave of which one node is left, another node's fault is acted on and called for by itself."""
        w = World(self.fleet(max_doubtful_drains=9))
        for node in [f"t{n:02d}" for n in range(3, 13)]:
            w.report(sick(w, node))
            w.report(sick(w, node))
        for node in [f"t{n:02d}" for n in range(4, 13)]:
            w.report(sick(w, node, present=False))
            w.report(sick(w, node, present=False))
        for _ in range(120):
            w.pass_time(60, step=10)
            w.report(sick(w, "t03"))
        assert not [i for i in w.open_incidents() if i.culprit == "fleet"]
        before = len(w.pages)
        w.report(sick(w, "t09"))
        w.report(sick(w, "t09"))
        assert w.state_of("decode-7") is WorkerState.OUT
        assert [p.component for p in w.pages[before:]] == [f"t09/gpu@{PCIS[0]}"]

    def test_what_is_left_of_a_wave_is_judged_by_itself_when_the_wave_is_over(self) -> None:
        """A node that the guard kept in, and that is still bad when the others are well, is drained and called for."""
        w = World(self.fleet(max_doubtful_drains=0))
        nodes = [f"t{n:02d}" for n in range(3, 13)]
        for node in nodes:
            w.report(sick(w, node))
            w.report(sick(w, node))
        for node in nodes[:-1]:
            w.report(sick(w, node, present=False))
            w.report(sick(w, node, present=False))
        w.reload(self.fleet(max_doubtful_drains=9))
        pages = len(w.pages)
        for _ in range(20):
            w.report(sick(w, "t12"))
            w.pass_time(60, step=10)
        assert w.drain_of("decode-10") is not None
        assert [p.event for p in w.pages[pages:]].count("trigger") == 1

    def test_many_that_stay_bad_keep_it_frozen(self) -> None:
        """A rollout that nobody has stopped is no more many faults tomorrow than it is today."""
        w = World(self.fleet(max_doubtful_drains=9))
        nodes = [f"t{n:02d}" for n in range(1, 15)]
        for node in nodes:
            w.report(w.mismatch(node))
        for _ in range(30):
            w.pass_time(60, step=20)
            for node in nodes:
                w.report(w.mismatch(node))
        assert [i.culprit for i in w.open_incidents()] == ["fleet"]
        assert [p.event for p in w.pages] == ["trigger"]

    def test_a_node_that_goes_on_being_bad_is_written_down_once(self) -> None:
        """Of a rollout over a hundred nodes the store hears once for each, not with every report."""
        fleet = rack(decoders=90)
        w = World(fleet)
        for _ in range(2):
            for node in fleet.nodes:
                w.report(w.mismatch(node))
        before = sum(len(out) for _, out in w.journal)
        for node in fleet.nodes:
            w.report(w.mismatch(node))
        assert sum(len(out) for _, out in w.journal) == before


class TestStandbys:
    def test_one_that_falls_ill_while_it_starts_serves_when_it_is_mended(self) -> None:
        """What was started, tested and put back is in the table: not a stopped standby that answers requests."""
        w = World()
        w.held = lambda e: isinstance(e, StartWorker)
        for node in ("t03", "t04", "t05"):
            w.report(off_bus(w, node))
        w.pass_time(5)
        w.report(remap(w, "t08"))
        w.held = lambda e: False
        w.pass_time(5)
        for _ in range(4):
            w.report(remap(w, "t08", present=False))
            w.pass_time(10)
        assert [e for e in w.did(Reroute) if e.worker == "spill-2"]  # type: ignore[attr-defined]
        assert w.state_of("spill-2") is WorkerState.ACTIVE

    def test_a_new_leader_knows_that_one_which_is_out_was_up(self) -> None:
        """A take-over changes nobody's row of the table, and what comes back afterwards serves."""
        w = World()
        short(w)
        w.report(remap(w, "t08"))
        w.pass_time(2)
        assert w.state_of("spill-2") is WorkerState.OUT
        w.lead()
        assert w.state_of("spill-2") is WorkerState.OUT
        w.pass_time(5)
        for _ in range(3):
            w.report(remap(w, "t08", present=False))
            w.pass_time(10)
        assert w.state_of("spill-2") is WorkerState.ACTIVE
        assert len([e for e in w.did(StartWorker) if e.worker == "spill-2"]) == 2  # type: ignore[attr-defined]

    def test_one_that_is_configured_to_serve_always_is_not_stood_down(self) -> None:
        """A worker that was a standby when it was started, and is none any more, is not stopped for want of need."""
        w = World()
        short(w)
        w.reload(configured(w.fleet, "spill-2", standby=False))
        for worker in ("decode-1", "decode-2", "decode-3"):
            w.ask("undrain", worker)
        for incident in w.open_incidents():
            w.ask("resolve", incident.id)
        w.pass_time(3000, step=5)
        assert w.weight("main") == 1.0
        assert not [e for e in w.did(StopWorker) if e.worker == "spill-2"]  # type: ignore[attr-defined]
        assert w.state_of("spill-2") is WorkerState.ACTIVE

    @pytest.mark.parametrize("kind", [Deroute, StopWorker])
    def test_one_that_is_being_stood_down_and_is_wanted_again_comes_back(self, kind: type) -> None:
        """Configured to serve always in the middle of its way out: it is started and tested, and then serves."""
        w = World()
        short(w)
        for worker in ("decode-1", "decode-2", "decode-3"):
            w.ask("undrain", worker)
        for incident in w.open_incidents():
            w.ask("resolve", incident.id)
        w.held = lambda e: isinstance(e, kind) and e.worker == "spill-2"  # type: ignore[attr-defined]
        w.pass_time(1500, step=5)
        assert w.state_of("spill-2") is WorkerState.OUT
        w.reload(configured(w.fleet, "spill-2", standby=False))
        w.held = lambda e: False
        w.settle()
        assert w.state_of("spill-2") is not WorkerState.ACTIVE
        w.pass_time(20)
        assert w.state_of("spill-2") is WorkerState.ACTIVE
        assert len([e for e in w.did(StartWorker) if e.worker == "spill-2"]) == 2  # type: ignore[attr-defined]

    def test_one_that_is_configured_to_serve_while_it_starts_gets_no_traffic_before_it_is_tested(self) -> None:
        """The table says out of whoever has not answered yet."""
        w = World()
        w.held = lambda e: isinstance(e, StartWorker)
        for node in ("t03", "t04", "t05"):
            w.report(off_bus(w, node))
        w.pass_time(5)
        w.reload(configured(w.fleet, "spill-2", standby=False))
        assert w.state_of("spill-2") is WorkerState.OUT
        w.held = lambda e: False
        w.pass_time(5)
        assert w.state_of("spill-2") is WorkerState.ACTIVE


def test_a_stop_that_outlives_the_deroute_before_it_is_asked_for_once() -> None:
    """An eviction whose deroute gives no answer is over when the process has ended: nobody is told to stop it a second time."""
    w = World()
    w.outcomes = lambda e: None if isinstance(e, Deroute) else True
    w.report(off_bus(w, "t03"))
    w.pass_time(20)
    assert len(w.did(StopWorker)) == 1
    drain = w.drain_of("decode-1")
    assert drain is not None and drain.state is DrainState.OUT


class TestHolds:
    @pytest.mark.parametrize("target", [f"t03/gpu@{PCIS[0]}/nvlink3", "t03/ib@mlx5_0", "t03/ib@mlx5_0/port1"])
    def test_a_word_about_a_part_holds_whom_it_means(self, target: str) -> None:
        """What a person may name (a link, an adapter) holds the workers on it in, and out, as a drain of it would drain them."""
        w = World()
        w.ask("hold", target, keep="in")
        w.report(off_bus(w, "t03"))
        w.pass_time(5)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        w = World()
        w.ask("hold", target, keep="out")
        w.pass_time(2)
        w.ask("undrain", "decode-1")
        w.pass_time(20)
        assert w.state_of("decode-1") is WorkerState.OUT
        w.ask("release", target)
        w.pass_time(20)
        w.ask("undrain", "decode-1")
        w.pass_time(20)
        drain = w.drain_of("decode-1")
        assert drain is not None and drain.state is DrainState.DONE


def test_a_quiet_heartbeat_is_one_word_about_a_place() -> None:
    """A node that is only heard confirms its place once for each heartbeat: a dispute lasts as long as when it reports."""
    gpus = (GpuPlace(pci=PCIS[0], uuid="GPU-1"),)

    def told(heard: bool) -> int:
        w = World()
        w.report(node="t03", place=Place(chassis="1", gpus=gpus))
        w.report(node="t04", place=Place(chassis="1", gpus=gpus))
        calls = 0
        judge = w.decider.p.topology.heard

        def counted(node: str, place: Place | None, at: float) -> list[Finding]:
            nonlocal calls
            calls += 1
            return judge(node, place, at)

        w.decider.p.topology.heard = counted  # type: ignore[method-assign]
        if heard:
            w.handle(Heard(id="h", at=w.now, nodes=("t03",)))
        else:
            w.report(node="t03")
        return calls

    assert told(heard=True) == told(heard=False) == 1


def test_who_is_not_configured_is_not_started_because_somebody_else_is_to_blame() -> None:
    """What a switch explains gives its victims back; one that left the configuration stands still until it is there again."""
    whole = rack()
    whole = msgspec.structs.replace(whole, places=tuple(NodePlace(node=n, domain="rack-1") for n in ("t03", "t04", "t05")))
    w = World(whole)
    w.held = lambda e: isinstance(e, StopWorker)

    def down(node: str) -> Finding:
        where = msgspec.structs.replace(gpu_component(node, PCIS[0]), part="nvlink5")
        more = {"severity": Severity.FATAL, "action": Action.RESET_GPU, "certainty": 0.9, "facts": {"link": 5}}
        return w.state("gpu.nvlink_down", where, **more)

    w.report(down("t03"), down("t03"))
    w.pass_time(5)
    drain = w.drain_of("decode-1")
    assert drain is not None and drain.state is DrainState.STOPPING
    w.held = lambda e: False
    w.settle()
    w.reload(msgspec.structs.replace(whole, workers=tuple(x for x in whole.workers if x.name != "decode-1")))
    w.report(down("t04"), down("t04"))
    w.report(down("t05"), down("t05"))
    w.pass_time(30)
    assert [i.fault for i in w.open_incidents() if not i.victims or i.scope] == ["nvlink-switch"]
    assert not [e for e in w.done if isinstance(e, (StartWorker, Verify)) and e.worker == "decode-1"]
    w.reload(whole)
    for _ in range(3):
        for node in ("t03", "t04", "t05"):
            w.report(msgspec.structs.replace(down(node), present=False))
        w.pass_time(10)
    assert w.state_of("decode-1") is WorkerState.ACTIVE


_WALK = """
import hashlib, msgspec
from sentinel.testing.decisions import World, rack
w = World(rack(decoders=9))
w.pass_time(60, step=5, reporting=["t01", "t05", "t07"])
for n in ("t03", "t04", "t09"):
    w.report(w.xid(79, n))
w.ask("hold", "t05", keep="out")
w.lead()
w.pass_time(60, step=5)
print(hashlib.sha256(b"".join(msgspec.json.encode(out) for _, out in w.journal)).hexdigest())
"""


def test_another_process_decides_the_same() -> None:
    """What is replayed elsewhere comes out to the letter, whatever order that Python gives to the members of a set."""
    told = {
        subprocess.run(
            [sys.executable, "-c", _WALK], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(told) == 1


class TestMoved:
    """A worker that the configuration moves to another node is no longer what stands against its old one."""

    def moved(self, w: World, name: str, to: str) -> Fleet:
        worker = next(x for x in w.fleet.workers if x.name == name)
        gpus = tuple(gpu_component(to, g.gpu or "") for g in worker.gpus)
        fleet = configured(w.fleet, name, nodes=(to,), gpus=gpus)
        return msgspec.structs.replace(fleet, nodes=tuple(sorted({*fleet.nodes, to})))

    def test_what_waited_to_be_drained_for_its_old_node_is_not(self) -> None:
        """The budget that kept it in frees when it is on healthy hardware: nobody drains it there."""
        w = World(with_pool(rack(), max_doubtful_drains=0))
        w.report(remap(w, "t03"))
        assert "decode-1" in w.decider.held_back()
        w.reload(self.moved(w, "decode-1", "t20"))
        w.reload(with_pool(w.fleet, max_doubtful_drains=9))
        w.pass_time(60)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert w.drain_of("decode-1") is None

    def test_one_that_is_out_comes_back_when_it_has_moved_and_passed_its_test(self) -> None:
        """What is still broken on the node that it has left does not keep it out."""
        w = World()
        w.held = lambda e: isinstance(e, StopWorker)
        w.report(remap(w, "t03"))
        w.pass_time(5)
        w.reload(self.moved(w, "decode-1", "t20"))
        w.held = lambda e: False
        for _ in range(10):
            w.report(remap(w, "t03"))
            w.pass_time(10)
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_a_steered_one_has_its_traffic_back_when_it_has_moved(self) -> None:
        """The links that retrain are another worker's now."""
        w = World()
        crc = w.state("gpu.nvlink_crc", gpu_component("t03", PCIS[0]), certainty=0.9, action=Action.INSPECT)
        for _ in range(100):
            w.report(crc)
            w.pass_time(10, step=5)
        drain = w.drain_of("decode-1")
        assert drain is not None and drain.state is DrainState.EASED
        w.reload(self.moved(w, "decode-1", "t20"))
        w.report(crc)
        w.pass_time(5)
        drain = w.drain_of("decode-1")
        assert drain is not None and drain.state is DrainState.DONE


def test_a_state_that_grows_worse_as_the_leader_changes_is_acted_on() -> None:
    """What was only on record, and is fatal by the time that a new leader first hears it, is no old news."""
    w = World()
    where = Component(node="t03", device="driver")
    w.report(w.state("driver.hung", where, action=Action.REBOOT_NODE))
    w.pass_time(5)
    assert w.state_of("decode-1") is WorkerState.ACTIVE
    w.lead()
    for _ in range(3):
        w.report(w.state("driver.hung", where, severity=Severity.FATAL, action=Action.REBOOT_NODE))
        w.pass_time(5)
    assert w.state_of("decode-1") is WorkerState.OUT
    assert [p.component for p in w.pages] == ["t03"]


@pytest.mark.parametrize("off", [-7200.0, 7200.0])
def test_a_new_leader_counts_how_long_a_state_has_lasted_by_its_own_clock(off: float) -> None:
    """A node whose clock is hours off is steered after as long as any other, whoever leads."""
    w = World()

    def crc() -> Finding:
        found = w.state("gpu.nvlink_crc", gpu_component("t03", PCIS[0]), certainty=0.9, action=Action.INSPECT)
        return msgspec.structs.replace(found, at=w.now + off)

    w.report(crc())
    w.lead()
    w.report(crc())
    w.pass_time(60, step=5)
    assert w.drain_of("decode-1") is None
    for _ in range(100):
        w.report(crc())
        w.pass_time(10, step=5)
    drain = w.drain_of("decode-1")
    assert drain is not None and drain.state is DrainState.EASED


def test_a_standby_that_starts_on_what_degrades_is_steered() -> None:
    """Retraining links do not keep it from starting when it is needed; then it gets less, like any other worker."""
    w = World()
    crc = w.state("gpu.nvlink_crc", gpu_component("t08", PCIS[0]), certainty=0.9, action=Action.INSPECT)
    for _ in range(100):
        w.report(crc)
        w.pass_time(10, step=5)
    assert w.drain_of("spill-2") is None
    for node in ("t03", "t04", "t05"):
        w.report(off_bus(w, node))
    for _ in range(5):
        w.report(crc)
        w.pass_time(10)
    drain = w.drain_of("spill-2")
    assert drain is not None and drain.response is Response.STEER and w.state_of("spill-2") is WorkerState.ACTIVE


def test_a_page_that_goes_on_as_another_ones_is_not_rung_again() -> None:
    """An engine's page went over to its GPU; the engine, found dead anew when it is configured no more, calls under its own key."""
    w = World()

    def engine(check: str) -> Finding:
        where = Component(node="t03", device="worker@decode-1")
        return w.state(check, where, severity=Severity.FATAL, action=Action.RESTART_WORKER)

    w.ask("hold", "decode-1", keep="in")
    w.report(engine("worker.dead"))
    w.pass_time(5)
    w.report(off_bus(w, "t03"))
    w.reload(msgspec.structs.replace(w.fleet, workers=tuple(x for x in w.fleet.workers if x.name != "decode-1")))
    for _ in range(40):
        w.report(engine("worker.unreachable"))
        w.pass_time(10, step=5)
    called = [p.dedup_key for p in w.pages if p.event == "trigger" and not p.details.get("update")]
    assert len(called) == len(set(called)) == 2

"""The ladder of repairs, the node lock, and reboots that sentinel itself asked for."""

from __future__ import annotations

import re

import msgspec
import pytest

from sentinel.decide.rules.policy import Policy
from sentinel.decide.rules.policy_file import default_policy_text, load_policy
from sentinel.decide.state.events import AwaitIdle, Done, Repair, StartWorker, Verify
from sentinel.model import (
    Action,
    Component,
    DrainState,
    Finding,
    Fleet,
    Pool,
    Report,
    Role,
    Severity,
    Worker,
    WorkerState,
    gpu_component,
)
from sentinel.testing.decisions import PCIS, World, rack

DAY = 86_400.0


def policy(*automatic: str, **timing: str) -> Policy:
    """The shipped rules, with these repairs left to sentinel."""
    text = default_policy_text()
    for name in automatic:
        text, n = re.subn(rf"(\[repair\.{name}\]\nauto = )false", r"\1true", text)
        assert n == 1
    for key, value in timing.items():
        text, n = re.subn(rf"(?m)^{key} = \S+", f"{key} = {value}", text)
        assert n == 1
    return load_policy(text)


def shared() -> Fleet:
    """Two workers of two GPUs each on one tray, and others elsewhere."""
    trays = [("a", "t01", PCIS[:2]), ("b", "t01", PCIS[2:])] + [(f"c{n}", f"t0{n}", PCIS) for n in range(2, 6)]
    workers = tuple(
        Worker(
            name=name, pool="main", url=f"http://{name}", role=Role.BOTH, nodes=(node,),
            gpus=tuple(gpu_component(node, p) for p in pcis),
        )
        for name, node, pcis in trays
    )  # fmt: skip
    return Fleet(pools=(Pool(name="main", floor=0.0),), workers=workers, nodes=tuple(f"t0{n}" for n in range(1, 6)))


def broken(w: World, node: str, gpu: int = 0, code: int = 95) -> Finding:
    return w.xid(code, node, gpu)


def remap(w: World, node: str, present: bool = True) -> Finding:
    return w.state("gpu.row_remap_pending", gpu_component(node, PCIS[0]), present, action=Action.RESET_GPU)


def repairs(w: World) -> list[tuple[Action, str]]:
    return [(e.action, e.target) for e in w.done if isinstance(e, Repair)]


def fails(*actions: Action):
    return lambda e: not (isinstance(e, Repair) and e.action in actions)


class Booted(World):
    """Nodes whose reports name their boot."""

    boots: dict[str, str]

    def _report(self, *args, **more) -> Report:
        report = super()._report(*args, **more)
        return msgspec.structs.replace(report, boot_id=getattr(self, "boots", {}).get(report.node, "first"))


class TestLadder:
    def test_a_failed_reset_is_followed_by_a_reboot_where_the_policy_lets_it(self) -> None:
        """The next rung cures: worker and incident end well, and both say how it went."""
        w = World(policy=policy("reboot_node"))
        w.outcomes = fails(Action.RESET_GPU)
        w.report(broken(w, "t03"))
        w.pass_time(10)
        gpu = str(gpu_component("t03", PCIS[0]))
        assert repairs(w) == [(Action.RESET_GPU, gpu), (Action.REBOOT_NODE, "t03")]
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        (incident,) = w.incidents()
        assert incident.closed_at is not None
        assert any(s.what == "next repair" and "reset_gpu did not cure it" in s.why for s in incident.history)
        drain = w.drain_of("decode-1")
        assert drain is not None
        assert drain.tried == (f"reset_gpu {gpu}", "reboot_node t03")
        assert any("reboot_node of t03 is next" in s.why for s in drain.history)

    def test_what_the_policy_leaves_to_a_person_is_named_to_that_person(self) -> None:
        """With the shipped rules a reset that fails asks a person, and says what would be next."""
        w = World()
        w.outcomes = fails(Action.RESET_GPU)
        w.report(broken(w, "t03"))
        w.pass_time(10)
        assert [a for a, _ in repairs(w)] == [Action.RESET_GPU]
        told = [s.why for i in w.incidents() for s in i.history if s.what == "needs a person"]
        assert len(told) == 1
        assert "reset_gpu did not cure it; reboot_node is next and is left to a person" in told[0]
        assert w.state_of("decode-1") is WorkerState.OUT

    @pytest.mark.parametrize("still", [True, False])
    def test_what_is_not_proven_is_not_cured(self, still: bool) -> None:
        """Still reported after the reset, or its active test not passed: the worker is stopped and the reboot follows."""
        w = World(policy=policy("reboot_node", verify_deadline='"20s"'))
        if not still:
            w.outcomes = lambda e: not isinstance(e, Verify) or any(a is Action.REBOOT_NODE for a, _ in repairs(w))
        w.report(remap(w, "t03"))
        for _ in range(50):
            mended = not still or any(a is Action.REBOOT_NODE for a, _ in repairs(w))
            w.report(remap(w, "t03", present=not mended))
            w.pass_time(1)
        assert [a for a, _ in repairs(w)] == [Action.RESET_GPU, Action.REBOOT_NODE]
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_the_ladder_ends_with_a_person(self) -> None:
        """When nothing cures, each rung is tried once and then a person is asked, once."""
        w = World(policy=policy("reboot_node", "power_cycle"))
        w.outcomes = fails(*Action)
        w.report(broken(w, "t03"))
        w.pass_time(4000, step=20)
        assert [a for a, _ in repairs(w)] == [Action.RESET_GPU, Action.REBOOT_NODE, Action.POWER_CYCLE]
        assert len([s for i in w.incidents() for s in i.history if s.what == "needs a person"]) == 1
        assert w.state_of("decode-1") is WorkerState.OUT
        assert [(p.event, bool(p.details.get("update"))) for p in w.pages] == [("trigger", False), ("trigger", True)]
        assert w.pages[0].dedup_key == w.pages[1].dedup_key
        assert "repair-failed: power_cycle" in w.pages[1].summary

    def test_each_rung_is_keyed_anew_and_survives_its_leader(self) -> None:
        """A leader that takes over between two rungs goes on with the second, and no key is used twice."""
        w = World(policy=policy("reboot_node"))
        w.outcomes = fails(Action.RESET_GPU)
        w.held = lambda e: isinstance(e, Repair) and e.action is Action.REBOOT_NODE
        w.report(broken(w, "t03"))
        w.pass_time(5)
        w.lead()
        w.held = lambda e: False
        w.settle()
        w.pass_time(10)
        asked = [e.id.partition("#")[0] for e in w.done if isinstance(e, Repair)]
        assert len(asked) == len(set(asked)) == 2
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_a_refused_command_is_no_failed_repair(self) -> None:
        """An agent that may not reset has not tried: a person is asked and no node is rebooted for it."""
        w = World(policy=policy("reboot_node"))
        w.held = lambda e: isinstance(e, Repair)
        w.report(broken(w, "t03"))
        w.pass_time(3)
        (effect,) = [e for e in w.pending.values() if isinstance(e, Repair)]
        w.handle(Done(id="d", at=w.now, instruction=effect.id, ok=False, detail="not in the allow-list", facts={"refused": True}))
        w.held = lambda e: False
        w.settle()
        w.pass_time(30)
        assert repairs(w) == []
        assert any("refused" in s.why for i in w.incidents() for s in i.history if s.what == "needs a person")

    def test_no_answer_is_no_failure(self) -> None:
        """A reset whose outcome nobody could tell is not followed by a reboot."""
        w = World(policy=policy("reboot_node"))
        w.outcomes = lambda e: None if isinstance(e, Repair) else True
        w.report(broken(w, "t03"))
        w.pass_time(120)
        assert {a for a, _ in repairs(w)} == {Action.RESET_GPU}
        assert any("no answer" in s.why for i in w.incidents() for s in i.history if s.what == "needs a person")

    def test_a_neighbour_in_service_is_not_taken_along(self) -> None:
        """Where another worker serves on the node, the reboot after a failed reset is a person's."""
        w = World(shared(), policy("reboot_node"))
        w.outcomes = fails(Action.RESET_GPU)
        w.report(broken(w, "t01"))
        w.pass_time(20)
        assert [a for a, _ in repairs(w)] == [Action.RESET_GPU]
        assert any("reboot_node is next and would take b with it" in s.why for i in w.incidents() for s in i.history)
        assert w.state_of("b") is WorkerState.ACTIVE

    def test_the_second_failure_of_a_repair_in_seven_days_is_a_persons(self) -> None:
        """A reset that did not last last week and fails now is not followed by a reboot that the policy would allow."""
        w = World(policy=policy("reboot_node"))
        w.report(broken(w, "t03"))
        w.pass_time(10)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        w.pass_time(2 * DAY, step=3600)
        w.outcomes = fails(Action.RESET_GPU)
        w.report(broken(w, "t03", code=119))
        w.pass_time(10)
        assert [a for a, _ in repairs(w)] == [Action.RESET_GPU, Action.RESET_GPU]
        assert any("failure 2 of reset_gpu in 7 days" in s.why for i in w.incidents() for s in i.history)

    def test_after_the_memory_it_may_climb_again(self) -> None:
        """A failure of more than seven days ago counts no more."""
        w = World(policy=policy("reboot_node"))
        w.outcomes = fails(Action.RESET_GPU)
        for _ in range(2):
            w.report(broken(w, "t03"))
            w.pass_time(10)
            w.pass_time(9 * DAY, step=3600)
        assert [a for a, _ in repairs(w)] == [Action.RESET_GPU, Action.REBOOT_NODE] * 2

    def test_an_undrain_is_not_answered_with_a_repair(self) -> None:
        """Who says undrain has mended it: what then is not clean asks again, and repairs nothing."""
        w = World(policy=policy("reboot_node", verify_deadline='"20s"'))
        w.outcomes = fails(Action.RESET_GPU, Action.REBOOT_NODE)
        w.report(remap(w, "t03"))
        w.pass_time(10)
        before = repairs(w)
        w.outcomes = lambda e: not isinstance(e, Verify)
        w.ask("undrain", "decode-1")
        w.pass_time(60)
        assert repairs(w) == before
        assert w.state_of("decode-1") is WorkerState.OUT


class TestNodeLock:
    def test_two_repairs_of_two_incidents(self) -> None:
        """GPUs of two workers on one node are reset one after the other."""
        w = World(shared())
        w.held = lambda e: isinstance(e, Repair)
        w.report(broken(w, "t01", 0), broken(w, "t01", 2))
        w.pass_time(10)
        assert len([e for e in w.pending.values() if isinstance(e, Repair)]) == 1
        w.held = lambda e: False
        w.settle()
        w.pass_time(10)
        assert len(repairs(w)) == 2
        assert w.open_incidents() == []

    def test_a_new_leader_keeps_the_lock(self) -> None:
        """The lock is read from what is durable: a take-over in the middle of a repair begins no second one."""
        w = World(shared())
        w.held = lambda e: isinstance(e, Repair)
        w.report(broken(w, "t01", 0), broken(w, "t01", 2))
        w.pass_time(3)
        w.lead()
        w.pass_time(20)
        assert len([e for e in w.pending.values() if isinstance(e, Repair)]) == 1

    def test_a_reboot_waits_for_a_start_on_the_node(self) -> None:
        """A worker that is being started or tested there is not cut."""
        w = World(shared(), policy("reboot_node"))
        w.ask("drain", "b")
        w.held = lambda e: isinstance(e, Verify)
        w.ask("undrain", "b")
        w.report(w.xid(79, "t01", 0, action=Action.REBOOT_NODE))
        w.pass_time(5)
        assert w.drain_of("b").state is DrainState.VERIFYING  # type: ignore[union-attr]
        assert repairs(w) == []
        w.held = lambda e: False
        w.settle()
        w.pass_time(5)
        assert w.state_of("b") is WorkerState.ACTIVE
        assert repairs(w) == []  # it would take b with it: a person's

    def test_a_start_waits_for_a_reboot_of_the_node(self) -> None:
        """A person's undrain during a reboot of the node is carried out when that is over."""
        w = World(shared(), policy("reboot_node"))
        w.ask("drain", "b")
        w.pass_time(3)
        w.held = lambda e: isinstance(e, Repair)
        w.report(w.xid(79, "t01", 0, action=Action.REBOOT_NODE))
        w.pass_time(3)
        assert [e.action for e in w.pending.values() if isinstance(e, Repair)] == [Action.REBOOT_NODE]
        w.ask("undrain", "b")
        w.pass_time(10)
        assert w.drain_of("b").state is DrainState.OUT  # type: ignore[union-attr]
        assert w.drain_of("b").history[-1].what == "waits"  # type: ignore[union-attr]
        w.held = lambda e: False
        w.settle()
        w.pass_time(10)
        assert w.state_of("b") is WorkerState.ACTIVE
        assert w.state_of("a") is WorkerState.ACTIVE

    def test_a_reboot_waits_for_what_a_neighbour_has_in_flight(self) -> None:
        """A neighbour that a person drains finishes its requests first."""
        w = World(shared(), policy("reboot_node"))
        w.held = lambda e: isinstance(e, AwaitIdle)
        w.ask("drain", "b")
        w.report(w.xid(79, "t01", 0, action=Action.REBOOT_NODE))
        w.pass_time(10)
        assert repairs(w) == []
        w.held = lambda e: False
        w.settle()
        w.pass_time(5)
        assert [a for a, _ in repairs(w)] == [Action.REBOOT_NODE]

    def test_a_reboot_waits_for_a_reset_of_another_incident(self) -> None:
        """Repairs of the GPU and of the node never run together."""
        w = World(shared(), policy("reboot_node"))
        w.held = lambda e: isinstance(e, Repair)
        w.report(broken(w, "t01", 0))
        w.pass_time(3)
        w.report(w.xid(79, "t01", 2, action=Action.REBOOT_NODE))
        w.pass_time(20)
        assert [e.action for e in w.pending.values() if isinstance(e, Repair)] == [Action.RESET_GPU]

    def test_a_standby_is_not_started_under_a_reboot(self) -> None:
        """A shortage does not start a standby on a node that is being rebooted."""
        fleet = rack(decoders=2)
        on_t03 = tuple(
            msgspec.structs.replace(x, nodes=("t03",), gpus=()) if x.name == "spill-2" else x for x in fleet.workers
        )
        w = World(msgspec.structs.replace(fleet, workers=on_t03), policy("reboot_node"))
        w.held = lambda e: isinstance(e, Repair)
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        w.report(w.xid(79, "t04", action=Action.REBOOT_NODE))
        w.pass_time(20)
        running = {e.node for e in w.pending.values() if isinstance(e, Repair)}
        starting = {e.worker for e in w.done if isinstance(e, StartWorker)}
        assert not ("t03" in running and "spill-2" in starting)

    def test_a_gpu_that_a_held_in_worker_serves_on_is_not_reset(self) -> None:
        """A reset that would end a worker which a person holds in is left to a person."""
        fleet = shared()
        twin = tuple(
            msgspec.structs.replace(x, gpus=tuple(gpu_component("t01", p) for p in PCIS[:2])) if x.name == "b" else x
            for x in fleet.workers
        )
        w = World(msgspec.structs.replace(fleet, workers=twin))
        w.ask("hold", "b", keep="in")
        w.report(broken(w, "t01", 0))
        w.pass_time(10)
        assert repairs(w) == []
        assert w.state_of("b") is WorkerState.ACTIVE
        assert any("would take b with it" in s.why for i in w.incidents() for s in i.history)

    def test_a_worker_that_left_the_configuration_locks_its_node_only_until_it_has_answered(self) -> None:
        """Its repair still runs; when it has ended the node is free for the others."""
        w = World(shared())
        w.held = lambda e: isinstance(e, Repair)
        w.report(broken(w, "t01", 0))
        w.pass_time(3)
        fleet = msgspec.structs.replace(w.fleet, workers=tuple(x for x in w.fleet.workers if x.name != "a"))
        w.reload(fleet)
        w.report(broken(w, "t01", 2))
        w.pass_time(10)
        assert len([e for e in w.pending.values() if isinstance(e, Repair)]) == 1
        w.outcomes = lambda e: not (isinstance(e, Repair) and e.target.endswith(PCIS[0]))
        w.held = lambda e: False
        w.settle()
        w.pass_time(10)
        assert len(repairs(w)) == 2
        assert w.state_of("b") is WorkerState.ACTIVE


class TestReboots:
    def down(self) -> Booted:
        """t03 is being rebooted: the command has ended, the node is not back."""
        w = Booted(policy=policy("reboot_node", "power_cycle"))
        w.boots = {}
        w.pass_time(2)
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        w.pass_time(2)
        assert [a for a, _ in repairs(w)] == [Action.REBOOT_NODE]
        return w

    def others(self, w: World) -> list[str]:
        return [n for n in w.fleet.nodes if n != "t03"]

    def test_it_is_over_when_the_node_reports_another_boot(self) -> None:
        """The command's end starts nothing; the next boot does."""
        w = self.down()
        w.pass_time(300, reporting=self.others(w), step=5)
        assert w.drain_of("decode-1").state is DrainState.REPAIRING  # type: ignore[union-attr]
        assert w.did(StartWorker) == []
        w.boots["t03"] = "second"
        w.pass_time(10)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert len(repairs(w)) == 1

    def test_its_silence_is_no_fault(self) -> None:
        """While it boots nothing is missed, nothing is found, and nobody is paged for it."""
        w = self.down()
        pages = len(w.pages)
        w.report(w.xid(119, "t03", gpu=2))
        w.pass_time(600, reporting=self.others(w), step=5)
        assert len(w.pages) == pages
        assert [i.fault for i in w.incidents()] == ["gpu-off-bus"]

    def test_one_that_never_comes_back_fails(self) -> None:
        """After half an hour without a word of it the next rung follows, and then a person."""
        w = self.down()
        w.pass_time(2000, reporting=self.others(w), step=10)
        assert [a for a, _ in repairs(w)] == [Action.REBOOT_NODE, Action.POWER_CYCLE]
        w.pass_time(2000, reporting=self.others(w), step=10)
        assert any("not come back" in s.why for i in w.incidents() for s in i.history if s.what == "needs a person")

    def test_an_agent_that_died_with_its_node_has_not_failed(self) -> None:
        """The command ends as interrupted, and the new boot says that it did what it should."""
        w = Booted(policy=policy("reboot_node", "power_cycle"))
        w.boots = {}
        w.pass_time(2)
        w.held = lambda e: isinstance(e, Repair)
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        w.pass_time(3)
        w.held, w.outcomes = (lambda e: False), fails(Action.REBOOT_NODE)
        w.settle()
        w.boots["t03"] = "second"
        w.pass_time(10)
        assert [a for a, _ in repairs(w)] == [Action.REBOOT_NODE]
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_a_command_that_failed_without_a_reboot_has_failed(self) -> None:
        """The same boot goes on reporting: then the failure counts."""
        w = Booted(policy=policy("reboot_node"))
        w.boots = {}
        w.pass_time(2)
        w.outcomes = fails(Action.REBOOT_NODE)
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        w.pass_time(60)
        assert any("power_cycle is next and is left to a person" in s.why for i in w.incidents() for s in i.history)

    def test_a_new_leader_waits_for_the_same_boot(self) -> None:
        """What boot it was is durable."""
        w = self.down()
        w.pass_time(5, reporting=self.others(w))
        w.lead()
        w.pass_time(60, reporting=self.others(w), step=5)
        assert w.drain_of("decode-1").state is DrainState.REPAIRING  # type: ignore[union-attr]
        w.boots["t03"] = "second"
        w.pass_time(10)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert len(repairs(w)) == 1

    def test_what_the_new_boot_reports_counts(self) -> None:
        """A fault that the reboot did not cure, told with the first report of the new boot, keeps the worker out."""
        w = self.down()
        w.pass_time(60, reporting=self.others(w), step=5)
        w.boots["t03"] = "second"
        for _ in range(2):
            w.report(w.state("gpu.lost", gpu_component("t03", PCIS[0]), severity=Severity.FATAL, action=Action.REBOOT_NODE))
            w.pass_time(1)
        w.pass_time(20)
        assert w.state_of("decode-1") is not WorkerState.ACTIVE


def test_a_stop_that_was_meant_is_not_found() -> None:
    """While sentinel has a worker stopped for a repair, that it does not answer is no part of the incident."""
    w = World()
    w.held = lambda e: isinstance(e, Repair)
    w.report(broken(w, "t03"))
    w.pass_time(3)
    where = Component(node="t03", device="worker@decode-1")
    for _ in range(3):
        w.report(w.state("worker.unreachable", where, severity=Severity.FATAL, action=Action.RESTART_WORKER))
        w.pass_time(5)
    (incident,) = w.incidents()
    assert [f.check for f in incident.findings] == ["xid.95"]
    assert not any("worker.unreachable" in s.why for s in incident.history)


"""Faults, drains and repairs that meet on one worker, GPU or node: each is repaired where it is, once, and told as what it is."""

from __future__ import annotations

import msgspec

from sentinel.decide.rules.policy_file import default_policy_text, load_policy
from sentinel.decide.state.events import Repair, StartWorker, Verify
from sentinel.model import Action, Fleet, Worker, WorkerState, gpu_component
from sentinel.testing.decisions import PCIS, World, rack
from tests.unit.decider_faults import changed, off_bus, remap


def worker_named(fleet: Fleet, name: str) -> Worker:
    return next(x for x in fleet.workers if x.name == name)


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

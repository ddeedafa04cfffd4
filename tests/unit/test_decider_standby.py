"""A standby serves only when it is wanted, can be started, and no person and no fault of its own speaks against it."""

from __future__ import annotations

from sentinel.decide.state.events import AwaitIdle, Reroute, StartWorker, Verify
from sentinel.model import WorkerState
from sentinel.testing.decisions import World, rack
from tests.unit.decider_faults import off_bus


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

"""A worker is drained on the word of the nodes that it runs on, as configured or learned, and on nobody else's."""

from __future__ import annotations

from sentinel.model import Action, Component, Finding, Severity, WorkerSeen, WorkerState
from sentinel.testing.decisions import PCIS, World, rack
from tests.unit.decider_faults import changed, off_bus


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

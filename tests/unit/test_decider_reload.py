"""A configuration that is read anew while faults are open loses no drain, repeats none, and leaves nothing behind."""

from __future__ import annotations

import msgspec
import pytest

from sentinel.decide.state.events import AwaitIdle, Deroute, Repair, Reroute, StartWorker, StopWorker, Verify
from sentinel.model import Fleet, WorkerState
from sentinel.testing.decisions import World, rack
from tests.unit.decider_faults import off_bus


def without(fleet: Fleet, *gone: str) -> Fleet:
    workers = tuple(x for x in fleet.workers if x.name not in gone)
    nodes = tuple(sorted({n for x in workers for n in x.nodes}))
    return msgspec.structs.replace(fleet, workers=workers, nodes=nodes)


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

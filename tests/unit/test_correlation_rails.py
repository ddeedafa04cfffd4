"""Rails that go down together are their leaf switch's, as far as it is known which nodes share one, and nobody leaves for it."""

from __future__ import annotations

from sentinel.decide.state.events import StopWorker
from sentinel.testing.decisions import World
from tests.unit.fault_racks import confirmed, fleet, notified, one, open_of, out, rail


class TestRails:
    def test_half_of_a_leaf_is_the_leaf(self) -> None:
        """One rail down on ten of eighteen nodes at a leaf: the leaf switch; nobody is drained, one page."""
        w = World(fleet())
        w.held = w.busy
        confirmed(w, *(rail(w, n) for n in w.fleet.nodes[:10]))
        w.held = lambda e: False
        w.pass_time(20)
        incident = one(w)
        assert (incident.fault, incident.culprit) == ("leaf-switch", "leaf-r1-1")
        assert incident.scope == w.fleet.nodes[:10]
        assert out(w) == set()
        assert w.did(StopWorker) == []
        assert len(notified(w)) == 1

    def test_a_few_of_a_leaf_are_themselves(self) -> None:
        """Two rails at one leaf, and two at others: each node's own."""
        w = World(fleet())
        confirmed(w, rail(w, "r1t01"), rail(w, "r1t02"), rail(w, "r1t03", "mlx5_0"), rail(w, "r2t03"))
        w.pass_time(5)
        assert {i.fault for i in w.open_incidents()} == {"nic-fatal"}
        assert len(out(w)) == 4

    def test_without_leaves_the_same_device_of_a_rack_is_a_rail(self) -> None:
        """No leaf is configured: three nodes of one rack that lose the same device at once share something; less sure."""
        w = World(fleet(leaves=False))
        confirmed(w, *(rail(w, n) for n in w.fleet.nodes[:4]))
        w.pass_time(20)
        incident = one(w)
        assert (incident.fault, incident.culprit) == ("leaf-switch", "rail:mlx5_1")
        assert incident.confidence <= 0.5
        assert out(w) == set()

    def test_without_leaves_or_racks_nothing_is_concluded(self) -> None:
        """The same device down on nodes that nobody has placed, or in three racks: each its own."""
        w = World(fleet(racks=3, trays=6, leaves=False))
        confirmed(w, rail(w, "r1t01"), rail(w, "r2t01"), rail(w, "r3t01"))
        w.pass_time(5)
        assert {i.fault for i in w.open_incidents()} == {"nic-fatal"}
        w = World(fleet(racks=2, placed=False))
        confirmed(w, *(rail(w, n) for n in w.fleet.nodes[:4]))
        w.pass_time(5)
        assert {i.fault for i in w.open_incidents()} == {"nic-fatal"}

    def test_a_leaf_outranks_one_check_on_many_nodes(self) -> None:
        """A leaf that is most of the fleet is a leaf, not a rollout: one incident, one page."""
        w = World(fleet(racks=1))
        confirmed(w, *(rail(w, n) for n in w.fleet.nodes[:18]))
        w.pass_time(20)
        assert open_of(w) == [("leaf-switch", "leaf-r1-1")]
        assert len(notified(w)) == 1
        assert out(w) == set()

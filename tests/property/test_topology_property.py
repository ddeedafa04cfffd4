"""Whatever was said, in whatever order, the topology's indexes answer as if everybody had just said where they stand."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sentinel.decide.rack.topology import CLAIM_S, Topology
from sentinel.model import Fleet, GpuPlace, NodePlace, Place, gpu_component

NODES = [f"t{n:02d}" for n in range(1, 6)]
PCIS = ("0008:01:00.0", "0009:01:00.0")
names = st.sampled_from(["", "a", "a", "b"])
places = st.builds(
    Place,
    chassis=st.sampled_from(["", "S1", "S2", "a"]),
    tray=st.sampled_from([None, 0, 1]),
    domain=st.sampled_from(["", "aa", "bb"]),
    clique=st.sampled_from([None, 1, 2]),
    gpus=st.lists(st.sampled_from(["u1", "u2", "u3", "u4"]), max_size=2).map(
        lambda uuids: tuple(GpuPlace(pci=p, uuid=u) for p, u in zip(PCIS, uuids, strict=False))
    ),
    addresses=st.sets(st.sampled_from(["10.0.0.1", "10.0.0.2", "FD00::1", "t02"]), max_size=2).map(tuple),
)
configured = st.builds(
    dict, rack=names, domain=names, tray=st.sampled_from([None, 1]), leaves=st.sampled_from([{}, {"mlx5_0": "leaf-1"}]),
    addresses=st.sampled_from([(), ("10.0.0.1",), ("fd00::1",)]),
)  # fmt: skip


class Sites(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.at, self.now, self.fleet = Topology(), 1000.0, Fleet()
        self.heard_at: dict[str, float] = {}
        self.said: dict[str, Place] = {}

    def hear(self, node: str, place: Place) -> None:
        self.said[node], self.heard_at[node] = place, self.now
        for finding in self.at.heard(node, place, self.now):
            assert finding.component.node == node
            assert "\n" not in finding.summary
            assert finding.facts.get("nodes", []) == [n for n in finding.facts.get("nodes", []) if n != node]

    @rule(said=st.dictionaries(st.sampled_from(NODES), places, min_size=1, max_size=3))
    def report(self, said: dict[str, Place]) -> None:
        for node, place in said.items():
            self.hear(node, place)

    @rule(nodes=st.lists(st.sampled_from(NODES), min_size=1))
    def report_the_same(self, nodes: list[str]) -> None:
        for node in nodes:
            if node in self.said:
                self.hear(node, self.said[node])

    @rule(seconds=st.sampled_from([5.0, CLAIM_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(node=st.sampled_from(NODES))
    def reboot(self, node: str) -> None:
        self.at.rebooted(node)

    @rule(said=st.dictionaries(st.sampled_from(NODES), configured))
    def configure(self, said: dict[str, dict[str, object]]) -> None:
        left = set(self.fleet.nodes) - set(said)
        self.fleet = Fleet(nodes=tuple(said), places=tuple(NodePlace(node=n, **each) for n, each in said.items()))  # type: ignore[arg-type]
        self.at.load(self.fleet)
        for node in left:
            self.said.pop(node, None)
            self.heard_at.pop(node, None)

    @invariant()
    def it_answers_like_a_new_one(self) -> None:
        """A topology that hears the same places for the first time, in another order, says the same of every node."""
        if not hasattr(self, "at"):
            return
        new = Topology()
        new.load(self.fleet)
        for node in sorted(self.said, key=lambda n: (self.heard_at[n], n[::-1])):
            new.heard(node, self.at.reported(node), self.heard_at[node])
        for node in NODES:
            assert new.rack(node) == self.at.rack(node)
            assert new.domain(node) == self.at.domain(node)
            assert new.tray(node) == self.at.tray(node)
            assert new.nodes_of_domain(new.domain(node)) == self.at.nodes_of_domain(new.domain(node))
        for domain in {self.at.domain(n) for n in NODES} - {""}:
            assert self.at.nodes_of_domain(domain) == {n for n in NODES if self.at.domain(n) == domain}
        for leaf in self.at.leaves():
            assert self.at.nodes_of_leaf(leaf) == {n for n in NODES if self.at.leaf(n, "mlx5_0") == leaf}
        for address in ("10.0.0.1", "10.0.0.2", "fd00::1", *NODES):
            assert new.node_at(address) == self.at.node_at(address)

    @rule()
    def everybody_repeats_itself(self) -> None:
        """Then what stands is what a new topology finds, and a GPU is disputed exactly when two nodes claim it."""
        for _ in range(2):
            for node in sorted(self.said):
                self.hear(node, self.said[node])
        new = Topology()
        new.load(self.fleet)
        for _ in range(2):
            for node in sorted(self.said, reverse=True):
                new.heard(node, self.at.reported(node), self.now)
        for node in NODES:
            mine, theirs = self.at.contradictions.of(node), new.contradictions.of(node)
            assert {f.check: f.summary for f in mine} == {f.check: f.summary for f in theirs}
            for gpu in self.at.reported(node).gpus:
                claimed = [n for n in self.said if any(g.uuid == gpu.uuid for g in self.at.reported(n).gpus)]
                assert bool(self.at.disputed(gpu_component(node, gpu.pci))) == (len(claimed) > 1)


TestSites = Sites.TestCase
TestSites.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

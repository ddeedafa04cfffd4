"""Where everything stands: learned from reports, completed by the configuration, and contradictions said in one sentence each."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sentinel.decide.decider import Decider
from sentinel.decide.rack.topology import CLAIM_S, Topology
from sentinel.decide.rules.policy_file import default_policy
from sentinel.decide.state.events import Heard
from sentinel.model import (
    Component,
    DrainState,
    Finding,
    Fleet,
    GpuPlace,
    NodePlace,
    Place,
    Severity,
    Suspect,
    Worker,
    gpu_component,
)
from sentinel.testing.decisions import PCIS, World, rack

CHECKS = ("topology.drift", "topology.duplicate_gpu", "topology.same_tray", "topology.split_domain")


def place(node: str, **more: Any) -> Place:
    """What a healthy tray says; trays are counted by the node's number; t07 and t08 stand in another rack, as in ``rack()``."""
    number = int(node[1:])
    fields: dict[str, Any] = {
        "chassis": "S2" if number in (7, 8) else "S1", "slot": number + 10, "tray": number, "host": 1,
        "domain": ("77" if number in (7, 8) else "5e") * 16, "clique": 1,
        "gpus": tuple(GpuPlace(pci=p, uuid=f"GPU-{node}-{i}", module=i + 1) for i, p in enumerate(PCIS)),
        "ports": ("mlx5_0", "mlx5_1"), "addresses": (f"10.0.1.{number}",),
    }  # fmt: skip
    return Place(**{**fields, **more})


def gpus(*uuids: str) -> tuple[GpuPlace, ...]:
    return tuple(GpuPlace(pci=p, uuid=u) for p, u in zip(PCIS, uuids, strict=False))


class Site:
    """A topology and a clock: every node says something every five seconds, unless it is silent."""

    def __init__(self, *places: NodePlace, **fleet: Any) -> None:
        self.fleet = Fleet(places=places, nodes=fleet.pop("nodes", tuple(p.node for p in places)), **fleet)
        self.at = Topology()
        self.at.load(self.fleet)
        self.now = 1000.0
        self.says: dict[str, Place] = {}
        self.found: dict[tuple[str, str], Finding] = {}  # as last said

    def hear(self, node: str, **more: Any) -> list[Finding]:
        self.says[node] = place(node, **more)
        return self._hear(node)

    def _hear(self, node: str) -> list[Finding]:
        found = self.at.heard(node, self.says[node], self.now)
        for f in found:
            self.found[str(f.component), f.check] = f
        return found

    def round(self, *silent: str, seconds: float = 5.0) -> None:
        self.now += seconds
        for node in self.says:
            if node not in silent:
                self._hear(node)

    def standing(self) -> dict[tuple[str, str], str]:
        return {key: f.summary for key, f in self.found.items() if f.present and f.check in CHECKS}


class TestKnowing:
    def test_what_nobody_said_is_nothing(self) -> None:
        """No rack, no domain, no leaf, no address: empty answers, from which nothing can be concluded."""
        at = Topology()
        assert (at.rack("x"), at.domain("x"), at.tray("x"), at.asic("x", 3), at.leaf("x", "mlx5_0"), at.node_at("x")) == (
            "", "", None, "", "", ""
        )  # fmt: skip
        assert not at.nodes_of_domain("") | at.nodes_of_leaf("")

    def test_hardware_alone_is_enough(self) -> None:
        """Without any configuration, rack, domain and tray are what the GPUs report."""
        site = Site()
        site.hear("t01")
        site.hear("t02")
        assert site.at.rack("t01") == "S1"
        assert site.at.domain("t02") == "5e" * 16 + ".1"
        assert site.at.nodes_of_domain("5e" * 16 + ".1") == {"t01", "t02"}
        assert site.at.asic("t01", 7) == "5e" * 16 + ".1/asic07"
        assert site.at.node_at("10.0.1.2") == "t02"

    def test_names_of_the_site_are_used(self) -> None:
        """Rack, domain, ASIC and leaf are called what the site calls them; what it leaves out is still learned."""
        leaves = {"mlx5_0": "leaf-a1"}
        site = Site(
            NodePlace(node="t01", site="hall-1", rack="a01", domain="nv-1", leaves=leaves, addresses=("fd00::0001",)),
            NodePlace(node="t02", leaves=leaves),
            asics=tuple(f"sw{n}" for n in range(18)),
        )
        site.hear("t01")
        assert (site.at.site("t01"), site.at.rack("t01"), site.at.domain("t01")) == ("hall-1", "a01", "nv-1")
        assert site.at.tray("t01") == 1
        assert site.at.asic("t01", 7) == "nv-1/sw7"
        assert site.at.leaf("t02", "mlx5_0") == "leaf-a1"
        assert site.at.leaf("t02", "mlx5_1") == ""
        assert site.at.nodes_of_leaf("leaf-a1") == {"t01", "t02"}
        assert site.at.node_at("FD00::1") == "t01"

    def test_a_name_spreads_to_whoever_shares_the_hardware(self) -> None:
        """A node that nobody placed is in the rack and the domain of those with its chassis and its cluster UUID."""
        site = Site(NodePlace(node="t01", rack="a01", domain="nv-1"))
        for node in ("t01", "t02"):
            site.hear(node)
        assert (site.at.rack("t02"), site.at.domain("t02")) == ("a01", "nv-1")
        site.hear("t03", clique=2)
        assert site.at.domain("t03") == "5e" * 16 + ".2", "another partition is another IMEX domain"
        site.at.load(Fleet(nodes=("t01",)))
        assert site.at.nodes_of_domain("5e" * 16 + ".1") == {"t01", "t02"}
        assert not site.at.nodes_of_domain("nv-1")

    def test_a_workers_domain_places_its_nodes(self) -> None:
        """Where [[nodes]] say nothing, the domain of the worker that runs there counts."""
        site = Site(workers=(Worker(name="w", pool="p", url="http://w", nodes=("t01", "t02"), domain="rack-1"),))
        assert site.at.nodes_of_domain("rack-1") == {"t01", "t02"}
        assert site.at.asic("t02", 0) == "rack-1/asic00"

    def test_an_address_that_several_report_names_none_of_them(self) -> None:
        """A container bridge has the same address on every node; the one that the site gives it to keeps it."""
        site = Site(NodePlace(node="t03", addresses=("172.17.0.2",)))
        for node in ("t01", "t02"):
            site.hear(node, addresses=("172.17.0.1", "172.17.0.2"))
        assert site.at.node_at("172.17.0.1") == ""
        assert site.at.node_at("172.17.0.2") == "t03"
        assert site.at.node_at("T01.") == "t01"

    def test_what_is_not_measured_any_more_stays(self) -> None:
        """A GPU that is gone, a fabric that joins anew, rails that cannot be read: the node stays where it was."""
        site = Site()
        site.hear("t01")
        assert not site.hear("t01", gpus=gpus("GPU-t01-0"), domain="", clique=None, chassis="", tray=None, ports=(), addresses=())
        assert (site.at.rack("t01"), site.at.tray("t01"), site.at.domain("t01")) == ("S1", 1, "5e" * 16 + ".1")
        assert [g.uuid for g in site.at.reported("t01").gpus] == [f"GPU-t01-{i}" for i in range(4)]
        assert site.at.node_at("10.0.1.1") == "t01"

    def test_a_new_boot_names_its_gpus_anew(self) -> None:
        """After a reboot, a GPU that is not named is not there: it may be in another node."""
        site = Site()
        site.hear("t01")
        site.at.rebooted("t01")
        site.hear("t01", gpus=())
        assert len(site.at.reported("t01").gpus) == 4, "the first report of a boot may come before the GPUs were looked at"
        site.hear("t01", gpus=gpus("GPU-t01-0"))
        assert [g.uuid for g in site.at.reported("t01").gpus] == ["GPU-t01-0"]
        site.hear("t01", gpus=gpus("GPU-t01-0", "GPU-t01-1"))
        site.hear("t01", gpus=gpus("GPU-t01-0"))
        assert len(site.at.reported("t01").gpus) == 2, "later in the same boot it is only not measured"

    def test_a_node_that_left_is_forgotten(self) -> None:
        """A node that is no longer configured is in no domain, has no address, and contradicts nobody."""
        site = Site(NodePlace(node="t01", domain="nv-1"), NodePlace(node="t02", domain="nv-1"))
        site.hear("t01")
        site.hear("t02", gpus=gpus("GPU-t01-0"))
        site.round()
        assert set(site.standing()) == {("t01", "topology.duplicate_gpu"), ("t02", "topology.duplicate_gpu")}
        site.at.load(Fleet(nodes=("t01",), places=(NodePlace(node="t01", domain="nv-1"),)))
        del site.says["t02"]
        assert site.at.nodes_of_domain("nv-1") == {"t01"}
        assert site.at.node_at("10.0.1.2") == ""
        site.round()
        over = site.at.over(site.now)
        assert [(str(f.component), f.present) for f in over] == [("t02", False)]
        assert not site.found["t01", "topology.duplicate_gpu"].present

    def test_an_unchanged_place_is_not_looked_at_again(self) -> None:
        """The same place costs a comparison: nothing is found and nothing is kept."""
        site = Site(NodePlace(node="t01", domain="nv-1"))
        site.hear("t01")
        kept = site.at.reported("t01")
        for _ in range(3):
            site.now += 5
            assert site.at.heard("t01", msgspec.json.decode(msgspec.json.encode(place("t01")), type=Place), site.now) == []
        assert site.at.reported("t01") is kept


    def test_a_heartbeat_without_a_place_says_that_it_stands(self) -> None:
        """Heartbeats carry a place only when it changed: whoever sends them still claims its GPUs, for hours on end."""
        site = Site()
        site.hear("t01")
        for _ in range(60):
            site.now += 5
            assert site.at.heard("t01", None, site.now) == []
        site.hear("t02", gpus=gpus("GPU-t01-0"))
        assert ("t02", "topology.duplicate_gpu") in site.standing()
        assert "topology.duplicate_gpu" in {f.check for f in site.at.heard("t01", None, site.now)}
        assert site.at.heard("t09", None, site.now) == []


class TestContradictions:
    def test_every_one_is_a_warning_about_the_monitor(self) -> None:
        """One sentence, suspect monitor, on the node: nothing about the hardware."""
        site = Site(NodePlace(node="t01", tray=7))
        (found,) = site.hear("t01")
        assert (found.check, str(found.component)) == ("topology.drift", "t01")
        assert (found.severity, found.suspect) == (Severity.WARNING, Suspect.MONITOR)
        assert found.summary == "t01 does not stand where the configuration says: it reports tray 1, and not 7."

    def test_a_node_in_another_rack(self) -> None:
        """The majority of a rack says which chassis it is; the odd one out is named with the rack that it is really in."""
        names = {"a01": ("t01", "t02", "t03"), "b01": ("t11", "t12")}
        site = Site(*(NodePlace(node=n, rack=r) for r, nodes in names.items() for n in nodes))
        for node in ("t01", "t02", "t11", "t12"):
            site.hear(node, chassis="S1" if node < "t1" else "S2")
        site.hear("t03", chassis="S2")
        assert site.standing() == {
            ("t03", "topology.drift"): "t03 does not stand where the configuration says: "
            "it reports chassis S2, which is rack b01, and t01, t02 of its rack a01 report S1."
        }
        site.hear("t03", chassis="S1")
        assert not site.standing()

    def test_the_order_of_reports_does_not_matter(self) -> None:
        """The node that moved may be heard first; once its rack has been heard it is the odd one out, and nobody else is."""
        site = Site(*(NodePlace(node=n, rack="a01") for n in ("t01", "t02", "t03")))
        site.hear("t03", chassis="S2")
        for node in ("t01", "t02"):
            site.hear(node)
        site.round()
        assert set(site.standing()) == {("t03", "topology.drift")}

    def test_machines_that_are_a_chassis_each_are_no_contradiction(self) -> None:
        """Four HGX nodes in one rack report four chassis."""
        site = Site(*(NodePlace(node=n, rack="a01") for n in ("t01", "t02", "t03", "t04")))
        for node in ("t01", "t02", "t03", "t04"):
            site.hear(node, chassis=f"S-{node}")
        site.round()
        assert not site.standing()

    def test_a_node_in_another_nvlink_domain(self) -> None:
        """Nodes that share a configured domain share a cluster UUID; cliques may part them."""
        site = Site(*(NodePlace(node=n, domain="nv-1") for n in ("t01", "t02", "t03", "t04")))
        for node in ("t01", "t02"):
            site.hear(node)
        site.hear("t03", clique=2)
        assert not site.standing()
        site.hear("t04", domain="77" * 16)
        assert site.standing()["t04", "topology.drift"].endswith(
            f"it reports NVLink domain {'77' * 16}, and t01, t02, t03 of its domain nv-1 report {'5e' * 16}."
        )
        assert site.at.domain("t04") == "nv-1", "the configuration is used"

    def test_two_names_for_one_domain(self) -> None:
        """Hardware that is one domain under two names: those under the rarer name are told."""
        site = Site(*(NodePlace(node=n, domain="nv-2" if n == "t03" else "nv-1") for n in ("t01", "t02", "t03")))
        for node in ("t01", "t02", "t03"):
            site.hear(node)
        site.round()
        assert set(site.standing()) == {("t03", "topology.drift")}
        assert "called NVLink domain nv-2, and is in" in site.standing()["t03", "topology.drift"]

    def test_an_address_of_another(self) -> None:
        """A node that has the address which the configuration gives to another one."""
        site = Site(NodePlace(node="t01", addresses=("10.0.9.9",)), NodePlace(node="t02"))
        site.hear("t02", addresses=("10.0.9.9", "t01"))
        assert site.standing()["t02", "topology.drift"].endswith(
            "the address 10.0.9.9, which is that of t01; it has the address t01, which is that of t01."
        )

    def test_two_nodes_claim_one_gpu(self) -> None:
        """Both are told, both are named, and no longer once one of them does not claim it."""
        site = Site()
        site.hear("t01")
        site.hear("t02", gpus=gpus("GPU-t01-0", "GPU-t01-1", "GPU-t02-2"))
        site.round()
        told = site.standing()
        assert set(told) == {("t01", "topology.duplicate_gpu"), ("t02", "topology.duplicate_gpu")}
        assert told["t02", "topology.duplicate_gpu"].startswith(
            "t02 and t01 claim the same GPU, GPU-t01-0 at 0008:01:00.0 of t02 and 1 more:"
        )
        for node in ("t01", "t02"):
            assert "claimed by" in site.at.disputed(gpu_component(node, PCIS[0]))
            assert not site.at.disputed(gpu_component(node, PCIS[2]))
        site.at.rebooted("t02")
        site.hear("t02")
        site.round()
        assert not site.standing()
        assert not site.at.disputed(gpu_component("t01", PCIS[0]))

    def test_a_gpu_that_moved_is_claimed_by_nobody_else(self) -> None:
        """A node that has been silent for as long as a swap takes claims its GPUs no more; that one moved is on record."""
        site = Site()
        site.hear("t01")
        site.hear("t02")
        site.round("t01", seconds=CLAIM_S + 1)
        site.hear("t02", gpus=gpus("GPU-t01-0"))
        assert not site.standing()
        assert site.found["t02", "topology.changed"].summary.endswith("is GPU-t01-0, was GPU-t02-0; it was in t01 before.")

    def test_a_claim_that_comes_back_is_a_claim(self) -> None:
        """The silent node still has it: then two nodes claim it, and both are told."""
        site = Site()
        site.hear("t01")
        site.hear("t02")
        site.round("t01", seconds=CLAIM_S + 1)
        site.hear("t02", gpus=gpus("GPU-t01-0"))
        site.round()
        site.round()
        assert set(site.standing()) == {("t01", "topology.duplicate_gpu"), ("t02", "topology.duplicate_gpu")}

    def test_one_of_two_claims_may_come_and_go(self) -> None:
        """With one of them silent there is no dispute; when it speaks again there is, and both are told."""
        site = Site()
        site.hear("t01")
        site.hear("t02", gpus=gpus("GPU-t01-0"))
        site.round("t01", seconds=CLAIM_S + 1)
        for _ in range(10):
            site.round("t01")
        assert not site.found["t02", "topology.duplicate_gpu"].present
        site.round()
        site.round()
        assert set(site.standing()) == {("t01", "topology.duplicate_gpu"), ("t02", "topology.duplicate_gpu")}

    def test_two_nodes_on_one_tray(self) -> None:
        """Same chassis, same tray, same host of it; two hosts of one tray are two nodes."""
        site = Site()
        site.hear("t01")
        site.hear("t02", tray=1, host=2)
        assert not site.standing()
        site.hear("t02", tray=1)
        site.round()
        assert set(site.standing()) == {("t01", "topology.same_tray"), ("t02", "topology.same_tray")}
        assert "t01 and t02 report the same tray 1 of the same chassis S1" in site.standing()["t01", "topology.same_tray"]

    def test_gpus_of_one_node_in_two_domains(self) -> None:
        """The GPU that says otherwise is named."""
        site = Site()
        site.hear("t01", gpus=(GpuPlace(pci=PCIS[0], uuid="a", domain="77.1"), GpuPlace(pci=PCIS[1], uuid="b")))
        assert "0008:01:00.0 in 77.1, the others in 5e5e" in site.standing()["t01", "topology.split_domain"]

    def test_a_change_is_noticed_once(self) -> None:
        """Another rack, another tray, another GPU at an address: one event with every part of it; and then it is so."""
        site = Site()
        site.hear("t01")
        (found,) = site.hear("t01", chassis="S2", tray=4, gpus=gpus("GPU-new"))
        assert (found.check, found.severity, found.kind.value) == ("topology.changed", Severity.INFO, "event")
        assert found.summary == (
            "t01 has changed since it was last heard: chassis S2, was S1; tray 4, was 1; "
            "the GPU at 0008:01:00.0 is GPU-new, was GPU-t01-0."
        )
        site.now += 5
        assert site._hear("t01") == []

    def test_a_corrected_configuration_ends_it(self) -> None:
        """What the file said wrongly is over with the file that says it rightly, at the next report."""
        site = Site(NodePlace(node="t01", tray=7))
        site.hear("t01")
        site.at.load(Fleet(nodes=("t01",), places=(NodePlace(node="t01", tray=1),)))
        site.round()
        assert not site.standing()
        assert not site.found["t01", "topology.drift"].present


class TestDeciding:
    """The same through the whole decider."""

    def claimed(self) -> World:
        """decode-1 runs on t03; t08 claims the identity of its first GPU."""
        world = World(rack())
        world.report(node="t03", place=place("t03"))
        world.report(node="t08", place=place("t08", gpus=gpus("GPU-t03-0")))
        world.report(node="t03", place=place("t03"))
        return world

    def test_a_contradiction_is_on_record_and_drains_nothing(self) -> None:
        """An open incident of the monitor's on each node, and every worker in service."""
        world = self.claimed()
        assert {(i.fault, i.culprit) for i in world.open_incidents()} == {("monitor", "t03"), ("monitor", "t08")}
        assert not world.pages
        assert world.drain_of("decode-1") is None

    def test_it_ends_when_it_is_over(self) -> None:
        """The incidents close once the claim is withdrawn."""
        world = self.claimed()
        world.report(node="t08", place=place("t08"))
        for _ in range(default_policy().timing.clear_confirm + 1):
            for node in ("t03", "t08"):
                world.report(node=node, place=place(node))
        world.pass_time(2)
        assert {i.fault for i in world.open_incidents()} == {"noted"}, "that its GPU changed, twice, is on record for an hour"

    def test_heartbeats_state_it_and_end_it(self) -> None:
        """A node that says nothing but that it is there is judged all the same."""
        world = self.claimed()
        world.report(node="t08", place=place("t08"))
        for n in range(default_policy().timing.clear_confirm + 1):
            world.handle(Heard(id=f"h{n}", at=world.now, nodes=("t03", "t08")))
        world.pass_time(2)
        assert "monitor" not in {i.fault for i in world.open_incidents()}

    def test_doubt_about_a_disputed_gpu_pages_and_does_not_drain(self) -> None:
        """Nobody can say whose GPU it is: what rests on doubt waits, a person is asked, and it goes on once that is settled."""
        world = self.claimed()
        remap = world.state("gpu.row_remap_pending", gpu_component("t03", PCIS[0]))
        world.report(remap, remap)
        assert world.drain_of("decode-1") is None
        assert "claimed by t03 and by t08" in world.pages[-1].summary
        world.report(remap, node="t03", place=place("t03"))
        world.decider.p.topology.forget("t08")
        world.pass_time(2)
        drain = world.drain_of("decode-1")
        assert drain is not None
        assert drain.state is not DrainState.CANCELLED

    def test_a_fact_about_a_disputed_gpu_is_acted_on(self) -> None:
        """A GPU that has fallen off the bus of its own node is gone, whoever else claims its name."""
        world = self.claimed()
        world.report(world.xid(79, "t03"))
        assert world.drain_of("decode-1") is not None

    def test_what_changed_is_on_record(self) -> None:
        """explain shows when a node's GPU was replaced; nobody is paged."""
        world = World(rack())
        world.report(node="t03", place=place("t03"))
        world.report(node="t03", place=place("t03", gpus=gpus("GPU-new")))
        told = world.decider.explain("t03")
        assert any("GPU-new, was GPU-t03-0" in step["why"] for step in told["steps"])
        assert not world.pages

    def test_a_new_leader_waits_for_both_before_it_calls_it_over(self) -> None:
        """Contradictions are restored as standing; one node's report alone ends nothing, both reports do."""
        world = self.claimed()
        world.lead()
        for _ in range(5):
            world.report(node="t03", place=place("t03"))
        world.pass_time(2)
        assert {i.culprit for i in world.open_incidents()} == {"t03", "t08"}
        for _ in range(4):
            for node in ("t08", "t03"):
                world.report(node=node, place=place(node))
        world.pass_time(2)
        assert not world.open_incidents()

    def test_a_removed_nodes_contradictions_end(self) -> None:
        """With the node gone from the configuration, its incident and that of whom it contradicted are over."""
        world = self.claimed()
        fleet = world.fleet
        workers = tuple(w for w in fleet.workers if "t08" not in w.nodes)
        world.reload(msgspec.structs.replace(fleet, workers=workers, nodes=tuple(n for n in fleet.nodes if n != "t08")))
        for _ in range(4):
            world.report(node="t03", place=place("t03"))
        world.pass_time(5)
        assert not world.open_incidents()

    def test_status_says_where_and_what_nobody_said(self) -> None:
        """Each node's row carries its place, what is unsaid, and the contradictions."""
        world = self.claimed()
        rows = {n["node"]: n["place"] for n in world.decider.status()["nodes"]}
        assert rows["t03"]["rack"] == "S1"
        assert rows["t03"]["gpus"][PCIS[0]] == "GPU-t03-0"
        assert "leaf of mlx5_0" in rows["t03"]["unsaid"]
        assert rows["t01"]["unsaid"] == ["rack", "tray", "gpus"]
        assert "claim the same GPU" in rows["t03"]["contradictions"][0]

    def test_the_same_events_give_the_same_instructions(self) -> None:
        """Contradictions are decided from the events alone: a second decider says the same, word for word."""
        world = self.claimed()
        world.report(world.state("gpu.row_remap_pending", gpu_component("t08", PCIS[0])), node="t08")
        again = Decider(default_policy())
        for event, out in world.journal:
            assert again.handle(event) == out


@pytest.mark.parametrize(
    "component", [Component(node="t01"), Component(node="t01", device="worker@w"), gpu_component("t09", PCIS[0])]
)
def test_only_a_gpu_that_is_known_can_be_disputed(component: Component) -> None:
    """A node, a worker, a GPU that nobody named: nothing is disputed about them."""
    site = Site()
    site.hear("t01")
    assert site.at.disputed(component) == ""

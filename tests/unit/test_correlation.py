"""The smallest explanation of what a rack shows: each pattern, its near misses, and how an incident is revised."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sentinel.decide.state.events import Deroute, Repair, Reported, StopWorker
from sentinel.model import (
    Action,
    Component,
    Finding,
    Fleet,
    Incident,
    Kind,
    NodePlace,
    Place,
    Pool,
    Role,
    Severity,
    Suspect,
    Worker,
    WorkerState,
    gpu_component,
)
from sentinel.testing.decisions import PCIS, World

APP = {"severity": Severity.INFO, "suspect": Suspect.APP, "action": Action.RESTART_WORKER}
PEER = {"suspect": Suspect.PEER, "severity": Severity.WARNING, "action": Action.WAIT}


def fleet(racks: int = 2, trays: int = 18, *, leaves: bool = True, placed: bool = True, floor: float = 0.0) -> Fleet:
    """Racks of trays, a TP4 decoder on each, rail N of every node at leaf switch N of its rack."""
    names = [f"r{r}t{t:02d}" for r in range(1, racks + 1) for t in range(1, trays + 1)]
    workers = tuple(
        Worker(
            name=f"decode-{n}",
            pool="main",
            url=f"http://{n}",
            role=Role.BOTH,
            gpus=tuple(gpu_component(n, p) for p in PCIS),
            nodes=(n,),
        )
        for n in names
    )
    places = tuple(
        NodePlace(
            node=n,
            domain=n.partition("t")[0],
            addresses=(f"imex-{n}",),
            leaves={f"mlx5_{k}": f"leaf-{n.partition('t')[0]}-{k}" for k in range(4)} if leaves else {},
        )
        for n in names
    )
    spare = Worker(name="spare", pool="spare", url="http://spare", nodes=("s01",), capacity=1e6)  # what is drained is never short
    main = Pool(name="main", floor=floor, max_doubtful_drains=100, max_share=1.0, max_domain_share=1.0, overflow=("spare",))
    pools = (main, Pool(name="spare", primary=False, floor=0.0))
    return Fleet(pools=pools, workers=(*workers, spare), nodes=(*names, "s01"), places=places if placed else ())


def link(w: World, node: str, gpu: int, n: int, present: bool = True) -> Finding:
    where = msgspec.structs.replace(gpu_component(node, PCIS[gpu]), part=f"nvlink{n}")
    words = {"severity": Severity.FATAL, "action": Action.RESET_GPU, "certainty": 0.9, "facts": {"link": n}}
    return w.state("gpu.nvlink_down", where, present, **words)


def rail(w: World, node: str, device: str = "mlx5_1", present: bool = True, **more: object) -> Finding:
    where = Component(node=node, device=f"ib@{device}", part="port1")
    words = {"severity": Severity.FATAL, "action": Action.INSPECT, "certainty": 0.9, **more}
    return w.state("ib.port_down", where, present, **words)


def lost(w: World, node: str, peer: str, present: bool = True) -> Finding:
    where = Component(node=node, device=f"imex@imex-{peer}")
    words = {"action": Action.INSPECT, "suspect": Suspect.PEER, "certainty": 0.9, "facts": {"peer": f"imex-{peer}"}}
    return w.state("imex.peer", where, present, **words)


def confirmed(w: World, *findings: Finding) -> None:
    """Each said twice by its node: the rules for states ask for that."""
    for _ in range(2):
        for f in findings:
            w.report(f)


def open_of(w: World) -> list[tuple[str, str]]:
    return sorted((i.fault, i.culprit) for i in w.open_incidents())


def one(w: World) -> Incident:
    found = w.open_incidents()
    assert len(found) == 1, [(i.fault, i.culprit, i.scope) for i in found]
    return found[0]


def out(w: World) -> set[str]:
    return {x.name for x in w.fleet.workers if w.state_of(x.name) is not WorkerState.ACTIVE}


def notified(w: World) -> set[str]:
    """Dedup keys under which somebody was called."""
    return {p.dedup_key for p in w.pages if p.event == "trigger"}


class TestLinks:
    def test_many_links_of_one_gpu_are_that_gpu(self) -> None:
        """Four links of one GPU: one incident gpu-nvlink, its worker drained and its GPU reset, one page."""
        w = World(fleet())
        confirmed(w, *(link(w, "r1t03", 1, n) for n in (2, 5, 9, 14)))
        w.pass_time(5)
        incident = one(w)
        gpu = f"r1t03/gpu@{PCIS[1]}"
        assert (incident.fault, incident.culprit, incident.scope) == ("gpu-nvlink", gpu, ())
        assert out(w) == {"decode-r1t03"}
        assert {e.target for e in w.did(Repair)} == {gpu}  # type: ignore[union-attr]
        assert [(p.event, p.fault, p.dedup_key) for p in w.pages] == [("trigger", "gpu-nvlink", incident.page_key or incident.key)]

    def test_one_index_on_many_gpus_is_the_switch(self) -> None:
        """The same link of three GPUs on three trays: the switch ASIC; nobody stays out of service for it, one page."""
        w = World(fleet())
        confirmed(w, *(link(w, f"r1t0{n}", n % 4, 7) for n in range(1, 9)))
        w.pass_time(5)
        incident = one(w)
        assert (incident.fault, incident.culprit) == ("nvlink-switch", "r1/asic07")
        assert incident.scope == tuple(sorted(f"r1t0{n}/gpu@{PCIS[n % 4]}" for n in range(1, 9)))
        assert incident.victims == tuple(f"decode-r1t0{n}" for n in range(1, 9))
        assert 0.8 <= incident.confidence < 1
        assert incident.findings[0].evidence == ()
        assert out(w) == set()
        assert [p.fault for p in w.pages] == ["nvlink-switch"]
        assert w.did(Repair) == []

    def test_what_was_drained_before_the_switch_was_known_is_given_back(self) -> None:
        """The first two reporters were on their way out with requests in flight: they return without a reset."""
        w = World(fleet())
        w.held = w.busy
        confirmed(w, link(w, "r1t01", 0, 7), link(w, "r1t02", 0, 7))
        assert out(w) == set()
        w.pass_time(3)
        assert out(w) == {"decode-r1t01", "decode-r1t02"}
        confirmed(w, link(w, "r1t03", 0, 7))
        w.pass_time(2)
        assert out(w) == set()
        assert w.did(StopWorker) == []
        incident = one(w)
        assert [s.why.partition(":")[0] for s in incident.history if s.what == "given back"] == ["decode-r1t01", "decode-r1t02"]

    def test_what_was_stopped_already_comes_back_without_a_reset(self) -> None:
        """A victim that is stopped when the culprit shows is started and tested, and its GPU is not reset."""
        w = World(fleet())
        w.held = lambda e: isinstance(e, Repair | StopWorker)
        confirmed(w, link(w, "r1t01", 0, 7))
        w.pass_time(3)
        assert out(w) == {"decode-r1t01"}
        confirmed(w, link(w, "r1t02", 1, 7), link(w, "r1t03", 0, 7))
        w.held = lambda e: False
        w.pass_time(30)
        assert out(w) == set()
        assert w.did(Repair) == []

    def test_a_fault_of_its_own_keeps_a_victim_out(self) -> None:
        """A GPU behind the switch that also wants a reset for itself stays on its way, and the incident says why."""
        w = World(fleet())
        w.held = w.busy
        w.report(w.state("gpu.row_remap_pending", gpu_component("r1t01", PCIS[3]), action=Action.RESET_GPU))
        confirmed(w, *(link(w, f"r1t0{n}", 0, 7) for n in (1, 2, 3)))
        w.pass_time(2)
        assert out(w) == {"decode-r1t01"}
        assert open_of(w) == [("nvlink-switch", "r1/asic07"), ("row-remap-pending", f"r1t01/gpu@{PCIS[3]}")]

    @pytest.mark.parametrize("where", [("r1t01", "r1t02"), ("r1t01", "r2t01", "r2t02")])
    def test_too_few_are_each_their_own(self, where: tuple[str, ...]) -> None:
        """The same index on two GPUs only, or on three that do not end at one switch, blames no switch."""
        w = World(fleet())
        confirmed(w, *(link(w, n, 0, 7) for n in where))
        w.pass_time(5)
        assert open_of(w) == [("gpu-fatal", f"{n}/gpu@{PCIS[0]}") for n in where]
        assert out(w) == {f"decode-{n}" for n in where}

    def test_unrelated_links_are_unrelated(self) -> None:
        """One link each, of different indexes, on three trays: three faults."""
        w = World(fleet())
        confirmed(w, link(w, "r1t01", 0, 3), link(w, "r1t02", 0, 8), link(w, "r1t03", 1, 12))
        w.pass_time(5)
        assert {i.fault for i in w.open_incidents()} == {"gpu-fatal"}
        assert len(w.open_incidents()) == 3

    def test_the_same_links_of_one_tray_are_its_cartridge(self) -> None:
        """Links 4 and 5 of all four GPUs of one tray, and nowhere else: its cables; nobody is drained for them."""
        w = World(fleet())
        confirmed(w, *(link(w, "r1t03", g, n) for g in range(4) for n in (4, 5)))
        w.pass_time(30)
        incident = one(w)
        assert (incident.fault, incident.culprit) == ("nvlink-cartridge", "r1t03/nvlink-cartridge")
        assert incident.victims == ("decode-r1t03",)
        assert len(incident.scope) == 4
        assert out(w) == set()
        assert len(notified(w)) == 1

    def test_different_links_of_one_tray_are_not(self) -> None:
        """Two GPUs of one tray with different links down share no cable."""
        w = World(fleet())
        confirmed(w, link(w, "r1t03", 0, 4), link(w, "r1t03", 1, 5))
        w.pass_time(5)
        assert [i.fault for i in w.open_incidents()] == ["gpu-fatal", "gpu-fatal"]

    def test_seventy_two_gpus_with_six_links_down_are_the_switches(self) -> None:
        """Six ASICs of a rack at once is what the switches share, not 72 sick GPUs and not six faults."""
        w = World(fleet(racks=1))
        confirmed(w, *(link(w, n, g, k) for k in range(6) for n in w.fleet.nodes[:18] for g in range(4)))
        w.pass_time(5)
        incident = one(w)
        assert (incident.fault, incident.culprit) == ("nvlink-switch", "r1/switches")
        assert len(incident.scope) == 72
        assert out(w) == set()
        assert len(notified(w)) == 1

    def test_asics_of_one_tray_are_that_tray(self) -> None:
        """Where the site names ASICs as tray/asic, two of one tray at once are the tray."""
        plan = msgspec.structs.replace(fleet(), asics=tuple(f"sw{k // 2}/{k % 2}" for k in range(18)))
        w = World(plan)
        confirmed(w, *(link(w, f"r1t0{n}", 0, k) for n in range(1, 6) for k in (6, 7)))
        w.pass_time(5)
        assert open_of(w) == [("nvlink-switch", "r1/sw3")]

    def test_a_gpu_with_many_links_beside_a_switch_is_two_faults(self) -> None:
        """Link 7 on five GPUs, and four more links of another one: a switch and a GPU."""
        w = World(fleet())
        confirmed(w, *(link(w, f"r1t0{n}", 0, 7) for n in range(1, 6)), *(link(w, "r1t09", 2, k) for k in (1, 2, 3, 4)))
        w.pass_time(5)
        assert open_of(w) == [("gpu-nvlink", f"r1t09/gpu@{PCIS[2]}"), ("nvlink-switch", "r1/asic07")]
        assert out(w) == {"decode-r1t09"}

    def test_unknown_topology_correlates_only_with_itself(self) -> None:
        """Without a domain no switch is blamed; a GPU with many links still is."""
        w = World(fleet(placed=False))
        confirmed(w, *(link(w, f"r1t0{n}", 0, 7) for n in range(1, 6)), *(link(w, "r1t09", 2, k) for k in (1, 2, 3, 4)))
        w.pass_time(5)
        assert [f for f, _ in open_of(w)] == ["gpu-fatal"] * 5 + ["gpu-nvlink"]

    def test_a_disputed_domain_correlates_nothing(self) -> None:
        """Two trays that report another NVLink domain than the rest of theirs are looked at alone."""
        w = World(fleet())
        for node in w.fleet.nodes[:18]:
            place = Place(domain=("b" if node in ("r1t02", "r1t03") else "a") * 32, clique=1)
            w.handle(Reported(id=w._id(), at=w.now, report=msgspec.structs.replace(w._report(node), place=place)))
        confirmed(w, *(link(w, f"r1t0{n}", 0, 7) for n in (1, 2, 3)))
        w.pass_time(5)
        assert "nvlink-switch" not in {f for f, _ in open_of(w)}

    def test_it_ends_when_its_evidence_is_gone(self) -> None:
        """All links measured up again: the incident closes and its page resolves."""
        w = World(fleet())
        confirmed(w, *(link(w, f"r1t0{n}", 0, 7) for n in range(1, 5)))
        w.pass_time(5)
        confirmed(w, *(link(w, f"r1t0{n}", 0, 7, present=False) for n in range(1, 5)))
        w.pass_time(30)
        assert w.open_incidents() == []
        assert [p.event for p in w.pages] == ["trigger", "resolve"]

    def test_what_is_left_of_it_is_judged_alone(self) -> None:
        """The switch is mended and one GPU's link stays down: after the window that GPU is on its own, and drained."""
        w = World(fleet())
        confirmed(w, *(link(w, f"r1t0{n}", 0, 7) for n in range(1, 5)))
        w.pass_time(5)
        confirmed(w, *(link(w, f"r1t0{n}", 0, 7, present=False) for n in range(1, 4)))
        w.pass_time(100)
        assert open_of(w) == [("nvlink-switch", "r1/asic07")]
        w.pass_time(60)
        assert open_of(w) == [("gpu-fatal", f"r1t04/gpu@{PCIS[0]}")]
        assert out(w) == {"decode-r1t04"}

    def test_links_apart_in_time_are_apart(self) -> None:
        """The same index on three trays, ten minutes apart each: three faults."""
        w = World(fleet())
        for n in range(1, 4):
            confirmed(w, link(w, f"r1t0{n}", 0, 7))
            w.pass_time(600, step=20)
        assert {i.fault for i in w.open_incidents()} == {"gpu-fatal"}


class TestImex:
    def test_a_node_that_its_peers_have_lost_is_the_culprit(self) -> None:
        """Seventeen trays name the eighteenth: one incident about that one, seventeen in its scope, nobody drained."""
        w = World(fleet())
        w.pass_time(1)
        confirmed(w, *(lost(w, n, "r1t18") for n in w.fleet.nodes[:17]))
        slots = [w.state("imex.slots", Component(node=n, device="imex"), suspect=Suspect.PEER) for n in w.fleet.nodes[:17]]
        confirmed(w, *slots)
        w.pass_time(90)
        incident = one(w)
        assert (incident.fault, incident.culprit) == ("imex-peer", "r1t18")
        assert incident.scope == w.fleet.nodes[:17]
        assert incident.victims == ("decode-r1t18",)
        assert incident.confidence == 0.95
        assert out(w) == set()
        assert w.did(Deroute) == []
        assert [(p.event, p.component, p.fault) for p in w.pages] == [("trigger", "r1t18", "imex-peer")]

    def test_a_few_who_have_lost_it_accuse_nobody_by_name(self) -> None:
        """Three of seventeen: somebody in the domain, with little confidence."""
        w = World(fleet())
        w.pass_time(1)
        confirmed(w, *(lost(w, n, "r1t18") for n in w.fleet.nodes[:3]))
        w.pass_time(5)
        incident = one(w)
        assert (incident.fault, incident.culprit, incident.scope) == ("peer-fault", "r1", w.fleet.nodes[:3])
        assert incident.confidence < 0.5

    @pytest.mark.parametrize("first", ["node", "peers"])
    def test_a_dead_tray_is_one_incident_with_what_its_peers_say(self, first: str) -> None:
        """node.down and the IMEX verdict about the same tray are one incident, node-down, in either order."""
        w = World(fleet())
        w.pass_time(1)
        down = w.state("node.down", Component(node="r1t18"), severity=Severity.FATAL, action=Action.POWER_CYCLE, certainty=0.9)
        says = [lost(w, n, "r1t18") for n in w.fleet.nodes[:17]]
        for what in ([down], says) if first == "node" else (says, [down]):
            for f in what:
                if f is down:
                    w.decider._found(f)
                else:
                    confirmed(w, f)
        w.pass_time(3, reporting=[n for n in w.fleet.nodes if n != "r1t18"])
        incident = one(w)
        assert (incident.fault, incident.culprit) == ("node-down", "r1t18")
        assert set(incident.scope) == set(w.fleet.nodes[:17])


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


class TestApplications:
    def test_a_group_that_ends_is_named(self) -> None:
        """Xid 45 on all GPUs of one decoder: one app-fault of that worker, nobody paged."""
        w = World(fleet())
        w.report(*(w.xid(45, "r1t03", g, **APP) for g in range(4)))
        w.pass_time(5)
        incident = one(w)
        assert (incident.fault, incident.culprit, incident.victims) == ("app-fault", "decode-r1t03", ("decode-r1t03",))
        assert w.pages == []

    def test_one_gpu_is_itself(self) -> None:
        """Two GPUs of different groups on two trays: two records."""
        w = World(fleet())
        w.report(w.xid(31, "r1t03", 0, **APP))
        w.report(w.xid(31, "r1t04", 0, **APP))
        w.pass_time(5)
        assert [c for _, c in open_of(w)] == [f"r1t03/gpu@{PCIS[0]}", f"r1t04/gpu@{PCIS[0]}"]

    def test_a_storm_over_racks_is_one_record(self) -> None:
        """One program's end over 77 nodes in 11 racks, 672 events: one incident, no page, nothing drained, and it ages away."""
        w = World(fleet(racks=11, trays=7))
        events = [(n, g, k) for k in (45, 43, 13) for g in range(4) for n in w.fleet.nodes[:77]][:672]
        for node, gpu, code in events:
            w.report(w.xid(code, node, gpu, **APP))
        w.pass_time(3)
        incident = one(w)
        assert (incident.fault, incident.culprit) == ("app-fault", "application")
        assert set(incident.scope) == set(w.fleet.nodes[:77])
        assert len(incident.findings) <= 20
        assert out(w) == set()
        w.pass_time(700, step=10)
        assert w.open_incidents() == []
        assert w.pages == []
        assert len(w.incidents()) < 20

    def test_a_storm_of_churn_on_three_nodes_is_one_record(self) -> None:
        """672 events on three nodes within three hours: one incident at a time, no page, nothing drained."""
        w = World(fleet(racks=1))
        for k in range(672):
            w.report(w.xid(45, f"r1t0{1 + k % 3}", k // 3 % 4, **APP))
            if k % 8 == 7:
                w.pass_time(120, step=60)
            if k > 40:
                assert len(w.open_incidents()) == 1
        assert w.pages == []
        assert out(w) == set()

    def test_scattered_crashes_beside_a_storm_stay_their_own(self) -> None:
        """A single tray of another rack that crashes in the same minute is not part of it."""
        w = World(fleet())
        w.report(*(w.xid(45, n, 0, **APP) for n in w.fleet.nodes[:1]))
        for n in (*w.fleet.nodes[1:6], "r2t01"):
            w.report(w.xid(45, n, 0, **APP))
        w.pass_time(3)
        assert open_of(w) == [("app-fault", "application"), ("app-fault", f"r2t01/gpu@{PCIS[0]}")]


def echo(w: World, nodes: Iterable[str]) -> list[Finding]:
    """What the peers of a broken GPU say: lost packets, a link whose far side went down, torn channels, recovery action 3."""
    found = []
    for k, n in enumerate(nodes):
        found += [
            w.xid(145, n, k % 4, **PEER, facts={"unit": "RLW"}),
            w.xid(149, n, k % 4, suspect=Suspect.PEER, facts={"reason": 0x20, "links": [k % 18]}),
            w.xid(45, n, k % 4, **APP),
            w.state("gpu.recovery_action", gpu_component(n, PCIS[k % 4]), **PEER, facts={"value": 3}),
        ]
    return found


class TestEchoes:
    @pytest.mark.parametrize("first", ["culprit", "victims"])
    def test_77_nodes_that_echo_one_fault_are_its_scope(self, first: str) -> None:
        """One GPU's fatal fault seen by 77 nodes of its domain: one incident, one page, one worker drained, in either order."""
        w = World(fleet(racks=1, trays=78))
        w.held = w.busy
        own, others = w.xid(150, "r1t01", 2), [n for n in w.fleet.nodes[:78] if n != "r1t01"]
        says = echo(w, others)
        began = time.process_time()
        for f in ([own, *says] if first == "culprit" else [*says, own]):
            w.report(f)
        w.pass_time(5)
        assert time.process_time() - began < 60  # a bound on growth, not a figure
        incident = one(w)
        assert (incident.fault, incident.culprit) == ("gpu-fatal", f"r1t01/gpu@{PCIS[2]}")
        assert set(incident.scope) == set(others)
        assert len(others) == 77
        assert incident.victims == ("decode-r1t01",)
        assert incident.confidence == 1.0
        assert len(incident.findings) <= 20
        assert {d.worker for d in w.decider.p.drains.values()} == {"decode-r1t01"}
        assert [p.event for p in w.pages] == ["trigger"]

    def test_an_echo_over_racks_is_still_one(self) -> None:
        """A job over 11 racks that ends because of one GPU: the torn channels elsewhere are that incident's too."""
        w = World(fleet(racks=11, trays=7))
        w.held = w.busy
        for n in w.fleet.nodes[:77]:
            w.report(w.xid(45, n, 0, **APP))
        w.report(w.xid(145, "r1t02", 1, **PEER))
        w.report(w.xid(150, "r1t01", 2))
        w.pass_time(3)
        incident = one(w)
        assert incident.culprit == f"r1t01/gpu@{PCIS[2]}"
        assert set(incident.scope) >= set(w.fleet.nodes[:77]) - {"r1t01"}

    def test_without_a_culprit_it_is_the_domains(self) -> None:
        """Peers that accuse somebody unknown: one incident for the domain, paged once after its minute."""
        w = World(fleet())
        for n in w.fleet.nodes[:9]:
            w.report(w.xid(145, n, 0, **PEER))
        w.pass_time(90)
        incident = one(w)
        assert (incident.fault, incident.culprit, incident.scope) == ("peer-fault", "r1", w.fleet.nodes[:9])
        assert incident.confidence == 0.3
        assert [p.event for p in w.pages] == ["trigger"]

    def test_a_culprit_that_shows_itself_late_takes_the_page_over(self) -> None:
        """Paged as the domain's, then the GPU shows: the same incident and dedup key, an update and no second call."""
        w = World(fleet())
        for n in w.fleet.nodes[2:9]:
            w.report(w.xid(145, n, 0, **PEER))
        w.pass_time(70)
        before = one(w)
        assert before.paged == "triggered"
        w.report(w.xid(79, "r1t01", action=Action.REBOOT_NODE))
        w.pass_time(3)
        after = one(w)
        assert after.id == before.id
        assert (after.fault, after.culprit) == ("gpu-off-bus", f"r1t01/gpu@{PCIS[0]}")
        assert after.page_key == before.key
        assert notified(w) == {before.key}
        assert [bool(p.details.get("update")) for p in w.pages] == [False, True]
        assert [p.urgency.value for p in w.pages] == ["warning", "critical"]
        assert out(w) == {"decode-r1t01"}
        w.ask("acknowledge", after.id)
        w.ask("resolve", after.id)
        assert [(p.event, p.dedup_key) for p in w.pages[2:]] == [("acknowledge", before.key), ("resolve", before.key)]

    def test_two_unrelated_gpus_are_two_incidents(self) -> None:
        """Two fatal faults in one domain: each its own incident; who merely echoes is counted to the first, half sure."""
        w = World(fleet())
        w.held = w.busy
        w.report(w.xid(95, "r1t01", 0))
        w.now += 1
        w.report(w.xid(95, "r1t05", 0))
        w.report(w.xid(145, "r1t09", 0, **PEER))
        w.pass_time(3)
        found = {i.culprit: i for i in w.open_incidents()}
        assert set(found) == {f"r1t01/gpu@{PCIS[0]}", f"r1t05/gpu@{PCIS[0]}"}
        assert found[f"r1t01/gpu@{PCIS[0]}"].scope == ("r1t09",)
        assert found[f"r1t01/gpu@{PCIS[0]}"].confidence == 0.5

    def test_another_domain_is_not_its_echo(self) -> None:
        """A peer's fault in one domain is not blamed on a GPU of another."""
        w = World(fleet())
        w.held = w.busy
        w.report(w.xid(95, "r1t01", 0))
        w.report(w.xid(145, "r2t09", 0, **PEER))
        w.pass_time(3)
        assert open_of(w) == [("gpu-fatal", f"r1t01/gpu@{PCIS[0]}"), ("peer-fault", "r2")]

    def test_long_after_is_not_its_echo(self) -> None:
        """Peers that complain five minutes after a GPU's fault, from nodes that did not then, mean somebody else."""
        w = World(fleet())
        w.report(w.xid(79, "r1t01", action=Action.REBOOT_NODE))
        w.pass_time(300, step=10)
        w.report(w.xid(145, "r1t09", 0, **PEER))
        w.pass_time(3)
        assert open_of(w) == [("gpu-off-bus", f"r1t01/gpu@{PCIS[0]}"), ("peer-fault", "r1")]

    def test_what_is_new_is_not_to_blame_for_what_is_old(self) -> None:
        """A GPU that fails half an hour after its domain's peers complained is its own incident and rings by itself."""
        w = World(fleet())
        for n in w.fleet.nodes[2:9]:
            w.report(w.xid(145, n, 0, **PEER))
        w.pass_time(1800, step=10)
        old = one(w)
        w.report(w.xid(79, "r1t01", action=Action.REBOOT_NODE))
        w.pass_time(3)
        new = f"r1t01/gpu@{PCIS[0]}"
        assert open_of(w) == [("gpu-off-bus", new), ("peer-fault", "r1")]
        assert notified(w) == {old.key, f"gpu-off-bus/{new}"}

    def test_a_dead_gpus_own_links_are_its_own(self) -> None:
        """All links of a GPU that fell off the bus: one incident, gpu-off-bus, whichever came first."""
        for order in (1, -1):
            w = World(fleet())
            own = [w.xid(79, "r1t03", 1, action=Action.REBOOT_NODE)]
            down = [link(w, "r1t03", 1, n) for n in range(18)] * 2
            for f in [*own, *down][::order]:
                w.report(f)
            w.pass_time(3)
            assert open_of(w) == [("gpu-off-bus", f"r1t03/gpu@{PCIS[1]}")], order
            assert len(notified(w)) == 1


class TestLeaders:
    def test_a_pattern_survives_its_leader(self) -> None:
        """A new leader knows culprit and scope, adds who reports next, drains nobody and pages nobody again."""
        w = World(fleet())
        confirmed(w, *(link(w, f"r1t0{n}", 0, 7) for n in range(1, 5)))
        w.pass_time(5)
        before = one(w)
        w.lead()
        confirmed(w, *(link(w, f"r1t0{n}", 0, 7) for n in range(4, 7)))
        w.pass_time(200, step=5)
        after = one(w)
        assert (after.id, after.culprit) == (before.id, before.culprit)
        assert set(after.scope) == {f"r1t0{n}/gpu@{PCIS[0]}" for n in range(1, 7)}
        assert len(notified(w)) == 1
        assert out(w) == set()
        confirmed(w, *(link(w, f"r1t0{n}", 0, 7, present=False) for n in range(1, 7)))
        w.pass_time(30)
        assert w.open_incidents() == []
        assert [p.event for p in w.pages] == ["trigger", "resolve"]

    def test_victims_of_a_known_culprit_stay_its_victims(self) -> None:
        """After a change of leader the same nodes still report their recovery action: no second incident."""
        w = World(fleet())
        w.report(w.xid(79, "r1t01", action=Action.REBOOT_NODE))
        says = [w.state("gpu.recovery_action", gpu_component(n, PCIS[0]), **PEER, facts={"value": 3}) for n in w.fleet.nodes[4:9]]
        for f in says:
            w.report(f)
        w.pass_time(3)
        w.lead()
        for f in says:
            w.report(f)
        w.pass_time(120, step=5)
        assert one(w).scope == w.fleet.nodes[4:9]
        assert len(notified(w)) == 1

    def test_resolved_by_hand_stays_resolved_for_a_while(self) -> None:
        """A person ends a switch's incident while its links are still down: it is not opened and paged again at once."""
        w = World(fleet())
        confirmed(w, *(link(w, f"r1t0{n}", 0, 7) for n in range(1, 5)))
        w.pass_time(5)
        w.ask("resolve", one(w).id, "known, the vendor comes at noon")
        for _ in range(20):
            for n in range(1, 5):
                w.report(link(w, f"r1t0{n}", 0, 7))
            w.pass_time(10)
        assert w.open_incidents() == []
        assert [p.event for p in w.pages] == ["trigger", "resolve"]
        assert out(w) == set()


class TestPages:
    def test_the_first_reporter_waits_for_the_others(self) -> None:
        """A lone link is acted on and paged after the settling time, and not before: others may tell of its switch as well."""
        w = World(fleet())
        confirmed(w, link(w, "r1t01", 0, 7))
        w.pass_time(1)
        assert w.pages == []
        assert out(w) == set()
        w.pass_time(2)
        assert [p.fault for p in w.pages] == ["gpu-fatal"]
        assert out(w) == {"decode-r1t01"}

    def test_nobody_leaves_for_a_switch(self) -> None:
        """All GPUs tell of the same link within the settling time: not one of their workers leaves, even for a moment."""
        w = World(fleet())
        for n in range(1, 7):
            confirmed(w, link(w, f"r1t0{n}", 0, 7))
        w.pass_time(10)
        assert one(w).fault == "nvlink-switch"
        assert not w.decider.p.drains

    def test_an_engine_that_ends_nothing_does_not_wait(self) -> None:
        """Where the engine is measured frozen already, nothing in flight is saved by waiting: it leaves at once."""
        w = World(fleet(floor=1.0))
        w.report(w.state("worker.frozen", Component(node="r1t01", device="worker@decode-r1t01"), severity=Severity.FATAL))
        assert out(w) == set(), "the floor keeps it in"
        line = w.xid(149, "r1t01")
        w.report(msgspec.structs.replace(line, component=msgspec.structs.replace(line.component, part="nvlink7")))
        assert out(w) == {"decode-r1t01"}

    def test_what_heals_while_it_waits_calls_nobody(self) -> None:
        """A link that is up again before the settling time is over drains and rings nothing."""
        w = World(fleet())
        confirmed(w, link(w, "r1t01", 0, 7))
        w.pass_time(1)
        fine = msgspec.structs.replace(link(w, "r1t01", 0, 7), present=False)
        w.report(fine, fine)
        w.pass_time(30)
        assert w.pages == []
        assert not w.decider.p.drains
        assert w.open_incidents() == []

    def test_a_fact_waits_for_nothing(self) -> None:
        """A GPU off the bus beside a link of it that is down leaves in the same event."""
        w = World(fleet())
        w.report(w.xid(79, "r1t01", action=Action.REBOOT_NODE), link(w, "r1t01", 0, 7))
        assert out(w) == {"decode-r1t01"}

    def test_a_wait_ends_however_often_the_line_comes(self) -> None:
        """Another link of the same GPU, and the same line again, do not make the wait longer."""
        w = World(fleet())
        for n in range(6):
            w.report(link(w, "r1t01", 0, 7 + n % 2))
            w.pass_time(0.5, step=0.5)
        assert out(w) == {"decode-r1t01"}

    def test_two_that_were_paged_become_one(self) -> None:
        """Two GPUs paged on their own, then the third link: one page goes on, the other is resolved and says where it went."""
        w = World(fleet())
        confirmed(w, link(w, "r1t01", 0, 7))
        w.pass_time(10)
        confirmed(w, link(w, "r1t02", 0, 7))
        w.pass_time(10)
        assert len(notified(w)) == 2
        first, second = sorted(w.open_incidents(), key=lambda i: i.opened_at)
        confirmed(w, link(w, "r1t03", 0, 7))
        w.pass_time(5)
        incident = one(w)
        assert incident.id == first.id
        assert incident.page_key == first.key
        gone = next(i for i in w.incidents() if i.id == second.id)
        assert (gone.merged_into, gone.paged) == (first.id, "resolved")
        assert [(p.event, p.dedup_key) for p in w.pages if p.event == "resolve"] == [("resolve", second.key)]
        assert notified(w) == {first.key, second.key}

    def test_a_budget_that_blocks_a_victim_does_not_call_for_it(self) -> None:
        """Rails that a budget kept in before the leaf was known are not asked about one by one."""
        plan = fleet()
        plan = msgspec.structs.replace(plan, pools=(msgspec.structs.replace(plan.pools[0], max_doubtful_drains=1), plan.pools[1]))
        w = World(plan)
        w.held = w.busy
        confirmed(w, *(rail(w, n) for n in w.fleet.nodes[:10]))
        w.pass_time(10)
        assert [p.fault for p in w.pages] == ["leaf-switch"]
        assert out(w) == set()
        assert w.decider.held_back() == frozenset()


    def test_one_cause_in_many_racks_pages_once(self) -> None:
        """A switch in each of six racks at once (a rollout, a bug of the probe): each is on record, one person is called once."""
        w = World(fleet(racks=6, trays=6))
        confirmed(w, *(link(w, f"r{r}t{t:02d}", 0, 7) for r in range(1, 7) for t in range(1, 5)))
        w.pass_time(10)
        switches = [i for i in w.open_incidents() if i.fault == "nvlink-switch" and i.culprit != "fleet"]
        assert len(switches) == 6
        assert [(p.event, p.component) for p in w.pages] == [("trigger", "fleet")]
        assert out(w) == set()
        confirmed(w, *(link(w, f"r{r}t{t:02d}", 0, 7, present=False) for r in range(1, 7) for t in range(1, 5)))
        w.pass_time(60)
        assert w.open_incidents() == []
        assert [p.event for p in w.pages] == ["trigger", "resolve"]


class TestExplain:
    def test_a_pattern_explains_itself(self) -> None:
        """The culprit, a victim and a node in its scope lead to one incident, which says how sure it is and what it was before."""
        w = World(fleet())
        confirmed(w, *(link(w, f"r1t0{n}", 0, 7) for n in range(1, 5)))
        w.pass_time(5)
        incident = one(w)
        for target in ("r1/asic07", "r1", "decode-r1t02", "r1t03", f"r1t03/gpu@{PCIS[0]}", incident.id):
            told = w.decider.explain(target)
            assert [i["id"] for i in told["incidents"] if i.get("closed_at") is None] == [incident.id], target
        assert w.decider.explain(incident.id)["now"] == "nvlink-switch on r1/asic07, 70% sure: open"
        assert any(s["what"] == "revised" and "was gpu-fatal" in s["why"] for s in w.decider.explain(incident.id)["steps"])


# -- any order ------------------------------------------------------------------------------------------------------------


def _reports(w: World, scenario: str) -> list[Finding]:
    match scenario:
        case "switch":
            return [link(w, f"r1t0{n}", n % 4, 7) for n in range(1, 7)]
        case "cartridge":
            return [link(w, "r1t03", g, n) for g in range(3) for n in (4, 5)]
        case "gpu":
            return [link(w, "r1t03", 1, n) for n in (2, 5, 9, 14, 15)]
        case "imex":
            return [lost(w, n, "r1t08") for n in w.fleet.nodes[:7]]
        case "leaf":
            return [rail(w, n) for n in w.fleet.nodes[:6]]
        case "echo":
            return [w.xid(150, "r1t01", 2), *echo(w, w.fleet.nodes[1:5])]
        case "two":
            own = [w.xid(95, "r1t01", 0), w.xid(95, "r1t02", 0)]
            return [*own, *(w.xid(145, n, 1, **PEER) for n in w.fleet.nodes[3:6])]
        case "storm":
            return [w.xid(45, n, g, **APP) for n in (*w.fleet.nodes[:4], "r2t01") for g in (0, 1)]
        case _:
            return [*_reports(w, "switch"), *_reports(w, "gpu"), *_reports(w, "imex"), *_reports(w, "leaf")]


def _ends(scenario: str, order: list[int]) -> list[tuple[str, str, tuple[str, ...], tuple[str, ...], float]]:
    w = World(fleet(trays=8))
    w.held = w.busy  # what is drained is still on its way
    w.pass_time(1)
    reports = _reports(w, scenario)
    for n in order:
        w.report(reports[n])
    for f in reports:
        if f.kind is Kind.STATE:
            w.report(f)
            w.report(f)
    w.pass_time(4)
    return sorted((i.fault, i.culprit, i.scope, i.victims, i.confidence) for i in w.open_incidents())


SCENARIOS = ["switch", "cartridge", "gpu", "imex", "leaf", "echo", "two", "storm", "all"]


@pytest.mark.parametrize("scenario", SCENARIOS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_order_of_the_same_reports_ends_the_same(scenario: str, data: st.DataObject) -> None:
    """Culprits, scopes, victims and confidence do not depend on who was heard first."""
    count = len(_reports(World(fleet(trays=8)), scenario))
    order = data.draw(st.permutations(range(count)))
    assert _ends(scenario, list(order)) == _ends(scenario, list(range(count)))

"""NVLink links that go down together are the fault of the one part that they share, or each GPU's own if they share none."""

from __future__ import annotations

import msgspec
import pytest

from sentinel.decide.state.events import Repair, Reported, StopWorker
from sentinel.model import Action, Place, gpu_component
from sentinel.testing.decisions import PCIS, World
from tests.unit.fault_racks import confirmed, fleet, link, notified, one, open_of, out


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

"""What peers say of a broken GPU or a lost tray is the scope of that one fault, or of their domain's where nobody stands out."""

from __future__ import annotations

import time

import pytest

from sentinel.decide.state.events import Deroute
from sentinel.model import Action, Component, Severity, Suspect
from sentinel.testing.decisions import PCIS, World
from tests.unit.fault_racks import APP, PEER, confirmed, echo, fleet, link, lost, notified, one, open_of, out


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

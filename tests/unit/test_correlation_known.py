"""A pattern once found stays known: to the next leader, to who resolved it by hand, and to who asks about any part of it."""

from __future__ import annotations

from sentinel.model import Action, gpu_component
from sentinel.testing.decisions import PCIS, World
from tests.unit.fault_racks import PEER, confirmed, fleet, link, notified, one, out


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

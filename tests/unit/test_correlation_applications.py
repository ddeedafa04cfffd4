"""What one program's end leaves on its GPUs is one record of that program: nobody is paged for it and nothing drained."""

from __future__ import annotations

from sentinel.testing.decisions import PCIS, World
from tests.unit.fault_racks import APP, fleet, one, open_of, out


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

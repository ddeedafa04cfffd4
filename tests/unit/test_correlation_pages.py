"""A reporter waits a moment for the pattern that it may belong to, so that one cause drains no victims and calls one person."""

from __future__ import annotations

import msgspec

from sentinel.model import Action, Component, Severity
from sentinel.testing.decisions import World
from tests.unit.fault_racks import confirmed, fleet, link, notified, one, out, rail


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

"""Capacity in sessions: what a pool carries, what it lacks, what is started, asked for and paged."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sentinel.decide.state.events import ScaleOut, StartWorker
from sentinel.decide.supply.worth import Standing, worth
from sentinel.model import Action, Finding, Fleet, Pool, Role, Worker, WorkerState, gpu_component
from sentinel.testing.decisions import PCIS, World


def unit(
    prefill: int = 1, decode: int = 4, *, overflow: int = 0, standby: tuple[str, ...] = (), spare: tuple[str, ...] = (), **pool: Any
) -> Fleet:
    """A pool of prefill groups and decoders, each on a tray of its own, with standbys of its own and overflow decoders beside.

    ``standby`` and ``spare``: roles of the stopped workers of the pool and of its overflow.
    """
    workers: list[Worker] = []

    def add(name: str, of: str, role: Role, *, stopped: bool = False) -> None:
        node = f"n{len(workers):02d}"
        gpus = tuple(gpu_component(node, p) for p in PCIS)
        where = {"gpus": gpus, "nodes": (node,), "domain": f"d-{node}"}
        workers.append(Worker(name=name, pool=of, url=f"http://{name}", role=role, standby=stopped, **where))  # type: ignore[arg-type]

    for n in range(1, prefill + 1):
        add(f"p{n}", "main", Role.PREFILL)
    for n in range(1, decode + 1):
        add(f"d{n}", "main", Role.DECODE)
    for n, role in enumerate(standby, 1):
        add(f"s-{role}-{n}", "main", Role(role), stopped=True)
    for n in range(1, overflow + 1):
        add(f"op{n}", "over", Role.PREFILL)
        for m in range(1, 5):
            add(f"od{n}{m}", "over", Role.DECODE)
    for n, role in enumerate(spare, 1):
        add(f"os-{role}-{n}", "over", Role(role), stopped=True)
    over = any(w.pool == "over" for w in workers)
    pools = [Pool(name="main", overflow=("over",) if over else (), **{"floor": 0.5, "max_doubtful_drains": 99, **pool})]
    pools += [Pool(name="over", floor=0.0, primary=False)] if over else []
    return Fleet(pools=tuple(pools), workers=tuple(workers), nodes=tuple(n for w in workers for n in w.nodes))


def node_of(w: World, worker: str) -> str:
    return next(x.nodes[0] for x in w.fleet.workers if x.name == worker)


def kill(w: World, *workers: str) -> None:
    for worker in workers:
        w.report(w.xid(79, node_of(w, worker), action=Action.REBOOT_NODE))


def doubt(w: World, worker: str) -> Finding:
    return w.state("gpu.row_remap_pending", gpu_component(node_of(w, worker), PCIS[0]), action=Action.RESET_GPU)


def pool_of(w: World, name: str = "main") -> dict[str, object]:
    return next(p for p in w.decider.status()["pools"] if p["pool"] == name)


def load(w: World, **loads: int) -> None:
    for worker, n in loads.items():
        w.watched(worker, reachable=True, load=n)
    w.pass_time(1)


class TestWorth:
    def test_a_unit_is_balanced(self) -> None:
        """One prefill group and the four decoders that it feeds are worth the same number of sessions."""
        of = {r: worth(Pool(name="p"), Worker(name="w", pool="p", url="", role=r)) for r in Role}
        prefill, decode, both = of[Role.PREFILL], of[Role.DECODE], of[Role.BOTH]
        assert prefill == 66.0 == 4 * decode == 5 * both

    def test_a_workers_own_word_wins(self) -> None:
        """A capacity in the configuration is sessions, whatever the pool says."""
        assert worth(Pool(name="p"), Worker(name="w", pool="p", url="", role=Role.PREFILL, capacity=40.0)) == 40.0

    def test_a_pool_is_worth_its_scarcer_role(self) -> None:
        """What the other role has beyond that is surplus, and both are said."""
        s = Standing({Role.PREFILL: 66.0, Role.DECODE: 66.0}, {Role.PREFILL: 66.0, Role.DECODE: 49.5})
        assert (s.carries, s.scarce, s.surplus()) == (49.5, Role.DECODE, {Role.PREFILL: 16.5})
        assert s.sentence() == "carries 49.5 of 66 sessions: decode is scarce, prefill has 16.5 to spare"

    def test_status_and_explain_say_which_role_is_scarce(self) -> None:
        """A lost decoder leaves its prefill group with something to spare; a balanced pool says neither."""
        w = World(unit())
        assert pool_of(w)["scarce"] is None
        kill(w, "d1")
        assert (pool_of(w)["scarce"], pool_of(w)["surplus"]) == ("decode", {"prefill": 16.5})
        told = w.decider.explain("main")
        assert told["known"] and "decode is scarce" in told["now"]


class TestWeight:
    def test_a_surplus_that_is_lost_moves_no_traffic(self) -> None:
        """Of two prefill groups over four decoders one is more than the decoders can use: losing it changes no weight."""
        w = World(unit(prefill=2, overflow=1))
        kill(w, "p1")
        assert w.weight("main") == 1.0
        kill(w, "d1")
        assert w.weight("main") == 0.75

    def test_a_lost_prefill_group_takes_its_share_with_it(self) -> None:
        """Half of the prefill gone is half of the sessions gone, though every decoder serves."""
        w = World(unit(prefill=2, decode=8, overflow=1))
        kill(w, "p1")
        assert (w.weight("main"), w.weight("over")) == (0.5, 0.5)

    def test_weight_does_not_swing_with_the_demand_that_left(self) -> None:
        """While half of the sessions are away, the demand that is measured on the rest brings none of them back."""
        w = World(unit(prefill=2, decode=8, overflow=2))
        load(w, **{f"d{n}": 16 for n in range(1, 9)}, p1=60, p2=60)
        kill(w, "d1", "d2", "d3", "d4")
        assert w.weight("main") == 0.5
        load(w, **{f"d{n}": 8 for n in range(5, 9)}, p1=30, p2=30)
        w.pass_time(600, step=5)
        assert w.weight("main") == 0.5

    def test_who_was_not_measured_counts_as_full(self) -> None:
        """Three idle decoders that were looked at do not speak for the fourth; a role that nobody measured has no demand at all."""
        w = World(unit(decode=4, overflow=1))
        load(w, d1=0, d2=0, d3=0)
        assert w.decider.capacity.needs("main", Role.DECODE) == pytest.approx(16.5 * 1.25)
        assert w.decider.capacity.needs("main", Role.PREFILL) is None


class TestStandbys:
    def test_the_scarce_role_first_and_only_that(self) -> None:
        """A lost decoder starts a standby decoder of the same pool; the standby prefill group is left alone."""
        w = World(unit(standby=("prefill", "decode", "decode")))
        kill(w, "d1")
        assert [e.worker for e in w.did(StartWorker)] == ["s-decode-2"]  # type: ignore[union-attr]
        w.pass_time(5)
        assert pool_of(w)["carries"] == 66.0

    def test_as_many_as_the_shortage_needs(self) -> None:
        """Two decoders lost at once start two standbys, not three, and not one after the other."""
        w = World(unit(standby=("decode",) * 3))
        w.held = lambda e: isinstance(e, StartWorker)
        kill(w, "d1", "d2")
        assert sum(d.kind == "start" for d in w.decider.p.open_drains()) == 2

    def test_overflow_starts_what_it_lacks_of_both_roles(self) -> None:
        """An overflow pool of standbys starts a prefill group and the decoders that the missing sessions need."""
        w = World(unit(prefill=2, decode=8, spare=("decode", "decode", "decode", "decode", "prefill", "decode")))
        kill(w, "p1")
        assert sorted(e.worker for e in w.did(StartWorker)) == [f"os-decode-{n}" for n in (1, 2, 3, 4)] + ["os-prefill-5"]  # type: ignore[union-attr]
        w.pass_time(1)
        assert w.weight("over") == 0.5

    def test_a_standby_of_the_pool_stands_down_when_the_pool_is_whole_without_it(self) -> None:
        """Not while what it stands in for is away, but the idle time after that."""
        w = World(unit(standby=("decode",)))
        kill(w, "d1")
        w.pass_time(2000, step=20)
        assert w.state_of("s-decode-1") is WorkerState.ACTIVE
        w.ask("undrain", "d1")
        w.pass_time(900, step=10)
        assert w.state_of("d1") is WorkerState.ACTIVE
        assert w.state_of("s-decode-1") is WorkerState.STANDBY


class TestBudget:
    def test_max_share_bounds_a_role_beside_the_floor(self) -> None:
        """With a floor that would allow two, a share of 0.3 lets one of four out on doubt; what is blocked names its way out."""
        w = World(unit(max_share=0.3))
        for d in ("d1", "d2"):
            w.report(doubt(w, d))
        assert [w.state_of(d) for d in ("d1", "d2")] == [WorkerState.OUT, WorkerState.ACTIVE]
        said = [s.why for i in w.incidents() for s in i.history if s.what == "held back"]
        assert said == ["d2: pool main would have 33 of 66 decode capacity out on doubt at once (limit 30%); "
                        "return d1 first, or drain d2 by hand"]  # fmt: skip

    def test_facts_do_not_count_into_the_share_of_doubt(self) -> None:
        """Two decoders that are dead leave the share of doubt untouched; the floor is what counts them."""
        w = World(unit(decode=8, prefill=2, max_share=0.2, floor=0.25))
        kill(w, "d1", "d2")
        w.report(doubt(w, "d3"))
        assert w.state_of("d3") is WorkerState.OUT

    def test_the_scarce_role_costs_more(self) -> None:
        """With a decoder too many and idle, a floor of all that the pool carries lets a decoder go and no prefill group."""
        w = World(unit(decode=5, floor=1.0))
        load(w, **{f"d{n}": 2 for n in range(1, 6)})
        w.report(doubt(w, "p1"))
        w.report(doubt(w, "d1"))
        w.report(doubt(w, "d2"))
        assert [w.state_of(x) for x in ("p1", "d1", "d2")] == [WorkerState.ACTIVE, WorkerState.OUT, WorkerState.ACTIVE]

    def test_a_surplus_that_is_not_measured_is_none(self) -> None:
        """The same decoder too many stays when nobody has measured that it is idle: the configured ratio may be wrong."""
        w = World(unit(decode=5, floor=1.0))
        w.report(doubt(w, "d1"))
        assert w.state_of("d1") is WorkerState.ACTIVE
        w.report(doubt(w, "d1"))
        load(w, **{f"d{n}": 14 for n in range(1, 6)})
        assert w.state_of("d1") is WorkerState.ACTIVE  # and when it is measured that it is used

    def test_the_sums_are_those_of_a_fresh_count(self) -> None:
        """What is kept worker by worker equals what a new leader counts."""
        w = World(unit(prefill=2, decode=8, overflow=1, spare=("decode",)))
        kill(w, "d1", "p2")
        w.report(doubt(w, "d2"))
        w.ask("drain", "d4")
        w.pass_time(30)
        w.ask("undrain", "d4")
        w.pass_time(30)
        kept = w.decider.capacity.table
        kept.refresh()
        w.lead()
        fresh = w.decider.capacity.table
        for name in ("regular", "ready", "out", "doubt", "groups", "_doubtful_at"):
            mine, theirs = ({k: v for k, v in getattr(t, name).items() if v} for t in (kept, fresh))
            assert mine == pytest.approx(theirs) if name in ("regular", "ready") else mine == theirs, name


class TestScaleOut:
    def test_asked_once_per_level_after_a_while(self) -> None:
        """What nobody can carry is asked for after the hold; more of it asks for more, and less asks for nothing."""
        w = World(unit(decode=4, floor=0.0))
        kill(w, "d1")
        w.pass_time(100, step=5)
        assert w.did(ScaleOut) == []
        w.pass_time(300, step=5)
        kill(w, "d2")
        w.pass_time(300, step=5)
        assert [(e.role, e.count) for e in w.did(ScaleOut)] == [(Role.DECODE, 5), (Role.DECODE, 6)]  # type: ignore[union-attr]
        assert not [p for p in w.pages if p.fault == "capacity-short"]
        w.pass_time(900, step=5)
        assert [(p.event, p.urgency) for p in w.pages if p.fault == "capacity-short"] == [("trigger", "critical")]

    def test_refused_is_paged_once_and_over_with_the_shortage(self) -> None:
        """Where nothing can be asked for more, a person is, once; the page is resolved when the pool carries its demand again."""
        w = World(unit())
        w.outcomes = lambda e: not isinstance(e, ScaleOut)
        kill(w, "d1")
        w.pass_time(130, step=5)
        kill(w, "d2")
        w.pass_time(300, step=5)
        mine = [p for p in w.pages if p.fault == "capacity-short"]
        assert [p.event for p in mine] == ["trigger"]
        assert "overflow exhausted" in mine[0].summary
        for d in ("d1", "d2"):
            w.ask("undrain", d)
        w.pass_time(60)
        assert [p.event for p in w.pages if p.fault == "capacity-short"] == ["trigger", "resolve"]

    def test_an_unknown_outcome_is_asked_again_under_the_same_key(self) -> None:
        """Could not tell: tried again, and after the last try a person is asked."""
        w = World(unit())
        w.outcomes = lambda e: None if isinstance(e, ScaleOut) else True
        kill(w, "d1")
        w.pass_time(300, step=1)
        tries = w.did(ScaleOut)
        assert len(tries) == w.policy.timing.unknown_tries
        assert len({e.id.partition("#")[0] for e in tries}) == 1
        assert [p.event for p in w.pages if p.fault == "capacity-short"] == ["trigger"]

    def test_a_new_leader_does_not_ask_again(self) -> None:
        """What was asked for is durable with the incident."""
        w = World(unit())
        kill(w, "d1")
        w.pass_time(200, step=5)
        w.lead()
        w.pass_time(400, step=5)
        assert len(w.did(ScaleOut)) == 1
        assert len([i for i in w.incidents() if i.fault == "capacity-short"]) == 1

    def test_overflow_and_standbys_that_carry_it_are_enough(self) -> None:
        """Nothing is asked for while what serves and what is being started makes up for the loss."""
        w = World(unit(standby=("decode",), overflow=1))
        kill(w, "d1", "d2")
        w.pass_time(400, step=5)
        assert w.did(ScaleOut) == []
        assert w.decider.explain("main")["incidents"] == []

    def test_a_node_may_be_called_like_the_pool(self) -> None:
        """A shortage of a pool takes nothing out, whatever is called like it."""
        fleet = unit()
        more = Worker(name="x", pool="main", url="http://x", role=Role.DECODE, nodes=("main",))
        w = World(msgspec.structs.replace(fleet, workers=(*fleet.workers, more), nodes=(*fleet.nodes, "main")))
        kill(w, "d1", "d2", "d3")
        w.pass_time(300, step=5)
        assert w.state_of("x") is WorkerState.ACTIVE

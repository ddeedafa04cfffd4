"""What gateways see and obey, in the decider: breakers as doubt, panic as one page, answers against silence, pins."""

from __future__ import annotations

import msgspec
import pytest

from sentinel.decide.decider import Decider
from sentinel.decide.state.events import AnyEvent, PinBreaker, Record, Relay, Relayed, Replica, StopWorker
from sentinel.model import Action, Component, DrainState, Response, Routes, Severity, Suspect, gpu_component
from sentinel.testing.decisions import PCIS, World, rack

NODES = [f"t{n:02d}" for n in range(1, 9)]
WELL = [n for n in NODES if n != "t03"]
WHY = "6 of 6 requests failed in 10 s, seen by g1, g2"


def opened(worker: str = "decode-1", hosts: tuple[str, ...] = ("g1", "g2")) -> Relay:
    return Relay(worker=worker, breaker="open", why=WHY, hosts=hosts)


def closed(worker: str = "decode-1", *, answers: bool = True) -> Relay:
    return Relay(worker=worker, answers=answers)


def goes_on(w: World, seconds: float, *relays: Relay, panics: tuple[str, ...] = (), reporting: list[str] | None = None) -> None:
    """Time passes, and every other second the gateways tell what they see."""
    for _ in range(int(seconds / 2)):
        w.relayed(*relays, panics=panics)
        w.pass_time(2, reporting=reporting)


def frozen(w: World, worker: str = "decode-1", node: str = "t03", check: str = "worker.frozen", present: bool = True) -> None:
    where = Component(node=node, device=f"worker@{worker}")
    words = {"severity": Severity.FATAL, "suspect": Suspect.APP, "action": Action.RESTART_WORKER, "certainty": 0.95}
    w.report(w.state(check, where, present, **words))


def faults(w: World) -> list[str]:
    return sorted(f"{i.fault} {i.culprit}" for i in w.open_incidents())


def pins(w: World) -> list[tuple[str, str, str]]:
    return [(e.worker, e.state, e.by) for e in w.did(PinBreaker) if isinstance(e, PinBreaker)]


def test_an_open_breaker_is_doubt_about_its_worker() -> None:
    """Two hosts' word drains within the budget once it has lasted, restarts the engine, and it returns after its test."""
    w = World()
    goes_on(w, 20, opened())
    assert faults(w) == ["worker-failing decode-1"] and w.drain_of("decode-1") is None
    goes_on(w, 60, opened())
    drain = w.drain_of("decode-1")
    assert drain is not None and drain.doubtful and drain.repair is Action.RESTART_WORKER
    goes_on(w, 60)
    drain = w.drain_of("decode-1")
    assert drain is not None and drain.state is DrainState.DONE and drain.verified
    goes_on(w, 10, closed())
    assert faults(w) == [] and w.pages == []


def test_one_hosts_word_is_on_record_only() -> None:
    """A breaker that one host alone has opened drains nothing and pages nobody, however long it lasts."""
    w = World()
    goes_on(w, 600, opened(hosts=("g1",)))
    assert faults(w) == ["worker-failing decode-1"]
    assert w.drain_of("decode-1") is None and w.pages == []


def test_doubt_stops_at_the_budget() -> None:
    """Half of the pool's breakers open without panic drain no more than the budget lets, and never below the floor."""
    w = World(rack(decoders=8, floor=0.75))
    goes_on(w, 120, *(opened(f"decode-{n}") for n in range(1, 5)))
    out = [n for n in range(1, 9) if w.drain_of(f"decode-{n}") is not None]
    assert len(out) <= 2


def test_a_breaker_that_closes_again_drains_nothing() -> None:
    """What the probes have closed within the minute is over; half-open says neither."""
    w = World()
    goes_on(w, 30, opened())
    goes_on(w, 4, Relay(worker="decode-1", breaker="half_open", why="its time is over", hosts=("g1", "g2")))
    assert faults(w) == ["worker-failing decode-1"]
    goes_on(w, 60, closed())
    assert faults(w) == [] and w.drain_of("decode-1") is None


@pytest.mark.parametrize("breaker_first", [True, False])
@pytest.mark.parametrize("cause", ["engine", "gpu", "remap"])
def test_it_is_one_incident_with_what_the_agent_says(cause: str, breaker_first: bool) -> None:
    """The breaker and the agent's verdict about the engine, or the GPU under it, are one incident with one page at most."""
    w = World()

    def agent(present: bool = True) -> None:
        if cause == "engine":
            frozen(w, present=present)
        elif cause == "remap":
            w.report(w.state("gpu.row_remap_pending", gpu_component("t03", PCIS[0]), present, action=Action.RESET_GPU))
        elif present:
            w.report(w.xid(95, "t03"))

    if not breaker_first:
        w.held = lambda effect: True
        agent()
    goes_on(w, 6, opened())
    if breaker_first:
        assert faults(w) == ["worker-failing decode-1"]
        agent()
    w.pass_time(2)
    w.held = lambda effect: False
    told = [i for i in w.incidents() if not i.merged_into]
    assert len(told) == 1 and told[0].fault != "worker-failing"
    for _ in range(40):
        agent(present=False)
        goes_on(w, 10, closed())
    assert faults(w) == [] and len({p.dedup_key for p in w.pages}) <= 1


def test_what_a_budget_keeps_in_has_no_second_incident() -> None:
    """A GPU that waits for its drain and the breaker of the engine on it are one incident, paged once."""
    w = World(rack(floor=1.0))
    w.report(w.state("gpu.row_remap_pending", gpu_component("t03", PCIS[0]), action=Action.RESET_GPU))
    goes_on(w, 400, opened())
    assert [f.split()[0] for f in faults(w)] == ["row-remap-pending"]
    assert len([p for p in w.pages if p.event == "trigger" and not p.details.get("update")]) == 1
    assert "gateway.failing" in {f.check for f in w.open_incidents()[0].findings}


def test_who_is_out_is_not_measured() -> None:
    """The breaker of a worker that a person took out says nothing about it."""
    w = World()
    w.ask("drain", "decode-1")
    goes_on(w, 100, opened())
    assert faults(w) == []


def test_panic_is_one_page_and_drains_nothing() -> None:
    """A pool in panic pages once, takes over what its workers' breakers had said, drains nothing, and resolves when it is over."""
    w = World(rack(decoders=4))
    relays = [opened("decode-1"), opened("decode-2")]
    goes_on(w, 10, *relays)
    assert len(faults(w)) == 2
    goes_on(w, 600, *relays, panics=("main",))
    assert faults(w) == ["pool-panic main"]
    assert all(w.drain_of(f"decode-{n}") is None for n in range(1, 5))
    calls = [p for p in w.pages if p.event == "trigger" and not p.details.get("update")]
    assert [(p.fault, p.urgency.value) for p in calls] == [("pool-panic", "critical")]
    goes_on(w, 30, closed("decode-1"), closed("decode-2"))
    assert faults(w) == [] and [p.event for p in w.pages] == ["trigger", "resolve"]


def test_panic_takes_over_the_systemic_page() -> None:
    """Breakers that are open on many nodes page once; when that becomes a panic the same page says so."""
    w = World(rack(decoders=8))
    relays = [opened(f"decode-{n}") for n in range(1, 5)]
    goes_on(w, 10, *relays)
    assert [i.culprit for i in w.open_incidents()] == ["fleet"]
    goes_on(w, 300, *relays, panics=("main",))
    assert faults(w) == ["pool-panic main"]
    calls = [p for p in w.pages if p.event == "trigger" and not p.details.get("update")]
    assert len(calls) == 1 and len({p.dedup_key for p in w.pages}) == 1


def test_a_silent_node_that_the_gateways_reach_is_not_down() -> None:
    """Agent silent and every look refused: while gateways get answers from its worker that is the monitor's fault, nothing else."""
    w = World()
    for _ in range(40):
        w.relayed(closed())
        w.watched("decode-1", False)
        w.pass_time(1, reporting=WELL)
    assert [f.split()[0] for f in faults(w)] == ["agent-silent"] and w.drain_of("decode-1") is None
    assert "through the gateways" in w.open_incidents()[0].findings[0].summary
    for _ in range(10):
        w.relayed(closed(answers=False))
        w.watched("decode-1", False)
        w.pass_time(1, reporting=WELL)
    assert "node-down t03" in faults(w)


def test_old_answers_are_none() -> None:
    """A gateway that told of answers and was not heard of since keeps nobody's verdict up."""
    w = World()
    w.relayed(closed())
    for _ in range(60):
        w.watched("decode-1", False)
        w.pass_time(1, reporting=WELL)
    assert "node-down t03" in faults(w)


def test_deaf_it_trusts_the_gateways_and_without_them_drains_nothing() -> None:
    """While most agents are silent, what two gateway hosts see fail may drain, and silence may not; with the gateways silent, too,
    nothing is drained, not even what they had said before."""
    w = World()
    goes_on(w, 120, opened(), reporting=[])
    assert w.decider.p.deaf and w.drain_of("decode-1") is not None
    assert [n for n in range(2, 5) if w.drain_of(f"decode-{n}")] == []

    w = World()
    goes_on(w, 40, opened(), reporting=[])
    for _ in range(300):
        w.watched("decode-1", False)
        w.pass_time(1, reporting=[])
    assert w.decider.p.deaf and all(w.drain_of(x.name) is None for x in w.fleet.workers)


def test_an_engine_that_the_gateways_reach_is_drained_not_killed() -> None:
    """Called dead by its agent, answering gateways since: what it has in flight may finish."""
    w = World()
    rule = 'fault = "worker-down"\nresponse = "evict"'
    w.use_policy(w.rules.replace(rule, f'after = "20s"\n{rule}'))
    frozen(w, check="worker.unreachable")
    for _ in range(15):
        w.relayed(closed())
        frozen(w, check="worker.unreachable")
        w.pass_time(2)
    drain = w.drain_of("decode-1")
    assert drain is not None and drain.response is Response.DRAIN and "gateways have had answers" in drain.reason


def test_whoever_is_stopped_at_once_is_pinned_until_it_returns() -> None:
    """An eviction pins the breaker open in the same decision; the decision that gives traffic back unpins it."""
    w = World()
    w.relayed()
    frozen(w)
    assert pins(w) == [("decode-1", "open", "sentinel")]
    frozen(w, present=False)
    frozen(w, present=False)
    for _ in range(30):
        frozen(w, present=False)
        goes_on(w, 2, Relay(worker="decode-1", pin="open", pin_by="sentinel") if len(pins(w)) == 1 else closed())
    drain = w.drain_of("decode-1")
    assert drain is not None and drain.state is DrainState.DONE
    assert pins(w) == [("decode-1", "open", "sentinel"), ("decode-1", "", "sentinel")]


def test_a_forgotten_pin_is_taken_away() -> None:
    """A new leader that sees a pin of sentinel's which nobody asks for takes it away; a person's it leaves alone."""
    w = World()
    w.relayed(
        Relay(worker="decode-1", pin="open", pin_by="sentinel"), Relay(worker="decode-2", pin="open", pin_by="ann"),
    )  # fmt: skip
    assert pins(w) == [("decode-1", "", "sentinel")]


def test_without_a_gateway_nothing_is_pinned() -> None:
    """Where no gateway was ever heard of, an eviction is what it was."""
    w = World()
    frozen(w)
    assert w.did(StopWorker) and pins(w) == []


def test_a_persons_pin() -> None:
    """A person pins a breaker with a reason and an end; it is on record, and no finding is made of a pinned breaker."""
    w = World()
    w.relayed()
    w.ask("pin", "decode-1", "let it be", keep="in", until=w.now + 600)
    w.ask("unpin", "decode-1", "enough")
    assert pins(w) == [("decode-1", "closed", "ann"), ("decode-1", "", "ann")]
    held = Relay(worker="decode-1", breaker="open", why=WHY, hosts=("g1", "g2"), pin="open", pin_by="ann", pin_until=w.now + 600)
    goes_on(w, 120, held)
    assert faults(w) == [] and w.drain_of("decode-1") is None
    assert "held open by ann" in w.decider.explain("decode-1")["now"]


def test_what_a_person_unpins_stays_so_for_that_decision() -> None:
    """A stop that is tried again, or more that is found meanwhile, pins nobody again whom a person has unpinned."""
    w = World()
    w.relayed()
    w.outcomes = lambda effect: None if isinstance(effect, StopWorker) else True
    w.report(w.xid(79, "t03"))
    w.relayed(Relay(worker="decode-1", pin="open", pin_by="sentinel"))
    w.pass_time(1)
    w.ask("unpin", "decode-1")
    w.relayed(Relay(worker="decode-1"))
    w.report(w.xid(119, "t03"))
    goes_on(w, 40)
    drain = w.drain_of("decode-1")
    assert drain is not None and drain.state is DrainState.STOPPING
    assert pins(w) == [("decode-1", "open", "sentinel"), ("decode-1", "", "ann")]


def obeys(w: World, *replicas: Replica) -> list[Routes]:
    """The tables that are published when this is told."""
    event = Relayed(id=w._id(), at=w.now, window=10.0, replicas=replicas)
    return [i.value for i in w.handle(event) if isinstance(i, Record) and isinstance(i.value, Routes)]


def test_a_table_that_gateways_ignore_is_lifted_above_theirs() -> None:
    """A leader whose clock is behind that of the one whose table the store has lost: the same table under a version above every
    gateway's, lost ones and single processes included; once, and every later one above that."""
    w = World()
    before = w.decider.p.routes
    ahead = before.version + 3_600_000
    (lifted,) = obeys(w, Replica(name="g1", version=1, newest=ahead), Replica(name="g2", version=ahead - 5, there=False))
    assert lifted.version == ahead + 1 and lifted.pools == before.pools and str(ahead) in lifted.why
    assert obeys(w, Replica(name="g1", version=ahead, newest=ahead + 1)) == []
    w.ask("drain", "decode-1")
    assert w.decider.p.routes.version > ahead + 1


def test_tables_that_gateways_obey_are_not_lifted() -> None:
    """Gateways at ours, behind it or without one; and a version that no controller gives, which nothing could be lifted above."""
    w = World()
    ours = w.decider.p.routes.version
    for version in (ours, ours - 1, 0, 1 << 60):
        assert obeys(w, Replica(name="g1", version=version)) == []


def test_a_hold_in_wins_over_an_open_breaker() -> None:
    """A worker that a person holds in is not drained for its breaker."""
    w = World()
    w.ask("hold", "decode-1", keep="in")
    goes_on(w, 300, opened())
    assert w.drain_of("decode-1") is None


def test_status_and_explain_say_it() -> None:
    """Open breakers, panic, the gateways, and whom a stop waits for."""
    w = World()
    w.held = w.busy
    w.relayed(opened(), panics=("overflow",))
    told = w.decider.status()
    worker = next(x for x in told["workers"] if x["worker"] == "decode-1")
    assert worker["breaker"] == {"state": "open", "why": WHY, "seen_by": ["g1", "g2"]}
    assert [p["panic"] for p in told["pools"]] == [False, True]
    assert [g["gateway"] for g in told["gateways"]] == ["g1", "g2"]
    w.ask("drain", "decode-2")
    w.relayed(opened(), obey=1)
    assert "it is not stopped before these gateways obey the table without it: g1, g2" in w.decider.explain("decode-2")["now"]
    w.relayed(opened())
    assert "not stopped before" not in w.decider.explain("decode-2")["now"]


def test_it_replays() -> None:
    """The journal's events, as JSON, give the same decisions."""
    w = World()
    goes_on(w, 90, opened(), opened("decode-2"))
    goes_on(w, 20, panics=("main",))
    frozen(w, "decode-3", "t05")
    w.pass_time(20)
    again, decode = Decider(w.policy), msgspec.json.Decoder(AnyEvent)
    for event, out in w.journal:
        assert msgspec.json.encode(again.handle(decode.decode(msgspec.json.encode(event)))) == msgspec.json.encode(out)

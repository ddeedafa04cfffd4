"""Budgets and pace under anything that happens: doubt never takes more than is allowed, at once or in a while."""

from __future__ import annotations

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from sentinel.decide.decider import Decider
from sentinel.decide.rules.policy import Policy
from sentinel.decide.rules.policy_file import default_policy
from sentinel.decide.state.events import AnyEvent, AnyInstruction, AwaitIdle, Record
from sentinel.decide.supply.worth import NEAR, roles_of, survey, worth
from sentinel.model import Action, Drain, DrainState, Fleet, Pool, Response, Role, Severity, Worker, gpu_component
from sentinel.testing.decisions import PCIS, World
from tests.property.walk import Walk

BURST, RATE = 35.0, 1.0  # sessions: two decoders at once; a prefill group goes when all of it is there
EVENTS = msgspec.json.Decoder(AnyEvent)


def fleet(floor: float = 0.5, max_share: float = 1.0, decoders: int = 8) -> Fleet:
    """Two prefill groups, decoders and a standby decoder, a tray and a domain each, and an overflow pool of stopped workers."""
    names = [("p1", Role.PREFILL), ("p2", Role.PREFILL), *((f"d{n}", Role.DECODE) for n in range(1, decoders + 1))]
    names += [("s1", Role.DECODE), ("o1", Role.BOTH), ("o2", Role.BOTH)]
    workers = tuple(
        Worker(
            name=name, pool="over" if name[0] == "o" else "main", url=f"http://{name}", role=role, nodes=(f"n-{name}",),
            gpus=tuple(gpu_component(f"n-{name}", p) for p in PCIS), domain=f"x-{name}", standby=name[0] in "so",
        )
        for name, role in names
    )  # fmt: skip
    main = Pool(name="main", floor=floor, max_share=max_share, max_doubtful_drains=1000, overflow=("over",))
    over = Pool(name="over", floor=0.0, primary=False)
    return Fleet(pools=(main, over), workers=workers, nodes=tuple(w.nodes[0] for w in workers))


def policy() -> Policy:
    own = default_policy()
    pace = msgspec.structs.replace(own.pace, burst=BURST, sessions_per_s=RATE)
    return msgspec.structs.replace(own, pace=pace, systemic=msgspec.structs.replace(own.systemic, min_nodes=1000))


class Watching(World):
    """Judges every event's decisions at once, by what the picture says then."""

    def __init__(self, fleet: Fleet, policy: Policy) -> None:
        self._judged: set[str] = set()
        self.moved: list[tuple[float, float]] = []  # when, sessions: gentle automatic drains on doubt
        super().__init__(fleet, policy)

    def handle(self, event: AnyEvent) -> list[AnyInstruction]:
        out = super().handle(event)
        for instruction in out:
            drain = instruction.value if isinstance(instruction, Record) else None
            if isinstance(drain, Drain) and drain.id not in self._judged:
                self._judged.add(drain.id)
                if drain.doubtful and drain.by == "sentinel" and drain.kind == "drain":
                    self._judge(drain)
        return out

    def _judge(self, drain: Drain) -> None:
        p = self.decider.p
        worker = p.workers[drain.worker]
        standing = survey(p)[worker.pool]
        pool = p.pools[worker.pool]
        for role in roles_of(worker):
            measured = self.decider.capacity.needs(pool.name, role) is not None
            line = pool.floor * (standing.whole if measured else standing.total.get(role, 0.0))
            assert standing.ready.get(role, 0.0) >= line - NEAR, f"{drain.worker} crossed the floor of {role}"
        if drain.response is Response.DRAIN:
            sessions = self.decider.drains.pace.sessions(worker)
            self.moved.append((self.now, sessions))
            for n, (since, _) in enumerate(self.moved):
                lately = sum(s for _, s in self.moved[n:])
                lasted = self.now - since
                assert lately <= max(BURST, sessions) + RATE * lasted + NEAR, f"{lately} sessions in {lasted} s"


NAMES = [w.name for w in fleet().workers]


class Doubt(Walk):
    """Doubts and facts, measured loads, people, passing time and changing leaders, in any order."""

    @initialize(
        floor=st.sampled_from([0.0, 0.0, 0.25, 0.5, 0.9, 1.0]),
        share=st.sampled_from([1.0, 1.0, 0.3, 0.1]),
        decoders=st.sampled_from([8, 4]),
    )
    def begin(self, floor: float, share: float, decoders: int) -> None:
        self.world = Watching(fleet(floor, share, decoders), policy())
        self.share = share

    @property
    def names(self) -> list[str]:
        return [w.name for w in self.world.fleet.workers]

    @rule(who=st.sampled_from(NAMES), present=st.booleans(), certainty=st.sampled_from([0.5, 0.9, 1.0]))
    def doubt(self, who: str, present: bool, certainty: float) -> None:
        where = gpu_component(f"n-{who}", PCIS[0])
        found = self.world.state("gpu.row_remap_pending", where, present, action=Action.RESET_GPU, certainty=certainty)
        self.world.report(found)

    @rule(decoders=st.sets(st.integers(1, 8), min_size=3))
    def doubts(self, decoders: set[int]) -> None:
        """Several within the same second."""
        for n in sorted(decoders):
            self.doubt(f"d{n}", True, 0.9)

    @rule(who=st.sampled_from(NAMES))
    def fact(self, who: str) -> None:
        self.world.report(self.world.xid(79, f"n-{who}", action=Action.REBOOT_NODE))

    @rule(first=st.integers(1, 8), most=st.integers(1, 6), wait=st.booleans())
    def doubt_and_then_facts(self, first: int, most: int, wait: bool) -> None:
        """One decoder leaves on doubt, perhaps as far as its requests in flight, while others die one by one."""
        self.world.held = lambda effect: isinstance(effect, AwaitIdle) if wait else True
        self.doubt(f"d{first}", True, 0.9)
        for n in range(most):
            self.fact(f"d{(first + n) % 8 + 1}")
            self.doubt_gives_way_to_facts()

    @rule(who=st.sampled_from(NAMES))
    def frozen(self, who: str) -> None:
        where = msgspec.structs.replace(gpu_component(f"n-{who}", PCIS[0]), device=f"worker@{who}")
        more = {"severity": Severity.FATAL, "action": Action.RESTART_WORKER, "certainty": 0.95}
        self.world.report(self.world.state("worker.frozen", where, True, **more))

    @rule(load=st.sampled_from([0, 3, 16]), who=st.sets(st.sampled_from(NAMES)))
    def look(self, load: int, who: set[str]) -> None:
        for name in sorted(who & set(self.names)):
            self.world.watched(name, reachable=True, load=load)

    @rule(verb=st.sampled_from(["drain", "undrain", "undrain"]), who=st.sampled_from(NAMES))
    def person(self, verb: str, who: str) -> None:
        self.world.ask(verb, who)

    @rule(seconds=st.sampled_from([1, 5, 30, 700]))
    def time(self, seconds: int) -> None:
        self.world.pass_time(seconds, step=max(1, seconds // 20))

    @rule(hold=st.booleans())
    def effects_wait(self, hold: bool) -> None:
        self.world.held = lambda effect: hold
        self.world.settle()

    @invariant()
    def doubt_stays_within_its_share(self) -> None:
        """At any moment no more of a role is out on doubt than max_share of it."""
        if not hasattr(self, "world"):
            return
        p = self.world.decider.p
        for role, total in survey(p)["main"].total.items():
            mine = [w for w in p.workers.values() if w.pool == "main" and role in roles_of(w)]
            out = [w for w in mine if (d := p.open_drain(w.name)) and d.doubtful]
            assert sum(worth(p.pools["main"], w) for w in out) <= self.share * total + NEAR

    @invariant()
    def doubt_gives_way_to_facts(self) -> None:
        """Whatever dies, no drain on doubt that could still be called off stands while its role gives less than the floor."""
        if not hasattr(self, "world"):
            return
        p = self.world.decider.p
        for name, standing in survey(p).items():
            line = p.pools[name].floor * standing.whole
            for drain in p.open_drains():
                worker = p.workers[drain.worker]
                begins = drain.state in (DrainState.REQUESTED, DrainState.DEROUTED) and drain.response is Response.DRAIN
                if worker.pool == name and begins and drain.doubtful and drain.by == "sentinel":
                    for role in roles_of(worker):
                        assert role not in standing.total or standing.ready.get(role, 0.0) >= line - NEAR, drain.worker

    @invariant()
    def the_sums_are_those_of_a_fresh_count(self) -> None:
        """What capacity keeps worker by worker is what counting everything anew gives."""
        if not hasattr(self, "world"):
            return
        table, p = self.world.decider.capacity.table, self.world.decider.p
        table.refresh()
        for name, standing in survey(p).items():
            kept = table.standing(name)
            assert dict(kept.total) == {r: n for r, n in standing.total.items() if n}
            assert all(abs(kept.ready.get(r, 0.0) - standing.ready.get(r, 0.0)) < NEAR for r in Role)


Doubt.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
TestDoubt = Doubt.TestCase


def test_replaying_a_shortage_gives_the_same_decisions() -> None:
    """Sums kept as they change, queues and buckets: a fresh decider fed the same events decides byte for byte the same."""
    w = World(fleet(), policy())
    for n in range(1, 7):
        w.report(w.state("gpu.row_remap_pending", gpu_component(f"n-d{n}", PCIS[0]), action=Action.RESET_GPU))
    w.watched("d7", reachable=True, load=3)
    for who in ("p1", "d1", "d8"):
        w.report(w.xid(79, f"n-{who}", action=Action.REBOOT_NODE))
    w.pass_time(300, step=5)
    w.ask("undrain", "d8")
    w.pass_time(200, step=5)
    again = Decider(w.policy)
    for event, out in w.journal:
        replayed = again.handle(EVENTS.decode(msgspec.json.encode(event)))
        assert msgspec.json.encode(replayed) == msgspec.json.encode(out)

"""Heartbeats that carry what is new decide the same as everything a node knows every time, whatever happens on the way.

Two worlds see the same fleet. One is plain: at each heartbeat its decider is handed every state that the node knows, each
measurement once. In the other, the agent's ``Told`` makes the report and the controller's ``Ingest`` takes it. Reports get lost,
answers get lost, the controller is busy, old reports come again, leaders change, agents restart and probes stop measuring.
Left out: the first answer of a new leader getting lost. The snapshot that it asks for then comes one attempt later, and a state
that has changed in between was never told as it had been; tests/unit/test_heartbeat.py shows that it is asked for again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.agent.known import Known
from sentinel.agent.told import Told
from sentinel.controller.ingest import Ingest
from sentinel.controller.metrics import Metrics
from sentinel.decide.state.events import AnyEvent, AnyInstruction, Heard, Reported
from sentinel.model import Action, Component, Drain, Finding, Kind, Report, Severity, WorkerSeen
from sentinel.testing.decisions import PCIS, World, rack

NODES = ("t03", "t04")
WHAT: Sequence[tuple[str, str, dict[str, Any]]] = (  # check, device, what it weighs when bad
    ("gpu.broken", f"gpu@{PCIS[0]}", {"severity": Severity.FATAL, "action": Action.RESET_GPU}),
    ("gpu.nvlink_crc", f"gpu@{PCIS[1]}", {"severity": Severity.WARNING, "certainty": 0.8}),
    ("nic.down", "ib@mlx5_0", {"severity": Severity.FATAL, "action": Action.INSPECT}),
    ("gpu.odd", f"gpu@{PCIS[2]}", {"severity": Severity.INFO}),
    ("gpu.always_fine", f"gpu@{PCIS[3]}", {"severity": Severity.WARNING}),
)


class Agent:
    """What one node knows and has still to tell. ``told`` is None for the plain world."""

    def __init__(self, node: str, *, plain: bool) -> None:
        self.node, self.plain = node, plain
        self.news: list[Finding] = []
        self.sent: list[Report] = []
        self.runs = self.measured = 0
        self.restart()

    def restart(self) -> None:
        """What was not acknowledged is still in the spool; what was measured is forgotten."""
        self.runs += 1
        self.seq = 0
        self.known = Known()
        workers = [WorkerSeen(worker=f"decode-{NODES.index(self.node) + 1}", running=self.runs)]
        self.known.take_workers("worker", msgspec.to_builtins(workers))
        self.told = Told(self.known, probes=lambda: {"gpu": True}, place=lambda: None)

    def blank(self, now: float) -> Report:
        return Report(node=self.node, session=f"{self.node}-{self.runs}", seq=self.seq, at=now, boot_id="b", version="1")


class Plain:
    """Everything known, every time, straight to the decider: what heartbeats are held against."""

    def __init__(self, peer: Beating) -> None:
        self.world = World(rack())
        self.peer = peer  # goes first
        self.agents = {n: Agent(n, plain=True) for n in NODES}
        self.lead(first=True)

    def lead(self, *, first: bool = False) -> None:
        self.sampled: dict[tuple[Component, str], tuple[float, bool]] = {}
        if not first:
            self.world.lead()

    def _hand(self, agent: Agent, findings: Sequence[Finding]) -> None:
        new = [f for f in findings if f.kind is Kind.EVENT or self.sampled.get((f.component, f.check)) != (f.at, f.present)]
        self.world.report(*new, node=agent.node)
        conditions = self.world.decider.p.conditions  # what none is kept of was passed over, and no sample
        for f in new:
            if conditions.get(f.component, f.check) and f.kind is Kind.STATE:
                state = (f.component, f.check)
                self.sampled[state] = max(self.sampled.get(state, (f.at, f.present)), (f.at, f.present))

    async def news(self, agent: Agent) -> None:
        if agent.news:
            self._hand(agent, agent.news)
        agent.news = []

    async def beat(self, agent: Agent, fate: str, between: Sequence[tuple[Any, ...]]) -> None:
        if fate in ("arrives", "answer lost"):
            self._hand(agent, agent.known.snapshot(self.world.now))
        for step in between:
            measure(self, agent, *step)
        if fate == "lost":
            self._hand(agent, agent.known.snapshot(self.world.now))
        for _ in range(self.peer.asked):  # the peer's leader asked for a snapshot, and got it at once
            self._hand(agent, agent.known.snapshot(self.world.now))

    async def late(self, agent: Agent, which: int) -> None:
        pass


class Beating:
    """The agent's half and the controller's half of heartbeats."""

    def __init__(self) -> None:
        self.world = World(rack())
        self.agents = {n: Agent(n, plain=False) for n in NODES}
        self.kinds = {"snapshot": 0, "heartbeat": 0, "quiet": 0}
        self.asked = 0  # snapshots that the latest heartbeat was answered with the wish for
        self.lead(first=True)

    def lead(self, *, first: bool = False) -> None:
        if not first:
            self.world.lead()
        for agent in self.agents.values():
            agent.sent.clear()
        numbers = itertools.count()
        self.ingest = Ingest(
            submit=self._submit, new_id=lambda: f"in{next(numbers)}", metrics=Metrics(), own=lambda node, c: c.node == node,
            watch=self.world.decider.watch, clock=lambda: self.world.now,
        )  # fmt: skip

    def _submit(self, event: AnyEvent) -> asyncio.Future[list[AnyInstruction]]:
        assert isinstance(event, Heard | Reported)
        self.kinds["quiet"] += isinstance(event, Heard)
        future: asyncio.Future[list[AnyInstruction]] = asyncio.get_running_loop().create_future()
        future.set_result(self.world.handle(event))
        self.world.settle()
        return future

    async def news(self, agent: Agent) -> None:
        if agent.news:
            agent.seq += 1
            report = msgspec.structs.replace(agent.blank(self.world.now), findings=tuple(agent.news))
            agent.sent.append(report)
            agent.told.heard(await self.ingest.take(report))
        agent.news = []

    async def beat(self, agent: Agent, fate: str, between: Sequence[tuple[Any, ...]]) -> None:
        agent.seq += 1
        self.asked = 0
        report = self._made(agent)
        if fate == "busy":
            agent.told.dropped()
            agent.seq -= 1
        elif fate != "lost":
            ack = await self.ingest.take(report)
            agent.sent.append(report)
        for step in between:
            measure(self, agent, *step)
        if fate in ("lost", "answer lost"):
            report = self._made(agent)
            ack = await self.ingest.take(report)
            agent.sent.append(report)
        if fate != "busy":
            agent.told.heard(ack)
            agent.told.taken()
            if ack.want_snapshot:
                await self.beat(agent, "arrives", ())
                self.asked = 1
        self.ingest.tell()

    def _made(self, agent: Agent) -> Report:
        report = agent.told.report(agent.blank(self.world.now), self.world.now)
        self.kinds["snapshot" if report.snapshot else "heartbeat"] += 1
        return report

    async def late(self, agent: Agent, which: int) -> None:
        """The network brings an old report again."""
        if agent.sent:
            await self.ingest.take(agent.sent[which % len(agent.sent)])


def measure(world: Plain | Beating, agent: Agent, what: int, bad: bool) -> None:
    check, device, weight = WHAT[what]
    agent.measured += 1  # no two measurements are made at one time
    finding = Finding(
        id=f"{agent.node}:{check}", check=check, component=Component(node=agent.node, device=device),
        at=world.world.now + 1e-6 * agent.measured,
        present=bad, **(weight if bad else {}),
    )  # fmt: skip
    agent.news += [n.finding for n in agent.known.take("gpu", [finding])]


def decided(world: World) -> dict[str, Any]:
    """Everything of what was decided that does not name an event."""
    return {
        "incidents": [
            (i.key, i.severity, i.opened_at, i.closed_at, i.victims, i.paged, len(i.findings), i.merged_into)
            for i in world.incidents()
        ],
        "drains": [
            (d.worker, d.response, d.state, d.since, d.requested_at, d.attempt)
            for d in world.store.values()
            if isinstance(d, Drain)
        ],
        "pages": [(p.dedup_key, p.event, p.at, p.urgency) for p in world.pages],
        "conditions": [(c.finding.component, c.finding.check, c.present, c.bad) for c in world.decider.p.conditions.present()],
        "silent": {n: v.heard_at for n, v in world.decider.p.nodes.items()},
    }


node = st.sampled_from(NODES)
sample = st.tuples(st.sampled_from(range(len(WHAT) - 1)), st.booleans())
step = st.one_of(
    st.tuples(st.just("measure"), node, sample),
    st.tuples(st.just("all"), node),  # every probe measures once more what it measured last
    st.tuples(st.just("round")),  # time passes, every probe of every node measures once more, and all of it arrives
    st.tuples(st.just("round")),
    st.tuples(st.just("beat"), node, st.just("arrives"), st.just(())),
    st.tuples(st.just("beat"), node, st.sampled_from(["lost", "answer lost", "busy"]), st.lists(sample, max_size=2)),
    st.tuples(st.just("late"), node, st.integers(0, 20)),
    st.tuples(st.just("time"), st.sampled_from([1.0, 5.0, 5.0, 20.0])),
    st.tuples(st.just("time"), st.sampled_from([5.0, 310.0])),
    st.tuples(st.just("lead")),
    st.tuples(st.just("restart"), node),
)


async def run(worlds: Sequence[Plain | Beating], steps: Sequence[tuple[Any, ...]]) -> None:
    """Drive all worlds through the same steps; after each one they must have decided the same."""
    now: dict[tuple[str, int], bool] = {(n, i): False for n in NODES for i in range(len(WHAT))}
    every = [("all", n) for n in NODES] + [("beat", n, "arrives", ()) for n in NODES]
    flat = (part for s in steps for part in ([("time", 5.0), *every] if s[0] == "round" else [s]))
    unmet: set[str] = set()  # nodes that have not reported to this leader
    for name, *args in itertools.chain(every, flat):
        if name == "lead":
            unmet = set(NODES)
        elif name == "beat" and args[0] in unmet:
            args[1] = "lost" if args[1] == "answer lost" else args[1]
            unmet.discard(args[0] if args[1] != "busy" else "")
        for w in worlds:
            if name == "measure":
                measure(w, w.agents[args[0]], *args[1])
                await w.news(w.agents[args[0]])
            elif name == "all":
                for what in range(len(WHAT)):
                    measure(w, w.agents[args[0]], what, now[args[0], what])
                await w.news(w.agents[args[0]])
            elif name == "beat":
                await w.news(w.agents[args[0]])
                await w.beat(w.agents[args[0]], args[1], args[2])
                await w.news(w.agents[args[0]])
            elif name == "late":
                await w.late(w.agents[args[0]], args[1])
            elif name == "time":
                w.world.pass_time(args[0], step=5.0, reporting=())
            elif name == "lead":
                w.lead()
            elif name == "restart":
                w.agents[args[0]].restart()
        for where, (what, bad) in [(args[0], s) for s in ([args[1]] if name == "measure" else args[2] if name == "beat" else [])]:
            now[where, what] = bad
        told = [decided(w.world) for w in worlds]
        assert all(t == told[0] for t in told), (name, args)


@settings(max_examples=150, deadline=None)
@given(st.lists(step, max_size=40))
def test_heartbeats_decide_what_snapshots_would(steps: list[tuple[Any, ...]]) -> None:
    """Incidents, drains, pages, conditions and who was heard when are the same after every step."""
    beating = Beating()
    asyncio.run(run([beating, Plain(beating)], steps))


def test_a_quiet_node_sends_next_to_nothing() -> None:
    """The comparison above is one of heartbeats: of a node that is well, nearly all reports are, and say nothing."""
    steps = [x for _ in range(100) for x in (("all", "t03"), ("time", 5.0), ("beat", "t03", "arrives", ()))]
    beating = Beating()
    asyncio.run(run([beating, Plain(beating)], steps))
    assert beating.kinds["heartbeat"] > 20 * (beating.kinds["snapshot"] - len(NODES))
    assert beating.kinds["quiet"] == beating.kinds["heartbeat"]

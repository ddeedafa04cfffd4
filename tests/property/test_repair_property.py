"""Repairs and maintenance, whatever happens: two never meet on a node, and nothing of a node under work is a fault."""

from __future__ import annotations

import re

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from sentinel.decide.rules.policy_file import default_policy_text, load_policy
from sentinel.decide.state.events import AnyEffect, Forget, Record, Repair, SendPage, StartWorker, StopWorker, Verify
from sentinel.decide.state.picture import ENDED, effect_key
from sentinel.decide.state.planned import window
from sentinel.decide.ways.repair import NODE_WIDE
from sentinel.model import (
    Action,
    Component,
    Fleet,
    Hold,
    Incident,
    NodePlace,
    Pool,
    Report,
    Role,
    Severity,
    Worker,
    WorkerState,
    gpu_component,
)
from sentinel.testing.decisions import PCIS, World
from tests.property.walk import Walk

NODES = ["t01", "t02", "t03"]
LADDER = re.sub(r"(\[repair\.\w+\]\nauto = )false", r"\1true", default_policy_text())
WORKERS = {  # where each has which GPUs: neighbours, a group over two trays, a standby beside a neighbour
    "a": [("t01", 0), ("t01", 1)], "b": [("t01", 2)], "c": [("t01", 3), ("t02", 0)], "d": [("t02", 1), ("t02", 2)],
    "e": [("t03", 0), ("t03", 1)], "spare": [("t03", 2), ("t03", 3)],
}  # fmt: skip


def fleet() -> Fleet:
    workers = tuple(
        Worker(
            name=name, pool="main", url=f"http://{name}", role=Role.BOTH, standby=name == "spare",
            nodes=tuple(dict.fromkeys(n for n, _ in ranks)), gpus=tuple(gpu_component(n, PCIS[g]) for n, g in ranks),
        )
        for name, ranks in WORKERS.items()
    )  # fmt: skip
    places = tuple(NodePlace(node=n, rack="R1" if n < "t03" else "R2", domain="d") for n in NODES)
    return Fleet(pools=(Pool(name="main", floor=0.0, max_doubtful_drains=9),), workers=workers, nodes=tuple(NODES), places=places)


class Booting(World):
    """Nodes that name their boot, and get another one with every reboot that is carried out."""

    boots: dict[str, int]

    def _report(self, *args, **more) -> Report:
        report = super()._report(*args, **more)
        return msgspec.structs.replace(report, boot_id=f"boot-{getattr(self, 'boots', {}).get(report.node, 0)}")


class Work(Walk):
    """Faults that want every kind of repair on shared trays, people with windows, failing repairs, changing leaders."""

    @initialize()
    def begin(self) -> None:
        self.world = Booting(fleet(), load_policy(LADDER))
        self.world.boots = {}
        self.mirror()
        self.whole = self.world.fleet
        self.seen = 0
        self.known: set[str] = set()  # incidents
        self.windows: dict[str, Hold] = {}  # node → the window that it is in, as far as the journal was read

    # -- what happens -------------------------------------------------------------------------------------------------

    @rule(
        node=st.sampled_from(NODES), gpu=st.integers(0, 3),
        fault=st.sampled_from([(95, Action.RESET_GPU), (79, Action.REBOOT_NODE), (119, Action.RESET_GPU)]),
    )  # fmt: skip
    def line(self, node: str, gpu: int, fault: tuple[int, Action]) -> None:
        self.world.report(self.world.xid(fault[0], node, gpu, action=fault[1]))

    @rule(node=st.sampled_from(NODES), gpu=st.integers(0, 3), present=st.booleans())
    def remap(self, node: str, gpu: int, present: bool) -> None:
        where = gpu_component(node, PCIS[gpu])
        self.world.report(self.world.state("gpu.row_remap_pending", where, present, action=Action.RESET_GPU))

    @rule(worker=st.sampled_from(sorted(WORKERS)), present=st.booleans())
    def unreachable(self, worker: str, present: bool) -> None:
        where = Component(node=WORKERS[worker][0][0], device=f"worker@{worker}")
        words = {"severity": Severity.FATAL, "action": Action.RESTART_WORKER}
        self.world.report(self.world.state("worker.unreachable", where, present, **words))
        self.world.watched(worker, not present)

    @rule(
        verb=st.sampled_from(["drain", "undrain", "undrain", "hold", "release"]),
        whom=st.sampled_from([*WORKERS, *NODES]),
        keep=st.sampled_from(["in", "out"]),
    )
    def person(self, verb: str, whom: str, keep: str) -> None:
        self.world.ask(verb, whom, keep=keep)

    @rule(whom=st.sampled_from([*NODES, "R1"]), seconds=st.sampled_from([None, 20, 900]))
    def maintain(self, whom: str, seconds: int | None) -> None:
        self.world.ask("maintain", whom, until=None if seconds is None else self.world.now + seconds)

    @rule(seconds=st.sampled_from([1, 6, 40, 1000]), silent=st.sets(st.sampled_from(NODES)))
    def time(self, seconds: int, silent: set[str]) -> None:
        self.world.pass_time(seconds, step=max(1, seconds // 20), reporting=[n for n in NODES if n not in silent])

    @rule(node=st.sampled_from(NODES))
    def boots(self, node: str) -> None:
        self.world.boots[node] = self.world.boots.get(node, 0) + 1

    @rule(outcome=st.sampled_from([True, True, False, None]))
    def effects_go(self, outcome: bool | None) -> None:
        self.world.outcomes = lambda effect: outcome

    @rule(kinds=st.sampled_from([(), (), (Repair,), (StartWorker, Verify), (AnyEffect,)]))
    def effects_wait(self, kinds: tuple[type, ...]) -> None:
        self.world.held = lambda effect: isinstance(effect, kinds)
        self.world.settle()

    @rule(gone=st.sets(st.sampled_from(sorted(WORKERS)), max_size=2))
    def fleet_reloaded(self, gone: set[str]) -> None:
        self.world.reload(msgspec.structs.replace(self.whole, workers=tuple(w for w in self.whole.workers if w.name not in gone)))

    # -- how it ends --------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Once everything can be mended and nobody works on anything, everything serves again and nothing is left over."""
        self.alone()
        w = self.world
        w.held, w.outcomes = (lambda effect: False), (lambda effect: True)
        w.reload(self.whole)
        w.settle()
        while w.decider.p.holds:  # below one there may be another
            w.ask("release", next(iter(w.decider.p.holds)))
        for _ in range(3):
            for node in NODES:
                w.boots[node] = w.boots.get(node, 0) + 1
            w.pass_time(60)
            for node in NODES:
                w.report(*(c for _ in range(2) for c in self._fine(node)), node=node)
            for incident in w.open_incidents():
                w.ask("resolve", incident.id)
            for worker in WORKERS:
                w.ask("undrain", worker)
            w.pass_time(60)
        w.pass_time(4000, step=10)
        p = w.decider.p
        assert p.open_drains() == []
        assert w.open_incidents() == []
        assert not w.pending
        assert {n for n in WORKERS if n != "spare" and w.state_of(n) is not WorkerState.ACTIVE} == set()

    def _fine(self, node: str):
        for condition in self.world.decider.p.conditions.under(Component(node=node)):
            yield self.world.state(condition.finding.check, condition.finding.component, False)

    # -- what always holds ----------------------------------------------------------------------------------------------

    @invariant()
    def two_repairs_never_meet_on_a_node(self) -> None:
        """Whoever wants them, whoever leads, and whether or not their workers are configured."""
        if not hasattr(self, "world"):
            return
        running = [e.node for e in self.world.pending.values() if isinstance(e, Repair)]
        assert len(running) == len(set(running)), running

    @invariant()
    def nobody_starts_under_a_repair(self) -> None:
        """While a repair runs, nothing is started or tested that it would end."""
        if not hasattr(self, "world"):
            return
        p = self.world.decider.p
        for effect in self.world.pending.values():
            if not isinstance(effect, Repair):
                continue
            where = Component.parse(effect.target)
            hit = {x.name for x in (p.on_node(effect.node) if effect.action in NODE_WIDE else p.touching(where))}
            for other in self.world.pending.values():
                if isinstance(other, StartWorker | Verify) and other.worker in hit:
                    drain = p.drains.get(other.id.partition("/")[0])
                    assert drain is None or drain.state in ENDED, (effect, other)

    @invariant()
    def nothing_of_a_node_under_work_is_a_fault(self) -> None:
        """From the word that opens a window to its end: no incident about the node, no page, no repair begun there."""
        if not hasattr(self, "world"):
            return
        w = self.world
        for event, out in w.journal[self.seen :]:
            for n in out:
                if isinstance(n, Record | Forget) and n.kind == "hold":
                    self.windows.pop(n.key, None)
                if isinstance(n, Record) and isinstance(n.value, Hold) and n.value.planned:
                    self.windows[n.key] = n.value
            under = {node for node, hold in self.windows.items() if hold.until is None or hold.until > event.at}
            for n in out:
                if isinstance(n, Record) and isinstance(n.value, Incident) and n.key not in self.known:
                    self.known.add(n.key)
                    assert n.value.culprit.partition("/")[0] not in under, n
                if isinstance(n, SendPage) and n.page.event == "trigger":
                    assert n.page.source not in under, n
                if isinstance(n, Repair) and n.node in under:  # unless it is an earlier one, asked again
                    assert any(effect_key(e) == effect_key(n) for e in w.done), n
        self.seen = len(w.journal)

    @invariant()
    def nobody_serves_on_a_node_under_work(self) -> None:
        """Once what it had in flight is done, a worker of the node has no traffic unless a person holds it in."""
        if not hasattr(self, "world"):
            return
        p = self.world.decider.p
        for node in NODES:
            if window(p, node) is not None:
                for worker in p.on_node(node):
                    drain = p.open_drain(worker.name)
                    assert p.state_of(worker) is not WorkerState.ACTIVE or p.held(worker, "in") or drain is None, (node, drain)

    @invariant()
    def no_key_is_used_for_two_rounds(self) -> None:
        """Each rung of a ladder, each start and each stop is a round of its own."""
        if not hasattr(self, "world"):
            return
        acts = (StopWorker, StartWorker, Repair)
        settled = [effect_key(e) for e, ok in self.world.told if isinstance(e, acts) and ok is not None]
        assert len(settled) == len(set(settled))


Work.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
TestWork = Work.TestCase

"""A rack that goes on being sick until it is mended, and everybody at work on it at once: what holds at every decision.

Unlike in test_decider_property.py the hardware here has a state of its own: what is bad is reported again and again, a repair cures
it or does not, and so it can be asked at the end whether anything bad was left in service. Every instruction is judged when it is
given, by what nodes had told until then and by what people had said.
"""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from sentinel.decide.decider import Decider
from sentinel.decide.replay import prove
from sentinel.decide.rules.policy import Mode
from sentinel.decide.rules.policy_file import default_policy, default_policy_text
from sentinel.decide.state.events import (
    AnyEffect,
    AnyEvent,
    AnyInstruction,
    Done,
    Effect,
    Record,
    Repair,
    Reported,
    SendPage,
    StartWorker,
    Tick,
)
from sentinel.decide.state.moves import gentle
from sentinel.decide.state.picture import ENDED, effect_key
from sentinel.decide.supply.worth import NEAR, roles_of, survey
from sentinel.decide.ways.repair import NODE_WIDE
from sentinel.model import (
    Action,
    Component,
    Drain,
    DrainState,
    Finding,
    Fleet,
    GpuPlace,
    Kind,
    NodePlace,
    Place,
    Pool,
    Report,
    Response,
    Role,
    Routes,
    Severity,
    Suspect,
    Worker,
    WorkerSeen,
    WorkerState,
    gpu_component,
)
from sentinel.testing.decisions import PCIS, World
from tests.property.walk import Walk

S = DrainState
SERVING = (WorkerState.ACTIVE, WorkerState.CORDONED)
NODES = [f"t{n:02d}" for n in range(1, 11)]
HOT = ["t03", "t06", "t06", "t06"]  # where most happens: concerns meet on one node, or they do not meet
Key = tuple[Component, str]


def fleet(floor: float = 0.5, share: float = 1.0) -> Fleet:
    """A prefill group over two trays, three decoders with a tray each, two that share a tray with a worker of the other pool, one
    whose GPUs are learned, and an overflow pool of one worker and a standby."""

    def worker(name: str, nodes: str, gpus: str, **more: object) -> Worker:
        where = tuple(gpu_component(n, PCIS[int(g)]) for n in nodes.split() for g in gpus)
        fields = {"pool": "main", "role": Role.DECODE, "domain": "rack-1", **more}
        return Worker(name=name, url=f"http://{name}", nodes=tuple(nodes.split()), gpus=where, **fields)  # type: ignore[arg-type]

    spill = {"pool": "overflow", "role": Role.BOTH, "domain": "rack-2", "capacity": 16.5}
    workers = (
        worker("prefill-1", "t01 t02", "0123", role=Role.PREFILL),
        worker("decode-1", "t03", "0123"),
        worker("decode-2", "t04", "0123"),
        worker("decode-3", "t05", "0123"),
        worker("half-a", "t06", "01"),
        worker("half-b", "t06", "23", **{**spill, "domain": "rack-1"}),
        worker("learned", "t07", "", domain="rack-2"),
        worker("spill-1", "t08", "0123", **spill),
        worker("spill-2", "t09", "0123", **spill, standby=True),
        worker("spill-3", "t06", "23", **{**spill, "domain": "rack-1"}, standby=True),
    )
    return Fleet(
        pools=(
            Pool(name="main", floor=floor, max_share=share, overflow=("overflow",)),
            Pool(name="overflow", floor=0.0, primary=False),
        ),
        workers=workers,
        nodes=tuple(NODES),
        places=tuple(NodePlace(node=n, rack="r1" if n < "t07" else "r2") for n in NODES),
    )


WHOLE = fleet()
WORKERS = [w.name for w in WHOLE.workers]
LOOSE = msgspec.structs.replace(
    WHOLE,
    pools=tuple(
        msgspec.structs.replace(p, floor=0.0, max_share=1.0, max_domain_share=1.0, max_doubtful_drains=1000) for p in WHOLE.pools
    ),
)

# Name → check, part, severity, action, certainty, suspect; states of a GPU.
GPU = {
    "remap": ("gpu.row_remap_pending", Severity.WARNING, Action.RESET_GPU, 1.0),
    "thermal": ("gpu.thermal", Severity.FATAL, Action.RESET_GPU, 0.9),
    "lost": ("gpu.lost", Severity.FATAL, Action.REBOOT_NODE, 1.0),
    "crc": ("gpu.nvlink_crc", Severity.WARNING, Action.INSPECT, 0.9),
}
EFFECTS = ["Deroute", "AwaitIdle", "StopWorker", "StartWorker", "Verify", "Reroute"]
XIDS = [13, 31, 43, 45, 48, 79, 95, 119, 145, 149]


class Rack(World):
    """A world whose hardware stays as it is until it is mended, and which judges every decision as it is made."""

    def __init__(self, whole: Fleet) -> None:
        self.sick: dict[Key, Finding] = {}
        self.was: dict[Key, Finding] = {}  # everything that was ever sick
        self.fine: dict[Key, int] = {}  # what nodes have told last: fine samples in a row; 0: bad
        self.events: set[Component] = set()  # places of kernel lines
        self.boots = dict.fromkeys(NODES, 1)
        self.silent: set[str] = set()
        self.refusing: set[str] = set()  # workers that do not answer a look
        self.ends: dict[str, bool | None] = {}  # how an effect ends: by its type's name, or a repair's action; True unless said
        self.cures = True
        self.slow: set[str] = set()  # types of effects that do not end yet
        self.calling: set[str] = set()
        self.version = 0
        self.begun: dict[str, Drain] = {}
        self.ok_keys: set[str] = set()
        self.everything: list[tuple[AnyEvent, list[AnyInstruction]]] = []
        super().__init__(whole)
        self.outcomes = self._ends
        self.held = lambda e: type(e).__name__ in self.slow

    # -- the hardware -------------------------------------------------------------------------------------------------

    def tell(self, node: str, *more: Finding, workers: tuple[WorkerSeen, ...] = (), place: Place | None = None) -> None:
        """What an agent says with every heartbeat: all that is bad, and what was bad once and is fine."""
        states = [
            msgspec.structs.replace(f, at=self.now, present=key in self.sick) for key, f in self.was.items() if key[0].node == node
        ]
        self._n += 1
        report = Report(
            node=node, session="s", seq=self._n, at=self.now, boot_id=f"boot-{self.boots[node]}", workers=workers, place=place,
            findings=(*states, *more),
        )  # fmt: skip
        for f in report.findings:
            if f.kind is Kind.EVENT:
                self.events.add(f.component)
            else:
                key = (f.component, f.check)
                self.fine[key] = 0 if f.present else self.fine.get(key, 0) + 1
        self.handle(Reported(id=self._id(), at=self.now, report=report))

    def breaks(self, found: Finding) -> None:
        self.sick[found.component, found.check] = self.was[found.component, found.check] = found

    def mend(self, where: Component) -> None:
        for key in [k for k in self.sick if where.covers(k[0])]:
            del self.sick[key]

    def live(self, seconds: float, step: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += min(step, end - self.now)
            for node in NODES:
                if node not in self.silent:
                    self.tell(node)
            self.handle(Tick(id=self._id(), at=self.now))
            self.settle()

    def _ends(self, effect: AnyEffect) -> bool | None:
        kind = type(effect).__name__
        if kind == "Look":
            return False if effect.worker in self.refusing else self.ends.get(kind, True)  # type: ignore[union-attr]
        ok = self.ends.get(effect.action.value, True) if isinstance(effect, Repair) else self.ends.get(kind, True)
        if ok and self.cures:
            if isinstance(effect, Repair):
                where = Component.parse(effect.target)
                self.mend(Component(node=where.node) if effect.action in NODE_WIDE else where)
            elif isinstance(effect, StartWorker):
                worker = self.decider.p.workers.get(effect.worker)  # asked for before it left the configuration
                for node in worker.nodes if worker is not None else ():
                    self.mend(Component(node=node, device=f"worker@{effect.worker}"))
        if ok and isinstance(effect, Repair) and effect.action in (Action.REBOOT_NODE, Action.POWER_CYCLE):
            self.boots[effect.node] = self.boots.get(effect.node, 1) + 1
        return ok

    def _carry_out(self, effect: AnyEffect) -> None:
        super()._carry_out(effect)
        if self.told[-1][1] and not isinstance(effect, SendPage):
            key = effect_key(effect)
            assert key not in self.ok_keys, f"{key} was carried out twice"
            self.ok_keys.add(key)

    # -- judging ------------------------------------------------------------------------------------------------------

    def handle(self, event: AnyEvent) -> list[AnyInstruction]:
        busy = {e.node: e for e in self.pending.values() if isinstance(e, Repair)}
        if isinstance(event, Done) and (e := self.pending.get(event.instruction)) and isinstance(e, Repair):
            busy.pop(e.node, None)
        out = super().handle(event)
        self.everything.append(self.journal.pop())
        for instruction in out:
            if isinstance(instruction, Record) and isinstance(instruction.value, Drain):
                self._judge_drain(instruction.value)
            elif isinstance(instruction, Record) and isinstance(instruction.value, Routes):
                assert instruction.value.version > self.version
                self.version = instruction.value.version
            elif isinstance(instruction, SendPage):
                self._judge_page(instruction)
            elif isinstance(instruction, Repair):
                assert instruction.node not in busy or effect_key(busy[instruction.node]) == effect_key(instruction), "two repairs"
                busy[instruction.node] = instruction
                self._judge_repair(instruction)
            elif isinstance(instruction, StartWorker) and "#" not in instruction.id:
                worker = self.decider.p.workers.get(instruction.worker)
                assert worker is not None, f"{instruction.worker} is started though nobody has it"
                assert not self.decider.p.held(worker, "out"), f"{worker.name} is started though it is held out"
                assert not any(r.node in worker.nodes for r in busy.values() if r.action in NODE_WIDE), "started under a repair"
        return out

    def _judge_drain(self, drain: Drain) -> None:
        before, p = self.begun.get(drain.id), self.decider.p
        self.begun[drain.id] = drain
        worker = p.workers.get(drain.worker)
        if worker is None:
            return
        anew = drain.state in (S.REQUESTED, S.DEROUTED, S.STOPPING)  # OUT: what was to put it back has failed
        begins = before is None or (before.state in (S.EASED, S.RETURNING) and anew)
        if begins and drain.kind == "drain" and drain.by == "sentinel" and drain.state not in ENDED:
            assert p.policy.mode is Mode.ENFORCE or drain.state is S.OUT, f"{drain} begun in {p.policy.mode}"
            assert not p.held(worker, "in"), f"{worker.name} is drained though it is held in"
            assert drain.state is S.OUT or self._reason(drain, worker), f"nothing is wrong with {worker.name}: {drain}"
            if drain.doubtful:
                self._judge_budget(drain, worker)
        returns = drain.state in (S.RETURNING, S.DONE) and (before is None or before.state not in (S.RETURNING, S.DONE))
        if returns and drain.kind != "retire":
            assert not p.held(worker, "out"), f"{worker.name} returns though it is held out: {drain}"

    def _reason(self, drain: Drain, worker: Worker) -> bool:
        """Whether a node has told something of this worker's place that it has not taken back, or the node itself is silent."""
        p = self.decider.p
        places = [Component(node=n) for n in worker.nodes]
        told = any(fine < 2 for (where, _), fine in self.fine.items() if any(p.covers(where) for p in places))
        lines = any(p.covers(where) for where in self.events for p in places)
        silent = any(self.now - p.nodes[n].heard_at >= p.policy.timing.silent_after for n in worker.nodes if n in p.nodes)
        return told or lines or silent

    def _judge_budget(self, drain: Drain, worker: Worker) -> None:
        p = self.decider.p
        if worker.pool not in p.pools:
            return
        standing, pool = survey(p)[worker.pool], p.pools[worker.pool]
        for role in roles_of(worker):
            total = standing.total.get(role, 0.0)
            measured = self.decider.capacity.needs(pool.name, role) is not None
            line = pool.floor * (standing.whole if measured else total)
            mine = [w for w in p.workers.values() if w.pool == pool.name and role in roles_of(w)]
            table = self.decider.capacity.table
            unconfirmed = sum(table.given(w) for w in mine if (d := p.open_drain(w.name)) and d.state is S.RETURNING)
            assert standing.ready.get(role, 0.0) - unconfirmed >= line - NEAR, f"{worker.name} crossed the floor of {role}"
            out = sum(
                table.worth(w) * (1.0 - p.keeps(d.response)) for w in mine if (d := p.open_drain(w.name)) and d.doubtful
            )
            assert total <= 0 or out <= pool.max_share * total + NEAR, f"{worker.name} crossed max_share of {role}"

    def _judge_page(self, effect: SendPage) -> None:
        page, p = effect.page, self.decider.p
        if page.details.get("update"):
            return
        if page.event == "resolve":
            self.calling.discard(page.dedup_key)
        elif page.event == "trigger":
            assert page.dedup_key not in self.calling, f"paged twice: {page}"
            self.calling.add(page.dedup_key)
            assert p.policy.mode is not Mode.OBSERVE, f"paged while observing: {page.summary}"
            where = page.component.partition("/")[0]
            worker = p.workers.get(page.component)
            for node in worker.nodes if worker else (where,):
                hold = p.holds.get(node)
                assert hold is None or not hold.planned or (hold.until or 0) <= self.now, f"{node} is worked on: {page.summary}"

    def _judge_repair(self, effect: Repair) -> None:
        p = self.decider.p
        drain = p.drains[effect.id.partition("/")[0]]
        where = Component.parse(effect.target)
        hit = p.on_node(where.node) if effect.action in NODE_WIDE else p.touching(where)
        serving = [w.name for w in hit if self.state_of(w.name) in SERVING]
        assert not serving, f"{effect.action} of {effect.target} for {drain.worker} hits {serving}"


class Everything(Walk):
    """Faults that last, people, work on racks, rules, failing repairs, other configurations, leaders and time, in any order."""

    @initialize(floor=st.sampled_from([0.0, 0.5, 0.5, 0.75]), share=st.sampled_from([1.0, 1.0, 0.4]))
    def begin(self, floor: float, share: float) -> None:
        self.world = Rack(fleet(floor, share))
        self.whole = self.world.fleet
        self.told: list[str] = []

    # -- faults -------------------------------------------------------------------------------------------------------

    @rule(node=st.sampled_from([*NODES, *HOT, *HOT]), gpu=st.integers(0, 3), what=st.sampled_from(sorted(GPU)))
    def gpu_breaks(self, node: str, gpu: int, what: str) -> None:
        check, severity, action, certainty = GPU[what]
        where = gpu_component(node, PCIS[gpu])
        w = self.world
        w.breaks(w.state(check, where, severity=severity, action=action, certainty=certainty))
        w.tell(node)
        w.settle()

    @rule(node=st.sampled_from([*NODES, *HOT, *HOT]), gpu=st.integers(0, 3), code=st.sampled_from(XIDS))
    def line(self, node: str, gpu: int, code: int) -> None:
        more: dict[str, object] = {}
        if code in (13, 31, 43, 45):
            more = {"severity": Severity.INFO, "suspect": Suspect.APP, "action": Action.RESTART_WORKER}
        elif code == 145:
            more = {"severity": Severity.WARNING, "suspect": Suspect.PEER, "action": Action.WAIT}
        elif code == 79:
            more = {"action": Action.REBOOT_NODE}
        self.world.tell(node, self.world.xid(code, node, gpu, **more))
        self.world.settle()

    @rule(nodes=st.sets(st.sampled_from(NODES), min_size=1, max_size=6), link=st.integers(0, 3), gpu=st.integers(0, 3))
    def links_down(self, nodes: set[str], link: int, gpu: int) -> None:
        w = self.world
        for node in sorted(nodes):
            where = msgspec.structs.replace(gpu_component(node, PCIS[gpu]), part=f"nvlink{link}")
            words = {"severity": Severity.FATAL, "action": Action.RESET_GPU, "certainty": 0.9, "facts": {"link": link}}
            w.breaks(w.state("gpu.nvlink_down", where, **words))
            w.tell(node)
            w.settle()

    @rule(nodes=st.sets(st.sampled_from(NODES), min_size=1, max_size=6))
    def rails_down(self, nodes: set[str]) -> None:
        w = self.world
        for node in sorted(nodes):
            where = Component(node=node, device="ib@mlx5_0", part="port1")
            w.breaks(w.state("ib.port_down", where, severity=Severity.FATAL, action=Action.INSPECT, certainty=0.9))
            w.tell(node)
            w.settle()

    @rule(node=st.sampled_from([*NODES, *HOT, *HOT]), fatal=st.booleans())
    def driver_hangs(self, node: str, fatal: bool) -> None:
        w = self.world
        severity = Severity.FATAL if fatal else Severity.WARNING
        w.breaks(w.state("driver.hung", Component(node=node, device="driver"), severity=severity, action=Action.REBOOT_NODE))
        w.tell(node)
        w.settle()

    @rule(worker=st.sampled_from(WORKERS), check=st.sampled_from(["worker.frozen", "worker.unreachable", "worker.dead"]))
    def engine_breaks(self, worker: str, check: str) -> None:
        w = self.world
        node = next(x.nodes[0] for x in WHOLE.workers if x.name == worker)
        where = Component(node=node, device=f"worker@{worker}")
        doubt = {"severity": Severity.FATAL, "suspect": Suspect.APP, "action": Action.RESTART_WORKER, "certainty": 0.95}
        w.breaks(w.state(check, where, **doubt))
        w.tell(node)
        w.settle()

    @rule(nodes=st.sets(st.sampled_from(NODES), min_size=1, max_size=10))
    def upgrade(self, nodes: set[str]) -> None:
        for node in sorted(nodes):
            self.world.breaks(self.world.mismatch(node))
            self.world.tell(node)

    @rule(node=st.sampled_from([*NODES, *HOT, *HOT]), gpu=st.sampled_from([None, 0, 1, 2, 3]), told=st.booleans())
    def mends(self, node: str, gpu: int | None, told: bool) -> None:
        self.world.mend(Component(node=node) if gpu is None else gpu_component(node, PCIS[gpu]))
        if told:
            self.world.tell(node)
            self.world.settle()

    @rule(node=st.sampled_from([*NODES, *HOT, *HOT]))
    def reboots(self, node: str) -> None:
        self.world.boots[node] += 1
        self.world.tell(node)
        self.world.settle()

    # -- what is said of places ---------------------------------------------------------------------------------------

    @rule(node=st.sampled_from(["t07", "t07", "t10", "t03"]), gpus=st.sampled_from([(0, 1, 2, 3), (0,), (2, 3), ()]))
    def worker_is_learned(self, node: str, gpus: tuple[int, ...]) -> None:
        self.world.tell(node, workers=(WorkerSeen(worker="learned", gpus=tuple(PCIS[g] for g in gpus)),))
        self.world.settle()

    @rule(node=st.sampled_from(NODES), as_if=st.sampled_from(NODES), domain=st.sampled_from(["d1", "d2"]))
    def place(self, node: str, as_if: str, domain: str) -> None:
        """Where a node stands; sometimes it claims the GPUs of another."""
        gpus = tuple(GpuPlace(pci=p, uuid=f"GPU-{as_if}-{p}") for p in PCIS)
        self.world.tell(node, place=Place(chassis="1" if node < "t07" else "2", domain=domain * 16, clique=1, gpus=gpus))
        self.world.settle()

    # -- people -------------------------------------------------------------------------------------------------------

    @rule(
        verb=st.sampled_from(["drain", "undrain", "hold", "release"]),
        whom=st.sampled_from([*WORKERS, *NODES, f"t03/gpu@{PCIS[0]}"]),
        keep=st.sampled_from(["in", "out"]),
        until=st.sampled_from([None, 30, 2000]),
    )
    def person(self, verb: str, whom: str, keep: str, until: float | None) -> None:
        self.world.ask(verb, whom, keep=keep, until=until and self.world.now + until)

    @rule(where=st.sampled_from([*NODES, *HOT, "r1", "r2"]), until=st.sampled_from([None, 20, 600, 5000]))
    def maintain(self, where: str, until: float | None) -> None:
        self.world.ask("maintain", where, until=until and self.world.now + until)

    @rule(verb=st.sampled_from(["acknowledge", "resolve"]), which=st.integers(0, 20))
    def answers(self, verb: str, which: int) -> None:
        incidents = self.world.open_incidents()
        if incidents:
            self.world.ask(verb, incidents[which % len(incidents)].id)

    # -- rules and configurations -------------------------------------------------------------------------------------

    @rule(
        mode=st.sampled_from(["enforce", "enforce", "observe", "advise"]),
        reboots=st.booleans(),
        remap=st.sampled_from(["drain", "evict", "cordon", "steer", "none"]),
        budgeted=st.booleans(),
    )
    def policy_changes(self, mode: str, reboots: bool, remap: str, budgeted: bool) -> None:
        text = default_policy_text().replace('mode = "enforce"', f'mode = "{mode}"', 1)
        if reboots:
            text = text.replace("[repair.reboot_node]\nauto = false", "[repair.reboot_node]\nauto = true")
        own = 'fault = "row-remap-pending"\nresponse = "drain"\n'
        new = own.replace('"drain"', f'"{remap}"') + ("" if budgeted else "budgeted = false\n")
        if remap in ("cordon", "steer", "none"):
            paged = 'page = "warning"\npage_after = "30m"'
            text = text.replace(f'repair = "reset_gpu"\n{paged}', paged)
            text = text.replace('deadline = "120s"  ', "#  ")
        self.world.use_policy(text.replace(own, new))

    @rule(
        gone=st.sets(st.sampled_from(WORKERS), max_size=2),
        moved=st.sampled_from(["", "decode-1", "half-a", "spill-1"]),
        to=st.sampled_from(["t10", "t04"]),
        pool=st.sampled_from(["", "", "overflow", "main"]),
        share=st.sampled_from([0.34, 1.0]),
    )
    def fleet_reloaded(self, gone: set[str], moved: str, to: str, pool: str, share: float) -> None:
        """Fewer workers, one that stands somewhere else or belongs to the other pool, nodes that left."""
        workers = []
        for w in self.whole.workers:
            gpus = tuple(gpu_component(to, g.gpu or "") for g in w.gpus)
            there = msgspec.structs.replace(w, nodes=(to,), gpus=gpus, pool=pool or w.pool) if w.name == moved else w
            if w.name not in gone:
                workers.append(there)
        pools = tuple(msgspec.structs.replace(p, max_domain_share=share) for p in self.whole.pools)
        nodes = tuple(sorted({n for w in workers for n in w.nodes}))
        self.world.reload(msgspec.structs.replace(self.whole, workers=tuple(workers), nodes=nodes, pools=pools))

    @rule()
    def fleet_restored(self) -> None:
        self.world.reload(self.whole)

    # -- effects, time, leaders ---------------------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from([*EFFECTS, "ScaleOut", "Look", "reset_gpu", "reboot_node"]),
        ok=st.sampled_from([True, False, None]),
    )
    def effects_end(self, kind: str, ok: bool | None) -> None:
        self.world.ends[kind] = ok

    @rule(kind=st.sampled_from([*EFFECTS, "Repair", "SendPage", ""]))
    def effects_wait(self, kind: str) -> None:
        """One more kind does not end for now; "": all end."""
        if kind:
            self.world.slow.add(kind)
        else:
            self.world.slow.clear()
            self.world.settle()

    @rule(cures=st.booleans())
    def repairs_cure(self, cures: bool) -> None:
        self.world.cures = cures

    @rule(which=st.integers(0, 50), ok=st.sampled_from([True, False, None]))
    def an_end_is_told_again(self, which: int, ok: bool | None) -> None:
        """A Done that was told before, or of something that nobody asked for, changes nothing."""
        w = self.world
        ended = [e.id for e in w.done if e.id not in w.pending] or ["drain-9-9/stop/0"]
        before = msgspec.json.encode([w.decider.p.drains, w.decider.p.incidents])
        w.handle(Done(id=w._id(), at=w.now, instruction=ended[which % len(ended)], ok=ok))
        assert msgspec.json.encode([w.decider.p.drains, w.decider.p.incidents]) == before

    @rule(worker=st.sampled_from(WORKERS), reachable=st.sampled_from([True, False, None]), load=st.sampled_from([None, 0, 5]))
    def look(self, worker: str, reachable: bool | None, load: int | None) -> None:
        (self.world.refusing.add if reachable is False else self.world.refusing.discard)(worker)
        for _ in range(3):
            self.world.watched(worker, reachable, load)

    @rule(nodes=st.sets(st.sampled_from(NODES), max_size=3), all_of_them=st.sampled_from([False, False, False, True]))
    def silent(self, nodes: set[str], all_of_them: bool) -> None:
        self.world.silent = set(NODES) if all_of_them else set(nodes)

    @rule(seconds=st.sampled_from([1, 7, 40, 40, 700, 2000]))
    def time(self, seconds: int) -> None:
        self.world.live(seconds, step=max(1, seconds // 40))

    @rule(seconds=st.sampled_from([600, 90_000]))
    def nothing_is_heard(self, seconds: int) -> None:
        """The controller stood still, or its clock was set."""
        self.world.now += seconds

    @rule()
    def leader_changes(self) -> None:
        self.world.lead()

    # -- how it ends --------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        w = self.world
        w.slow.clear()
        w.ends.clear()
        w.silent.clear()
        w.refusing.clear()
        w.cures = False
        w.settle()
        w.use_policy(default_policy_text())
        w.reload(LOOSE)
        for node in NODES:
            self.place(node, node, "d1" if node < "t07" else "d2")
        for worker in WORKERS:
            for _ in range(3):
                w.watched(worker, reachable=True)
        while w.decider.p.holds:  # below one there may be another
            w.ask("release", next(iter(w.decider.p.holds)))
        w.live(5000, step=20)
        self._nothing_bad_was_left_in_service()
        w.sick.clear()
        w.cures = True
        w.live(100, step=5)
        for _ in range(2):  # what a person had drained, or what sentinel had left to a person
            for incident in w.open_incidents():
                w.ask("resolve", incident.id)
            for worker in WORKERS:
                w.ask("undrain", worker)
            w.live(100, step=5)
        w.live(4000, step=20)
        p = w.decider.p
        assert p.open_drains() == []
        assert w.open_incidents() == []
        assert not w.pending
        assert not w.calling
        assert {x.name for x in p.workers.values() if not x.standby and w.state_of(x.name) is not WorkerState.ACTIVE} == set()
        assert w.weight("main") == 1.0
        lines = [SimpleNamespace(event=e, instructions=tuple(out), checkpoint=False) for e, out in w.everything]
        proof = prove(lines, lambda: Decider(default_policy()))
        assert proof.same, proof.differing[0]

    def _nothing_bad_was_left_in_service(self) -> None:
        """With room in every budget, what is measured bad and calls for a drain is out, or somebody knows why it is not."""
        w = self.world
        p = w.decider.p
        for (where, check), found in w.sick.items():
            rule = p.rules.rule_for(found)
            if rule is None or rule.response not in (Response.DRAIN, Response.EVICT):
                continue
            for worker in p.touching(where):
                if w.state_of(worker.name) not in SERVING:
                    continue
                about = [i for i in w.open_incidents() if any(f.check == check and f.component == where for f in i.findings)]
                scope = [i for i in w.open_incidents() if i.scope or i.culprit == "fleet"]
                by_hand = any(
                    s.what in ("released", "undrain", "held in") or "undrained by" in s.why or "held in by" in s.why
                    for d in p.drains.values() if d.worker == worker.name for s in d.history
                )  # fmt: skip
                assert scope or by_hand or any(i.paged for i in about), (
                    f"{check} on {where}: {worker.name} serves, {[(i.key, [(s.what, s.why) for s in i.history]) for i in about]}"
                )

    # -- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def nothing_serves_that_was_taken_out(self) -> None:
        """The published table agrees with the drains."""
        if not hasattr(self, "world"):
            return
        p = self.world.decider.p
        for worker in p.workers.values():
            drain = p.open_drain(worker.name)
            if drain and drain.kind == "drain" and drain.state not in (*ENDED, S.RETURNING) and not gentle(drain):
                assert self.world.state_of(worker.name) not in SERVING, drain

    @invariant()
    def nobody_else_would_decide_otherwise(self) -> None:
        """A leader that takes over now does nothing a second time: no new drain of who is out, no call that rings already."""
        if not hasattr(self, "world"):
            return
        w = self.world
        heir = World.__new__(World)
        heir.__dict__.update({**w.__dict__, "journal": [], "store": dict(w.store), "pending": dict(w.pending)})
        heir._epoch += 1000
        heir.settle = lambda: None  # type: ignore[method-assign]
        out: list[AnyInstruction] = []
        heir.handle = lambda e: out.extend(o := World.handle(heir, e)) or o  # type: ignore[method-assign, func-returns-value]
        heir.lead()
        heir.handle(Tick(id="heir", at=w.now))
        for instruction in out:
            if isinstance(instruction, Record) and isinstance(instruction.value, Drain):
                drain = instruction.value
                if drain.id not in w.begun and drain.kind == "drain":
                    there = w.decider.p.open_drain(drain.worker)
                    assert there is None or there.kind != "drain", drain
            elif isinstance(instruction, SendPage):
                page = instruction.page
                rings = page.event == "trigger" and not page.details.get("update")
                assert not rings or page.dedup_key not in w.calling, instruction
            elif isinstance(instruction, Effect):
                assert effect_key(instruction) not in w.ok_keys, instruction


Everything.TestCase.settings = settings(
    max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEverything = Everything.TestCase

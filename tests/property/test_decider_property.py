"""What holds of the decider whatever happens, in whatever order, and whoever leads."""

from __future__ import annotations

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from sentinel.decide.decider import Decider
from sentinel.decide.rules.policy import Mode
from sentinel.decide.rules.policy_file import default_policy_text, load_policy
from sentinel.decide.state.events import (
    AnyEvent,
    AnyInstruction,
    PolicyLoaded,
    Record,
    Repair,
    Reroute,
    SendPage,
    StartWorker,
    StopWorker,
)
from sentinel.decide.state.moves import MOVES, gentle
from sentinel.decide.state.picture import ENDED, effect_key
from sentinel.decide.state.planned import known_to
from sentinel.model import Action, Component, Drain, DrainState, Response, Severity, Suspect, WorkerState, gpu_component
from sentinel.testing.decisions import PCIS, World, rack
from tests.property.walk import WalkWithHolds

WORKERS = ["prefill-1", "decode-1", "decode-2", "decode-3", "decode-4", "spill-1", "spill-2"]
NODES = [f"t{n:02d}" for n in range(1, 9)]
EVENTS = msgspec.json.Decoder(AnyEvent)


class Fleet(WalkWithHolds):
    """Faults, looks, people, failing effects, passing time and changing leaders, in any order."""

    @initialize(floor=st.sampled_from([0.0, 0.5, 0.75, 1.0]))
    def begin(self, floor: float) -> None:
        self.world = World(rack(floor=floor))
        self.mirror()
        self.floor = floor
        self.whole = self.world.fleet  # before any reload
        self.moves: dict[str, DrainState] = {}
        self.mode = Mode.ENFORCE

    # -- what happens -------------------------------------------------------------------------------------------------

    @rule(node=st.sampled_from(NODES), gpu=st.integers(0, 3), code=st.sampled_from([13, 31, 43, 45, 48, 79, 95, 119, 149]))
    def line(self, node: str, gpu: int, code: int) -> None:
        app = {"severity": Severity.INFO, "suspect": Suspect.APP, "action": Action.RESTART_WORKER}
        self.world.report(self.world.xid(code, node, gpu, **(app if code in (13, 31, 43, 45) else {})))

    @rule(node=st.sampled_from(NODES), gpu=st.integers(0, 3), present=st.booleans())
    def remap(self, node: str, gpu: int, present: bool) -> None:
        where = gpu_component(node, PCIS[gpu])
        self.world.report(self.world.state("gpu.row_remap_pending", where, present, action=Action.RESET_GPU))

    @rule(nodes=st.sets(st.sampled_from(NODES), max_size=5), link=st.integers(5, 7), gpu=st.integers(0, 1), present=st.booleans())
    def links(self, nodes: set[str], link: int, gpu: int, present: bool) -> None:
        words = {"severity": Severity.FATAL, "action": Action.RESET_GPU, "certainty": 0.9, "facts": {"link": link}}
        for node in sorted(nodes):
            where = msgspec.structs.replace(gpu_component(node, PCIS[gpu]), part=f"nvlink{link}")
            down = self.world.state("gpu.nvlink_down", where, present, **words)
            self.world.report(down, down)

    @rule(nodes=st.sets(st.sampled_from(NODES), max_size=5), present=st.booleans())
    def rails(self, nodes: set[str], present: bool) -> None:
        for node in sorted(nodes):
            where = Component(node=node, device="ib@mlx5_0", part="port1")
            down = self.world.state("ib.port_down", where, present, severity=Severity.FATAL, action=Action.INSPECT, certainty=0.9)
            self.world.report(down, down)

    @rule(nodes=st.sets(st.sampled_from(NODES), max_size=5), gpu=st.integers(0, 3))
    def echo(self, nodes: set[str], gpu: int) -> None:
        for node in sorted(nodes):
            self.world.report(self.world.xid(145, node, gpu, severity=Severity.WARNING, suspect=Suspect.PEER, action=Action.WAIT))

    @rule(worker=st.sampled_from(WORKERS), check=st.sampled_from(["worker.frozen", "worker.unreachable"]), present=st.booleans())
    def engine(self, worker: str, check: str, present: bool) -> None:
        node = next(w.nodes[0] for w in self.whole.workers if w.name == worker)
        where = Component(node=node, device=f"worker@{worker}")
        doubt = {"severity": Severity.FATAL, "suspect": Suspect.APP, "action": Action.RESTART_WORKER, "certainty": 0.95}
        self.world.report(self.world.state(check, where, present, **doubt))

    @rule(node=st.sampled_from(NODES), present=st.booleans())
    def mismatch(self, node: str, present: bool) -> None:
        self.world.report(self.world.mismatch(node, present))

    @rule(node=st.sampled_from(NODES), gpu=st.integers(0, 3), present=st.booleans())
    def degrades(self, node: str, gpu: int, present: bool) -> None:
        """What works and gets worse: steered when it lasts."""
        where = gpu_component(node, PCIS[gpu])
        self.world.report(self.world.state("gpu.nvlink_crc", where, present, certainty=0.9, action=Action.INSPECT))

    @rule(mode=st.sampled_from(["enforce", "enforce", "observe", "advise"]), observed=st.sampled_from(["", "row-remap-pending"]))
    def policy_changes(self, mode: str, observed: str) -> None:
        """Other rules while everything goes on: another mode, and one class of faults with a mode of its own."""
        text = default_policy_text().replace('mode = "enforce"', f'mode = "{mode}"', 1)
        self.world.use_policy(text.replace(f'fault = "{observed}"\n', f'fault = "{observed}"\nmode = "observe"\n'))

    @rule(worker=st.sampled_from(WORKERS), reachable=st.sampled_from([True, False, None]), load=st.sampled_from([None, 0, 5]))
    def look(self, worker: str, reachable: bool | None, load: int | None) -> None:
        self.world.watched(worker, reachable, load)

    @rule(node=st.sampled_from(NODES), seconds=st.sampled_from([None, None, 30, 600]))
    def maintain(self, node: str, seconds: int | None) -> None:
        self.world.ask("maintain", node, until=None if seconds is None else self.world.now + seconds)

    @rule(
        verb=st.sampled_from(["drain", "undrain", "hold", "release"]),
        whom=st.sampled_from([*WORKERS, *NODES]),
        keep=st.sampled_from(["in", "out"]),
    )
    def person(self, verb: str, whom: str, keep: str) -> None:
        self.world.ask(verb, whom, keep=keep)
        p = self.world.decider.p
        if verb == "drain" and whom in p.workers:  # whatever the mode says
            drain = p.open_drain(whom)
            assert drain is not None and drain.kind == "drain" and not drain.returns
            assert self.world.state_of(whom) not in (WorkerState.ACTIVE, WorkerState.CORDONED)

    @rule(seconds=st.sampled_from([1, 7, 40, 700]), silent=st.sets(st.sampled_from(NODES)))
    def time(self, seconds: int, silent: set[str]) -> None:
        self.world.pass_time(seconds, step=max(1, seconds // 20), reporting=[n for n in NODES if n not in silent])

    @rule(outcome=st.sampled_from([True, True, False, None]))
    def effects_go(self, outcome: bool | None) -> None:
        self.world.outcomes = lambda effect: outcome

    @rule(hold=st.booleans())
    def effects_wait(self, hold: bool) -> None:
        self.world.held = lambda effect: hold
        self.world.settle()

    @rule(gone=st.sets(st.sampled_from(WORKERS), max_size=4), pool=st.booleans())
    def fleet_reloaded(self, gone: set[str], pool: bool) -> None:
        """The configuration names fewer workers than it did, or all of them again; the overflow pool may go as a whole."""
        fleet = self.whole
        if pool:
            gone = gone | {w.name for w in fleet.workers if w.pool == "overflow"}
            pools = tuple(msgspec.structs.replace(p, overflow=()) for p in fleet.pools if p.name == "main")
            fleet = msgspec.structs.replace(fleet, pools=pools)
        workers = tuple(w for w in fleet.workers if w.name not in gone)
        nodes = tuple(sorted({n for w in workers for n in w.nodes}))
        self.world.reload(msgspec.structs.replace(fleet, workers=workers, nodes=nodes))
        self.world.pass_time(1)

    # -- how it ends --------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Once everything is mended and every person lets go, everything serves again and nothing is left over."""
        self.alone()
        w = self.world
        w.held, w.outcomes = (lambda effect: False), (lambda effect: True)
        w.settle()
        w.use_policy(default_policy_text())
        w.reload(self.whole)
        w.pass_time(20)
        while w.decider.p.holds:  # below one there may be another
            w.ask("release", next(iter(w.decider.p.holds)))
        for _ in range(3):  # what a hold kept in is taken out when it is released, and what is out waits for a person
            for where in [c.finding.component for c in w.decider.p.conditions.present()]:
                fine = [w.state(c.finding.check, where, False) for c in w.decider.p.conditions.under(where)]
                w.report(*fine, *fine)
            for incident in w.open_incidents():
                w.ask("resolve", incident.id)
            for worker in WORKERS:
                w.ask("undrain", worker)
            w.pass_time(60)
        w.pass_time(3000, step=5)
        p = w.decider.p
        assert p.open_drains() == []
        assert w.open_incidents() == []
        assert not w.pending
        assert {x.name for x in p.workers.values() if not x.standby and w.state_of(x.name) is not WorkerState.ACTIVE} == set()
        assert w.weight("main") == 1.0

    # -- what always holds ----------------------------------------------------------------------------------------------

    @invariant()
    def drains_follow_the_table(self) -> None:
        """Every recorded change of state is a move of the table (or a cancelled standby), begun only where the mode lets it."""
        if not hasattr(self, "world"):
            return
        for event, out in self.world.journal:
            if isinstance(event, PolicyLoaded):
                self.mode = load_policy(event.text).mode
            for instruction in out:
                if isinstance(instruction, Record) and isinstance(instruction.value, Drain):
                    drain = instruction.value
                    before = self.moves.get(drain.id)
                    begins = before is None or (drain.state is DrainState.REQUESTED and before is not DrainState.REQUESTED)
                    # Below enforce sentinel takes nothing out, starts nothing and stands nothing down.
                    assert not begins or self.mode is Mode.ENFORCE or drain.by != "sentinel", drain
                    if before is not None and before is not drain.state and drain.state is not DrainState.CANCELLED:
                        assert _reachable(before, drain.state), f"{drain.id}: {before} → {drain.state}"
                    self.moves[drain.id] = drain.state
        self.world.journal.clear()

    @invariant()
    def no_key_is_used_for_two_rounds(self) -> None:
        """Every time a worker is stopped, started or repaired anew it is under a key of its own; an agent acts once per key."""
        if not hasattr(self, "world"):
            return
        acts = (StopWorker, StartWorker, Repair)
        settled = [effect_key(e) for e, ok in self.world.told if isinstance(e, acts) and ok is not None]
        assert len(settled) == len(set(settled))

    @invariant()
    def one_open_drain_per_worker(self) -> None:
        """Two drains never fight over one worker, and every open one says who wants it and why."""
        if hasattr(self, "world"):
            open_drains = self.world.decider.p.open_drains()
            assert len({d.worker for d in open_drains}) == len(open_drains)
            assert all(d.reason and d.history for d in open_drains)

    @invariant()
    def doubt_never_crosses_the_floor(self) -> None:
        """The latest automatic, doubtful drain left at least the floor in service when it was decided."""
        if not hasattr(self, "world"):
            return
        p = self.world.decider.p
        decoders = [w for w in p.workers.values() if w.pool == "main" and w.role.value == "decode"]
        doubtful = [w for w in decoders if (d := p.open_drain(w.name)) and d.doubtful]
        facts = [w for w in decoders if (d := p.open_drain(w.name)) and not d.doubtful]
        if doubtful and not facts and self.world.fleet is self.whole:
            lost = sum(1.0 - p.keeps(d.response) for w in doubtful if (d := p.open_drain(w.name)))
            assert len(decoders) - lost >= self.floor * len(decoders) - 1e-9

    @invariant()
    def open_drains_are_alive(self) -> None:
        """After a tick a drain waits for an effect, a person, a hold or a proof; never for nothing."""
        if not hasattr(self, "world"):
            return
        p = self.world.decider.p
        for drain in p.open_drains():
            waiting = any(i.startswith(f"{drain.id}/") for i in p.outstanding)
            parked = drain.state in (DrainState.OUT, DrainState.VERIFYING, DrainState.EASED)
            retrying = self.world.decider.drains.retries(drain.id)
            absent = drain.worker not in p.workers  # stands still until it is configured again, or is given up
            assert waiting or parked or retrying or absent or self.world.now == drain.since, drain

    @invariant()
    def whoever_is_left_to_a_person_is_told_of(self) -> None:
        """A worker that waits for a person has been called for once its rule's time is over, or the mode or a window forbids it."""
        if not hasattr(self, "world"):
            return
        p = self.world.decider.p
        fleet_wide = any(i.culprit == "fleet" for i in self.world.open_incidents())
        for drain in p.open_drains():
            incident = p.incidents.get(drain.incident)
            if drain.kind != "drain" or drain.by != "sentinel" or drain.state is not DrainState.OUT or drain.returns:
                continue
            if incident is None or incident.closed_at is not None or fleet_wide or drain.worker not in p.workers:
                continue  # a person has ended it, or one page is for all
            if known_to(p, incident.culprit) or any(s.what in ("would have", "called with") for s in incident.history):
                continue
            assert incident.paged or p.now - max(incident.opened_at, drain.since) < 2000, (drain, incident)

    @invariant()
    def pages_come_once(self) -> None:
        """Per incident at most one trigger and one resolve, the resolve never first."""
        if not hasattr(self, "world"):
            return
        for incident in self.world.incidents():
            mine = [page for page in self.world.pages if page.id.startswith(f"{incident.id}/")]
            events = [page.event for page in mine if not page.details.get("update")]
            assert events.count("trigger") <= 1
            assert events.count("resolve") <= 1

    @invariant()
    def nobody_is_called_twice_for_one_fault(self) -> None:
        """Between a call and its resolve, whatever an incident turns into, the same dedup key calls nobody again."""
        if not hasattr(self, "world"):
            return
        calling: set[str] = set()
        for page, ok in ((e.page, ok) for e, ok in self.world.told if isinstance(e, SendPage)):
            if page.event == "resolve":  # also one that nobody took: sentinel has done its part
                calling.discard(page.dedup_key)
            elif ok and page.event == "trigger" and not page.details.get("update"):
                assert page.dedup_key not in calling, page
                calling.add(page.dedup_key)

    @invariant()
    def a_scope_is_not_to_blame(self) -> None:
        """Nobody is out of service for an incident whose culprit is elsewhere and that asks for nobody's drain."""
        if not hasattr(self, "world"):
            return
        decider = self.world.decider
        for incident in self.world.open_incidents():
            assert incident.culprit not in incident.scope
            assert 0.0 <= incident.confidence <= 1.0
            if incident.fault in ("nvlink-switch", "nvlink-cartridge", "leaf-switch", "imex-peer"):
                assert not decider.incidents.demands(incident)

    @invariant()
    def nothing_serves_that_was_never_started(self) -> None:
        """A standby is in the table only after its start and its test."""
        if not hasattr(self, "world"):
            return
        p = self.world.decider.p
        for worker in p.workers.values():
            drain = p.open_drain(worker.name)
            if worker.standby and self.world.state_of(worker.name) is WorkerState.ACTIVE:
                assert worker.name in p.standby_up or (drain is not None and drain.verified), drain

    @invariant()
    def nothing_serves_that_was_taken_out(self) -> None:
        """The published table agrees with the drains."""
        if not hasattr(self, "world"):
            return
        p = self.world.decider.p
        for worker in p.workers.values():
            drain = p.open_drain(worker.name)
            if drain and drain.kind == "drain" and drain.state not in (*ENDED, DrainState.RETURNING) and not gentle(drain):
                assert self.world.state_of(worker.name) is not WorkerState.ACTIVE


def _reachable(before: DrainState, after: DrainState) -> bool:
    """Whether a few moves within one batch lead from one state to the other."""
    frontier, seen = {before}, {before}
    while frontier:
        frontier = {to for (start, _), to in MOVES.items() if start in frontier} - seen
        seen |= frontier
    return after in seen


Fleet.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
TestFleet = Fleet.TestCase


def test_replaying_the_journal_gives_the_same_decisions() -> None:
    """Events written down as JSON and fed to a fresh decider give byte for byte the same instructions."""
    w = World()
    w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
    w.report(w.state("gpu.row_remap_pending", gpu_component("t04", PCIS[1]), action=Action.RESET_GPU))
    w.pass_time(40, reporting=NODES[:6])
    w.ask("undrain", "decode-1")
    w.pass_time(10)
    again = Decider(w.policy)
    for event, out in w.journal:
        replayed: list[AnyInstruction] = again.handle(EVENTS.decode(msgspec.json.encode(event)))
        assert msgspec.json.encode(replayed) == msgspec.json.encode(out)


def test_no_effect_on_a_worker_before_it_left_rotation() -> None:
    """No worker is stopped or reset by sentinel while the published table still sends it traffic."""
    w = World()
    carry = w._carry_out

    def checked(effect) -> None:
        if isinstance(effect, StopWorker) or (isinstance(effect, Repair) and effect.action is Action.RESET_GPU):
            name = effect.worker if isinstance(effect, StopWorker) else w.decider.p.drains[effect.id.split("/")[0]].worker
            assert w.state_of(name) is not WorkerState.ACTIVE
        if isinstance(effect, Reroute):
            drain = w.drain_of(effect.worker)
            assert drain is not None and (drain.verified or drain.response is Response.DRAIN)
        carry(effect)

    w._carry_out = checked  # type: ignore[method-assign]
    for gpu in range(4):
        w.report(w.state("gpu.row_remap_pending", gpu_component(f"t0{3 + gpu}", PCIS[gpu]), action=Action.RESET_GPU))
        w.pass_time(3)
    assert w.did(StopWorker)

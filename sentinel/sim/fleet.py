"""A fleet of any size at report level around the real decider: what happens, what the agents say, what is done about it.

This module exists so that a policy can be tried on racks that nobody has. The decider, its policy, the probes' judgement and the
agents' memory are the real ones; readings, the network, the controllers' shell and the store are simulated (``World``). What
always holds:

* The same seed and the same calls give the same decisions: order within a second is drawn from the seed, time is the fleet's own.
* Every effect takes its time and ends as the simulated hardware lets it: a GPU that is lost cannot be started on, a node that is
  cut off answers nothing, a reset mends what a reset mends.
* What was broken on purpose is written down (``faults``), so that a drain of anything else is known to be wrong.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sentinel.decide.decider import Decider
from sentinel.decide.state.events import Record, Reported, Tick
from sentinel.decide.state.picture import ENDED
from sentinel.model import Component, Drain, Incident, Page, Report, Worker, WorkerState
from sentinel.model import Fleet as Plan
from sentinel.sim.hands import Fault, Hands
from sentinel.sim.readings import ImexDomain, Process
from sentinel.sim.relays import Relays
from sentinel.sim.tray import Tray
from sentinel.sim.wiring import groups, nodes_of, plan, rack_name
from sentinel.testing.decisions import World

SNAPSHOT_S, WATCH_S, LEASE_S = 5.0, 5.0, 3.0


@dataclass
class SimFleet:
    """``pool``: settings of the main pool. Use ``at`` and ``run``; then look."""

    racks: int = 1
    seed: int = 0
    rules: str = ""  # the text of another policy than the shipped one
    pool: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    idle_step: float = 5.0  # seconds at a time while nothing has moved for minutes
    calm_step: float = 0.0  # and while nothing is open either; 0: the same
    settles: tuple[float, float] = (45.0, 300.0)  # for so long it is looked at every second, and every five seconds
    replays: bool = True  # keep the journal

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.trays: dict[str, Tray] = {}
        self.incidents: dict[str, Incident] = {}  # every one ever, its latest word
        self.drains: dict[str, Drain] = {}
        self.faults: list[Fault] = []
        self.hands, self.relays = Hands(self), Relays(self)
        self.echoes: list[tuple[str, int]] = []  # (node, GPU) whose driver waits for a peer
        self.loads: dict[str, int] = {}  # worker → requests, where the fleet is to measure any
        self.cut: set[str] = set()  # nodes whose agents reach no controller
        self.dark: set[str] = set()  # workers that no look from the controller reaches
        self.late = self.repeat = 0.0  # shares of the reports
        self.refused: list[object] = []  # what a leader without a lease wanted
        self.lost_s = 0.0  # seconds in which sessions of the main pool could not be carried, as a share of it
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._n = self._at = self._seen = 0
        self._late: list[Report] = []
        self._away_until = self._stirred = 0.0
        self._told: dict[str, tuple[bool | None, int | None]] = {}
        self._watch_due = 0.0
        self._due: dict[str, float] = {}  # node → its next snapshot
        for rack in map(rack_name, range(1, self.racks + 1)):
            self.build(rack)
        self.world = World(self.plan or plan(self.racks, **self.pool))
        if self.rules:
            self.world.use_policy(self.rules)
        self.world.held, self.world.outcomes, self.world.seen = self.hands.under_way, self.hands.ends, self.hands.shown
        self.began = self.world.now
        self._observe()

    def build(self, rack: str) -> None:
        domain = ImexDomain()
        first: dict[str, list[str]] = {}
        for name, _, _, nodes, _ in groups(rack):
            first.setdefault(nodes[0], []).append(name)
        for number, node in enumerate(nodes_of(rack), 1):
            self.trays[node] = Tray(node, rack, number, domain, tuple(first.get(node, ())))
        for name, _, _, nodes, standby in groups(rack):
            self.trays[nodes[0]].processes[name].up = not standby

    # -- time ---------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.world.now

    def at(self, seconds: float, *what: Callable[[], object]) -> None:
        """Let something happen so long from now, one after the other."""
        for each in what:
            self._n += 1
            heapq.heappush(self._queue, (self.now + seconds, self._n, each))

    def run(self, seconds: float) -> None:
        """Let time pass: a second at a time while anything moves, in longer steps while nothing does."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            still = self.now - self._stirred
            step = 1.0 if still < self.settles[0] else 5.0 if still < self.settles[1] else max(5.0, self._idle())
            due = self._queue[0][0] - self.now if self._queue else step
            passed = max(1e-3, min(step, due, end - self.now))
            self.world.now += passed
            while self._queue and self._queue[0][0] <= self.now:
                heapq.heappop(self._queue)[2]()
                self.stir()
            self._step(passed)

    def _idle(self) -> float:
        """How long nothing can come of nothing: no tray has anything to tell, and the decider waits for nothing."""
        p = self.world.decider.p
        empty = self.calm_step and not p.open_drains() and not p.holds and not p.open_incidents()
        return self.calm_step if empty and not any(t.touched for t in self.trays.values()) else self.idle_step

    def stir(self) -> None:
        self._stirred = self.now

    def _step(self, passed: float) -> None:
        trays = list(self.trays.values())
        self.rng.shuffle(trays)
        for tray in trays:
            if tray.touched and tray.look(self.now):
                self.stir()
        if self.now < self._away_until:
            return
        for report in self._late:
            self._deliver(report)
        self._late = []
        for tray in trays:
            due = self._due.get(tray.node, 0.0) <= self.now
            if due:
                self._due[tray.node] = self.now + SNAPSHOT_S - 1.0 + self.rng.random()
            self._send(tray, snapshot=due)
        self._watch()
        self.world.handle(Tick(id=self._id(), at=self.now))
        self.world.settle()
        self._observe()
        self._count_lost(passed)

    def _send(self, tray: Tray, *, snapshot: bool) -> None:
        if not tray.talks or tray.node in self.cut:
            return
        for findings in tray.outbox:
            self._pass_on(tray.report(self.now, findings))
        tray.outbox.clear()
        if snapshot:
            self._pass_on(tray.report(self.now))

    def _pass_on(self, report: Report) -> None:
        """Through the network, which may bring a report a round late, behind newer ones, or twice; what is lost is sent again."""
        if self.rng.random() < self.late:
            self._late.append(report)
            return
        self._deliver(report)
        if self.rng.random() < self.repeat:
            self._late.append(report)

    def _deliver(self, report: Report) -> None:
        self.world.handle(Reported(id=self._id(), at=self.now, report=report))
        if self.world.pending:
            self.world.settle()

    def _watch(self) -> None:
        """The controller's own looks, where they show anything new or any load."""
        if self.now < self._watch_due:
            return
        self._watch_due = self.now + WATCH_S
        for worker in self.workers:
            shows = (self.reach(worker.name), self.loads.get(worker.name))
            if shows == self._told.get(worker.name, (True, None)) == (True, None):
                continue
            self._told[worker.name] = shows
            self.world.watched(worker.name, *shows)
        self.relays.tell()

    def _observe(self) -> None:
        for _, out in self.world.journal[self._seen :]:
            for instruction in out:
                if isinstance(instruction, Record):
                    self._note(instruction.key, instruction.value)
        self._seen = len(self.world.journal)
        if not self.replays:
            self.world.journal.clear()
            self.world.told.clear()
            self._seen = 0

    def _note(self, key: str, value: object) -> None:
        if isinstance(value, Incident):
            before = self.incidents.get(key)
            self.incidents[key] = value
            if before is None or (before.closed_at, before.paged, before.culprit) != (value.closed_at, value.paged, value.culprit):
                self.stir()
        elif isinstance(value, Drain):
            was = self.drains.get(key)
            self.drains[key] = value
            if was is None or was.state is not value.state:
                self.stir()

    def _count_lost(self, seconds: float) -> None:
        """What the main pool cannot carry now, whoever carries it instead."""
        if not self.world.decider.p.open_drains():
            return
        standing = self.world.decider.capacity.table.standing("main")
        if standing.whole > 0:
            self.lost_s += seconds * (1.0 - min(1.0, standing.carries / standing.whole))

    def _id(self) -> str:
        self._at += 1
        return f"s{self._at}"

    # -- controllers --------------------------------------------------------------------------------------------------

    def lose_leader(self, gap: float = 2 * LEASE_S) -> None:
        """The leader dies. Until another leads nobody decides; agents keep their news."""
        self._away_until = self.now + gap
        self.at(gap, self.world.lead)

    def isolate_leader(self, gap: float = 2 * LEASE_S, wakes: float = 60.0) -> None:
        """The leader is cut off from everybody, and goes on deciding; what it wants is refused, since its lease is another's."""
        old = Decider(self.world.policy)
        for event, _ in self.world.journal:
            old.handle(event)
        self.lose_leader(gap)
        for second in range(1, int(wakes)):
            self.at(float(second), lambda: self.refused.extend(old.handle(Tick(id=self._id(), at=self.now))))

    def end(self, fault: Fault) -> None:
        """It is mended."""
        fault.ended = self.now
        fault.mend()
        self.stir()

    # -- looking ------------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> tuple[Worker, ...]:
        return self.world.fleet.workers

    def worker(self, name: str) -> Worker:
        return next(w for w in self.workers if w.name == name)

    def home(self, worker: str) -> Tray:
        """The tray that starts and stops it."""
        return self.trays[self.worker(worker).nodes[0]]

    def process(self, worker: str) -> Process:
        return self.home(worker).processes[worker]

    def on(self, where: str) -> list[str]:
        """Workers that live on a written component, node or GPU."""
        return [w.name for w in self.world.decider.p.touching(Component.parse(where))]

    def reach(self, worker: str) -> bool | None:
        """What a look from the controller sees."""
        tray = self.home(worker)
        if worker in self.dark or not tray.powered:
            return None
        return self.process(worker).up

    def state(self, worker: str) -> WorkerState:
        return self.world.state_of(worker)

    def out(self) -> list[str]:
        """Workers of either pool that get nothing now, standbys left out."""
        return [w.name for w in self.workers if not w.standby and self.state(w.name) is WorkerState.OUT]

    def taken(self) -> Iterator[Drain]:
        """Everything that sentinel itself ever took out or eased."""
        return (d for d in self.drains.values() if d.kind == "drain" and d.by == "sentinel")

    def wrong_drains(self) -> list[Drain]:
        """Drains of workers that nothing was wrong with."""
        return [d for d in self.taken() if not any(d.worker in f.hurts and f.at <= d.requested_at for f in self.faults)]

    def called_off(self, drain: Drain) -> bool:
        """Whether it took traffic away for moments and nothing was stopped."""
        return drain.state in ENDED and all(s.what != "stopping" for s in drain.history)

    def pages(self) -> list[Page]:
        """Calls to a person: triggers, without the updates of an open page."""
        return [p for p in self.world.pages if p.event == "trigger" and not p.details.get("update")]

    def told(self) -> list[Incident]:
        """Every incident that was one: not those that were merged into another."""
        return [i for i in self.incidents.values() if not i.merged_into]

    def broken(self, kind: str, where: str, **more: Any) -> Fault:
        """Write down that something is broken from now on."""
        hurts = more.pop("hurts", None)
        fault = Fault(kind, where, self.now, frozenset(self.on(where) if hurts is None else hurts), **more)
        self.faults.append(fault)
        self.stir()
        return fault

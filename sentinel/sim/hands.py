"""What becomes of what the decider wants done: how long it takes in a simulated fleet, and how it ends.

This module exists so that effects meet the simulated hardware in one place. What always holds: nothing is carried out on a node
whose agent is not there or not reached (it gives no answer); what a repair mends is written with the fault, and a repair of
anything else succeeds and cures nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from sentinel.decide.state.events import AnyEffect, AwaitIdle, Effect, Look, Repair, StartWorker, StopWorker, Verify
from sentinel.model import Action, Component, WorkerSeen
from sentinel.sim.readings import Process
from sentinel.sim.tray import Tray

# How long things take, seconds. A GPU reset and an engine's start are those of hardware.md and the policy's comments; the rest is
# judgement. Keys: an effect's class, or the action of a Repair.
TAKES: dict[object, float] = {
    AwaitIdle: 20.0, StopWorker: 2.0, StartWorker: 60.0, Verify: 1.0, Action.RESET_GPU: 20.0, Action.REBOOT_NODE: 300.0,
    Action.POWER_CYCLE: 420.0, Action.RESTART_IMEX: 10.0, Action.RESTART_FABRIC_MANAGER: 10.0,
}  # fmt: skip
LOOK_S = 1.0  # how soon it is seen that an engine is gone and nothing is in flight any more


@dataclass(eq=False)
class Fault:
    """Something that was broken. ``where``: written component, worker, or whatever its culprit is called."""

    kind: str
    where: str
    at: float
    hurts: frozenset[str]  # workers that may rightly be taken out for it
    cured_by: frozenset[Action] = frozenset()
    mend: Callable[[], None] = lambda: None
    no_start: bool = False  # nothing can be started there while it lasts
    ended: float | None = None


class Ground(Protocol):
    """What hands reach for: the hardware of a simulated fleet, and what is broken on it. Times are seconds of the fleet's clock."""

    trays: dict[str, Tray]
    faults: list[Fault]
    loads: dict[str, int]
    cut: set[str]

    @property
    def now(self) -> float: ...
    def home(self, worker: str) -> Tray: ...
    def process(self, worker: str) -> Process: ...
    def reach(self, worker: str) -> bool | None: ...
    def stir(self) -> None: ...
    def end(self, fault: Fault) -> None: ...


class Hands:
    def __init__(self, fleet: Ground) -> None:
        self.fleet = fleet
        self.takes = dict(TAKES)
        self.wrong: dict[type[Effect], Callable[[Any], bool | None]] = {}  # an effect's class → how it ends instead
        self._began: dict[str, float] = {}

    def under_way(self, effect: AnyEffect) -> bool:
        takes = self.takes.get(effect.action if isinstance(effect, Repair) else type(effect), 0.0)
        if isinstance(effect, AwaitIdle):
            process = self.fleet.process(effect.worker)
            left = effect.until - self._began.get(effect.id, self.fleet.now)  # at the deadline it ends in any case
            if not process.up:
                return self.fleet.now < process.halted + LOOK_S
            takes = left if process.frozen else min(takes, left)
        began = self._began.setdefault(effect.id, self.fleet.now)
        return self.fleet.now < began + takes

    def ends(self, effect: AnyEffect) -> bool | None:
        self._began.pop(effect.id, None)
        self.fleet.stir()
        if type(effect) in self.wrong:
            return self.wrong[type(effect)](effect)
        match effect:
            case AwaitIdle():
                return not self.fleet.process(effect.worker).frozen
            case Look():
                return self.fleet.reach(effect.worker)
            case Verify():
                return self.fleet.reach(effect.worker) is True and not self.fleet.process(effect.worker).frozen
            case StopWorker():
                return self._stop(effect.worker)
            case StartWorker():
                return self.start(effect.worker)
            case Repair():
                return self._repair(effect)
            case _:
                return True

    def shown(self, look: Look) -> WorkerSeen | None:
        load = self.fleet.loads.get(look.worker)
        return None if load is None else WorkerSeen(worker=look.worker, running=load)

    def _stop(self, worker: str) -> bool | None:
        tray = self.fleet.home(worker)
        if not tray.talks or tray.node in self.fleet.cut:
            return None
        tray.touch("worker", self.fleet.now)
        self.fleet.process(worker).up = False
        return True

    def start(self, worker: str) -> bool | None:
        tray = self.fleet.home(worker)
        if not tray.talks or tray.node in self.fleet.cut:
            return None
        if any(f.ended is None and worker in f.hurts and f.no_start for f in self.fleet.faults):
            return False
        for fault in self.fleet.faults:
            if fault.ended is None and worker in fault.hurts and Action.RESTART_WORKER in fault.cured_by:
                self.fleet.end(fault)
        tray.touch("worker", self.fleet.now)
        self.fleet.process(worker).start(self.fleet.now)
        return True

    def _repair(self, effect: Repair) -> bool | None:
        tray = self.fleet.trays[effect.node]
        if not tray.talks or tray.node in self.fleet.cut:
            return None
        target = Component.parse(effect.target)
        if effect.action in (Action.REBOOT_NODE, Action.POWER_CYCLE):
            tray.reboot(self.fleet.now)
            target = Component(node=effect.node)
        for fault in self.fleet.faults:
            if fault.ended is None and effect.action in fault.cured_by and target.covers(Component.parse(fault.where)):
                self.fleet.end(fault)
        return True

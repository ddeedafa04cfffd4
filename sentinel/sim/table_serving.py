"""The scenario table, serving: engines, drains and repairs, budgets, capacity.

What always holds: as in the hardware's part (sentinel/sim/table_hardware.py), whose trays and names these rows use.
"""

from __future__ import annotations

from functools import partial

from sentinel.decide.rules.policy_file import default_policy_text
from sentinel.decide.state.events import Repair, ScaleOut, StartWorker, StopWorker
from sentinel.model import Action, WorkerState
from sentinel.sim import faults as x
from sentinel.sim.fleet import SimFleet
from sentinel.sim.table import Case
from sentinel.sim.table_hardware import GPU, T

DECODERS = [(f"r1-decode-{n}", T[n + 3], f"{T[n + 3]}/gpu@0008:01:00.0") for n in range(1, 9)]
REBOOTS = default_policy_text().replace("[repair.reboot_node]\nauto = false", "[repair.reboot_node]\nauto = true")
CORDONS = default_policy_text().replace('response = "steer" ', 'response = "cordon"')


def _fails(f: SimFleet, worker: str) -> None:
    """This worker's start fails, however often it is tried."""
    f.hands.wrong[StartWorker] = lambda e: False if e.worker == worker else f.hands.start(e.worker)


def _while_it_drains(f: SimFleet) -> None:
    x.row_remap(f, "r1t05", 1)
    f.at(10, lambda: x.off_bus(f, "r1t05", 2))


def _while_it_is_repaired(f: SimFleet) -> None:
    x.row_remap(f, "r1t05", 1)
    f.at(38, lambda: x.fatal(f, "r1t05", 3))


def _twice(f: SimFleet) -> None:
    """The same row remap is pending again, an hour and two hours after a reset that mended it."""
    for n in range(3):
        f.at(3600.0 * n, lambda: x.row_remap(f, "r1t05", 1))


def _remaps(f: SimFleet, many: int, apart: float = 5.0) -> None:
    for n in range(many):
        f.at(apart * n, partial(x.row_remap, f, DECODERS[n][1], 0))


def _without(f: SimFleet, many: int) -> None:
    for n in range(many):
        x.off_bus(f, DECODERS[n][1], 0)


def _whole_again(f: SimFleet) -> None:
    fault = x.off_bus(f, "r1t02", 3)
    f.at(300, lambda: f.end(fault), lambda: f.world.ask("undrain", "r1-prefill-1", "the GPU was replaced"))


def _storm_of_errors(f: SimFleet) -> None:
    storm = x.ecc_storm(f, "r1t05", 1)
    f.at(1200, lambda: f.end(storm))


def _weights(f: SimFleet) -> list[float]:
    """The main pool's share of new sessions, each value that it ever had, in order."""
    found: list[float] = []
    for _, out in f.world.journal:
        for i in out:
            routes = getattr(i, "value", None)
            pools = getattr(routes, "pools", ())
            if pools and (not found or found[-1] != pools[0].weight):
                found.append(pools[0].weight)
    return found


def _gone(many: int) -> tuple[str, ...]:
    return tuple(f"gpu-off-bus {gpu}" for _, _, gpu in DECODERS[:many])


def _out(many: int) -> tuple[str, ...]:
    return tuple(f"{name} evict out" for name, _, _ in DECODERS[:many])


SERVING = (
    # -- engines
    Case(
        name="engine-frozen",
        happens="An engine makes no step behind a green /health: found, evicted, restarted, back within minutes.",
        script=lambda f: x.engine_frozen(f, "r1-decode-1"), incidents=("engine-frozen r1-decode-1",),
        drains=("r1-decode-1 evict done",),
    ),
    Case(
        name="engine-dead",
        happens="An engine's process ends by itself: restarted.",
        script=lambda f: x.engine_dead(f, "r1-decode-1"), incidents=("worker-down r1-decode-1",),
        drains=("r1-decode-1 evict done",),
    ),
    Case(
        name="engine-does-not-start",
        happens="An engine dies and cannot be started again: a person is asked, once.",
        script=(lambda f: _fails(f, "r1-decode-1"), lambda f: x.engine_dead(f, "r1-decode-1")),
        incidents=("worker-down r1-decode-1",), pages=("error worker-down",), drains=("r1-decode-1 evict out",),
    ),
    # -- drains and repairs
    Case(
        name="second-fault-during-a-drain",
        happens="While a decoder drains for a row remap, another of its GPUs falls off the bus: evicted.",
        script=_while_it_drains, incidents=(f"row-remap-pending {GPU[1]}", f"gpu-off-bus {GPU[2]}"),
        pages=("critical gpu-off-bus",),
        drains=("r1-decode-1 evict out",), also=(("it was stopped once", lambda f: len(f.world.did(StopWorker)) == 1),),
    ),
    Case(
        name="second-fault-during-a-repair",
        happens="While one GPU is reset, another of the same group turns fatal: both are reset.",
        script=_while_it_is_repaired, incidents=(f"row-remap-pending {GPU[1]}", f"gpu-fatal {GPU[3]}"), pages=("error gpu-fatal",),
        drains=("r1-decode-1 drain done",),
        also=(("both were reset", lambda f: {e.target for e in f.world.did(Repair)} == {GPU[1], GPU[3]}),),  # type: ignore[union-attr]
    ),
    Case(
        name="repair-does-not-cure",
        happens="A reset succeeds and the row remap is still pending: not the same again, a person is asked.",
        script=lambda f: x.row_remap(f, "r1t05", 1, cured_by=x.NOBODY), lasts=1500,
        incidents=(f"row-remap-pending {GPU[1]}",), pages=("error row-remap-pending",), drains=("r1-decode-1 drain out",),
        also=(("it was reset once", lambda f: len(f.world.did(Repair)) == 1),),
    ),
    Case(
        name="repair-fails-twice",
        happens="The same repair is needed a third time within a week: two did not last, a person decides.",
        script=_twice, lasts=9000, fleet=lambda: SimFleet(idle_step=60.0),
        incidents=tuple([f"row-remap-pending {GPU[1]}"] * 3), pages=("warning row-remap-pending",),
        drains=("r1-decode-1 drain done", "r1-decode-1 drain done", "r1-decode-1 drain out"),
        also=(("it was reset twice", lambda f: len(f.world.did(Repair)) == 2),),
    ),
    Case(
        name="repair-command-fails",
        happens="The agent refuses the reset: a person is asked, nothing is tried in a circle.",
        script=(lambda f: f.hands.wrong.update({Repair: lambda e: False}), lambda f: x.row_remap(f, "r1t05", 1)),
        incidents=(f"row-remap-pending {GPU[1]}",), pages=("error row-remap-pending",), drains=("r1-decode-1 drain out",),
    ),
    Case(
        name="planned-reboot",
        happens="Policy lets sentinel reboot: after Xid 79 the tray is away for minutes, which is no fault.",
        script=lambda f: x.off_bus(f, "r1t05", 1), fleet=lambda: SimFleet(rules=REBOOTS), lasts=700,
        incidents=(f"gpu-off-bus {GPU[1]}",), pages=("critical gpu-off-bus",), drains=("r1-decode-1 evict done",),
        also=(("it was rebooted once", lambda f: [e.action for e in f.world.did(Repair)] == [Action.REBOOT_NODE]),),  # type: ignore[union-attr]
    ),
    Case(
        name="cordon-and-return",
        happens="Policy cordons what degrades: sessions stay, new ones go elsewhere, and it returns when all is well.",
        script=_storm_of_errors, lasts=2400, fleet=lambda: SimFleet(rules=CORDONS),
        incidents=(f"gpu-degraded {GPU[1]}",), pages=("warning gpu-degraded",), drains=("r1-decode-1 cordon done",),
        also=(("nothing was stopped", lambda f: not f.world.did(StopWorker)),),
    ),
    # -- budgets
    Case(
        name="budget-by-number",
        happens="Four decoders want a reset within a minute: two go, the others are paged and go in their time.",
        script=lambda f: _remaps(f, 4), lasts=900,
        incidents=tuple(f"row-remap-pending {gpu}" for _, _, gpu in DECODERS[:4]),
        pages=("error row-remap-pending", "error row-remap-pending"),
        drains=tuple(f"{name} drain done" for name, _, _ in DECODERS[:4]),
    ),
    Case(
        name="budget-by-floor",
        happens="The floor is 0.9 of eight decoders: a drain on doubt would cross it, so a person is asked.",
        script=lambda f: _remaps(f, 1), fleet=lambda: SimFleet(pool={"floor": 0.9}),
        incidents=(f"row-remap-pending {DECODERS[0][2]}",), pages=("error row-remap-pending",),
    ),
    Case(
        name="budget-by-domain",
        happens="No more than a twelfth of a domain may be out on doubt: the second of two waits for the first.",
        script=lambda f: _remaps(f, 2), fleet=lambda: SimFleet(pool={"max_domain_share": 0.084}),
        incidents=tuple(f"row-remap-pending {gpu}" for _, _, gpu in DECODERS[:2]), pages=("error row-remap-pending",),
        drains=tuple(f"{name} drain done" for name, _, _ in DECODERS[:2]),
    ),
    Case(
        name="facts-are-not-budgeted",
        happens="Three GPUs of three decoders fall off the bus under a floor of 0.9: all three are evicted.",
        script=lambda f: _without(f, 3), fleet=lambda: SimFleet(pool={"floor": 0.9}), lasts=60,
        incidents=_gone(3), pages=tuple(["critical gpu-off-bus"] * 3), drains=_out(3), starts=("r1-spare-3",),
    ),
    # -- capacity
    Case(
        name="overflow-carries",
        happens="Two of eight decoders are gone: overflow takes what main cannot carry, no standby is needed.",
        script=lambda f: _without(f, 2), lasts=60, incidents=_gone(2), pages=tuple(["critical gpu-off-bus"] * 2), drains=_out(2),
        also=(("a quarter of new sessions goes to overflow", lambda f: _weights(f)[-1] == 0.75),),
    ),
    Case(
        name="overflow-exhausted",
        happens="All eight decoders are gone: overflow and its standbys cannot carry main; more is asked for, then a person.",
        script=lambda f: _without(f, 8), lasts=1300,
        incidents=(*_gone(8), "gpu-off-bus fleet", "capacity-short main"), drains=_out(8),
        pages=(*["critical gpu-off-bus"] * 5, "critical capacity-short"),  # four, then one for all
        starts=("r1-spare-3", "r1-spare-4"), also=(("more decoders were asked for", lambda f: bool(f.world.did(ScaleOut))),),
    ),
    Case(
        name="nobody-gives-more",
        happens="The same, and whoever runs the pool refuses: a person at once.",
        script=(lambda f: f.hands.wrong.update({ScaleOut: lambda e: False}), lambda f: _without(f, 8)), lasts=300,
        incidents=(*_gone(8), "gpu-off-bus fleet", "capacity-short main"), drains=_out(8),
        pages=(*["critical gpu-off-bus"] * 5, "critical capacity-short"),  # four, then one for all
        starts=("r1-spare-3", "r1-spare-4"),
    ),
    Case(
        name="prefill-is-scarce",
        happens="A prefill group dies: its decoders' surplus carries nothing, overflow gets a whole unit ready.",
        script=lambda f: x.engine_dead(f, "r1-prefill-1"), lasts=300,
        incidents=("worker-down r1-prefill-1",), drains=("r1-prefill-1 evict done",), starts=("r1-spare-3", "r1-spare-4"),
        also=(("main kept half of the sessions", lambda f: min(_weights(f)) == 0.5),),
    ),
    Case(
        name="standby-does-not-start",
        happens="A prefill group is gone and one of the standbys for its overflow does not start: a person is asked.",
        script=(lambda f: _fails(f, "r1-spare-3"), lambda f: x.off_bus(f, "r1t02", 3)),
        incidents=("gpu-off-bus r1t02/gpu@0019:01:00.0", "repair-failed r1-spare-3", "capacity-short main"),
        pages=("critical gpu-off-bus", "error repair-failed"), drains=("r1-prefill-1 evict out",),
        starts=("r1-spare-3", "r1-spare-4"),
    ),
    Case(
        name="shift-back",
        happens="A prefill group is mended after five minutes: traffic returns after a hold-down, a quarter at a time.",
        script=_whole_again, lasts=900,
        incidents=("gpu-off-bus r1t02/gpu@0019:01:00.0",), pages=("critical gpu-off-bus",), drains=("r1-prefill-1 evict done",),
        starts=("r1-spare-3", "r1-spare-4"), also=(("it returned step by step", lambda f: _weights(f)[-3:] == [0.5, 0.75, 1.0]),),
    ),
    Case(
        name="standbys-stand-down",
        happens="After that, standbys that nobody needs any more are stopped.",
        script=_whole_again, lasts=2400, fleet=lambda: SimFleet(idle_step=20.0),
        incidents=("gpu-off-bus r1t02/gpu@0019:01:00.0",), pages=("critical gpu-off-bus",), drains=("r1-prefill-1 evict done",),
        starts=("r1-spare-3", "r1-spare-4"),
        also=(("both stand by again", lambda f: {f.state(f"r1-spare-{n}") for n in (3, 4)} == {WorkerState.STANDBY}),),
    ),
)  # fmt: skip

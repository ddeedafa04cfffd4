"""The scenario table, operations: silence, controllers, the network, people, configuration, and the monitor's own faults.

What always holds: as in the hardware's part (sentinel/sim/table_hardware.py), whose trays and names these rows use.
"""

from __future__ import annotations

from functools import partial

import msgspec

from sentinel.decide.rules.policy_file import default_policy_text
from sentinel.decide.state.events import Deroute, Repair, StopWorker
from sentinel.model import Incident, WorkerState
from sentinel.sim import faults as x
from sentinel.sim.fleet import SimFleet
from sentinel.sim.table import Case
from sentinel.sim.table_hardware import GPU, T
from sentinel.sim.wiring import plan

OBSERVES = default_policy_text().replace('mode = "enforce"', 'mode = "observe"', 1)
ADVISES = default_policy_text().replace('mode = "enforce"', 'mode = "advise"', 1)


def _crashed(f: SimFleet) -> None:
    """The operating system is up in a rescue shell: nothing listens any more, and the node says so."""
    f.trays["r1t05"].agent = False
    for worker in f.on("r1t05"):
        x.kill(f, worker)
    f.broken("node-down", "r1t05", cured_by=x.REBOOT, no_start=True)


def _comes_back(f: SimFleet) -> None:
    fault = x.agent_dead(f, "r1t05")
    f.at(120, lambda: f.end(fault))


def _roll_out(f: SimFleet, nodes: tuple[str, ...], apart: float, lasts: float) -> None:
    """The driver's package is upgraded node by node; a reboot ends it on each, later."""
    for n, node in enumerate(nodes):
        f.at(apart * n, partial(x.upgrade, f, node))
        f.at(apart * n + lasts, f.trays[node].mend_driver)


def _alone(f: SimFleet, seconds: float) -> None:
    """The leader's host loses the network: it hears no node and reaches no worker; nodes and workers are well."""
    fault = x.cut_off(f, T, workers=True)
    f.at(seconds, lambda: f.end(fault))


def _fenced(f: SimFleet) -> None:
    """The leader is cut off from all, store included, and goes on deciding; another leads. Meanwhile a GPU is lost."""
    f.isolate_leader()
    f.at(3, lambda: x.off_bus(f, "r1t05", 1))


def _half_drained(f: SimFleet) -> None:
    x.row_remap(f, "r1t05", 1)
    f.at(8, f.lose_leader)
    f.at(45, f.lose_leader)


def _noisy(f: SimFleet) -> None:
    f.late = f.repeat = 0.3
    x.row_remap(f, "r1t05", 1)
    f.at(20, lambda: x.off_bus(f, "r1t08", 2))
    f.at(30, lambda: x.xid(f, "r1t09", 0, 31))


def _wrong_clock(f: SimFleet) -> None:
    f.trays["r1t05"].clock_off, f.trays["r1t08"].clock_off = 5 * 3600.0, -7 * 3600.0
    f.at(10, lambda: x.row_remap(f, "r1t05", 1))
    f.at(15, lambda: x.off_bus(f, "r1t08", 2))


def _one_gpu_twice(f: SimFleet) -> None:
    """A cloned image makes a node report another's GPU; then the true one wants a reset, which nobody can say whose it is."""
    uuid = f.trays["r1t05"].place.gpus[0].uuid
    f.trays["r1t08"].stand(uuid=uuid)
    f.at(30, lambda: x.row_remap(f, "r1t05", 0))


def _removed(f: SimFleet) -> None:
    """A lost GPU's tray is taken out of the configuration, and of the rack."""
    x.off_bus(f, "r1t05", 1)
    was = f.world.fleet
    left = msgspec.structs.replace(
        was,
        workers=tuple(w for w in was.workers if w.name != "r1-decode-1"),
        nodes=tuple(n for n in was.nodes if n != "r1t05"),
        places=tuple(p for p in was.places if p.node != "r1t05"),
    )
    f.at(60, lambda: f.trays.pop("r1t05"), lambda: f.world.reload(left))


def _joins(f: SimFleet) -> None:
    f.at(5, lambda: f.build("r2"), lambda: f.world.reload(plan(2)))


def _serviced(f: SimFleet) -> None:
    """A person takes a tray for an hour: it is rebooted twice, a GPU is swapped meanwhile, and it is well again."""
    f.world.ask("maintain", "r1t05", "swap a GPU", until=f.now + 3600)
    f.at(60, lambda: x.off_bus(f, "r1t05", 1))
    f.at(300, lambda: setattr(f.trays["r1t05"], "powered", False))
    f.at(900, lambda: f.end(f.faults[-1]), lambda: f.trays["r1t05"].reboot(f.now))


def _kept_in(f: SimFleet) -> None:
    f.world.ask("hold", "r1-decode-1", "a demonstration is running", keep="in")
    f.at(5, lambda: x.off_bus(f, "r1t05", 1))
    f.at(200, lambda: f.world.ask("release", "r1-decode-1", "it is over"))


def _kept_out(f: SimFleet) -> None:
    """A person keeps a worker out; a fault comes and is mended; it stays out."""
    f.world.ask("hold", "r1-decode-1", "under investigation", keep="out")
    fault = x.row_remap(f, "r1t05", 1)
    f.at(60, lambda: f.end(fault))


def _deaf(f: SimFleet) -> None:
    f.trays["r1t05"].break_probe("kernel_log", "/dev/kmsg: the kernel log cannot be read: Operation not permitted", f.now)
    for n in range(5):
        f.at(float(n), lambda: f.trays["r1t05"].kernel("audit: a line", f.now))


def _said(f: SimFleet, what: str) -> bool:
    return any(s.what == what for i in f.told() for s in i.history)


def _carried_out(f: SimFleet) -> bool:
    return bool(f.world.did(Deroute) or f.world.did(StopWorker) or f.world.did(Repair))


def _closed(i: Incident) -> bool:
    return i.closed_at is not None


OPERATIONS = (
    # -- who is silent
    Case(
        name="agent-silent",
        happens="An agent dies while its workers serve on: no drain, one page of low urgency; it comes back.",
        script=_comes_back, incidents=("agent-silent r1t05",), pages=("warning agent-silent",),
        also=(("it is over when the agent is back", lambda f: all(_closed(i) for i in f.told())),),
    ),
    Case(
        name="node-without-power",
        happens="A tray loses its power: nothing answers. From here that is a cut cable, too: a person, at once.",
        script=lambda f: x.power_off(f, "r1t05"), incidents=("node-unreachable r1t05",), pages=("error node-unreachable",),
    ),
    Case(
        name="node-down",
        happens="A node crashes: its agent is silent and its worker refuses. Two agree: evicted; who can say that it has ended?",
        script=_crashed, incidents=("node-down r1t05",), pages=("critical node-down",), drains=("r1-decode-1 evict stopping",),
    ),
    Case(
        name="cut-cable",
        happens="The way to one node is cut, for the controller only.",
        script=lambda f: x.cut_off(f, ["r1t05"], workers=True), incidents=("node-unreachable r1t05",),
        pages=("error node-unreachable",),
    ),
    Case(
        name="half-the-agents-silent",
        happens="Half of the agents are not heard any more while every worker answers: the fault is on this side.",
        script=lambda f: x.cut_off(f, T[:9]), incidents=("agent-silent fleet",), pages=("warning agent-silent",),
    ),
    # -- controllers and the network
    Case(
        name="partitioned-controller",
        happens="The leader hears no node and reaches no worker for five minutes: one page, nothing drained.",
        script=lambda f: _alone(f, 300), lasts=500, incidents=("agent-silent fleet",), pages=("warning agent-silent",),
        also=(("it is over when the network is", lambda f: all(_closed(i) for i in f.told())),),
    ),
    Case(
        name="leader-without-its-lease",
        happens="A leader that is cut off goes on deciding; another leads, and a GPU is lost meanwhile.",
        script=_fenced, lasts=120, incidents=(f"gpu-off-bus {GPU[1]}",), pages=("critical gpu-off-bus",),
        drains=("r1-decode-1 evict out",),
        also=(("the old leader wanted something", lambda f: bool(f.refused)), ("it was stopped once", lambda f: _times(f) == 1)),
    ),
    Case(
        name="leader-changes-during-a-drain",
        happens="The leader dies while a worker drains, and the next while its GPU is reset.",
        script=_half_drained, incidents=(f"row-remap-pending {GPU[1]}",), drains=("r1-decode-1 drain done",),
        also=(("the GPU was reset once", lambda f: len({e.id for e in f.world.did(Repair)}) == 1),),
    ),
    Case(
        name="reports-lost-and-repeated",
        happens="A third of the reports comes late, behind newer ones, and as many twice: as if nothing were.",
        script=_noisy,
        incidents=(f"row-remap-pending {GPU[1]}", "gpu-off-bus r1t08/gpu@0018:01:00.0", "app-fault r1t09/gpu@0008:01:00.0"),
        pages=("critical gpu-off-bus",), drains=("r1-decode-1 drain done", "r1-decode-4 evict out"),
    ),
    Case(
        name="clocks-off-by-hours",
        happens="Two nodes' clocks are hours off, one ahead and one behind, and both have a fault: handled alike.",
        script=_wrong_clock, incidents=(f"row-remap-pending {GPU[1]}", "gpu-off-bus r1t08/gpu@0018:01:00.0"),
        pages=("critical gpu-off-bus",), drains=("r1-decode-1 drain done", "r1-decode-4 evict out"),
    ),
    # -- what contradicts, leaves and joins
    Case(
        name="two-nodes-claim-a-gpu",
        happens="Two nodes report one GPU; it wants a reset: nobody can say whose it is, so a person is asked.",
        script=_one_gpu_twice, incidents=("monitor r1t05", "monitor r1t08", "noted r1t08", f"row-remap-pending {GPU[0]}"),
        pages=("error row-remap-pending",),
    ),
    Case(
        name="removed-node",
        happens="A tray with an open incident leaves the configuration: the incident ends, nothing is drained.",
        script=_removed, lasts=900, incidents=(f"gpu-off-bus {GPU[1]}",), pages=("critical gpu-off-bus",),
        drains=("r1-decode-1 evict out",),
        also=(("its incident is closed", lambda f: all(_closed(i) for i in f.told())),),
    ),
    Case(name="nodes-join", happens="A second rack is configured and begins to report.", script=_joins),
    # -- people and policy
    Case(
        name="maintenance-window",
        happens="A tray is taken for an hour, rebooted, and a GPU swapped: nobody is paged, it returns at the end.",
        script=_serviced, lasts=4000, fleet=lambda: SimFleet(idle_step=20.0),
        also=(("it serves again", lambda f: f.state("r1-decode-1") is WorkerState.ACTIVE),),
    ),
    Case(
        name="held-in-against-a-fact",
        happens="A person holds a worker in; its GPU falls off the bus: it stays, a person is told, until released.",
        script=_kept_in, incidents=(f"gpu-off-bus {GPU[1]}",), pages=("critical gpu-off-bus",), drains=("r1-decode-1 evict out",),
        also=(("it left only when released", lambda f: next(f.taken()).requested_at >= f.began + 210),),
    ),
    Case(
        name="held-out",
        happens="A person keeps a worker out; a fault comes and goes: it stays out.",
        script=_kept_out, incidents=(f"row-remap-pending {GPU[1]}",),
        also=(
            ("it is still out", lambda f: f.out() == ["r1-decode-1"]),
            ("nothing was repaired", lambda f: not f.world.did(Repair)),
        ),
    ),
    Case(
        name="observing",
        happens="In mode observe a GPU falls off the bus: it is written down what would have been done, and nothing is.",
        script=lambda f: x.off_bus(f, "r1t05", 1), fleet=lambda: SimFleet(rules=OBSERVES),
        incidents=(f"gpu-off-bus {GPU[1]}",),
        also=(
            ("it says what it would have done", lambda f: _said(f, "would have")),
            ("nothing was done", lambda f: not _carried_out(f)),
        ),
    ),
    Case(
        name="advising",
        happens="In mode advise a person is told what to do, and nothing is done.",
        script=lambda f: x.off_bus(f, "r1t05", 1), fleet=lambda: SimFleet(rules=ADVISES),
        incidents=(f"gpu-off-bus {GPU[1]}",), pages=("critical gpu-off-bus",),
        also=(("nothing was done", lambda f: not _carried_out(f)),),
    ),
    # -- the driver and the monitor
    Case(
        name="driver-upgrade",
        happens="A driver upgrade without reboots rolls over the fleet, a node every twenty seconds: one thing, one page.",
        script=lambda f: _roll_out(f, T, 20.0, 400.0), lasts=900, incidents=("driver-upgrade fleet",),
        pages=("warning driver-upgrade",),
        also=(("it ends by itself", lambda f: all(_closed(i) for i in f.told())),),
    ),
    Case(
        name="driver-upgraded-on-one-node",
        happens="On one node only: its monitoring is blind, a person should know.",
        script=lambda f: _roll_out(f, ("r1t05",), 1.0, 600.0), lasts=900, incidents=("driver-upgrade r1t05",),
        pages=("warning driver-upgrade",),
    ),
    Case(
        name="kernel-log-unreadable",
        happens="One agent may not read the kernel log any more: about the monitor, never the hardware.",
        script=_deaf, incidents=("monitor r1t05",),
    ),
    Case(
        name="probe-fails",
        happens="The GPU probe of a node cannot look any more: about the monitor.",
        script=lambda f: f.trays["r1t05"].break_probe("gpu", "the driver's process could not be asked", f.now),
        incidents=("monitor r1t05",),
    ),
)  # fmt: skip


def _times(f: SimFleet) -> int:
    return len({e.id.partition("#")[0] for e in f.world.did(StopWorker)})

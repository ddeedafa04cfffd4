"""The scenario table, hardware: GPUs, links, switches, peers, rails, and what an application does to them.

What always holds: a row says what must come of a fault by the design and the issue, whatever the code does (sentinel/sim/table.py).
Trays: t01+t02 and t03+t04 hold the prefill groups, t05 … t12 a decoder each, t13+t14 the spare prefill group, t15 … t18 the spare
decoders, of which the last two stand by.
"""

from __future__ import annotations

from functools import partial

from sentinel.decide.state.events import Repair, StopWorker
from sentinel.model import Action
from sentinel.sim import faults as x
from sentinel.sim.fleet import SimFleet
from sentinel.sim.table import Case
from sentinel.sim.wiring import nodes_of

T = nodes_of("r1")
GPU = [f"r1t05/gpu@{pci}" for pci in ("0008:01:00.0", "0009:01:00.0", "0018:01:00.0", "0019:01:00.0")]
RECOVERED = f"{x.UNNAMED}, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
MANY = nodes_of("r2")[:15] + nodes_of("r3")[:15] + nodes_of("r4")[:15] + nodes_of("r5")[:15]  # sixty more


def _fell_and_rose(f: SimFleet) -> None:
    """NVLink 3 of one GPU goes down and comes back four times."""
    for n in range(4):
        f.at(120.0 * n, lambda: x.links_down(f, [("r1t05", 1, (3,))]))
        f.at(120.0 * n + 12, lambda: f.trays["r1t05"].links(1, (), f.now))
    f.broken("gpu-fatal", GPU[1], cured_by=frozenset())


def _port_flaps(f: SimFleet) -> None:
    """A port loses its link for a moment six times in an hour; only its counter shows it."""
    f.broken("nic-fatal", "r1t05")
    for n in range(1, 7):
        f.at(300.0 * n, partial(f.trays["r1t05"].port, 0, f.now, link_downed=n))


def _congested(f: SimFleet) -> None:
    began = f.now
    for rail in range(4):
        f.trays["r1t05"].port(rail, f.now, port_xmit_wait=lambda now: int(9e5 * (now - began)))
        f.trays["r1t05"].port(rail, f.now, port_xmit_discards=lambda now: int(500 * (now - began)) % 65535)


def _echo(f: SimFleet, *, lingers: bool = False) -> None:
    x.fatal(f, "r1t01", 2, 150)
    x.peer_echo(f, T[1:])
    if not lingers:
        f.at(40, lambda: x.echo_over(f))
    for node in MANY:
        x.xid(f, node, 0, 45)


def _storm(f: SimFleet) -> None:
    nodes = (T + MANY)[:77]
    events = [(n, g, code) for code in (45, 43, 13) for g in range(4) for n in nodes][:672]
    for k, (node, gpu, code) in enumerate(events):
        f.at(k / 100, partial(x.xid, f, node, gpu, code))


def _again_and_again(f: SimFleet, times: int, code: int, apart: float) -> None:
    for n in range(times):
        f.at(apart * n, lambda: x.xid(f, "r1t05", 1, code))


def _five_in_a_day(f: SimFleet) -> None:
    """A GPU fails every two hours. What sentinel leaves to a person, a person has back half an hour later."""
    for n in range(5):
        f.at(7200.0 * n, lambda: x.fatal(f, "r1t05", 1))
        f.at(7200.0 * n + 1800, lambda: _mended(f, "r1t05"))


def _for_a_while(f: SimFleet, seconds: float) -> None:
    storm = x.ecc_storm(f, "r1t05", 1)
    f.at(seconds, lambda: f.end(storm))


def _mended(f: SimFleet, node: str) -> None:
    for fault in f.faults:
        if fault.ended is None:
            f.end(fault)
    if f.out():
        f.world.ask("undrain", node, "mended by hand")


def _advised(f: SimFleet) -> None:
    """The driver's standing advice: a reset is required, and after it none."""
    x.xid(f, "r1t05", 1, 154, f"{x.UNNAMED}, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")
    f.broken("gpu-fatal", GPU[1], cured_by=x.RESET, mend=lambda: x.xid(f, "r1t05", 1, 154, RECOVERED))


def _resets(f: SimFleet) -> list[str]:
    return [e.target for e in f.world.did(Repair) if e.action is Action.RESET_GPU]  # type: ignore[union-attr]


def _scope(f: SimFleet, fault: str) -> set[str]:
    return next((set(i.scope) for i in f.told() if i.fault == fault), set())


def _five_racks() -> SimFleet:
    return SimFleet(racks=5)


HARDWARE = (
    # -- one GPU
    Case(
        name="gpu-off-bus",
        happens="Xid 79: a GPU of a decoder falls off the bus; its engine dies.",
        script=lambda f: x.off_bus(f, "r1t05", 1),
        incidents=(f"gpu-off-bus {GPU[1]}",), pages=("critical gpu-off-bus",), drains=("r1-decode-1 evict out",),
    ),
    Case(
        name="gpu-off-bus-in-dep8",
        happens="A GPU falls off the bus in a DEP8 prefill group over two trays: the whole group is gone.",
        script=lambda f: x.off_bus(f, "r1t02", 3), lasts=200,
        incidents=("gpu-off-bus r1t02/gpu@0019:01:00.0",), pages=("critical gpu-off-bus",),
        drains=("r1-prefill-1 evict out",), starts=("r1-spare-3", "r1-spare-4"),
        also=(("its seven clean GPUs are offered for repacking", lambda f: _offered(f) == 7),),
    ),
    Case(
        name="two-gpus-of-one-group",
        happens="Two GPUs of one decoder turn fatal within seconds: two faults, one way out, both are reset.",
        script=(lambda f: x.fatal(f, "r1t05", 0), lambda f: f.at(3, lambda: x.fatal(f, "r1t05", 2))),
        incidents=(f"gpu-fatal {GPU[0]}", f"gpu-fatal {GPU[2]}"), pages=("error gpu-fatal", "error gpu-fatal"),
        drains=("r1-decode-1 drain done",), also=(("both were reset", lambda f: sorted(_resets(f)) == [GPU[0], GPU[2]]),),
    ),
    Case(
        name="row-remap",
        happens="A bad memory row waits for a reset; work goes on. Drained, reset, tested, back; nobody is woken.",
        script=lambda f: x.row_remap(f, "r1t05", 1), incidents=(f"row-remap-pending {GPU[1]}",), drains=("r1-decode-1 drain done",),
        also=(("it was reset once", lambda f: _resets(f) == [GPU[1]]),),
    ),
    Case(
        name="driver-asks-for-a-reset",
        happens="Xid 154 says that a GPU wants a reset, and after it that it wants nothing.",
        script=_advised, incidents=(f"gpu-fatal {GPU[1]}",), pages=("error gpu-fatal",), drains=("r1-decode-1 drain done",),
    ),
    Case(
        name="recovery-is-good-news",
        happens="Xid 154 to None by itself: a recovery, no fault.",
        script=lambda f: x.xid(f, "r1t05", 1, 154, RECOVERED),
    ),
    Case(
        name="five-fatal-in-a-day",
        happens="A GPU turns fatal every two hours: two resets, then a person's, at the fifth a recurring fault.",
        script=_five_in_a_day, lasts=33000, fleet=lambda: SimFleet(idle_step=60.0),
        incidents=(*[f"gpu-fatal {GPU[1]}"] * 5, f"recurring-fatal {GPU[1]}"),
        pages=(*["error gpu-fatal"] * 4, "error recurring-fatal"),
        drains=tuple(["r1-decode-1 drain done"] * 5), also=(("it was reset twice", lambda f: _resets(f) == [GPU[1]] * 2),),
    ),
    Case(
        name="gsp-hang",
        happens="Xid 119: the GPU's own processor hangs, a reset does not cure it, calls into the driver do not return.",
        script=lambda f: x.gsp_hang(f, "r1t05", 1), lasts=1500,
        incidents=(f"gpu-fatal {GPU[1]}",), pages=("error gpu-fatal",), drains=("r1-decode-1 drain out",),
    ),
    Case(
        name="corrected-error-storm",
        happens="A GPU corrects two thousand memory errors a second for half an hour: steered, then back.",
        script=lambda f: _for_a_while(f, 1800), lasts=3000,
        incidents=(f"gpu-degraded {GPU[1]}",), pages=("warning gpu-degraded",), drains=("r1-decode-1 steer done",),
        also=(("nothing was stopped", lambda f: not f.world.did(StopWorker)),),
    ),
    Case(
        name="corrected-c2c-errors",
        happens="Xid 121, corrected errors between GPU and CPU: on record.",
        script=lambda f: x.xid(f, "r1t05", 1, 121), incidents=(f"noted {GPU[1]}",),
    ),
    Case(
        name="thermal",
        happens="A GPU runs at its temperature limit and slows down: on record, a person looks when there is time.",
        script=lambda f: x.hot(f, "r1t05", 1), incidents=(f"noted {GPU[1]}",),
    ),
    # -- applications
    Case(
        name="application-crash",
        happens="One program makes Xid 13 on one GPU and 31 on another of another group.",
        script=(lambda f: x.xid(f, "r1t05", 1, 13), lambda f: x.xid(f, "r1t08", 2, 31)),
        incidents=(f"app-fault {GPU[1]}", "app-fault r1t08/gpu@0018:01:00.0"),
    ),
    Case(
        name="xid31-repeats",
        happens="Xid 31 on one GPU and nowhere else, twice in a day: the unit is suspected, a person runs diagnostics.",
        script=lambda f: _again_and_again(f, 2, 31, 7200), lasts=7800, fleet=lambda: SimFleet(idle_step=60.0),
        incidents=(f"app-fault {GPU[1]}", f"app-fault {GPU[1]}", f"repeating-app-fault {GPU[1]}"),
        pages=("warning repeating-app-fault",),
    ),
    Case(
        name="xid45-storm",
        happens="672 events 45, 43 and 13 on 77 nodes within seconds: one program ended.",
        script=_storm, fleet=_five_racks, lasts=60, incidents=("app-fault application",),
    ),
    Case(
        name="injected",
        happens="An NVLink error that somebody injected on purpose (i1).",
        script=lambda f: x.xid(f, "r1t05", 1, 149, x.link_line(4, 8).replace("i0", "i1")),
        incidents=(f"app-fault {GPU[1]}",),
    ),
    # -- links, switches, peers
    Case(
        name="one-link",
        happens="One NVLink of one GPU goes down: that GPU; drained, reset, back.",
        script=lambda f: x.gpu_links(f, "r1t05", 1, (7,)), incidents=(f"gpu-fatal {GPU[1]}",), pages=("error gpu-fatal",),
        drains=("r1-decode-1 drain done",),
    ),
    Case(
        name="one-link-that-echoes",
        happens="One NVLink of one GPU goes down, and all seventeen peers lose packets and torn channels for it.",
        script=(
            lambda f: x.gpu_links(f, "r1t05", 1, (7,)), lambda f: x.peer_echo(f, [n for n in T if n != "r1t05"]),
            lambda f: f.at(40, lambda: x.echo_over(f)),
        ),
        incidents=(f"gpu-fatal {GPU[1]}",), pages=("error gpu-fatal",), drains=("r1-decode-1 drain done",),
    ),
    Case(
        name="many-links-of-one-gpu",
        happens="Four links of one GPU go down: that GPU, and no switch.",
        script=lambda f: x.gpu_links(f, "r1t05", 1), incidents=(f"gpu-nvlink {GPU[1]}",), pages=("error gpu-nvlink",),
        drains=("r1-decode-1 drain done",),
    ),
    Case(
        name="flapping-nvlink",
        happens="One link goes down and up again four times: two resets that did not last, then a person's.",
        script=_fell_and_rose, lasts=700, incidents=tuple([f"gpu-fatal {GPU[1]}"] * 3), pages=tuple(["error gpu-fatal"] * 3),
        drains=("r1-decode-1 drain done", "r1-decode-1 drain done", "r1-decode-1 drain out"),
        also=(("it was reset twice", lambda f: _resets(f) == [GPU[1]] * 2),),
    ),
    Case(
        name="switch-asic",
        happens="Link 7 of all 48 GPUs of the main pool goes down: the switch ASIC where it ends, not 48 GPUs.",
        script=lambda f: x.switch_asic(f, "r1", 7, T[:12]), lasts=60,
        incidents=("nvlink-switch r1/asic07",), pages=("error nvlink-switch",),
        also=(("48 GPUs are in its scope", lambda f: len(_scope(f, "nvlink-switch")) == 48), ("all serve", lambda f: not f.out())),
    ),
    Case(
        name="cable-cartridge",
        happens="Links 4 and 5 of all four GPUs of one tray go down and nowhere else: its cables.",
        script=lambda f: x.cartridge(f, "r1t05"), lasts=60,
        incidents=("nvlink-cartridge r1t05/nvlink-cartridge",), pages=("error nvlink-cartridge",),
        also=(("all serve", lambda f: not f.out()),),
    ),
    Case(
        name="echo-over-77-nodes",
        happens="One GPU's fatal NVLink fault; 17 peers lose packets, and on 60 more nodes channels end.",
        script=_echo, fleet=_five_racks, lasts=140,
        incidents=("gpu-fatal r1t01/gpu@0018:01:00.0",), pages=("error gpu-fatal",), drains=("r1-prefill-1 drain done",),
        also=(("77 nodes are in its scope", lambda f: _scope(f, "gpu-fatal") == {*T[1:], *MANY}),),
    ),
    Case(
        name="echo-that-lingers",
        happens="The same, and the peers' drivers still wait for a peer when the culprit is repaired and back.",
        script=lambda f: _echo(f, lingers=True), fleet=_five_racks, lasts=140,
        incidents=("gpu-fatal r1t01/gpu@0018:01:00.0", "peer-fault r1"), pages=("error gpu-fatal",),
        drains=("r1-prefill-1 drain done",),
    ),
    Case(
        name="imex-peer",
        happens="One tray's IMEX daemon dies: seventeen report it and say DEGRADED; they are well.",
        script=lambda f: x.imex_lost(f, "r1t05"), incidents=("imex-peer r1t05",), pages=("warning imex-peer",),
        also=(("seventeen are in its scope", lambda f: _scope(f, "imex-peer") == set(T) - {"r1t05"}),),
    ),
    # -- rails
    Case(
        name="rail-down",
        happens="One rail of one node is down: on suspicion, its worker is drained and left to a person.",
        script=lambda f: x.rail_down(f, "r1t05", 2), incidents=("nic-fatal r1t05",), pages=("error nic-fatal",),
        drains=("r1-decode-1 drain out",),
    ),
    Case(
        name="leaf-switch",
        happens="A leaf switch dies: rail 2 is down on all eighteen nodes at it.",
        script=lambda f: x.leaf_down(f, "r1", 2, T), incidents=("leaf-switch r1-leaf2",), pages=("error leaf-switch",),
        also=(("eighteen are in its scope", lambda f: _scope(f, "leaf-switch") == set(T)), ("all serve", lambda f: not f.out())),
    ),
    Case(
        name="flapping-port",
        happens="A port loses its link for a moment six times in half an hour: more than three count.",
        script=_port_flaps, lasts=2000, incidents=("nic-fatal r1t05",), pages=("error nic-fatal",),
        drains=("r1-decode-1 drain out",),
    ),
    Case(
        name="nic-lost",
        happens="An adapter's firmware stops and the adapter vanishes.",
        script=lambda f: x.nic_lost(f, "r1t05"), incidents=("nic-fatal r1t05",), pages=("error nic-fatal",),
        drains=("r1-decode-1 drain out",),
    ),
    Case(
        name="congestion",
        happens="Packets wait and are discarded by the thousand on every rail of a node: no fault at all.",
        script=_congested,
    ),
)  # fmt: skip


def _offered(f: SimFleet) -> int:
    return sum(len(offer["gpus"]) for offer in f.world.decider.status()["spare"])

"""What can break in a simulated fleet, and how it shows: each fault one function that breaks hardware, kernel log and processes.

This module exists so that scenarios and random weather break the same things in the same way. What always holds: a function here
touches trays (readings, kernel lines, processes) and writes down what is broken, whom that may rightly take out of service, and
which repair mends it; it never makes a finding, since that is the probes' business. Kernel lines are written by us in the formats
of the driver (hardware.md §2.3, §2.4; the vendor's decode sheet for Xid 144-150).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sentinel.model import Action, gpu_component
from sentinel.sim.fleet import SimFleet
from sentinel.sim.hands import Fault
from sentinel.sim.readings import NICS
from sentinel.testing.decisions import PCIS

RESET = frozenset({Action.RESET_GPU, Action.REBOOT_NODE, Action.POWER_CYCLE})
REBOOT = frozenset({Action.REBOOT_NODE, Action.POWER_CYCLE})
NOBODY: frozenset[Action] = frozenset()
UNNAMED = "pid='<unknown>', name=<unknown>"
XIDS = {  # what the driver prints after the code
    13: "pid=4711, name=python3, Graphics SM Warp Exception on (GPC 2, TPC 1, SM 0): Misaligned Address",
    31: "pid=4711, name=python3, channel 0x0000000a, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC1 GPCCLIENT_T1_0 faulted @ "
        "0x7f42_00000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE",
    43: "pid=4711, name=python3, channel 0x00000010",
    45: "pid=4711, name=python3, channel 0x00000010",
    48: f"{UNNAMED}, An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at physical address 0x0",
    62: f"{UNNAMED}, 3b10(35a0) 00000000 00000000",
    63: f"{UNNAMED}, Row Remapper: New row marked for remapping, reset gpu to activate.",
    79: f"{UNNAMED}, GPU has fallen off the bus.",
    95: "pid=4711, name=python3, Uncontained: LTC TAG (0x1,0x2). RST: Yes, D-RST: No",
    119: "pid=4711, name=python3, Timeout after 45s of waiting for RPC response from GPU0 GSP! Expected function 76 (GSP).",
    121: f"{UNNAMED}, Corrected C2C error",
    150: "MSE_DEGRADED Fatal XC1 i0 Link -1 (0x00000000 0x00000000 0x0 0x0 0x0 0x0 0x0)",
}  # fmt: skip


def gpu_at(node: str, gpu: int) -> str:
    return str(gpu_component(node, PCIS[gpu]))


def xid(f: SimFleet, node: str, gpu: int, code: int, rest: str = "") -> None:
    """The driver prints a line; nothing is broken by that alone."""
    f.trays[node].xid(gpu, f"{code}, {rest or XIDS[code]}", f.now)
    f.stir()


def link_line(reason: int, link: int) -> str:
    """Xid 149 that one link went down for this reason (bits 25:20 of the first word; layout of drivers before R575)."""
    return f"NETIR_LINK_EVT Fatal XC0 i0 Link {link:02} (0x{reason << 20 | 0x1C6:08x} 0x00000000 0x0 0x0 0x0 0x0 0x0)"


# -- one GPU ------------------------------------------------------------------------------------------------------------------


def off_bus(f: SimFleet, node: str, gpu: int) -> Fault:
    """A GPU falls off the bus: the driver says so, NVML has lost it, and the engines on it die."""
    xid(f, node, gpu, 79)
    f.trays[node].set_gpu(gpu, f.now, lost=True)
    fault = f.broken("gpu-off-bus", gpu_at(node, gpu), cured_by=REBOOT, mend=_mend_gpu(f, node, gpu), no_start=True)
    for worker in fault.hurts:
        kill(f, worker)
    return fault


def fatal(f: SimFleet, node: str, gpu: int, code: int = 95, *, cured_by: frozenset[Action] = RESET) -> Fault:
    """A fatal Xid: contexts on that GPU are torn down, and the driver wants it reset."""
    xid(f, node, gpu, code)
    f.trays[node].set_gpu(gpu, f.now, recovery_action=1)
    return f.broken("gpu-fatal", gpu_at(node, gpu), cured_by=cured_by, mend=_mend_gpu(f, node, gpu))


def row_remap(f: SimFleet, node: str, gpu: int, *, cured_by: frozenset[Action] = RESET) -> Fault:
    """A bad memory row waits for a reset to be set aside; work may go on."""
    xid(f, node, gpu, 63)
    f.trays[node].set_gpu(gpu, f.now, rows_pending=True, rows_uncorrected=1)
    return f.broken("row-remap-pending", gpu_at(node, gpu), cured_by=cured_by, mend=_mend_gpu(f, node, gpu))


def ecc_storm(f: SimFleet, node: str, gpu: int, per_s: float = 2000.0) -> Fault:
    """Corrected memory errors by the thousand: it works, and gets worse."""
    began = f.now
    f.trays[node].set_gpu(gpu, f.now, ecc_corrected_volatile=lambda now: int(per_s * (now - began)))
    return f.broken("gpu-degraded", gpu_at(node, gpu), cured_by=RESET, mend=_mend_gpu(f, node, gpu))


def hot(f: SimFleet, node: str, gpu: int) -> Fault:
    """At its temperature limit, and slowing down."""
    f.trays[node].set_gpu(gpu, f.now, margin_c=-2, temperature_c=92)
    return f.broken("thermal", gpu_at(node, gpu), hurts=(), mend=_mend_gpu(f, node, gpu))


def gsp_hang(f: SimFleet, node: str, gpu: int) -> Fault:
    """The GPU's own processor answers no more: Xid 119, and calls into the driver hang."""
    xid(f, node, gpu, 119)
    f.trays[node].set_gpu(gpu, f.now, hung_since=f.now)
    return f.broken("gpu-fatal", gpu_at(node, gpu), cured_by=REBOOT, mend=_mend_gpu(f, node, gpu))


def _mend_gpu(f: SimFleet, node: str, gpu: int) -> Callable[[], None]:
    return lambda: f.trays[node].mend_gpu(PCIS[gpu])


# -- links, switches, peers -----------------------------------------------------------------------------------------------------


def links_down(f: SimFleet, cells: Sequence[tuple[str, int, tuple[int, ...]]], **words: Any) -> list[Callable[[], None]]:
    """Links go down: (node, GPU, links) each; the driver prints an Xid 149 a link. Returns what mends them."""
    for node, gpu, down in cells:
        for n in down:
            xid(f, node, gpu, 149, link_line(words.get("reason", 4), n))
        f.trays[node].links(gpu, down, f.now)
    return [_mend_gpu(f, node, gpu) for node, gpu, _ in cells]


def gpu_links(f: SimFleet, node: str, gpu: int, down: tuple[int, ...] = (2, 5, 9, 14)) -> Fault:
    """Many links of one GPU."""
    mend = links_down(f, [(node, gpu, down)])
    return f.broken("gpu-nvlink", gpu_at(node, gpu), cured_by=RESET, mend=_all(mend))


def switch_asic(f: SimFleet, rack: str, index: int, trays: Sequence[str]) -> Fault:
    """A switch ASIC dies: every GPU of these trays loses the link that ends there."""
    mend = links_down(f, [(t, g, (index,)) for t in trays for g in range(4)])
    return f.broken("nvlink-switch", f"{rack}/asic{index:02}", hurts=(), mend=_all(mend))


def cartridge(f: SimFleet, node: str, down: tuple[int, ...] = (4, 5)) -> Fault:
    """A cable cartridge: all four GPUs of one tray lose the same links."""
    mend = links_down(f, [(node, g, down) for g in range(4)])
    return f.broken("nvlink-cartridge", f"{node}/nvlink-cartridge", hurts=(), mend=_all(mend))


def peer_echo(f: SimFleet, nodes: Sequence[str]) -> None:
    """What the peers of a broken GPU print and read: lost packets, torn channels, and the driver's wish to drain peer work."""
    for n, node in enumerate(nodes):
        xid(f, node, n % 4, 145, f"RLW_SRC_TRACK Nonfatal XC0 i0 Link {n % 18:02} (0x000000e7 0x00000004 0x0 0x0 0x0 0x0 0x0)")
        xid(f, node, n % 4, 45)
        f.trays[node].set_gpu(n % 4, f.now, recovery_action=3)
        f.echoes.append((node, n % 4))


def echo_over(f: SimFleet) -> None:
    """Peers closed what they shared with the broken GPU: the driver's wish is over (open-gpu-kernel-modules, DRAIN_P2P)."""
    for node, gpu in f.echoes:
        f.trays[node].mend_gpu(PCIS[gpu])
    f.echoes.clear()
    f.stir()


def imex_lost(f: SimFleet, node: str) -> Fault:
    """Its IMEX daemon dies: the other members of the domain have lost it, and the domain is DEGRADED."""
    tray = f.trays[node]
    for other in tray.domain.addresses:
        f.trays[other].touch("imex", f.now)
    tray.domain.lost.add(node)
    return f.broken("imex-peer", node, hurts=(), mend=lambda: tray.domain.lost.discard(node))


# -- InfiniBand -----------------------------------------------------------------------------------------------------------------


def rail_down(f: SimFleet, node: str, rail: int) -> Fault:
    """One port hears nothing at its other end."""
    port_down(f, node, rail)
    return f.broken("nic-fatal", f"{node}/ib@mlx5_{rail}", hurts=f.on(node), mend=lambda: port_up(f, node, rail))


def leaf_down(f: SimFleet, rack: str, rail: int, nodes: Sequence[str]) -> Fault:
    """A leaf switch dies: that rail is down on every node at it."""
    for node in nodes:
        port_down(f, node, rail)

    def mend() -> None:
        for node in nodes:
            port_up(f, node, rail)

    return f.broken("leaf-switch", f"{rack}-leaf{rail}", hurts=(), mend=mend)


def port_down(f: SimFleet, node: str, rail: int) -> None:
    f.trays[node].port(rail, f.now, state=1, phys=2)
    f.stir()


def port_up(f: SimFleet, node: str, rail: int) -> None:
    f.trays[node].port(rail, f.now, state=4, phys=5)
    f.stir()


def nic_lost(f: SimFleet, node: str, rail: int = 0) -> Fault:
    """The adapter's firmware stops, and then the adapter is gone."""
    said = "poll_health:840:(pid 0): device's health compromised - reached miss count"
    f.trays[node].kernel(f"mlx5_core {NICS[rail]}: {said}", f.now)
    f.trays[node].port(rail, f.now, gone=True)
    return f.broken("nic-fatal", node, cured_by=REBOOT, mend=f.trays[node].ports.clear)


# -- engines, agents, nodes -----------------------------------------------------------------------------------------------------


def kill(f: SimFleet, worker: str) -> None:
    tray, process = f.home(worker), f.process(worker)
    tray.touch("worker", f.now)
    process.up, process.halted = False, f.now
    f.stir()


def engine_dead(f: SimFleet, worker: str) -> Fault:
    """Its process ends by itself."""
    kill(f, worker)
    return _of_engine(f, "worker-down", worker)


def engine_frozen(f: SimFleet, worker: str) -> Fault:
    """It makes no step any more behind a green /health."""
    tray, process = f.home(worker), f.process(worker)
    tray.touch("worker", f.now)
    process.frozen, process.halted = True, f.now
    return _of_engine(f, "engine-frozen", worker)


def _of_engine(f: SimFleet, kind: str, worker: str) -> Fault:
    """What a restart mends, whoever does it."""

    def mend() -> None:
        f.home(worker).touch("worker", f.now)
        f.process(worker).start(f.now)

    return f.broken(kind, f.home(worker).node, hurts=(worker,), cured_by=frozenset({Action.RESTART_WORKER}), mend=mend)


def agent_dead(f: SimFleet, node: str) -> Fault:
    """The agent dies; what serves there serves on."""
    f.trays[node].agent = False
    return f.broken("agent-silent", node, hurts=(), mend=lambda: f.trays[node].restart_agent(f.now))


def power_off(f: SimFleet, node: str) -> Fault:
    """A tray without power: nothing there answers, refuses or reports."""
    tray = f.trays[node]
    tray.powered = False
    for worker in f.on(node):
        f.process(worker).up = False
    return f.broken("node-dead", node, cured_by=REBOOT, mend=lambda: tray.reboot(f.now), no_start=True)


def cut_off(f: SimFleet, nodes: Sequence[str], *, workers: bool = False) -> Fault:
    """The way from these nodes' agents to the controller is cut; with ``workers``, the controller's looks are, too."""
    f.cut |= set(nodes)
    dark = {w for n in nodes for w in f.on(n)} if workers else set()
    f.dark |= dark

    def mend() -> None:
        f.cut -= set(nodes)
        f.dark -= dark

    return f.broken("node-unreachable" if workers else "agent-silent", nodes[0], hurts=(), mend=mend)


def upgrade(f: SimFleet, node: str) -> None:
    """The driver's library is replaced under the running driver (NVML 18): monitoring is blind, nothing is broken."""
    tray = f.trays[node]
    tray.touch("gpu", f.now)
    tray.driver = {"error": {"code": 18, "text": "Driver/library version mismatch"}, "driver": None, "gpus": []}
    f.stir()


def _all(todo: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def mend() -> None:
        for each in todo:
            each()

    return mend

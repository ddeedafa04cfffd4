"""What the node's own state means: judgements that need no machine, by the numbers of ``thresholds.toml``.

This module exists so that a verdict about a node can be tested without one. What always holds: only a process that hangs in
the driver for minutes is fatal; memory is the application's, clock and disk are the monitor's; what was not measured is not judged.

Sources: gpud PR#117 (processes in D state for ever behind a hung driver), linux/timex.h, kernel documentation of PSI.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from probes.judging import Judge
from probes.thresholds import limits
from probes.windows import listed, moment, number, table
from sentinel.model import Action, Component, Severity, Suspect

STA_UNSYNC = 0x40  # linux/timex.h
# Functions of NVIDIA's kernel modules, as they show in a stack: the interface layer, the resource manager's mangled names, UVM.
_IN_DRIVER = re.compile(r"(?:nv_|nvidia|_nv\d+rm|os_acquire_|os_cond_|rm_|uvm_|nvswitch|nvkms|rpcRecv|kgsp)")


def judge_host(j: Judge, data: Mapping[str, Any], memory: dict[str, Any], expected: Mapping[str, Any]) -> None:
    """Judge one reading of the host probe. ``memory``: the probe's own; ``expected``: ``gpus`` where known."""
    mono = moment(data.get("mono"))
    if mono is not None:
        _stuck(j, data, memory, mono)
        _clock_step(j, memory, mono)
    _gpus(j, data, memory, expected.get("gpus"))
    _versions(j, data)
    _clock(j, data)
    _memory(j, data, memory)
    _hung_tasks(j, data, memory)
    _spool(j, data)


def in_driver(process: Mapping[str, Any]) -> float:
    """How sure it is that a process sleeps inside NVIDIA's driver: by the function it sleeps in, else by what it has open."""
    if any(_IN_DRIVER.match(str(f)) for f in listed(process.get("where"))):
        return 0.9
    return 0.6 if process.get("nvidia") is True and not process.get("where") else 0.0


def _stuck(j: Judge, data: Mapping[str, Any], memory: dict[str, Any], mono: float) -> None:
    """Only a sleep that goes on counts: same process, same start, and not one context switch in between."""
    if not isinstance(data.get("stuck"), list):
        return
    before, now = table(memory.get("stuck")), {}
    t = limits().host
    worst: tuple[float, float, Mapping[str, Any]] = (0.0, 0.0, {})
    for process in listed(data["stuck"]):
        sure = in_driver(table(process))
        switches = number(table(process).get("switches"))
        if not sure or switches is None:
            continue
        key = f"{process.get('pid')}/{process.get('started')}/{switches}"
        now[key] = min(table(before).get(key, mono), mono)
        worst = max(worst, (mono - now[key], sure, process), key=lambda w: w[:2])
    memory["stuck"] = now
    lasting, sure, process = worst
    driver = Component(node=j.node, device="driver")
    fatal = lasting >= t.stuck_sure_s and sure >= 0.8
    j.state("driver.process_hung", driver, lasting >= t.stuck_noted_s, severity=Severity.FATAL if fatal else Severity.WARNING,
            action=Action.REBOOT_NODE if fatal else Action.INSPECT, certainty=sure,
            facts={"pid": process.get("pid"), "hung_s": round(lasting, 1), "processes": len(now)},
            evidence=(f"pid={process.get('pid')} comm={str(process.get('comm'))[:32]!r} state=D",
                      f"sleeps in {' < '.join(map(str, listed(process.get('where'))[:6]))}"[:300]),
            summary=f"A process ({str(process.get('comm'))[:32]}) has been stuck inside the GPU driver for {lasting:.0f} s.")


def _gpus(j: Judge, data: Mapping[str, Any], memory: dict[str, Any], wanted: Any) -> None:
    """GPUs that the bus shows. Whether one is lost is the gpu probe's to say; this holds while its driver does not answer."""
    gpus, most = data.get("gpus"), number(wanted)
    if not isinstance(gpus, list):
        return
    known: list[str] = memory.get("gpus", [])
    here = sorted(str(table(g).get("pci")) for g in gpus)
    gone = sorted(set(known) - set(here))
    memory["gpus"] = sorted({*known, *here})[:64]
    short = most is not None and len(here) < most
    if not known and most is None and not here:
        return  # a machine without GPUs, of which nobody expects any
    j.state("host.gpu_count", Component(node=j.node), bool(gone) or short, severity=Severity.WARNING, action=Action.INSPECT,
            certainty=0.9 if gone else 0.7, facts={"here": len(here), "expected": most, "gone": gone},
            evidence=(f"on the bus: {here}"[:300],),
            summary=f"The PCI bus shows {len(here)} GPUs" + (f", {most} are expected" if short else "")
                    + (f"; {', '.join(gone)} was here before" if gone else "") + ".")  # fmt: skip
    drivers = [str(table(g).get("driver")) for g in gpus if table(g).get("driver") is not None]
    idle = drivers.count("")
    if drivers and "nvidia" in drivers:  # a node on which no GPU is the driver's has another purpose, or no driver yet
        j.state("host.gpu_unbound", Component(node=j.node), idle > 0, severity=Severity.WARNING, action=Action.INSPECT,
                certainty=0.8, evidence=(f"drivers: {drivers}"[:300],),
                summary=f"{idle} GPUs are on the bus and no driver holds them.")


def _versions(j: Judge, data: Mapping[str, Any]) -> None:
    """The same check as when NVML says so, about the library as a part of its own: NVML of an old process says that all is well."""
    module, libraries = data.get("module"), [str(v) for v in listed(data.get("libraries"))]
    if not isinstance(module, str) or not libraries:
        return
    j.state("driver.version_mismatch", Component(node=j.node, device="driver", part="library"), module not in libraries,
            severity=Severity.WARNING, action=Action.REBOOT_NODE, suspect=Suspect.MONITOR, certainty=0.9,
            evidence=(f"module {module}", f"library {', '.join(libraries)}"[:200]),
            summary=f"The driver's module is {module} and its library on disk {', '.join(libraries)[:60]}: "
                    "what starts now finds no GPU, and nothing else is known.")  # fmt: skip


def _clock(j: Judge, data: Mapping[str, Any]) -> None:
    status = number(table(data.get("clock")).get("status"))
    if status is not None:
        # Only information: a daemon may keep the clock right without telling the kernel (chrony without rtcsync).
        j.state("host.clock_unsynchronised", Component(node=j.node, device="clock"), bool(status & STA_UNSYNC),
                suspect=Suspect.MONITOR, evidence=(f"adjtimex status=0x{status:x}",),
                summary="The kernel does not know its clock to be synchronised.")


def _clock_step(j: Judge, memory: dict[str, Any], mono: float) -> None:
    last = table(memory.get("clock"))
    memory["clock"] = {"at": j.at, "mono": mono}
    if last and mono > last["mono"]:
        step = (j.at - last["at"]) - (mono - last["mono"])
        if abs(step) >= limits().host.clock_step_s:
            j.event("host.clock_step", Component(node=j.node, device="clock"), severity=Severity.WARNING, action=Action.FIX_MONITOR,
                    suspect=Suspect.MONITOR, facts={"step_s": round(step, 3)}, evidence=(f"step={step:+.3f} s",),
                    summary=f"The wall clock was set by {step:+.1f} s.")


def _memory(j: Judge, data: Mapping[str, Any], memory: dict[str, Any]) -> None:
    m, where, t = table(data.get("memory")), Component(node=j.node, device="memory"), limits().host
    total, available, full = number(m.get("total_mib")), number(m.get("available_mib")), moment(m.get("full_avg60"))
    if total and available is not None:
        tight = available < total * t.memory_free_share or (full or 0.0) >= t.memory_wait_percent
        there = j.steady("host.memory_pressure", where, tight, t.memory_run)
        if there is not None:
            j.state("host.memory_pressure", where, there, severity=Severity.WARNING, action=Action.INSPECT, suspect=Suspect.APP,
                    certainty=0.8, evidence=(f"available={available} MiB of {total}", f"full avg60={full}"),
                    summary=f"Memory is short: {available} MiB of {total} available, all work waits {full or 0:.0f} % of the time.")
    kills = number(m.get("oom_kills"))
    before, memory["oom_kills"] = number(memory.get("oom_kills")), kills
    if kills is not None and before is not None and kills > before:
        j.event("host.oom_kill", where, severity=Severity.WARNING, action=Action.INSPECT, suspect=Suspect.APP, count=kills - before,
                evidence=(f"oom_kill={kills}",), summary=f"The kernel killed {kills - before} processes for want of memory.")


def _hung_tasks(j: Judge, data: Mapping[str, Any], memory: dict[str, Any]) -> None:
    count = number(data.get("hung_tasks"))
    before, memory["hung_tasks"] = number(memory.get("hung_tasks")), count
    if count is not None and before is not None and count > before:
        j.event("host.hung_task", Component(node=j.node, device="kernel"), severity=Severity.WARNING, action=Action.INSPECT,
                certainty=0.6, count=count - before, evidence=(f"hung_task_detect_count={count}",),
                summary=f"The kernel found {count - before} tasks blocked for longer than it allows; its log names them.")


def _spool(j: Judge, data: Mapping[str, Any]) -> None:
    s = table(data.get("spool"))
    free, files = number(s.get("free_mib")), number(s.get("free_files"))
    if free is None:
        return
    full = free < limits().host.spool_free_mib or files == 0
    j.state("host.spool_space", Component(node=j.node, device="spool"), full or s.get("read_only") is True,
            severity=Severity.WARNING, action=Action.FIX_MONITOR, suspect=Suspect.MONITOR, evidence=(f"{dict(s)}"[:200],),
            summary="The agent's folder cannot be written to." if s.get("read_only") is True and not full
                    else f"Only {free} MiB are free where the agent keeps what it has not sent.")  # fmt: skip

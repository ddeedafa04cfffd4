"""The GPUs of this node as their driver describes them: read through somebody else's process, judged here.

This module exists so that what NVML says becomes findings, and what it does not say becomes none. What always holds:

* The probe never opens the driver: it reads through ``Context.driver``, and sysfs for what can be seen without it.
* No driver here, a driver that was upgraded under a running library, a missing permission: about the monitor, never hardware.
* A driver past its deadline is a fact about the driver (``driver.hung``), surer the longer it lasts.
* A GPU is named by its PCI address. One that the driver cannot name any more is named by elimination, or else its node is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from probes import Context, ProbeError
from probes.c2c import judge_c2c
from probes.gpu_policy import GONE, clusters, judge_gpu
from probes.gpu_wear import judge_wear
from probes.judging import Judge
from probes.nvlink_counters import judge_links
from probes.pci import off_bus
from probes.profile import expected_for
from probes.thresholds import limits
from sentinel.model import READING_FORMAT, Action, Component, Finding, Reading, Severity, Suspect, gpu_component, pci_address

NO_LIBRARY, NOT_LOADED, MISMATCH = 12, 9, 18  # NVML return codes of initialisation
OPTIONS = frozenset({"enabled", "interval"})


class GpuProbe:
    name = "gpu"
    interval_s = 5.0

    def __init__(self, context: Context) -> None:
        unknown = sorted(set(context.options) - OPTIONS)
        if unknown:
            raise ProbeError(f"unknown option {unknown[0]!r}; the gpu probe knows {', '.join(sorted(OPTIONS))}")
        self._context = context

    async def read(self) -> Reading:
        """Ask the driver and look at sysfs. Raises ProbeError when the driver's process could not be asked."""
        context = self._context
        if context.driver is None:
            raise ProbeError("the gpu probe was given no way to the driver")
        bound = _bound(context)
        data = await context.driver.read()
        boot = _first_line(context.proc / "sys/kernel/random/boot_id")
        # ``mono``: a wall clock that is set must not make a GPU that just began to join its fabric one that never ends joining.
        data |= {"bound": bound, "mono": time.monotonic()}
        return Reading(probe=self.name, node=context.node, at=time.time(), boot_id=boot, data=data)

    def assess(self, reading: Reading, memory: dict[str, Any], expected: Mapping[str, Any]) -> list[Finding]:
        """Judge one reading. ``expected``: ``gpus``, ``nvlinks`` (numbers) and ``driver`` (version), where known; see ``profile``.

        Raises ProbeError for a reading of another format and for an expectation of the wrong kind.
        """
        if reading.format != READING_FORMAT:
            raise ProbeError(f"a gpu reading of format {reading.format}; this sentinel knows format {READING_FORMAT}")
        if memory.get("boot") not in (None, reading.boot_id):
            memory.clear()  # every counter and state began anew
        memory["boot"] = reading.boot_id
        expected = expected_for(reading, expected, memory.setdefault("kind", {}))
        wanted, links = _number(expected, "gpus"), _number(expected, "nvlinks")
        judge = Judge(reading.node, reading.at, memory, reading.data.get("mono"))
        if not _driver(judge, reading, wanted, expected.get("driver")):
            return judge.findings()
        gpus: list[dict[str, Any]] = [dict(g) for g in reading.data["gpus"]]
        bound = reading.data.get("bound") or []
        _name_the_nameless(gpus, memory, bound)
        answered = [g for g in gpus if g.get("pci") and not g.keys() & {"error", "hung_s", "failed"} and "unread" in g]
        for gpu in gpus:
            if "hung_s" in gpu or gpu in answered:
                # One that cannot be named is the driver's: its hang says nothing about which GPU is bad.
                where = gpu_component(judge.node, gpu["pci"]) if gpu["pci"] else Component(node=judge.node, device="driver")
                _hung(judge, where, gpu.get("hung_s"))
        off_bus = {b["pci"] for b in bound if b["off_bus"]} & set(memory.get("known", ()))
        _lost(judge, gpus, answered, off_bus, memory)
        for check in ("gpu.lost_unnamed", "gpu.unreadable"):  # said about the node while a GPU could not be named
            if judge.was(check, Component(node=judge.node)) and not judge.said(check, Component(node=judge.node)):
                judge.state(check, Component(node=judge.node), False)
        for gpu in answered:
            if pci_address(gpu["pci"]) not in off_bus:
                own = memory.setdefault("gpus", {}).setdefault(pci_address(gpu["pci"]), {})
                where = gpu_component(judge.node, gpu["pci"])
                judge_gpu(judge, where, gpu, own, links, nvl72=expected.get("mnnvl") is True)
                judge_links(judge, where, gpu, own, expected)
                judge_c2c(judge, where, gpu, own, expected)
                judge_wear(judge, where, gpu, own)
        _count(judge, len(gpus), wanted, memory)
        _one_domain(judge, answered)
        return judge.findings()

    def describe(self, reading: Reading) -> list[str]:
        """The reading in words: one line for the driver and one for each GPU."""
        data = reading.data
        if data.get("error"):
            return [f"no answer from the driver: {data['error'].get('text')}"]
        if "hung_s" in data:
            return [f"the driver has not answered for {data['hung_s']:.0f} s"]
        through = "" if data.get("nvml") in (None, "pynvml") else f", SIMULATED by {data['nvml']}"
        head = f"driver {data.get('driver') or 'of unknown version'}, {len(data['gpus'])} GPUs{through}"
        return [head, *map(_words, data["gpus"])]

    def commit(self, reading: Reading) -> None:
        """Nothing is consumed by looking."""

    async def close(self) -> None:
        """The driver belongs to whoever made it."""


# -- the driver itself --------------------------------------------------------------------------------------------------------


def _driver(j: Judge, reading: Reading, wanted: int | None, version: Any) -> bool:
    """Judge the driver; False when it said nothing about any GPU."""
    data, driver = reading.data, Component(node=j.node, device="driver")
    if "hung_s" in data:
        _hung(j, driver, data["hung_s"])
        return False
    error = data.get("error")
    if error:
        code, text = error.get("code"), error.get("text", "")
        evidence = (f"nvmlInit: {text} ({code})",)
        if code == MISMATCH:
            j.state("driver.version_mismatch", driver, True, severity=Severity.WARNING, action=Action.REBOOT_NODE,
                    suspect=Suspect.MONITOR, evidence=evidence,
                    summary="The driver's library and kernel module differ in version: monitoring is blind, nothing else is known.")
        elif code in (NO_LIBRARY, NOT_LOADED):
            j.state("driver.missing", driver, True, severity=Severity.WARNING if wanted else Severity.INFO,
                    action=Action.FIX_MONITOR if wanted else Action.NONE, suspect=Suspect.MONITOR, evidence=evidence,
                    summary=f"No GPU driver answers here{f', where {wanted} GPUs are expected' if wanted else ''}.")
        else:
            j.state("driver.unusable", driver, True, severity=Severity.WARNING, action=Action.FIX_MONITOR, suspect=Suspect.MONITOR,
                    evidence=evidence, summary=f"The GPU driver cannot be asked from here: {text}.")
        return False
    for check in ("driver.version_mismatch", "driver.missing", "driver.unusable", "driver.hung"):
        j.state(check, driver, False)
    if version is not None and data.get("driver"):
        j.state("driver.version", driver, data["driver"] != version, suspect=Suspect.MONITOR,
                evidence=(f"driver={data['driver']}",), summary=f"The driver is {data['driver']}; {version} is expected.")
    return True


def _hung(j: Judge, component: Component, seconds: float | None) -> None:
    lasting, t = seconds or 0.0, limits().gpu
    certainty = 1.0 if lasting >= t.hung_sure_s else 0.8 if lasting >= t.hung_likely_s else 0.5
    j.state("driver.hung", component, seconds is not None, severity=Severity.FATAL, action=Action.REBOOT_NODE, certainty=certainty,
            evidence=(f"hung_s={lasting:.1f}",), facts={"hung_s": lasting},
            summary=f"A call into the GPU driver has not come back for {lasting:.0f} s.")


# -- which GPUs there are -----------------------------------------------------------------------------------------------------


def _name_the_nameless(gpus: list[dict[str, Any]], memory: dict[str, Any], bound: list[dict[str, Any]]) -> None:
    """Give a GPU without an address the only one that is left, if only one is."""
    nameless = [g for g in gpus if not g.get("pci")]
    named = {pci_address(g["pci"]) for g in gpus if g.get("pci")}
    left = ({b["pci"] for b in bound} | set(memory.get("known", ()))) - named
    if len(nameless) == 1 and len(left) == 1:
        nameless[0]["pci"] = left.pop()


def _lost(j: Judge, gpus: list[dict[str, Any]], answered: list[dict[str, Any]], off_bus: set[str], memory: dict[str, Any]) -> None:
    """GPUs that the driver or the bus has given up, and those that were here and are not any more."""
    known = set(memory.get("known", ()))
    for gpu in gpus:
        where = gpu_component(j.node, gpu["pci"]) if gpu.get("pci") else Component(node=j.node)
        error = gpu.get("error")
        code = error.get("code") if error else None
        if error and code in GONE:
            if code != 15 and j.run("gpu.lost_vague", where, True) < limits().gpu.lost_run:
                continue  # only GpuIsLost is clear at once
            _is_lost(j, where, GONE[code], f"{error.get('text')} ({code})")
        elif error or "failed" in gpu:
            why = f"{error.get('text')} ({code})" if error else str(gpu["failed"])
            j.state("gpu.unreadable", where, True, severity=Severity.WARNING, action=Action.FIX_MONITOR, suspect=Suspect.MONITOR,
                    evidence=(why,), summary="The driver answers, but not for this GPU.")
        elif gpu in answered:
            j.run("gpu.lost_vague", where, False)
            j.state("gpu.unreadable", where, False)
            if pci_address(gpu["pci"]) not in off_bus:
                j.state("gpu.lost", where, False)
    for pci in sorted(off_bus):
        _is_lost(j, gpu_component(j.node, pci), 1.0, "its PCI configuration space reads all ones")
    named = {pci_address(g["pci"]) for g in gpus if g.get("pci")}
    if all(g.get("pci") for g in gpus):
        for pci in sorted(known - named - off_bus):
            _is_lost(j, gpu_component(j.node, pci), 0.9, "it was here before and the driver no longer lists it")
    memory["known"] = sorted(known | {pci_address(g["pci"]) for g in answered})


def _is_lost(j: Judge, where: Component, certainty: float, why: str) -> None:
    # Without a name nobody can say whose GPU it is, so it is another check: nothing is evicted on it at once.
    j.state("gpu.lost" if where.gpu else "gpu.lost_unnamed", where, True, severity=Severity.FATAL, action=Action.REBOOT_NODE,
            certainty=certainty if where.gpu else 0.7, evidence=(why,), summary=f"A GPU is gone: {why}.")


def _count(j: Judge, here: int, wanted: int | None, memory: dict[str, Any]) -> None:
    if wanted is None:
        return
    seen_all = memory["had_all"] = memory.get("had_all", False) or here >= wanted
    too_many = here > wanted
    # Fewer than ever seen is a fact; fewer than a number in a file may be the file's mistake.
    j.state("gpu.count", Component(node=j.node), here != wanted, severity=Severity.WARNING if too_many else Severity.FATAL,
            action=Action.FIX_MONITOR if too_many else Action.REBOOT_NODE, suspect=Suspect.MONITOR if too_many else Suspect.SELF,
            certainty=1.0 if seen_all else 0.8, facts={"here": here, "expected": wanted}, evidence=(f"gpus={here}",),
            summary=f"{here} GPUs are here; {wanted} are expected.")


def _one_domain(j: Judge, answered: list[dict[str, Any]]) -> None:
    names = clusters(answered)
    if names:
        j.state("gpu.fabric_split", Component(node=j.node), len(names) > 1, severity=Severity.WARNING, action=Action.INSPECT,
                suspect=Suspect.SWITCH, evidence=tuple(sorted(names)),
                summary="The GPUs of this node say that they belong to different NVLink domains.")
        cliques = {str(g["fabric_clique"]) for g in answered if clusters([g]) and g.get("fabric_clique") is not None}
        j.state("gpu.clique_split", Component(node=j.node), len(cliques) > 1, evidence=tuple(sorted(cliques)),
                summary="The GPUs of this node are in different NVLink partitions: no peer-to-peer work between those.")


def _words(gpu: Mapping[str, Any]) -> str:
    where = gpu.get("pci") or f"GPU {gpu.get('index')}"
    if "hung_s" in gpu:
        return f"{where}: no answer for {gpu['hung_s']:.0f} s"
    if "unread" not in gpu:
        return f"{where}: {(gpu.get('error') or {}).get('text') or gpu.get('failed') or 'not measured'}"
    links, power = gpu.get("links"), gpu.get("power_average_mw")
    up = "not measured" if links is None else f"{sum(s in (1, 2) for s in links)}/{len(links)}"
    shown = {
        "": gpu.get("name"),
        "°C": gpu.get("temperature_c"),
        "W": None if power is None else round(power / 1000),
        "% busy": gpu.get("utilization_percent"),
    }
    values = " ".join(f"{v}{unit}" if v is not None else f"?{unit}" for unit, v in shown.items())
    fabric = {None: "not measured", 0: "none", 1: "not started", 2: "joining", 3: "joined"}.get(gpu.get("fabric_state"), "unknown")
    return f"{where}: {values}, NVLinks {up}, fabric {fabric}"


# -- small helpers ------------------------------------------------------------------------------------------------------------


def _number(expected: Mapping[str, Any], key: str) -> int | None:
    value = expected.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ProbeError(f"expected.{key}: wanted a whole number, got {value!r}")
    return value


def _bound(context: Context) -> list[dict[str, Any]] | None:
    """Devices that the nvidia driver holds, and whether each has left the bus; None when sysfs cannot be read."""
    try:
        entries = sorted(p for p in (context.sys / "bus/pci/drivers/nvidia").iterdir() if p.name.count(":") == 2)
    except OSError:
        return None
    found = []
    for entry in entries:
        try:
            pci = pci_address(entry.name)
        except ValueError:
            continue
        found.append({"pci": pci, "off_bus": off_bus(entry)})
    return found


def _first_line(path: Any) -> str:
    try:
        text: str = path.read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return ""
    return text.strip()

"""What the values of one GPU mean: every number in ``thresholds.toml``, every judgement a small pure function.

This module exists so that a verdict about a GPU can be read, cited and tested without a GPU. What always holds:

* ``None`` yields no finding, neither present nor fine; a value outside what is known goes to a person, never to a repair.
* A value that one odd sample can fake must repeat before it is said (``run``); rates come from counters between two readings.
* Memory is plain JSON values, one table per GPU.

Sources: nvml.h by its field and constant names, NVIDIA DCGM 4.6 (DcgmHealthWatch), Azure healthagent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from probes.catalog import recoveries
from probes.gpu_clocks import judge_clocks
from probes.judging import Judge
from probes.thresholds import limits
from sentinel.model import Action, Component, Severity, Suspect

NVL72_LINKS = 18  # NVLinks of a GB200/GB300 GPU, all to switches (HV expected_link_count)
LINK_INACTIVE, LINK_DISABLED = 0, 3  # nvml.h NVML_NVLINK_STATE_*; 1 active and 2 sleep are healthy

# NVML code of a GPU that does not answer → how sure it is that the GPU is gone (15 GpuIsLost, 28 GpuNotFound, 999 Unknown:
# "Unable to determine the device handle" is what a GPU off the bus looked like in the field, and also a lost cgroup).
GONE = {15: 1.0, 28: 0.9, 999: 0.7}
RESET_REQUIRED = 16

# nvml.h NVML_GPU_FABRIC_HEALTH_MASK_*: name → (shift, bad value). Two bits each; 0 is "not reported", never "false".
HEALTH_BAD = {"degraded_bandwidth": (0, 1), "route_unhealthy": (4, 1), "partition_unassigned": (12, 2)}
HEALTH_RECOVERING = {"route_recovery": (2, 1), "access_timeout_recovery": (6, 1)}
HEALTH_CONTROLLER = {"fabric_manager_disconnected": (14, 2)}  # traffic usually goes on; it is the rack's, not the GPU's
CONFIGURATION = {  # four bits at 8
    2: "wrong system GUID", 3: "wrong chassis serial number", 4: "no partition", 5: "too few NVLinks",
    6: "incompatible GPU firmware", 7: "invalid location", 8: "invalid GPU state",
}


Gpu = Mapping[str, Any]


def judge_gpu(
    j: Judge, c: Component, gpu: Gpu, memory: dict[str, Any], links: int | None, *, nvl72: bool | None = None
) -> None:
    """Judge one answered reading of one GPU. ``memory``: its own table; ``links``: how many NVLinks it should have, if known.

    ``nvl72``: its NVLink domain spans nodes; None: nobody has asked the GPU, as with pasted text, and its name must do.
    """
    if nvl72 is None:
        nvl72 = any(name in (gpu.get("name") or "") for name in ("GB200", "GB300"))
        links = NVL72_LINKS if links is None and nvl72 else links
    _memory_rows(j, c, gpu)
    _ecc(j, c, gpu, memory)
    _recovery(j, c, gpu)
    # A GPU passed through alone has neither links nor a fabric to join.
    if (links or gpu.get("links")) and _fabric_state(j, c, gpu, nvl72):
        _fabric_health(j, c, gpu)
    if links:
        _links(j, c, gpu, links, memory)
    _thermal(j, c, gpu)
    judge_clocks(j, c, gpu, memory)
    _power(j, c, gpu, nvl72)
    _pcie(j, c, gpu, memory)


def _memory_rows(j: Judge, c: Component, gpu: Gpu) -> None:
    pending, failure, bad = gpu.get("rows_pending"), gpu.get("rows_failure"), gpu.get("rows_uncorrected")
    histogram = gpu.get("rows_histogram")
    evidence = _values(gpu, "rows_pending", "rows_failure", "rows_corrected", "rows_uncorrected", "rows_histogram")
    if pending is not None:
        j.state("gpu.row_remap_pending", c, pending, severity=Severity.WARNING, action=Action.RESET_GPU, evidence=evidence,
                summary="A bad memory row is set aside at the next GPU reset; work may continue until then.")
    if failure is not None:
        j.state("gpu.row_remap_failure", c, failure, severity=Severity.FATAL, action=Action.CONTACT_SUPPORT, evidence=evidence,
                summary="A bad memory row could not be set aside: no spare row is left where it is needed.")
    if histogram is not None or bad is not None:
        without, many = (histogram or {}).get("none", 0), (bad or 0) > limits().gpu.rows_most
        j.state("gpu.row_remap_spares", c, bool(without) or many, severity=Severity.WARNING if many else Severity.INFO,
                action=Action.CONTACT_SUPPORT if many else Action.NONE, evidence=evidence,
                summary=f"{without} memory banks have no spare row left; {bad or 0} rows were set aside for uncorrectable errors.")


def _ecc(j: Judge, c: Component, gpu: Gpu, memory: dict[str, Any]) -> None:
    now, before = gpu.get("ecc_uncorrected_volatile"), memory.get("ecc")
    if now is not None:
        rise = 0 if before is None else now - before if now >= before else now  # a smaller value: counted from a reset on
        memory["ecc"] = now
        if rise > 0:
            j.event("gpu.ecc_uncorrected", c, severity=Severity.WARNING, action=Action.RESET_GPU, count=rise,
                    facts={"rise": rise, "volatile": now},
                    evidence=_values(gpu, "ecc_uncorrected_volatile", "ecc_uncorrected_aggregate", "sram_uncorrected_volatile"),
                    summary=f"{rise} uncorrectable memory errors since the last look; the kernel log says whom they hit.")
    exceeded = gpu.get("sram_threshold_exceeded")
    if exceeded is not None:
        j.state("gpu.sram_threshold", c, exceeded, severity=Severity.FATAL, action=Action.CONTACT_SUPPORT,
                evidence=_values(gpu, "sram_threshold_exceeded", "sram_uncorrected_volatile"),
                summary="SRAM errors are past NVIDIA's own threshold: field diagnostics, then replacement.")


def _recovery(j: Judge, c: Component, gpu: Gpu) -> None:
    value, refused = gpu.get("recovery_action"), RESET_REQUIRED in (gpu.get("unread") or {}).values()
    if value is None and not refused:
        return
    evidence = _values(gpu, "recovery_action", "unread")
    wanted = 1 if refused and not value else value
    known, name = recoveries(), ""
    if wanted in known:
        name, judged = known[wanted]
        what, severity, action, suspect, certainty = judged.advice, judged.severity, judged.action, judged.suspect, 1.0
    else:  # newer than what is known: a person looks
        what, severity, action = f"it asks for something unknown (value {wanted})", Severity.WARNING, Action.INSPECT
        suspect, certainty = Suspect.SELF, 0.5
    j.state("gpu.recovery_action", c, bool(wanted), severity=severity, action=action, suspect=suspect, certainty=certainty,
            evidence=evidence, facts={"value": wanted, "name": name}, summary=f"The driver's recovery action: {what}.")


def _fabric_state(j: Judge, c: Component, gpu: Gpu, nvl72: bool) -> bool:
    """Judge whether it has joined. False while it may still be joining: no partition and no controller is normal then."""
    state, status = gpu.get("fabric_state"), gpu.get("fabric_status")
    # Its kind spans nodes and its links end at switches, yet it knows no fabric, or has joined one without a name.
    homeless = state == 0 or (state == 3 and not str(gpu.get("fabric_cluster") or "?").strip("0"))
    outside = nvl72 and homeless and bool(gpu.get("switch_links"))
    if not state and not outside:  # None: not measured; 0: this GPU knows no fabric
        return True
    waits = j.lasts_s("gpu.fabric_waits", c, state in (1, 2) or outside)
    if (state in (1, 2) or outside) and waits < limits().fabric.joining_s:
        return False  # normal after a boot or a reset
    evidence = _values(gpu, "fabric_state", "fabric_status", "fabric_clique", "fabric_cluster")
    # Compute trays of an NVL72 run no Fabric Manager; an HGX baseboard waits for one.
    action = Action.RESET_GPU if nvl72 else Action.RESTART_FABRIC_MANAGER
    summary, severity = f"Joining the NVLink fabric failed with NVML code {status}.", Severity.FATAL
    if state == 1:
        summary = f"Joining the NVLink fabric has not begun for {waits:.0f} s."
    elif state == 2:
        summary, severity = f"Joining the NVLink fabric is not finished after {waits:.0f} s.", Severity.WARNING
    elif outside and not status:
        summary, severity, action = "It has joined no NVLink domain, though it is wired to one.", Severity.WARNING, Action.INSPECT
    elif state != 3:
        summary, severity, action = f"The NVLink fabric is in the unknown state {state}.", Severity.WARNING, Action.INSPECT
    present = state != 3 or bool(status) or outside
    j.state("gpu.fabric_state", c, present, severity=severity, action=action, evidence=evidence, summary=summary)
    return True


def _fabric_health(j: Judge, c: Component, gpu: Gpu) -> None:
    mask, summary = gpu.get("fabric_health_mask") or 0, gpu.get("fabric_summary") or 0
    if not mask and not summary:
        return

    def bad(fields: dict[str, tuple[int, int]]) -> list[str]:
        return [name for name, (shift, value) in fields.items() if mask >> shift & 0x3 == value]

    broken, recovering, away = bad(HEALTH_BAD), bad(HEALTH_RECOVERING), bad(HEALTH_CONTROLLER)
    configuration = mask >> 8 & 0xF
    if configuration > 1:
        broken.append(f"configuration: {CONFIGURATION.get(configuration, f'unknown value {configuration}')}")
    stuck = j.lasts_s("gpu.fabric_recovers", c, bool(recovering)) >= limits().fabric.recovering_s
    fatal = bool(broken) or stuck
    odd = [f"summary {summary}"] if summary in (2, 3) else []  # UNHEALTHY, LIMITED_CAPACITY
    wrong = broken + recovering + away + odd
    # Somebody has to configure it, or to look at the fabric: nvml.h names no repair for a bad route, and a reset changes neither.
    by_hand = configuration > 1 or bool({"partition_unassigned", "route_unhealthy"} & set(broken))
    only_rack = bool(away) and not (broken or recovering or odd)
    j.state("gpu.fabric_health", c, bool(wrong), severity=Severity.FATAL if fatal else Severity.WARNING,
            action=Action.RESET_GPU if fatal and not by_hand else Action.INSPECT if by_hand or away or odd else Action.NONE,
            suspect=Suspect.SWITCH if only_rack else Suspect.SELF, certainty=1.0 if broken else 0.8,
            facts={"mask": mask, "summary": summary}, evidence=(f"fabric_health_mask=0x{mask:x}", f"fabric_summary={summary}"),
            summary=f"The NVLink fabric's own health word for this GPU: {', '.join(wrong)}.")


def _links(j: Judge, c: Component, gpu: Gpu, expected: int, memory: dict[str, Any]) -> None:
    states = gpu.get("links")
    if states is None:
        return
    measured = {n: s for n, s in enumerate(states) if s is not None}
    down = [n for n, s in measured.items() if s in (LINK_INACTIVE, LINK_DISABLED)]
    first = "links" not in memory  # once all of them, so that what an earlier agent reported can end; then only those ever down
    ever = sorted(set(memory.get("links", measured)) | set(down))
    memory["links"] = sorted(set(() if first else ever) | set(down))
    for n in ever:
        if n in measured:
            j.state("gpu.nvlink_down", Component(node=c.node, device=c.device, part=f"nvlink{n}"), n in down,
                    severity=Severity.FATAL, action=Action.RESET_GPU, certainty=0.9, facts={"link": n, "state": measured[n]},
                    evidence=(f"links[{n}]={measured[n]}",),
                    summary=f"NVLink {n} is {'inactive' if measured[n] == LINK_INACTIVE else 'up, its traffic disabled'}.")
    if not measured:
        return
    all_down, short = len(down) == len(measured), len(states) < expected
    j.state("gpu.nvlink_down", c, all_down or short, severity=Severity.FATAL, action=Action.RESET_GPU,
            certainty=1.0 if all_down else 0.8, facts={"links": down, "expected": expected}, evidence=_values(gpu, "links"),
            summary=f"{len(measured) - len(down)} of {len(states)} NVLinks are up; {expected} are expected.")


def _thermal(j: Judge, c: Component, gpu: Gpu) -> None:
    margin = gpu.get("margin_c")
    if margin is None:
        return
    t = limits().gpu
    hot = margin <= (t.margin_cool_c if j.was("gpu.thermal", c) else t.margin_hot_c)
    j.state("gpu.thermal", c, hot, severity=Severity.WARNING, action=Action.INSPECT, certainty=0.9,
            evidence=_values(gpu, "margin_c", "temperature_c", "memory_temperature_c"),
            summary=f"The GPU is {margin} °C below the temperature at which it slows down.")


def _power(j: Judge, c: Component, gpu: Gpu, nvl72: bool) -> None:
    power = gpu.get("power_average_mw")
    if power is None:
        return
    t = limits().gpu
    least = t.power_least_mw if nvl72 else 1  # other boards idle lower; zero is a sensor that does not answer
    there = j.steady("gpu.power", c, not least <= power <= t.power_most_mw, t.power_run)
    if there is not None:
        j.state("gpu.power", c, there, severity=Severity.WARNING, action=Action.INSPECT, certainty=0.8,
                evidence=_values(gpu, "power_average_mw", "power_instant_mw", "power_limit_mw"),
                summary=f"Its average power reads {power / 1000:g} W, which is not plausible.")


def _pcie(j: Judge, c: Component, gpu: Gpu, memory: dict[str, Any]) -> None:
    """Once for each time that it was read: a speed that an idle link had a while ago is none that it has under the load of now."""
    t, at = limits().gpu, gpu.get("slow_at")
    if at is not None and at == memory.get("pcie_at"):
        return
    memory["pcie_at"] = at

    def less(check: str, what: str, loaded: bool) -> None:
        now, most = gpu.get(f"pcie_{what}"), gpu.get(f"pcie_{what}_max")
        if not now or not most or not loaded:
            return
        there = j.steady(check, c, now < most, t.pcie_run)
        if there is not None:
            j.state(check, c, there, severity=Severity.WARNING, action=Action.INSPECT, certainty=0.8,
                    evidence=_values(gpu, "pcie_width", "pcie_width_max", "pcie_gen", "pcie_gen_max", "utilization_percent"),
                    summary=f"Its PCIe link runs at {what} {now}; it could at {most}.")

    less("gpu.pcie_width", "width", loaded=True)
    less("gpu.pcie_gen", "gen", loaded=(gpu.get("utilization_percent") or 0) >= t.pcie_load_percent)


def _values(gpu: Gpu, *names: str) -> tuple[str, ...]:
    return tuple(f"{name}={gpu[name]}" for name in names if gpu.get(name) is not None)


def clusters(gpus: Iterable[Gpu], key: Callable[[Gpu], Any] = lambda g: g.get("fabric_cluster")) -> set[str]:
    """The NVLink domains that the GPUs of one node say they belong to; all zeros means none."""
    return {str(key(g)) for g in gpus if g.get("fabric_state") == 3 and key(g) and str(key(g)).strip("0")}

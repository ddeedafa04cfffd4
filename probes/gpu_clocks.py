"""Why a GPU runs slower than it could: heat, a power brake, and what its board may draw.

This module exists so that the three ways in which NVML tells it become one word. What always holds:

* Time counts before samples: a driver's counters of nanoseconds say for how much of a window the clocks were held down.
* A driver has one such source. Where it tells the causes apart (fields 269 to 271), the older counters of time in violation (74
  to 79) are neither read nor judged, so that the same heat never counts twice.
* Power capping and sync boost are normal under load: they are read, shown as evidence, and never a finding.

Sources: nvml.h (NVML_FI_DEV_CLOCKS_EVENT_REASON_*, NVML_FI_DEV_PERF_POLICY_*: nanoseconds below the application clocks by cause,
since the driver was loaded), Azure healthagent for the mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probes.judging import Judge
from probes.thresholds import limits
from probes.windows import Windows, moment, number, say, table
from sentinel.model import Action, Component, Severity

SLOWDOWN_MASK = 0xE8  # HW slowdown, SW and HW thermal, power brake (Azure healthagent); power capping is normal under load
THERMAL = "thermal"
# Not the power limit: an H200 held at its 700 W spent 99.9 % of the time in violation of "power" and none of it in these, nor in
# "thermal" (measured, driver 580). A moment of them is no fault; minutes are for a person to read (judgement).
LIMITS = {"board_limit": "The power that its board can carry", "reliability": "The voltage at which it is still reliable"}

Gpu = Mapping[str, Any]


def judge_clocks(j: Judge, c: Component, gpu: Gpu, memory: dict[str, Any]) -> None:
    """Judge one answered GPU. ``memory``: this GPU's own."""
    share = _share(gpu, memory)
    hot = _violations(j, c, gpu, memory)  # windows; None: not measured
    reasons = gpu.get("clocks_event_reasons")
    sampled = None if reasons is None else j.run("gpu.slowdown_sampled", c, bool(reasons & SLOWDOWN_MASK))
    if sampled is None and share is None and hot is None:
        return
    was, t = j.was("gpu.clocks_slowdown", c), limits().gpu
    slow = (share or 0.0) >= t.slowdown_share or (sampled or 0) >= t.slowdown_run or (hot or 0) >= t.violation_windows.bad
    some = bool(sampled or hot)
    if not slow and some and not was:
        return  # not decided yet
    windows = f"{hot} of the last {t.violation_windows.of} windows" if hot else ""
    part = f"{share:.0%} of the time" if share else windows or f"{sampled} readings in a row"
    j.state("gpu.clocks_slowdown", c, slow or some, severity=Severity.WARNING, action=Action.INSPECT, certainty=0.8,
            facts={"reasons": reasons, "share": share, "windows": hot}, evidence=_evidence(gpu),
            summary=f"Heat or power made the GPU slow down: {part}.")


def _share(gpu: Gpu, memory: dict[str, Any]) -> float | None:
    """For how much of the time between the last two readings the worst of the three causes held the clocks down."""
    counters, read_at = gpu.get("slowdown_ns"), gpu.get("slow_at")
    before = memory.get("slowdown")
    if counters and read_at is not None and (before is None or read_at != before["at"]):
        memory["slowdown"] = {"at": read_at, "ns": dict(counters), "share": None}
        if before and read_at > before["at"]:  # else the wall clock was set back: how long it took is not known
            passed = (read_at - before["at"]) * 1e9
            rises = [v - before["ns"][k] for k, v in counters.items() if v >= before["ns"].get(k, v + 1)]
            memory["slowdown"]["share"] = max(rises, default=0) / passed
    share: float | None = (memory.get("slowdown") or {}).get("share")
    return share


def _violations(j: Judge, c: Component, gpu: Gpu, memory: dict[str, Any]) -> int | None:
    """Judge the older counters. In how many windows heat held the clocks down; None where another source says it, or none."""
    counters, at = table(gpu.get("violation_ns")), moment(gpu.get("slow_at"))
    if not counters or at is None or memory.get("slowdown"):
        memory.pop("violations", None)
        return None
    own = memory.setdefault("violations", {"at": at, "ns": {}, "shares": {}})
    windows, passed, t = Windows(own), (at - own["at"]) * 1e9, limits().gpu
    if at != own["at"] or not own["ns"]:
        before, own["ns"], own["at"] = own["ns"], {n: v for n, v in counters.items() if number(v) is not None}, at
        for name in (THERMAL, *LIMITS):
            now, then = number(own["ns"].get(name)), number(before.get(name))
            if now is not None and then is not None and now >= then and passed > 0:  # a smaller one began anew
                own["shares"][name] = share = round((now - then) / passed, 3)
                windows.push(name, share >= t.violation_share, t.violation_windows.of)
    for name in LIMITS:
        if name in own["shares"]:
            _limited(j, c, name, own, _evidence(gpu))
    return windows.count(THERMAL) if THERMAL in own["shares"] else None


def _limited(j: Judge, c: Component, name: str, own: dict[str, Any], evidence: tuple[str, ...]) -> None:
    check, bad, t = f"gpu.clocks_{name}", Windows(own).count(name), limits().gpu
    if bad and bad < t.violation_windows.bad and not j.was(check, c):
        return  # not decided yet
    say(j, own, check, c, bad > 0, severity=Severity.WARNING, action=Action.INSPECT, certainty=0.6, evidence=evidence,
        facts={"share": own["shares"][name], "windows": bad},
        summary=f"{LIMITS[name]} held the GPU's clocks down in {bad} of the last {t.violation_windows.of} windows.")


def _evidence(gpu: Gpu) -> tuple[str, ...]:
    names = ("clocks_event_reasons", "slowdown_ns", "violation_ns")
    return tuple(f"{name}={gpu[name]}"[:300] for name in names if gpu.get(name) is not None)

"""What wears out in a GPU while it goes on working: memory that corrects more and more, spares in use, repairs that wait.

This module exists for the faults that no single reading shows: a GPU that corrects thousands of memory errors a second is slow
behind green lights. What always holds: nothing here is fatal; a rate counts only over a window in which the GPU was at work,
or in which there were errors anyway; a counter that became smaller began anew.

Sources: DCGM (replays a minute by lanes and speed of the PCIe link), nvml.h (repair status, bank remapping).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from probes.judging import Judge
from probes.thresholds import limits
from probes.windows import Meter, Windows, moment, number, say, table
from sentinel.model import Action, Component, Severity

GIGATRANSFERS = {1: 2.5, 2: 5, 3: 8, 4: 16, 5: 32, 6: 64}  # by PCIe generation


def judge_wear(j: Judge, c: Component, gpu: Mapping[str, Any], memory: dict[str, Any]) -> None:
    """Judge one answered GPU. ``memory``: this GPU's own."""
    own = memory.setdefault("wear", {})
    _storm(j, c, gpu, own)
    _replays(j, c, gpu, own)
    waits = gpu.get("repair_pending")
    if isinstance(waits, bool):
        say(j, own, "gpu.repair_pending", c, waits, severity=Severity.WARNING, action=Action.RESET_GPU,
            evidence=(f"repair_pending={waits}",),
            summary="A repair of a memory channel or a compute unit waits for the next GPU reset; work may go on until then.")
    banks = table(gpu.get("banks"))
    pending, without = number(banks.get("pending")), number(banks.get("none"))
    if pending is not None:
        say(j, own, "gpu.bank_remap_pending", c, pending > 0, severity=Severity.WARNING, action=Action.RESET_GPU,
            evidence=(f"banks={dict(banks)}"[:300],),
            summary="A bad memory bank is set aside at the next GPU reset; work may continue until then.")
    if without is not None:
        say(j, own, "gpu.bank_remap_spares", c, without > 0, evidence=(f"banks={dict(banks)}"[:300],),
            summary=f"{without} groups of memory banks have no spare left.")


def _storm(j: Judge, c: Component, gpu: Mapping[str, Any], own: dict[str, Any]) -> None:
    value = number(gpu.get("ecc_corrected_volatile"))
    t = limits().gpu
    window = Meter(own, "ecc", t.ecc_window_s).read(value, j.at)
    windows = Windows(own)
    if window:
        rise, seconds = window
        if rise or (number(gpu.get("utilization_percent")) or 0) >= t.ecc_load_percent:
            windows.push("ecc", rise >= t.ecc_storm_per_s * seconds, t.ecc_storm_windows.of)
            own["ecc_per_s"] = round(rise / seconds, 3)
    if value is None or "ecc_per_s" not in own:
        return
    bad, rate = windows.count("ecc"), own["ecc_per_s"]
    if bad and bad < t.ecc_storm_windows.bad and not j.was("gpu.ecc_storm", c):
        return  # not decided yet
    say(j, own, "gpu.ecc_storm", c, bad > 0, severity=Severity.WARNING, action=Action.INSPECT,
        certainty=0.9 if rate >= t.ecc_flood_per_s else 0.8, facts={"per_s": rate},
        evidence=(f"ecc_corrected_volatile={value}", f"corrected per second: {rate}"),
        summary=f"The GPU corrects {rate:.0f} memory errors a second: still right, but slow, often the first sign of worse.")


def _replays(j: Judge, c: Component, gpu: Mapping[str, Any], own: dict[str, Any]) -> None:
    value, at = number(gpu.get("pcie_replays")), moment(gpu.get("slow_at"))
    speed = GIGATRANSFERS.get(number(gpu.get("pcie_gen_max")) or 0)
    lanes = number(gpu.get("pcie_width_max"))
    if value is None or at is None or not speed or not lanes:
        return
    t = limits().pcie
    most = math.ceil(lanes * speed * t.corrected_per_minute)
    window = Meter(own, "replays", t.replay_window_s).read(value, at)
    windows = Windows(own)
    if window:
        rise, seconds = window
        windows.push("replays", rise * 60 > most * seconds, t.replay_windows.of)
        own["replays_per_minute"] = round(rise * 60 / seconds, 1)
    if "replays_per_minute" not in own:
        return
    bad = windows.count("replays")
    if bad and bad < t.replay_windows.bad and not j.was("gpu.pcie_replays", c):
        return
    say(j, own, "gpu.pcie_replays", c, bad > 0, severity=Severity.WARNING, action=Action.INSPECT, certainty=0.8,
        facts={"per_minute": own["replays_per_minute"], "most": most},
        evidence=(f"pcie_replays={value}", f"replays per minute: {own['replays_per_minute']}"),
        summary=f"Its PCIe link sends {own['replays_per_minute']:.0f} packets a minute again; its speed allows {most}.")

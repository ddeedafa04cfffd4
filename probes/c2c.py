"""The links between a GPU and its Grace CPU (NVLink-C2C), judged from what the GPU's driver says.

This module exists because a GPU whose way to its CPU's memory is narrower still works, and nothing else says so. What always
holds: errors that the link itself corrected matter only as a rate that goes on (Xid 121 is such a correction, and is ignored);
a link in low power is healthy; nothing here is fatal, since no vendor rule says what a lost C2C link calls for.

Sources: nvml.h fields 170 to 172 and 231 to 234 (status 0 inactive, 1 active; error counters for CRC, replays and replays back
to back); NVIDIA Xid catalogue, 121. No vendor publishes limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probes.judging import Judge
from probes.thresholds import limits
from probes.windows import Windows, listed, moment, number, say, table
from sentinel.model import Action, Component, Severity


def judge_c2c(j: Judge, c: Component, gpu: Mapping[str, Any], memory: dict[str, Any], expected: Mapping[str, Any]) -> None:
    """Judge one answered GPU. ``memory``: this GPU's own; ``expected``: ``c2c`` True where there must be such links."""
    c2c, at = table(gpu.get("c2c")), moment(gpu.get("seldom_at"))
    count = number(c2c.get("count"))
    if count is None or at is None or not (count or expected.get("c2c") or memory.get("c2c")):
        return
    own = memory.setdefault("c2c", {"at": None, "most": 0, "down": 0, "values": {}})
    fresh = at != own["at"]
    status = [number(v) for v in listed(c2c.get("status"))]
    down = [n for n, s in enumerate(status) if s == 0]
    missing = max(own["most"] - count, 0) if count or not expected.get("c2c") else max(own["most"], 1)
    if fresh:
        own["down"] = own["down"] + 1 if down or missing else 0
        _rates(own, c2c, at)
    own["most"], own["at"] = max(own["most"], min(count, 64)), at
    if not (down or missing) or own["down"] >= limits().c2c.down_run or j.was("gpu.c2c_down", c):
        say(j, own, "gpu.c2c_down", c, bool(down or missing), severity=Severity.WARNING, action=Action.INSPECT, certainty=0.8,
            facts={"links": down, "count": count}, evidence=(f"c2c count={count} status={status}"[:300],),
            summary=f"{len(down) + missing} links between the GPU and its CPU are down.")
    if own.get("judged"):
        windows = Windows(own)
        worst = {n: windows.count(n) for n in ("crc", "replays", "replays_b2b")}
        many = max(worst.values()) >= limits().c2c.error_windows.bad
        if many or not any(worst.values()) or j.was("gpu.c2c_errors", c):
            say(j, own, "gpu.c2c_errors", c, any(worst.values()), severity=Severity.WARNING, certainty=0.6,
                facts={"windows": worst}, evidence=tuple(f"{n}={c2c[n]}"[:200] for n in worst if n in c2c),
                summary="A link between the GPU and its CPU goes on correcting errors at a high rate.")


def _rates(own: dict[str, Any], c2c: Mapping[str, Any], at: float) -> None:
    """One more window of the links' error counters."""
    windows, t = Windows(own), limits().c2c
    before, own["values"] = own["values"], {}
    for name, most in (("crc", t.crc_per_s), ("replays", t.replays_per_s), ("replays_b2b", t.replays_per_s)):
        values = [number(v) for v in listed(c2c.get(name))]
        own["values"][name] = values
        pairs = [(a, b) for a, b in zip(before.get(name, ()), values, strict=False) if a is not None and b is not None]
        if pairs and at > own["at"] and not any(b < a for a, b in pairs):  # a smaller one began anew
            own["judged"] = True
            windows.push(name, max(b - a for a, b in pairs) > most * (at - own["at"]), t.error_windows.of)

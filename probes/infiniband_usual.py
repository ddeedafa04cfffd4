"""Whether the rails of this node run at the rate that is usual for its kind: on record, never a fault.

This module exists because rails that all train at half their rate look alike, and nobody who only compares them notices. What
always holds:

* It is a hint: the site's ``ib_gbps`` is judged elsewhere and silences this, and what is said here is never more than ``info``.
* Rails are ports that are alike, active and enough of them to agree (``rate_siblings``). A single one may be anybody's storage.
* Where any InfiniBand port runs at the usual rate, those are the rails, and slower ones are something else.
* Ports of one kind that disagree are ``infiniband_findings``' matter, which measures each against its like.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probes.infiniband_policy import Device, Wanted, rails
from probes.judging import Judge
from probes.thresholds import limits
from probes.windows import number, say, table
from sentinel.model import Component, Finding, Reading


def judge_usual(reading: Reading, memory: dict[str, Any], expected: Mapping[str, Any]) -> list[Finding]:
    """Judge one reading. ``expected``: ``hints`` with ``ib_gbps`` and ``profile``, where the kind of node is known."""
    hints = table(expected.get("hints"))
    usual = number(hints.get("ib_gbps"))
    if not usual or reading.data.get("alone"):  # pasted text may be of any machine
        return []
    j, t = Judge(reading.node, reading.at, memory), limits().infiniband
    devices: list[Device] = [d for d in reading.data.get("devices", ()) if isinstance(d, dict) and d.get("name")]
    active = [r for r in rails(j.node, devices, set(reading.data.get("default_route", ())), Wanted.of(expected))
              if r.up and r.layer == "InfiniBand" and r.port.get("rate_gbps")]  # fmt: skip
    rates: dict[tuple[Any, ...], list[float]] = {}
    for rail in active:
        rates.setdefault((rail.device.get("hca"), rail.device.get("board")), []).append(rail.port["rate_gbps"])
    alike = [found for found in rates.values() if len(found) >= t.rate_siblings]
    if not alike:
        return []
    slow = not any(r.port["rate_gbps"] >= usual for r in active) and all(len(set(found)) == 1 for found in alike)
    where = Component(node=j.node, device="ib")
    there = j.steady("ib.rate_usual", where, slow, t.rate_run)
    if there is not None:
        best = max(found[0] for found in alike)
        say(j, memory, "ib.rate_usual", where, there, certainty=0.5, facts={"rate_gbps": best, "usual_gbps": usual},
            evidence=tuple(f"{r.name}: {r.port.get('rate')}" for r in active)[:8],
            summary=f"All rails run at {best:g} Gb/s; {usual} are usual for {hints.get('profile')}. Say expected.ib_gbps to have "
                    "it judged.")  # fmt: skip
    return j.findings()

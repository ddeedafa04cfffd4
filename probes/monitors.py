"""What other monitors say about GPUs, pasted: their word is on record, their verdict is not ours.

This module exists because monitors quote, hold on to, and misname faults: a gauge that keeps its last value, a watch that
calls an idle IMEX daemon a link fault, a plugin that removes a GPU for an application's error. What always holds:

* A monitor's verdict raises no fault and takes no GPU: the finding says which monitor spoke and where to look instead.
* Only a monitor that says itself that it cannot see is something to mend (``fix_monitor``).
* Values that it merely passes on are read elsewhere (``probes.smi``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from probes.catalog import xids
from probes.judging import Judge
from sentinel.model import Action, Component, Finding, Reading, Severity, Suspect

LINE_CHARS, LINES_MAX = 2000, 1024
# (what it is, pattern, whether the monitor itself is broken)
_SAYS = (
    ("dcgm_blind", re.compile(
        r"Host engine connection invalid/disconnected|Failed to collect metrics|error getting the latest value for fields"
        r"|unable to (?:connect to|establish a connection to) (?:the )?(?:specified )?host[ -]?engine", re.IGNORECASE), True),
    ("dcgm", re.compile(
        r"DCGM_FR_[A-Z_]+|\| (?:Overall Health|-> \d+)\s+\| (?:Failure|Warning)|\bGpu[A-Z]\w{2,40}Watch(?: ?=|IsNotHealthy|\"|$)"
    ), False),
    ("device_plugin", re.compile(r"XidCriticalError: Xid=(\d{1,5})"), False),
)  # fmt: skip
_WORDS = {
    "dcgm_blind": "A monitor cannot see any more: its host engine is gone, and what it exports may be frozen. Restart it.",
    "dcgm": "A monitor gives a verdict about a GPU. Look at what it is about (nvidia-smi -q, the kernel log) before acting on it.",
}


def read(text: str, node: str) -> Iterator[Reading]:
    """One reading of probe ``monitors``: the lines in which a monitor speaks."""
    if not any(mark in text for mark in ("DCGM_FR_", "ngine", "Failed to collect", "Overall Health", "Watch", "XidCritical")):
        return
    lines = []
    for raw in text.splitlines():
        line = raw[:LINE_CHARS]
        who = next((name for name, pattern, _ in _SAYS if pattern.search(line)), None)
        if who:
            lines.append([who, line.strip()[:300]])
            if len(lines) >= LINES_MAX:
                break
    if lines:
        yield Reading(probe="monitors", node=node, at=0.0, boot_id="pasted", data={"said": lines})


def judge(reading: Reading, memory: dict[str, Any]) -> list[Finding]:
    j = Judge(reading.node, reading.at, {})
    broken = {name for name, _, blind in _SAYS if blind}
    for who, words in _WORDS.items():
        said = [line for name, line in reading.data["said"] if name == who]
        if said:
            blind = who in broken
            j.event(f"monitor.{who}", Component(node=reading.node, device="monitor"), suspect=Suspect.MONITOR, count=len(said),
                    severity=Severity.WARNING if blind else Severity.INFO, action=Action.FIX_MONITOR if blind else Action.NONE,
                    certainty=0.8 if blind else 0.5, evidence=tuple(said[:2]), summary=words)
    for who, line in reading.data["said"]:
        if who == "device_plugin" and (match := _SAYS[2][1].search(line)) is not None:
            _took_away(j, int(match[1]), line)
    return j.findings()


def _took_away(j: Judge, code: int, line: str) -> None:
    """A device plugin takes a GPU for the number of an NVML event; by the catalogue some of them are the application's."""
    known = xids().get(code)
    app = known is not None and known.judged.suspect is Suspect.APP
    says = "an error of the application's: restart it and give the GPU back" if app else "the kernel log's line decides"
    j.state("monitor.xid_event", Component(node=j.node, device=f"monitor@xid{code}"), True, suspect=Suspect.MONITOR, certainty=0.5,
            severity=Severity.INFO if app else Severity.WARNING, action=Action.RESTART_WORKER if app else Action.INSPECT,
            facts={"xid": code}, evidence=(line[:200],), summary=f"A device plugin took a GPU away for Xid {code}: {says}.")

"""Pasted text in, findings and one verdict out: what it is, what it means, what to do first.

This module exists so that a person, a test and a replayed case get from text the same judgement that the live probes give.
What always holds:

* ``decode_text`` is pure: text in, values out; it never raises on any text.
* Each source of text is one reader in ``READERS``: it turns text into readings, which the probe's own ``assess`` judges.
* The verdict is about the whole text: the strongest action among its fatal findings, else among all; echoes, victims and
  what a later line took back do not count; a monitor's trouble counts only when nothing else was found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from probes import fabric_log, kernel_episodes, monitors, nic_text, pasted, pasted_imex, serving_lines, serving_log, smi
from probes.catalog import DRAINS
from probes.pasted_carried import carried
from probes.pasted_prefix import FILE
from probes.thresholds import limits
from sentinel.model import Action, Base, Finding, Reading, Severity, Suspect

_COLOURS = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]")
Reader = Callable[[str, str], Iterable[Reading]]
Judge = Callable[[Reading, dict[str, Any]], list[Finding]]

# Who can read pasted text, and whose judgement it is; other sources (nvidia-smi, NIC tools, engines) register beside it.
READERS: tuple[tuple[Reader, Judge], ...] = (
    (pasted.parse, kernel_episodes.assess),
    (smi.read, smi.judge),
    (pasted_imex.read, pasted_imex.judge),
    (fabric_log.read, fabric_log.judge),
    (monitors.read, monitors.judge),
    (nic_text.parse, nic_text.judge),
    (serving_lines.parse, serving_log.assess),
)
PASTED = "pasted"  # stands for a machine that nobody has named
# Outputs of tools, which know nothing of what was put before their lines; logs name their own carriers.
TOOLS = frozenset({smi.read, pasted_imex.read, fabric_log.read, nic_text.parse})


class Verdict(Base, frozen=True, kw_only=True, omit_defaults=False):
    """What to conclude from the text as a whole. ``drain``: none, later, worker, gpu or node leaves service first."""

    severity: Severity = Severity.INFO
    action: Action = Action.NONE
    drain: str = "none"
    incidents: int = 0
    why: str = "Nothing of note."


class Decoded(Base, frozen=True, kw_only=True, omit_defaults=False):
    findings: tuple[Finding, ...] = ()
    verdict: Verdict = Verdict()
    lines: int = 0
    skipped: dict[str, int] = msgspec.field(default_factory=dict)  # lines that look like a fault and were not judged, by reason

    def to_json(self) -> dict[str, Any]:
        """The documented shape of ``sentinel decode --json``."""
        return {
            "findings": [_plain(f) for f in self.findings],
            "verdict": msgspec.to_builtins(self.verdict),
            "lines": self.lines,
            "skipped": self.skipped,
        }


def decode_text(text: str, node: str = PASTED, readers: tuple[tuple[Reader, Judge], ...] = READERS) -> Decoded:
    """Judge pasted text. ``node`` stands for the machine it came from; where a text names several, each has its own name."""
    text = _as_printed(text)
    parts = carried(text)
    told = _Told(node)
    for read, judge in readers:
        for who, part in parts if read in TOOLS else [("", text)]:
            told.take(read(part, who or node), judge)
    findings = told.findings()
    skipped = {why: count for why, count in told.skipped.items() if count}
    return Decoded(findings=findings, verdict=conclude(findings), lines=told.lines, skipped=skipped)


class _Told:
    """What the readers of one text found, and whose it is."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._found: dict[str, Finding] = {}
        self._host = ""  # the first that kernel lines name; ``node`` stands for it
        self._of_host: set[str] = set()
        self.skipped: dict[str, int] = {}
        self.lines = 0

    def take(self, readings: Iterable[Reading], judge: Judge) -> None:
        memories: dict[str, dict[str, Any]] = {}  # one host's lines explain nothing about another's
        for reading in readings:
            self.lines = max(self.lines, int(reading.data.get("lines", 0)))
            for why, count in reading.data.get("skipped", {}).items():
                self.skipped[why] = self.skipped.get(why, 0) + count
            made = judge(reading, memories.setdefault(reading.node, {}))
            self._found.update((f.id, f) for f in made)
            if host := str(reading.data.get("host", "")):
                self._host = self._host or host
                self._of_host |= {f.id for f in made if reading.node == self._node}
        for memory in memories.values():
            for episode in memory.get("episodes", {}).values():  # counts that grew after they were told
                last = msgspec.convert(episode["finding"], Finding)
                self._found[last.id] = last

    def findings(self) -> tuple[Finding, ...]:
        """Everything found; a text that names one host at most is about one machine."""
        named = ({f.component.node for f in self._found.values()} | {self._host}) - {self._node, ""}
        if len(named) < 2:
            one = next((n for n in named if self._node == PASTED and not n.startswith(FILE)), self._node)
            return tuple(_moved(f, one) for f in self._found.values())
        return tuple(_moved(f, self._host) if f.id in self._of_host else f for f in self._found.values())


def _moved(f: Finding, node: str) -> Finding:
    if f.component.node == node:
        return f
    return msgspec.structs.replace(f, component=msgspec.structs.replace(f.component, node=node))


def _as_printed(text: str) -> str:
    """The text as it was printed: without a terminal's colours, which may split a word, and a web page's hard spaces."""
    if "\x1b" in text:
        text = _COLOURS.sub("", text)
    for mark, instead in (("\u00a0", " "), ("\ufeff", "")):
        if mark in text:
            text = text.replace(mark, instead)
    return text


def conclude(findings: tuple[Finding, ...]) -> Verdict:
    """One verdict for findings in the order in which their lines were printed."""
    cleared = {(f.component.node, f.component.gpu): i for i, f in enumerate(findings) if not f.present and f.component.gpu}
    gpu_fatal = any(f.present and f.severity is Severity.FATAL and f.component.gpu for f in findings)
    live = [
        f for i, f in enumerate(findings)
        if f.present and f.suspect is not Suspect.MONITOR
        # The driver took it back.
        and not (i < cleared.get((f.component.node, f.component.gpu or ""), -1) and f.action is not Action.RESTART_WORKER)
        and not (gpu_fatal and f.check.startswith("sxid."))  # a switch that cries for a dead GPU lost its far end
    ]
    if not live and not cleared:
        live = [f for f in findings if f.present and f.suspect is Suspect.MONITOR]
    if cleared and all(f.severity is Severity.INFO and f.action is Action.NONE for f in live):
        last = findings[max(cleared.values())]
        return Verdict(action=Action.UNDRAIN, why=last.summary)
    decided = any(f.check.startswith("xid.") and f.action not in (Action.NONE, Action.WAIT) for f in live)
    # CUDA's word that hardware may be at fault only sends one to the kernel log; where that is at hand, it decides.
    words = [f for f in live if not (decided and f.check == "serving.cuda_hardware")]
    weighty = [f for f in words if f.severity is Severity.FATAL] or words
    if not weighty:
        return Verdict()
    lead = max(weighty, key=lambda f: (f.action.rank, f.severity.rank))
    drains = [str(f.facts.get("drain", "none")) for f in weighty]
    return Verdict(
        severity=max((f.severity for f in live), key=lambda s: s.rank), action=lead.action,
        drain=max(drains, key=lambda d: DRAINS.index(d) if d in DRAINS else 0), incidents=_incidents(live), why=lead.summary,
    )


def _incidents(live: list[Finding]) -> int:
    """Faults with one culprit each: a GPU's lines are one; the same link on several GPUs is one switch; peers' echoes are one."""
    culprits: set[str] = set()
    links: dict[int, set[str]] = {}
    rails: set[str] = set()
    hardware = any(f.severity is Severity.FATAL and f.component.gpu for f in live)
    of_gpus = {f.check for f in live if f.component.gpu}
    for f in live:
        if f.severity is Severity.INFO and f.action in (Action.NONE, Action.WAIT):
            continue
        if hardware and f.check.startswith("serving."):
            continue  # an engine that dies with its GPU dies of it
        where = f"{f.component.node}/{f.component.device}"
        if f.check.startswith("sxid."):
            where = "switches"
        elif f.suspect is Suspect.PEER and f.check == "xid.45":
            where = "a peer elsewhere"
        elif f.suspect is Suspect.PEER and f.facts.get("peers"):
            where = str(f.facts["peers"][0])  # many workers name one engine or host: one fault, there
        elif f.check == "ib.port_not_set_up":
            rails.add(where)
        elif f.component.part.startswith("nvlink"):
            for link in f.facts.get("links", [f.facts["link"]] if "link" in f.facts else []):
                links.setdefault(link, set()).add(where)
        elif f.component.device == "driver" and (hardware or f.check in of_gpus):
            continue  # the driver's second word about it, without the address
        culprits.add(where)
    for gpus in links.values():
        if len(gpus) >= limits().nvlink.one_switch_gpus:
            culprits = (culprits - gpus) | {"one switch"}
    if len(rails) >= 3:  # linked and not set up, all of them: what sets them up is one
        culprits = (culprits - rails) | {"the subnet manager"}
    return len(culprits)


def _plain(f: Finding) -> dict[str, Any]:
    pci = f.component.gpu or (f.component.device.partition("@")[2] or None)
    return {
        "check": f.check, "component": str(f.component), "severity": f.severity.value, "action": f.action.value,
        "suspect": f.suspect.value, "present": f.present, "certainty": f.certainty, "xid": f.facts.get("xid"), "pci": pci,
        "count": f.count, "summary": f.summary, "evidence": list(f.evidence), "facts": f.facts,
    }

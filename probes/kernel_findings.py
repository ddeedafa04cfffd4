"""From one line of the driver to one finding: what it means, whom it blames, what to do first.

This module exists so that the judgement of kernel lines is one pure function, used alike for the live log, a recording and
pasted text. What always holds:

* The catalogue's tables decide; the few rules here are those a table row cannot hold: what a line says about itself
  (``RST: Yes``, a recovery action's number, a cause) and what came with it on the same GPU.
* An application's own fault never carries an action on hardware.
* A line without a usable address is reported for the node's driver; a GPU is never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from probes import nvlink5
from probes.catalog import Judgement, buckets, recoveries, sxids, xids
from probes.thresholds import limits
from probes.xid import DriverLine, FallenLine, Line, SxidLine, Unreadable, XidLine
from sentinel.model import Action, Component, Finding, Kind, Severity, Suspect, gpu_component

EVIDENCE_CHARS = 400

_RESET = re.compile(r"\bRST: (Yes|No)(?:, D-RST: (Yes|No))?")
_CAUSE = re.compile(r"caused by previous Xid (\d{1,5})")
_RECOVERY = re.compile(r"changed from 0x([0-9a-fA-F]{1,8})[^\n]*? to 0x([0-9a-fA-F]{1,8})")
_RECOVERY_WORDS = (  # only where a line was cut or reworded so that no number is left
    ("Node Reboot", 2), ("OS Reboot", 2), ("Drain P2P", 3), ("Drain and Reset", 4), ("GPU Reset", 1), ("None", 0),
)
_SM = re.compile(r"\(GPC (\d{1,3})(?:, TPC (\d{1,3}))?(?:, SM (\d{1,3}))?\)")
_LINK = re.compile(r"\b[Ll]ink (-?\d{1,3})\b")
_UNKNOWN = Judgement(Severity.WARNING, Action.INSPECT, Suspect.SELF, "none", "no table knows this code; a person looks")

Seen = Mapping[int, float]  # code → how long ago it was last seen on this GPU, seconds


class Place(NamedTuple):
    """Where and when a line was printed. ``came_with``: codes that stand in the same batch on the same GPU."""

    node: str
    id: str
    at: float
    before: Seen
    came_with: frozenset[int]


def signature(line: Line) -> str:
    """Lines with one signature within an episode are one occurrence, repeated."""
    if isinstance(line, XidLine):
        detail = ""
        if line.code in nvlink5.CODES:
            event = nvlink5.decode(line.code, line.body)
            detail = f"{event.unit}|{event.link}|{event.intr_info}|{event.status}|{event.injected}"
        elif line.code == 154:
            detail = str(_recovery(line.body))
        elif line.code in (74, 108, 137):
            detail = str(_links(line.body))
        elif line.code == 45:
            detail = str(_cause(line.body))
        return f"{line.pci}|{line.gpu_instance}|{line.compute_instance}|{line.code}|{detail}"
    if isinstance(line, FallenLine):
        return f"{line.pci}|None|None|79|"  # the same occurrence as an Xid 79 beside it
    if isinstance(line, SxidLine):
        return f"s|{line.pci}|{line.code}"
    if isinstance(line, DriverLine):
        return f"d|{line.pci}|{line.net}|{line.known.check}"
    return f"u|{line.why}"


def finding(line: Line, raw: str, place: Place) -> Finding:
    """Judge one line. ``raw`` is kept as evidence, bounded."""
    evidence = (raw[:EVIDENCE_CHARS],)
    if isinstance(line, XidLine):
        return _xid(line, evidence, place)
    if isinstance(line, SxidLine):
        return _sxid(line, evidence, place)
    if isinstance(line, FallenLine):
        judged = xids()[79].judged
        sentence = f"{_name(line.pci)} has fallen off the bus, says the driver: {judged.advice}."
        facts = {"stated": False, "drain": judged.drain}
        return _made(place, "xid.79", _gpu(place.node, line.pci), judged, evidence, sentence=sentence, facts=facts)
    if isinstance(line, DriverLine):
        return _driver(line, evidence, place)
    return _unreadable(place, line, evidence)


def _unreadable(place: Place, line: Unreadable, evidence: tuple[str, ...]) -> Finding:
    return Finding(
        id=place.id, check="kernel_log.unreadable", component=Component(node=place.node, device="kernel_log"), at=place.at,
        kind=Kind.EVENT, severity=Severity.INFO, suspect=Suspect.MONITOR, certainty=0.5, evidence=evidence,
        summary=f"The kernel log holds {line.why}; it was counted, not judged.",
    )


def _xid(line: XidLine, evidence: tuple[str, ...], place: Place) -> Finding:
    known = xids().get(line.code)
    judged = known.judged if known else _UNKNOWN
    says = known.says if known else "a code that no table knows"
    facts: dict[str, Any] = {"xid": line.code}
    for key, value in (
        ("pid", line.pid), ("process", line.process or None),
        ("gpu_instance", line.gpu_instance), ("compute_instance", line.compute_instance),
    ):
        if value is not None:
            facts[key] = value
    where, kind, present, certainty = _gpu(place.node, line.pci), Kind.EVENT, True, 1.0 if known else 0.5

    if line.code in nvlink5.CODES:
        event = nvlink5.decode(line.code, line.body)
        judged, certainty = event.judged, event.certainty
        says = _link_says(says, event)
        facts |= _link_facts(event)
        if line.pci and not event.whole_gpu:
            where = Component(node=where.node, device=where.device, part=f"nvlink{event.link}")
    elif line.code == 154:
        kind = Kind.STATE  # the driver's standing advice, until another 154 changes it
        value = _recovery(line.body)
        name, judged = recoveries().get(value, ("unknown", buckets()["XID_154"]._replace(severity=Severity.FATAL)))
        present = value != 0
        facts |= {"recovery": value, "recovery_name": name}
        says = judged.advice if value in recoveries() else "the driver asks for a recovery action that we do not know"
    elif line.code == 45:
        judged, says = _teardown(line, judged, says, facts, place)
    else:
        links = _links(line.body)
        if links and line.code in (74, 108, 136, 137, 155):
            facts["links"] = links
            if line.code == 74 and line.pci and links[0] >= 0:
                where = Component(node=where.node, device=where.device, part=f"nvlink{links[0]}")
        if (match := _SM.search(line.body)) is not None:
            facts |= {k: int(v) for k, v in zip(("gpc", "tpc", "sm"), match.groups(), strict=True) if v is not None}
        judged = _memory(line, judged, facts, place)
    if line.code != 79 and 79 in place.before:
        facts.setdefault("caused_by", 79)
    facts["drain"] = judged.drain
    sentence = f"Xid {line.code} on {_name(line.pci)}: {says}" + ("." if says.endswith(judged.advice) else f": {judged.advice}.")
    made = _made(place, f"xid.{line.code}", where, judged, evidence, sentence=sentence, facts=facts)
    return msgspec.structs.replace(made, kind=kind, present=present, certainty=certainty)


def _teardown(line: XidLine, judged: Judgement, says: str, facts: dict[str, Any], place: Place) -> tuple[Judgement, str]:
    """Xid 45 is an echo: of a fault of this GPU, of a peer's, or of a process that was killed."""
    cause = _cause(line.body)
    echo_s = limits().kernel_log.echo_s
    earlier = {c: ago for c, ago in place.before.items() if c not in (45, 154) and ago <= echo_s}
    if cause is not None:
        facts["caused_by"] = cause
        if cause not in place.before and cause not in place.came_with:
            known = xids().get(cause)
            app = known is not None and known.judged.suspect is Suspect.APP
            says = f"channels were torn down by Xid {cause}, which this GPU did not print"
            return Judgement(
                Severity.INFO if app else Severity.WARNING, Action.RESTART_WORKER, Suspect.APP if app else Suspect.PEER, "none",
                "restart the worker" if app else "restart the worker and look for the fault at its peers",
            ), says
    elif earlier:
        facts["caused_by"] = min(earlier, key=lambda c: earlier[c])
    return judged, says


def _memory(line: XidLine, judged: Judgement, facts: dict[str, Any], place: Place) -> Judgement:
    """What a memory error says about itself, and whether it stayed within one application."""
    if (match := _RESET.search(line.body)) is not None:
        facts["needs_reset"] = match[1] == "Yes"
        facts["drain_and_reset"] = match[2] == "Yes"
        if match[1] == "Yes" and judged.action is Action.RESTART_WORKER:
            return xids()[95].judged
    contained = 94 in place.came_with and not place.came_with & {64, 95, 140}
    if line.code in (48, 171, 172) and contained:
        facts["contained"] = True
        if 63 in place.came_with:  # the vendor's flow for 48 with 63: let it drain, then reset
            return judged._replace(severity=Severity.WARNING, drain="later", advice="let its work end, then reset the GPU")
        return xids()[94].judged
    return judged


def _sxid(line: SxidLine, evidence: tuple[str, ...], place: Place) -> Finding:
    """The line's own Fatal or Non-fatal outranks every table; raw words alone say nothing about severity."""
    known = sxids().get(line.code)
    fatal = line.fatal
    if fatal is None and not line.data_only:
        fatal = known.fatal if known else None
    says = known.says if known else "a code that no table knows"
    if fatal:
        action, advice = Action.RESET_GPU, "reset the GPU at the link's other end"
        if known and known.fatal:
            action, advice = known.action, known.advice
        judged = Judgement(Severity.FATAL, action, Suspect.SWITCH, "node", advice)
    elif fatal is None and known is None:
        judged = _UNKNOWN._replace(suspect=Suspect.SWITCH)
    else:
        judged = Judgement(Severity.WARNING, Action.NONE, Suspect.SWITCH, "none", "nothing to do now")
    facts: dict[str, Any] = {"sxid": line.code, "fatal": line.fatal, "drain": judged.drain}
    if line.link is not None:
        facts["links"] = [line.link]
    switch = f"nvswitch@{line.pci}" if line.pci else line.switch
    where = Component(node=place.node, device=switch, part="" if line.link is None else f"link{line.link}")
    at_link = "" if line.link is None else f", link {line.link}"
    sentence = f"SXid {line.code} on switch {line.pci or line.switch}{at_link}: {says}: {judged.advice}."
    return _made(place, f"sxid.{line.code}", where, judged, evidence, sentence=sentence, facts=facts)


def _driver(line: DriverLine, evidence: tuple[str, ...], place: Place) -> Finding:
    known = line.known
    if known.about == "gpu":
        where, name = _gpu(place.node, line.pci), _name(line.pci)
    elif known.about == "nic" and (line.pci or line.net):
        where = Component(node=place.node, device=f"nic@{line.pci or line.net}")
        name = f"Network adapter {line.pci or line.net}"
    else:
        where, name = Component(node=place.node, device="driver"), "The driver"
    sentence = f"{name}: {known.says}: {known.judged.advice}."
    return _made(place, known.check, where, known.judged, evidence, sentence=sentence, facts={"drain": known.judged.drain})


def _made(
    place: Place, check: str, where: Component, judged: Judgement, evidence: tuple[str, ...], *,
    sentence: str, facts: dict[str, Any],
) -> Finding:
    return Finding(
        id=place.id, check=check, component=where, at=place.at, kind=Kind.EVENT, severity=judged.severity, action=judged.action,
        suspect=judged.suspect, summary=sentence[0].upper() + sentence[1:], evidence=evidence, facts=facts,
    )


def _gpu(node: str, pci: str | None) -> Component:
    return gpu_component(node, pci) if pci else Component(node=node, device="driver")


def _name(pci: str | None) -> str:
    return f"GPU {pci}" if pci else "a GPU whose address is not in the line"


def _cause(body: str) -> int | None:
    match = _CAUSE.search(body)
    return int(match[1]) if match else None


def _links(body: str) -> list[int]:
    return sorted({int(n) for n in _LINK.findall(body[:512])})


def _recovery(body: str) -> int:
    """The new recovery action's number; -1 when the line does not say. The words changed between drivers, the number did not."""
    if (match := _RECOVERY.search(body)) is not None:
        return int(match[2], 16)
    _, found, after = body.partition(" to ")
    return next((n for words, n in _RECOVERY_WORDS if found and words in after), -1)


def _link_says(says: str, event: nvlink5.LinkEvent) -> str:
    where = "" if event.link is None else " (all links)" if event.link < 0 else f" (link {event.link})"
    word = "" if event.fatal is None else ", fatal" if event.fatal else ", not fatal"
    return f"{says}{where}{word}{', injected' if event.injected else ''}"


def _link_facts(event: nvlink5.LinkEvent) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "unit": event.unit, "fatal": event.fatal, "injected": event.injected, "cross_contained": event.cross_contained,
        "links": None if event.link is None else [event.link], "layout": event.layout or None,
        "error_status": None if event.status is None else hex(event.status),
        "reason": event.reason if event.code == 149 else None, "follow_up": event.rule.follow_up.lower() if event.rule else None,
    }
    return {k: v for k, v in facts.items() if v is not None}

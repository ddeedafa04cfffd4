"""What a report may bring in: words that this version knows, and no more of anything than a node can have.

This module exists so that neither a newer agent nor a hostile one can lose a finding, stop the decider, or fill the memory and
the store. What always holds:

* A word of a newer agent (a severity, an action) costs the word, not the finding: it stands, in doubt, and doubt is budgeted.
* Text is cut, never refused; what identifies something stays distinct when it is cut. A part's name holds no ``/``.
* What is left has a bounded size, whatever came.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from functools import lru_cache
from typing import Any

import msgspec

from sentinel.model import Action, Component, Finding, GpuPlace, Kind, Place, Report, Severity, Suspect, WorkerSeen, pci_address

NAME_MAX = 128  # characters of a check, a device, a part, a worker
SUMMARY_MAX = 1000
EVIDENCE_MAX = 20  # lines
LINE_MAX = 2000
FACTS_MAX = 16 * 1024  # bytes of JSON
COUNT_MAX = 10**12
SESSION_MAX = 200
PROBES_MAX = 200
WORKERS_MAX = 256
GPUS_MAX = 64  # of one worker on one node, and of a node; as many InfiniBand devices, and addresses
DOUBT = 0.5  # certainty of a finding of which not every word was understood

_report = msgspec.json.Decoder(Report)
_WORDS: dict[str, tuple[type[StrEnum], StrEnum]] = {
    "severity": (Severity, Severity.WARNING),
    "action": (Action, Action.INSPECT),
    "suspect": (Suspect, Suspect.PEER),  # whoever it is, it may be somebody else: a person looks, nothing is drained
    "kind": (Kind, Kind.EVENT),  # counts once, and ages away: what is no state we know could never be measured fine
}


class NotAReport(ValueError):
    """The body is no report; the sentence says where it stops being one."""


def decode(body: bytes) -> Report:
    """Read a report as far as this version understands it. Raises NotAReport."""
    try:
        return _report.decode(body)
    except RecursionError:
        raise NotAReport("it is nested deeper than a report can be") from None
    except (msgspec.DecodeError, ValueError) as error:  # ValueError: no UTF-8, or a number of thousands of digits
        wrong = error
    try:
        return msgspec.convert(_understood(msgspec.json.decode(body)), Report)
    except msgspec.ValidationError as error:
        raise NotAReport(str(error if "Invalid enum" in str(wrong) else wrong)) from None
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise NotAReport(str(wrong)) from None


def is_snapshot(body: bytes) -> bool:
    """Whether a body is a snapshot, told by its beginning: agents of ours say so before the states. Good enough to turn one away
    unread, and for nothing else."""
    return b'"snapshot":true' in body[:1024]


def _understood(raw: Any) -> Any:
    """The same report with every word that is not ours replaced; what else is wrong with it stays wrong."""
    findings = raw.get("findings") if isinstance(raw, dict) else None
    if not isinstance(findings, list):
        return raw
    return raw | {"findings": [_known_words(f) if isinstance(f, dict) else f for f in findings]}


def _known_words(finding: dict[str, Any]) -> dict[str, Any]:
    words = {
        name: finding[name]
        for name, (known, _) in _WORDS.items()
        if isinstance(finding.get(name), str) and finding[name] not in set(known)
    }
    if not words:
        return finding
    plain = {name: instead.value for name, (_, instead) in _WORDS.items() if name in words}
    facts, certainty = finding.get("facts"), finding.get("certainty", 1.0)
    return finding | plain | {
        "certainty": min(certainty, DOUBT) if isinstance(certainty, int | float) else certainty,
        "facts": (facts if isinstance(facts, dict) else {}) | {"not_understood": words},
    }  # fmt: skip


def bounded(report: Report) -> Report:
    """The report with everything that has no natural end cut to what a node can have to say.

    A state that is fine has nothing that is kept, and is the bulk of what a fleet sends: it is left as it is.
    """
    changes: dict[str, Any] = {}
    if any(f.present for f in report.findings):
        changes["findings"] = tuple(_bounded(f) if f.present else f for f in report.findings)
    if report.workers:
        changes["workers"] = tuple(map(_worker, report.workers[:WORKERS_MAX]))
    if len(report.probes) > PROBES_MAX or any(len(p) > NAME_MAX for p in report.probes):
        changes["probes"] = {name(p): ok for p, ok in list(report.probes.items())[:PROBES_MAX]}
    if report.place is not None and not _placed(report.place):
        changes["place"] = _place(report.place)
    for field in ("version", "boot_id"):
        if len(getattr(report, field)) > NAME_MAX:
            changes[field] = name(getattr(report, field))
    return msgspec.structs.replace(report, **changes) if changes else report


def _worker(w: WorkerSeen) -> WorkerSeen:
    if max(len(w.worker), len(w.engine), len(w.instance), len(w.gpus)) <= min(NAME_MAX, GPUS_MAX) and len(w.url) <= SUMMARY_MAX:
        return w
    names = {"worker": name(w.worker), "engine": name(w.engine), "instance": name(w.instance)}
    return msgspec.structs.replace(w, url=w.url[:SUMMARY_MAX], gpus=w.gpus[:GPUS_MAX], **names)


def _placed(p: Place) -> bool:
    """Whether it is what an agent of this version says, as nearly every one is."""
    return (
        max(len(p.gpus), len(p.ports), len(p.addresses)) <= GPUS_MAX
        and all(len(text) <= NAME_MAX for text in (p.chassis, p.domain, *p.ports, *p.addresses))
        and all(len(g.uuid) <= NAME_MAX and len(g.domain) <= NAME_MAX and _is_pci(g.pci) for g in p.gpus)
    )


def _place(p: Place) -> Place:
    named = (g for g in p.gpus[:GPUS_MAX] if _is_pci(g.pci))
    return msgspec.structs.replace(
        p, chassis=name(p.chassis), domain=name(p.domain), ports=tuple(map(name, p.ports[:GPUS_MAX])),
        addresses=tuple(map(name, p.addresses[:GPUS_MAX])),
        gpus=tuple(GpuPlace(pci=g.pci, uuid=name(g.uuid), module=g.module, domain=name(g.domain)) for g in named),
    )  # fmt: skip


@lru_cache(maxsize=4096)  # a fleet's GPUs are at few different addresses
def _is_pci(text: str) -> bool:
    try:
        return pci_address(text) == text
    except ValueError:
        return False


def _bounded(f: Finding) -> Finding:
    c = f.component
    changes: dict[str, Any] = {}
    if len(f.id) > 2 * NAME_MAX:
        changes["id"] = name(f.id)
    if len(f.check) > NAME_MAX:
        changes["check"] = name(f.check)
    if _unnamed(c.device) or _unnamed(c.part) or (c.part and not c.device):
        device = name(c.device) or "unknown"
        changes["component"] = Component(node=c.node, device=device.replace("/", "_"), part=name(c.part).replace("/", "_"))
    if len(f.summary) > SUMMARY_MAX:
        changes["summary"] = cut(f.summary, SUMMARY_MAX)
    if len(f.evidence) > EVIDENCE_MAX or any(len(line) > LINE_MAX for line in f.evidence):
        changes["evidence"] = tuple(cut(line, LINE_MAX) for line in f.evidence[:EVIDENCE_MAX])
    if not 1 <= f.count <= COUNT_MAX:
        changes["count"] = min(max(f.count, 1), COUNT_MAX)
    if not 0.0 <= f.certainty <= 1.0:
        changes["certainty"] = min(max(f.certainty, 0.0), 1.0)
    if f.facts and (size := _size(f.facts)) > FACTS_MAX:
        changes["facts"] = {"left_out": f"{size} bytes; at most {FACTS_MAX} are taken"}
    return msgspec.structs.replace(f, **changes) if changes else f


def _unnamed(text: str) -> bool:
    return len(text) > NAME_MAX or "/" in text


def name(text: str) -> str:
    """At most NAME_MAX characters; a longer one keeps its beginning and stays distinct by a digest of the whole."""
    if len(text) <= NAME_MAX:
        return text
    return f"{text[: NAME_MAX - 17]}~{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _size(facts: dict[str, Any]) -> int:
    try:
        return len(msgspec.json.encode(facts))
    except (OverflowError, RecursionError, ValueError):  # what cannot be written down cannot be kept either
        return FACTS_MAX + 1

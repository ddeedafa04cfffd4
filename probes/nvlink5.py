"""NVLink 5 faults (Xid 144-150): which unit spoke, how bad it is, and whom it blames.

This module exists because the number alone says nothing: one Xid 145 is a corrected hiccup, the next kills the GPU. The
line carries register words that the vendor's sheet decodes. What always holds:

* Both layouts of the first word are tried (drivers before and since R575), because the driver's version is not in the line.
  That is safe: no word and errorStatus is judged one way as one unit's old layout and another way as another unit's new
  one (checked over the whole sheet by a test).
* The line's own Fatal or Nonfatal decides where no row of the sheet fits, and outranks a row that is milder.
* A line without its words is judged by the strongest row of its unit that agrees with Fatal or Nonfatal.
* An injected event (``i1``) is on record and asks for nothing.

Line: ``UNIT Fatal|Nonfatal XC0|XC1 i0|i1 Link NN (0xintrInfo 0xerrorStatus 0x… …)``; link -1 is the whole GPU.
Source: NVIDIA Xid-Catalog.xlsx, sheet "Xid 144-150 Decode"; open-gpu-kernel-modules.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from probes.catalog import Judgement, LinkRule, buckets, link_rules
from sentinel.model import Action, Severity, Suspect

CODES = range(144, 151)

_LINE = re.compile(
    r"(?P<unit>[A-Z][A-Z0-9_/]*(?: [A-Z][A-Za-z]*)?)?\s*\b(?P<word>Non-?fatal|Fatal)\b"
    r"(?:\s+XC(?P<xc>\d))?(?:\s+i(?P<injected>\d))?(?:\s+Link\s+(?P<link>-?\d{1,3}))?(?:\s*\((?P<words>[^)]*))?",
    re.IGNORECASE,
)
_WORD = re.compile(r"0x([0-9a-fA-F]{1,8})\b")
_LINK = re.compile(r"\b[Ll]ink\s+(-?\d{1,3})\b")


class LinkEvent(NamedTuple):
    """What one line says, decoded. ``None`` in a field: the line does not say."""

    code: int
    unit: str
    fatal: bool | None  # the line's own word
    cross_contained: bool | None  # XC1: channels are torn down
    injected: bool
    link: int | None  # -1: the whole GPU
    intr_info: int | None
    status: int | None
    layout: str  # "v1" (before R575), "v2", or "" where the words did not tell
    rule: LinkRule | None
    judged: Judgement
    certainty: float

    @property
    def reason(self) -> int | None:
        """Why a link went down: bits 25:20 of the first word (Xid 149)."""
        return None if self.intr_info is None else (self.intr_info >> 20) & 0x3F

    @property
    def whole_gpu(self) -> bool:
        """Whether the fault is the GPU's rather than one link's: a GPU-fatal event drops all of its links."""
        if self.link is None or self.link < 0:
            return True
        link_down = self.code == 149 if self.rule is None else self.rule.severity == "link_fatal"
        return self.judged.severity is Severity.FATAL and not link_down


def decode(code: int, body: str) -> LinkEvent:
    """Decode what follows the code (pid and name already removed). Never raises: what it cannot read is ``inspect``."""
    match = _LINE.search(body[:512])
    if match is None:
        link = _LINK.search(body[:512])
        return LinkEvent(
            code, "", None, None, False, int(link[1]) if link else None, None, None, "", None,
            buckets()["WORKFLOW_NVLINK5_ERR"], 0.5,
        )
    unit = (match["unit"] or "").upper().replace(" ", "_")
    fatal = match["word"].lower() == "fatal"
    words = [int(w, 16) for w in _WORD.findall(match["words"] or "")]
    intr = words[0] if words else None
    status = words[1] if len(words) > 1 else None
    rule, layout = _rule(code, unit, fatal, intr, status)
    judged, certainty = _judge(code, unit, fatal, rule)
    injected = match["injected"] == "1"
    if injected:
        judged = Judgement(Severity.INFO, Action.NONE, Suspect.APP, "none", "injected on purpose; nothing to do")
    return LinkEvent(
        code, unit, fatal, None if match["xc"] is None else match["xc"] != "0", injected,
        None if match["link"] is None else int(match["link"]), intr, status, layout, rule, judged, certainty,
    )


def _rule(code: int, unit: str, fatal: bool, intr: int | None, status: int | None) -> tuple[LinkRule | None, str]:
    """The row that fits the words, and by which layout; among several, the one that agrees with the line's own words."""
    if intr is None:
        return None, ""
    fits: list[tuple[LinkRule, str]] = []
    for rule in link_rules():
        if rule.xid != code or (status is not None and rule.status is not None and status not in rule.status):
            continue
        for layout, (care, value) in (("v2", rule.v2), ("v1", rule.v1)):
            if intr & care == value:
                fits.append((rule, layout))
                break
    if not fits:
        return None, ""
    return max(fits, key=lambda f: (unit in f[0].units, (f[0].severity != "nonfatal") == fatal, _bucket(f[0]).action.rank))


def _bucket(rule: LinkRule) -> Judgement:
    return buckets()[rule.bucket]


def _judge(code: int, unit: str, fatal: bool, rule: LinkRule | None) -> tuple[Judgement, float]:
    certainty = 1.0
    if rule is None:
        certainty = 0.8
        kin = [r for r in link_rules() if r.xid == code and unit in r.units and (r.severity != "nonfatal") == fatal]
        # Words that are missing or fit nothing: the unit's strongest row for this word is the careful reading.
        plain = (r for r in kin if not r.promoted)
        rule = max(plain, key=lambda r: (_bucket(r).action.rank, r.follow_up != "IGNORE"), default=None)
    if rule is None:
        if fatal:
            return buckets()["RESET_GPU"], certainty
        return buckets()["WORKFLOW_NVLINK5_ERR"], certainty
    judged = _bucket(rule)
    if fatal and rule.severity == "nonfatal":
        return buckets()["RESET_GPU"], certainty
    if rule.bucket == "IGNORE" and rule.follow_up != "IGNORE":
        judged = judged._replace(severity=Severity.WARNING)
    # The far end went down first, or a requester saw its packet lost: the reporter is the victim.
    if rule.follow_up == "INVESTIGATE_PEER_DEVICE" or ("RLW_SRC_TRACK" in rule.units and rule.bucket == "XID_154_EVAL"):
        judged = judged._replace(suspect=Suspect.PEER)
    return judged, certainty

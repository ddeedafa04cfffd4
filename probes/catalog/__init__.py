"""What the vendor says about each code, and what we make of it, as tables that a person can read and a diff can show.

This module exists so that no verdict hides in code: every code's meaning, the vendor's action for it, and the few places
where we judge differently stand in the ``.tsv`` files beside it. What always holds:

* ``buckets.tsv`` turns the vendor's action buckets into severity, action, suspect and what leaves service; a row of
  ``xid.tsv`` overrides single columns of its bucket only where it names them.
* A code that no table knows is ``None`` here, and becomes a finding of its own where it is judged: unknown, never silent.
* Tables are read once, on first use, and are package data: as fixed as code.

Sources: ``catalogue`` is NVIDIA's Xid-Catalog.xlsx (sha256 7f70ce96…), its sheet "Xid 144-150 Decode" is ``nvlink5.tsv``;
``header`` is nverror.h of open-gpu-kernel-modules 595.45.04; ``r620`` the GPU Operational Events release notes. ``sxid.tsv``
is the open kernel modules' header with NVSentinel's actions (6f8b0fc) and the Fabric Manager guide's classes (DU-09883).
``recovery.tsv`` is NVML's field 230, which Xid 154 prints. ``kernel_lines.tsv`` names its sources row by row.
"""

from __future__ import annotations

import pkgutil
import re
from functools import lru_cache
from typing import NamedTuple

from sentinel.model import Action, Severity, Suspect


class CatalogError(Exception):
    """A table of the catalogue is damaged; the sentence names the table, the line and the column."""


class Judgement(NamedTuple):
    """What a code means for the one who must act. ``drain``: none, later, worker, gpu or node leaves service first."""

    severity: Severity
    action: Action
    suspect: Suspect
    drain: str
    advice: str = ""  # the first thing to do, for a person


class Xid(NamedTuple):
    code: int
    name: str  # the vendor's mnemonic
    says: str  # what happened, in a clause
    bucket: str  # the vendor's immediate action
    follow_up: str  # the vendor's investigatory action; "" where none is published
    gb200: bool | None  # whether the vendor lists it for GB200; None: does not say
    source: str
    judged: Judgement


class Sxid(NamedTuple):
    code: int
    name: str
    says: str
    fatal: bool  # by the table; the line's own word outranks it
    action: Action  # when fatal
    drain: str
    advice: str


class LinkRule(NamedTuple):
    """One row of the NVLink5 sheet. A mask is ``(care, value)``: it fits when ``word & care == value``."""

    xid: int
    units: tuple[str, ...]
    v1: tuple[int, int]  # layout of drivers before R575
    v2: tuple[int, int]  # layout since R575
    status: frozenset[int] | None  # None: any errorStatus
    bucket: str
    follow_up: str
    severity: str  # "nonfatal", "link_fatal", "fatal"
    promoted: bool = False  # the sheet's "action 2": the same event, raised to a reset


class KernelLine(NamedTuple):
    """A kernel message that has no number; ``pattern`` is matched at the message's beginning."""

    check: str
    about: str  # "gpu", "nic" or "driver"
    mark: str  # stands in every such message; looked for before the pattern is tried
    pattern: re.Pattern[str]  # may name groups ``pci`` and ``net``
    says: str
    judged: Judgement


DRAINS = ("none", "later", "worker", "gpu", "node")


def table(name: str) -> list[dict[str, str]]:
    """Rows of one table as {column: text}. Raises CatalogError when a row has not as many cells as the head."""
    data = pkgutil.get_data(__name__, name)
    if data is None:
        raise CatalogError(f"{name}: missing from the installation")
    head, *lines = data.decode("utf-8").splitlines()
    columns = head.split("\t")
    rows = []
    for number, line in enumerate(lines, 2):
        cells = line.split("\t")
        if len(cells) != len(columns):
            raise CatalogError(f"{name}: line {number} has {len(cells)} cells; wanted {len(columns)}")
        rows.append(dict(zip(columns, cells, strict=True)))
    return rows


_ADVICE = {  # where we name another first action than the vendor's bucket does
    Action.NONE: "nothing to do",
    Action.INSPECT: "a person looks",
    Action.RESET_GPU: "reset the GPU",
    Action.REBOOT_NODE: "reboot the node",
    Action.CONTACT_SUPPORT: "hand the machine to the vendor",
}


def _judgement(row: dict[str, str], where: str, base: Judgement | None = None) -> Judgement:
    def pick(column: str) -> str:
        return row[column] or (str(getattr(base, column)) if base else "")

    try:
        action = Action(pick("action"))
        advice = row["says"] if base is None else _ADVICE[action] if row["action"] else base.advice
        judged = Judgement(Severity(pick("severity")), action, Suspect(pick("suspect")), pick("drain"), advice)
    except ValueError as error:
        raise CatalogError(f"{where}: {error}") from None
    if judged.drain not in DRAINS:
        raise CatalogError(f"{where}: drain is {judged.drain!r}; wanted one of {', '.join(DRAINS)}")
    return judged


@lru_cache(maxsize=1)
def buckets() -> dict[str, Judgement]:
    return {r["bucket"]: _judgement(r, f"buckets.tsv: {r['bucket']}") for r in table("buckets.tsv")}


@lru_cache(maxsize=1)
def xids() -> dict[int, Xid]:
    known = buckets()
    found = {}
    for r in table("xid.tsv"):
        where = f"xid.tsv: {r['xid']}"
        if r["bucket"] not in known:
            raise CatalogError(f"{where}: no bucket is called {r['bucket']!r}")
        judged = _judgement(r, where, known[r["bucket"]])
        found[int(r["xid"])] = Xid(
            int(r["xid"]), r["name"], r["says"], r["bucket"], r["follow_up"],
            {"y": True, "n": False}.get(r["gb200"]), r["source"], judged,
        )
    return found


@lru_cache(maxsize=1)
def recoveries() -> dict[int, tuple[str, Judgement]]:
    """GPU recovery action by number → (name, judgement); 0 is a recovery, not a fault."""
    return {int(r["value"]): (r["name"], _judgement(r, f"recovery.tsv: {r['value']}")) for r in table("recovery.tsv")}


@lru_cache(maxsize=1)
def sxids() -> dict[int, Sxid]:
    actions = {r["vendor_action"]: r for r in table("sxid_actions.tsv")}
    found = {}
    for r in table("sxid.tsv"):
        if r["action"] not in actions:
            raise CatalogError(f"sxid.tsv: {r['sxid']}: no action is called {r['action']!r}")
        what = actions[r["action"]]
        found[int(r["sxid"])] = Sxid(
            int(r["sxid"]), r["name"], r["says"], r["severity"] == "fatal", Action(what["action"]), what["drain"], what["says"]
        )
    return found


@lru_cache(maxsize=1)
def kernel_lines() -> tuple[KernelLine, ...]:
    found = []
    for r in table("kernel_lines.tsv"):
        judged = _judgement(r, f"kernel_lines.tsv: {r['check']}")._replace(advice=_ADVICE[Action(r["action"])])
        found.append(KernelLine(r["check"], r["about"], r["mark"], re.compile(r"\s*" + r["pattern"]), r["says"], judged))
    return tuple(found)


def _mask(pattern: str) -> tuple[int, int]:
    """``--01`` (most significant bit first, '-' is any) → (care, value)."""
    return int(pattern.translate({45: 48, 48: 49}), 2), int(pattern.replace("-", "0"), 2)


@lru_cache(maxsize=1)
def link_rules() -> tuple[LinkRule, ...]:
    found = []
    for r in table("nvlink5.tsv"):
        status = frozenset(int(s, 16) for s in r["error_status"].split("/")) if r["error_status"] else None
        units = tuple(r["unit"].split("/"))
        plain = LinkRule(
            int(r["xid"]), units, _mask(r["intrinfo_v1"]), _mask(r["intrinfo_v2"]), status,
            r["action"], r["follow_up"], r["severity"],
        )
        found.append(plain)
        if r["promoted_action"]:
            found.append(plain._replace(
                v1=_mask(r["promoted_v1"]), v2=_mask(r["promoted_v2"]), bucket=r["promoted_action"], severity="fatal", promoted=True
            ))
    return tuple(found)

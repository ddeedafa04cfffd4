"""Kernel messages read into plain values: Xid, SXid, and the few lines without a number that matter.

This module exists to be the only place that knows how drivers spell their faults. What always holds:

* A message counts only when it *begins* as the driver writes it; a line that quotes a fault further in is not the fault.
* Bytes of any kind are read without an exception; what looks like a fault and cannot be read is an ``Unreadable``, not silence.
* Nothing is guessed: an address that is not printed is ``None``.

Sources: open-gpu-kernel-modules (nverror, rc, nvswitch); facts of lines seen in the field, old and new drivers alike.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from probes.catalog import KernelLine, kernel_lines
from sentinel.model import pci_address


class XidLine(NamedTuple):
    """``NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 94, pid=…, name=…, body``."""

    code: int
    pci: str | None  # dddd:bb:dd.f; None where the line does not carry a usable address
    gpu_instance: int | None  # MIG
    compute_instance: int | None
    pid: int | None
    process: str  # comm, cut at 15 characters by the kernel; "" unknown
    body: str


class FallenLine(NamedTuple):
    """``GPU … has fallen off the bus`` without an Xid beside it."""

    pci: str | None


class SxidLine(NamedTuple):
    """``nvidia-nvswitch1: SXid (PCI:…): 20034, Fatal, Link 48 …``; ``fatal`` None: this line does not say."""

    code: int
    pci: str | None  # the switch's address
    switch: str
    fatal: bool | None
    link: int | None
    data_only: bool  # only the raw words of an event whose other lines say more
    body: str


class DriverLine(NamedTuple):
    """A line that has no number; ``known`` is its row in the catalogue."""

    known: KernelLine
    pci: str | None
    net: str  # the network interface, where only that is named


class Unreadable(NamedTuple):
    """A line that begins like a fault and breaks off before it says which."""

    why: str


Line = XidLine | FallenLine | SxidLine | DriverLine | Unreadable

# What any line of interest contains; tested on bytes before anything is parsed, since almost every line is none.
MARKS = ("Xid (", "fallen off the bus", *(k.mark for k in kernel_lines()))
_MARKS = tuple(m.encode() for m in MARKS)

_XID = re.compile(r"\s*NVRM: Xid \(([^()\n]{0,96})\):\s*(\d{1,5})(?![0-9a-zA-Z])[, ]?(.*)", re.DOTALL | re.ASCII)
_XID_START = re.compile(r"\s*NVRM: Xid \(")
_SXID = re.compile(r"\s*(nvidia-nvswitch\d*): SXid \(([^()\n]{0,96})\):\s*(\d{1,6})(?![0-9a-zA-Z])[, ]*(.*)", re.DOTALL | re.ASCII)
_SXID_START = re.compile(r"\s*nvidia-nvswitch\d*: SXid \(")
_ADDRESS = re.compile(r"(?:PCI:)?([0-9a-fA-F]{1,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)(?![0-9a-fA-F])")
_INSTANCE = re.compile(r"GPU-(C?I):([0-9a-fA-F]{1,4})")
_PID = re.compile(r"\s*pid=(?:'?<unknown>'?|(\d{1,10}))\s*,?")
_NAME = re.compile(r"\s*name=(<unknown>|[^,\n]{0,64})\s*,?")
_FALLEN_START = ("NVRM: GPU ", "NVRM: The NVIDIA GPU ")
_SWITCH_WORD = re.compile(r"(?i)(non-?fatal|fatal)\b")
_SWITCH_SEVERITY = re.compile(r"Severity (\d)\b")
_LINK = re.compile(r"\bLink (-?\d{1,3})\b")


def of_interest(raw: bytes) -> bool:
    """Whether a record holds a mark of any line that ``read_line`` knows (a plain loop: it runs for every record)."""
    if b"NVRM: " in raw or b"SXid (" in raw or b"mlx5_core" in raw or b"INFO: task" in raw:
        for mark in _MARKS:
            if mark in raw:
                return True
    return False


def lines_of_interest(text: str, *more: str) -> list[int]:
    """Where in the text lines begin that hold one of the marks (or of ``more``): found by searching the text as a whole."""
    starts: set[int] = set()
    for mark in (*MARKS, *more):
        at = text.find(mark)
        while at >= 0:
            starts.add(text.rfind("\n", 0, at) + 1)
            end = text.find("\n", at)
            at = -1 if end < 0 else text.find(mark, end)
    return sorted(starts)


def address(text: str) -> str | None:
    match = _ADDRESS.search(text)
    return pci_address(match[1]) if match else None


def read_line(text: str) -> Line | None:
    """Read one message (prefixes removed; it may hold several lines of one record). None: nothing this module knows."""
    if "Xid (" in text:
        if (match := _XID.match(text)) is not None:
            return _xid(*match.groups())
        if (match := _SXID.match(text)) is not None:
            return _sxid(*match.groups())
        if _XID_START.match(text):
            return Unreadable("an Xid line that breaks off before its number")
        if _SXID_START.match(text):
            return Unreadable("an SXid line that breaks off before its number")
        return None
    if "fallen off the bus" in text:
        return FallenLine(address(text[:80])) if text.lstrip().startswith(_FALLEN_START) else None
    for known in kernel_lines():
        if known.mark in text and (match := known.pattern.match(text)) is not None:
            named = match.groupdict()
            return DriverLine(known, address(named.get("pci") or ""), named.get("net") or "")
    return None


def _xid(where: str, code: str, rest: str) -> XidLine:
    instances = dict(_INSTANCE.findall(where))
    pid, process = None, ""
    if (match := _PID.match(rest)) is not None:
        pid = int(match[1]) if match[1] and int(match[1]) > 0 else None  # pid 0 is the idle task: nobody's
        rest = rest[match.end():]
    if (match := _NAME.match(rest)) is not None:
        process = "" if match[1] == "<unknown>" else match[1].strip()
        rest = rest[match.end():]
    return XidLine(
        int(code), address(where),
        int(instances["I"], 16) if "I" in instances else None,
        int(instances["CI"], 16) if "CI" in instances else None,
        pid, process, rest.strip(),
    )


def _sxid(switch: str, where: str, code: str, rest: str) -> SxidLine:
    fatal: bool | None = None
    if (match := _SWITCH_WORD.match(rest)) is not None:
        fatal = match[1].lower() == "fatal"
    elif (match := _SWITCH_SEVERITY.match(rest)) is not None:
        fatal = match[1] != "0"  # NVSWITCH_ERROR_SEVERITY: 0 nonfatal, 1 fatal
    link = _LINK.search(rest)
    number = int(link[1]) if link else None
    return SxidLine(int(code), address(where), switch, fatal, number, rest.startswith("Data {"), rest.strip())

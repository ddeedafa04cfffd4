"""Pasted kernel-log text, in whatever way it was copied, back into the records that the kernel wrote.

This module exists because at 3 a.m. a line arrives by chat, grep, journalctl or a dashboard, never as /dev/kmsg printed it.
What always holds:

* A line counts only when what stands before the driver's own words is nothing but time, host, level and ``kernel``. A line of
  another program that quotes a fault (JSON, logfmt, ``name[pid]:``, a shell command) is counted as quoted, never judged.
* A record that says itself that user space wrote it (facility, journal transport) is counted as such, never judged.
* How it was copied does not matter: colours, control characters and a byte order mark are taken off first.
* What comes out are readings of the probe ``kernel_log``, so that pasted text and the live log are judged by the same code.

Text cannot prove where it comes from: someone may paste a forged line. That is why only the live probe may drain.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

from probes.kmsg import TEXT_CHARS, parse_record
from probes.xid import lines_of_interest
from sentinel.model import Reading

BATCH = 4096  # lines of interest per reading; what came with a line is looked for within its own
PREFIX_CHARS = 240
MARKS = ("detected NVSwitch", '"MESSAGE":[')  # of interest beside the driver's own; the second: see ``_from_json``

_STAMP = re.compile(
    r"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) )?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?"
    r"|(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) )?(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +\d{1,2} (?:\d{4} )?"
    r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: \d{4})?"
    r"|\d{1,12}\.\d{1,9}"
)
_TOKEN = re.compile(
    r"(?P<stamp>" + _STAMP.pattern + r")(?=[\s:\]]|$):?"
    r"|(?P<bracket>\[[^\[\]\"'{}=]{1,64}\]:?)"
    r"|(?P<syslog><\d{1,3}>\d?(?=\s|\[|[A-Z\d]|$))"
    r"|(?P<kernel>kern(?:el)?(?:\[\d+\])?\s*:|kernel(?=\s|$))"
    r"|(?P<level>(?i:emerg|alert|crit|err|error|warn|warning|notice|info|debug)\s*:|(?i:error|warning|info)(?=\s))"
    r"|(?P<nil>-(?=\s)|:(?=\s))"
)
_FILE = re.compile(r"(?:[\w.-]*/)+[\w.-]+:(?:\d{1,9}:)?|[\w-]+\.(?:log|txt):(?:\d{1,9}:)?")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SPACE = re.compile(r"\s*")
_RAW = re.compile(r"\s*(\d{1,5},\d{1,20},\d{1,20},[^;\s]{0,64};.*)", re.DOTALL)
_DRIVER = re.compile(r"NVRM: |nvidia-nvswitch\d*: SXid |mlx5_core \S|NETDEV WATCHDOG: |INFO: task \S")
_MANAGER = re.compile(
    r"detected NVSwitch (non-fatal|fatal) error (\d{1,6}) on (?:fid|NodeId) \d+ on NVSwitch pci bus id (\S+) physical id \d+"
    r"(?: port (\d+))?"
)
_COPIED = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\ufeff]")
_DMESG_KEYS = {"fac", "pri", "time", "caller", "msg"}


def is_prefix(text: str) -> bool:
    """Whether this is only what a log puts before a kernel message: times, one host, levels, ``kernel``."""
    if len(text) > PREFIX_CHARS:
        return False
    at, host, stamp, kernel, pending = 0, False, False, False, False
    if (match := _FILE.match(text)) is not None:
        at = match.end()
    first = True
    while True:
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches everywhere
        if at == len(text):
            return not pending
        if (match := _TOKEN.match(text, at)) is not None:
            stamp = stamp or match.lastgroup in ("stamp", "bracket")
            kernel = kernel or match.lastgroup == "kernel"
            pending = False
        elif not host and not kernel and (match := _HOST.match(text, at)) is not None:
            after = text[match.end(): match.end() + 1]
            if after == ":" and first:
                match = re.compile(":").match(text, match.end())  # "node01: …", as pdsh and talosctl put it
                assert match is not None  # noqa: S101  (just seen)
            elif after and not after.isspace():
                return False
            else:
                pending = not stamp  # a bare word is a host only with a time before it or kernel, a time or a level after it
            host = True
        else:
            return False
        first = False
        at = match.end()


def _from_json(line: str) -> tuple[str | None, str]:
    """A journal entry or dmesg record as JSON → (message, "") or (None, why not)."""
    try:
        entry = json.loads(line.strip().rstrip(","))
    except (ValueError, RecursionError):
        return None, "quoted"
    if not isinstance(entry, dict):
        return None, "quoted"
    if "_TRANSPORT" in entry:
        if entry["_TRANSPORT"] != "kernel":
            return None, "user_space"
        message = entry.get("MESSAGE")
        if isinstance(message, list):  # the journal prints what is no UTF-8 text (a process may be called so) as its bytes
            with contextlib.suppress(ValueError, TypeError):
                message = bytes(message).decode("utf-8", "replace")
        return (message, "") if isinstance(message, str) else (None, "malformed")
    if "msg" in entry and entry.keys() <= _DMESG_KEYS:
        kernel = entry.get("fac", "kern") in ("kern", 0)
        return (entry["msg"], "") if kernel and isinstance(entry["msg"], str) else (None, "user_space")
    return None, "quoted"


def message_of(line: str) -> tuple[str | None, str]:
    """The driver's message in one pasted line → (message, "") or (None, why it is not one: quoted, user_space, malformed)."""
    if (match := _RAW.match(line)) is not None:
        record = parse_record(match[1].encode("utf-8", "replace"))
        if record is None:
            return None, "malformed"
        return (record.text, "") if record.from_kernel else (None, "user_space")
    if line.lstrip().startswith("{"):
        return _from_json(line)
    if (match := _MANAGER.search(line)) is not None:
        word, code, pci, port = match.groups()  # Fabric Manager's own log: the same SXid, told by another
        link = f", Link {port}" if port else ""
        return f"nvidia-nvswitch: SXid (PCI:{pci}): {code}, {word.capitalize()}{link} (Fabric Manager)", ""
    if (match := _DRIVER.search(line)) is None or not is_prefix(line[: match.start()]):
        return None, "quoted"
    return line[match.start():], ""


def parse(text: str, node: str) -> Iterator[Reading]:
    """Readings of the probe ``kernel_log`` from pasted text, in order; ``seq`` is the line's number, times are left at 0."""
    count = text.count("\n") + (not text.endswith("\n") and bool(text))
    batch = _Batch(node)
    number, counted = 1, 0
    for start in lines_of_interest(text, *MARKS):
        number, counted = number + text.count("\n", counted, start), start
        end = text.find("\n", start)
        line = _COPIED.sub("", text[start: None if end < 0 else end][: 8 * TEXT_CHARS]).rstrip("\r")
        if "\\n" in line and not line.lstrip().startswith("{"):
            line = line.replace("\\n", "\n")  # one record of several lines, as some journals print it
        message, why = message_of(line)
        if message is not None and message.startswith("NVRM: fallen off the bus"):
            message = _rejoin(text[max(0, start - 1000): start], message)
        batch.add(number, message, why)
        if batch.full:
            yield batch.reading(count)
            batch = _Batch(node)
    yield batch.reading(count)


def _rejoin(before: str, message: str) -> str:
    """The driver's three-line message, printed as three: its first line names the GPU."""
    for line in reversed(before.splitlines()[-3:]):
        if (at := line.find("NVRM: The NVIDIA GPU ")) >= 0 and is_prefix(line[:at]):
            return line[at:] + "\n" + message
    return message


class _Batch:
    def __init__(self, node: str) -> None:
        self._node = node
        self._records: list[list[Any]] = []
        self._repeats: dict[str, list[int]] = {}
        self._first: dict[str, int] = {}
        self._skipped: dict[str, int] = {"quoted": 0, "user_space": 0, "malformed": 0}

    @property
    def full(self) -> bool:
        return len(self._records) >= BATCH

    def add(self, number: int, message: str | None, why: str) -> None:
        if message is None:
            self._skipped[why] += 1
            return
        message = message[:TEXT_CHARS]
        first = self._first.setdefault(message, number)
        if first == number:
            self._records.append([4, number, 0, message])
        else:
            self._repeats[str(first)] = [self._repeats.get(str(first), [0])[0] + 1, number, 0]

    def reading(self, lines: int) -> Reading:
        data = {
            "records": self._records, "repeats": self._repeats, "lines": lines, "skipped": self._skipped,
            "lost": 0, "overruns": 0, "last_seq": None, "booted_at": None, "more": False,
        }
        return Reading(probe="kernel_log", node=self._node, at=0.0, boot_id="pasted", data=data)

"""Pasted kernel-log text, in whatever way it was copied, back into the records that the kernel wrote.

This module exists because at 3 a.m. a line arrives by chat, grep, journalctl or a dashboard, never as /dev/kmsg printed it.
What always holds:

* A line counts only when what stands before the driver's own words is nothing but time, host, level and ``kernel``
  (``pasted_prefix``), or when a record says so (``pasted_json``). A line of another program that quotes a fault (its JSON,
  logfmt, ``name[pid]:``, a shell command) is counted as quoted, never judged.
* A record that says itself that user space wrote it (facility, journal transport) is counted as such, never judged.
* How it was copied does not matter: colours, control characters and a byte order mark are taken off first.
* What comes out are readings of the probe ``kernel_log``, so that pasted text and the live log are judged by the same code.

Text cannot prove where it comes from: someone may paste a forged line. That is why only the live probe may drain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from probes import pasted_json
from probes.kmsg import TEXT_CHARS, parse_record
from probes.pasted_json import Message
from probes.pasted_prefix import KERNEL, STAMP, origin
from probes.xid import Unreadable, lines_of_interest, read_line
from sentinel.model import Reading

BATCH = 4096  # lines of interest per reading; what came with a line is looked for within its own
HOSTS_MAX = 1024
LIST_CHARS = 1 << 24  # of one line that holds a list of records
MARKS = ("detected NVSwitch", *pasted_json.MARKS)  # of interest beside the driver's own

_RAW = re.compile(r"\s*(\d{1,5},\d{1,20},\d{1,20},[^;\s]{0,64};.*)", re.DOTALL)
_DRIVER = re.compile(r"NVRM: |nvidia-nvswitch\d*: SXid |mlx5_core \S|NETDEV WATCHDOG: |INFO: task \S")
_MANAGER = re.compile(
    r"detected NVSwitch (non-fatal|fatal) error (\d{1,6}) on (?:fid|NodeId) \d+ on NVSwitch pci bus id (\S+) physical id \d+"
    r"(?: port (\d+))?"
)
_COPIED = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\ufeff]")
_RECORD = re.compile(r"(?:data: |[\w.-]{1,63}: |(?:" + STAMP + r")(?: stdout F| stderr F)? )?(?=\{\s*\")")
_KEY = re.compile(r'\s*"(?:MESSAGE|message|msg|log|line)"\s*:')


def is_prefix(text: str) -> bool:
    """Whether this is only what a log puts before a kernel message."""
    return origin(text).author == KERNEL


def message_of(line: str) -> Message:
    """The driver's message in one pasted line, or why there is none."""
    if (match := _RAW.match(line)) is not None:
        record = parse_record(match[1].encode("utf-8", "replace"))
        if record is None:
            return Message(None, "malformed")
        return Message(record.text) if record.from_kernel else Message(None, "user_space")
    if (match := _RECORD.match(line.lstrip())) is not None:
        return pasted_json.of_line(line.lstrip()[match.end():], _plain)
    return _plain(line)


def _plain(line: str) -> Message:
    if (match := _MANAGER.search(line)) is not None:
        word, code, pci, port = match.groups()  # Fabric Manager's own log: the same SXid, told by another
        link = f", Link {port}" if port else ""
        return Message(f"nvidia-nvswitch: SXid (PCI:{pci}): {code}, {word.capitalize()}{link} (Fabric Manager)")
    if (match := _DRIVER.search(line)) is None:  # words that other programs use as well quote nobody
        return Message(None, "quoted" if "Xid (" in line or "fallen off the bus" in line else "")
    author, host = origin(line[: match.start()])
    return Message(line[match.start():], "", host) if author == KERNEL else Message(None, author)


def parse(text: str, node: str) -> Iterator[Reading]:
    """Readings of the probe ``kernel_log`` from pasted text, in order; ``seq`` is the line's number, times are left at 0.

    The first host that lines name, and lines that name none, are ``node``; every other host's lines are readings of its own.
    """
    count = text.count("\n") + (not text.endswith("\n") and bool(text))
    batches = {node: _Batch(node)}
    first = ""
    number, counted = 1, 0
    for start in lines_of_interest(text, *MARKS):
        number, counted = number + text.count("\n", counted, start), start
        for message in _messages(text, start):
            first = first or message.host
            where = node if message.host in ("", first) or len(batches) >= HOSTS_MAX else message.host
            batch = batches.setdefault(where, _Batch(where))
            batch.add(number, message.text, message.why)
            if batch.full:
                yield batches.pop(where).reading(count, first)
    for batch in batches.values():
        yield batch.reading(count, first)


def _messages(text: str, start: int) -> Iterator[Message]:
    """What the line that begins at ``start`` says; more than one only where it is a list of records."""
    end = text.find("\n", start)
    line = _COPIED.sub("", text[start: None if end < 0 else end][: 8 * TEXT_CHARS]).rstrip("\r")
    head = line.lstrip()
    if head.startswith(('[{"', '{"dmesg"')):
        yield from pasted_json.of_list(text[start: None if end < 0 else end][:LIST_CHARS], _plain)
        return
    if _KEY.match(line) is not None:
        yield pasted_json.around(text, start, _plain)
        return
    if head.startswith("MESSAGE="):
        yield pasted_json.of_field(text, start, line, _plain)
        return
    if "\\n" in line and not head.startswith("{"):
        line = line.replace("\\n", "\n")  # one record of several lines, as some journals print it
    message = message_of(line)
    said = message.text
    if said is not None and said.startswith("NVRM: fallen off the bus"):
        said = _rejoin(text[max(0, start - 1000): start], said)
    elif said is not None and end >= 0 and isinstance(read_line(said), Unreadable):
        said = _unwrapped(said, text[end + 1: end + 1 + TEXT_CHARS].partition("\n")[0].rstrip("\r"))
    yield message._replace(text=said)


def _unwrapped(message: str, following: str) -> str:
    """A line that a narrow terminal broke before its number, with what it broke off; as it was when that does not mend it."""
    for joint in ("", " "):
        if not isinstance(read_line(whole := message.rstrip() + joint + following.strip()), Unreadable):
            return whole
    return message


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
            if why:
                self._skipped[why] += 1
            return
        message = message[:TEXT_CHARS]
        first = self._first.setdefault(message, number)
        if first == number:
            self._records.append([4, number, 0, message])
        else:
            self._repeats[str(first)] = [self._repeats.get(str(first), [0])[0] + 1, number, 0]

    def reading(self, lines: int, host: str) -> Reading:
        """``host``: the first that lines of the whole text name."""
        data = {
            "records": self._records, "repeats": self._repeats, "lines": lines, "skipped": self._skipped,
            "lost": 0, "overruns": 0, "last_seq": None, "booted_at": None, "more": False, "host": host,
        }
        return Reading(probe="kernel_log", node=self._node, at=0.0, boot_id="pasted", data=data)

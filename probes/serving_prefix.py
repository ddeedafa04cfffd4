"""One pasted line of a serving stack's log taken apart: who printed it, where, when, and what it says.

This module exists because the same line arrives bare, with colours, through kubectl, docker, journalctl, Ray, torch, UCX, NCCL,
glog or as JSON. What always holds:

* Only what may stand before a message is taken off, at most ``PREFIXES`` pieces; the message itself is left as it was.
* A line that quotes somebody else is None: a user's prompt, an alert, a monitor's log, a command, deeper levels of a JSON record.
* A stamp without a year runs on a clock of its own ("m") and is never compared with one that has it ("y").
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import NamedTuple

LINE_CHARS = 2000
PREFIXES = 12  # of what may stand before a message: container, host, process, level, times

_ANSI = re.compile(r"\x1b\[[0-9;]{0,16}[A-Za-z]")
_CLOCK = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
_DATE = (
    r"(?P<year>\d{4})[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T ,]{1,2}(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d(?:[.,]\d{1,9})?)"
    r"(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?"
)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_PREFIX = tuple(re.compile(p) for p in (
    r"[│|>\s]+",
    r"\[pod/(?P<group>[\w.-]{1,253})/[\w.-]{1,63}\]",
    r"(?P<group>[\w.-]{1,63}-\d{1,4}|[a-z0-9.-]{1,200}-[a-z0-9]{5})\s+\|(?=\s)",  # docker compose
    r"(?P<group>[a-z0-9][a-z0-9.-]{1,200}-[a-z0-9]{5}) [a-z][a-z0-9-]{0,62}(?= (?:\(|\d{4}-|\[|[A-Z]{4}))",  # stern
    r"\[?" + _DATE + r"\]?:?(?=[\s:]|$)",
    r"(?P<name>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}(?P<day>\d{1,2}) " + _CLOCK +
    r" (?P<group>[\w.-]{1,63}) (?P<ident>[\w.@/-]{1,64})(?:\[(?P<pid>\d{1,9})\])?:",
    r"(?P<group>[\w.-]{1,63}) (?P<ident>[\w.@/-]{1,64})\[(?P<pid>\d{1,9})\]:",  # journalctl -o short-iso, after its stamp
    r"std(?:out|err) [FP](?=\s)|\d+ std(?:out|err):",
    r"\((?P<role>[A-Za-z][\w:.-]{0,40})(?: [^()\s]{1,40})??(?: pid=(?P<pid>\d{1,9}))?"
    r"(?:, ip=(?P<group>[\w.:-]{1,63}))?[^()]{0,20}\)",
    r"(?:TRACE|DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)(?::? |:\t)\s*(?:(?P<month>\d\d)-(?P<day>\d\d) "
    + _CLOCK + r")?(?: ?\[?[\w./-]{1,120}:\d{1,6}\])?",
    r"\[?rank ?(?P<rank>\d{1,5})\]:",
    r"\[[EWIF](?:\d{3,4} [\d:.]{8,16})? [\w./-]{1,60}:\d{1,6}\]",  # torch
    r"\[(?P<epoch>\d{9,11}\.\d{1,9})\] \[(?P<group>[\w.-]{1,253}):(?P<pid>\d{1,9}) *:\w{1,9}\]",  # UCX
    r"(?P<group>[\w.-]{1,253}):(?P<pid>\d{1,9}):\d{1,9} \[\d{1,3}\]",  # NCCL
    r"[EWIF](?P<month>\d\d)(?P<day>\d\d) " + _CLOCK + r"\.\d{1,9} +(?P<pid>\d{1,9}) [\w./-]{1,80}:\d{1,6}\]",  # glog
    r"- ?",
))  # fmt: skip
_FOREIGN = re.compile(
    r"(?i:alertmanager|prometheus|grafana|promtail|loki|fluent|telegraf|datadog|dcgm|node-problem|nvsentinel|gpud|sentinel|sudo|cron"
    r"|sshd|ansible|slack|logger|rsyslog|auditd)"
)
_COMMAND = re.compile(r"(?:[\w@.~:/-]{0,80}[$#] )|(?:grep|egrep|rg|echo|logger|kubectl|journalctl|tail|awk|sed)\s")
_QUOTES = re.compile(r"Received request |\bprompt: ['\"]|\bprompt_token_ids|\[FIRING|\balertname\b|\bprompt=")
_JSON_TEXT = ("message", "msg", "MESSAGE", "log", "line", "textPayload")  # "line": a query of Loki
_JSON_TIME = ("time", "ts", "timestamp", "@timestamp")


class Said(NamedTuple):
    """One line taken apart. ``clock``: "y" when the stamp has a year, "m" when it has none, "" when there is no stamp."""

    text: str
    group: str = ""
    role: str = ""
    pid: str = ""
    clock: str = ""
    at: float | None = None
    rank: str = ""


def take_apart(line: str) -> Said | None:
    """What stands before the message, and the message; None when the line quotes somebody else."""
    line = _ANSI.sub("", line[:LINE_CHARS]).rstrip()
    if line.lstrip().startswith("{"):
        return _from_json(line)
    if _QUOTES.search(line):
        return None
    group = role = pid = clock = rank = ""
    at: float | None = None
    rest = line
    for _ in range(PREFIXES):
        for pattern in _PREFIX:
            match = pattern.match(rest)
            if match is None or not match.end():
                continue
            found = match.groupdict()
            if _FOREIGN.match(found.get("ident") or ""):
                return None
            group = group or found.get("group") or ""
            role = found.get("role") or role
            pid = found.get("pid") or pid
            rank = found.get("rank") or rank
            stamp = _stamp(found)
            clock, at = stamp or (clock, at)
            rest = rest[match.end():].lstrip(" \t")
            break
        else:
            break
    return None if _COMMAND.match(rest) else Said(rest, group, role, pid, clock, at, rank)


def _stamp(found: dict[str, str | None]) -> tuple[str, float] | None:
    """Seconds and the clock that they run on. A stamp without a year is put into 2000, a leap year."""
    if epoch := found.get("epoch"):
        return "y", float(epoch)
    second = found.get("second")
    if second is None:
        return None
    month = _MONTHS.index(str(found["name"])) + 1 if found.get("name") else int(found.get("month") or 1)
    year = found.get("year")
    try:
        whole = datetime(int(year or 2000), month, int(found.get("day") or 1), int(found.get("hour") or 0),
                         int(found.get("minute") or 0), tzinfo=UTC)
    except ValueError:
        return None
    return ("y" if year else "m"), whole.timestamp() + float(second.replace(",", "."))


def _from_json(line: str) -> Said | None:
    """A record of the stack's own JSON log: only its top-level text speaks; what lies deeper is quoted."""
    try:
        entry = json.loads(line.strip().rstrip(","))
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or "alertname" in entry or "event" in entry or ("labels" in entry and "line" not in entry):
        return None
    if entry.get("_TRANSPORT") == "kernel" or _FOREIGN.match(str(entry.get("SYSLOG_IDENTIFIER", ""))):
        return None
    inner = entry.get("fields")
    texts = [entry.get(k) for k in _JSON_TEXT] + ([inner.get("message")] if isinstance(inner, dict) else [])
    text = next((t for t in texts if isinstance(t, str)), None)
    if text is None:
        return None
    said = take_apart(text.partition("\n")[0]) if not text.lstrip().startswith("{") else None
    if said is None:
        return None
    when = next((entry[k] for k in _JSON_TIME if isinstance(entry.get(k), str)), "")
    match = re.match(_DATE, when[:40])
    stamp = _stamp(match.groupdict()) if match else None
    rest = " ".join(f"{k}={entry[k]}" for k in list(entry)[:40] if "." in str(k) or str(k).endswith("_id"))[:LINE_CHARS]
    said = said._replace(text=f"{said.text} {rest}" if rest else said.text)
    return said._replace(clock=stamp[0], at=stamp[1]) if stamp and said.at is None else said

"""Kernel messages that a collector wrapped: JSON records, one a line or spread over many, and the journal's own fields.

This module exists because a log that went through journald, Fluent Bit, Loki or Docker comes back as records. What always holds:

* A record speaks for the kernel when it says so (its transport, facility or identifier), or when it is nothing but an envelope
  around one whole line that is the kernel's by itself. A record in which another program speaks about a fault is quoted.
* A record that names another author is user space's, whatever its text looks like.
* Work is bounded: a record spread over many lines is looked for nearby only.

Sources: systemd's journal fields and export format, util-linux dmesg --json, Docker's json-file driver, Fluent Bit's kmsg input,
Loki's and Grafana's exports, Google Cloud Logging, Elastic Common Schema.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

NEAR_CHARS, FIELDS_CHARS = 32768, 4096  # a record spread over lines; the fields of a journal entry on either side of its message
RECORDS_MAX = 4096  # of one line that holds a whole list
TEXT_KEYS = ("MESSAGE", "message", "msg", "log", "line", "body", "text")
MARKS = ('"MESSAGE":[', '"MESSAGE" : [')  # text that is no UTF-8 (a process may be called so) is printed as its bytes

_WHO = ("SYSLOG_IDENTIFIER", "syslog_identifier", "ident", "identifier", "program", "programname", "appname", "app_name", "process")
_FACILITIES = ("SYSLOG_FACILITY", "fac", "facility")
_TRANSPORTS = ("_TRANSPORT", "transport", "__journal__transport")
_HOSTS = ("_HOSTNAME", "hostname", "host", "Hostname", "node")
_INSIDE = ("jsonPayload", "labels", "fields", "attributes", "stream", "metadata")
# A logger of its own, or a monitor's event: its text speaks about a fault, whatever it quotes.
_AUTHORS = frozenset({
    "level", "lvl", "severity", "logger", "caller", "module", "component", "thread", "error", "err", "alertname", "alerts", "agent",
    "checkName", "errorCode", "event", "reason", "health", "annotations", "involvedObject", "kind",
})  # fmt: skip


class Message(NamedTuple):
    """The kernel's text; None: ``why`` says why there is none (quoted, user_space, malformed). ``host``: whose, where said."""

    text: str | None
    why: str = ""
    host: str = ""


Plain = Callable[[str], Message]


def of_entry(entry: Any, plain: Plain) -> Message:
    """The kernel's message in one record. ``plain`` reads a line that is no record."""
    if not isinstance(entry, dict):
        return Message(None, "quoted")
    flat = _flat(entry)
    transport = next((flat[k] for k in _TRANSPORTS if k in flat), None)
    who = next((flat[k] for k in _WHO if isinstance(flat.get(k), str)), None)
    facility = next((flat[k] for k in _FACILITIES if k in flat), None)
    if transport not in (None, "kernel") or facility not in (None, "kern", "kernel", 0, "0"):
        return Message(None, "user_space")
    if transport is None and who is not None and who.rstrip(":") != "kernel":
        return Message(None, "quoted")
    texts = [flat[k] for k in TEXT_KEYS if isinstance(flat.get(k), str | list)]
    if len(texts) != 1:
        return Message(None, "malformed" if transport and not texts else "quoted")
    text = texts[0]
    if isinstance(text, list):
        with contextlib.suppress(ValueError, TypeError):
            text = bytes(text).decode("utf-8", "replace")
    if not isinstance(text, str):
        return Message(None, "malformed")
    if transport is None and who is None and facility is None and _AUTHORS & entry.keys():
        return Message(None, "quoted")
    text = text.strip("\n")
    said = Message(text) if transport == "kernel" and text.startswith("NVRM: ") else plain(text)
    host = next((flat[k] for k in _HOSTS if isinstance(flat.get(k), str)), "")
    return said if said.host else said._replace(host=host)


def _flat(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Its own values and those one level below, where collectors put what journald said."""
    inner = [entry[k] for k in _INSIDE if isinstance(entry.get(k), dict)]
    flat = {k.rpartition("syslog.")[2]: v for d in (*inner, entry) for k, v in d.items()}
    if isinstance(flat.get("process"), dict):
        flat["process"] = flat["process"].get("name")
    return flat


def of_line(line: str, plain: Plain) -> Message:
    """The message of a line that is one whole record."""
    try:
        return of_entry(json.loads(line.strip().rstrip(",")), plain)
    except (ValueError, RecursionError):
        return Message(None, "quoted")


def of_list(line: str, plain: Plain) -> Iterator[Message]:
    """The messages of a line that is a whole list of records (``jq -c``, a downloaded query)."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(line.strip())
        entries = value.get("dmesg") if isinstance(value, dict) else value
        if isinstance(entries, list):
            for entry in entries[:RECORDS_MAX]:
                yield of_entry(entry, plain)
            return
    yield Message(None, "quoted")


def around(text: str, start: int, plain: Plain) -> Message:
    """The message of a record that is spread over lines, of which the one at ``start`` holds the text."""
    least = max(0, start - NEAR_CHARS)
    opening = text.rfind("{", least, start)
    with contextlib.suppress(ValueError, RecursionError):
        if opening >= 0:
            entry, end = json.JSONDecoder().raw_decode(text[opening: start + NEAR_CHARS])
            return of_entry(entry, plain) if opening + end > start else Message(None, "quoted")
    return Message(None, "quoted")


def of_field(text: str, start: int, line: str, plain: Plain) -> Message:
    """The message of a journal entry printed field by field (``-o export``, ``-o verbose``): ``MESSAGE=…`` is at ``start``."""
    message = line.strip().removeprefix("MESSAGE=")
    fields = [*_entry(text[max(0, start - FIELDS_CHARS): start].split("\n")[-2::-1], line),
              *_entry(text[start: start + FIELDS_CHARS].split("\n")[1:], line)]
    said = dict(f.strip().split("=", 1) for f in fields if "=" in f)
    if said.get("_TRANSPORT", "kernel") != "kernel":
        return Message(None, "user_space")
    if said.get("SYSLOG_IDENTIFIER", "kernel") != "kernel":
        return Message(None, "quoted")
    told = plain(message)
    return told if told.host else told._replace(host=said.get("_HOSTNAME", ""))


def _entry(lines: list[str], beside: str) -> Iterator[str]:
    """Lines of the same entry: up to an empty one, or to one that is not set in as far."""
    for line in lines:
        if not line.strip() or line[:1].isspace() != beside[:1].isspace():
            return
        yield line.rstrip("\r")

"""A tool's output that came through something which put its own words before every line: taken apart by who printed it.

This module exists because ``nvidia-smi`` and its kin are run on a whole rack at once and in containers, and one host's healthy
GPU must never stand for another host's sick one at the same address. What always holds:

* Either nearly every line of a text carries the same kind of prefix, or the text is left alone; a few lines decide.
* Lines stay in order, and each keeps what stands behind its prefix as it was.
* Work is linear in the text; at most ``CARRIERS_MAX`` hosts or pods are told apart.

Sources: kubectl logs --prefix and --timestamps, the CRI log format, docker compose, Docker's json-file driver, Loki's lines, pdsh
and clush, ts(1).
"""

from __future__ import annotations

import json
import re

SAMPLE_LINES, CARRIERS_MAX, ROUNDS = 400, 1024, 3
SHARE = 0.9  # of the lines that are not empty; a shell prompt or a fence may stand between
PER_HOST = 3  # lines of one host, on average: "key: value" pairs of a file have as many words as lines

_KINDS = tuple(re.compile(p) for p in (
    r"\[pod/(?P<who>[\w.-]{1,253})/[\w.-]{1,63}\] ?",
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d) (?:std(?:out|err) [FP] ?)?",
    r"(?P<who>[\w.-]{1,253})\s+\| ?",
    r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}\d{1,2} \d\d:\d\d:\d\d ",
))  # fmt: skip
_HOST = re.compile(
    r"(?!(?i:info|warn|warning|error|err|debug|fatal|critical|notice|trace|message|msg|log|std(?:out|err)):)"  # a logger's line
    r"(?P<who>[A-Za-z0-9][\w.-]{0,62}):(?: |$)"
)
_RECORD = re.compile(r'\s*\{.{0,400}?"(?:log|line)"\s*:\s*"')


def carried(text: str) -> list[tuple[str, str]]:
    """The text by who printed it, as (host or pod or "", its lines); one part that is the text itself where nothing carried it."""
    parts = [("", text)]
    for _ in range(ROUNDS):
        taken = [(who or outer, part) for outer, whole in parts for who, part in _once(whole)]
        if taken == parts:
            break
        parts = taken[:CARRIERS_MAX]
    return parts


def _once(text: str) -> list[tuple[str, str]]:
    sample = [line for line in text[: SAMPLE_LINES * 200].splitlines()[:SAMPLE_LINES] if line.strip()]
    if not sample:
        return [("", text)]
    if sum(_RECORD.match(line) is not None for line in sample) >= SHARE * len(sample):
        return [("", "\n".join(_inside(line) for line in text.splitlines()) + "\n")]
    kind = next((k for k in (*_KINDS, _HOST) if _fits(k, sample)), None)
    if kind is None:
        return [("", text)]
    parts: dict[str, list[str]] = {}
    for line in text.splitlines():
        match = kind.match(line)
        who = (match.groupdict().get("who") or "") if match else ""
        if match is not None and (who in parts or len(parts) < CARRIERS_MAX):
            parts.setdefault(who, []).append(line[match.end():])
    return [(who, "\n".join(lines) + "\n") for who, lines in parts.items()]


def _fits(kind: re.Pattern[str], sample: list[str]) -> bool:
    found = [m for line in sample if (m := kind.match(line)) is not None]
    if len(found) < SHARE * len(sample):
        return False
    return kind is not _HOST or len(found) >= PER_HOST * len({m["who"] for m in found})


def _inside(line: str) -> str:
    """The text of one record; "" for what is none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    said = (entry.get("log") or entry.get("line")) if isinstance(entry, dict) else None
    return said.rstrip("\n") if isinstance(said, str) else ""

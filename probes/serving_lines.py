"""Pasted logs of the serving stack (vLLM, Dynamo, NIXL/UCX, NCCL, Mooncake, CUDA) as one bounded reading of what they say.

This module exists so that what an operator pastes from kubectl, journalctl or a terminal becomes plain values that can be
judged anywhere. What always holds:

* The tables decide what a line is: ``catalog/serving_lines.tsv`` (mark, pattern, source) names its kind,
  ``catalog/serving_kinds.tsv`` what the kind means. One line has one kind: the first row that fits.
* A line that quotes (a user's prompt, an alert, another program, a command) is counted as quoted, never judged.
* Time is what the line itself carries. A stamp without a year runs on a clock of its own and is never compared with one that
  has it.
* However long the text, the reading holds at most ``EVENTS`` kinds-at-a-place and ``SAMPLES`` throughput reports; what
  repeats is counted.

The reading's ``data``: ``events`` [kind, group, role, pid, line, clock, at, last line, last at, count, text, fields],
``samples`` [group, engine, line, clock, at, prompt, generation, running, waiting, corrupted], ``metrics`` [group, name,
labels, line, value], ``pid`` (of the server, for lines that name no place), ``lines``, ``skipped``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from probes.catalog import DRAINS, CatalogError, table
from probes.serving_prefix import LINE_CHARS, Said, take_apart
from sentinel.model import Action, Reading, Severity, Suspect

TEXT_CHARS = 400
EVENTS, SAMPLES, FOLLOWING = 1000, 4000, 3
ANY = "*"


class ServingKind(NamedTuple):
    name: str
    family: str  # engine, cuda, collective, kv_transfer, router, capacity, noise, context
    severity: Severity
    action: Action
    suspect: Suspect
    drain: str
    stop: bool  # means nothing once its owner was told to stop
    after: frozenset[str]  # kinds that explain it when they came with it; "*": every other fault
    says: str
    first: str


class ServingLine(NamedTuple):
    kind: str
    mark: str
    pattern: re.Pattern[str] | None


@lru_cache(maxsize=1)
def kinds() -> dict[str, ServingKind]:
    """Raises CatalogError when a cell is not of its column's values or an explaining kind does not exist."""
    found = {}
    for r in table("serving_kinds.tsv"):
        try:
            after = frozenset(r["after"].split(",")) - {""}
            found[r["kind"]] = ServingKind(
                r["kind"], r["family"], Severity(r["severity"]), Action(r["action"]), Suspect(r["suspect"]), r["drain"],
                {"y": True, "n": False}[r["stop"]], after, r["says"], r["first"],
            )
            DRAINS.index(r["drain"])
        except (ValueError, KeyError) as error:
            raise CatalogError(f"serving_kinds.tsv: {r['kind']}: {error}") from None
    for kind in found.values():
        if unknown := kind.after - found.keys() - {ANY}:
            raise CatalogError(f"serving_kinds.tsv: {kind.name}: after names {sorted(unknown)}, which no row describes")
    return found


@lru_cache(maxsize=1)
def lines() -> tuple[ServingLine, ...]:
    """Raises CatalogError when a row names a kind that does not exist."""
    for r in table("serving_lines.tsv"):
        if r["kind"] not in kinds():
            raise CatalogError(f"serving_lines.tsv: {r['mark']}: no kind is called {r['kind']!r}")
    rows = table("serving_lines.tsv")
    return tuple(ServingLine(r["kind"], r["mark"], re.compile(r["pattern"]) if r["pattern"] else None) for r in rows)


# -- what the message says ------------------------------------------------------------------------------------------------------

_REPORT = re.compile(
    r"(?:Engine (?P<engine>\d{1,5}): )?Avg prompt throughput: (?P<prompt>[\d.]{1,12}) tokens/s, Avg generation throughput: "
    r"(?P<generation>[\d.]{1,12}) tokens/s(?:, Running: (?P<running>\d{1,9}) reqs)?"
    r"(?:.{0,80}(?:Waiting|Pending): (?P<waiting>\d{1,9}) reqs)?"
    r"(?:.{0,200}Corrupted: (?P<corrupted>\d{1,9}) reqs)?"
)
_CONTINUED = re.compile(r"Running: (?P<running>\d{1,9}) reqs, Waiting: (?P<waiting>\d{1,9}) reqs")
_METRIC = re.compile(r"(?P<name>vllm:[a-z_0-9]{1,80})(?P<labels>\{[^}]{0,400}\})? (?P<value>[0-9.eE+]{1,24})$")
_METRICS = frozenset((
    "vllm:corrupted_requests_total", "vllm:nixl_num_notifications_after_expiry_total", "vllm:num_requests_running",
    "vllm:generation_tokens_total",
))  # fmt: skip
_FIELDS = {
    "engine": re.compile(r"remote_engine_id['\"]?: ['\"]?([\w.-]{3,64})"),
    "host": re.compile(r"remote_host['\"]?: ['\"]?([\w.:-]{2,64})"),
    "port": re.compile(r"remote_port['\"]?: ['\"]?(\d{1,5})"),
    "failure": re.compile(r"failure_type['\"]?: ['\"]?(\w{3,40})"),
    "expected": re.compile(r"engine ID mismatch\. Expected (\S{3,80}),"),
}
_KERNEL = re.compile(r"\[ *\d{1,8}\.\d{6}\] (?!\[)|<\d{1,3}>|kern {1,8}:|\d{1,5},\d{1,20},\d{1,20},[^;]{0,40};")
_OOM_MARK = "Killed process"
_FIELD_MARK = re.compile(r"remote_|failure_type|engine ID mismatch")
_REPORT_MARK, _METRIC_MARK, _CONTINUED_MARK = "Avg generation throughput", "vllm:", "Running: "


def classify(text: str, rows: tuple[ServingLine, ...] | None = None) -> tuple[str, dict[str, str]] | None:
    """The kind of a message and what its pattern names in it; None: nothing that the table (or these rows of it) knows."""
    for row in lines() if rows is None else rows:
        if row.mark not in text:
            continue
        if row.pattern is None:
            return row.kind, {}
        if (match := row.pattern.search(text)) is not None:
            return row.kind, {k: v for k, v in match.groupdict().items() if v}
    return None


def parse(text: str, node: str) -> Iterator[Reading]:
    """At most one reading of the probe ``serving_log``; none when the text holds no line of a serving stack."""
    seen = _Seen(node)
    numbers, kept = _not_kernel(text)
    at, counted = 0, 0
    for start, marks in sorted(_of_interest(kept).items()):
        at, counted = at + kept.count("\n", counted, start), start
        end = kept.find("\n", start)
        line = kept[start: min(start + LINE_CHARS, len(kept) if end < 0 else end)]
        seen.line(numbers[at], line, _rows(marks), "" if end < 0 else kept[end + 1: end + 1 + LINE_CHARS])
    if seen.anything:
        yield seen.reading(text.count("\n") + (not text.endswith("\n") and bool(text)))


def _not_kernel(text: str) -> tuple[list[int], str]:
    """The lines that the kernel did not print, with their numbers: a kernel log is another probe's and may be very long.

    Its OOM killer's word about a process stays.
    """
    numbers, kept = [], []
    for number, line in enumerate(text.split("\n"), 1):
        kernel = _KERNEL.match(line) is not None or line.find(" kernel: ", 0, 120) >= 0
        if not kernel or _OOM_MARK in line:
            numbers.append(number)
            kept.append(line)
    return numbers, "\n".join(kept)


def _of_interest(text: str) -> dict[int, int]:
    """Where lines begin that hold a mark → which marks, one bit each: the text is searched as a whole, once per mark."""
    found: dict[int, int] = {}
    for bit, mark in enumerate(_marks() if text else ()):
        at = text.find(mark)
        while at >= 0:
            start = text.rfind("\n", 0, at) + 1
            found[start] = found.get(start, 0) | 1 << bit
            end = text.find("\n", at)
            at = -1 if end < 0 else text.find(mark, end)
    return found


@lru_cache(maxsize=1)
def _marks() -> tuple[str, ...]:
    return tuple(dict.fromkeys((*(row.mark for row in lines()), _REPORT_MARK, _METRIC_MARK, _CONTINUED_MARK)))


@lru_cache(maxsize=4096)
def _rows(marks: int) -> tuple[ServingLine, ...]:
    """The rows of the table whose mark is among these bits, in the table's order."""
    there = {mark for bit, mark in enumerate(_marks()) if marks >> bit & 1}
    return tuple(row for row in lines() if row.mark in there)


class _Seen:
    def __init__(self, node: str) -> None:
        self._node = node
        self._events: dict[tuple[str, ...], list[Any]] = {}
        self._samples: list[list[Any]] = []
        self._metrics: list[list[Any]] = []
        self._skipped = {"quoted": 0, "over": 0}
        self._speakers: dict[int, str] = {}  # among lines that name no place: pid of the server, else of the engine, else of a rank

    @property
    def anything(self) -> bool:
        return bool(self._events or self._samples or self._metrics or self._skipped["quoted"])

    def line(self, number: int, raw: str, rows: tuple[ServingLine, ...], following: str) -> None:
        said = take_apart(raw)
        if said is None:
            self._skipped["quoted"] += classify(raw[:LINE_CHARS], rows) is not None
            return
        if said.pid and not said.group:
            self._speakers.setdefault(0 if said.role.startswith("API") else 1 if said.role.startswith("Engine") else 2, said.pid)
        if (match := _REPORT.search(said.text)) is not None:
            g = match.groupdict()
            values = [_number(g[k]) for k in ("prompt", "generation", "running", "waiting", "corrupted")]
            self._keep(self._samples, [said.group, g["engine"] or "", number, said.clock, said.at, *values])
        elif (match := _METRIC.match(said.text)) is not None:
            if match["name"] in _METRICS:
                self._keep(self._metrics, [said.group, match["name"], match["labels"] or "", number, _number(match["value"])])
        elif (match := _CONTINUED.match(said.text)) is not None and self._samples and self._samples[-1][7] is None:
            self._samples[-1][7:9] = [_number(match["running"]), _number(match["waiting"])]  # a report that was wrapped
        elif (known := classify(said.text, rows)) is not None:
            self._event(number, said, *known, _continued(following))

    def _keep(self, into: list[list[Any]], row: list[Any]) -> None:
        if len(into) >= SAMPLES:
            del into[1: 2]  # the first and the latest stay
            self._skipped["over"] += 1
        into.append(row)

    def _event(self, number: int, said: Said, kind: str, fields: dict[str, str], more: str) -> None:
        whole = said.text + more
        if said.rank:
            fields.setdefault("rank", said.rank)
        for name, pattern in _FIELDS.items() if _FIELD_MARK.search(whole) else ():
            if (match := pattern.search(whole)) is not None:
                fields[name] = match[1]
        key = (kind, said.group, *(fields.get(k, "") for k in ("engine", "host", "worker", "rank", "hca", "exit", "status")))
        known = self._events.get(key)
        if known is not None:
            known[7:10] = [number, said.at if said.clock == known[5] else known[8], known[9] + 1]
        elif len(self._events) < EVENTS:
            self._events[key] = [kind, said.group, said.role, said.pid, number, said.clock, said.at, number, said.at, 1,
                                 said.text[:TEXT_CHARS], fields]
        else:
            self._skipped["over"] += 1

    def reading(self, count: int) -> Reading:
        pid = self._speakers[min(self._speakers)] if self._speakers else ""
        data = {
            "events": list(self._events.values()), "samples": self._samples, "metrics": self._metrics, "pid": pid,
            "lines": count, "skipped": self._skipped,
        }
        return Reading(probe="serving_log", node=self._node, at=0.0, boot_id="pasted", data=data)


def _continued(following: str) -> str:
    """The indented lines after this one, which belong to it."""
    more = []
    for line in following.split("\n")[:FOLLOWING]:
        if not line[:1].isspace() or not line.strip():
            break
        more.append(line)
    return " ".join(more)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None

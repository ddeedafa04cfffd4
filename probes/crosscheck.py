"""The kernel log's Xids against NVML's: two ways to hear of one fault, so that a deaf one is noticed.

This module exists because a log reader that misses lines looks just like a healthy node. Pure, like an ``assess``: it takes the
readings of the probes ``kernel_log`` and ``gpu`` as they come, and its only state is ``memory`` (plain JSON values). What always
holds:

* What it finds is about the monitor, never about hardware: both are events, neither takes a GPU.
* Compared is whether there is one, by GPU and code within ``match_s``, not how many: either side may fold or drop repeats.
* Nothing is missed that could not have been heard: not within ``match_s`` of the time from which the log is read or the GPU
  listened to, not while the log cannot be read (then nothing is judged until it can) and not across records that it lost.
* Only the kernel's own lines count: the reading holds no others, so that a line written by user space satisfies nothing.

Times are seconds since boot on both sides: printk's stamps and CLOCK_MONOTONIC_RAW, which no set wall clock moves.

``kernel_log.missed_xid``: a number without a line. The driver prints every Xid, so the log is not heard as it should be; a
number that no catalogue knows is only on record (k8s-device-plugin#259: an Xid 999 that no document has).
``nvml.untold_xid``: a line without a number, on record only. NVML calls its events "critical" without saying which codes those are
(nvml.h, nvmlEventTypeXidCriticalError), so it is said for ``DELIVERED`` alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from probes.catalog import xids
from probes.thresholds import limits
from probes.xid import FallenLine, Unreadable, XidLine, read_line
from sentinel.model import Action, Component, Finding, Kind, Reading, Severity, Suspect

APART_S = 10.0  # less than this apart, one span of time is kept
KINDS, PENDING = 512, 256  # kinds of lines and numbers, and questions, kept at once
# Codes that others have received as NVML events in the field: 13, 31, 43, 45, 68 and 109 by NVIDIA/k8s-device-plugin (the list that
# it passes over, #1340), 48 by GKE's device plugin (container-engine-accelerators#175), 43 by dra-driver-nvidia-gpu#689 on GH200.
DELIVERED = frozenset({13, 31, 43, 45, 48, 68, 109})

Spans = dict[str, list[list[float]]]


def compare(reading: Reading, memory: dict[str, Any]) -> list[Finding]:
    """Take in a reading of either probe, in the order they were made; the findings that are due now. Others are passed over."""
    if reading.probe not in ("kernel_log", "gpu"):
        return []
    if memory.get("boot", reading.boot_id) != reading.boot_id:
        memory.clear()  # seconds since another boot
    memory["boot"] = reading.boot_id
    return _lines(reading, memory) if reading.probe == "kernel_log" else _numbers(reading, memory)


def _lines(reading: Reading, memory: dict[str, Any]) -> list[Finding]:
    """Take in what the log said, and judge the numbers that by now should have a line."""
    data, booted = reading.data, reading.data.get("booted_at")
    if booted is None:
        return []
    now = reading.at - float(booted)
    skipped, window = data.get("skipped", {}), limits().kernel_log.match_s
    if data.get("lost") or data.get("overruns") or skipped.get("malformed") or skipped.get("oversized"):
        memory["read_since"] = now  # what is missing was lost, and that has a finding of its own
    since = memory.setdefault("read_since", now)
    lines: Spans = memory.setdefault("lines", {})
    told: Spans = memory.setdefault("numbers", {})
    owed: list[list[Any]] = memory.setdefault("lines_missing_numbers", [])
    for _, seq, usec, text in data.get("records", ()):
        line, at = read_line(text), usec / 1e6
        last = data.get("repeats", {}).get(str(seq), (0, seq, usec))[2] / 1e6
        if isinstance(line, Unreadable):
            _add(lines, _key(None, None), at, last)
        elif isinstance(line, XidLine | FallenLine):
            code = line.code if isinstance(line, XidLine) else 79
            _add(lines, _key(line.pci, code), at, last)
            if line.pci and code in DELIVERED and not _near(told, [_key(line.pci, code)], at, at):
                _owe(owed, [line.pci, code, at, text[:200]])

    found, waiting = [], []
    for pci, code, after, at, count in memory.get("numbers_missing_lines", ()):
        if _near(lines, [_key(pci, code), _key(None, code), _key(None, None)], after, at):
            continue
        if now < at + window or data.get("more"):
            waiting.append([pci, code, after, at, count])
        elif after - window >= since and _news(memory, f"line {pci} {code}", now):
            found.append(_missed_line(reading, pci, code, at=reading.at - (now - at), count=count))
    memory["numbers_missing_lines"] = waiting
    _prune(lines, now)  # last: a log that is read late answers old questions
    return found


def _numbers(reading: Reading, memory: dict[str, Any]) -> list[Finding]:
    """Take in what NVML told of, and judge the lines that by now should have a number."""
    events = reading.data.get("xid_events")
    if not events:
        return []  # this driver's process has no listener: not measured
    now, listening, window = float(events["now"]), events["listening"], limits().kernel_log.match_s
    numbers: Spans = memory.setdefault("numbers", {})
    lines: Spans = memory.setdefault("lines", {})
    owed: list[list[Any]] = memory.setdefault("numbers_missing_lines", [])
    counts, memory["counts"] = memory.get("counts", {}), {}
    for told in events["heard"]:
        pci, code, after, at = told["pci"], told["xid"], told["after"], told["at"]
        key = _key(pci, code)
        memory["counts"][key] = told["count"]
        if pci is None or told["count"] == counts.get(key):
            continue
        _add(numbers, key, after, at)
        asked = after - window >= told["since"] and at > now - _kept_s() + window  # else its line may be forgotten already
        if asked and not _near(lines, [key, _key(None, code), _key(None, None)], after, at):
            _owe(owed, [pci, code, after, at, told["count"]])
    _prune(numbers, now)

    found, waiting = [], []
    for pci, code, at, text in memory.get("lines_missing_numbers", ()):
        since = listening.get(pci)
        if _near(numbers, [_key(pci, code)], at, at) or now > at + _kept_s():
            continue
        if now < at + window or since is None:
            waiting.append([pci, code, at, text])
        elif since <= at - window and _news(memory, f"number {pci} {code}", now):
            found.append(_missed_number(reading, pci, code, at=reading.at - (now - at), text=text))
    memory["lines_missing_numbers"] = waiting
    return found


# -- findings -----------------------------------------------------------------------------------------------------------------


def _missed_line(reading: Reading, pci: str, code: int, *, at: float, count: int) -> Finding:
    known = xids().get(code)
    what = f": {known.says}" if known else ", which no catalogue knows"
    return _finding(
        reading, "kernel_log.missed_xid", Component(node=reading.node, device="kernel_log"), pci=pci, code=code, at=at,
        severity=Severity.WARNING if known else Severity.INFO, action=Action.FIX_MONITOR if known else Action.NONE,
        certainty=1.0 if known else 0.5, evidence=(f"NVML event Xid {code}, number {count} since the agent began",),
        summary=f"NVML told of Xid {code} on GPU {pci}{what}. The kernel log that is read here has no such line.",
    )  # fmt: skip


def _missed_number(reading: Reading, pci: str, code: int, *, at: float, text: str) -> Finding:
    return _finding(
        reading, "nvml.untold_xid", Component(node=reading.node, device="driver"), pci=pci, code=code, at=at,
        severity=Severity.INFO, certainty=0.5, evidence=(text,),
        summary=f"The kernel log has Xid {code} on GPU {pci}, and NVML, which is listened to, told of none.",
    )  # fmt: skip


def _finding(reading: Reading, check: str, where: Component, *, pci: str, code: int, at: float, **words: Any) -> Finding:
    return Finding(
        id=f"{reading.node}:{reading.boot_id}:{check}:{pci}:{code}:{at:.3f}", check=check, component=where, at=at, kind=Kind.EVENT,
        suspect=Suspect.MONITOR, facts={"xid": code, "gpu": pci}, **words,
    )  # fmt: skip


def _news(memory: dict[str, Any], what: str, now: float) -> bool:
    """Whether this was not said lately: a driver that never tells of a code would say so at every line."""
    said: dict[str, float] = memory.setdefault("said", {})
    if what in said and now - said[what] < limits().kernel_log.match_again_s:
        return False
    said.pop(what, None)
    said[what] = now
    while len(said) > KINDS:
        del said[next(iter(said))]
    return True


# -- what was heard when ------------------------------------------------------------------------------------------------------


def _kept_s() -> float:
    """How long what was heard is kept; a question that nobody could answer by then is dropped."""
    return 5 * limits().kernel_log.match_s


def _key(pci: str | None, code: int | None) -> str:
    """A line without an address may be of any GPU, one that breaks off before its number may be any code's."""
    return f"{pci or '*'} {'*' if code is None else code}"


def _add(spans: Spans, key: str, start: float, end: float) -> None:
    known = spans.setdefault(key, [])
    if known and start <= known[-1][1] + APART_S and end >= known[-1][0] - APART_S:
        known[-1][:] = min(start, known[-1][0]), max(end, known[-1][1])
    else:
        known.append([start, end])
        del known[:-PENDING]
    while len(spans) > KINDS:
        del spans[next(iter(spans))]


def _near(spans: Spans, keys: Iterable[str], start: float, end: float) -> bool:
    window = limits().kernel_log.match_s
    return any(s <= end + window and e >= start - window for key in keys for s, e in spans.get(key, ()))


def _prune(spans: Spans, now: float) -> None:
    oldest = now - _kept_s()
    for key in list(spans):
        spans[key] = [span for span in spans[key] if span[1] >= oldest]
        if not spans[key]:
            del spans[key]


def _owe(owed: list[list[Any]], question: list[Any]) -> None:
    """Ask once per GPU and code at a time; with too many questions the newest is not asked."""
    if len(owed) < PENDING and not any(o[:2] == question[:2] for o in owed):
        owed.append(question)

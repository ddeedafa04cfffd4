"""Lines of the kernel log folded into occurrences: one finding for what happened once, however often it is printed.

This module exists so that the live log, a recording and pasted text are judged by the same pure function. What always holds:

* Time between lines is the log's own, seconds since boot: a wall clock that is set makes nothing old, new, or the same.
* Memory is plain JSON values and bounded: open episodes, and what each GPU said lately. Another boot begins with none.
* What a line means is ``probes.kernel_findings``'s; here it is only whether it is the same occurrence, worse, or another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from probes import ProbeError
from probes.kernel_findings import Place, finding, signature
from probes.thresholds import limits
from probes.xid import FallenLine, XidLine, read_line
from sentinel.model import READING_FORMAT, Action, Component, Finding, Kind, Reading, Severity, Suspect

EPISODES = 512  # open at once; past it the oldest is closed early
REMEMBER_GPUS = 64


def assess(reading: Reading, memory: dict[str, Any]) -> list[Finding]:
    """Judge one reading; pure. ``memory``: open episodes and what each GPU said lately. Raises ProbeError on another format."""
    if reading.format != READING_FORMAT:
        raise ProbeError(f"kernel_log: a reading of format {reading.format} is not known here; wanted {READING_FORMAT}")
    data, t = reading.data, limits().kernel_log
    if memory.get("boot", reading.boot_id) != reading.boot_id:
        memory.clear()  # seconds since another boot
    memory["boot"] = reading.boot_id
    episodes: dict[str, Any] = memory.setdefault("episodes", {})
    said: dict[str, dict[str, float]] = memory.setdefault("said", {})
    lines = [(line, record) for record in data.get("records", ()) if (line := read_line(record[3])) is not None]
    batch = _codes(line for line, _ in lines)
    # Seconds since boot by our own clock: an episode is over when nothing of it was read for so long, however far behind we are.
    now = reading.at - float(data.get("booted_at") or 0.0)
    found: dict[str, Finding] = {}  # by id, so that repeats within the batch raise the count of what goes out

    for line, (_, seq, usec, text) in lines:
        count, _, last_usec = data.get("repeats", {}).get(str(seq), (0, seq, usec))
        age, last = _age_s(reading, usec), last_usec / 1e6
        pci = line.pci if isinstance(line, XidLine | FallenLine) else None
        before = {int(c): ago for c, s in said.get(pci or "", {}).items() if (ago := usec / 1e6 - s) <= t.remember_s}
        # Where the host does not say its boot, the time since then keeps occurrences of two boots apart.
        name = f"{reading.node}:{reading.boot_id or f'@{usec}'}:{seq}"
        place = Place(reading.node, name, reading.at - age, before, batch.get(pci or "", frozenset()))
        mark = signature(line)
        episode = episodes.get(mark)
        new = finding(line, text, place)
        if age > t.late_s:
            new.facts["late_s"] = round(age)
        if last_usec < (data.get("history_usec") or 0):
            # Once and over, whatever it said: standing advice of that time would keep the same advice of today from being news.
            new = msgspec.structs.replace(new, kind=Kind.EVENT, facts={**new.facts, "history": True})
        if episode is not None and abs(usec / 1e6 - episode["last"]) <= t.episode_s:
            held = msgspec.convert(episode["finding"], Finding)
            merged, worse = _merge(held, new, 1 + count)
            episode["last"] = max(episode["last"], last)
            if worse or merged.id in found:
                found.pop(held.id, None)
                found[merged.id] = merged
                episode["told"], episode["told_at"] = merged.count, now
        else:
            merged = msgspec.structs.replace(new, count=1 + count)
            found[merged.id] = merged
            episode = {"last": last, "told": merged.count, "told_at": now}
        episode |= {"finding": msgspec.to_builtins(merged), "read_at": now}
        episodes.pop(mark, None)
        episodes[mark] = episode  # the latest at the end: the oldest is the first to go
        if pci is not None:
            _remember(said, pci, line.code if isinstance(line, XidLine) else 79, usec / 1e6)

    later = [f for f in _counts(episodes, now) if f.id not in found]
    return [*found.values(), *later, *_about_the_monitor(reading)]


def _counts(episodes: dict[str, Any], now: float) -> list[Finding]:
    """Counts that have grown since they were told: when the episode is over, or as often during a long one."""
    due, episode_s = [], limits().kernel_log.episode_s
    for mark in list(episodes):
        episode = episodes[mark]
        over = now - episode["read_at"] > episode_s or len(episodes) > EPISODES
        if episode["finding"].get("count", 1) > episode["told"] and (over or now - episode["told_at"] >= episode_s):
            due.append(msgspec.convert(episode["finding"], Finding))
            episode["told"], episode["told_at"] = episode["finding"]["count"], now
        if over:
            del episodes[mark]
    return due


def _merge(held: Finding, new: Finding, times: int) -> tuple[Finding, bool]:
    """Fold a repeat into what is held → (the finding, whether the repeat made it worse and goes out at once)."""
    worse = (new.severity.rank, new.action.rank) > (held.severity.rank, held.action.rank)
    base, other = (new, held) if worse else (held, new)
    facts = {**other.facts, **base.facts}
    if not (held.facts.get("history") and new.facts.get("history")):
        facts.pop("history", None)
    if links := sorted({*held.facts.get("links", ()), *new.facts.get("links", ())}):
        facts["links"] = links[:64]
    if len(units := sorted({*_units(held), *_units(new)})) > 1:  # a crash that prints every TPC accuses none of them
        facts["units"] = [list(u) for u in units[:64]]
    if "xid" in new.facts or "xid" in held.facts:
        facts.pop("stated", None)
    pids = [p for f in (held, new) for p in f.facts.get("pids", [f.facts["pid"]] if "pid" in f.facts else [])]
    if len(pids) > 1:
        facts["pids"] = list(dict.fromkeys(pids))[:16]
    return msgspec.structs.replace(base, facts=facts, count=held.count + times), worse


def _units(f: Finding) -> list[tuple[int, int]]:
    """The (GPC, TPC) pairs that an exception's lines name."""
    own = [(f.facts["gpc"], f.facts["tpc"])] if "gpc" in f.facts and "tpc" in f.facts else []
    return [*own, *((g, t) for g, t in f.facts.get("units", ()))]


def _codes(lines: Iterable[Any]) -> dict[str, frozenset[int]]:
    codes: dict[str, set[int]] = {}
    for line in lines:
        if isinstance(line, XidLine) and line.pci:
            codes.setdefault(line.pci, set()).add(line.code)
    return {pci: frozenset(c) for pci, c in codes.items()}


def _remember(said: dict[str, dict[str, float]], pci: str, code: int, at: float) -> None:
    codes = said.pop(pci, {})
    codes.pop(str(code), None)
    codes[str(code)] = at
    said[pci] = dict(list(codes.items())[-32:])
    while len(said) > REMEMBER_GPUS:
        del said[next(iter(said))]


def _about_the_monitor(reading: Reading) -> list[Finding]:
    lost, overruns = reading.data.get("lost", 0), reading.data.get("overruns", 0)
    if not lost and not overruns:
        return []
    return [Finding(
        id=f"{reading.node}:{reading.boot_id}:lost:{reading.data.get('last_seq')}", check="kernel_log.lost",
        component=Component(node=reading.node, device="kernel_log"), at=reading.at, kind=Kind.EVENT,
        severity=Severity.WARNING, action=Action.FIX_MONITOR, suspect=Suspect.MONITOR, count=max(lost, 1),
        summary=f"The kernel overwrote {lost or 'some'} log records before they could be read; a fault among them would be missed.",
        facts={"lost": lost, "overruns": overruns},
    )]


def _age_s(reading: Reading, usec: int) -> float:
    """How long before the reading a record was written; 0 where that cannot be told."""
    booted = reading.data.get("booted_at")
    return 0.0 if booted is None else max(0.0, reading.at - float(booted) - usec / 1e6)

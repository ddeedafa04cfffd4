"""The kernel log, read live: what the GPU driver says the moment it says it.

This module exists because the kernel's own line is the fastest and the only complete word about a GPU fault: NVML's events
carry a number, and a hung driver answers nothing, while the log goes on. What always holds:

* Facility ``kern`` only. What user space writes, into /dev/kmsg too, is counted and can raise nothing.
* The cursor (last sequence number and boot id) moves in ``commit`` alone, after what was found is safe; a restarted agent
  continues without a gap, and on another boot starts over.
* Memory is bounded: a batch per read, repeats folded in the reading, and a bounded table of open episodes.
* Lines with one signature (GPU, code, detail) less than five seconds apart are one occurrence: its first line is a finding
  at once, the count follows under the same id. A line that makes it worse is a finding of its own.
* Lost records, user-space lines, and garbage are counted in the reading; what was lost is a finding about the monitor.

``Reading.data``: ``records`` [[prio, seq, usec, text], …] of interest only; ``repeats`` {seq: [count, seq,
usec]} of the same text's
last repeat; ``lines`` read; ``skipped`` {why: count}; ``lost`` records and ``overruns``; ``last_seq``;
``booted_at`` (seconds since the epoch; None: not measured); ``more``: the batch was full.

The wall time of a record is ``booted_at + usec``, where ``booted_at`` is now minus /proc/uptime (CLOCK_BOOTTIME, to 10 ms),
else ``btime`` of /proc/stat (whole seconds). printk's clock stops during suspend, which servers do not do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from probes import Context, ProbeError
from probes.kernel_findings import Place, finding, signature
from probes.kmsg import Source, read_head, text_of
from probes.xid import FallenLine, XidLine, of_interest, read_line
from sentinel.model import READING_FORMAT, Action, Component, Finding, Kind, Reading, Severity, Suspect

BATCH_RECORDS = 4096
BATCH_CHARS = 1 << 20  # of text kept
EPISODE_S = 5.0
EPISODES = 512  # open at once; past it the oldest is closed early
LATE_S = 60.0  # a finding older than this when it is read says so: found on a first start, or after a long stop
REMEMBER_S = 3600.0  # how long a GPU's codes are remembered to recognise an echo
REMEMBER_GPUS = 64


class KernelLogProbe:
    """Reads ``context.kmsg``, or the descriptor ``context.options["fd"]`` with one record per read (a simulator's)."""

    name = "kernel_log"
    interval_s = 1.0  # a safety net; the agent wakes on ``fileno``

    def __init__(
        self, context: Context, *, read: Callable[[int, int], bytes] = os.read, clock: Callable[[], float] = time.time
    ) -> None:
        fd = context.options.get("fd")
        if fd is not None and not isinstance(fd, int):
            raise ProbeError(f"kernel_log.fd: expected a file descriptor's number, got {fd!r}")
        self._context = context
        self._source = Source(context.kmsg, fd, read)
        self._clock = clock
        self._cursor = context.state / "kernel_log.json"
        self._boot_id = _first_line(context.proc / "sys/kernel/random/boot_id")
        self._last: int | None = None  # sequence number of the last record read
        self._saved: int | None = None
        self._started = False
        self._idle: tuple[int, int] | None = None

    def fileno(self) -> int:
        """A descriptor that turns readable on news. A plain file has none: then one that never does, and the cadence reads."""
        try:
            if self._source.pollable:
                return self._source.open()
        except OSError:
            pass  # ``read`` says what is wrong, in a sentence, at every beat
        if self._idle is None:
            self._idle = os.pipe()
        return self._idle[0]

    async def read(self) -> Reading:
        """Take what is new, one batch at most. Raises ProbeError when the log cannot be read at all."""
        try:
            self._source.open()
            if not self._started:
                self._last = self._saved = self._resume()
                self._started = True
            return self._batch()
        except OSError as error:
            raise ProbeError(f"{self._context.kmsg}: the kernel log cannot be read: {error.strerror or error}") from None

    def _batch(self) -> Reading:
        records: list[list[Any]] = []
        repeats: dict[str, list[int]] = {}
        seen: dict[bytes, tuple[int, int]] = {}  # text → (seq of its record in this batch, usec of its last repeat)
        lines = chars = lost = malformed = user_space = 0
        overruns, oversized = self._source.overruns, self._source.oversized
        take, last_seq = self._source.take, self._last
        while lines < BATCH_RECORDS and chars < BATCH_CHARS:
            raw = take()
            if raw is None:
                break
            lines += 1
            head = read_head(raw)
            if head is None:
                malformed += 1
                continue
            seq = int(head[2])
            if last_seq is not None:
                if seq <= last_seq:
                    continue  # before the cursor: judged already
                lost += seq - last_seq - 1
            last_seq = seq
            prio = int(head[1])
            if prio >> 3:
                user_space += 1
                continue
            if not of_interest(raw):
                continue
            usec, body = int(head[3]), raw[head.end():]
            first, last = seen.get(body, (-1, 0))
            if first >= 0 and usec - last <= EPISODE_S * 1e6:
                repeat = repeats.setdefault(str(first), [0, seq, usec])
                repeat[:] = repeat[0] + 1, seq, usec
            else:
                first = seq
                records.append([prio, seq, usec, text_of(raw, head.end())])
                chars += len(body)
            seen[body] = (first, usec)
        self._last = last_seq
        skipped = {"user_space": user_space, "malformed": malformed, "oversized": self._source.oversized - oversized}
        now = self._clock()
        return Reading(
            probe=self.name, node=self._context.node, at=now, boot_id=self._boot_id,
            data={
                "records": records, "repeats": repeats, "lines": lines, "skipped": skipped, "lost": lost,
                "overruns": self._source.overruns - overruns, "last_seq": self._last,
                "booted_at": _booted_at(self._context.proc, now), "more": lines >= BATCH_RECORDS or chars >= BATCH_CHARS,
            },
        )

    def _resume(self) -> int | None:
        """The cursor, when it is of this boot and the source still holds what came after it."""
        if not self._source.seekable_device:
            return None
        try:
            saved = msgspec.json.decode(self._cursor.read_bytes())
            if saved["boot_id"] == self._boot_id and isinstance(saved["seq"], int):
                return int(saved["seq"])
        except (OSError, msgspec.DecodeError, KeyError, TypeError):
            pass  # none yet, or damaged: reading the whole boot again finds the same occurrences under the same ids
        return None

    def commit(self, reading: Reading) -> None:
        """Move the cursor past this reading. Raises OSError when it cannot be written (the reading is then found again)."""
        seq = reading.data.get("last_seq")
        if not self._source.seekable_device or seq is None or seq == self._saved:
            return
        # Replaced as a whole, not synced: it has to outlive the process, and after a crash of the machine the boot id differs.
        self._cursor.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._cursor.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode({"boot_id": reading.boot_id, "seq": seq}))
        fresh.replace(self._cursor)
        self._saved = seq

    async def close(self) -> None:
        self._source.close()
        for fd in self._idle or ():
            os.close(fd)
        self._idle = None

    def assess(self, reading: Reading, memory: dict[str, Any], expected: Mapping[str, Any]) -> list[Finding]:
        return assess(reading, memory)


def assess(reading: Reading, memory: dict[str, Any]) -> list[Finding]:
    """Judge one reading; pure. ``memory``: open episodes and what each GPU said lately. Raises ProbeError on another format."""
    if reading.format != READING_FORMAT:
        raise ProbeError(f"kernel_log: a reading of format {reading.format} is not known here; wanted {READING_FORMAT}")
    data = reading.data
    episodes: dict[str, Any] = memory.setdefault("episodes", {})
    said: dict[str, dict[str, float]] = memory.setdefault("said", {})
    lines = [(line, record) for record in data.get("records", ()) if (line := read_line(record[3])) is not None]
    batch = _codes(line for line, _ in lines)
    found: dict[str, Finding] = {}  # by id, so that repeats within the batch raise the count of what goes out

    for line, (_, seq, usec, text) in lines:
        count, _, last_usec = data.get("repeats", {}).get(str(seq), (0, seq, usec))
        at, last = _wall(data, reading, usec), _wall(data, reading, last_usec)
        pci = line.pci if isinstance(line, XidLine | FallenLine) else None
        before = {int(c): t for c, t in said.get(pci or "", {}).items() if at - t <= REMEMBER_S}
        place = Place(reading.node, f"{reading.node}:{reading.boot_id}:{seq}", at, before, batch.get(pci or "", frozenset()))
        mark = signature(line)
        episode = episodes.get(mark)
        new = finding(line, text, place)
        if reading.at - at > LATE_S:
            new.facts["late_s"] = round(reading.at - at)
        if episode is not None and at - episode["last"] <= EPISODE_S:
            held = msgspec.convert(episode["finding"], Finding)
            merged, worse = _merge(held, new, 1 + count)
            episode["last"] = max(episode["last"], last)
            if worse or merged.id in found:
                found.pop(held.id, None)
                found[merged.id] = merged
                episode["told"] = merged.count
        else:
            merged = msgspec.structs.replace(new, count=1 + count)
            found[merged.id] = merged
            episode = {"last": last, "told": merged.count, "told_at": reading.at}
        episode["finding"] = msgspec.to_builtins(merged)
        episodes.pop(mark, None)
        episodes[mark] = episode  # the latest at the end: the oldest is the first to go
        if pci is not None:
            _remember(said, pci, line.code if isinstance(line, XidLine) else 79, at)

    # While catching up, "now" is where the log has got to: an episode may go on in the next batch.
    now = max((_wall(data, reading, r[2]) for _, r in lines), default=None) if data.get("more") else reading.at
    later = [] if now is None else [f for f in _counts(episodes, now) if f.id not in found]
    return [*found.values(), *later, *_about_the_monitor(reading)]


def _counts(episodes: dict[str, Any], now: float) -> list[Finding]:
    """Counts that have grown since they were told: when the episode is over, or every five seconds of a long one."""
    due = []
    for mark in list(episodes):
        episode = episodes[mark]
        over = now - episode["last"] > EPISODE_S or len(episodes) > EPISODES
        if episode["finding"].get("count", 1) > episode["told"] and (over or now - episode["told_at"] >= EPISODE_S):
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
    if links := sorted({*held.facts.get("links", ()), *new.facts.get("links", ())}):
        facts["links"] = links[:64]
    if "xid" in new.facts or "xid" in held.facts:
        facts.pop("stated", None)
    pids = [p for f in (held, new) for p in f.facts.get("pids", [f.facts["pid"]] if "pid" in f.facts else [])]
    if len(pids) > 1:
        facts["pids"] = list(dict.fromkeys(pids))[:16]
    return msgspec.structs.replace(base, facts=facts, count=held.count + times), worse


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


def _wall(data: Mapping[str, Any], reading: Reading, usec: int) -> float:
    booted = data.get("booted_at")
    return reading.at if booted is None else min(float(booted) + usec / 1e6, reading.at)


def _booted_at(proc: Path, now: float) -> float | None:
    try:
        return now - float(_first_line(proc / "uptime").split()[0])
    except (IndexError, ValueError):
        pass
    try:
        stat = (proc / "stat").read_text("ascii", "replace")
        return float(stat.partition("\nbtime ")[2].split()[0])
    except (OSError, IndexError, ValueError):
        return None


def _first_line(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").partition("\n")[0].strip()
    except OSError:
        return ""

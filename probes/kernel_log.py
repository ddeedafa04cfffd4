"""The kernel log, read live: what the GPU driver says the moment it says it.

This module exists because the kernel's own line is the fastest and the only complete word about a GPU fault: NVML's events
carry a number, and a hung driver answers nothing, while the log goes on. What always holds:

* Facility ``kern`` only. What user space writes, into /dev/kmsg too, is counted and can raise nothing.
* The cursor (last sequence number and boot id, ``probes.cursor``) moves in ``commit`` alone, after what was found is safe. With
  one, everything unseen is acted on, however old; on another boot, or with one that this log never reached, reading starts over.
* Without one (the first start on a node) what is older than ``look_back_s`` at the first look is history: found and recorded
  with ``facts["history"]``, as an event, and acted on by nobody. Much may have been repaired since.
* Memory is bounded: a batch per read, repeats folded in the reading, and a bounded table of open episodes.
* Lines with one signature (GPU, code, detail) no more than ``episode_s`` apart are one occurrence: its first line is a finding
  at once, the count follows under the same id. A line that makes it worse is a finding of its own.
* Lost records, user-space lines, and garbage are counted in the reading; what was lost is a finding about the monitor.

``Reading.data``: ``records`` [[prio, seq, usec, text], …] of interest only; ``repeats`` {seq: [count, seq, usec]} of the same
text's last repeat; ``lines`` read; ``skipped`` {why: count}; ``lost`` records and ``overruns``; ``last_seq``; ``booted_at``
(seconds since the epoch; None: not measured); ``history_usec``: what the log said before is history (None: nothing is);
``more``: the batch was full.

Between lines time is counted by the log's own ``usec``, so that a wall clock that is set changes no judgement. The wall time
of a record is ``booted_at + usec``, where ``booted_at`` is now minus CLOCK_MONOTONIC_RAW: like the clock of printk it is not
slewed by NTP, where /proc/uptime is, which after weeks is minutes away. Both stop during suspend, which servers do not do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from probes import Context, ProbeError
from probes.cursor import Cursor
from probes.kernel_episodes import assess
from probes.kmsg import Source, read_head, text_of
from probes.thresholds import limits
from probes.xid import of_interest
from sentinel.model import Finding, Reading

BATCH_RECORDS = 4096
BATCH_CHARS = 1 << 20  # of text kept

OPTIONS = frozenset({"enabled", "interval", "fd"})


class KernelLogProbe:
    """Reads ``context.kmsg``, or the descriptor ``context.options["fd"]`` with one record per read (a simulator's)."""

    name = "kernel_log"

    def __init__(
        self,
        context: Context,
        *,
        read: Callable[[int, int], bytes] = os.read,
        clock: Callable[[], float] = time.time,
        uptime: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_MONOTONIC_RAW),
    ) -> None:
        unknown = sorted(set(context.options) - OPTIONS)
        if unknown:
            raise ProbeError(f"unknown option {unknown[0]!r}; the kernel_log probe knows {', '.join(sorted(OPTIONS))}")
        fd = context.options.get("fd")
        if fd is not None and not isinstance(fd, int):
            raise ProbeError(f"kernel_log.fd: expected a file descriptor's number, got {fd!r}")
        self._context = context
        self._source = Source(context.kmsg, fd, read)
        self._clock, self._uptime = clock, uptime
        self._boot_id = _first_line(context.proc / "sys/kernel/random/boot_id")
        self._cursor = Cursor(context.state / "kernel_log.json", self._boot_id)
        self._started = False
        self._last: int | None = None  # sequence number of the last record read
        self._upto: int | None = None  # an earlier run dealt with everything up to this one
        self._newest = -1  # of the records before it, while they pass again
        self._history_usec: int | None = None
        self._idle: tuple[int, int] | None = None
        # A safety net where the agent is woken by ``fileno``; else (a plain file, or not to be opened yet) how it is read.
        self.interval_s = 5.0 if self._wakes() else 1.0

    def fileno(self) -> int:
        """A descriptor that turns readable on news. A plain file has none: then one that never does, and the cadence reads."""
        if self._wakes():
            return self._source.open()
        if self._idle is None:
            self._idle = os.pipe()
        return self._idle[0]

    def _wakes(self) -> bool:
        try:
            return self._source.pollable
        except OSError:
            return False  # ``read`` says what is wrong, in a sentence, at every beat

    async def read(self) -> Reading:
        """Take what is new, one batch at most. Raises ProbeError when the log cannot be read at all."""
        try:
            self._source.open()
            if not self._started:
                self._last = self._upto = self._cursor.load() if self._source.keeps else None
                self._look_back(self._upto is not None or not self._source.keeps)
                self._started = True
            return self._batch()
        except OSError as error:
            raise ProbeError(f"{self._context.kmsg}: the kernel log cannot be read: {error.strerror or error}") from None

    def _look_back(self, known: bool) -> None:
        """Decide from which line on the log is news: what is still wrong shows in what driver, links and workers say now, too."""
        self._history_usec = None if known else max(0, int((self._uptime() - limits().kernel_log.look_back_s) * 1e6))

    def _batch(self) -> Reading:
        records: list[list[Any]] = []
        repeats: dict[str, list[int]] = {}
        seen: dict[bytes, tuple[int, int]] = {}  # text → (seq of its record in this batch, usec of its last repeat)
        lines = chars = lost = malformed = user_space = 0
        overruns, oversized = self._source.overruns, self._source.oversized
        episode_usec = limits().kernel_log.episode_s * 1e6
        take, last_seq, upto = self._source.take, self._last, self._upto
        while lines < BATCH_RECORDS and chars < BATCH_CHARS:
            raw = take()
            if raw is None:
                if upto is not None and self._source.ended and self._newest < upto and self._source.rewind():
                    # The log ends before the cursor: it is of another log, and to wait for its number would be to see nothing.
                    upto = last_seq = None
                    self._look_back(known=False)
                    continue
                break
            lines += 1
            head = read_head(raw)
            if head is None:
                malformed += 1
                continue
            seq = int(head[2])
            if upto is not None and seq <= upto:
                self._newest = max(self._newest, seq)
                continue
            upto = None
            if last_seq is not None and seq > last_seq:  # a number that goes back is a source that began anew: nothing is lost
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
            if first >= 0 and usec - last <= episode_usec:
                repeat = repeats.setdefault(str(first), [0, seq, usec])
                repeat[:] = repeat[0] + 1, seq, usec
            else:
                first = seq
                records.append([prio, seq, usec, text_of(raw, head.end())])
                chars += len(body)
            seen[body] = (first, usec)
        self._last, self._upto = last_seq, upto
        skipped = {"user_space": user_space, "malformed": malformed, "oversized": self._source.oversized - oversized}
        now = self._clock()
        return Reading(
            probe=self.name, node=self._context.node, at=now, boot_id=self._boot_id,
            data={
                "records": records, "repeats": repeats, "lines": lines, "skipped": skipped, "lost": lost,
                "overruns": self._source.overruns - overruns, "last_seq": self._last, "booted_at": now - self._uptime(),
                "history_usec": self._history_usec, "more": lines >= BATCH_RECORDS or chars >= BATCH_CHARS,
            },
        )

    def commit(self, reading: Reading) -> None:
        """Move the cursor past this reading. Raises OSError when it cannot be written (the reading is then found again)."""
        seq = reading.data.get("last_seq")
        if self._source.keeps and seq is not None:
            self._cursor.save(seq)

    async def close(self) -> None:
        self._source.close()
        for fd in self._idle or ():
            os.close(fd)
        self._idle = None

    def assess(self, reading: Reading, memory: dict[str, Any], expected: Mapping[str, Any]) -> list[Finding]:
        return assess(reading, memory)


def _first_line(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").partition("\n")[0].strip()
    except OSError:
        return ""

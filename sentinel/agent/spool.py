"""The disk between finding something and the controller having it.

This module exists so that a finding survives the agent, the controller and the network. What always holds:

* One append-only file of framed records, ``<crc32> f<index> <finding>`` or ``<crc32> a<index>`` (everything up to that index
  is acknowledged). A record half written by a crash fails its checksum: it is skipped and counted, its neighbours are kept.
* Findings of weight are on the platter (fsync) when ``write`` returns; other findings and acknowledgements are with the
  kernel, which survives SIGKILL but not a power cut. An acknowledgement lost that way repeats findings, never loses one.
* Nothing leaves but by acknowledgement or by the size bound, which drops the oldest ``info`` first, then the oldest
  ``warning``, then the oldest ``fatal``, and counts every one.
* ``add``, ``ack`` and ``batch`` do no I/O, so a sick disk delays neither a probe nor a report; ``write`` does it all and may
  run in another thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from sentinel.model import Finding, Severity

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Finding).decode

_LIVE = 0.75  # share of max_bytes that unacknowledged findings may take; the rest is room to append before a rewrite
_AFTER_DROP = 0.65  # drop down to this share, so that a full spool does not drop at every finding
_SLACK = 256 * 1024  # bytes of acknowledged records tolerated in the file before it is rewritten


class Entry(NamedTuple):
    number: int
    rank: int  # of its severity
    body: bytes  # JSON of the finding

    @property
    def size(self) -> int:
        return len(self.body) + 24  # framing


class Batch(NamedTuple):
    """Findings to send, oldest first; ``upto`` is what to acknowledge once they have arrived."""

    upto: int
    findings: tuple[Finding, ...]


def _frame(kind: str, index: int, body: bytes = b"") -> bytes:
    payload = b"%s%d %s" % (kind.encode(), index, body)
    return b"\n%08x %s\n" % (zlib.crc32(payload), payload)  # a newline on both sides: a damaged one joins no two records


class Spool:
    """Unacknowledged findings, in order, in memory and in ``path``. Raises OSError from ``write`` only."""

    def __init__(self, path: Path, max_bytes: int, *, fsync: Callable[[int], None] = os.fsync) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.damaged = 0  # records skipped on loading
        self.dropped = dict.fromkeys((s.value for s in Severity), 0)  # by the size bound
        self.bytes = 0  # of unacknowledged findings
        self._fsync = fsync
        self._lock = threading.Lock()  # guards everything below; held for moments only
        self._io = threading.Lock()  # one write at a time
        self._pending: deque[Entry] = deque()
        self._queue: list[bytes] = []  # framed, not yet written
        self._urgent = False  # the queue holds a finding of weight
        self._next = 1
        self._file = -1
        self._size = 0
        self._rewrite = False  # the file does not say what memory says
        self._load()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, findings: Iterable[Finding]) -> None:
        """Take findings in; they are safe only once ``write`` has returned."""
        with self._lock:
            for finding in findings:
                entry = Entry(self._next, finding.severity.rank, _encode(finding))
                self._next += 1
                self._pending.append(entry)
                self._queue.append(_frame("f", entry.number, entry.body))
                self._urgent |= finding.of_weight
                self.bytes += entry.size
            if self.bytes > self.max_bytes * _LIVE:
                self._drop()

    def ack(self, upto: int) -> None:
        """The controller has everything up to this index."""
        with self._lock:
            while self._pending and self._pending[0].number <= upto:
                self.bytes -= self._pending.popleft().size
            self._queue.append(_frame("a", upto))

    def batch(self, count: int = 500, size: int = 1024 * 1024) -> Batch:
        """The oldest unacknowledged findings, at most ``count`` and about ``size`` bytes, but at least one if there is one."""
        taken: list[Entry] = []
        with self._lock:
            for entry in self._pending:
                size -= entry.size
                if len(taken) == count or (taken and size < 0):
                    break
                taken.append(entry)
        return Batch(taken[-1].number if taken else 0, tuple(_decode(e.body) for e in taken))

    def set_aside(self, upto: int) -> None:
        """Move what the controller will never take out of the way, into ``<path>.refused``, and count it as dropped."""
        with self._lock:
            out = [e for e in self._pending if e.number <= upto]
            for entry in out:
                self.dropped[_name(entry.rank)] += 1
        with contextlib.suppress(OSError), Path(f"{self.path}.refused").open("ab") as file:
            if file.tell() < self.max_bytes // 8:
                file.write(b"".join(e.body + b"\n" for e in out))
        self.ack(upto)

    def write(self) -> None:
        """Bring the file up to what was added and acknowledged before this call. OSError: it is not, the next call retries."""
        with self._io:
            with self._lock:
                lines, urgent = self._queue, self._urgent
                self._queue, self._urgent = [], False
                growing = self._size + sum(map(len, lines))
                slack = min(_SLACK, self.max_bytes // 4)
                whole = self._rewrite or growing > self.max_bytes or growing - self.bytes > slack + self.bytes
                if whole:
                    lines = [_frame("f", e.number, e.body) for e in self._pending]
            try:
                if whole:
                    self._replace(b"".join(lines))
                elif lines:
                    self._append(b"".join(lines), urgent)
            except OSError:
                self._rewrite = True  # the file may end in half a record: start it anew
                raise

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    # -----------------------------------------------------------------------------------------------------------------

    def _append(self, data: bytes, urgent: bool) -> None:
        if self._file < 0:
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _write_all(self._file, data)
        self._size += len(data)
        if urgent:
            self._fsync(self._file)

    def _replace(self, data: bytes) -> None:
        """Write a new file beside the old one and put it in its place, so that a crash leaves one or the other."""
        new = self.path.with_suffix(".new")
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write_all(file, data)
            self._fsync(file)
            new.replace(self.path)
        except OSError:
            os.close(file)
            with contextlib.suppress(OSError):
                new.unlink()
            raise
        self.close()
        self._file, self._size, self._rewrite = file, len(data), False
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._fsync(folder)
        finally:
            os.close(folder)

    def _load(self) -> None:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return
        acked = 0
        *lines, tail = data.split(b"\n")
        self.damaged += bool(tail)
        for line in filter(None, lines):
            payload = line[9:]
            try:
                if int(line[:8], 16) != zlib.crc32(payload):
                    raise ValueError("checksum")
                head, _, body = payload.partition(b" ")
                index = int(head[1:])
                if head[:1] == b"f":
                    entry = Entry(index, _decode(body).severity.rank, body)
                    self._pending.append(entry)
                else:
                    acked = max(acked, index)
            except (ValueError, msgspec.DecodeError):  # torn, or written by a version whose findings we cannot read
                self.damaged += 1
                continue
            self._next = max(self._next, index + 1)
        self._pending = deque(e for e in self._pending if e.number > acked)
        self.bytes = sum(e.size for e in self._pending)
        self._size = len(data)
        self._rewrite = self.damaged > 0

    def _drop(self) -> None:
        """Make room (lock held): the oldest of the least severe first, every one counted."""
        goal = self.max_bytes * _AFTER_DROP
        for rank in range(len(Severity)):
            kept: deque[Entry] = deque()
            for entry in self._pending:
                if entry.rank == rank and self.bytes > goal:
                    self.bytes -= entry.size
                    self.dropped[_name(rank)] += 1
                else:
                    kept.append(entry)
            self._pending = kept
        self._rewrite = True


def _name(rank: int) -> str:
    return list(Severity)[rank].value


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


class Flusher:
    """Runs ``spool.write`` in a thread of its own, many waiters to one write.

    A daemon thread: one stuck in a dead disk must neither stop the event loop nor keep the process from ending.
    """

    def __init__(self, spool: Spool) -> None:
        self.error: str | None = None  # why the last write failed
        self._spool = spool
        self._loop = asyncio.get_running_loop()
        self._wanted = threading.Condition()
        self._waiting: list[asyncio.Future[None]] = []
        self._closed = False
        threading.Thread(target=self._run, name="spool", daemon=True).start()

    def flush(self) -> asyncio.Future[None]:
        """A future that ends when everything added before this call is written, or with the OSError that stood in the way."""
        future: asyncio.Future[None] = self._loop.create_future()
        future.add_done_callback(lambda f: f.cancelled() or f.exception())  # nobody has to wait for it
        with self._wanted:
            self._waiting.append(future)
            self._wanted.notify()
        return future

    def close(self) -> None:
        """End the thread once what was asked for is done; does not wait."""
        with self._wanted:
            self._closed = True
            self._wanted.notify()

    def _run(self) -> None:
        while True:
            with self._wanted:
                self._wanted.wait_for(lambda: self._waiting or self._closed)
                waiting, self._waiting = self._waiting, []
            if not waiting:
                self._spool.close()
                return
            error: OSError | None = None
            try:
                self._spool.write()
            except OSError as failed:
                error = failed
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._done, waiting, error)

    def _done(self, waiting: list[asyncio.Future[None]], error: OSError | None) -> None:
        self.error = None if error is None else f"{self._spool.path} cannot be written: {error.strerror or error}"
        for future in waiting:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

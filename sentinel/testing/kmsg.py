"""A kernel log for tests and for the simulator: the reader's end behaves as /dev/kmsg does, one record per read.

This module exists so that everything that reads a kernel log can be driven without root and without a kernel. What always
holds: records are numbered without a gap as they are written; one read returns one whole record; a reader that is too slow
loses records and sees it by the gap in the numbers, as on the device. It is a stand-in and says so: ``/dev/kmsg`` itself
also keeps what was read (a restarted reader finds it again), which a socket does not; for that, use a plain file with one
record per line (``record``).
"""

from __future__ import annotations

import socket
import time

KERNEL = 0
USER = 1


def record(text: str, seq: int, *, usec: int | None = None, priority: int = 4, facility: int = KERNEL, flags: str = "-") -> bytes:
    """One record as the device would return it, ending with a newline. ``usec``: microseconds since boot, default now."""
    if usec is None:
        usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW) // 1000  # not slewed, as printk's clock is not
    body = "".join(c if " " <= c <= "~" and c != "\\" else "".join(f"\\x{b:02x}" for b in c.encode()) for c in text)
    return f"{facility << 3 | priority},{seq},{usec},{flags};{body}\n".encode()


class KernelLog:
    """``fd`` is the reader's end (hand it to a probe as ``options["fd"]``); write to it with ``write``."""

    def __init__(self, *, first_seq: int = 1, buffer_bytes: int = 1 << 20) -> None:
        self._reader, self._writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        self.seq = first_seq  # of the next record
        self.lost = 0  # records that found the buffer full

    @property
    def fd(self) -> int:
        return self._reader.fileno()

    def write(self, text: str, *, usec: int | None = None, priority: int = 4, facility: int = KERNEL) -> int:
        """Write one record and return its sequence number. With a full buffer it is lost, as on a ring that is overrun."""
        seq = self.seq
        self.seq += 1
        self.write_raw(record(text, seq, usec=usec, priority=priority, facility=facility))
        return seq

    def write_raw(self, data: bytes) -> None:
        """Any bytes as one record: garbage, half a line, a line without end (a socket carries up to its buffer)."""
        try:
            self._writer.send(data)
        except (BlockingIOError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            self.lost += 1

    def block(self) -> None:
        """Let writes wait for the reader instead of losing records: for a benchmark that must know its count."""
        self._writer.setblocking(True)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

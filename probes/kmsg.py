"""/dev/kmsg as what it is: a stream with one record per read, a sequence number, and a reader that may be overrun.

This module exists so that the probe above it never sees a byte of framing. What always holds:

* One call reads a bounded number of records and bytes, whatever is written meanwhile.
* A record is passed on whole or counted as skipped, by reason; nothing is dropped silently.
* Lost records are counted: by the kernel's own EPIPE, and by every gap in the sequence numbers.

Record: ``prio,seq,usec,flags[,…];text``, then lines that begin with a space (a dictionary that we do not need). ``prio >> 3``
is the facility, 0 is the kernel; user space cannot write facility 0. ``usec`` counts since boot. Text escapes bytes as
``\\xNN``, newlines among them. Source: Linux Documentation/ABI/testing/dev-kmsg, kernel/printk/printk.c (devkmsg_read: a
buffer that is too small answers EINVAL and the record is gone; an overrun reader gets EPIPE once and then the oldest
record left).
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

DEVICE = (1, 11)  # major and minor number of /dev/kmsg (Documentation/admin-guide/devices.txt)
RECORD_BYTES = 16384  # the kernel's own limit is 8 KiB (PRINTK_MESSAGE_MAX and its framing); a longer one is not from it
TEXT_CHARS = 2048


class Record(NamedTuple):
    prio: int
    seq: int
    usec: int
    text: str

    @property
    def from_kernel(self) -> bool:
        return self.prio >> 3 == 0


_HEAD = re.compile(rb"(\d{1,5}),(\d{1,19}),(\d{1,19})(?:,[^;\n]{0,256})?;")
_ESCAPE = re.compile(rb"\\x([0-9a-fA-F]{2})")

read_head = _HEAD.match  # groups: prio, seq, usec; its end is where the text begins


def text_of(raw: bytes, start: int) -> str:
    """The text of a record from ``start`` to its first newline (a dictionary may follow), unescaped and bounded."""
    end = raw.find(b"\n", start)
    line = raw[start: None if end < 0 else end].rstrip(b"\r")
    if b"\\x" in line:
        line = _ESCAPE.sub(lambda m: bytes((int(m[1], 16),)), line)
    return line[: 4 * TEXT_CHARS].decode("utf-8", "replace")[:TEXT_CHARS]


def parse_record(raw: bytes) -> Record | None:
    """Read one record; None when it is not one."""
    head = read_head(raw)
    if head is None:
        return None
    return Record(int(head[1]), int(head[2]), int(head[3]), text_of(raw, head.end()))


class Source:
    """Where records come from: the device, a descriptor with its semantics, or a plain file with one record per line.

    ``read`` stands for os.read so that a test can overrun it. The descriptor given as ``fd`` stays its owner's; a path is
    opened on the first ``take``. Raises OSError when it cannot be opened or read.
    """

    def __init__(self, path: Path, fd: int | None = None, read: Callable[[int, int], bytes] = os.read) -> None:
        self._path = path
        self._given = fd
        self._read = read
        self._fd: int | None = None
        self._lines = False  # a plain file or FIFO: records end with a newline
        self._rest = b""  # an unfinished line
        self._dropping = False  # inside a line that is too long
        self._ready: deque[bytes] = deque()
        self.ended = False  # the last ``take`` found that there is nothing more now
        self.oversized = 0
        self.overruns = 0

    @property
    def keeps(self) -> bool:
        """Whether records stay behind after being read, so that a restart finds them again."""
        return self._given is None

    def open(self) -> int:
        if self._fd is None:
            if self._given is not None:
                self._fd = self._given
                os.set_blocking(self._fd, False)
            else:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            found = os.fstat(self._fd)
            self._lines = stat.S_ISREG(found.st_mode) or stat.S_ISFIFO(found.st_mode)
            if stat.S_ISCHR(found.st_mode) and (os.major(found.st_rdev), os.minor(found.st_rdev)) != DEVICE:
                self.close()  # containers put /dev/null or a terminal there: that log says nothing, for ever
                raise OSError(errno.ENODEV, f"this device is not the kernel log; wanted character device {DEVICE[0]}:{DEVICE[1]}")
        return self._fd

    def rewind(self) -> bool:
        """Go back to the oldest record there is; False where the source cannot."""
        try:
            os.lseek(self.open(), 0, os.SEEK_SET)
        except OSError:
            return False
        self._rest, self._dropping = b"", False
        self._ready.clear()
        return True

    @property
    def pollable(self) -> bool:
        """Whether its descriptor turns readable on news; a plain file never does."""
        return not stat.S_ISREG(os.fstat(self.open()).st_mode)

    def take(self) -> bytes | None:
        """The next raw record; None when there is none now."""
        fd, self.ended = self.open(), False
        for _ in range(64):  # skipped ones count against it too: a broken source cannot hold the reader
            if self._ready:
                return self._ready.popleft()
            try:
                data = self._read(fd, 65536 if self._lines else RECORD_BYTES)
            except BlockingIOError:
                self.ended = True
                return None
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno == errno.EPIPE:
                    self.overruns += 1
                    continue
                if error.errno == errno.EINVAL:
                    self.oversized += 1
                    continue
                raise
            if not data:
                self.ended = True
                return None
            if not self._lines:
                if len(data) >= RECORD_BYTES:
                    self.oversized += 1
                    continue
                return data
            self._split(data)
        return None

    def _split(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            if self._dropping:  # the end of a line whose beginning was dropped
                self._dropping = False
            elif len(line) > RECORD_BYTES:
                self.oversized += 1
            elif line and not line.startswith(b" "):
                self._ready.append(line)
        if len(self._rest) > RECORD_BYTES:
            if not self._dropping:
                self.oversized += 1
            self._rest, self._dropping = b"", True

    def close(self) -> None:
        if self._fd is not None and self._given is None:
            os.close(self._fd)
        self._fd = None

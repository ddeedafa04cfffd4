"""The last one out: ends what the demo started and removes its folder, also when the demo itself is killed.

This module exists so that no process, socket or folder is ever left behind. What always holds:

* It acts when its standard input closes, which the kernel sees to however the demo ends.
* It ends only process groups that the demo told it of (one ``pid`` line each, every one the leader of its own group), and
  knows them by pidfd, so that a reused number cannot be hit while the leader lives.
* Only the standard library is imported.

Run as ``python -I -S janitor.py FOLDER`` with a pipe as standard input.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time

PATIENCE_S = 5.0  # from SIGTERM to SIGKILL


def main(folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: dict[int, int] = {}  # pid → pidfd
    for line in sys.stdin:
        with contextlib.suppress(ValueError, OSError):  # it may be gone already
            groups[int(line)] = os.pidfd_open(int(line))
    alive = [(pid, fd) for pid, fd in groups.items() if not _ended(fd, 0)]
    for pid, _ in alive:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    last = time.monotonic() + PATIENCE_S
    for pid, fd in alive:
        if not _ended(fd, max(0.0, last - time.monotonic())):
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def _ended(pidfd: int, timeout_s: float) -> bool:
    return bool(select.select([pidfd], [], [], timeout_s)[0])


if __name__ == "__main__":
    main(sys.argv[1])

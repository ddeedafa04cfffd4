"""One program on one core: started, waited for, measured, ended. What always holds: whatever it started ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
TICK = os.sysconf("SC_CLK_TCK")
CORES = sorted(os.sched_getaffinity(0))
GATEWAY, LOAD = 0, 1  # which of them


def pin(core: int) -> None:
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {CORES[core % len(CORES)]})


def ahead(nice: int = 0) -> None:
    """This session before others, by so much more than now. Where the kernel groups processes by session, a group's nice counts."""
    now = os.nice(nice)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(now), "ascii")


def settled(core: int) -> None:
    pin(core)
    ahead()


async def calm(seconds: float) -> None:
    """Wait, so long at most, for a second in which this machine's cores do next to nothing."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        before = _busy()
        await asyncio.sleep(1.0)
        if _busy() - before < 0.1:
            break


def _busy() -> float:
    """CPU seconds that this machine has spent so far, on whatever it was."""
    told = Path("/proc/stat").read_text("ascii").split("\n", 1)[0]
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, told.split()[1:])
    return (user + nice + system + irq + softirq + steal) / TICK


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Process:
    """``core``: GATEWAY or LOAD. It leads a session of its own, so that its children are found and counted with it."""

    def __init__(self, argv: Sequence[str], core: int, log: Path, *, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if core == LOAD else errors, stderr=errors,
                start_new_session=True, preexec_fn=lambda: settled(core), env=os.environ | (env or {}), cwd=log.parent,  # noqa: PLW1509
            )  # fmt: skip

    def line(self) -> list[int]:
        """What a stand-in says when it is ready."""
        assert self.process.stdout
        return list(json.loads(self.process.stdout.readline()))

    def alive(self) -> bool:
        return self.process.poll() is None

    def last_words(self) -> str:
        lines = [line for line in self.log.read_text("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it said nothing"

    def cpu(self) -> float:
        """CPU seconds so far, of all its processes."""
        return sum(int(stat[11]) + int(stat[12]) for stat in self._stats()) / TICK

    def memory(self) -> int:
        """Resident bytes, of all its processes."""
        return sum(int(stat[21]) for stat in self._stats()) * PAGE

    def _stats(self) -> list[list[str]]:
        """/proc/PID/stat from the third field on, of every process in its session."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                stat = path.read_text("utf-8", "replace").rpartition(")")[2].split()
                if int(stat[3]) == self.process.pid:
                    found.append(stat)
        return found

    def end(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0 if signum == signal.SIGTERM else None)


def script(name: str, *arguments: str) -> list[str]:
    """The command for one of our own, beside this file."""
    return [sys.executable, str(Path(__file__).with_name(name)), *arguments]

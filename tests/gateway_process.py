"""What every test that runs ``sentinel gateway`` as a process needs: a folder, ports, and the process with its log.

What always holds: a process's log stands beside its file (``.log`` for ``.toml``) and is in the message when it ends too early.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """One whose path is short enough for a unix socket, which pytest's may not be."""
    folder = Path(tempfile.mkdtemp(prefix="sentinel-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def neighbours(count: int) -> int:
    """The first of ``count`` ports in a row that are free, below those that the kernel gives to connections."""
    for first in random.sample(range(12000, 30000, 8), 500):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no ports are free")


def tables(pool: str, model: str, workers: dict[str, str], more: str = "") -> str:
    """``[[pools]]`` and ``[[workers]]`` (name → URL) of its file. ``more``: lines of each worker."""
    rows = "".join(f'[[workers]]\nname = "{name}"\npool = "{pool}"\nurl = "{url}"\n{more}' for name, url in workers.items())
    return f'[[pools]]\nname = "{pool}"\nmodel = "{model}"\n{rows}'


def started(file: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from sentinel.cli.main import main; main()", "gateway", "--config", str(file)]
    with file.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, stderr=log, stdout=log)


def lives(process: subprocess.Popen[bytes], file: Path) -> None:
    """Raises AssertionError with what it said, when it has ended."""
    assert process.poll() is None, file.with_suffix(".log").read_text("utf-8", "replace")

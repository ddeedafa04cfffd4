"""Several processes and their watcher: what one that cannot come up again means for the others."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from sentinel.gateway.processes import Processes

CHILD = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
if (folder / "broken").exists():
    (folder / "tried").open("a").write("+")
    sys.exit(1)
(folder / f"pid{os.environ['SENTINEL_GATEWAY_PROCESS']}").write_text(str(os.getpid()))
while (folder / "go").exists():
    os.write(1, b"+")
    time.sleep(0.05)
"""


def pid(folder: Path, number: int) -> int:
    return int((folder / f"pid{number}").read_text())


async def until(condition: object, *, seconds: float = 15.0) -> None:
    assert callable(condition)
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def test_one_that_cannot_come_up_again_leaves_the_others_alone(tmp_path: Path) -> None:
    """systemd is told that all is well while somebody serves and nobody hangs: else it would end those that do, with their streams.
    With nobody left it is not told so."""
    (tmp_path / "go").touch()
    silent_s = 1.0
    watched = Processes(2, [sys.executable, "-c", CHILD, str(tmp_path)], silent_s)
    running = asyncio.create_task(watched.run())
    try:
        await until(lambda: watched._up.is_set() and (tmp_path / "pid0").exists() and (tmp_path / "pid1").exists())
        (tmp_path / "broken").touch()
        os.kill(pid(tmp_path, 1), signal.SIGKILL)
        await until((tmp_path / "tried").exists)
        await asyncio.sleep(silent_s * 1.5)
        await until(watched.alive)
        assert not running.done()
        os.kill(pid(tmp_path, 0), signal.SIGSTOP)
        await until(lambda: not watched.alive())
        os.kill(pid(tmp_path, 0), signal.SIGCONT)
        await until(watched.alive)
        os.kill(pid(tmp_path, 0), signal.SIGKILL)
        await until(lambda: not watched.alive())
        (tmp_path / "broken").unlink()
        await until(watched.alive)
    finally:
        (tmp_path / "go").unlink()
        os.kill(os.getpid(), signal.SIGTERM)  # taken by the loop
        await running


@pytest.mark.parametrize("count", [1, 3])
async def test_one_that_never_came_up_ends_them_all(tmp_path: Path, count: int) -> None:
    """What is wrong from the beginning is said by the status."""
    (tmp_path / "broken").touch()
    assert await Processes(count, [sys.executable, "-c", CHILD, str(tmp_path)]).run() == 1

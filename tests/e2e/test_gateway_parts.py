"""A part of the guards that ends by a bug ends the gateway, for systemd to start it anew."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from tests.conftest import free_port
from tests.gateway_rig import running

# Runs the daemon, and takes the coroutine of one of its tasks to its end by an error, as a bug in it would.
DAEMON = """
import asyncio, contextlib, sys
from pathlib import Path
from sentinel import logs
from sentinel.config import load
from sentinel.gateway.daemon import run

async def main(file, part):
    serving = asyncio.create_task(run(load(file), file))
    while not (found := [task for task in asyncio.all_tasks() if task.get_name() == part]):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    with contextlib.suppress(RuntimeError):
        found[0].get_coro().throw(RuntimeError("a bug"))
    found[0].cancel()  # wakes the task, which finds that it can not go on
    return await serving

logs.configure("json", "info")
sys.exit(asyncio.run(main(Path(sys.argv[1]), sys.argv[2])))
"""


@pytest.mark.parametrize("part", ["tenure", "breakers-flush", "breakers-look"])
async def test_a_guard_that_ends_by_a_bug_ends_the_gateway(part: str) -> None:
    """The daemon names the part and exits 1; it does not go on without a lease or without news of breakers."""
    async with running() as rig:
        more = '[gateway.breakers]\npoll = "100ms"\n'
        file = rig.file(free_port(), free_port(), more=more)
        command = [sys.executable, "-c", DAEMON, str(file), part]
        ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=30, text=True, check=False)
    said = ended.stderr + ended.stdout
    assert ended.returncode == 1, said[-2000:]
    assert f'"part":"{part}"' in said and "ended by itself" in said, said[-2000:]

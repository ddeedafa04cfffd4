"""The store away for ten seconds while a GPU dies: nothing is lost, and nothing acts twice."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from sentinel.sim.scenarios import xid
from sentinel.sim.stage import Stage, StageError


def store_of(folder: Path) -> int:
    """The embedded server's process: the one that works in the stage's folder."""
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            if "valkey" in comm.read_text() and (comm.parent / "cwd").readlink().is_relative_to(folder):
                return int(comm.parent.name)
        except OSError:
            continue
    raise AssertionError(f"no store runs in {folder}")


@pytest.mark.long
async def test_a_store_stopped_for_ten_seconds_loses_nothing() -> None:
    """Xid 79 while the store stands still: out after it is back, one incident, one page, one kill, traffic flowing on."""
    async with Stage() as stage:
        await stage.start_traffic()
        store = store_of(Path(stage.folder))
        os.kill(store, signal.SIGSTOP)
        try:
            await asyncio.sleep(1)
            await stage.inject_kernel_line("t07", xid("0009:01:00.0", 79, "GPU has fallen off the bus."))
            await asyncio.sleep(9)
        finally:
            os.kill(store, signal.SIGCONT)
        async with asyncio.timeout(20):
            while not any(d["worker"] == "decode-03" and d["state"] == "out" for d in await drains(stage)):
                await asyncio.sleep(0.1)  # until it leads again, under a new epoch, it answers that nobody does
        await asyncio.sleep(2)
        assert [d["worker"] for d in await drains(stage)] == ["decode-03"]
        assert [page["event"] for page in stage.pages] == ["trigger"]
        assert [i.fault for i in await stage.incidents() if i.closed_at is None] == ["gpu-off-bus"]
        before = stage.traffic.counts()["ok"]
        await asyncio.sleep(3)
        assert stage.traffic.counts()["ok"] > before


async def drains(stage: Stage) -> list[dict[str, str]]:
    try:
        return list((await stage.status())["drains"])
    except StageError:
        return []

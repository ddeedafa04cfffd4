"""Three decoders lost at once: the running overflow is not enough, and a standby is started, proven and used."""

from __future__ import annotations

import asyncio

from sentinel.model import WorkerState
from sentinel.sim.client import Load
from sentinel.sim.scenarios import xid
from sentinel.sim.stage import Stage


async def test_a_standby_is_started_proven_and_used() -> None:
    """Under load that two spare decoders cannot carry, a stopped third one comes up, passes its test and serves sessions."""
    async with Stage(Load(sessions=72, pause_s=(0.0, 0.1))) as stage:
        await stage.start_traffic()
        await asyncio.sleep(2)
        for node in ("t05", "t06", "t07"):
            await stage.inject_kernel_line(node, xid("0009:01:00.0", 79, "GPU has fallen off the bus."))
        async with asyncio.timeout(40):
            while state_of(stage, "spare-decode-3") is not WorkerState.ACTIVE:
                await asyncio.sleep(0.1)
            while not any(record.worker == "spare-decode-3" and record.ok for record in stage.traffic.records):
                await asyncio.sleep(0.1)
        weights = {pool.pool: pool.weight for pool in stage.routes.pools}
        assert weights["overflow"] > 0.25


def state_of(stage: Stage, worker: str) -> WorkerState:
    return next(e.state for pool in stage.routes.pools for e in pool.workers if e.worker == worker)

"""What an agent shows of itself, with or without a controller: its metrics, its health, whether it is alive."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from sentinel.model import Component, Finding, Severity
from tests.unit.agent_stand import Scripted, agent, event, until


async def test_alone_it_measures_and_shows(tmp_path: Path) -> None:
    """Without controllers nothing is kept for anybody, while /metrics and /healthz tell what is found."""
    probe = Scripted()
    async with agent(tmp_path, probe=probe, listen="127.0.0.1:0") as made, aiohttp.ClientSession() as http:
        gpu = Component(node="t01", device="gpu@0009:01:00.0")
        probe.next = [
            Finding(id="s", check="gpu.bad", component=gpu, at=1.0, severity=Severity.WARNING),
            Finding(id="h", check="driver.hung", component=gpu, at=1.0, severity=Severity.FATAL),
        ]
        await until(lambda: probe.committed == 2)
        probe.next = [event("x", component=gpu, facts={"xid": 79}, count=3)]
        await until(lambda: probe.committed == 3)
        assert len(made.spool) == 0
        base = f"http://127.0.0.1:{made.port}"
        async with http.get(base + "/metrics") as answer:
            text = await answer.text()
        for line in (
            'sentinel_finding_present{check="gpu.bad",component="t01/gpu@0009:01:00.0",severity="warning"} 1.0',
            'sentinel_driver_hung{gpu="0009:01:00.0"} 1.0',
            'sentinel_xid_total{gpu="0009:01:00.0",xid="79"} 3.0',
            'sentinel_xid_total{gpu="0009:01:00.0",xid="48"} 0.0',
            'sentinel_probe_success{probe="scripted"} 1.0',
            "sentinel_spool_bytes 0.0",
        ):
            assert line in text
        async with http.get(base + "/healthz") as answer:
            detail = await answer.json()
            assert (answer.status, detail["controller"], detail["probes"]) == (200, None, {"scripted": True})
        made.down.set()
        async with http.get(base + "/healthz") as answer:
            assert answer.status == 503


async def test_history_is_no_count(tmp_path: Path) -> None:
    """A fault of before the first look is told, but does not raise the counter that alerts read."""
    probe = Scripted()
    async with agent(tmp_path, probe=probe) as made:
        gpu = Component(node="t01", device="gpu@0009:01:00.0")
        probe.next = [event("old", component=gpu, facts={"xid": 79, "history": True})]
        await until(lambda: probe.committed == 1)
        value = made.metrics.registry.get_sample_value
        assert value("sentinel_xid_total", {"gpu": "0009:01:00.0", "xid": "79"}) == 0.0


async def test_a_scheduler_that_stands_still_is_not_alive(tmp_path: Path) -> None:
    """That the loop answers is not enough: without the scheduler's beat the agent does not call itself alive."""
    async with agent(tmp_path) as made:
        assert made.alive()
        made.runner._scheduler.pause()
        made.runner.beat -= 60
        assert not made.alive()

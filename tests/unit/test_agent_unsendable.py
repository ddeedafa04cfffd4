"""What a probe finds and no report can carry costs that probe only: the agent lives, and the rest arrives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sentinel.agent.assembly import Agent
from sentinel.config import AgentSettings
from sentinel.durations import Duration
from sentinel.model import Kind
from tests.unit.agent_stand import Controller, Scripted, agent, event, until


@pytest.mark.parametrize(
    "finding",
    [
        event("b", facts={"x": object()}),
        event("b", kind=Kind.STATE, facts={"x": object()}),
        event("b", summary="\udcff"),
        event("b", kind=Kind.STATE, summary="\udcff"),
        event("b", at=float("nan")),
        event("b", evidence=("x" * 5_000_000,)),
        event("b", severity="dreadful"),
        "no finding",
    ],
    ids=["object", "object in a state", "surrogate", "surrogate in a state", "no time", "5 MB", "no severity", "text"],
)
async def test_what_cannot_be_sent_costs_its_probe_only(tmp_path: Path, finding: Any) -> None:
    """A site's probe that finds what is no JSON fails by name; the agent lives, and what others find arrives."""

    class Bad(Scripted):
        name = "bad"

    probe, bad = Scripted(), Bad()
    async with Controller().serving() as controller:
        settings = AgentSettings(node="t01", controllers=(controller.url,), state_dir=tmp_path, listen="", snapshot=Duration(0.05))
        made = Agent(settings, [probe, bad])
        await made.start()
        bad.next = [finding]
        await until(lambda: made.runner.errors.get("bad") or bad.committed)
        probe.next = [event("good")]
        await until(lambda: [f.id for f in controller.findings] == ["good"])
        await until(lambda: any(r.snapshot for r in controller.reports))
        assert not made.down.is_set()
        assert bad.committed == 0
        await made.stop()


async def test_workers_that_cannot_be_told_are_not(tmp_path: Path) -> None:
    """A probe's list of workers that is no JSON is left out; the agent lives and goes on reporting."""
    probe = Scripted()
    probe.data = {"workers": [{"worker": "\udcff"}]}
    async with Controller().serving() as controller, agent(tmp_path, controller.url, probe=probe) as made:
        await until(lambda: sum(r.snapshot for r in controller.reports) >= 2)
        assert not made.down.is_set()
        assert controller.reports[-1].workers == ()

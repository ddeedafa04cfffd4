"""What passes between an agent and its controllers arrives once, in order, and at the one that leads."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import aiohttp
from aiohttp import web

from sentinel.agent.assembly import Agent
from sentinel.config import AgentSettings
from sentinel.durations import Duration
from sentinel.model import Command, Component, Finding, Place, Report
from tests.unit.agent_stand import Controller, Scripted, agent, event, trouble, until


async def test_news_goes_out_at_once_and_snapshots_follow(tmp_path: Path) -> None:
    """An event is delivered once in a small report and committed; snapshots carry all states, workers and probe status."""
    probe = Scripted()
    probe.data = {"workers": [{"worker": "d0", "running": 1}]}
    async with Controller().serving() as controller, agent(tmp_path, controller.url, probe=probe):
        probe.next = [event("e1"), Finding(id="s1", check="fine", component=Component(node="t01"), at=time.time(), present=False)]
        await until(lambda: any(r.snapshot and r.findings for r in controller.reports) and controller.findings)
        assert [f.id for f in controller.findings] == ["e1"]
        assert probe.committed == 2
        snapshot = next(r for r in controller.reports if r.snapshot and r.findings)
        assert [(f.check, f.present) for f in snapshot.findings] == [("fine", False)]
        assert [w.worker for w in snapshot.workers] == ["d0"]
        assert snapshot.probes == {"scripted": True}
        await until(lambda: len([r for r in controller.reports if r.snapshot]) >= 3)
    assert [r.seq for r in controller.reports] == list(range(1, len(controller.reports) + 1))
    assert len({r.session for r in controller.reports}) == 1


async def test_a_snapshot_says_where_the_node_stands(tmp_path: Path) -> None:
    """The place goes with snapshots and not with news; it is read below the procfs root of the settings."""
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/hostname").write_text("tray-01.example.net\n")
    probe = Scripted()
    async with Controller().serving() as controller, agent(tmp_path, controller.url, probe=probe, proc=tmp_path / "proc"):
        probe.next = [event("e1")]
        await until(lambda: controller.findings and any(r.snapshot for r in controller.reports))
        for report in controller.reports:
            assert (report.place == Place(addresses=("tray-01.example.net", "tray-01"))) is report.snapshot


async def test_the_controller_gets_a_snapshot_when_it_asks(tmp_path: Path) -> None:
    """want_snapshot in an answer brings a snapshot next, not after the interval."""
    probe = Scripted()
    async with Controller().serving() as controller, agent(tmp_path, controller.url, probe=probe, snapshot=Duration(3600.0)):
        await until(lambda: any(r.snapshot for r in controller.reports))
        controller.want_snapshot = True
        probe.next = [event("e1")]
        await until(lambda: len([r for r in controller.reports if r.snapshot]) == 2)


async def test_an_outage_loses_nothing_and_keeps_order(tmp_path: Path) -> None:
    """What is found while no controller answers, or while answers get lost on the way, arrives once each, in order."""
    probe, controller = Scripted(), Controller()
    async with controller.serving():
        url = controller.url
    port = int(url.rpartition(":")[2])
    async with agent(tmp_path, url, probe=probe) as made:
        for i in range(5):
            probe.next = [event(f"dark{i}")]
            await until(lambda: not probe.next)
        await until(lambda: len(made.spool) == 5 and trouble(made))
        lost = 0

        def lose(report: Report) -> web.StreamResponse | None:
            nonlocal lost
            if report.findings and lost < 2:
                lost += 1
                if report.seq > controller.sessions.get(report.session, 0):
                    controller.sessions[report.session] = report.seq  # it was taken in …
                    controller.findings.extend(report.findings)
                return web.Response(status=502, text="a proxy's page")  # … but the answer never came
            return None

        controller.answer = lose
        async with controller.serving(port):
            probe.next = [event("light")]
            await until(lambda: len(controller.findings) >= 6 and not len(made.spool))
        assert [f.id for f in controller.findings] == [*(f"dark{i}" for i in range(5)), "light"]


async def test_a_restart_sends_what_was_not_acknowledged(tmp_path: Path) -> None:
    """The next run sends the same findings, by the same ids, under a session of its own; acknowledged ones stay away."""
    probe = Scripted()
    async with Controller().serving() as controller:
        async with agent(tmp_path, controller.url, probe=probe):
            probe.next = [event("acked")]
            await until(lambda: controller.findings)
            controller.answer = lambda report: web.Response(status=500)
            probe.next = [event("kept")]
            await until(lambda: probe.committed == 2)
        controller.answer = lambda report: None
        before = set(controller.sessions)
        async with agent(tmp_path, controller.url):
            await until(lambda: len(controller.findings) == 2)
        assert [f.id for f in controller.findings] == ["acked", "kept"]
        assert set(controller.sessions) - before


async def test_the_leader_is_found_and_strangers_get_no_token(tmp_path: Path) -> None:
    """A controller that does not lead is left for the one it names, but only for one that is configured."""
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    token.chmod(0o600)
    leader, standby, stranger = Controller(), Controller(), Controller()
    async with leader.serving(), standby.serving(), stranger.serving():
        named = stranger.url
        standby.answer = lambda report: web.json_response({"error": "not leader", "leader": named}, status=421)
        probe = Scripted()
        async with agent(tmp_path, standby.url, leader.url, probe=probe, token_file=token):
            await until(lambda: leader.reports)
            assert leader.tokens[-1] == "Bearer s3cret"
            assert not stranger.tokens
            named = leader.url + "/"
            asked = len(standby.tokens)
            probe.next = [event("e")]
            await until(lambda: leader.findings)
            assert len(standby.tokens) == asked, "the leader is asked first from now on"


async def test_failover_to_the_next_controller(tmp_path: Path) -> None:
    """When the leader is gone, findings reach the one that leads now."""
    probe, first, second = Scripted(), Controller(), Controller()
    async with second.serving():
        second.answer = lambda report: web.json_response({"error": "standby", "leader": first.url}, status=421)
        async with first.serving():
            ours = agent(tmp_path, first.url, second.url, probe=probe)
            await ours.__aenter__()
            await until(lambda: first.reports)
        second.answer = lambda report: web.json_response({"error": "no leader yet", "leader": None}, status=421)
        probe.next = [event("e")]
        await asyncio.sleep(0.1)
        second.answer = lambda report: None
        await until(lambda: second.findings)
        await ours.__aexit__(None, None, None)


async def test_a_controller_that_never_answers_does_not_hold_up_probes(tmp_path: Path) -> None:
    """While a report hangs, probes go on, findings are kept and committed."""
    probe = Scripted()
    controller, hang = Controller(), asyncio.Event()

    async def never(request: web.Request) -> web.Response:
        await hang.wait()
        return web.Response()

    controller.report = never  # type: ignore[method-assign]
    async with controller.serving(), agent(tmp_path, controller.url, probe=probe) as made:
        for i in range(3):
            probe.next = [event(f"e{i}")]
            await until(lambda n=i: probe.committed == n + 1)
        assert len(made.spool) == 3
        hang.set()


async def test_a_command_is_carried_out_and_answered(tmp_path: Path) -> None:
    """An allowed command runs its vector and its result arrives; one that is not allowed is refused by name."""
    async with Controller().serving() as controller:
        controller.commands = [
            Command(id="c1", node="t01", action="say", args={"what": "hello"}),
            Command(id="c2", node="t01", action="rm", args={}),
        ]
        async with agent(tmp_path, controller.url, actions={"say": ("/bin/echo", "{what}")}) as made:
            await until(lambda: len(controller.results) == 2)
            results = {r.id: r for r in controller.results}
            assert results["c1"].ok
            assert "hello" in results["c1"].detail
            assert results["c2"].refused
            value = made.metrics.registry.get_sample_value
            assert value("sentinel_actions_total", {"action": "say", "outcome": "ok"}) == 1
            assert value("sentinel_actions_total", {"action": "unknown", "outcome": "refused"}) == 1


async def test_many_agents_share_one_loop(tmp_path: Path) -> None:
    """Eighteen agents with a shared session in one loop each report under their own name."""
    async with Controller().serving() as controller, aiohttp.ClientSession() as session:
        agents = [
            Agent(
                AgentSettings(node=f"t{i:02}", controllers=(controller.url,), state_dir=tmp_path / f"{i}", listen=""),
                [Scripted()],
                session=session,
            )
            for i in range(18)
        ]
        await asyncio.gather(*(a.start() for a in agents))
        await until(lambda: len({r.node for r in controller.reports}) == 18)
        await asyncio.gather(*(a.stop() for a in agents))
        assert not session.closed

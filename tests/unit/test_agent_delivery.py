"""From a reading to a controller that has it: an agent in this process against a real HTTP server that plays the controller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from sentinel.agent.assembly import Agent
from sentinel.config import AgentSettings, ConfigError
from sentinel.durations import Duration
from sentinel.model import Ack, Command, CommandResult, Component, Finding, Kind, Place, Reading, Report, Severity

Answer = Callable[[Report], web.StreamResponse | None]


class Controller:
    """Speaks the agent's half of the HTTP contract; ``answer`` may answer a report in its own way first."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.findings: list[Finding] = []
        self.sessions: dict[str, int] = {}
        self.results: list[CommandResult] = []
        self.commands: list[Command] = []
        self.tokens: list[str] = []
        self.answer: Answer = lambda report: None
        self.want_snapshot = False
        self.url = ""

    async def report(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization", ""))
        report = msgspec.json.decode(await request.read(), type=Report)
        said = self.answer(report)
        if said is not None:
            return said
        if report.seq > self.sessions.get(report.session, 0):
            self.sessions[report.session] = report.seq
            self.reports.append(report)
            if not report.snapshot:
                self.findings += report.findings
        want, self.want_snapshot = self.want_snapshot, False
        return web.Response(body=msgspec.json.encode(Ack(session=report.session, seq=report.seq, want_snapshot=want)))

    async def offer(self, request: web.Request) -> web.StreamResponse:
        done = {r.id for r in self.results}
        for _ in range(100):
            if due := [c for c in self.commands if c.id not in done]:
                return web.Response(body=msgspec.json.encode(due))
            await asyncio.sleep(0.02)
        return web.Response(body=b"[]")

    async def result(self, request: web.Request) -> web.StreamResponse:
        self.results.append(msgspec.json.decode(await request.read(), type=CommandResult))
        return web.Response(status=204)

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[Controller]:
        app = web.Application()
        app.add_routes(
            [web.post("/v1/report", self.report), web.get("/v1/commands", self.offer), web.post("/v1/results", self.result)]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


class Scripted:
    """A probe that finds what the test puts into ``next``."""

    name, interval_s = "scripted", 0.01

    def __init__(self) -> None:
        self.next: list[Finding] = []
        self.data: dict[str, Any] = {}
        self.committed = 0

    async def read(self) -> Reading:
        found, self.next = self.next, []
        return Reading(probe=self.name, node="t01", at=1.0, data={**self.data, "found": found})

    def assess(self, reading: Reading, memory: dict[str, Any], expected: Mapping[str, Any]) -> list[Finding]:
        return list(reading.data["found"])

    def commit(self, reading: Reading) -> None:
        self.committed += len(reading.data["found"])

    async def close(self) -> None: ...


def event(name: str, **more: Any) -> Finding:
    node = Component(node="t01")
    fields = {"id": name, "check": "xid.79", "component": node, "at": 1.0, "kind": Kind.EVENT, "severity": Severity.FATAL}
    return Finding(**{**fields, **more})


@asynccontextmanager
async def agent(tmp_path: Path, *urls: str, probe: Scripted | None = None, **more: Any) -> AsyncIterator[Agent]:
    settings = AgentSettings(
        **{"node": "t01", "controllers": urls, "state_dir": tmp_path / "state", "listen": "", "snapshot": Duration(0.3), **more}
    )
    made = Agent(settings, [probe or Scripted()])
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def _trouble(made: Agent) -> str:
    return made.connection.reporter.trouble if made.connection else ""


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


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
        await until(lambda: len(made.spool) == 5 and _trouble(made))
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


@pytest.mark.parametrize(
    "garbage",
    [
        lambda r: web.Response(body=b"<html>hotel wifi</html>", content_type="text/html"),
        lambda r: web.Response(body=b""),
        lambda r: web.Response(body=b'{"session": "x"'),
        lambda r: web.Response(body=b"\xff" * 100),
        lambda r: web.Response(body=b" " * (5 << 20)),
        lambda r: web.Response(body=msgspec.json.encode(Ack(session="another", seq=r.seq))),
        lambda r: web.Response(body=msgspec.json.encode(Ack(session=r.session, seq=r.seq + 1))),
        lambda r: web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}),
        lambda r: web.Response(status=503, text="store is away"),
        lambda r: web.Response(status=429, headers={"Retry-After": "0"}),
        lambda r: web.Response(status=429, headers={"Retry-After": "\u00b2"}),
        lambda r: web.Response(status=500, body=b'{"error":"caf\xe9"}'),
        lambda r: web.Response(status=500, body=b'{"error":' + b"[" * 100_000),
        lambda r: web.Response(status=421, body=b'{"leader":' + b"[" * 100_000),
    ],
    ids=["page", "empty", "half", "binary", "oversized", "other session", "other seq", "redirect", "503", "429",
         "429 until a raised two", "no UTF-8", "endless nesting", "endless nesting as leader"],
)
async def test_garbage_is_never_taken_for_an_acknowledgement(tmp_path: Path, garbage: Answer) -> None:
    """An answer that is not this report's Ack leaves the finding in the spool, does not loop hot, and is got over."""
    probe = Scripted()
    async with Controller().serving() as controller, agent(tmp_path, controller.url, probe=probe) as made:
        asked = 0

        def answer(report: Report) -> web.StreamResponse:
            nonlocal asked
            asked += 1
            return garbage(report)  # type: ignore[return-value]

        controller.answer = answer
        probe.next = [event("e")]
        await until(lambda: asked >= 2 and len(made.spool))
        assert asked < 50
        assert not made.down.is_set()
        controller.answer = lambda report: None
        await until(lambda: controller.findings and not len(made.spool))


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://", "ftp://c", "http://c:port", "http://c:99999", f"http://{'c' * 80}", "http://c d"]
)
async def test_a_controller_that_is_no_address_is_one_sentence(tmp_path: Path, url: str) -> None:
    """It is refused when the agent starts, by its key, and not told again and again as a controller that does not answer."""
    with pytest.raises(ConfigError, match=r"agent\.controllers: expected http"):
        async with agent(tmp_path, url):
            pass


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


async def test_history_is_no_count(tmp_path: Path) -> None:
    """A fault of before the first look is told, but does not raise the counter that alerts read."""
    probe = Scripted()
    async with agent(tmp_path, probe=probe) as made:
        gpu = Component(node="t01", device="gpu@0009:01:00.0")
        probe.next = [event("old", component=gpu, facts={"xid": 79, "history": True})]
        await until(lambda: probe.committed == 1)
        value = made.metrics.registry.get_sample_value
        assert value("sentinel_xid_total", {"gpu": "0009:01:00.0", "xid": "79"}) == 0.0


async def test_a_refused_finding_does_not_block_the_others(tmp_path: Path) -> None:
    """The one finding that the controller refuses is found, set aside and counted; everything else arrives, in order."""
    probe = Scripted()
    async with Controller().serving() as controller:
        controller.answer = lambda r: (
            web.json_response({"error": "cannot be"}, status=400) if any(f.id == "poison" for f in r.findings) else None
        )
        async with agent(tmp_path, controller.url, probe=probe) as made:
            assert made.connection
            made.connection.reporter._after_refusal_s = 0.01
            probe.next = [event("a"), event("b"), event("poison"), event("c"), event("d")]
            await until(lambda: len(controller.findings) == 4)
            assert [f.id for f in controller.findings] == ["a", "b", "c", "d"]
            await until(lambda: made.spool.dropped["fatal"] == 1)
            assert made.metrics.registry.get_sample_value("sentinel_report_errors_total", {"why": "refused"})


async def test_a_refused_token_keeps_everything(tmp_path: Path) -> None:
    """401 drops nothing, is not asked in a loop, and a token renewed in its file is used without a restart."""
    token = tmp_path / "token"
    token.write_text("old")
    token.chmod(0o600)
    probe = Scripted()
    async with Controller().serving() as controller:

        def answer(report: Report) -> web.StreamResponse | None:
            return None if controller.tokens[-1] == "Bearer new" else web.json_response({"error": "no such token"}, status=401)

        controller.answer = answer
        async with agent(tmp_path, controller.url, probe=probe, token_file=token) as made:
            assert made.connection
            made.connection.reporter._after_refusal_s = 0.1
            probe.next = [event("e")]
            await until(lambda: "no such token" in _trouble(made))
            await asyncio.sleep(0.3)
            assert len(controller.tokens) < 10
            assert len(made.spool) == 1
            token.write_text("new")
            await until(lambda: controller.findings)


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


async def test_one_state_directory_has_one_agent(tmp_path: Path) -> None:
    """A second agent on the same state directory is refused with a sentence, and the first is untouched."""
    async with agent(tmp_path) as first:
        with pytest.raises(ConfigError, match="in use by another agent"):
            async with agent(tmp_path):
                pass
        assert first.alive()


async def test_a_state_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    """A state directory below a plain file is refused naming key and path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"agent\.state_dir: .*file/state"):
        async with agent(tmp_path, state_dir=tmp_path / "file/state"):
            pass


async def test_reload_changes_what_can_change_and_nothing_on_error(tmp_path: Path) -> None:
    """A reload moves reports to the new controller and keeps session and spool; a bad one leaves everything as it was."""
    old, new = Controller(), Controller()
    probe = Scripted()
    async with old.serving(), new.serving(), agent(tmp_path, old.url, probe=probe, listen="127.0.0.1:0") as made:
        await until(lambda: old.reports)
        good = msgspec.structs.replace(made.settings, controllers=(new.url,))
        for bad, complaint in (
            (msgspec.structs.replace(good, node="other"), "agent.node"),
            (msgspec.structs.replace(good, listen="nonsense"), "agent.listen"),
            (msgspec.structs.replace(good, controllers=("ftp://x",)), "agent.controllers"),
            (msgspec.structs.replace(good, actions={"a": ("{x}",)}), "agent.actions.a"),
            (msgspec.structs.replace(good, probes={"scripted": {"interval": "often"}}), "agent.probes.scripted.interval"),
        ):
            with pytest.raises(ConfigError, match=complaint):
                await made.reconfigure(bad, [Scripted()])
        heard, port = len(old.reports), made.port
        await until(lambda: len(old.reports) > heard)
        again = Scripted()
        await made.reconfigure(good, [again])
        again.next = [event("after")]
        await until(lambda: new.findings and not again.next)
        assert made.port == port
        assert {r.session for r in new.reports} == {old.reports[-1].session}


async def test_controllers_can_come_and_go(tmp_path: Path) -> None:
    """An agent that stood alone reports once a reload names a controller, and stands alone again when it is named no more."""
    async with Controller().serving() as controller, agent(tmp_path) as made:
        alone = made.settings
        await made.reconfigure(msgspec.structs.replace(alone, controllers=(controller.url,)), [Scripted()])
        await until(lambda: controller.reports)
        await made.reconfigure(alone, [Scripted()])
        count = len(controller.reports)
        await asyncio.sleep(0.5)
        assert len(controller.reports) == count
        assert made.alive()


async def test_a_scheduler_that_stands_still_is_not_alive(tmp_path: Path) -> None:
    """That the loop answers is not enough: without the scheduler's beat the agent does not call itself alive."""
    async with agent(tmp_path) as made:
        assert made.alive()
        made.runner._scheduler.pause()
        made.runner.beat -= 60
        assert not made.alive()


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

"""A whole agent in this process against a real HTTP server that plays the controller, with a probe that a test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from sentinel.agent.assembly import Agent
from sentinel.config import AgentSettings
from sentinel.durations import Duration
from sentinel.model import Ack, Command, CommandResult, Component, Finding, Kind, Reading, Report, Severity

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


def trouble(made: Agent) -> str:
    return made.connection.reporter.trouble if made.connection else ""


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)

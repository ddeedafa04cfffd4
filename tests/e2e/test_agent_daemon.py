"""The agent as systemd sees it: a process of its own, killed, stopped, reloaded and wedged for real."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from sentinel.model import Ack, Report

# A daemon with one probe of our own: it reads lines from a file and keeps a cursor, as the kernel log's probe does.
DAEMON = '''
import asyncio, sys, time
from pathlib import Path

import uvloop

from sentinel import logs
from sentinel.agent import daemon
from sentinel.config import load
from sentinel.model import Component, Finding, Kind, Reading, Severity

FOLDER = Path(sys.argv[1])

class Lines:
    name, interval_s = "lines", 0.02

    def __init__(self):
        self.cursor = FOLDER / "cursor"
        self.at = int(self.cursor.read_text()) if self.cursor.exists() else 0

    async def read(self):
        lines = (FOLDER / "lines").read_text().splitlines()[self.at:][:50]
        if (FOLDER / "wedge").exists():
            time.sleep(60)  # the whole event loop stands still
        self.at += len(lines)
        return Reading(probe="lines", node="t01", at=time.time(), data={"lines": lines, "upto": self.at})

    def assess(self, reading, memory, expected):
        return [
            Finding(id=line, check="line", component=Component(node="t01"), at=reading.at, kind=Kind.EVENT, severity=Severity.FATAL)
            for line in reading.data["lines"]
        ]

    def commit(self, reading):
        new = FOLDER / "cursor.new"
        new.write_text(str(reading.data["upto"]))
        new.replace(self.cursor)

    async def close(self):
        (FOLDER / "closed").write_text("")

logs.configure("json")
path = FOLDER / "agent.toml"
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    sys.exit(runner.run(daemon.run(load(path), path, probes=lambda settings: [Lines()])))
'''


class Host:
    """One node's files, its notify socket, and the daemon process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "lines").write_text("")
        (folder / "daemon.py").write_text(DAEMON)
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.bind(str(folder / "notify"))
        self.notify.settimeout(10)
        self.process: subprocess.Popen[bytes] | None = None

    def configure(self, *controllers: str, more: str = "") -> None:
        (self.folder / "agent.toml").write_text(
            f'[agent]\nnode = "t01"\nlisten = "127.0.0.1:0"\nsnapshot = "200ms"\nstate_dir = "{self.folder}/state"\n'
            f"controllers = {list(controllers)}\n{more}"
        )

    def start(self, watchdog_s: float = 0.6) -> subprocess.Popen[bytes]:
        env = {**os.environ, "NOTIFY_SOCKET": str(self.folder / "notify"), "WATCHDOG_USEC": str(int(watchdog_s * 1e6))}
        env.pop("WATCHDOG_PID", None)
        with (self.folder / "log").open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(self.folder / "daemon.py"), str(self.folder)], env=env, stdout=out, stderr=out
            )
        return self.process

    def told(self) -> dict[str, str]:
        """The next message to systemd."""
        text = self.notify.recv(4096).decode()
        return dict(line.partition("=")[::2] for line in text.splitlines())

    def until_told(self, key: str) -> dict[str, str]:
        while key not in (message := self.told()):
            pass
        return message

    def log(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(line) for line in (self.folder / "log").read_bytes().splitlines() if line.startswith(b"{")]

    def url(self) -> str:
        started = [e for e in self.log() if e["event"] == "agent started"]
        return f"http://127.0.0.1:{started[-1]['port']}"


@contextmanager
def _host(folder: Path) -> Iterator[Host]:
    host = Host(folder)
    try:
        yield host
    finally:
        host.notify.close()
        if host.process and host.process.poll() is None:
            host.process.kill()
            host.process.wait()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with _host(tmp_path) as made:
        yield made


@asynccontextmanager
async def controller(take: Callable[[Report], bool]) -> AsyncIterator[str]:
    """Acknowledges a report when ``take`` says so; otherwise the connection just ends."""

    async def report(request: web.Request) -> web.Response:
        got = msgspec.json.decode(await request.read(), type=Report)
        if take(got):
            return web.Response(body=msgspec.json.encode(Ack(session=got.session, seq=got.seq)))
        assert request.transport
        request.transport.close()
        return web.Response()

    async def commands(request: web.Request) -> web.Response:
        await asyncio.sleep(1)
        return web.Response(body=b"[]")

    app = web.Application()
    app.add_routes([web.post("/v1/report", report), web.get("/v1/commands", commands)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


async def test_killed_in_mid_report_nothing_is_lost(host: Host) -> None:
    """SIGKILL while a report is under way, again and again: every line arrives, in order of first arrival, by the same id."""
    arrived: list[str] = []
    kills = 0

    def take(report: Report) -> bool:
        nonlocal kills
        if not report.findings or report.snapshot:
            return True
        if kills < 3:
            kills += 1
            assert host.process
            host.process.send_signal(signal.SIGKILL)  # before anything is acknowledged
            return False
        arrived.extend(f.id for f in report.findings)
        return True

    async with controller(take) as url:
        host.configure(url)
        wanted = []
        for round_ in range(4):
            process = host.start()
            new = [f"line-{round_}-{i}" for i in range(120)]
            with (host.folder / "lines").open("a") as file:
                file.write("".join(f"{line}\n" for line in new))
            wanted += new
            if round_ < 3:
                await asyncio.to_thread(process.wait, 20)
                assert process.returncode == -signal.SIGKILL
        await asyncio.to_thread(until, lambda: set(wanted) <= set(arrived))
    assert list(dict.fromkeys(arrived)) == wanted
    assert kills == 3


def test_systemd_hears_ready_alive_and_stopping(host: Host) -> None:
    """READY, then keep-alives, then STOPPING on SIGTERM and a clean end within five seconds, with probes closed."""
    host.configure()
    process = host.start()
    assert "READY" in host.told(), "nothing is said before READY"
    for _ in range(3):
        host.until_told("WATCHDOG")
    process.send_signal(signal.SIGTERM)
    host.until_told("STOPPING")
    assert process.wait(5) == 0
    assert (host.folder / "closed").exists()
    assert not [e for e in host.log() if e["level"] in ("error", "critical")]


def test_a_controller_that_hangs_does_not_hold_up_the_end(host: Host) -> None:
    """SIGTERM ends the agent cleanly also while a controller accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host.configure(f"http://127.0.0.1:{silent.getsockname()[1]}")
        process = host.start()
        host.until_told("READY")
        (host.folder / "lines").write_text("a line\n")
        until((host.folder / "cursor").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0


def test_a_wedged_loop_stops_the_watchdog(host: Host) -> None:
    """When the main loop stands still, no keep-alive is sent any more."""
    host.configure()
    host.start(watchdog_s=0.3)
    host.until_told("WATCHDOG")
    (host.folder / "wedge").write_text("")
    time.sleep(0.5)
    host.notify.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            host.notify.recv(4096)  # what had been said before
    host.notify.settimeout(1.5)
    with pytest.raises(TimeoutError):
        host.notify.recv(4096)


async def test_a_bad_file_is_one_sentence_and_the_old_one_stays(host: Host) -> None:
    """SIGHUP with a file that cannot be used changes nothing but the log; with a good one the new controllers are told."""
    heard: dict[str, list[Report]] = {"old": [], "new": []}

    def take(name: str) -> Callable[[Report], bool]:
        return lambda report: heard[name].append(report) is None

    async with controller(take("old")) as old, controller(take("new")) as new:
        host.configure(old)
        process = host.start()
        await asyncio.to_thread(host.until_told, "READY")
        await asyncio.to_thread(until, lambda: heard["old"])
        for bad in ("[agent]\nlissten = 1\n", "no toml", '[agent]\nnode = "t01"\nsnapshot = "-5s"\n', '[agent]\nnode = "t99"\n'):
            (host.folder / "agent.toml").write_text(bad)
            process.send_signal(signal.SIGHUP)
            message = await asyncio.to_thread(host.until_told, "RELOADING")
            assert int(message["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
            await asyncio.to_thread(host.until_told, "READY")
        complaints = [e["error"] for e in host.log() if "the old one stays" in e["event"]]
        assert len(complaints) == 4
        assert all("\n" not in c for c in complaints)
        assert "lissten" in complaints[0]
        assert not [e for e in host.log() if "exception" in e]
        count = len(heard["old"])
        await asyncio.to_thread(until, lambda: len(heard["old"]) > count)
        host.configure(new)
        process.send_signal(signal.SIGHUP)
        await asyncio.to_thread(until, lambda: heard["new"])
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 5) == 0


async def test_a_storm_of_reloads_loses_nothing(host: Host) -> None:
    """However many SIGHUPs come while it reads, everything is found once and nothing is logged as an error."""
    got: list[str] = []
    async with controller(lambda report: got.extend(f.id for f in report.findings if not report.snapshot) is None) as url:
        host.configure(url)
        process = host.start()
        await asyncio.to_thread(host.until_told, "READY")
        for i in range(60):
            with (host.folder / "lines").open("a") as lines:
                lines.write(f"line {i}\n")
            process.send_signal(signal.SIGHUP)
            await asyncio.sleep(0.005)
        await asyncio.to_thread(until, lambda: len(got) >= 60)
        assert got == [f"line {i}" for i in range(60)]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 5) == 0
    assert [e for e in host.log() if e["level"] == "error" or "exception" in e] == []


def test_a_reload_during_the_start_waits(tmp_path: Path) -> None:
    """SIGHUP before the agent is up is done afterwards; by default it would end the process, which systemd takes as wanted."""
    path, log = tmp_path / "agent.toml", tmp_path / "log"
    probes = "".join(f"[agent.probes.{name}]\nenabled = false\n" for name in ("gpu", "worker"))
    path.write_text(f'[agent]\nlisten = ""\nstate_dir = "{tmp_path}/s"\n{probes}')
    command = [sys.executable, "-c", "from sentinel.cli.main import main; main()", "agent", "--config", str(path)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        status = Path(f"/proc/{process.pid}/status")
        until(lambda: int(status.read_text().partition("SigBlk:")[2].split()[0], 16) & 1)
        process.send_signal(signal.SIGHUP)
        until(lambda: "configuration read again" in log.read_text())
        assert not int(status.read_text().partition("SigBlk:")[2].split()[0], 16) & 1  # what it starts can be told to reload, too
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()


def test_metrics_and_health_are_served(host: Host, program: Callable[[str], Path]) -> None:
    """/healthz is 200 with detail, and /metrics passes Prometheus' own linter."""
    host.configure()
    host.start()
    host.until_told("READY")
    (host.folder / "lines").write_text("a line\n")
    until((host.folder / "cursor").exists)
    with urllib.request.urlopen(host.url() + "/healthz") as answer:  # noqa: S310
        detail = msgspec.json.decode(answer.read())
    assert (detail["alive"], detail["probes"], detail["controller"]) == (True, {"lines": True}, None)
    with urllib.request.urlopen(host.url() + "/metrics") as answer:  # noqa: S310
        text = answer.read()
    checked = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr.decode() + checked.stdout.decode()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[controller]\n", "agent: missing"),
        ('[agent]\nlisten = "nowhere"\n', "agent.listen"),
        ('[agent]\nlisten = ""\n[agent.probes.nosuch]\n', "agent.probes.nosuch"),
        ('[agent]\nlisten = ""\ndriver_deadline = "100ms"\n', "agent.driver_deadline: expected at least 1000ms, got 100ms"),
        ('[agent]\nlisten = ""\n[agent.probes.kernel_log]\ninterval = "1ms"\n', "kernel_log.interval: expected at least 100ms"),
        ('[agent]\nlisten = ""\n[agent.probes.kernel_log]\nintervall = "1s"\n', "agent.probes.kernel_log: unknown option"),
        ('[agent]\nlisten = ""\ncontrollers = ["http://[::1"]\n', "agent.controllers: expected http://host:port"),
        ('[agent]\nlisten = ""\ntoken_file = "/no/such/file"\n', "agent.token_file"),
        ('[agent]\nlisten = ""\n[agent.actions]\nreset = ["{program}"]\n', "agent.actions.reset"),
        ('[agent]\nstate_dir = "/proc/nope"\n', "agent.state_dir"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path: Path, text: str, complaint: str) -> None:
    """The command ends with one sentence that names the key, and no traceback."""
    path = tmp_path / "agent.toml"
    path.write_text(text if "state_dir" in text else text.replace("[agent]\n", f'[agent]\nstate_dir = "{tmp_path}/s"\n', 1))
    ran = subprocess.run(
        [sys.executable, "-c", "from sentinel.cli.main import main; main()", "agent", "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 1
    assert complaint in ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.stderr.strip().splitlines()[-1].startswith("Error: ")

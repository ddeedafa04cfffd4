"""What every test shares: the honest handling of programs that this machine does not have.

Tests run real servers (redis-server, prometheus, …). Where one is missing, the tests that need it are skipped by name and
listed at the end of the run with the package to install; they are never counted as passed. In CI (``CI=true``) a missing
program is an error. A test says what it needs in one of two ways: ``@pytest.mark.needs("etcd")`` or, inside a fixture,
``program("etcd")``, which also answers where the program is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import pytest

LIST = Path(__file__).parent.parent / "deploy/dev/packages.txt"
PACKAGE = dict(line.split() for line in LIST.read_text("utf-8").splitlines() if line and not line.startswith("#"))
LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = Counter()


def require(config: pytest.Config, name: str) -> Path:
    """Where the program is. Skips the running test when it is missing, or fails it in CI."""
    # Debian keeps daemons in sbin, which an ordinary user's PATH leaves out.
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"]))
    if not found:
        leave_out(config, f"needs {name} (apt-get install {PACKAGE[name]})" if name in PACKAGE else f"needs {name}")
    return Path(found)


def leave_out(config: pytest.Config, sentence: str) -> NoReturn:
    """Skips the running test, named at the end of the run; in CI it fails instead."""
    if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
        pytest.fail(f"{sentence}; in CI nothing is left out", pytrace=False)
    config.stash[LEFT_OUT][sentence] += 1
    pytest.skip(sentence)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            require(item.config, name)


@pytest.fixture(scope="session")
def program(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """``program("etcd")`` is its path; where it is missing the test is skipped by name, or fails in CI."""
    return lambda name: require(pytestconfig, name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = config.stash[LEFT_OUT]
    if left_out:
        terminalreporter.section("left out on this machine")
        for sentence, count in sorted(left_out.items()):
            terminalreporter.line(f"left out: {count} {'test' if count == 1 else 'tests'}: {sentence}")


# --- a real Prometheus, for alerts and dashboards ------------------------------------------------------------------------


def free_port() -> int:
    """A port that was free a moment ago; for servers that cannot be told to choose one and say which."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A child process with an HTTP address; ended with the test."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log

    async def ready(self, path: str) -> None:
        async with aiohttp.ClientSession() as http:
            for _ in range(600):
                if self.process.poll() is not None:
                    break
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(self.url + path) as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.05)
        raise AssertionError(f"{self.process.args!r} does not answer on {self.url}{path}: {self.log.read_text('utf-8')[-2000:]}")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    async def query(self, expr: str) -> list[dict[str, Any]]:
        """Prometheus only: the series that answer a query now. An AssertionError names the query that is wrong."""
        async with aiohttp.ClientSession() as http, http.post(self.url + "/api/v1/query", data={"query": expr}) as answer:
            told = await answer.json()
        assert told["status"] == "success", f"{expr}: {told.get('error')}"
        result = told["data"]["result"]
        return list(result) if told["data"]["resultType"] == "vector" else [{"metric": {}, "value": result}]

    async def wait_for(self, expr: str, seconds: float = 60.0) -> list[dict[str, Any]]:
        """Prometheus scrapes first some five seconds after its start, so tests wait for a series and not for /-/ready."""
        for _ in range(int(seconds / 0.2)):
            if found := await self.query(expr):
                return found
            await asyncio.sleep(0.2)
        raise AssertionError(f"no series answered {expr} within {seconds:g} s")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[str, list[str]], Server]]:
    """``serve(name, argv)`` starts a server whose arguments may say {port}; it is killed when the test ends."""
    running: list[Server] = []

    def start(name: str, argv: list[str]) -> Server:
        port = free_port()
        log = tmp_path / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen([part.replace("{port}", str(port)) for part in argv], stdout=out, stderr=out, cwd=tmp_path)
        running.append(Server(process, f"http://127.0.0.1:{port}", log))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def prometheus(
    serve: Callable[[str, list[str]], Server], program: Callable[[str], Path], tmp_path: Path
) -> Callable[[dict[str, Any]], Server]:
    """``prometheus(config)`` starts a real one with that configuration (JSON is YAML)."""

    def start(config: dict[str, Any]) -> Server:
        file = tmp_path / "prometheus.yml"
        file.write_text(json.dumps(config), "utf-8")
        return serve(
            "prometheus",
            [
                str(program("prometheus")), f"--config.file={file}", f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                "--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
                # An alert raised before Alertmanager was discovered (some 5 s) would be sent again only after a minute.
                "--rules.alert.resend-delay=1s",
            ],
        )  # fmt: skip

    return start

"""What a controller stands among, for tests: a real Redis to pause and kill, and stand-ins for what serves and who is paged.

The controller itself is the real one. Nothing here replaces a module of sentinel: ``ServingStandIn`` stands where Dynamo or
vLLM would, ``PagerStandIn`` where PagerDuty would, and both remember what was asked of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from sentinel.config import ControllerSettings, StoreSettings
from sentinel.controller.auth import digest
from sentinel.controller.commands import CommandDesk
from sentinel.controller.core import Decides
from sentinel.controller.metrics import Metrics
from sentinel.controller.seat import Controller
from sentinel.durations import Duration
from sentinel.model import Fleet, Page, Role, Worker, WorkerSeen
from sentinel.store import Store, open_store


class RedisServer:
    """A Redis of this test's own, append-only, on a unix socket; it may be paused and killed."""

    def __init__(self, program: Path) -> None:
        self._program = program
        self.directory = Path(tempfile.mkdtemp(prefix="sentinel-"))  # short enough for a unix socket's path
        self.url = f"unix://{self.directory}/redis.sock"
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        argv = [str(self._program), "--port", "0", "--unixsocket", "redis.sock", "--appendonly", "yes", "--save", ""]
        self._process = subprocess.Popen(argv, cwd=self.directory, stdout=subprocess.DEVNULL)  # noqa: ASYNC220
        await until((self.directory / "redis.sock").exists, "redis-server opens its socket")

    async def open(self, timeout_s: float = 2.0) -> Store:
        """One more connection, as another process would open it; the caller closes it."""
        return await open_store(StoreSettings(url=self.url, timeout=Duration(timeout_s)))

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process:
            self.resume()
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        if self._process:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


@dataclass
class ServingStandIn:
    """Workers that do what they are told. ``busy`` is what each has in flight (None: not measured); ``trouble`` raises."""

    busy: dict[str, int | None] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)  # workers that do not answer
    trouble: dict[str, Exception] = field(default_factory=dict)  # verb → what it raises
    gates: dict[str, asyncio.Event] = field(default_factory=dict)  # verb → waits for this first
    calls: list[tuple[str, str, str]] = field(default_factory=list)  # verb, worker, key
    learned: list[WorkerSeen] = field(default_factory=list)

    def did(self, verb: str) -> list[str]:
        """Workers a verb was carried out on, in order."""
        return [w for v, w, _ in self.calls if v == verb]

    async def _do(self, verb: str, worker: Worker, key: str = "") -> None:
        if verb in self.gates:
            await self.gates[verb].wait()
        if verb in self.trouble:
            raise self.trouble[verb]
        self.calls.append((verb, worker.name, key))

    def learn(self, seen: Iterable[WorkerSeen]) -> None:
        self.learned += seen

    async def list_workers(self) -> list[WorkerSeen]:
        return []

    async def deroute(self, worker: Worker) -> bool:
        await self._do("deroute", worker)
        return True

    async def reroute(self, worker: Worker) -> bool:
        await self._do("reroute", worker)
        return True

    async def look(self, worker: Worker) -> WorkerSeen | None:
        await self._do("look", worker)
        return None if worker.name in self.away else WorkerSeen(worker=worker.name, running=self.busy.get(worker.name, 0))

    async def in_flight(self, worker: Worker) -> int | None:
        await self._do("in_flight", worker)
        return self.busy.get(worker.name, 0)

    async def verify(self, worker: Worker, deadline_s: float) -> tuple[bool, str]:
        await self._do("verify", worker)
        return True, f"{worker.name} answered with one token"

    async def stop(self, worker: Worker, *, hard: bool, key: str) -> bool:
        await self._do("kill" if hard else "stop", worker, key)
        return True

    async def start(self, worker: Worker, *, key: str) -> bool:
        await self._do("start", worker, key)
        return True

    async def scale_to(self, pool: str, role: Role, count: int) -> bool:
        return False


@dataclass
class PagerStandIn:
    """Takes every page; ``trouble``, where set, is raised instead."""

    pages: list[Page] = field(default_factory=list)
    trouble: Exception | None = None
    tries: int = 0

    async def send(self, page: Page, still: Callable[[], bool] = lambda: True) -> bool:
        self.tries += 1
        if self.trouble is not None:
            raise self.trouble
        self.pages.append(page)
        return True


def write_tokens(directory: Path, nodes: Iterable[str], operator: str = "ada") -> dict[str, Path]:
    """Token files for a controller. A node's token is ``token-of-NODE``, the operator's ``token-of-ada``."""
    files = {"node_tokens": directory / "nodes", "operator_tokens": directory / "operators"}
    names = tuple(nodes) or ("nobody",)  # a file without a token is a mistake
    files["node_tokens"].write_text("".join(f"{n} {digest(f'token-of-{n}')}\n" for n in names), "utf-8")
    files["operator_tokens"].write_text(f"{operator} {digest(f'token-of-{operator}')}\n", "utf-8")
    return files


class Caller:
    """Calls one controller as a node or an operator; answers (status, JSON)."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self.url = session, url

    async def call(self, method: str, path: str, who: str | None = "ada", **options: Any) -> tuple[int, Any]:
        headers = ({"Authorization": f"Bearer token-of-{who}"} if who else {}) | options.pop("headers", {})
        async with self._session.request(method, self.url + path, headers=headers, **options) as response:
            body = await response.read()
            is_json = response.headers.get("Content-Type", "").startswith("application/json")
            return response.status, (await response.json() if is_json else body.decode())

    async def get(self, path: str, who: str | None = "ada", **options: Any) -> tuple[int, Any]:
        return await self.call("GET", path, who, **options)

    async def post(self, path: str, body: Any, who: str | None = "ada") -> tuple[int, Any]:
        return await self.call("POST", path, who, json=body)


@contextlib.asynccontextmanager
async def running_controller(
    store: Store,
    directory: Path,
    *,
    fleet: Fleet,
    decider: Callable[[], Decides],
    nodes: Iterable[str] = (),
    name: str = "c1",
    serving: ServingStandIn | None = None,
    pager: PagerStandIn | None = None,
    settings: dict[str, Any] | None = None,
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[tuple[Controller, Caller]]:
    """A real controller on an ephemeral port with a short lease, stopped when the block ends."""
    options: dict[str, Any] = {
        "name": name, "listen": "127.0.0.1:0", "journal_dir": directory / f"journal-{name}", "lease": Duration(1.0),
        "tick": Duration(0.05), "watch": Duration(0.2), **write_tokens(directory, nodes), **(settings or {}),
    }  # fmt: skip
    controller = Controller(
        ControllerSettings(**options), fleet, store=store, serving=serving or ServingStandIn(), desk=CommandDesk(),
        pager=pager or PagerStandIn(), decider=decider, metrics=Metrics(), clock=clock,
    )  # fmt: skip
    await controller.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield controller, Caller(session, controller.url)
    finally:
        await controller.stop()


async def until(true: Callable[[], Any], what: str, seconds: float = 20.0) -> None:
    """Wait until something holds; fails with what was waited for. The bound is only for a test that would hang."""
    try:
        async with asyncio.timeout(seconds):
            while not true():  # noqa: ASYNC110  (what is waited for belongs to somebody else)
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"waited {seconds:g} s in vain: {what}") from None

"""A whole site around a real Dynamo: ``sentinel controller`` and ``sentinel agent`` as processes, from files, under load.

This module exists so that the chain from a kernel line or a driver's value to a worker out of Dynamo's rotation, and back, is
proved and measured on the programs as they ship. What always holds:

* Real: ai-dynamo's frontend, discovery and workers' processes, both daemons of sentinel with their configuration files, tokens
  and store, the driver child, the programs on the agent's allow-list. Simulated: NVML's answers (``sentinel.testing.nvml``), the
  kernel log (``sentinel.testing.kmsg``), the engines (Dynamo's own), PagerDuty (``sentinel.testing.pagerduty``).
* One node holds every worker, each on a GPU of its own; an action reaches the worker's process through a program and a socket,
  and what was true at that moment is remembered (``Deed``).
* A GPU that a running worker holds cannot be reset, as with the real driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp

from probes import engine
from sentinel.decide.rules.policy_file import default_policy_text
from sentinel.model import gpu_component
from sentinel.sim import ctl
from sentinel.testing.control import Caller, RedisServer, write_tokens
from sentinel.testing.kmsg import KernelLog
from sentinel.testing.nvml_kinds import gb200_tray
from sentinel.testing.nvml_state import STATE_FILE
from sentinel.testing.pagerduty import FakePagerDuty
from tests.e2e.dynamo import Counts, DynamoRig, Mocker, free_port, rig

SENTINEL = Path(sys.executable).parent / "sentinel"
NODE = "n1"
MIGRATED = "dynamo_frontend_model_migration_total"


@dataclass
class Deed:
    """One action that the agent carried out, and how things stood just before it."""

    action: str
    target: str  # worker, or GPU
    at: float
    in_flight: int | None = None  # Dynamo's own gauge on that worker
    routable: bool | None = None  # whether the frontend still names it


@dataclass
class Site:
    """``controllers`` and the agent are processes of ours; ``deeds`` is what the agent's actions did."""

    folder: Path
    dynamo: DynamoRig
    pagerduty: FakePagerDuty
    session: aiohttp.ClientSession
    store_url: str
    deeds: list[Deed] = field(default_factory=list)
    reset_helps: bool = True
    starts_hung: bool = False  # a started worker is stopped (SIGSTOP) at once
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    callers: dict[str, Caller] = field(default_factory=dict)
    kernel: KernelLog = field(default_factory=lambda: KernelLog(first_seq=1))

    def __post_init__(self) -> None:
        self.tray = gb200_tray()
        self.pci = {w.name: gpu.pci for w, gpu in zip(self.dynamo.workers, self.tray.gpus, strict=False)}
        self._short = Path(tempfile.mkdtemp(prefix="sentinel-"))  # short enough for a unix socket's path
        self._server: asyncio.Server | None = None

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self, controllers: int, *, policy: str = "", doubtful: int = 2) -> None:
        """Everything up: the first controller leads, the agent has reported all its probes, every worker was seen."""
        self.tray.save(self.folder / "nvml.json")
        self._server = await asyncio.start_unix_server(self._act, path=self._socket)
        (self.folder / "policy.toml").write_text(policy or default_policy_text(), "utf-8")
        tokens = write_tokens(self.folder, [NODE])
        secrets = {"agent.token": f"token-of-{NODE}", "operator.token": "token-of-ada", "pagerduty.key": "R0" + "K" * 30}
        for name, secret in secrets.items():
            (self.folder / name).touch(0o600)
            (self.folder / name).write_text(secret, "utf-8")
        for n in range(1, controllers + 1):
            name, port = f"c{n}", free_port()
            self.callers[name] = Caller(self.session, f"http://127.0.0.1:{port}")
            (self.folder / f"{name}.toml").write_text(self._controller(name, port, tokens, doubtful), "utf-8")
        (self.folder / "agent.toml").write_text(self._agent(), "utf-8")
        for name in self.callers:
            await self.run(name, "controller")
            await self.plays(name, "leader" if name == "c1" else "standby")
        environment = {"SENTINEL_NVML": "sentinel.testing.nvml:from_file", STATE_FILE: str(self.folder / "nvml.json")}
        await self.run("agent", "agent", environment, (self.kernel.fd,))
        await self.until(self._watched, "the agent reports and every worker is seen")

    async def close(self) -> None:
        for name in list(self.processes):
            with contextlib.suppress(ProcessLookupError):
                self.signal(name, signal.SIGCONT)
                self.signal(name, signal.SIGTERM)
        for name, process in self.processes.items():
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                self.signal(name, signal.SIGKILL)
                await process.wait()
        if self._server:
            self._server.close()
        self.kernel.close()
        shutil.rmtree(self._short, ignore_errors=True)

    async def run(self, name: str, command: str, environment: dict[str, str] | None = None, fds: tuple[int, ...] = ()) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                SENTINEL, command, "--config", self.folder / f"{name}.toml",
                env={**os.environ, **(environment or {})}, pass_fds=fds, stdout=log, stderr=log,
            )  # fmt: skip

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    async def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        await process.wait()

    # -- faults -------------------------------------------------------------------------------------------------------

    def line(self, worker: str, xid: int, text: str) -> None:
        """One line of the GPU driver about a worker's GPU, as the kernel would log it."""
        self.kernel.write(f"NVRM: Xid (PCI:{self.pci[worker]}): {xid}, pid='<unknown>', name=<unknown>, {text}")

    def set_gpu(self, worker: str, **values: Any) -> None:
        """Change what the driver says about a worker's GPU, by the names of a reading."""
        next(g for g in self.tray.gpus if g.pci == self.pci[worker]).set(**values)
        self.tray.save(self.folder / "nvml.json")

    # -- looking ------------------------------------------------------------------------------------------------------

    async def plays(self, name: str, role: str) -> Caller:
        async def said() -> bool:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                return (await self.callers[name].get("/healthz", who=None))[1]["role"] == role
            return False

        await self.until(said, f"{name} is {role}")
        return self.callers[name]

    async def drains(self, caller: Caller | None = None) -> dict[str, dict[str, Any]]:
        """Worker → its open drain; ``state`` and ``history`` always there."""
        _, told = await (caller or self.callers["c1"]).get("/v1/status")
        return {d["worker"]: {"state": "requested", "history": [], **d} for d in told["drains"]}

    async def drain_of(self, worker: str, state: str, caller: Caller | None = None) -> dict[str, Any]:
        """The worker's drain, once it stands there."""
        found: dict[str, Any] = {}

        async def stands() -> bool:
            found.update((await self.drains(caller)).get(worker, {}))
            return found.get("state") == state

        await self.until(stands, f"{worker} is {state}")
        return found

    async def back(self, worker: str, drain: str, caller: Caller | None = None) -> dict[str, Any]:
        """The drain's last record, once it is done and the frontend routes to the worker's new process."""
        found = await self.done(worker, drain, caller)
        await self.dynamo.settle(worker)
        return found

    async def done(self, worker: str, drain: str, caller: Caller | None = None) -> dict[str, Any]:
        found: dict[str, Any] = {}

        async def done() -> bool:
            found.update((await (caller or self.callers["c1"]).get(f"/v1/drains/{drain}"))[1])
            return found.get("state") == "done"

        await self.until(done, f"{worker} is back")
        return found

    async def over(self, incident: str, caller: Caller | None = None) -> dict[str, Any]:
        """The incident, once it is closed."""
        found: dict[str, Any] = {}

        async def closed() -> bool:
            _, told = await (caller or self.callers["c1"]).get("/v1/incidents")
            found.update(next((i for i in told if i["id"] == incident), {}))
            return found.get("closed_at") is not None

        await self.until(closed, f"{incident} is over")
        return found

    async def stays_out(self, mocker: Mocker, seconds: float) -> None:
        """The worker's process of now runs, and for so long the frontend does not name it."""
        ident = ""

        async def answers() -> bool:
            nonlocal ident
            answer = await engine.ask(self.session, "GET", f"{mocker.system_url}/metrics", deadline_s=2)
            ident = engine.parse(answer.body).instance
            return bool(ident)

        await self.until(answers, f"{mocker.name} answers")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert ident not in await self.dynamo.routable(), f"{mocker.name} takes requests"
            await asyncio.sleep(0.05)

    async def gone(self, hexid: str) -> float:
        """``time.time()`` at which the frontend no longer names this instance; it is asked over and over."""
        async with asyncio.timeout(60):
            while hexid in await self.dynamo.routable():
                pass
        return time.time()

    async def in_flight(self, mocker: Mocker) -> int | None:
        answer = await engine.ask(self.session, "GET", f"{mocker.system_url}/metrics", deadline_s=2)
        return engine.parse(answer.body).in_flight

    async def migrated(self) -> float:
        """Requests that the frontend has moved to another worker, ever, before their first token or after it."""
        async with self.session.get(f"{self.dynamo.frontend}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(s.rsplit(" ", 1)[1]) for s in lines if s.startswith(MIGRATED + "{"))

    async def cli(self, *arguments: str) -> tuple[int, str]:
        """The real command line, as the operator; every controller is named."""
        named = [part for c in self.callers.values() for part in ("--controller", c.url)]
        token = ("--token-file", self.folder / "operator.token")
        process = await asyncio.create_subprocess_exec(
            SENTINEL, *arguments, *named, *token, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        out, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode()

    async def until(self, condition: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
        """Wait for an async condition; fails with what was waited for and the daemons' last words."""
        end = time.monotonic() + seconds
        while not await condition():
            if time.monotonic() > end:
                ends = {n: (self.folder / f"{n}.log").read_text(errors="replace")[-3000:] for n in ("agent", *self.callers)}
                logs = "\n".join(f"--- {name}\n{text}" for name, text in ends.items())
                raise AssertionError(f"not within {seconds:g} s: {what}; deeds: {self.deeds}\n{logs}")
            await asyncio.sleep(0.02)

    async def _watched(self) -> bool:
        told = (await self.callers["c1"].get("/v1/status"))[1]
        probes = next((n["probes"] for n in told["nodes"] if n["node"] == NODE), {})
        looked = set(probes) >= {"gpu", "kernel_log", "worker"} and all(probes.values())
        return looked and all(w["reachable"] for w in told["workers"])

    # -- the agent's hands --------------------------------------------------------------------------------------------

    @property
    def _socket(self) -> str:
        return str(self._short / "hands")

    async def _act(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(await reader.readline())
        try:
            answer = {"ok": True, "detail": await self._do(asked["do"], *asked["args"])}
        except (OSError, AssertionError) as error:
            answer = {"ok": False, "detail": str(error)}
        with contextlib.suppress(OSError):
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def _do(self, action: str, target: str) -> str:
        deed = Deed(action, target, time.time())
        self.deeds.append(deed)
        if action == "reset_gpu":
            (worker,) = [w for w, pci in self.pci.items() if pci == target]
            if self.dynamo.mocker(worker).running:
                raise OSError(f"{target} is in use by {worker}")
            if self.reset_helps:
                self.set_gpu(worker, rows_pending=0)
            return f"{target}: reset (simulated)"
        mocker = self.dynamo.mocker(target)
        if action == "start_worker":
            if not mocker.running:
                await self.dynamo.spawn(target)
                if self.starts_hung:
                    await self.dynamo.kill(target, signal.SIGSTOP)
            return f"{target}: pid {mocker.pid}"
        deed.routable = mocker.hexid in await self.dynamo.routable()
        deed.in_flight = await self.in_flight(mocker)
        await self.dynamo.kill(target, signal.SIGKILL if action == "kill_worker" else signal.SIGTERM)
        return f"{target}: ended"

    # -- files --------------------------------------------------------------------------------------------------------

    def _controller(self, name: str, port: int, tokens: dict[str, Path], doubtful: int) -> str:
        workers = "".join(
            f'[[workers]]\nname = "{w.name}"\npool = "chat"\nadapter = "dynamo"\nurl = "{w.system_url}"\n'
            f'system_url = "{w.system_url}"\ngpus = ["{gpu_component(NODE, self.pci[w.name])}"]\n'
            for w in self.dynamo.workers
        )
        return f"""
            [controller]
            name = "{name}"
            listen = "127.0.0.1:{port}"
            lease = "1s"
            policy = "{self.folder}/policy.toml"
            node_tokens = "{tokens["node_tokens"]}"
            operator_tokens = "{tokens["operator_tokens"]}"
            journal_dir = "{self.folder}/journal-{name}"
            [store]
            url = "{self.store_url}"
            [paging]
            pagerduty_key_file = "{self.folder}/pagerduty.key"
            pagerduty_url = "{self.pagerduty.url}"
            [dynamo]
            discovery = "{self.dynamo.discovery}"
            frontend = "{self.dynamo.frontend}"
            [[pools]]
            name = "chat"
            max_doubtful_drains = {doubtful}
            [[nodes]]
            name = "{NODE}"
            """ + workers

    def _agent(self) -> str:
        nowhere = self.folder / "sys"  # the host's own GPUs, if it has any, are not this node's
        act = [sys.executable, "-I", "-S", ctl.__file__, self._socket]
        actions = "".join(
            f"{name} = {json.dumps([*act, name, argument])}\n"
            for name, argument in (
                ("start_worker", "{worker}"), ("stop_worker", "{worker}"), ("kill_worker", "{worker}"), ("reset_gpu", "{gpu}"),
            )
        )  # fmt: skip
        looked_at = ", ".join(
            f'{{ name = "{w.name}", engine = "dynamo", system_url = "{w.system_url}" }}' for w in self.dynamo.workers
        )
        return f"""
            [agent]
            node = "{NODE}"
            controllers = {json.dumps([c.url for c in self.callers.values()])}
            token_file = "{self.folder}/agent.token"
            state_dir = "{self.folder}/agent"
            listen = "127.0.0.1:0"
            snapshot = "1s"
            sys = "{nowhere}"
            [agent.expected]
            gpus = {len(self.tray.gpus)}
            nvlinks = 18
            [agent.probes.gpu]
            interval = "500ms"
            [agent.probes.kernel_log]
            fd = {self.kernel.fd}
            [agent.probes.worker]
            interval = "1s"
            scan = false
            frontend = "{self.dynamo.frontend}"
            workers = [{looked_at}]
            [agent.actions]
            """ + actions


@contextlib.asynccontextmanager
async def site(
    folder: Path, discovery: Literal["file", "etcd"] = "file", *, etcd: Path | None = None, redis: Path | None = None,
    controllers: int = 1, policy: str = "", doubtful: int = 2,
) -> AsyncIterator[Site]:  # fmt: skip
    """Three workers on one node. ``redis``: the program to use as the store; without it the embedded one is used."""
    async with contextlib.AsyncExitStack() as stack:
        dynamo = await stack.enter_async_context(rig(folder, 3, discovery, etcd=etcd))
        pagerduty = await stack.enter_async_context(FakePagerDuty())
        session = await stack.enter_async_context(aiohttp.ClientSession())
        url = f"embedded:{folder / 'store'}"
        if redis:
            server = RedisServer(redis)
            stack.callback(server.close)
            await server.start()
            url = server.url
        made = Site(folder, dynamo, pagerduty, session, url)
        stack.push_async_callback(made.close)
        await made.start(controllers, policy=policy, doubtful=doubtful)
        yield made


@contextlib.asynccontextmanager
async def traffic(dynamo: DynamoRig, *, streams: int = 20, tokens: int = 100) -> AsyncIterator[Counts]:
    """Streaming clients from beginning to end of the block; afterwards every request has ended and is counted."""
    counts = Counts()
    load = asyncio.create_task(dynamo.load(streams, tokens, counts=counts))
    try:
        await asyncio.sleep(0.5)
        yield counts
    finally:
        counts.ended = True
        await load

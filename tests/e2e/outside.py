"""A site seen from outside: two controller processes on a Redis that fails over, and an observer of what really happens.

The controllers and all of Redis are real processes. The nodes' agents, the workers and the pager's receiver are played by this
module: an agent repeats what it knows to whoever leads and carries out each command once, answering a repeated one from memory,
as the real one does. The observer knows only what happened outside (what was stopped, killed, reset, started, paged and
published), never what a controller thinks. ``broken`` is what must not have happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from sentinel.model import Action, Component, Finding, Kind, Report, Routes, Severity, gpu_component
from sentinel.store import Store
from sentinel.testing.control import Caller, write_tokens
from sentinel.testing.decisions import PCIS
from sentinel.testing.failover import RedisPair, free_ports
from tests.e2e.played import Played

SENTINEL = Path(sys.executable).parent / "sentinel"
LEASE_S = 1.0
WORKERS = 6
FLOOR = 0.5
REPEATABLE = ("start_worker",)  # an engine that does not come up is started again


class Node:
    """One node: a GPU, the worker on it, and the agent that speaks for both."""

    def __init__(self, number: int) -> None:
        self.name, self.worker = f"t{number:02d}", f"w{number}"
        self.gpu: Component = gpu_component(self.name, PCIS[0])
        self.alive = True
        self.running = 0
        self.doubt_since = 0.0  # a row remap is pending since then; 0: none
        self.dead_since = 0.0  # the GPU fell off the bus then; 0: it did not
        self.seq = 0
        self.answers: dict[str, dict[str, Any]] = {}  # command id → result, as the agent's own record of what it carried out
        self.did: list[tuple[str, str]] = []  # action, key
        self.faults = 0

    def report(self) -> Any:
        self.seq += 1
        now = time.time()
        remap = Finding(
            id=f"{self.name}:remap", check="gpu.row_remap_pending", component=self.gpu, at=now, present=self.doubt_since > 0,
            severity=Severity.FATAL, action=Action.RESET_GPU, summary="a row remap waits for a reset",
        )  # fmt: skip
        found = [remap]
        if self.dead_since:
            found.append(
                Finding(
                    id=f"{self.name}:boot:79", check="xid.79", component=self.gpu, at=self.dead_since, kind=Kind.EVENT,
                    severity=Severity.FATAL, action=Action.REBOOT_NODE, summary="GPU has fallen off the bus",
                )
            )  # fmt: skip
        report = Report(node=self.name, session="s", seq=self.seq, at=now, snapshot=True, findings=tuple(found))
        return json.loads(msgspec.json.encode(report))

    def carry_out(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["id"] not in self.answers:
            action = command["action"]
            self.did.append((action, command["id"]))
            if action in ("stop_worker", "kill_worker"):
                self.alive = False
            elif action == "start_worker":
                self.alive = True
            elif action == "reset_gpu":
                self.doubt_since = 0.0
            self.answers[command["id"]] = {"id": command["id"], "node": self.name, "ok": True, "detail": "done"}
        return self.answers[command["id"]]


class Outside(Played):
    """The site and its observer."""

    def __init__(self, directory: Path, pair: RedisPair, session: aiohttp.ClientSession) -> None:
        super().__init__()
        self.directory, self.pair, self.session = directory, pair, session
        self.nodes = {f"w{n}": Node(n) for n in range(1, WORKERS + 1)}
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.callers: dict[str, Caller] = {}
        self.hands_tied = False  # agents fetch no commands for now
        self.tables: list[Routes] = []
        self.broken: list[str] = []
        self.held_in: set[str] = set()
        self._pools: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stores: list[Store] = []

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self.serve()
        tokens = write_tokens(self.directory, [n.name for n in self.nodes.values()])
        fleet = "".join(
            f'[[nodes]]\nname = "{n.name}"\n[[workers]]\nname = "{n.worker}"\npool = "chat"\nurl = "{self.url}/{n.worker}"\n'
            f'gpus = ["{n.gpu}"]\n'
            for n in self.nodes.values()
        )
        for name, port in zip(("c1", "c2"), free_ports(2), strict=True):
            self.callers[name] = Caller(self.session, f"http://127.0.0.1:{port}")
            (self.directory / f"{name}.toml").write_text(
                f"""
                [controller]
                name = "{name}"
                listen = "127.0.0.1:{port}"
                lease = "{int(LEASE_S * 1000)}ms"
                tick = "100ms"
                watch = "500ms"
                node_tokens = "{tokens["node_tokens"]}"
                operator_tokens = "{tokens["operator_tokens"]}"
                journal_dir = "{self.directory}/journal-{name}"
                [store]
                url = "{self.pair.url}"
                timeout = "400ms"
                [paging]
                webhook_url = "{self.url}/page"
                [[pools]]
                name = "chat"
                floor = {FLOOR}
                max_doubtful_drains = 20
                max_domain_share = 1.0
                """
                + fleet,
                "utf-8",
            )
        await self.begin("c1")
        await self.leads("c1")
        await self.begin("c2")
        await self.role_is("c2", "standby")
        for _ in range(2):  # two readers of the route table, as two gateways would be
            self._stores.append(await self.pair.open())
            self._tasks.append(asyncio.create_task(self._read_routes(self._stores[-1])))
        self._tasks += [asyncio.create_task(self._agent(node)) for node in self.nodes.values()]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for name in list(self.processes):
            with contextlib.suppress(ProcessLookupError):
                self.wake(name)
                await self.kill(name)
        for store in self._stores:
            await store.close()
        await self.unserve()

    # -- controllers --------------------------------------------------------------------------------------------------

    async def begin(self, name: str) -> None:
        log = (self.directory / f"{name}.log").open("ab")
        argv = [SENTINEL, "controller", "--config", self.directory / f"{name}.toml"]
        self.processes[name] = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log)
        log.close()

    async def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        await process.wait()

    def freeze(self, name: str) -> None:
        os.kill(self.processes[name].pid, signal.SIGSTOP)

    def wake(self, name: str) -> None:
        os.kill(self.processes[name].pid, signal.SIGCONT)

    async def role(self, name: str) -> str:
        try:
            async with asyncio.timeout(0.5):
                return str((await self.callers[name].get("/healthz", who=None))[1]["role"])
        except (aiohttp.ClientError, OSError, TimeoutError):
            return "away"

    async def role_is(self, name: str, role: str) -> None:
        async with asyncio.timeout(40):
            while await self.role(name) != role:
                await asyncio.sleep(0.02)

    async def leads(self, name: str) -> Caller:
        await self.role_is(name, "leader")
        return self.callers[name]

    async def leader(self) -> tuple[str, Caller]:
        """Whoever leads, waited for."""
        async with asyncio.timeout(40):
            while True:
                for name, caller in self.callers.items():
                    if name in self.processes and await self.role(name) == "leader":
                        return name, caller
                await asyncio.sleep(0.02)

    async def asked(self, body: dict[str, Any]) -> None:
        """An operator asks; asks again while nobody leads."""
        async with asyncio.timeout(40):
            while True:
                _, caller = await self.leader()
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with asyncio.timeout(3):
                        if (await caller.post("/v1/ask", body))[0] == 200:
                            return
                await asyncio.sleep(0.1)

    async def drains(self) -> dict[str, dict[str, Any]]:
        """worker → its drain, of whoever leads; empty when nobody can say."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, KeyError, TypeError):
            async with asyncio.timeout(3):
                _, caller = await self.leader()
                return {d["worker"]: d for d in (await caller.get("/v1/status"))[1]["drains"]}
        return {}

    async def until(self, true: Callable[[], Any], what: str, seconds: float = 40.0) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not true():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"waited {seconds:g} s in vain: {what}; {self.story()}") from None

    # -- faults -------------------------------------------------------------------------------------------------------

    def doubt(self, worker: str) -> None:
        """A state that is drained for on suspicion, within the budget, and that a reset mends."""
        self.nodes[worker].doubt_since = time.time()
        self.nodes[worker].faults += 1

    def dies(self, worker: str) -> None:
        """A fact: the GPU is gone, and a reboot of its node is left to a person."""
        self.nodes[worker].dead_since = time.time()
        self.nodes[worker].faults += 1

    def state(self, worker: str) -> str:
        """Where the newest published table has the worker."""
        entries = [e for p in (self.tables[-1].pools if self.tables else ()) for e in p.workers]
        return next((e.state.value for e in entries if e.worker == worker), "unknown")

    def did(self, worker: str) -> list[str]:
        return [action for action, _ in self.nodes[worker].did]

    def dedup_keys(self) -> Counter[str]:
        return Counter(str(p.get("dedup_key") or p.get("id")) for p in self.accepted if p.get("event", "trigger") == "trigger")

    def story(self) -> str:
        acted = {n.worker: n.did for n in self.nodes.values() if n.did}
        return f"acted {acted}; pages {[(p.get('event'), p.get('dedup_key') or p.get('id')) for p in self.accepted]}"

    def check(self) -> None:
        """What must hold at the end, whatever happened. Raises AssertionError with the story."""
        for node in self.nodes.values():
            for action, times in Counter(self.did(node.worker)).items():
                if times > node.faults and action not in REPEATABLE:
                    self.broken.append(f"{action} of {node.worker} {times} times for {node.faults} faults")
            if node.worker in self.held_in and node.did:
                self.broken.append(f"{node.worker} was held in by a person, and {self.did(node.worker)} was done to it")
        faults = sum(n.faults for n in self.nodes.values())
        if len(self.dedup_keys()) > faults:
            self.broken.append(f"{len(self.dedup_keys())} alerts for {faults} faults")
        assert not self.broken, f"{self.broken}; {self.story()}"

    # -- what is played -----------------------------------------------------------------------------------------------

    async def _agent(self, node: Node) -> None:
        """Tell whoever leads what is so, and do what it asks for."""
        turn = 0
        names = list(self.callers)
        while True:
            caller = self.callers[names[turn % len(names)]]
            try:
                async with asyncio.timeout(1.5):
                    status, _ = await caller.post("/v1/report", node.report(), who=node.name)
                    if status == 200 and not self.hands_tied:
                        _, commands = await caller.get(f"/v1/commands?node={node.name}&wait=0", who=node.name)
                        for command in commands if isinstance(commands, list) else ():
                            await caller.post("/v1/results", node.carry_out(command), who=node.name)
                turn += status != 200
            except (aiohttp.ClientError, OSError, TimeoutError):
                turn += 1
            await asyncio.sleep(0.15)

    async def _read_routes(self, store: Store) -> None:
        newest = -1
        async for table in store.watch_routes(0.3):
            if table.version <= newest:
                self.broken.append(f"a reader saw table {table.version} after {newest}")
            newest = table.version
            if not self.tables or table.version > self.tables[-1].version:
                self._judge(table)
                self.tables.append(table)

    def _judge(self, table: Routes) -> None:
        """The floor: nobody is newly taken out on doubt when that leaves less than the pool's floor."""
        before = {e.worker: e.state.value for t in self.tables[-1:] for p in t.pools for e in p.workers}
        now = {e.worker: e.state.value for p in table.pools for e in p.workers}
        left = [w for w, state in now.items() if state != "active" and before.get(w, "active") == "active"]
        doubtful = [w for w in left if not self.nodes[w].dead_since]
        active = sum(state == "active" for state in now.values())
        if doubtful and active < FLOOR * WORKERS:
            self.broken.append(f"table {table.version} takes {doubtful} out on doubt and leaves {active} of {WORKERS}")
        self.broken += [f"table {table.version} takes {w} out, which a person holds in" for w in left if w in self.held_in]

    def running(self, worker: str) -> int | None:
        node = self.nodes[worker]
        return node.running if node.alive else None


@contextlib.asynccontextmanager
async def outside(program: Path, directory: Path) -> AsyncIterator[Outside]:
    """A running site; its observer's verdict is asked for when the block ends without an error."""
    pair = RedisPair(program)
    try:
        await pair.start()
        async with aiohttp.ClientSession() as session:
            site = Outside(directory, pair, session)
            try:
                await site.start()
                yield site
                site.check()
            finally:
                await site.close()
    finally:
        pair.close()

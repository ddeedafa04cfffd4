"""Eighteen agents in one process: the real agent for every tray of the simulated rack.

This module exists so that the demo's findings come from the real agent, its schedule, spool and link, fed by simulated
readings. What always holds:

* Each agent has its own node name, token, state folder, kernel log and allow-list, as on eighteen hosts.
* The allow-list runs real programs (``ctl.py``): commands reach the simulated workers and GPUs like any other action.
* A GPU that a running worker holds cannot be reset, as with the real driver.
* A reboot is told to have begun, then takes the agent with it and comes back with another boot id and an empty kernel log.
* The process ends when its standard input closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from prometheus_client import CollectorRegistry

from probes import Context, Probe
from probes.gpu import GpuProbe
from probes.imex import ImexProbe
from probes.kernel_log import KernelLogProbe
from probes.worker import WorkerProbe
from sentinel.agent.assembly import Agent
from sentinel.config import AgentSettings
from sentinel.durations import parse_duration
from sentinel.logs import configure
from sentinel.sim import ctl
from sentinel.sim.files import IMEX, PROBE, SNAPSHOT, imex_tool, write_imex, write_proc
from sentinel.sim.probes import SimDriver
from sentinel.sim.rack import GPUS, NODES, PLACES, NoSuchGpu, Rack, workers_on
from sentinel.testing.kmsg import KernelLog

RESET_S = 0.5  # how long a simulated GPU reset takes
REBOOT_S = 2.0
# The worker probe's times, shortened like the rest of the demo (shipped: 10 s, 120 s, 5 s).
WORKER = {"scan": False, "stall_s": 1.5, "warmup_s": 4.0, "canary_s": 1.5, "deadline_s": 1.0}


class Refused(Exception):
    """The command cannot be carried out; the sentence says why."""


class Node:
    """One tray: its kernel log, and the agent that runs on it now, if any."""

    def __init__(
        self, name: str, folder: Path, rack: Rack, *, controller: str, urls: dict[str, str], http: aiohttp.ClientSession, imex: bool
    ) -> None:
        self.name = name
        self.kernel = KernelLog()
        self._rack = rack
        self._http = http
        self._imex = {"tool": str(imex_tool(folder, name))} if imex else {}
        self._urls = {w: urls[w] for w in workers_on(name) if PLACES[w].nodes[0] == name}  # the first node looks after its group
        python = (sys.executable, "-I", "-S", str(Path(ctl.__file__)))
        workers, agents = str(folder / "workers.sock"), str(folder / "agents.sock")
        self.settings = AgentSettings(
            node=name,
            controllers=(controller,),
            token_file=folder / f"{name}.token",
            state_dir=folder / "state" / name,
            proc=folder / "proc" / name,  # names, addresses and the boot are the tray's, not this host's
            listen="127.0.0.1:0",
            snapshot=parse_duration(SNAPSHOT),
            probes={"gpu": {"interval": PROBE}, "worker": {"interval": PROBE}, **({"imex": {"interval": IMEX}} if imex else {})},
            expected={"gpus": len(GPUS), "nvlinks": 18, **({"imex_nodes": len(NODES)} if imex else {})},
            actions={
                "start_worker": (*python, workers, "start", "{worker}"),
                "stop_worker": (*python, workers, "stop", "{worker}"),
                "kill_worker": (*python, workers, "kill", "{worker}"),
                "reset_gpu": (*python, agents, "reset_gpu", name, "{gpu}"),
                "reboot_node": (*python, agents, "reboot_node", name),
            },
        )
        self.agent: Agent | None = None
        self.boots = 1

    def _probes(self) -> list[Probe]:
        def context(**options: Any) -> Context:
            state = self.settings.state_dir
            nowhere = state / "sys"  # the host's own GPUs, if it has any, are not this rack's
            driver = SimDriver(self._rack, self.name)
            return Context(node=self.name, sys=nowhere, proc=self.settings.proc, state=state, driver=driver, options=options)

        workers = [{"name": w, "url": url} for w, url in self._urls.items()]
        return [
            KernelLogProbe(context(fd=self.kernel.fd)),
            GpuProbe(context()),
            WorkerProbe(context(workers=workers, **WORKER)),
            *([ImexProbe(context(**self._imex), hostname=self.name)] if self._imex else []),
        ]

    async def start(self) -> None:
        if self.agent is None:
            self.settings.state_dir.mkdir(parents=True, exist_ok=True)
            write_proc(self.settings.proc, self.name, self.boots)
            self.agent = Agent(self.settings, self._probes(), session=self._http, registry=CollectorRegistry())
            await self.agent.start()

    async def stop(self) -> None:
        agent, self.agent = self.agent, None
        if agent:
            await agent.stop()

    def boot(self) -> None:
        """The next boot begins, nothing runs yet: what the last one's kernel had to say is gone with it."""
        self.boots += 1
        self.kernel.close()
        self.kernel = KernelLog()


class Trays:
    """All nodes and the door through which the stage and the agents' actions reach the rack."""

    def __init__(self, folder: Path, controller: str, urls: dict[str, str], http: aiohttp.ClientSession, *, imex: bool) -> None:
        self.rack = Rack()
        self._folder = folder
        if imex:
            write_imex(folder, set())
        self.nodes = {n: Node(n, folder, self.rack, controller=controller, urls=urls, http=http, imex=imex) for n in NODES}
        self._workers = str(folder / "workers.sock")
        self._rebooting: dict[str, asyncio.Task[None]] = {}  # node → what brings it back
        self._verbs: dict[str, Callable[..., Awaitable[str]]] = {
            "list": self._list, "kernel": self._kernel, "imex": self._imex,
            "set_gpu": self._set_gpu, "set_driver": self._set_driver, "mend_node": self._mend_node,
            "silence": self._silence, "revive": self._revive, "reset_gpu": self._reset_gpu, "reboot_node": self._reboot_node,
        }  # fmt: skip

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, then close."""
        try:
            asked = json.loads(await reader.readline())
            verb = self._verbs.get(asked["do"])
            if verb is None:
                raise Refused(f"no such verb: {asked['do']!r}; wanted one of {', '.join(self._verbs)}")
            began = time.time()
            ports = {n: node.agent.port for n, node in self.nodes.items() if node.agent}
            answer: dict[str, Any] = {"ok": True, "detail": await verb(*asked["args"]), "at": began, "ports": ports}
        except (Refused, NoSuchGpu, OSError, ValueError, KeyError, TypeError) as error:
            said = isinstance(error, Refused | NoSuchGpu | OSError)
            answer = {"ok": False, "detail": str(error) if said else f"not a command: {error!r}"}
        with contextlib.suppress(OSError):
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    def _node(self, name: str) -> Node:
        if name not in self.nodes:
            raise Refused(f"no node is called {name!r}")
        return self.nodes[name]

    async def _list(self) -> str:
        return f"{sum(node.agent is not None for node in self.nodes.values())} agents run"

    async def _kernel(self, node: str, text: str) -> str:
        self._node(node).kernel.write(text)
        return f"{node}: {text}"

    async def _imex(self, *lost: str) -> str:
        await asyncio.to_thread(write_imex, self._folder, set(lost))
        return f"IMEX has lost {', '.join(lost) or 'nobody'}"

    async def _set_gpu(self, node: str, pci: str, fields: str) -> str:
        self.rack.set_gpu(node, pci, json.loads(fields))
        return f"{node}/gpu@{pci}: {fields}"

    async def _set_driver(self, node: str, fields: str) -> str:
        self.rack.set_driver(node, json.loads(fields))
        return f"{node}: {fields}"

    async def _mend_node(self, node: str) -> str:
        self.rack.mend_node(node)
        return f"{node}: healthy"

    async def _silence(self, node: str) -> str:
        await self._node(node).stop()
        return f"{node}: no agent"

    async def _revive(self, node: str) -> str:
        await self._node(node).start()
        return f"{node}: agent runs"

    async def _reset_gpu(self, node: str, pci: str) -> str:
        """Refuses, like the real driver, while a process holds the GPU and when the GPU is off the bus."""
        held = await self._running(node)
        if held:
            raise Refused(f"{node}/gpu@{pci} is in use by {', '.join(held)}")
        if self.rack.lost(node, pci):
            raise Refused(f"{node}/gpu@{pci} is off the bus; a reset cannot reach it")
        await asyncio.sleep(RESET_S)
        self.rack.mend_gpu(node, pci)
        return f"{node}/gpu@{pci}: reset (simulated)"

    async def _reboot_node(self, node: str) -> str:
        """Like ``systemctl reboot``, answers when it has begun: the agent that asked goes with its node."""
        held = await self._running(node)
        if held:
            raise Refused(f"{node} still serves: {', '.join(held)}")
        if node in self._rebooting:
            raise Refused(f"{node} reboots already")
        task = self._rebooting[node] = asyncio.create_task(self._reboots(node), name=f"reboot {node}")
        task.add_done_callback(lambda _: self._rebooting.pop(node, None))
        return f"{node}: reboots (simulated)"

    async def _reboots(self, name: str) -> None:
        node = self._node(name)
        await node.stop()
        await asyncio.sleep(REBOOT_S)
        self.rack.mend_node(name)
        for worker in workers_on(name):
            await asyncio.to_thread(ctl.ask, self._workers, "mend", worker)
        node.boot()
        await node.start()

    async def stop(self) -> None:
        """End every agent; a node that reboots stays down."""
        for task in list(self._rebooting.values()):
            task.cancel()
        await asyncio.gather(*self._rebooting.values(), *(n.stop() for n in self.nodes.values()), return_exceptions=True)

    async def _running(self, node: str) -> list[str]:
        listed = await asyncio.to_thread(ctl.ask, self._workers, "list")
        return [w for w in workers_on(node) if listed["workers"][w]["pid"] is not None]


async def run(folder: Path, door: socket.socket) -> None:
    """Run all agents until standard input closes or SIGTERM comes."""
    given = json.loads((folder / "agents.json").read_text("utf-8"))
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def lifeline() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            ended.set()

    loop.add_reader(sys.stdin.fileno(), lifeline)
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        trays = Trays(folder, given["controller"], given["workers"], http, imex=given["imex"])
        server = await asyncio.start_unix_server(trays.serve, sock=door)
        try:
            for node in trays.nodes.values():
                await node.start()
            await ended.wait()
        finally:
            server.close()
            await trays.stop()


def main(argv: list[str]) -> None:
    """``nodes.py FOLDER DOOR_FD``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the demo, which then stops everything in order
    configure("json", "warning")
    with socket.socket(fileno=int(argv[1])) as door:
        uvloop.run(run(Path(argv[0]), door))


if __name__ == "__main__":
    main(sys.argv[1:])

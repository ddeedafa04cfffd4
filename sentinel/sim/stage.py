"""The stage: starts the whole simulated rack around the real controller, agents and store, and stops every part of it.

This module exists so that the demo, the tests and the benchmarks stand on one set-up: ``async with Stage() as stage``.
What always holds:

* Real: the controller (``sentinel controller`` as a process), the embedded store that it runs, eighteen agents, the
  probes' judgement, serving adapters, routing, paging. Simulated: what ``story.SIMULATED`` names.
* Everything lies in one private folder and every process is known to the janitor, so that nothing is left behind however
  the stage ends, also when it is killed.
* Where the demo runs faster than what is shipped, ``faster`` says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from sentinel.config import StoreSettings
from sentinel.gateway.routing import candidates
from sentinel.model import Drain, Incident, Role, RouteEntry, Routes
from sentinel.sim import ctl
from sentinel.sim.client import Load, Record, Traffic
from sentinel.sim.crew import Crew
from sentinel.sim.engine import Shape
from sentinel.sim.files import FASTER, IMEX, Tokens, write_controller, write_tokens
from sentinel.sim.rack import MODEL, NODES, PLACES
from sentinel.store import Store, open_store
from sentinel.testing.pagerduty import FakePagerDuty

START_S = 20.0  # until the controller leads and every node has reported


class StageError(Exception):
    """Something of the stage does not work; the sentence says what was tried and what came back."""


class Stage:
    """``load``: the traffic, which starts with ``start_traffic``. ``faster``: durations of the policy to shorten.

    ``imex``: the agents watch an IMEX domain, too (a tool to be run on every tray, every second).
    """

    def __init__(self, load: Load | None = None, *, faster: Mapping[str, str] = FASTER, imex: bool = False) -> None:
        self.load = load or Load()
        self._imex = imex
        self.faster: dict[str, str] = dict(faster)
        self.url = ""  # of the controller
        self.routes: Routes | None = None  # the newest pushed table
        self.pages: list[dict[str, Any]] = []  # what the simulated pager took, in order; each with "at" and "event"
        self.tokens: Tokens
        self.traffic: Traffic
        self.on_routes: Callable[[Routes | None, Routes], None] = lambda old, new: None
        self.on_page: Callable[[dict[str, Any]], None] = lambda page: None
        self.on_first_token: Callable[[Record], None] = lambda record: None
        self._folder: Path
        self._http: aiohttp.ClientSession
        self._crew: Crew
        self._exits = contextlib.AsyncExitStack()

    @property
    def folder(self) -> Path:
        return self._folder

    # -- starting and stopping --------------------------------------------------------------------------------------

    async def __aenter__(self) -> Stage:
        try:
            await self._start()
        except BaseException:
            await self._exits.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="sentinel-demo-", dir=_short_tmp()))
        self._crew = await self._exits.enter_async_context(Crew(self._folder))
        self._http = await self._exits.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)))
        self.tokens = write_tokens(self._folder)
        urls = await self._start_workers()
        pager = await self._start_pager()
        listen = f"127.0.0.1:{_free_port()}"
        self.url = f"http://{listen}"
        self.faster = write_controller(self._folder, listen=listen, urls=urls, pager=pager, faster=self.faster)
        if self._imex:
            self.faster["imex probe's interval"] = f"30s → {IMEX}"
        run = ("-c", "from sentinel.cli.main import main; main()", "controller", "--config")
        await self._crew.spawn("controller", *run, str(self._folder / "controller.toml"))
        await self._start_agents(urls)
        await self._all_up()
        await self._follow_routes()

    async def _start_workers(self) -> dict[str, str]:
        shapes = [Shape(p.name, MODEL, ranks=p.ranks) for p in PLACES.values()]
        (self._folder / "shapes.json").write_bytes(msgspec.json.encode(shapes))
        await self._crew.open_door("workers", "sentinel.sim.workers", str(self._folder / "shapes.json"))
        listed = await self.worker_host("list")
        for place in PLACES.values():
            if not place.standby:
                await self.worker_host("start", place.name)
        return {name: str(w["url"]) for name, w in listed["workers"].items()}

    async def _start_agents(self, urls: Mapping[str, str]) -> None:
        given = {"controller": self.url, "workers": dict(urls), "imex": self._imex}
        (self._folder / "agents.json").write_text(json.dumps(given), "utf-8")
        await self._crew.open_door("agents", "sentinel.sim.nodes", str(self._folder))

    async def _start_pager(self) -> str:
        """The simulated pager; what it accepts becomes ``pages``."""

        def take(event: dict[str, Any]) -> None:
            payload = event.get("payload") or {}
            page = {"at": time.time(), "event": event["event_action"], "dedup_key": event["dedup_key"],
                    "urgency": payload.get("severity", ""), "summary": payload.get("summary", ""),
                    "runbook": next((link["href"] for link in event.get("links", [])), "")}  # fmt: skip
            self.pages.append(page)
            self.on_page(page)

        pager = FakePagerDuty(take)
        await self._exits.enter_async_context(pager)
        return pager.url

    async def _all_up(self) -> None:
        last = time.monotonic() + START_S
        missing = "the controller does not answer"
        while time.monotonic() < last:
            for name, code in self._crew.ended().items():
                raise StageError(f"{name} ended with status {code}: {self._crew.last_words(name)}")
            try:
                status = await self.status()
            except StageError as error:
                missing = str(error)
            else:
                silent = [n for n in NODES if not _reported(status, n)]
                if not silent:
                    return
                missing = f"no report yet from {', '.join(silent)}"
            await asyncio.sleep(0.05)
        said = self._crew.last_words("controller")
        raise StageError(f"the stage is not up after {START_S:g} s: {missing}; the controller says: {said}")

    async def _follow_routes(self) -> None:
        store = await open_store(StoreSettings(url=f"unix://{self._folder / 'store' / 'valkey.sock'}"))
        self._exits.push_async_callback(store.close)
        first = asyncio.Event()

        async def follow(store: Store) -> None:
            async for table in store.watch_routes():
                old, self.routes = self.routes, table
                self.on_routes(old, table)
                first.set()

        task = asyncio.create_task(follow(store), name="routes")
        self._exits.push_async_callback(_cancelled, task)
        try:
            async with asyncio.timeout(START_S):
                await first.wait()
        except TimeoutError:
            raise StageError("no route table was published") from None

    async def start_traffic(self) -> None:
        def first_token(record: Record) -> None:  # looked up at each call: a story may take its place later
            self.on_first_token(record)

        self.traffic = Traffic(self.pick, self.load, model=MODEL, on_first_token=first_token)
        await self.traffic.start()
        self._exits.push_async_callback(self.traffic.stop, 0.0)

    def pick(self, role: Role, session: str, left_out: frozenset[str]) -> RouteEntry | None:
        """Where a client sends: the gateway's own routing over the newest pushed table; a session stays with its decoder."""
        if self.routes is None:
            return None
        home = self.traffic.homes.get(session, "") if role is Role.DECODE else ""
        found = candidates(self.routes, role, session, load=self.traffic.in_flight, home=home)
        return next((entry for entry in found if entry.worker not in left_out), None)

    # -- the rack's handles -----------------------------------------------------------------------------------------

    async def worker_host(self, verb: str, *args: str) -> dict[str, Any]:
        return await self._told("workers", verb, *args)

    async def rack(self, verb: str, *args: str) -> dict[str, Any]:
        return await self._told("agents", verb, *args)

    async def _told(self, door: str, verb: str, *args: str) -> dict[str, Any]:
        try:
            answer = await asyncio.to_thread(ctl.ask, str(self._folder / f"{door}.sock"), verb, *args)
        except OSError as error:
            raise StageError(f"{door}: {verb} {' '.join(args)}: {error}: {self._crew.last_words(door)}") from None
        if not answer.get("ok"):
            raise StageError(f"{door}: {answer.get('detail')}")
        return answer

    async def inject_kernel_line(self, node: str, text: str) -> float:
        """Write one record into the node's simulated kernel log (facility kern); when, in seconds since the epoch."""
        return float((await self.rack("kernel", node, text))["at"])

    async def set_gpu(self, node: str, pci: str, **fields: Any) -> None:
        """Let fields of a GPU's reading differ (names: ``sim.probes.healthy_gpu``; ``lost=True``: off the bus)."""
        await self.rack("set_gpu", node, pci, json.dumps(fields))

    async def set_driver(self, node: str, **fields: Any) -> None:
        """Let the driver's whole answer differ (``error=…``, ``gpus=[]``)."""
        await self.rack("set_driver", node, json.dumps(fields))

    async def mend_node(self, node: str) -> None:
        await self.rack("mend_node", node)

    async def silence_agent(self, node: str) -> None:
        """End the node's agent without a word; its workers serve on."""
        await self.rack("silence", node)

    async def revive_agent(self, node: str) -> None:
        await self.rack("revive", node)

    async def agent_urls(self) -> dict[str, str]:
        """Node → base URL of its agent's /metrics and /healthz, once every agent is up."""
        while len(ports := (await self.rack("list"))["ports"]) < len(NODES):  # noqa: ASYNC110  (another process)
            await asyncio.sleep(0.05)
        return {node: f"http://127.0.0.1:{port}" for node, port in ports.items()}

    async def freeze(self, worker: str) -> None:
        """Its engine stands still behind a green /health."""
        await self.worker_host("freeze", worker)

    # -- asking the controller --------------------------------------------------------------------------------------

    async def get(self, path: str) -> Any:
        return await self._call("GET", path)

    async def ask(self, verb: str, target: str, reason: str, **more: Any) -> Any:
        """A person's command (``drain``, ``undrain``, ``hold`` …), with the demo's operator token."""
        return await self._call("POST", "/v1/ask", {"verb": verb, "target": target, "reason": reason, **more})

    async def status(self) -> dict[str, Any]:
        got = await self.get("/v1/status")
        if not isinstance(got, dict):
            raise StageError(f"GET /v1/status answered no object: {got!r}")
        return got

    async def incidents(self) -> list[Incident]:
        got = await self.get("/v1/incidents")
        return msgspec.convert(got.get("incidents", []) if isinstance(got, dict) else got, list[Incident])

    async def drain(self, drain_id: str) -> Drain:
        return msgspec.convert(await self.get(f"/v1/drains/{drain_id}"), Drain, strict=False)

    async def _call(self, method: str, path: str, body: object = None) -> Any:
        headers = {"Authorization": f"Bearer {self.tokens.operator}"}
        try:
            async with self._http.request(method, self.url + path, json=body, headers=headers) as answer:
                text = await answer.text()
                if answer.status >= 300:
                    raise StageError(f"{method} {path} answered {answer.status}: {text[:200]}")
                return json.loads(text) if text else None
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise StageError(f"{method} {path}: {error or type(error).__name__}") from None


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _reported(status: dict[str, Any], node: str) -> bool:
    nodes = status.get("nodes", {})
    entry = nodes.get(node) if isinstance(nodes, dict) else next((n for n in nodes if n.get("node", n.get("name")) == node), None)
    return bool(entry)


def _short_tmp() -> str:
    """Sockets need short paths (107 bytes): the usual folder unless it is a deep one."""
    usual = tempfile.gettempdir()
    return usual if len(usual) < 50 else "/tmp"  # noqa: S108  (mkdtemp makes a private folder in it)


def _free_port() -> int:
    """A port that nobody has now, from below the range of outgoing connections (32768 up), so that none of ours takes it."""
    for _ in range(200):
        port = random.randint(20000, 32000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise StageError("no free port between 20000 and 32000 on 127.0.0.1")

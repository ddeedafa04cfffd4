"""The stage: starts the whole simulated rack around the real controller, agents and store, and stops every part of it.

This module exists so that the demo, the tests and the benchmarks stand on one set-up: ``async with Stage() as stage``.
What always holds:

* Real: the controller and three gateways (processes of ``sentinel``), the embedded store, eighteen agents, the probes'
  judgement, serving adapters, routing, breakers, admission, paging. Simulated: what ``story.SIMULATED`` names.
* Everything lies in one private folder and every process is known to the janitor, so that nothing is left behind however
  the stage ends, also when it is killed.
* Where the demo runs faster than what is shipped, ``faster`` says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from sentinel.config import StoreSettings
from sentinel.model import Routes
from sentinel.sim import ctl
from sentinel.sim.asking import Asking
from sentinel.sim.client import Load, Record, Traffic
from sentinel.sim.crew import SENTINEL, Crew, StageError, free_port
from sentinel.sim.engine import Shape
from sentinel.sim.files import FASTER, IMEX, write_controller, write_tokens
from sentinel.sim.rack import MODEL, NODES, PLACES
from sentinel.sim.replicas import LEASE_S, Replicas
from sentinel.store import Store, open_store
from sentinel.store.breakers import BreakerRecords, Standing
from sentinel.testing.pagerduty import FakePagerDuty

__all__ = ["Stage", "StageError"]

START_S = 30.0  # until the controller leads, every node has reported, and every gateway serves


class Stage(Asking):
    """``load``: the traffic, which starts with ``start_traffic``. ``faster``: durations of the policy to shorten.

    ``imex``: the agents watch an IMEX domain, too (a tool to be run on every tray, every second). ``slots``: requests that one
    worker runs at once, which is what the gateways let in.
    """

    def __init__(
        self, load: Load | None = None, *, faster: Mapping[str, str] = FASTER, imex: bool = False, slots: int = 16
    ) -> None:
        self.load = load or Load()
        self._imex, self._slots = imex, slots
        self.faster: dict[str, str] = dict(faster)
        self.url = ""
        self.routes: Routes | None = None  # the newest pushed table
        self.pages: list[dict[str, Any]] = []  # what the simulated pager took, in order; each with "at" and "event"
        self.traffic: Traffic
        self.gateways: Replicas
        self.store: Store
        self.on_routes: Callable[[Routes | None, Routes], None] = lambda old, new: None
        self.on_breaker: Callable[[Standing], None] = lambda standing: None
        self.on_page: Callable[[dict[str, Any]], None] = lambda page: None
        self.on_first_token: Callable[[Record], None] = lambda record: None
        self._folder: Path
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
        listen = f"127.0.0.1:{free_port()}"
        self.url = f"http://{listen}"
        self.faster = write_controller(self._folder, listen=listen, urls=urls, pager=pager, faster=self.faster)
        if self._imex:
            self.faster["imex probe's interval"] = f"30s → {IMEX}"
        await self._crew.spawn("controller", *SENTINEL, "controller", "--config", str(self._folder / "controller.toml"))
        store = f"unix://{self._folder / 'store' / 'valkey.sock'}"
        await self._start_gateways(store, urls)
        await self._serve([urls[p.name] for p in PLACES.values() if not p.standby])
        await self._start_agents(urls)
        await self._all_up()
        await self._follow_routes(store)
        await self.gateways.up(self.routes.version if self.routes else 1, START_S)

    async def _start_gateways(self, store: str, urls: Mapping[str, str]) -> None:
        """They come up beside the controller: without a store or a table they serve by their configuration."""
        self.gateways = Replicas(self._folder, self._crew, self._http, slots=self._slots)
        self._exits.callback(self.gateways.close)
        await self.gateways.start(store, urls)
        self.faster["gateway.admission.lease"] = f"10s → {LEASE_S:g}s"

    async def _start_workers(self) -> dict[str, str]:
        shapes = [Shape(p.name, MODEL, ranks=p.ranks, slots=self._slots) for p in PLACES.values()]
        (self._folder / "shapes.json").write_bytes(msgspec.json.encode(shapes))
        await self._crew.open_door("workers", "sentinel.sim.workers", str(self._folder / "shapes.json"))
        listed = await self.worker_host("list")
        for place in PLACES.values():
            if not place.standby:
                await self.worker_host("start", place.name)
        return {name: str(w["url"]) for name, w in listed["workers"].items()}

    async def _serve(self, urls: Sequence[str]) -> None:
        """Wait until the workers serve: an agent misses only what it has seen answer."""
        last = time.monotonic() + START_S
        for url in urls:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with self._http.get(f"{url}/health"):
                        break
                if time.monotonic() > last:
                    raise StageError(f"the worker at {url} does not answer: {self._crew.last_words('workers')}")
                await asyncio.sleep(0.05)

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

    async def _follow_routes(self, url: str) -> None:
        self.store = await open_store(StoreSettings(url=url))
        self._exits.push_async_callback(self.store.close)
        first = asyncio.Event()

        async def follow(store: Store) -> None:
            async for table in store.watch_routes():
                old, self.routes = self.routes, table
                self.on_routes(old, table)
                first.set()

        async def hear(store: Store) -> None:
            async for standing in BreakerRecords(store).watch():
                self.on_breaker(standing)

        for name, work in (("routes", follow(self.store)), ("breakers", hear(self.store))):
            self._exits.push_async_callback(_cancelled, asyncio.create_task(work, name=name))
        try:
            async with asyncio.timeout(START_S):
                await first.wait()
        except TimeoutError:
            raise StageError("no route table was published") from None

    async def start_traffic(self) -> None:
        def first_token(record: Record) -> None:  # looked up at each call: a story may take its place later
            self.on_first_token(record)

        self.traffic = Traffic(self.gateways.urls, self.load, model=MODEL, on_first_token=first_token)
        await self.traffic.start()
        self._exits.push_async_callback(self.traffic.stop, 0.0)

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
        while len(ports := {n: p for n, p in (await self.rack("list"))["ports"].items() if p}) < len(NODES):  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # (another process)
        return {node: f"http://127.0.0.1:{port}" for node, port in ports.items()}

    async def agents_look(self) -> None:
        """Wait until every agent has looked at its workers once."""
        try:
            async with asyncio.timeout(START_S):
                await asyncio.gather(*(self._looked(f"{url}/metrics") for url in (await self.agent_urls()).values()))
        except TimeoutError:
            raise StageError(f"not every agent has looked at its workers within {START_S:g} s") from None

    async def _looked(self, url: str) -> None:
        while not await self._has(url, 'sentinel_probe_success{probe="worker"} 1.0'):  # noqa: ASYNC110  (another process)
            await asyncio.sleep(0.1)

    async def _has(self, url: str, line: str) -> bool:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._http.get(url) as answer:
                return line in await answer.text()
        return False

    async def freeze(self, worker: str) -> None:
        """Its engine stands still behind a green /health."""
        await self.worker_host("freeze", worker)


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

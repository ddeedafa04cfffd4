"""A real controller over a real Redis that was away, or lost its data, and gateways that still send by an old table."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest_asyncio

from sentinel.decide.decider import Decider
from sentinel.decide.rules.policy_file import default_policy
from sentinel.model import DrainState, WorkerState
from sentinel.store import Store, StoreError
from sentinel.store.gateways import Gateways
from sentinel.testing.control import Caller, RedisServer, ServingStandIn, running_controller, until
from sentinel.testing.decisions import rack

PRESENCE_S = 2.4


class Voice:
    """Follows the published tables and says so, as a gateway does."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name, self.version = store, name, 0
        self.mute = False
        self.gateways = Gateways(store)

    async def run(self) -> None:
        await asyncio.gather(self._follow(), self._tell())

    async def _follow(self) -> None:
        async for routes in self.store.watch_routes(0.2):
            self.version = max(self.version, routes.version)

    async def _tell(self) -> None:
        while True:
            if not self.mute:
                with contextlib.suppress(StoreError):
                    await self.gateways.obey(self.name, self.name, self.version, PRESENCE_S)
            await asyncio.sleep(0.2)


class Site:
    def __init__(self, server: RedisServer, directory: Path) -> None:
        self.server, self.directory, self.serving = server, directory, ServingStandIn()
        self.voices: list[Voice] = []

    @contextlib.asynccontextmanager
    async def leader(self, name: str, clock: Callable[[], float] = time.time) -> AsyncIterator[tuple[Any, Caller]]:
        store = await self.server.open()
        try:
            async with running_controller(
                store, self.directory, fleet=rack(), decider=partial(Decider, default_policy()), serving=self.serving, name=name,
                clock=clock,
            ) as (controller, caller):  # fmt: skip
                await until(lambda: controller.term, "it leads")
                yield controller, caller
        finally:
            await store.close()

    def asked(self) -> bool:
        """Whether it was believed that nobody sends any more."""
        return self.serving.did("in_flight") != []


@pytest_asyncio.fixture
async def site(program: Callable[[str], Path], tmp_path: Path) -> AsyncIterator[Site]:
    server = RedisServer(program("redis-server"))
    await server.start()
    made = Site(server, tmp_path)
    running = []
    try:
        for name in ("g1", "g2"):
            made.voices.append(voice := Voice(await server.open(), name))
            running.append(asyncio.create_task(voice.run()))
        yield made
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for voice in made.voices:
            await voice.store.close()
        server.close()


async def _drain(caller: Caller, worker: str) -> None:
    status, told = await caller.post("/v1/ask", {"verb": "drain", "target": worker, "reason": "a test", "deadline_s": 120})
    assert status == 200, told


async def test_an_outage_of_the_store_lets_no_drain_overtake_a_gateway(site: Site) -> None:
    """Every presence runs out while the store is away, and the gateways speak again later than the leader: nothing is believed idle
    before the last of them has obeyed, and then at once."""
    async with site.leader("c1") as (controller, caller):
        await until(lambda: all(v.version for v in site.voices), "both obey a table")
        raw = site.voices[0].store._client
        await raw.hset("{sentinel}:gateways:heard", "born", 1)  # no new store
        pid = (await raw.info("server"))["process_id"]
        slow = site.voices[1]
        slow.mute = True
        await _drain(caller, "decode-1")
        await asyncio.sleep(0.2)
        assert not site.asked()
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(PRESENCE_S + 0.4)
        os.kill(pid, signal.SIGCONT)
        await until(lambda: controller.term, "somebody leads again")
        await asyncio.sleep(1.5)
        assert not site.asked()
        slow.mute = False
        await until(site.asked, "everybody obeys", seconds=10)
        await until(lambda: any(d.state is DrainState.OUT for d in controller.term.ledger.drains.values()), "it is out")


async def test_an_emptied_store_under_an_earlier_clock_gets_a_table_that_gateways_obey(site: Site) -> None:
    """Another leader, whose clock is an hour behind, over a store that lost all: its table comes to gateways that have a newer one,
    and they count as obeying it only then."""
    async with site.leader("c1"):
        await until(lambda: all(v.version for v in site.voices), "both obey a table")
    theirs = max(v.version for v in site.voices)
    for voice in site.voices:
        voice.mute = True
    await site.voices[0].store._client.flushall()
    async with site.leader("c2", lambda: time.time() - 3600) as (controller, caller):
        await _drain(caller, "decode-1")
        assert controller.term.ledger.routes.version < theirs
        for voice in site.voices:
            voice.mute = False
        await until(lambda: all(v.version > theirs for v in site.voices), "both obey the new leader's table")
        assert controller.term.ledger.states()["decode-1"] is not WorkerState.ACTIVE
        await until(site.asked, "it is believed", seconds=15)

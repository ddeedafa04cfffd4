"""A store that loses its data under a leader: what was decided is known, and written again. Real Redis, real decider."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from sentinel.config import StoreSettings
from sentinel.controller.ledger import Ledger
from sentinel.decide.decider import Decider
from sentinel.decide.rules.policy_file import default_policy
from sentinel.model import DrainState, Routes, WorkerState, gpu_component
from sentinel.store import Store, Stored, open_store
from sentinel.testing.control import PagerStandIn, RedisServer, ServingStandIn, running_controller, until
from sentinel.testing.decisions import PCIS, rack


class Site:
    """A controller that has evicted decode-1 and been told to hold decode-2."""

    def __init__(self, controller: Any, server: RedisServer, store: Store, serving: ServingStandIn, pager: PagerStandIn) -> None:
        self.controller, self.server, self.store = controller, server, store
        self.serving, self.pager = serving, pager

    @property
    def ledger(self) -> Ledger:
        return self.controller.term.ledger  # type: ignore[no-any-return]

    def drained(self) -> bool:
        term = self.controller.term
        return term is not None and any(d.state is DrainState.OUT for d in term.ledger.drains.values())

    async def leads_again(self, epoch: int) -> None:
        await until(lambda: self.controller.term and self.controller.epoch > epoch, "it leads again")


@pytest_asyncio.fixture
async def site(program: Callable[[str], Path], tmp_path: Path) -> AsyncIterator[Site]:
    server = RedisServer(program("redis-server"))
    serving, pager = ServingStandIn(), PagerStandIn()
    try:
        await server.start()
        store = await server.open()
        decider = partial(Decider, default_policy())
        async with running_controller(
            store, tmp_path, fleet=rack(), decider=decider, nodes=("t03",), serving=serving, pager=pager
        ) as (controller, caller):
            await until(lambda: controller.term, "the controller leads")
            site = Site(controller, server, store, serving, pager)
            finding = {"id": "1", "check": "xid.79", "component": gpu_component("t03", PCIS[0]), "at": 1.0, "kind": "event"}
            report = {"node": "t03", "session": "s", "seq": 1, "at": 1.0, "findings": [finding | {"severity": "fatal"}]}
            await caller.post("/v1/report", msgspec.to_builtins(report), who="t03")
            await caller.post("/v1/ask", {"verb": "hold", "target": "decode-2", "reason": "mine"})
            await until(site.drained, "decode-1 is out")
            await until(lambda: pager.pages, "a page is sent")
            yield site
        await store.close()
    finally:
        server.close()


async def test_an_emptied_store_gets_back_what_was_decided(site: Site) -> None:
    """FLUSHALL returns no dead worker to service, lifts no hold, kills nothing again and pages nobody twice."""
    epoch, calls = site.controller.epoch, list(site.serving.did("kill"))
    await site.store._client.flushall()
    await site.leads_again(epoch)
    assert site.ledger.states()["decode-1"] is WorkerState.OUT
    assert list(site.ledger.holds) == ["decode-2"]
    stored = await site.store.decisions.load()
    assert {d.worker for d in stored.drains} == {"decode-1"}
    assert site.serving.did("kill") == calls
    assert len(site.pager.pages) == 1


async def test_a_store_that_went_back_in_time_is_brought_forward(site: Site) -> None:
    """A snapshot of an hour ago (an older table, no drain) does not undo what has been decided since."""
    epoch = site.controller.epoch
    key = site.store._door.key
    async with site.store._client.pipeline(transaction=True) as pipe:
        pipe.delete(key("drain"), key("hold"), key("lease"))
        pipe.set(key("routes"), msgspec.json.encode(Routes(version=1)))
        pipe.set(key("head"), b"1 1")
        await pipe.execute()
    await site.leads_again(epoch)
    assert site.ledger.states()["decode-1"] is WorkerState.OUT
    assert list(site.ledger.holds) == ["decode-2"]


async def test_what_another_leader_decided_is_not_overruled(site: Site) -> None:
    """Once somebody else has led, our memory is old: an emptied store stays as it is found."""
    epoch = site.controller.epoch
    await site.store._client.flushall()
    await site.store.lease.acquire("somebody else", "http://c2", 0.05)
    await site.store.lease.acquire("somebody else", "http://c2", 0.05)
    await site.leads_again(epoch + 2)
    assert site.ledger.drains == {}


async def test_a_store_that_lost_a_commit_under_its_leader_is_brought_forward(site: Site) -> None:
    """The lease is still ours, the last decisions are gone and an ended one is back: within the leadership all is as decided."""
    epoch, key, raw = site.controller.epoch, site.store._door.key, site.store._client
    async with raw.pipeline(transaction=True) as pipe:  # what a replica that missed the last commits holds
        pipe.hset(key("lease"), "seq", 1)
        pipe.set(key("head"), f"{epoch} 1")
        pipe.delete(*map(key, ("drain", "hold", "incident")))
        pipe.hset(key("hold"), "decode-3", b'{"target":"decode-3","keep":"out","reason":"lifted since","by":"ada","at":1.0}')
        await pipe.execute()

    def held(stored: Any) -> Any:
        return ({i.id for i in stored.incidents}, {d.worker for d in stored.drains}, {h.target for h in stored.holds})

    async with asyncio.timeout(20):
        while held(await site.store.decisions.load()) != (set(site.ledger.incidents), {"decode-1"}, {"decode-2"}):
            await asyncio.sleep(0.01)
    assert site.controller.epoch == epoch
    assert site.ledger.incidents


@pytest.mark.parametrize(
    ("mine", "theirs", "newer"),
    [((5, 2), (5, 1), True), ((5, 2), (4, 9), True), ((5, 2), (5, 2), False), ((5, 2), (6, 1), False), ((1, 1), (0, 0), True)],
)
def test_the_last_commit_tells_who_is_newer(mine: tuple[int, int], theirs: tuple[int, int], newer: bool) -> None:
    """Epochs rise, and numbers within them, so a lower last commit in the store is a store that went back."""
    ledger = Ledger(rack())
    ledger.head = mine
    assert ledger.is_newer(Stored(head=theirs)) is newer


async def test_who_cannot_read_what_was_decided_gives_the_lease_back(site: Site, tmp_path: Path) -> None:
    """A drain in a state of a newer version does not keep a controller of that version from leading."""
    key = site.store._door.key
    await site.store._client.hset(key("drain"), "drain-9-1", b'{"type":"Drain","id":"drain-9-1","state":"levitating"}')
    await site.store._client.delete(key("lease"))
    another = await open_store(StoreSettings(url=site.server.url))
    taken = None
    async with asyncio.timeout(20):
        while (leader := await another.lease.leader()) is None or leader.epoch == 1:
            await asyncio.sleep(0.01)
        while taken is None:
            taken = await another.lease.acquire("newer", "http://c2", 1.0)
            await asyncio.sleep(0.02)
    assert site.controller.term is None
    await another.close()

"""A store that loses its data under a leader, and the breakers that are held. Real controller and Redis, a gateway's voice."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest_asyncio

from sentinel.decide.decider import Decider
from sentinel.decide.rules.policy_file import default_policy
from sentinel.model import gpu_component
from sentinel.store import Store, StoreError
from sentinel.store.breakers import BreakerRecords
from sentinel.store.gateways import Gateways
from sentinel.testing.control import Caller, RedisServer, running_controller, until
from sentinel.testing.decisions import PCIS, rack


class Site:
    def __init__(self, controller: Any, caller: Caller, store: Store) -> None:
        self.controller, self.caller, self.store = controller, caller, store
        self.records = BreakerRecords(store)

    async def ask(self, verb: str, target: str, **more: Any) -> None:
        status, told = await self.caller.post("/v1/ask", {"verb": verb, "target": target, "reason": "a test", **more})
        assert status == 200, told

    async def held(self) -> dict[str, tuple[str, str]]:
        stands = await self.records.listing({f"decode-{n}": "main" for n in range(1, 5)})
        return {s.worker: (s.pin, s.pin_by) for s in stands if s.pin}

    async def soon(self, wanted: dict[str, tuple[str, str]]) -> None:
        held: Any = None
        try:
            async with asyncio.timeout(20):
                while held != wanted:
                    await asyncio.sleep(0.02)
                    held = await self.held()
        except TimeoutError:
            raise AssertionError(f"wanted {wanted}, but what is held is {held}") from None

    async def known(self, worker: str, by: str) -> None:
        """Until the decider has heard of it."""
        await until(lambda: (p := self.picture()) and p.relays.of(worker).pin_by == by, "it is told")

    def picture(self) -> Any:
        term = self.controller.term
        return term and term.core.decider.p

    async def loses_all(self) -> None:
        epoch = self.controller.epoch
        await self.store._client.flushall()
        await until(lambda: self.controller.term and self.controller.epoch > epoch, "it leads again")


async def _speaks(store: Store) -> None:
    """As a gateway does."""
    gateways = Gateways(store)
    for version in itertools.count(1):
        with contextlib.suppress(StoreError):
            await gateways.obey("a1", "g1", version, 3)
        await asyncio.sleep(0.2)


@pytest_asyncio.fixture
async def site(program: Callable[[str], Path], tmp_path: Path) -> AsyncIterator[Site]:
    server = RedisServer(program("redis-server"))
    await server.start()
    store, theirs = await server.open(), await server.open()
    speaking = asyncio.create_task(_speaks(theirs))
    try:
        decider = partial(Decider, default_policy())
        async with running_controller(store, tmp_path, fleet=rack(), decider=decider, nodes=("t03",)) as (controller, caller):
            site = Site(controller, caller, store)
            await until(lambda: (p := site.picture()) and p.relays.replicas, "it hears the gateway")
            yield site
    finally:
        speaking.cancel()
        await asyncio.gather(speaking, return_exceptions=True)
        for opened in (store, theirs):
            await opened.close()
        server.close()


async def test_an_emptied_store_gets_back_who_holds_which_breaker(site: Site) -> None:
    """Persons' pins and sentinel's own come back in their names, a released one does not, and a second loss changes nothing."""
    finding = {"id": "1", "check": "xid.79", "component": gpu_component("t03", PCIS[0]), "at": 1.0, "kind": "event"}
    report = {"node": "t03", "session": "s", "seq": 1, "at": 1.0, "findings": [finding | {"severity": "fatal"}]}
    await site.caller.post("/v1/report", msgspec.to_builtins(report), who="t03")
    await site.ask("pin", "decode-2", keep="in", lasts_s=600)
    await site.ask("pin", "decode-3", keep="out", lasts_s=600)
    await site.ask("pin", "decode-4", keep="out", lasts_s=600)
    await site.known("decode-4", "ada")
    await site.ask("unpin", "decode-4")
    wanted = {"decode-1": ("open", "sentinel"), "decode-2": ("closed", "ada"), "decode-3": ("open", "ada")}
    await site.soon(wanted)
    for _ in range(2):
        await site.loses_all()
        await site.soon(wanted)
        await site.known("decode-3", "ada")
    (stands,) = await site.records.listing({"decode-3": "main"})
    assert stands.pin_left <= 600_000
    await site.ask("unpin", "decode-3")
    await site.soon({k: v for k, v in wanted.items() if k != "decode-3"})
    await site.loses_all()
    await site.soon({k: v for k, v in wanted.items() if k != "decode-3"})

"""The controller's ear at the gateways, on real stores: what it tells the decider, when, and what it leaves unsaid."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
import pytest_asyncio

from sentinel.controller.gateways import GatewayWatch
from sentinel.decide.state.events import AnyInstruction, Relayed
from sentinel.durations import Duration
from sentinel.model import Fleet, Pool, Worker
from sentinel.settings_gateway import BreakerSettings
from sentinel.store import StoreError
from sentinel.store.breakers import PINS_BY, BreakerRecords
from sentinel.store.gateways import Gateways
from sentinel.testing.control import until

POLICY = BreakerSettings(base_open=Duration(30), jitter=0.0)
NAMES = ("w1", "w2", "w3", "w4")
FLEET = Fleet(
    pools=(Pool(name="p"), Pool(name="dyn")),
    workers=(
        *(Worker(name=n, pool="p", url=f"http://{n}") for n in NAMES),
        *(Worker(name=n, pool="dyn", url=f"http://{n}", adapter="dynamo") for n in ("d1", "d2")),
    ),
)


class Ear:
    """A watch on one real store, and what it told."""

    def __init__(self, store: Any, policy: BreakerSettings = POLICY) -> None:
        self.presences, self.records = Gateways(store, settle_s=0.2), BreakerRecords(store, policy)
        self.told: list[Relayed] = []
        numbers = itertools.count()
        self.watch = GatewayWatch(
            self.presences, self.records, version=lambda: 7, feed=self._feed, new_id=lambda: f"ev-{next(numbers)}",
            clock=lambda: 1000.0, every=0.1, frontends=2,
        )  # fmt: skip
        self.watch.follow(FLEET)

    async def _feed(self, event: Relayed) -> list[AnyInstruction]:
        self.told.append(event)
        return []

    def last(self, worker: str) -> Any:
        return next((r for e in reversed(self.told) for r in e.workers if r.worker == worker), None)

    async def fails(self, worker: str, *hosts: str) -> None:
        """These hosts see nothing but failures of it."""
        for host in hosts:
            await self.records.seen(f"{host}/1", [(worker, 0, 1)])
        for host in hosts:
            others = [n for n in NAMES if n != worker]
            await self.records.failed(worker, "p", others, f"{host}/1", version=0, fine=0, failed=9, draw=0.0)


@pytest_asyncio.fixture
async def ear(store_server: Any) -> Any:
    ear = Ear(await store_server.open())
    running = asyncio.create_task(ear.watch.run())
    try:
        yield ear
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_without_gateways_it_says_so_once(ear: Ear) -> None:
    """No gateway: one event that says that, and no further one however long that lasts."""
    await until(lambda: ear.told, "it is said")
    await asyncio.sleep(0.4)
    assert len(ear.told) == 1 and ear.told[0].replicas == () and ear.told[0].workers == ()


async def test_what_gateways_see_is_told_once(ear: Ear) -> None:
    """Who there is and what each obeys, who answers, who is open and in whose eyes: each told when it changes."""
    await ear.presences.obey("a1", "g1", 7, 30)
    await ear.presences.obey("a2", "g1", 5, 30)
    await ear.presences.obey("b1", "g2", 7, 0.05)
    await ear.records.seen("g1/1", [("w2", 0, 5)])
    await ear.fails("w1", "g1", "g2")
    await until(lambda: ear.last("w1") and ear.last("w2"), "both are told of")
    assert (ear.last("w1").breaker, ear.last("w1").hosts, ear.last("w1").answers) == ("open", ("g1", "g2"), False)
    assert "requests failed" in ear.last("w1").why
    assert ear.last("w2").answers and ear.last("w2").breaker == "closed"
    replicas = next(e.replicas for e in reversed(ear.told) if e.replicas)
    assert [(r.name, r.version, r.there) for r in replicas] == [("g1", 5, True), ("g2", 7, False)]
    count = len(ear.told)
    await until(lambda: len(ear.told) > count + 2, "further rounds")
    assert all(e.workers == () and e.replicas is None for e in ear.told[count + 1 :])
    assert await ear.watch.behind(7) == ["g1"] and await ear.watch.behind(5) == []


async def test_whoever_obeys_a_newer_table_than_ours_does_not_obey(ear: Ear) -> None:
    """A gateway above every table that this leader has published ignores them: that it obeys one cannot be told, and the decider
    is told how far above, whichever of its processes it is."""
    await ear.presences.obey("a1", "g1", 9, 30)
    await ear.presences.obey("a2", "g1", 7, 30)
    await until(lambda: ear.told and ear.told[-1].replicas is None and len(ear.told) > 3, "rounds")
    told = [r for e in ear.told for r in e.replicas or ()]
    assert [(r.name, r.version, r.newest) for r in told][-1:] == [("g1", 7, 9)]
    for version in (5, 7):
        with pytest.raises(StoreError, match="g1 obeys table 9"):
            await ear.watch.behind(version)
    ear.watch.version = lambda: 10
    assert await ear.watch.behind(10) == ["g1"] and await ear.watch.behind(7) == []


async def test_a_transition_is_told_by_the_push(store_server: Any) -> None:
    """What opens between two rounds is told at once."""
    ear = Ear(await store_server.open())
    ear.watch._every = 60.0
    await ear.presences.obey("a1", "g1", 7, 60)
    running = asyncio.create_task(ear.watch.run())
    await until(lambda: ear.told, "the first round")
    await asyncio.sleep(0.2)  # until it listens
    await ear.fails("w3", "g1", "g2")
    await until(lambda: ear.last("w3"), "the push is told of", seconds=10)
    assert ear.last("w3").breaker == "open"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_probe_that_succeeded_long_ago_is_no_answer(store_server: Any) -> None:
    """A worker that nobody asks any more after its first good probe does not count as answering for ever."""
    ear = Ear(await store_server.open(), BreakerSettings(base_open=Duration(0.05), window=Duration(1.0), jitter=0.0))
    await ear.presences.obey("a1", "g1", 7, 60)
    await ear.fails("w1", "g1", "g2")
    running = asyncio.create_task(ear.watch.run())
    try:
        await until(lambda: ear.last("w1") and ear.last("w1").breaker == "half_open", "its time is over")
        _, given = await ear.records.permit("w1", "p", "g1/1")
        assert given
        await ear.records.ended("w1", "p", "g1/1", "fine", 0.0)
        await until(lambda: ear.last("w1").answers, "the probe is told of")
        await until(lambda: not ear.last("w1").answers, "it is old")
        assert ear.last("w1").breaker == "half_open"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_push_before_a_round_that_asks_about_others_is_not_lost(store_server: Any) -> None:
    """Of a fleet whose rounds take turns: what was pushed while the last look was told is looked at right after the next round."""
    store = await store_server.open()
    ear = Ear(store)
    ear.watch = GatewayWatch(
        ear.presences, ear.records, version=lambda: 7, feed=ear._feed, new_id=lambda: "ev", clock=lambda: 1000.0,
        every=0.3, frontends=2, per_round=1,
    )  # fmt: skip
    ear.watch.follow(FLEET)  # six names, so that a round comes to each of them once in six
    await ear.presences.obey("a1", "g1", 7, 60)
    blocked: list[int] = []

    async def feed(event: Relayed) -> list[AnyInstruction]:
        ear.told.append(event)
        if any(r.worker == "w1" and r.breaker == "open" for r in event.workers) and not blocked:
            blocked.append(len(ear.told))
            for late in ("w2", "w3", "w4"):
                await ear.fails(late, "g1", "g2")
            await asyncio.sleep(0.5)  # the time of the next round has come
        return []

    ear.watch._feed = feed
    running = asyncio.create_task(ear.watch.run())
    try:
        await until(lambda: ear.told, "the first round")
        await asyncio.sleep(0.1)
        await ear.fails("w1", "g1", "g2")
        await until(lambda: blocked, "the first is told of")
        await until(lambda: len(ear.told) >= blocked[0] + 2, "a round, and what was pushed")
        told = {r.worker for e in ear.told[blocked[0] : blocked[0] + 2] for r in e.workers}
        assert told >= {"w2", "w3"}
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_worker_that_left_and_comes_again_is_told_of_as_it_is(ear: Ear) -> None:
    """Whose breaker was told to be open when it left the configuration is told to be closed when it is there again."""
    await ear.presences.obey("a1", "g1", 7, 30)
    worker = FLEET.workers[0]
    assert await ear.watch.pin(worker, "open", lasts_s=60, by=PINS_BY, why="evicted") == ""
    await until(lambda: ear.last("w1"), "the pin is told of")
    ear.watch.follow(Fleet(pools=FLEET.pools, workers=FLEET.workers[1:]))
    assert await ear.watch.pin(worker, "", lasts_s=0, by=PINS_BY, why="back") == ""
    ear.watch.follow(FLEET)
    await until(lambda: ear.last("w1").pin == "", "it is told that nobody pins it")


async def test_panic_is_told_by_pool_also_behind_a_frontend(ear: Ear) -> None:
    """A pool too many of whose workers fail, and one whose only way, the Dynamo frontend, does."""
    await ear.presences.obey("a1", "g1", 7, 30)
    for name in NAMES:
        await ear.fails(name, "g1", "g2")
    await ear.records.failed("dyn.frontend", "dyn", [], "g1/1", version=0, fine=0, failed=9, draw=0.0)
    await until(lambda: ear.told and ear.told[-1].panics == ("dyn", "p"), "both are in panic")


async def test_every_frontend_of_a_pool_is_told_of(ear: Ear) -> None:
    """A site with two Dynamo frontends has two breakers in each pool, and hears of either."""
    await ear.presences.obey("a1", "g1", 7, 30)
    for host in ("g1", "g2"):
        await ear.records.seen(f"{host}/1", [("dyn.frontend", 5, 0), ("dyn.frontend2", 0, 1)])
    for host in ("g1", "g2"):
        await ear.records.failed("dyn.frontend2", "dyn", ["dyn.frontend"], f"{host}/1", version=0, fine=0, failed=9, draw=0.0)
    await until(lambda: (told := ear.last("dyn.frontend2")) and told.breaker == "open", "the second is told of as open")


async def test_pins(ear: Ear) -> None:
    """Sentinel pins and unpins, and says whose pin stands where it may not; who holds what is told."""
    worker = FLEET.workers[0]
    await ear.presences.obey("a1", "g1", 7, 30)
    assert await ear.watch.pin(worker, "open", lasts_s=60, by=PINS_BY, why="evicted") == ""
    await until(lambda: ear.last("w1"), "the pin is told of")
    assert (ear.last("w1").pin, ear.last("w1").pin_by, ear.last("w1").breaker) == ("open", "sentinel", "closed")
    until_ = ear.last("w1").pin_until
    await asyncio.sleep(0.3)
    assert ear.last("w1").pin_until == until_
    assert await ear.watch.pin(worker, "", lasts_s=0, by=PINS_BY, why="back") == ""
    assert await ear.watch.pin(worker, "closed", lasts_s=60, by="ann", why="it is well") == ""
    assert await ear.watch.pin(worker, "open", lasts_s=60, by=PINS_BY, why="evicted") == "ann holds the breaker of w1 closed"


async def test_a_store_that_is_away_is_told_as_nothing(ear: Ear, store_server: Any) -> None:
    """While the store does not answer nothing is said; when it does, the rounds go on."""
    await ear.presences.obey("a1", "g1", 7, 300)
    await until(lambda: ear.told and ear.told[-1].workers == () and len(ear.told) > 2, "rounds")
    store_server.pause()
    await asyncio.sleep(0.3)
    count = len(ear.told)
    await asyncio.sleep(0.5)
    assert len(ear.told) <= count + 1
    store_server.resume()
    await until(lambda: len(ear.told) > count + 3, "rounds go on")

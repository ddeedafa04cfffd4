"""Silence of gateways: whose it is, when the store was away, is new, or lost its data. A drain stops nothing on such silence."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sentinel.store import StoreError
from sentinel.store.gateways import AWAY_S, Gateways

SETTLE_S = 0.8


async def _settled(server: Any) -> Gateways:
    """The table of gateways of a store that has been spoken with for long enough."""
    gateways = Gateways(await server.open(), settle_s=SETTLE_S)
    await gateways.all()
    await asyncio.sleep(SETTLE_S)
    assert await gateways.behind(1) == []
    return gateways


async def _away(server: Any, seconds: float = AWAY_S + 0.3) -> None:
    server.pause()
    await asyncio.sleep(seconds)
    server.resume()


async def _ends(gateways: Gateways, version: int) -> None:
    """Returns when nobody is behind any more."""
    async with asyncio.timeout(10):
        while await gateways.behind(version):
            await asyncio.sleep(0.02)


async def test_whoever_was_there_before_an_outage_is_there_after_it(store_server: Any) -> None:
    """Presences that ran out while nobody could speak with the store are no statement: they count until their gateways had time to
    speak, and no longer."""
    gateways = await _settled(store_server)
    await gateways.obey("g1", "a", 1, 0.6)
    await gateways.obey("g2", "b", 1, 0.6)
    await _away(store_server)
    assert await gateways.behind(2) == ["a", "b"] and await gateways.lost() == []
    await gateways.obey("g2", "b", 2, 0.6)
    assert await gateways.behind(2) == ["a"]
    await _ends(gateways, 2)
    assert await gateways.lost() == ["a", "b"]


async def test_who_was_lost_or_had_left_before_an_outage_holds_nothing_up(store_server: Any) -> None:
    """Only who had time left when the store was last spoken with may have been kept from speaking."""
    gateways = await _settled(store_server)
    await gateways.obey("g1", "dead", 1, 0.05)
    await gateways.obey("g2", "gone", 1, 30)
    await gateways.leave("g2")
    await asyncio.sleep(0.1)
    assert await gateways.lost() == ["dead"]
    await _away(store_server)
    assert await gateways.behind(2) == [] and await gateways.lost() == ["dead"]


async def test_one_dead_gateway_is_waited_for_no_longer_than_its_presence(store_server: Any) -> None:
    """While others speak, or somebody asks, silence is the gateway's own and its time runs; then it is lost."""
    gateways = await _settled(store_server)
    await gateways.obey("g1", "a", 1, 0.9)
    await gateways.obey("g2", "b", 2, 30)
    for _ in range(3):
        before = {p.id: p.left_s for p in await gateways.all()}
        await asyncio.sleep(0.2)
        await gateways.obey("g2", "b", 2, 30)
        assert {p.id: p.left_s for p in await gateways.all()}["g1"] <= before["g1"] - 0.2
    assert await gateways.behind(2) == ["a"]
    await _ends(gateways, 2)
    assert await gateways.lost() == ["a"]


async def test_a_new_store_says_nothing_of_who_is_not_in_it(store_server: Any) -> None:
    """Empty, or emptied: who sends cannot be told before every gateway had time to speak; who spoke and is behind is named."""
    gateways = Gateways(await store_server.open(), settle_s=SETTLE_S)
    with pytest.raises(StoreError, match="gateways"):
        await gateways.behind(1)
    await store_server.told(lambda: gateways.behind(1))
    await gateways.obey("g1", "a", 1, 30)
    await store_server.raw.flushall()
    with pytest.raises(StoreError, match="gateways"):
        await gateways.behind(2)
    await gateways.obey("g2", "b", 1, 30)
    assert await gateways.behind(2) == ["b"]
    await gateways.obey("g2", "b", 2, 30)
    assert await store_server.told(lambda: gateways.behind(2)) == []


async def test_a_healthy_store_keeps_no_new_leader_waiting(store_server: Any) -> None:
    """What the store knows of its gateways, none included, does not depend on who asks, nor on the last one having left."""
    await _settled(store_server)
    another = Gateways(await store_server.open(), settle_s=SETTLE_S)
    assert await another.behind(1) == []
    await another.obey("g1", "a", 1, 30)
    await another.leave("g1")
    assert await another.behind(2) == []


async def test_a_copy_of_long_ago_is_a_new_store(store_server: Any) -> None:
    """A server that comes back with what it held an hour ago does not know who came since."""
    gateways = await _settled(store_server)
    hour = 3_600_000
    for field in ("born", "last"):
        await store_server.raw.hincrby("{sentinel}:gateways:heard", field, -hour)
    with pytest.raises(StoreError, match="gateways"):
        await gateways.behind(1)


async def test_a_server_whose_clock_is_behind_forgets_nobody(store_server: Any) -> None:
    """After a failover to an earlier clock who was there has time to speak, and not until that clock has caught up."""
    gateways = await _settled(store_server)
    await gateways.obey("g1", "a", 1, 30)
    await gateways.obey("g2", "dead", 1, 0.05)
    await asyncio.sleep(0.1)
    now = (await gateways.all())[0].left_s
    raw, hour = store_server.raw, 3_600_000
    for field, value in (await raw.hgetall("{sentinel}:gateways")).items():
        ends, _, body = value.partition(b" ")
        await raw.hset("{sentinel}:gateways", field, b"%d %s" % (int(ends) + hour, body))
    await raw.hincrby("{sentinel}:gateways:heard", "last", hour)
    there = {p.name: p.left_s for p in await gateways.all()}
    assert 0 < there["a"] <= now and there["dead"] <= 0

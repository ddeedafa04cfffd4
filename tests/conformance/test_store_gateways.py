"""The table of gateways: who is there, what each obeys, and when nobody can send by an older table any more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sentinel.store import StoreError
from sentinel.store.gateways import Gateways


async def test_a_version_is_acked_when_all_that_are_there_obey_it(store_server: Any) -> None:
    """One gateway behind holds the answer up; a newer version counts as well; nobody there is nobody who could send."""
    gateways = Gateways(await store_server.open())
    assert await gateways.acked(7)
    await gateways.obey("g1", "a", 0, 30)
    await gateways.obey("g2", "b", 7, 30)
    assert not await gateways.acked(7)
    await gateways.obey("g1", "a", 8, 30)
    assert await gateways.acked(7) and not await gateways.acked(8)
    assert [(p.id, p.name, p.version) for p in await gateways.all()] == [("g1", "a", 8), ("g2", "b", 7)]


async def test_a_goodbye_ends_a_presence(store_server: Any) -> None:
    """Whoever left holds nothing up and is not lost; saying it twice is harmless."""
    gateways = Gateways(await store_server.open())
    await gateways.obey("g1", "a", 1, 30)
    await gateways.leave("g1")
    await gateways.leave("g1")
    assert await gateways.acked(2) and await gateways.lost() == [] and await gateways.all() == []


async def test_a_silent_gateway_is_lost_and_named(store_server: Any) -> None:
    """Its presence ends by the server's clock; then it holds nothing up, is named as lost, and is back when it speaks again."""
    gateways = Gateways(await store_server.open())
    await gateways.obey("g1", "a", 1, 0.15)
    assert not await gateways.acked(2)
    while not await gateways.acked(2):
        await asyncio.sleep(0.02)
    assert await gateways.lost() == ["a"]
    await gateways.obey("g1", "a", 1, 30)
    assert await gateways.lost() == [] and not await gateways.acked(2)


async def test_the_long_lost_are_forgotten(store_server: Any) -> None:
    """Entries far past their end are removed by whoever speaks next, so that the table stays small."""
    gateways = Gateways(await store_server.open())
    await store_server.raw.hset("{sentinel}:gateways", "old", b'1000 {"name": "old", "version": 1}')
    await gateways.obey("g1", "a", 1, 30)
    assert [p.id for p in await gateways.all()] == ["g1"]


@pytest.mark.parametrize("value", [b"", b"x {}", b"99999999999999", b"99999999999999 []", b"\xff"])
async def test_garbage_is_told_apart(store_server: Any, value: bytes) -> None:
    """What is no presence is StoreError naming the key and the field; never an answer."""
    gateways = Gateways(await store_server.open())
    await store_server.raw.hset("{sentinel}:gateways", "odd", value)
    with pytest.raises(StoreError, match=r"gateways.*odd"):
        await gateways.acked(1)
    await store_server.raw.delete("{sentinel}:gateways")
    await store_server.raw.set("{sentinel}:gateways", "text")
    with pytest.raises(StoreError, match="gateways"):
        await gateways.obey("g1", "a", 1, 30)


async def test_many_gateways_speak_at_once(store_server: Any) -> None:
    """Presences do not overwrite each other."""
    stores = [Gateways(await store_server.open()) for _ in range(4)]
    await asyncio.gather(*(stores[n % 4].obey(f"g{n}", "a", n, 30) for n in range(40)))
    assert len(await stores[0].all()) == 40
    assert await stores[0].acked(0) and not await stores[0].acked(1)

"""How often a gateway asks for all breakers: a listing is of the whole fleet, and its server does nothing else meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

from sentinel.durations import Duration
from sentinel.gateway.breakers import SharedBreakers
from sentinel.settings_gateway import BreakerSettings
from sentinel.store.breakers import BreakerRecords

POLICY = BreakerSettings(poll=Duration(60.0), flush=Duration(60.0))


async def test_a_table_without_new_workers_asks_nothing(store_server: Any) -> None:
    """A storm makes many tables, and each of them comes to every gateway: who leaves is only forgotten. Who is new, or in another
    pool, is asked about at once."""
    store = await store_server.open()
    person = BreakerRecords(store, POLICY)
    await person.pin("w3", "p", "open", lasts_s=60.0, by="ann")
    breakers = SharedBreakers(BreakerRecords(store, POLICY), host="h", process="x")
    await breakers.start()
    try:
        breakers.members({"p": ["w1", "w2"]})
        while not breakers.questions:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        asked = breakers.questions
        for workers in (["w1"], ["w1"], ["w1"]):
            breakers.members({"p": workers})
            await asyncio.sleep(0.02)
        assert breakers.questions == asked
        breakers.members({"p": ["w1", "w3"]})
        while breakers.states()["w3"] != "open":
            await asyncio.sleep(0.01)
        assert breakers.questions == asked + 1
        breakers.members({"q": ["w1", "w3"]})
        while breakers.questions == asked + 1:
            await asyncio.sleep(0.01)
    finally:
        await breakers.stop()

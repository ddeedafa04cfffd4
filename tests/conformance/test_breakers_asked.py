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


async def test_a_short_listing_says_the_same_of_what_counts(store_server: Any) -> None:
    """State, version, pin and panic are those that a listing with evidence tells, of every kind of worker, in its order."""
    records = BreakerRecords(await store_server.open(), POLICY)
    await records.failed("alone", "sick", [], "h/1", version=0, fine=0, failed=9, draw=0.0)  # the only one: panic
    await records.failed("out", "p", ["well", "pinned"], "h/1", version=0, fine=0, failed=9, draw=0.0)
    await records.pin("pinned", "p", "closed", lasts_s=60.0, by="ann")
    await records.pin("let go", "p", "open", lasts_s=60.0, by="ann")
    await records.pin("let go", "p", "", lasts_s=0.0, by="ann")
    await records.seen("h/1", [("well", 0, 3)])
    workers = {"let go": "p", "alone": "sick", "out": "p", "well": "p", "pinned": "p", "new": "q"}
    short, full = await records.listing(workers), await records.listing(workers, evidence=True)
    for one, other in zip(short, full, strict=True):
        assert (one.worker, one.pool, one.state, one.version, one.pin) == (
            other.worker, other.pool, other.state, other.version, other.pin,
        )  # fmt: skip
        assert (one.panic_left > 0) is (other.panic_left > 0) is (one.worker == "alone")
        assert 0 < one.now <= other.now
    assert [s.state for s in short] == ["closed", "closed", "open", "closed", "closed", "closed"]
    assert short[0].version > 0


async def test_only_who_is_new_is_asked_about(store_server: Any) -> None:
    """Between two rounds nobody else's standing is asked for: what nobody pushed about the others is found by the next round."""
    store = await store_server.open()
    asked: list[set[str]] = []

    class Told(BreakerRecords):
        async def listing(self, workers: Any, *, evidence: bool = False) -> Any:
            asked.append(set(workers))
            return await super().listing(workers, evidence=evidence)

    breakers = SharedBreakers(Told(store, POLICY), host="h", process="x")
    breakers.members({"p": ["w1", "w2"]})
    await breakers.start()
    try:
        while not asked:
            await asyncio.sleep(0.01)
        breakers.members({"p": ["w1", "w2", "w3"]})
        while len(asked) < 2:
            await asyncio.sleep(0.01)
        assert asked == [{"w1", "w2"}, {"w3"}]
    finally:
        await breakers.stop()

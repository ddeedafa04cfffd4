"""A fleet's breakers are asked and told about in lots, so that the store has time for others; what is newer wins all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sentinel.durations import Duration
from sentinel.gateway.breakers import SharedBreakers
from sentinel.gateway.guards import Outcome
from sentinel.settings_gateway import BreakerSettings
from sentinel.store.breakers import CHUNK, BreakerRecords, Standing

POLICY = BreakerSettings(base_open=Duration(60), poll=Duration(0.2), jitter=0.0)
FLEET = [f"w{n}" for n in range(2 * CHUNK + 1)]
FIRST, LAST = FLEET[0], FLEET[-1]
KEY = f"{{sentinel}}:breaker:{LAST}"


class Asked(BreakerRecords):
    """``sizes``: how many workers each question was about. ``between``: run when the server has answered and nobody knows yet."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.sizes: list[int] = []
        self.between: Callable[[Mapping[str, str]], Any] | None = None

    async def listing(self, workers: Mapping[str, str], *, evidence: bool = False) -> list[Standing]:
        self.sizes.append(len(workers))
        listed = await super().listing(workers, evidence=evidence)
        if self.between:
            await self.between(workers)
        return listed

    async def seen(self, reporter: str, fine: Sequence[tuple[str, int, int]]) -> dict[str, int]:
        self.sizes.append(len(fine))
        return await super().seen(reporter, fine)


@asynccontextmanager
async def gateway(server: Any, policy: BreakerSettings = POLICY) -> AsyncIterator[tuple[SharedBreakers, Asked]]:
    records = Asked(await server.open(timeout=1.0), policy)
    breakers = SharedBreakers(records, host="h", process="x", draw=lambda: 0.5)
    breakers.members({"p": FLEET})
    await breakers.start()
    try:
        yield breakers, records
    finally:
        records.between = None
        await breakers.stop()


async def fails(gateway: SharedBreakers, worker: str) -> None:
    for _ in range(POLICY.min_requests):
        permit = await gateway.permit(worker)
        assert permit is not None
        gateway.ended(permit, Outcome.FAILED)


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not what():
            await asyncio.sleep(0.005)


async def test_no_question_is_about_the_whole_fleet(store_server: Any) -> None:
    """A round and a flush of a large fleet are several questions, of which each tells of everybody once."""
    async with gateway(store_server, BreakerSettings(poll=Duration(3600), flush=Duration(3600))) as (a, records):
        await until(lambda: sum(records.sizes) == len(FLEET))
        assert max(records.sizes) <= CHUNK
        records.sizes.clear()
        for worker in FLEET:
            permit = await a.permit(worker)
            assert permit is not None
            a.ended(permit, Outcome.FINE)
    assert (sum(records.sizes), max(records.sizes)) == (len(FLEET), CHUNK)
    listed = await records.listing({FIRST: "p", LAST: "p"}, evidence=True)
    assert [s.volume for s in listed] == [1, 1]


async def test_a_push_between_two_lots_stands(store_server: Any) -> None:
    """Who is opened after its lot was asked about, and before that is heard, stays open, though the answer says closed."""
    async with gateway(store_server) as (a, records):
        person = BreakerRecords(await store_server.open(), POLICY)
        rounds: list[str] = []

        async def opened_meanwhile(workers: Mapping[str, str]) -> None:
            if FIRST in workers and not rounds:
                await person.pin(FIRST, "p", "open", lasts_s=60, by="ann")
                await until(lambda: a.states()[FIRST] == "open")
            rounds.append(a.states()[FIRST])

        records.between = opened_meanwhile
        await until(lambda: len(rounds) > 9)
        assert set(rounds) == {"open"}


async def test_a_store_that_does_not_tell_of_all_is_away(store_server: Any) -> None:
    """Where one lot has no answer the gateway goes on alone, for the others too, and forgets nothing of that with each round; with
    the first round that is whole the store's word stands for all."""
    async with gateway(store_server) as (a, records):
        await until(lambda: len(records.sizes) >= 3)
        await store_server.raw.set(KEY, "no record")
        await until(lambda: a.away)
        await fails(a, FIRST)
        await until(lambda: a.states()[FIRST] == "open")
        asked = len(records.sizes)
        await until(lambda: len(records.sizes) > asked + 6)
        assert a.away and a.states()[FIRST] == "open"
        await store_server.raw.delete(KEY)
        await until(lambda: not a.away and a.states()[FIRST] == "closed")


async def test_what_is_pushed_while_the_store_comes_back_is_not_lost(store_server: Any) -> None:
    """A push that nobody believed, since the round that ends the store's being away was not whole yet, is found right after it."""
    async with gateway(store_server, BreakerSettings(poll=Duration(3600))) as (a, records):
        await until(lambda: len(records.sizes) >= 3)
        person = BreakerRecords(await store_server.open(), POLICY)
        await store_server.raw.set(KEY, "no record")
        await fails(a, LAST)
        await until(lambda: a.away)
        await store_server.raw.delete(KEY)

        async def pinned_meanwhile(workers: Mapping[str, str]) -> None:
            if FIRST in workers and a.away:
                await person.pin(FIRST, "p", "open", lasts_s=60, by="ann")

        records.between = pinned_meanwhile
        a.members({"p": [*FLEET, "new"]})  # somebody to ask about now
        await until(lambda: not a.away and a.states()[FIRST] == "open")

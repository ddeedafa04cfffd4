"""Pins of breakers over real stores that lose them: set again in their person's name, and never after they were taken away."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import pytest_asyncio

from sentinel.controller.pinned import Pin, Pinned
from sentinel.store import StoreError
from sentinel.store.breakers import PINS_BY, BreakerRecords, Standing


class Hand:
    """One leadership's hand on the breakers of one store."""

    def __init__(self, store: Any) -> None:
        self.store, self.records = store, BreakerRecords(store)
        self.pins: dict[str, Pin] = {}
        self.now, self.leads = 1000.0, True
        self.pinned = self.led()

    def led(self) -> Pinned:
        return Pinned(self.records, self.pins, clock=lambda: self.now, valid=lambda: self.leads)

    async def hold(self, state: Any, by: str = "ann", lasts_s: float = 600.0, why: str = "mine") -> Standing:
        return await self.pinned.hold("w1", "p", state, lasts_s=lasts_s, by=by, why=why)

    async def stands(self) -> list[Standing]:
        await asyncio.sleep(0.002)  # a look of the same millisecond as the last word is no news
        return await self.records.listing({"w1": "p"}, evidence=True)

    async def look(self) -> tuple[str, str]:
        """A round: who holds it then, as it is told and as the store has it."""
        (told,) = await self.pinned.kept(await self.stands())
        (stored,) = await self.stands()
        assert (told.pin, told.pin_by) == (stored.pin, stored.pin_by)
        return stored.pin, stored.pin_by

    async def lose(self) -> None:
        await self.store._client.flushall()


@pytest_asyncio.fixture
async def hand(store_server: Any) -> Hand:
    return Hand(await store_server.open())


@pytest.mark.parametrize("by", ["ann", PINS_BY])
async def test_a_lost_pin_is_set_again_with_what_is_left(hand: Hand, by: str) -> None:
    """Whoever set it, and for the rest of its time only, with its own reason; the time of an outage counts."""
    await hand.hold("open", by, why="wrong answers")
    assert await hand.look() == ("open", by)
    hand.now += 200
    await hand.lose()
    assert await hand.look() == ("open", by)
    (stands,) = await hand.stands()
    assert 390_000 < stands.pin_left <= 400_000 and stands.why == "wrong answers"
    hand.now += 399.5
    await hand.lose()
    assert await hand.look() == ("", "")


async def test_a_pin_that_another_leader_had_set_is_known_by_a_look(hand: Hand) -> None:
    """Pins of before this leadership are learned by its rounds, and handed to the next one of the same process."""
    await hand.records.pin("w1", "p", "closed", lasts_s=600, by="ann", why="it is well")
    assert await hand.look() == ("closed", "ann")
    await hand.lose()
    hand.pinned = hand.led()
    assert await hand.look() == ("closed", "ann")


async def test_what_was_taken_away_never_comes_back(hand: Hand) -> None:
    """By a look that had begun before, by one after the data were lost, and by one while it cannot be told whether it is away."""
    await hand.hold("open")
    before = await hand.stands()
    await hand.hold("", "bob")
    await hand.pinned.kept(before)
    assert await hand.look() == ("", "")
    await hand.lose()
    assert await hand.look() == ("", "")


async def test_what_may_have_been_taken_away_never_comes_back(hand: Hand, store_server: Any) -> None:
    """The store took it away, or not, and its answer was lost: its own record counts, and no memory."""
    hand = Hand(await store_server.open(timeout=0.3))
    await hand.hold("open")
    before = await hand.stands()
    store_server.pause()
    with pytest.raises(StoreError):
        await hand.hold("")
    store_server.resume()
    await store_server.told(lambda: hand.pinned.kept(before))
    await store_server.told(hand.look)
    await hand.lose()
    assert await hand.look() == ("", "")


async def test_a_breaker_that_opened_after_the_loss_is_held_again(hand: Hand) -> None:
    """A worker that fails, and is held closed, has a record anew at once: that it is newer says nothing of the pin."""
    await hand.hold("closed")
    await hand.lose()
    for reporter in ("h1/1", "h2/1"):
        await hand.records.failed("w1", "p", ["w2", "w3"], reporter, version=0, fine=0, failed=20, draw=0.0)
    (stands,) = await hand.stands()
    assert stands.state == "open" and stands.version > 0
    assert await hand.look() == ("closed", "ann")


async def test_a_persons_pin_wins_while_the_store_has_lost_it(hand: Hand) -> None:
    """Sentinel neither takes its place nor makes it forgotten; it is told whose it is. Another person's takes its place."""
    for state in ("open", ""):
        await hand.hold("closed")
        await hand.lose()
        stands = await hand.hold(state, PINS_BY)
        assert (stands.pin, stands.pin_by) == ("closed", "ann")
        assert await hand.look() == ("closed", "ann")
    await hand.lose()
    await hand.records.pin("w1", "p", "open", lasts_s=600, by=PINS_BY)
    assert await hand.look() == ("closed", "ann")
    await hand.hold("open", "bob")
    assert await hand.look() == ("open", "bob")


async def test_who_may_not_lead_any_more_sets_nothing_again(hand: Hand) -> None:
    """Under another leader somebody may have taken it away."""
    await hand.hold("open")
    await hand.lose()
    hand.leads = False
    assert await hand.look() == ("", "")

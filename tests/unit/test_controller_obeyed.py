"""A stop waits for the gateways' word; pins are carried out, or say why not."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any

from sentinel.controller.commands import CommandDesk
from sentinel.controller.effects import Effects
from sentinel.decide.state.events import AnyInstruction, AwaitIdle, Done, PinBreaker
from sentinel.model import Worker
from sentinel.store import StoreError
from sentinel.testing.control import PagerStandIn, ServingStandIn, until

NOW = 1000.0


@dataclass
class GatewaysStandIn:
    """Stands where the store's table of gateways and its breakers would. ``older``: what each answer to ``behind`` is, the last one
    for good; an exception is raised."""

    older: list[list[str] | Exception] = field(default_factory=lambda: [[]])
    asked: list[int] = field(default_factory=list)
    pinned: list[tuple[str, str, float, str]] = field(default_factory=list)
    theirs: str = ""
    tables: list[int] = field(default_factory=lambda: [7])  # what is published at each question for it, the last one for good

    def version(self) -> int:
        return self.tables.pop(0) if len(self.tables) > 1 else self.tables[0]

    async def behind(self, version: int) -> list[str]:
        self.asked.append(version)
        answer = self.older.pop(0) if len(self.older) > 1 else self.older[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def pin(self, worker: Worker, state: str, *, lasts_s: float, by: str, why: str) -> str:
        self.pinned.append((worker.name, state, lasts_s, by))
        return self.theirs


async def end_of(effect: Any, gateways: GatewaysStandIn | None, serving: ServingStandIn, *, left: float = 60.0) -> Done:
    """How one effect ends. Time stands still until somebody has asked ten times, then the deadline of ``left`` seconds is over."""
    dones: list[Done] = []

    async def done(event: Done) -> list[AnyInstruction]:
        dones.append(event)
        return []

    async def look(worker: Worker) -> bool | None:
        return None

    def clock() -> float:
        asked = len(gateways.asked) if gateways else 0
        return NOW + (left if asked > 3 else 0.0)

    numbers = itertools.count()
    effects = Effects(
        serving=serving, hands=CommandDesk(), pager=PagerStandIn(), worker={"w": Worker(name="w", pool="p", url="http://w")}.get,
        look=look, done=done, valid=lambda: True, new_id=lambda: f"ev-{next(numbers)}", gateways=gateways, clock=clock,
    )  # fmt: skip
    try:
        effects.begin([effect])
        await until(lambda: dones, "the effect ends")
    finally:
        await effects.close()
    return dones[0]


def idle(until_: float = NOW + 60.0) -> AwaitIdle:
    return AwaitIdle(id="d/idle/0", cause="ev", lane="idle:d", worker="w", until=until_)


async def test_idle_is_asked_only_when_no_gateway_sends_any_more() -> None:
    """Nothing in flight means nothing while a gateway may still send; both known, it is idle."""
    gateways, serving = GatewaysStandIn(older=[["g1", "g2"], StoreError("away"), []]), ServingStandIn()
    done = await end_of(idle(), gateways, serving)
    assert done.ok is True and gateways.asked == [7, 7, 7]
    assert serving.did("in_flight") == ["w"]


async def test_what_could_not_be_told_is_asked_of_the_newest_table() -> None:
    """Gateways that obeyed none of our tables obey the one that was lifted above theirs, or a newer one; older ones they never saw.
    Those that are merely behind are not chased with every new table."""
    above = StoreError("g1 obeys table 9, and the last one published is 7")
    gateways = GatewaysStandIn(older=[above, above, ["g1"], []], tables=[7, 7, 10, 11, 12])
    assert (await end_of(idle(), gateways, ServingStandIn())).ok is True
    assert gateways.asked == [7, 7, 10, 10]


async def test_a_gateway_that_never_obeys_ends_at_the_deadline() -> None:
    """The deadline bounds the wait; which gateway was waited for, and for which table, is said; nobody asks what is in flight."""
    gateways, serving = GatewaysStandIn(older=[["g2"]]), ServingStandIn()
    done = await end_of(idle(), gateways, serving)
    assert done.ok is False and serving.did("in_flight") == []
    assert done.detail == "the deadline passed before g2 obeyed table 7, which is without w"
    assert done.facts == {"gateways": ["g2"]}


async def test_a_store_that_cannot_tell_is_no_word() -> None:
    """Could not tell is not obeyed: the deadline ends it, with the store's own sentence."""
    done = await end_of(idle(), GatewaysStandIn(older=[StoreError("the store is away")]), ServingStandIn())
    assert done.ok is False and done.detail.endswith("which is without w (the store is away)")


async def test_without_gateways_nothing_is_waited_for() -> None:
    """Where there is no gateway an idle worker is idle at once."""
    serving = ServingStandIn()
    assert (await end_of(idle(), None, serving)).ok is True
    assert (await end_of(idle(), GatewaysStandIn(), serving)).ok is True


async def test_pins_are_carried_out_or_say_why_not() -> None:
    """A pin lasts until its time; one whose time is over, one that is a person's and one without gateways say so."""

    def pin(until_: float = NOW + 30.0) -> PinBreaker:
        return PinBreaker(id="pin/w/1", cause="ev", lane="breaker:w", worker="w", state="open", until=until_)

    gateways = GatewaysStandIn()
    assert (await end_of(pin(), gateways, ServingStandIn())).ok is True
    assert gateways.pinned == [("w", "open", 30.0, "sentinel")]
    late = await end_of(pin(NOW - 1), gateways, ServingStandIn())
    assert late.ok is False and "time was over" in late.detail and len(gateways.pinned) == 1
    held = await end_of(pin(), GatewaysStandIn(theirs="ann holds the breaker of w closed"), ServingStandIn())
    assert (held.ok, held.detail) == (False, "ann holds the breaker of w closed")
    nobody = await end_of(pin(), None, ServingStandIn())
    assert nobody.ok is False and "no gateway" in nobody.detail
    await asyncio.sleep(0)

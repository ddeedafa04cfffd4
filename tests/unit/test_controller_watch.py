"""The controller's own look at workers: one that hangs delays no other, and could-not-tell is not unreachable."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from sentinel.controller.core import SteppedDown
from sentinel.controller.watch import Watch
from sentinel.decide.state.events import AnyInstruction, Watched
from sentinel.model import Worker, WorkerSeen
from sentinel.serving import AdapterError
from sentinel.testing.control import ServingStandIn, until

WORKERS = tuple(Worker(name=n, pool="p", url=f"http://{n}") for n in ("a", "b", "c"))


class Hanging(ServingStandIn):
    """Worker a never answers a look; worker b's adapter cannot tell."""

    async def look(self, worker: Worker) -> WorkerSeen | None:
        if worker.name == "a":
            await asyncio.Event().wait()
        if worker.name == "b":
            raise AdapterError("no answer")
        return await super().look(worker)


class Eyes:
    def __init__(self, serving: ServingStandIn) -> None:
        self.events: list[Watched] = []
        self.leading = True
        numbers = itertools.count()
        self.watch = Watch(serving=serving, every=0.01, feed=self._feed, new_id=lambda: f"ev-{next(numbers)}", clock=lambda: 5.0)

    async def _feed(self, event: Watched) -> list[AnyInstruction]:
        if not self.leading:
            raise SteppedDown
        self.events.append(event)
        return []

    def seen(self, worker: str) -> list[bool | None]:
        return [e.reachable for e in self.events if e.worker == worker]


@pytest_asyncio.fixture
async def made() -> AsyncIterator[list[Eyes]]:
    made: list[Eyes] = []
    yield made
    for eyes in made:
        await eyes.watch.close()


class TestWatch:
    async def test_each_worker_is_looked_at_again_and_again(self, made: list[Eyes]) -> None:
        """Every look becomes a Watched with what was seen; a worker that is not there is unreachable, not unknown."""
        made.append(eyes := Eyes(ServingStandIn(away={"b"}, busy={"a": 7})))
        eyes.watch.follow(WORKERS)
        await until(lambda: all(len(eyes.seen(w.name)) >= 3 for w in WORKERS), "three looks at each")
        assert set(eyes.seen("a")) == {True}
        assert set(eyes.seen("b")) == {False}
        seen = next(e.seen for e in eyes.events if e.worker == "a")
        assert seen is not None
        assert seen.running == 7

    async def test_one_that_hangs_delays_no_other(self, made: list[Eyes]) -> None:
        """A look that never ends costs that worker's looks only; could not tell is None."""
        made.append(eyes := Eyes(Hanging()))
        eyes.watch.follow(WORKERS)
        await until(lambda: len(eyes.seen("c")) >= 5 and len(eyes.seen("b")) >= 2, "the others are looked at")
        assert eyes.seen("a") == []
        assert set(eyes.seen("b")) == {None}

    async def test_following_another_fleet_forgets_the_old_one(self, made: list[Eyes]) -> None:
        """After a reload only the workers of the new fleet are looked at."""
        made.append(eyes := Eyes(ServingStandIn()))
        eyes.watch.follow(WORKERS)
        await until(lambda: eyes.seen("a"), "a is looked at")
        eyes.watch.follow(WORKERS[1:])
        await asyncio.sleep(0.03)
        before = len(eyes.seen("a"))
        await until(lambda: len(eyes.seen("b")) >= 5, "b is looked at")
        assert len(eyes.seen("a")) == before

    async def test_a_leader_that_stepped_down_stops_looking(self, made: list[Eyes]) -> None:
        """Once an event is refused, the looks end by themselves."""
        serving = ServingStandIn()
        made.append(eyes := Eyes(serving))
        eyes.watch.follow(WORKERS[:1])
        await until(lambda: eyes.seen("a"), "a is looked at")
        eyes.leading = False
        await asyncio.sleep(0.05)
        before = len(serving.did("look"))
        await asyncio.sleep(0.05)
        assert len(serving.did("look")) == before

    async def test_a_large_fleet_is_looked_at_in_turn_and_who_matters_at_once(
        self, made: list[Eyes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Workers that answer wait for their turn; one that does not answer, or that the decider asks about, does not."""
        made.append(eyes := Eyes(ServingStandIn(away={"b"})))
        others = tuple(Worker(name=f"w{n}", pool="p", url=f"http://w{n}") for n in range(20_000))  # a round takes 200 s
        monkeypatch.setattr("sentinel.controller.watch.SOON_S", 0.5)
        eyes.watch.follow((*WORKERS, *others))
        await eyes.watch.asked(WORKERS[0])
        await eyes.watch.asked(WORKERS[1])
        await until(lambda: len(eyes.seen("a")) >= 3 and len(eyes.seen("b")) >= 3, "both are looked at every 10 ms")
        await asyncio.sleep(0.7)
        before = len(eyes.seen("a"))
        await until(lambda: len(eyes.seen("b")) >= 10, "the one that does not answer is looked at on and on")
        assert len(eyes.seen("a")) <= before + 1
        assert len({e.worker for e in eyes.events}) < 1000

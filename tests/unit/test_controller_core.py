"""The core: durable before acknowledged, acknowledged before acted upon, on a real Redis with a decider of our own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from sentinel.boottime import boottime
from sentinel.controller.core import Busy, Core, DeciderFailed, SteppedDown
from sentinel.controller.journal import Journal, read_journal
from sentinel.controller.leader import Lease
from sentinel.controller.ledger import Ledger
from sentinel.controller.metrics import Metrics
from sentinel.decide.state.events import AnyEffect, AnyEvent, AnyInstruction, Asked, Deroute, Done, Forget, Record, Reported, Tick
from sentinel.model import Component, Drain, Finding, Fleet, Hold, Kind, Report, Response, Routes
from sentinel.store import Store
from sentinel.testing.control import RedisServer, until


def drain(number: int) -> Drain:
    return Drain(id=f"d{number}", worker="w", response=Response.DRAIN, reason="test", requested_at=1.0)


class Scripted:
    """A decider that answers each event with what it was given for it, and remembers the order."""

    def __init__(self) -> None:
        self.answers: dict[str, list[AnyInstruction] | Exception] = {}
        self.seen: list[str] = []

    def handle(self, event: AnyEvent) -> list[AnyInstruction]:
        self.seen.append(event.id)
        answer = self.answers.get(event.id, [])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def explain(self, target: str) -> dict[str, Any]:
        return {}

    def status(self) -> dict[str, Any]:
        return {}

    def nodes_of(self, target: str) -> list[str]:
        return []

    def held_back(self) -> frozenset[str]:
        return frozenset()

    def watch(self, node: str) -> dict[tuple[Component, str], bool]:
        return {}


class Bench:
    """A core on a real store, with everything it touches at hand."""

    def __init__(self, store: Store, epoch: int, directory: Path) -> None:
        self.store, self.epoch, self.directory = store, epoch, directory
        self.lease = Lease(epoch, 30.0, boottime(), boottime)
        self.decider, self.ledger, self.metrics = Scripted(), Ledger(Fleet()), Metrics()
        self.begun: list[AnyEffect] = []
        self.journal = Journal(directory, 1 << 20)
        self.core = Core(
            decider=self.decider, store=store.decisions, epoch=epoch, valid=self.lease.valid, ledger=self.ledger,
            journal=self.journal, metrics=self.metrics, begin=self.begin, capacity=4,
        )  # fmt: skip
        self.task = asyncio.create_task(self.core.run())

    def begin(self, effects: Sequence[AnyEffect]) -> None:
        self.begun += effects

    def says(self, event: AnyEvent, *instructions: AnyInstruction) -> AnyEvent:
        self.decider.answers[event.id] = list(instructions)
        return event


@pytest_asyncio.fixture
async def server(program: Callable[[str], Path]) -> AsyncIterator[RedisServer]:
    server = RedisServer(program("redis-server"))
    try:
        await server.start()
        yield server
    finally:
        server.close()


@pytest_asyncio.fixture
async def bench(server: RedisServer, tmp_path: Path) -> AsyncIterator[Bench]:
    store = await server.open(timeout_s=0.2)
    epoch = await store.lease.acquire("test", "http://test", 30.0)
    assert epoch is not None
    bench = Bench(store, epoch, tmp_path)
    yield bench
    bench.task.cancel()
    await asyncio.gather(bench.task, return_exceptions=True)
    server.resume()
    await store.close()


def tick(n: int) -> Tick:
    return Tick(id=f"ev-{n}", at=float(n))


def report(n: int, *, weight: bool = True) -> Reported:
    event = Finding(id=f"x-{n}", check="xid.79", component=Component(node="t01"), at=float(n), kind=Kind.EVENT)
    findings = (event,) if weight else ()
    return Reported(id=f"re-{n}", at=float(n), report=Report(node="t01", session="s", seq=n, at=float(n), findings=findings))


def put(number: int, cause: str = "ev-1") -> Record:
    return Record(id=f"drain/d{number}", cause=cause, kind="drain", key=f"d{number}", value=drain(number))


def deroute(number: int, cause: str = "ev-1") -> Deroute:
    return Deroute(id=f"d{number}/deroute/0", cause=cause, lane="worker:w", worker="w")


class TestDurable:
    async def test_what_was_decided_is_in_the_store_when_the_future_resolves(self, bench: Bench) -> None:
        """Records, a pending effect, and the route table are durable, journaled and shown; only then the effect begins."""
        routes = Routes(version=1, why="test")
        record = Record(id="routes", cause="ev-1", kind="routes", key="routes", value=routes)
        decided = await bench.core.submit(bench.says(tick(1), put(1), record, deroute(1)))
        stored = await bench.store.decisions.load()
        assert stored.drains == (drain(1),)
        assert stored.routes == routes
        assert [msgspec.json.decode(b)["worker"] for b in stored.pending.values()] == ["w"]
        assert bench.ledger.drains == {"d1": drain(1)}
        assert len(decided) == 3
        bench.journal.close()
        assert [len(e.instructions) for e in read_journal(bench.directory)] == [3]
        await until(lambda: bench.begun == [deroute(1)], "the effect begins")

    async def test_done_and_its_consequences_are_one_commit(self, bench: Bench) -> None:
        """The end of an effect removes it from what is pending together with what it led to."""
        await bench.core.submit(bench.says(tick(1), put(1), deroute(1)))
        done = Done(id="ev-2", at=2.0, instruction=deroute(1).id, ok=True)
        await bench.core.submit(bench.says(done, Forget(id="drain/d1", cause="ev-2", kind="drain", key="d1"), deroute(2, "ev-2")))
        stored = await bench.store.decisions.load()
        assert stored.drains == ()
        assert list(stored.pending) == [deroute(2).id]
        assert list(bench.ledger.pending) == [deroute(2).id]

    async def test_the_last_word_on_a_key_wins(self, bench: Bench) -> None:
        """Several decisions about one hold within one batch leave the last one, as the decider meant it."""
        hold = Hold(target="w", keep="in", by="ada", reason="test", at=1.0)
        first = bench.core.submit(bench.says(tick(1), Record(id="h", cause="ev-1", kind="hold", key="w", value=hold)))
        second = bench.core.submit(bench.says(tick(2), Forget(id="h", cause="ev-2", kind="hold", key="w")))
        last = msgspec.structs.replace(hold, keep="out")
        third = bench.core.submit(bench.says(tick(3), Record(id="h", cause="ev-3", kind="hold", key="w", value=last)))
        await asyncio.gather(first, second, third)
        assert (await bench.store.decisions.load()).holds == (last,)
        assert bench.decider.seen == ["ev-1", "ev-2", "ev-3"]

    async def test_news_go_first_and_hold_nothing_up_for_ever(self, bench: Bench) -> None:
        """News and people's words are decided before what the shell has to say, one of which is taken after each eight."""
        told = [bench.core.submit(tick(n)) for n in (1, 2)]
        told += [bench.core.submit(report(n)) for n in (1, 2)]
        told += [bench.core.submit(Asked(id=f"ask-{n}", at=float(n), verb="undrain", target="w", by="ada")) for n in range(18)]
        await asyncio.gather(*told)
        asked = [f"ask-{n}" for n in range(18)]
        assert bench.decider.seen == ["re-1", "re-2", *asked[:6], "ev-1", *asked[6:14], "ev-2", *asked[14:]]

    async def test_a_paused_store_delays_and_loses_nothing(self, bench: Bench, server: RedisServer) -> None:
        """While the store cannot tell, nothing is acknowledged and nothing begins; the same commit succeeds afterwards."""
        server.pause()
        future = bench.core.submit(bench.says(tick(1), put(1), deroute(1)))
        await until(lambda: bench.metrics.store_errors._value.get() >= 2, "the commit is tried more than once")
        assert not future.done()
        assert bench.begun == []
        assert bench.ledger.drains == {}
        server.resume()
        await future
        assert (await bench.store.decisions.load()).drains == (drain(1),)
        await until(lambda: bench.begun == [deroute(1)], "the effect begins once")


class TestSteppingDown:
    async def test_another_leader_ends_it_without_a_trace(self, bench: Bench) -> None:
        """A commit that lost the race fails every waiting future with SteppedDown and begins nothing."""
        await bench.store.lease.release(bench.epoch)
        assert await bench.store.lease.acquire("other", "http://other", 30.0)
        future = bench.core.submit(bench.says(tick(1), put(1), deroute(1)))
        late = bench.core.submit(tick(2))
        with pytest.raises(SteppedDown):
            await future
        with pytest.raises(SteppedDown):
            await late
        with pytest.raises(SteppedDown):
            bench.core.submit(tick(3))
        assert bench.begun == []
        assert (await bench.store.decisions.load()).drains == ()

    async def test_a_lease_that_ran_out_ends_it_even_when_there_is_nothing_to_write(self, bench: Bench) -> None:
        """A report judged by yesterday's leader is not taken off its agent, although it caused nothing."""
        bench.lease.end()
        future = bench.core.submit(report(1))
        with pytest.raises(SteppedDown):
            await future

    async def test_a_store_away_past_the_lease_ends_it(self, bench: Bench, server: RedisServer) -> None:
        """The commit is tried again only while the lease can be ours."""
        server.pause()
        future = bench.core.submit(bench.says(tick(1), put(1), deroute(1)))
        await until(lambda: bench.metrics.store_errors._value.get() >= 1, "the commit fails once")
        bench.lease.end()
        with pytest.raises(SteppedDown):
            await future
        assert bench.begun == []


class TestLimits:
    async def test_a_full_queue_refuses_reports_and_nothing_else(self, bench: Bench, server: RedisServer) -> None:
        """Reports beyond the bound are Busy; ticks and the ends of effects still fit, and all that was taken is decided."""
        server.pause()
        stuck = bench.core.submit(bench.says(tick(0), put(1)))
        await until(lambda: bench.decider.seen, "the first batch is under way")
        taken = [bench.core.submit(report(n)) for n in range(4)]
        with pytest.raises(Busy):
            bench.core.submit(report(9))
        taken.append(bench.core.submit(tick(9)))
        server.resume()
        await asyncio.gather(stuck, *taken)
        assert bench.decider.seen == ["ev-0", "re-0", "re-1", "re-2", "re-3", "ev-9"]

    async def test_reports_without_weight_wait_behind_the_rest_and_go_first(self, bench: Bench, server: RedisServer) -> None:
        """They are turned away while there is room for news of weight, and news that comes later is decided before them."""
        server.pause()
        stuck = bench.core.submit(bench.says(tick(0), put(1)))
        await until(lambda: bench.decider.seen, "the first batch is under way")
        taken = [bench.core.submit(report(1, weight=False))]
        with pytest.raises(Busy):
            bench.core.submit(report(2, weight=False))
        taken += [bench.core.submit(report(n)) for n in (3, 4, 5)]
        server.resume()
        await asyncio.gather(stuck, *taken)
        assert bench.decider.seen == ["ev-0", "re-3", "re-4", "re-5", "re-1"]

    async def test_an_event_the_decider_fails_on_takes_nothing_else_down(self, bench: Bench) -> None:
        """It is answered with DeciderFailed and journaled; its neighbours are decided, and a failed Done stays pending."""
        await bench.core.submit(bench.says(tick(1), deroute(1)))
        bench.decider.answers["ev-2"] = KeyError("a bug")
        bad = bench.core.submit(Done(id="ev-2", at=2.0, instruction=deroute(1).id, ok=True))
        good = bench.core.submit(bench.says(tick(3), put(1, "ev-3")))
        with pytest.raises(DeciderFailed, match="KeyError"):
            await bad
        await good
        stored = await bench.store.decisions.load()
        assert list(stored.pending) == [deroute(1).id]
        assert stored.drains == (drain(1),)
        bench.journal.close()
        assert [bool(e.error) for e in read_journal(bench.directory)] == [False, True, False]

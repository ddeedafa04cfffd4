"""The route table by its news: what a batch changed is written and pushed, and every reader ends with the same table."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from sentinel.model import Role, RouteEntry, RoutePool, Routes, WorkerState
from sentinel.store import PublishRoutes, Put
from sentinel.store.decisions import WHOLE_S, Decisions

WHOLE, NEWS = "{sentinel}:routes", "{sentinel}:routes:news"


def table(version: int, out: int = 0, workers: int = 40) -> Routes:
    """``out`` of the workers have left."""
    states = [WorkerState.OUT if n < out else WorkerState.ACTIVE for n in range(workers)]
    rows = tuple(RouteEntry(worker=f"w{n}", url=f"http://w{n}", role=Role.DECODE, state=s) for n, s in enumerate(states))
    return Routes(version=version, at=float(version), why=f"{out} out", pools=(RoutePool(pool="p", weight=1.0, workers=rows),))


class Leading:
    """A leader with a clock of the test's own."""

    def __init__(self, store: Any, epoch: int) -> None:
        self.now = 0.0
        self.epoch = epoch
        self.decisions = Decisions(store._door, store.lease, clock=lambda: self.now)

    async def publish(self, *tables: Routes) -> bool:
        return await self.decisions.commit(self.epoch, [PublishRoutes(t) for t in tables])


async def leading(store: Any, name: str = "a") -> Leading:
    epoch = await store.lease.acquire(name, f"http://{name}", 300)
    assert epoch is not None
    return Leading(store, epoch)


class Follower:
    """One watcher, which keeps the newest table."""

    def __init__(self, store: Any, poll_s: float = 3600.0) -> None:
        self.versions: list[int] = []
        self.table: Routes | None = None
        self.task = asyncio.create_task(self._watch(store, poll_s))

    async def _watch(self, store: Any, poll_s: float) -> None:
        async for routes in store.watch_routes(poll_s):
            self.versions.append(routes.version)
            self.table = routes

    async def has(self, wanted: Routes) -> None:
        while self.table != wanted:
            assert not self.task.done(), self.task
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        assert self.versions == sorted(set(self.versions)), "never back, never twice"


async def test_what_changed_is_written_and_pushed_and_nothing_else(store_server: Any) -> None:
    """The whole table stays as it stood, the news name the one row, and whoever watches or reads has the newest table."""
    a, b = await store_server.open(), await store_server.open()
    leader = await leading(a)
    await leader.publish(table(1))
    watcher = Follower(b)
    await watcher.has(table(1))
    stood = await store_server.raw.get(WHOLE)
    await leader.publish(table(2, out=1))
    await leader.publish(table(3, out=2), table(4, out=3))
    await watcher.has(table(4, out=3))
    assert await store_server.raw.get(WHOLE) == stood
    news = [msgspec.json.decode(n) for n in await store_server.raw.lrange(NEWS, 0, -1)]
    assert [[e["worker"] for p in n["pools"] for e in p["workers"]] for n in news] == [["w0"], ["w1"], ["w2"]]
    assert await b.routes() == table(4, out=3) == (await b.decisions.load()).routes
    await watcher.stop()


async def test_the_whole_table_follows_its_news(store_server: Any) -> None:
    """The first commit after ``WHOLE_S``, an empty one too, writes it again and ends the list; readers of before see it pushed."""
    a = await store_server.open()
    leader, raw = await leading(a), store_server.raw
    await leader.publish(table(1))
    old = raw.pubsub(ignore_subscribe_messages=True)
    await old.subscribe(WHOLE)
    await leader.publish(table(2, out=1))
    leader.now = WHOLE_S - 0.01
    await leader.publish(table(3, out=2))
    assert await raw.llen(NEWS) == 2
    leader.now = WHOLE_S
    assert await leader.decisions.commit(leader.epoch, [])
    assert await raw.llen(NEWS) == 0
    assert msgspec.json.decode(await raw.get(WHOLE), type=Routes) == table(3, out=2)
    pushed = None
    while pushed is None:
        pushed = await old.get_message(timeout=1.0)
    assert msgspec.json.decode(pushed["data"], type=Routes) == table(3, out=2)
    await old.aclose()
    assert await leader.decisions.commit(leader.epoch, []), "and then there is nothing to follow"
    await leader.publish(table(4, out=3))
    assert await a.routes() == table(4, out=3)


async def test_news_that_were_not_pushed_are_found(store_server: Any) -> None:
    """A push that is lost is made up for by the slow poll."""
    a, b = await store_server.open(), await store_server.open()
    leader = await leading(a)
    await leader.publish(table(1))
    watcher = Follower(b, poll_s=0.05)
    await watcher.has(table(1))
    news = {"type": "RouteNews", "version": 2, "before": 1, "at": 2.0, "why": "0 out", "pools": []}
    await store_server.raw.rpush(NEWS, msgspec.json.encode(news))
    await watcher.has(table(2))
    await watcher.stop()


async def test_a_gap_in_what_was_pushed_is_closed(store_server: Any) -> None:
    """News upon a table which the watcher has not seen send it to read everything, and lies on the channel change nothing."""
    a, b = await store_server.open(), await store_server.open()
    leader, raw = await leading(a), store_server.raw
    await leader.publish(table(1))
    watcher = Follower(b)
    await watcher.has(table(1))
    for lie in (b'{"type":"RouteNews","version":9,"before":8,"pools":[]}', b'{"type":"RouteNews","version":9}', b"\xff", b"[]"):
        await raw.publish(NEWS, lie)
    missed = {"type": "RouteNews", "version": 2, "before": 1, "at": 2.0, "why": "0 out", "pools": []}
    await raw.rpush(NEWS, msgspec.json.encode(missed))
    after = missed | {"version": 3, "before": 2, "at": 3.0}
    await raw.rpush(NEWS, msgspec.json.encode(after))
    await raw.publish(NEWS, msgspec.json.encode(after))
    await watcher.has(table(3))
    await watcher.stop()


async def test_who_starts_in_the_middle_has_it_all(store_server: Any) -> None:
    """A gateway that starts, or starts anew, while news stand behind the table goes on from the newest, and follows."""
    a, b = await store_server.open(), await store_server.open()
    leader = await leading(a)
    await leader.publish(table(1))
    for out in (1, 2, 3):
        await leader.publish(table(1 + out, out=out))
        watcher = Follower(b)
        await watcher.has(table(1 + out, out=out))
        await watcher.stop()
    watcher = Follower(b)
    await watcher.has(table(4, out=3))
    await leader.publish(table(5, out=4))
    await watcher.has(table(5, out=4))
    await watcher.stop()


async def test_two_leaders_never_mix_their_news(store_server: Any) -> None:
    """A leader of yesterday adds no news to the next one's table, and the next one begins with a whole table."""
    a, b, c = await store_server.open(), await store_server.open(), await store_server.open()
    first = await leading(a)
    await first.publish(table(1))
    await first.publish(table(2, out=1))
    watcher = Follower(c)
    await watcher.has(table(2, out=1))
    await a.lease.release(first.epoch)
    second = await leading(b, "b")
    assert await first.publish(table(3, out=2)) is False
    assert await second.publish(table(4, out=3)) is True
    assert await store_server.raw.llen(NEWS) == 0
    assert await first.publish(table(5, out=4)) is False
    assert await second.publish(table(6, out=4)) is True
    await watcher.has(table(6, out=4))
    await b.lease.release(second.epoch)
    again = Leading(a, await a.lease.acquire("a", "http://a", 300))
    again.decisions = first.decisions
    assert await again.publish(table(7, out=5)) is True, "what it wrote under an older epoch is not built upon"
    await watcher.has(table(7, out=5))
    assert msgspec.json.decode(await store_server.raw.get(WHOLE), type=Routes) == table(7, out=5)
    await watcher.stop()


async def test_the_next_leader_makes_a_whole_of_what_the_last_one_left(store_server: Any) -> None:
    """A leader that dies within ``WHOLE_S`` leaves news; the next one's first commit, an empty one too, writes the whole table, so
    that readers that know no news do not stay behind until something changes."""
    a, b, raw = await store_server.open(), await store_server.open(), store_server.raw
    first = await leading(a)
    await first.publish(table(1))
    await first.publish(table(2, out=1))
    await a.lease.release(first.epoch)
    second = await leading(b, "b")
    assert (await second.decisions.load()).routes == table(2, out=1)
    old = raw.pubsub(ignore_subscribe_messages=True)
    await old.subscribe(WHOLE)
    await old.get_message(timeout=5.0)  # the server's word that it is in force
    assert await second.decisions.commit(second.epoch, [])
    assert msgspec.json.decode(await raw.get(WHOLE), type=Routes) == table(2, out=1)
    assert await raw.llen(NEWS) == 0
    pushed = None
    while pushed is None:
        pushed = await old.get_message(timeout=1.0)
    assert msgspec.json.decode(pushed["data"], type=Routes) == table(2, out=1)
    await old.aclose()
    await second.publish(table(3, out=2))
    assert await raw.llen(NEWS) == 1 and await a.routes() == table(3, out=2)
    assert (await second.decisions.load()).routes == table(3, out=2), "and looking again changes nothing"
    await second.publish(table(4, out=3))
    assert await a.routes() == table(4, out=3)


async def test_a_controller_that_knows_no_news_is_followed(store_server: Any) -> None:
    """During an upgrade the table may be replaced over standing news: the newer whole counts, and news go on upon it."""
    a, b, raw = await store_server.open(), await store_server.open(), store_server.raw
    leader = await leading(a)
    await leader.publish(table(1))
    await leader.publish(table(2, out=1))
    watcher = Follower(b)
    await watcher.has(table(2, out=1))
    older = msgspec.json.encode(table(3, out=2))
    await raw.set(WHOLE, older)
    await raw.publish(WHOLE, older)
    await watcher.has(table(3, out=2))
    assert await b.routes() == table(3, out=2)
    with pytest.raises(ValueError, match="version 3 does not rise above 3"):
        await leader.publish(table(3, out=3))
    await leader.publish(table(4, out=4))
    await leader.publish(table(5, out=5))
    await watcher.has(table(5, out=5))
    assert await b.routes() == table(5, out=5)
    await watcher.stop()


async def test_a_commit_of_news_that_could_not_be_told_is_repeated_harmlessly(store_server: Any) -> None:
    """The same news again, or the whole table that they led to, are as good as the first time."""
    a = await store_server.open()
    leader = await leading(a)
    await leader.publish(table(1))
    for version, later in ((2, 0.0), (3, 0.0), (4, WHOLE_S), (5, 3 * WHOLE_S)):
        before = leader.decisions._table
        leader.now = later
        batch = [Put("kept", "k", b"v"), PublishRoutes(table(version, out=version))]
        assert await leader.decisions.commit(leader.epoch, batch)
        stood = await store_server.raw.lrange(NEWS, 0, -1)
        leader.decisions._table = before  # as if the answer had been lost
        assert await leader.decisions.commit(leader.epoch, batch)
        assert await store_server.raw.lrange(NEWS, 0, -1) == stood
        assert await a.routes() == table(version, out=version)


async def test_a_table_that_was_removed_is_written_whole(store_server: Any) -> None:
    """News that would build on nothing are not written: the whole table is, in their place and in the same commit."""
    a = await store_server.open()
    leader = await leading(a)
    await leader.publish(table(1))
    await leader.publish(table(2, out=1))
    await store_server.raw.delete(WHOLE, NEWS)
    batch = [Put("kept", "k", b"v"), PublishRoutes(table(3, out=2))]
    assert await leader.decisions.commit(leader.epoch, batch) is True
    assert await a.routes() == table(3, out=2)
    assert await a.kept.get("k") == b"v"

"""A store that fails over: what was told done is not lost, no epoch is given twice, and an old primary is not believed.

Real servers and real Redis Sentinels (sentinel.testing.failover), killed, paused and told to fail over.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio

from sentinel.config import ConfigError, StoreSettings
from sentinel.model import Routes
from sentinel.store import PublishRoutes, Put, Store, StoreError, WentBack, open_store
from sentinel.testing.failover import HOST, RedisPair, free_ports

T = TypeVar("T")


class Stores:
    """Stores on one pair, closed with it."""

    def __init__(self, pair: RedisPair) -> None:
        self.pair = pair
        self._open: list[Store] = []

    async def open(self) -> Store:
        self._open.append(await self.pair.open())
        return self._open[-1]

    async def close(self) -> None:
        for store in self._open:
            await store.close()


@pytest_asyncio.fixture
async def stores(program: Callable[[str], Path]) -> AsyncIterator[Stores]:
    pair = RedisPair(program("redis-server"))
    stores = Stores(pair)
    try:
        await pair.start()
        yield stores
    finally:
        await stores.close()
        pair.close()


async def told(ask: Callable[[], Awaitable[T]], seconds: float = 30.0) -> T:
    """The first answer that is one: asks again for as long as it could not be told."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                return await ask()
            except StoreError:
                await asyncio.sleep(0.02)


class Writer:
    """Commits one numbered entry after the other, and remembers which were told done."""

    def __init__(self, store: Store, epoch: int) -> None:
        self.store, self.epoch = store, epoch
        self.done: list[str] = []
        self.untold = 0
        self.lost = 0  # times the store said that it had lost what it had told done
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        for n in range(1_000_000):
            changes = [Put("pending", f"e{n}", b"{}"), PublishRoutes(Routes(version=n + 1))]
            try:
                assert await self.store.decisions.commit(self.epoch, changes, anew=self.lost > 0)
                self.done.append(f"e{n}")
            except WentBack:
                self.lost += 1
            except StoreError:
                self.untold += 1
                await asyncio.sleep(0.01)

    async def reaches(self, more: int) -> None:
        """Wait until that many more are told done."""
        goal = len(self.done) + more
        async with asyncio.timeout(30):
            while len(self.done) < goal:
                assert not self._task.done(), self._task.result()
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


@pytest.mark.parametrize("how", ["kill", pytest.param("ask", marks=pytest.mark.long)])
async def test_nothing_told_done_is_lost_by_a_failover(stores: Stores, how: str) -> None:
    """The primary killed, or told to hand over, amid commits: each one told done is with the new primary, under the same lease;
    a watcher of routes goes on with it and sees versions rise."""
    pair = stores.pair
    a, b, reader = await stores.open(), await stores.open(), await stores.open()
    epoch = await a.lease.acquire("a", "http://a", 300)
    assert epoch == 1
    seen: list[int] = []

    async def watch() -> None:
        async for routes in reader.watch_routes(0.2):
            seen.append(routes.version)

    watching = asyncio.create_task(watch())
    writer = Writer(a, epoch)
    await writer.reaches(100)
    old = await pair.primary()
    if how == "kill":
        pair.kill(old)
    else:
        await pair.fail_over()
    new = await pair.changed(old)
    await writer.reaches(50)
    await writer.stop()
    assert writer.untold or how == "ask"
    assert writer.lost == 0
    assert set(writer.done) <= {k.decode() for k in await pair.ask(new, "HKEYS", "{sentinel}:pending")}
    assert await told(lambda: b.lease.acquire("b", "http://b", 300)) is None, "the lease is still a's"
    async with asyncio.timeout(10):
        while not seen or seen[-1] < len(writer.done):
            await asyncio.sleep(0.01)
    watching.cancel()
    assert seen == sorted(set(seen))
    assert await told(lambda: a.lease.renew(epoch, 300)) is True
    assert await told(lambda: a.lease.release(epoch)) is True
    assert await told(lambda: b.lease.acquire("b", "http://b", 300)) == epoch + 1 + 1000


async def test_an_epoch_that_was_lost_is_not_given_again(stores: Stores) -> None:
    """Leases that the replica never heard of (it was cut off, and then promoted) leave their epochs taken, and write nothing."""
    pair = stores.pair
    a, b = await stores.open(), await stores.open()
    old, replica = pair.servers
    first = await a.lease.acquire("a", "http://a", 300)
    await pair.ask(replica, "REPLICAOF", HOST, free_ports(1)[0])  # follows nobody now
    lost = [await told(lambda: a.lease.acquire("a", "http://a", 300)) for _ in range(3)]
    assert await told(lambda: a.decisions.commit(lost[-1] or 0, [Put("kept", "k", b"lost")])) is True
    pair.kill(old)
    await pair.appoint(replica)
    await pair.ask(replica, "DEL", "{sentinel}:lease")  # a's first lease, which would otherwise have to run out
    next_epoch = await told(lambda: b.lease.acquire("b", "http://b", 300))
    assert next_epoch is not None
    assert first not in lost
    assert next_epoch > max(e or 0 for e in lost)
    assert await told(lambda: a.decisions.commit(lost[-1] or 0, [Put("kept", "k", b"again")])) is False
    assert await told(lambda: a.lease.renew(lost[-1] or 0, 300)) is False
    assert await told(lambda: a.lease.acquire("a", "http://a", 300)) is None


async def test_an_old_primary_that_wakes_up_is_not_believed(stores: Stores) -> None:
    """Paused, replaced and woken, it still takes writes for seconds: none over a connection of before is told done, or lost."""
    pair = stores.pair
    a, b = await stores.open(), await stores.open()
    epoch = await a.lease.acquire("a", "http://a", 300) or 0
    assert await a.decisions.commit(epoch, [Put("kept", "k", b"before")]) is True
    await b.lease.leader()
    old = await pair.primary()
    pair.pause(old)
    new = await pair.changed(old)
    pair.resume(old)
    assert (await pair.ask(old, "ROLE"))[0] == b"master", "it does not know yet"
    with pytest.raises(StoreError, match="not the primary any more"):
        await a.decisions.commit(epoch, [Put("kept", "k", b"to the old one")])
    with pytest.raises(StoreError, match="not the primary any more"):
        await b.lease.acquire("b", "http://b", 300)
    assert await told(lambda: a.decisions.commit(epoch, [Put("kept", "k", b"after")])) is True
    assert await pair.ask(new, "HGET", "{sentinel}:kept", "k") == b"after"
    assert await told(lambda: b.lease.acquire("b", "http://b", 300)) is None


async def test_what_most_sentinels_do_not_say_is_not_told(stores: Stores) -> None:
    """One Sentinel or the replica hung or gone stops nothing; with two Sentinels gone it cannot be told, in a sentence."""
    pair = stores.pair
    a = await stores.open()
    epoch = await a.lease.acquire("a", "http://a", 300) or 0
    pair.pause(pair.servers[1])
    assert await a.decisions.commit(epoch, [Put("kept", "k", b"1")]) is True
    pair.resume(pair.servers[1])
    pair.pause(pair.sentinels[0])
    for n in range(5):
        assert await told(lambda n=n: a.decisions.commit(epoch, [Put("kept", "k", str(n).encode())])) is True  # type: ignore[misc]
    b = await stores.open()
    assert await told(lambda: b.lease.acquire("b", "http://b", 300)) is None, "one that has never asked before gets an answer too"
    pair.resume(pair.sentinels[0])
    pair.kill(pair.servers[1])
    assert await told(lambda: a.lease.renew(epoch, 300)) is True
    for port in pair.sentinels[:2]:
        pair.kill(port)
    with pytest.raises(StoreError, match=rf"only 1 of 3 Redis Sentinels answer \(.*{pair.sentinels[0]}: .*wanted most") as caught:
        await a.lease.renew(epoch, 300)
    assert "\n" not in str(caught.value)
    wrong = await open_store(StoreSettings(url=pair.url.replace("/fleet", "/float")))
    with pytest.raises(StoreError, match=r"no Redis Sentinel names a primary for 'float' .*No such master"):
        await wrong.ping()
    await wrong.close()


async def test_a_node_of_a_cluster_is_named(program: Callable[[str], Path], tmp_path: Path) -> None:
    """A URL that points at a node of a Redis Cluster is told so in one sentence, whichever way the node refuses."""
    port, bus = free_ports(2)
    cluster = ["--cluster-enabled", "yes", "--cluster-port", str(bus)]
    argv = [str(program("redis-server")), "--port", str(port), *cluster, "--save", "", "--dir", str(tmp_path)]
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    store = await open_store(StoreSettings(url=f"redis://{HOST}:{port}"))
    try:
        await told(store.ping)
        with pytest.raises(StoreError, match="is a node of a Redis Cluster, which sentinel does not use") as caught:
            await store.lease.acquire("a", "http://a", 30)
        assert "\n" not in str(caught.value)
    finally:
        await store.close()
        server.kill()
        server.wait()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis+sentinel://a:26379,b:26379", "expected the service"),
        ("redis+sentinel://a:26379,b:26379/", "expected the service"),
        ("redis+sentinel://a:99999/fleet", "'a:99999'"),
        ("redis+sentinel://a:1,,b:1/fleet", "host:port of each Sentinel"),
        ("redis+sentinel:///fleet", "host:port of each Sentinel"),
        ("redis+sentinel://:geheim@a:1/fleet", "holds a password"),
        ("redis+sentinel://a:1/fleet?nonsense=1", "cannot be used"),
        ("redis+cluster://a:1", "uses no Redis Cluster"),
    ],
)
async def test_urls_that_cannot_be_used(url: str, says: str) -> None:
    """Each is one ConfigError sentence that begins with the key, says what was wanted, and repeats no secret."""
    with pytest.raises(ConfigError) as caught:
        await open_store(StoreSettings(url=url))
    assert str(caught.value).startswith("store.url: ")
    assert says in str(caught.value)
    assert "geheim" not in str(caught.value)
    assert "\n" not in str(caught.value)

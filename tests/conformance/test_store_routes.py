"""The route table as it is watched: the newest always arrives, an older one never does."""

from __future__ import annotations

import asyncio
from typing import Any

from sentinel.model import Routes
from sentinel.store import PublishRoutes


class Watcher:
    """Collects what one watcher is given."""

    def __init__(self, store: Any, poll_s: float = 0.1) -> None:
        self.seen: list[int] = []
        self._task = asyncio.create_task(self._watch(store, poll_s))

    async def _watch(self, store: Any, poll_s: float) -> None:
        async for routes in store.watch_routes(poll_s):
            self.seen.append(routes.version)

    async def sees(self, version: int) -> None:
        while not (self.seen and self.seen[-1] == version):
            assert not self._task.done(), self._task
            await asyncio.sleep(0.005)

    async def stop(self) -> list[int]:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        assert self.seen == sorted(set(self.seen)), "never back, never twice"
        return self.seen


async def test_tables_are_pushed(store_server: Any) -> None:
    """A watcher gets the table that stands, then newer ones at once up to the newest, long before it would look by itself."""
    a, b = await store_server.open(), await store_server.open()
    epoch = await a.lease.acquire("a", "http://a", 30)
    assert await b.routes() is None
    await a.decisions.commit(epoch, [PublishRoutes(Routes(version=1))])
    watcher = Watcher(b, poll_s=3600)
    await watcher.sees(1)
    for version in range(2, 30):
        await a.decisions.commit(epoch, [PublishRoutes(Routes(version=version))])
    await watcher.sees(29)
    seen = await watcher.stop()
    assert (seen[0], seen[-1]) == (1, 29), "what comes while one is taken in may be one step"


async def test_a_lost_push_is_made_up_for(store_server: Any) -> None:
    """A table that was stored but never pushed is found by the slow poll."""
    b = await store_server.open()
    watcher = Watcher(b)
    await asyncio.sleep(0.05)
    await store_server.raw.set("{sentinel}:routes", '{"type":"Routes","version":4}')
    await watcher.sees(4)
    await watcher.stop()


async def test_old_and_garbage_pushes_are_not_believed(store_server: Any) -> None:
    """Neither an older table, nor garbage on the channel or in the key, reaches a watcher; the next good one does."""
    b, raw = await store_server.open(), store_server.raw
    watcher = Watcher(b)
    key = "{sentinel}:routes"
    await raw.set(key, '{"type":"Routes","version":8}')
    await watcher.sees(8)
    for body in ('{"type":"Routes","version":3}', b"\xff", "{}", "[1]", ""):
        await raw.publish(key, body)
        await raw.set(key, body)
    await asyncio.sleep(0.15)
    await raw.delete(key)
    await raw.lpush(key, "a list")
    await asyncio.sleep(0.15)
    await raw.delete(key)
    await raw.set(key, '{"type":"Routes","version":9}')
    await watcher.sees(9)
    assert await watcher.stop() == [8, 9]


async def test_watching_goes_on_after_the_server_was_away(store_server: Any) -> None:
    """A watcher outlives the server's death and return, and then gets what is newer than what it has."""
    a, b = await store_server.open(timeout=0.3), await store_server.open(timeout=0.3)
    epoch = await a.lease.acquire("a", "http://a", 300)
    await a.decisions.commit(epoch, [PublishRoutes(Routes(version=1))])
    watcher = Watcher(b)
    await watcher.sees(1)
    await store_server.kill()
    await asyncio.sleep(0.1)
    await store_server.restart()
    assert await store_server.told(lambda: a.decisions.commit(epoch, [PublishRoutes(Routes(version=2))])) is True
    await watcher.sees(2)
    await watcher.stop()


async def test_watching_goes_on_after_the_connection_was_cut(store_server: Any) -> None:
    """A watcher whose connections the server closes comes back by itself and gets pushes again."""
    a, b = await store_server.open(), await store_server.open()
    epoch = await a.lease.acquire("a", "http://a", 300)
    await a.decisions.commit(epoch, [PublishRoutes(Routes(version=1))])
    watcher = Watcher(b)
    await watcher.sees(1)
    await store_server.raw.client_kill_filter(_type="pubsub")
    await a.decisions.commit(epoch, [PublishRoutes(Routes(version=2))])
    await watcher.sees(2)
    await watcher.stop()

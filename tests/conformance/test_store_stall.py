"""A store that stands still for a moment, amid many questions at once."""

from __future__ import annotations

import asyncio
from typing import Any

from sentinel.store.client import LISTENING
from sentinel.store.door import AT_ONCE

MANY = 5 * AT_ONCE


async def test_a_short_stall_is_no_outage(store_server: Any) -> None:
    """Hundreds of questions that are asked while the store stands still are all answered when it goes on; no process holds more
    connections than its bound, however many ask."""
    store = await store_server.open(timeout=10.0)
    await store.kept.put("k", b"v")
    others = (await store_server.raw.info("clients"))["connected_clients"] - 1
    store_server.pause()
    asked = [asyncio.create_task(store.kept.get("k")) for _ in range(MANY)]
    await asyncio.sleep(0.2)
    assert not any(task.done() for task in asked)
    store_server.resume()
    assert await asyncio.gather(*asked) == [b"v"] * MANY
    assert (await store_server.raw.info("clients"))["connected_clients"] - others <= AT_ONCE


async def test_those_that_listen_have_connections_of_their_own(store_server: Any) -> None:
    """Subscriptions stand beside the questions: as many as may be at once keep no question from being asked."""
    store = await store_server.open(timeout=10.0)
    door = store._door
    heard = [asyncio.create_task(_listens(door)) for _ in range(LISTENING)]
    await asyncio.sleep(0.1)
    store_server.pause()
    asked = [asyncio.create_task(store.ping()) for _ in range(MANY)]
    await asyncio.sleep(0.1)
    store_server.resume()
    await asyncio.gather(*asked)
    for task in heard:
        assert not task.done()
        task.cancel()


async def _listens(door: Any) -> None:
    async with door.subscribed("channel"):
        await asyncio.Event().wait()

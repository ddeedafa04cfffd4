"""What a breaker's record and its channel are spared: silent reporters, seconds to come, and news that everybody has heard."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sentinel.durations import Duration
from sentinel.settings_gateway import BreakerSettings
from sentinel.store import StoreError
from sentinel.store.breakers import BreakerRecords

POLICY = BreakerSettings(base_open=Duration(0.05), jitter=0.0)
KEY = "{sentinel}:breaker:w1"
WINDOW_MS = POLICY.window * 1000


async def published(server: Any) -> int:
    stats = await server.raw.info("commandstats")
    return int(stats.get("cmdstat_publish", {}).get("calls", 0))


@pytest.mark.parametrize("evidence", [False, True])
@pytest.mark.parametrize("kind", ["list", "string"])
async def test_what_is_no_record_is_named(store_server: Any, kind: str, evidence: bool) -> None:
    """A key of another type where a record should be is one sentence with its name, whatever is asked of it."""
    store = await store_server.open()
    records = BreakerRecords(store, POLICY)
    await (store_server.raw.rpush(KEY, "x") if kind == "list" else store_server.raw.set(KEY, "x"))
    asked: tuple[Callable[[], Awaitable[Any]], ...] = (
        lambda: records.listing({"w0": "p", "w1": "p"}, evidence=evidence),
        lambda: records.seen("h/1", [("w0", 0, 1), ("w1", 0, 1)]),
        lambda: records.failed("w1", "p", ["w0"], "h/1", version=0, fine=0, failed=1, draw=0.0),
        lambda: records.failed("w0", "p", ["w1"], "h/1", version=0, fine=0, failed=9, draw=0.0),
        lambda: records.permit("w1", "p", "x"),
        lambda: records.ended("w1", "p", "x", "fine", 0.0),
        lambda: records.renew("w1", "p", ["x"]),
        lambda: records.pin("w1", "p", "open", lasts_s=1.0, by="ann"),
    )
    for question in asked:
        with pytest.raises(StoreError, match=rf"\{{sentinel\}}:breaker:w1 is a {kind}; wanted a breaker"):
            await question()


async def test_seconds_to_come_are_no_evidence(store_server: Any) -> None:
    """What a clock that ran ahead wrote opens nothing and shows nowhere, and is gone with the next report."""
    records, raw = BreakerRecords(await store_server.open(), POLICY), store_server.raw
    ahead = int(time.time()) + 3600
    await raw.hset(KEY, mapping={"r:h1/a": f"{ahead} 0 90", "r:h2/a": f"{ahead} 0 90", "swept": str(ahead)})
    (listed,) = await records.listing({"w1": "p"}, evidence=True)
    assert (listed.volume, listed.failed, listed.hosts) == (0, 0, "")
    await raw.hset(KEY, mapping={"r:h1/a": f"{ahead} 0 90", "r:h2/a": f"{ahead} 0 90", "swept": str(ahead)})
    told = await records.failed("w1", "p", ["w2"], "h1/a", version=0, fine=0, failed=1, draw=0.0)
    assert told.state == "closed"
    await records.seen("h1/a", [("w1", 0, 4)])
    (listed,) = await records.listing({"w1": "p"}, evidence=True)
    assert (listed.volume, listed.failed, listed.hosts) == (5, 1, "h1")
    assert str(ahead).encode() not in b" ".join((await raw.hgetall(KEY)).values())


async def test_who_looks_takes_nothing_away(store_server: Any) -> None:
    """The controller lists by a window of its own; what gateways go by, who look back for longer, is still there afterwards."""
    gateways = BreakerRecords(await store_server.open(), BreakerSettings(window=Duration(3600)))
    await store_server.raw.hset(KEY, "r:h1/a", f"{int(time.time()) - 1800} 3 1")
    (looked,) = await BreakerRecords(await store_server.open(), POLICY).listing({"w1": "p"}, evidence=True)
    (listed,) = await gateways.listing({"w1": "p"}, evidence=True)
    assert (looked.volume, listed.volume, listed.failed, listed.hosts) == (0, 4, 1, "h1")


async def test_panic_is_told_once_and_lasts(store_server: Any) -> None:
    """Each failure of a pool in panic leaves it so for a window more; the first is news to all gateways, and hardly any other."""
    records = BreakerRecords(await store_server.open(), POLICY)
    pushed = store_server.raw.pubsub(ignore_subscribe_messages=True)
    await pushed.subscribe("{sentinel}:breakers")
    before = await published(store_server)
    for _ in range(50):
        told = await records.failed("w1", "p", [], "h/1", version=0, fine=0, failed=9, draw=0.0)
        assert told.state == "closed" and told.panic_left >= WINDOW_MS
    assert await published(store_server) - before < 5
    message = None
    while message is None:
        message = await pushed.get_message(timeout=0.1)
    assert b'"panic_left":1' in message["data"]
    await pushed.aclose()
    await store_server.raw.pexpire("{sentinel}:panic:p", round(WINDOW_MS - 1))  # so much time has passed
    before = await published(store_server)
    told = await records.failed("w1", "p", [], "h/1", version=0, fine=0, failed=9, draw=0.0)
    assert told.panic_left > WINDOW_MS and await published(store_server) == before + 1

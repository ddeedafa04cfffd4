"""Decisions: all or nothing, only under our epoch, in order, and read back as they were written."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from sentinel.model import Component, Drain, Finding, Hold, Incident, Response, Routes, Severity
from sentinel.store import Drop, PublishRoutes, Put, Stored, StoreError

INCIDENT = Incident(
    id="i-1", key="xid.79:t01/gpu@0009:01:00.0", fault="gpu-off-bus", culprit="t01/gpu@0009:01:00.0", opened_at=1.5,
    severity=Severity.FATAL, summary="GPU fell off the bus, ünïcode \N{FIRE}",
    findings=(Finding(id="f", check="xid.79", component=Component(node="t01"), at=1.0, evidence=("NVRM: Xid 79",)),),
)  # fmt: skip
DRAIN = Drain(id="d-1", worker="decode-01", response=Response.EVICT, reason="Xid 79", requested_at=2.0, incident="i-1")
HOLD = Hold(target="decode-02", keep="in", by="ada", reason="a test runs", at=3.0)


class Effect(msgspec.Struct, tag=True):
    id: str


async def test_what_was_committed_is_loaded(store_server: Any) -> None:
    """Incidents, drains, holds, pending effects and routes come back equal, in another process, in order."""
    a, b = await store_server.open(), await store_server.open()
    assert await b.decisions.load() == Stored()
    epoch = await a.lease.acquire("a", "http://a", 30)
    second = msgspec.structs.replace(DRAIN, id="d-2")
    effects = [Effect(f"e{n}") for n in (9, 3, 10, 1)]
    changes = [
        Put("incident", "i-1", INCIDENT), Put("drain", "d-2", second), Put("drain", "d-1", DRAIN), Put("hold", "decode-02", HOLD),
        *(Put("pending", e.id, e) for e in effects), PublishRoutes(Routes(version=7, why="evicted")),
    ]  # fmt: skip
    assert await a.decisions.commit(epoch, changes) is True
    assert await a.decisions.commit(epoch, [Put("pending", "e2", b'{"as":["raw", "JSON"]}'), Drop("pending", "e3")]) is True
    loaded = await b.decisions.load()
    assert loaded.incidents == (INCIDENT,)
    assert loaded.drains == (DRAIN, second)
    assert loaded.holds == (HOLD,)
    assert loaded.routes == await b.routes() == Routes(version=7, why="evicted")
    assert list(loaded.pending) == ["e9", "e10", "e1", "e2"], "the order in which they were decided"
    assert msgspec.json.decode(loaded.pending["e10"]) == {"type": "Effect", "id": "e10"}
    assert loaded.pending["e2"] == b'{"as":["raw", "JSON"]}'


async def test_the_order_of_effects_outlives_a_change_of_leader(store_server: Any) -> None:
    """What a later leader decided comes after what an earlier one left pending."""
    a, b = await store_server.open(), await store_server.open()
    first = await a.lease.acquire("a", "http://a", 30)
    for n in range(20):
        await a.decisions.commit(first, [Put("pending", f"z{n}", Effect(f"z{n}"))])
    await a.lease.release(first)
    second = await b.lease.acquire("b", "http://b", 30)
    await b.decisions.commit(second, [Put("pending", "a", Effect("a"))])
    assert list((await a.decisions.load()).pending) == [f"z{n}" for n in range(20)] + ["a"]


async def test_changes_apply_in_their_order(store_server: Any) -> None:
    """Within one commit the last word on a key counts."""
    a = await store_server.open()
    epoch = await a.lease.acquire("a", "http://a", 30)
    await a.decisions.commit(epoch, [Put("kept", "x", b"1"), Drop("kept", "x"), Put("kept", "y", b"1"), Put("kept", "y", b"2")])
    assert await a.kept.get("x") is None
    assert await a.kept.get("y") == b"2"


async def test_who_lost_the_lease_writes_nothing(store_server: Any) -> None:
    """A leader that was paused past its lease and wakes up is told False, and none of its batch is there."""
    a, b = await store_server.open(), await store_server.open()
    old = await a.lease.acquire("a", "http://a", 0.03)
    while (new := await b.lease.acquire("b", "http://b", 30)) is None:
        await asyncio.sleep(0.01)
    batch = [Put("drain", "d-1", DRAIN), Drop("kept", "k"), PublishRoutes(Routes(version=9))]
    await b.kept.put("k", b"v")
    for epoch in (old, new, new + 1, 0):
        assert await a.decisions.commit(epoch, batch) is False
    assert await b.decisions.load() == Stored()
    assert await b.kept.get("k") == b"v"


async def test_route_versions_only_rise(store_server: Any) -> None:
    """A table whose version does not rise is refused with its whole batch; the very same table again is harmless."""
    a = await store_server.open()
    epoch = await a.lease.acquire("a", "http://a", 30)
    table = Routes(version=5, why="first")
    assert await a.decisions.commit(epoch, [PublishRoutes(table)]) is True
    assert await a.decisions.commit(epoch, [PublishRoutes(table), Put("kept", "again", b"1")]) is True
    for refused in (Routes(version=4), Routes(version=5, why="another"), Routes()):
        with pytest.raises(ValueError, match="does not rise above 5"):
            await a.decisions.commit(epoch, [Put("kept", "half", b"1"), PublishRoutes(refused)])
    with pytest.raises(ValueError, match="version 6 does not rise above 7"):
        await a.decisions.commit(epoch, [PublishRoutes(Routes(version=7)), PublishRoutes(Routes(version=6))])
    assert await a.routes() == table
    assert await a.kept.get("again") == b"1"
    assert await a.kept.get("half") is None


async def test_a_large_batch_is_one_commit(store_server: Any) -> None:
    """Twenty thousand changes, and single values of megabytes, are written in one go."""
    a = await store_server.open(timeout=20)
    epoch = await a.lease.acquire("a", "http://a", 60)
    changes = [Put("pending", f"e{n}", Effect(f"e{n}")) for n in range(20_000)]
    big = b'"' + b"x" * 4_000_000 + b'"'
    assert await a.decisions.commit(epoch, [*changes, Put("kept", "big", big)]) is True
    assert list((await a.decisions.load()).pending) == [c.key for c in changes]
    assert await a.kept.get("big") == big


async def test_commits_of_one_process_keep_their_order(store_server: Any) -> None:
    """Commits asked for at the same time are done in the order in which they were asked for."""
    a = await store_server.open()
    epoch = await a.lease.acquire("a", "http://a", 30)
    done = await asyncio.gather(*(a.decisions.commit(epoch, [Put("kept", "last", str(n).encode())]) for n in range(50)))
    assert done == [True] * 50
    assert await a.kept.get("last") == b"49"


async def test_a_late_commit_of_ones_own_is_refused(store_server: Any) -> None:
    """A commit that is overtaken by its successor (a timed-out one, still on its way) does not overwrite it."""
    a = await store_server.open()
    epoch = await a.lease.acquire("a", "http://a", 30)
    await a.decisions.commit(epoch, [Put("kept", "k", b"old")])
    await a.decisions.commit(epoch, [Put("kept", "k", b"new")])
    a.decisions._seq = 0  # as the first one would arrive
    with pytest.raises(StoreError, match="later commit"):
        await a.decisions.commit(epoch, [Put("kept", "k", b"old")])
    assert await a.kept.get("k") == b"new"


@pytest.mark.parametrize("table", ["incident", "drain", "hold", "pending", "routes"])
async def test_what_cannot_be_read_is_named(store_server: Any, table: str) -> None:
    """Garbage under a key is StoreError naming the key (and field), and a commit next to it writes nothing at all."""
    a, raw = await store_server.open(), store_server.raw
    epoch = await a.lease.acquire("a", "http://a", 30)
    key = f"{{sentinel}}:{table}"
    for garbage in (b"\xff\xfe", b"{", b"[]", b'{"type": "Nothing"}'):
        await (raw.set(key, garbage) if table == "routes" else raw.hset(key, "x\xff", garbage))
        with pytest.raises(StoreError) as told:
            await a.decisions.load()
        assert key in str(told.value)
        assert "\n" not in str(told.value)
    await raw.delete(key)
    await raw.rpush(key, "a list")
    with pytest.raises(StoreError) as told:
        await a.decisions.load()
    assert key in str(told.value)
    with pytest.raises(StoreError) as told:
        await a.decisions.commit(epoch, [Put("kept", "half", b"1")])
    assert key in str(told.value)
    assert await a.kept.get("half") is None


async def test_garbage_routes_are_not_overwritten_silently(store_server: Any) -> None:
    """What stands where the table should is named before anything is written over it."""
    a = await store_server.open()
    epoch = await a.lease.acquire("a", "http://a", 30)
    await store_server.raw.set("{sentinel}:routes", "not JSON")
    with pytest.raises(StoreError, match=r"\{sentinel\}:routes is no route table"):
        await a.decisions.commit(epoch, [Put("kept", "half", b"1"), PublishRoutes(Routes(version=1))])
    assert await a.kept.get("half") is None


async def test_kept_is_a_map_of_bytes(store_server: Any) -> None:
    """Any bytes come back as they were; dropping what is not there is fine."""
    a, b = await store_server.open(), await store_server.open()
    body = bytes(range(256))
    await a.kept.put("ключ/with:anything\n", body)
    assert await b.kept.get("ключ/with:anything\n") == body
    await b.kept.drop("ключ/with:anything\n")
    await b.kept.drop("never there")
    assert await a.kept.get("ключ/with:anything\n") is None

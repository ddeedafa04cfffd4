"""The store under faults of its server: hung, killed, paused, read-only, full, gone. What cannot be told is said so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sentinel.model import Hold, Routes
from sentinel.store import Drop, PublishRoutes, Put, StoreError

HOLD = Hold(target="w", keep="out", by="ada", reason="r", at=1.0)


async def test_a_hung_server_is_could_not_tell(store_server: Any) -> None:
    """A stopped server makes every question StoreError after the timeout; then answers go to their own questions again."""
    a = await store_server.open(timeout=0.15)
    epoch = await a.lease.acquire("a", "http://a", 300)
    await a.kept.put("k", b"v")
    store_server.pause()
    asks = [
        lambda: a.lease.acquire("a", "http://a", 300), a.lease.leader, a.decisions.load,
        lambda: a.kept.get("k"), a.routes, a.ping,
    ]  # fmt: skip
    for answer in await asyncio.gather(*(ask() for ask in asks), return_exceptions=True):
        assert isinstance(answer, StoreError)
        assert "no answer" in str(answer) and "0.15 s" in str(answer)
    store_server.resume()
    epoch = await store_server.told(lambda: a.lease.acquire("a", "http://a", 300))
    for _ in range(20):
        assert await a.kept.get("k") == b"v"
        assert (await a.lease.leader()).epoch == epoch
        assert await a.decisions.commit(epoch, [Put("hold", "w", HOLD)]) is True
        assert (await a.decisions.load()).holds == (HOLD,)


async def test_a_commit_that_hung_is_done_once_or_repeated_harmlessly(store_server: Any) -> None:
    """A batch that timed out may be committed again, routes and all, and an older one never overwrites a newer one."""
    a = await store_server.open(timeout=0.15)
    epoch = await a.lease.acquire("a", "http://a", 300)
    batch = [Put("kept", "k", b"first"), Put("pending", "e", b"1"), PublishRoutes(Routes(version=1))]
    await a.decisions.commit(epoch, [])
    store_server.pause()
    with pytest.raises(StoreError):
        await a.decisions.commit(epoch, batch)
    with pytest.raises(StoreError):
        await a.decisions.commit(epoch, batch)
    store_server.resume()
    assert await store_server.told(lambda: a.decisions.commit(epoch, batch)) is True
    assert await a.decisions.commit(epoch, [Put("kept", "k", b"second"), Drop("pending", "e")]) is True
    await asyncio.sleep(0.05)
    assert await a.kept.get("k") == b"second"
    assert (await a.decisions.load()).pending == {}


async def test_nothing_committed_is_lost_by_a_kill(store_server: Any) -> None:
    """After SIGKILL and a restart every commit that came back True is there, and the next epoch is above the last one."""
    a, b = await store_server.open(timeout=0.5), await store_server.open(timeout=0.5)
    epoch = await a.lease.acquire("a", "http://a", 300)
    committed = []

    async def write() -> None:
        for n in range(100_000):
            if await a.decisions.commit(epoch, [Put("kept", f"k{n}", b"v"), Put("pending", f"k{n}", b"1")]):
                committed.append(f"k{n}")

    writing = asyncio.create_task(write())
    while len(committed) < 200:
        await asyncio.sleep(0.01)
    await store_server.kill()
    with pytest.raises(StoreError):
        await writing
    await store_server.restart()
    pending = (await store_server.told(b.decisions.load)).pending
    assert set(committed) <= set(pending)
    assert len(pending) <= len(committed) + 1, "at most the one that could not be told"
    assert await a.lease.renew(epoch, 300) is True
    assert await a.lease.release(epoch) is True
    assert await b.lease.acquire("b", "http://b", 300) > epoch


async def test_client_pause_is_waited_out_or_told(store_server: Any) -> None:
    """While writes are paused on the server, reads answer, a commit is StoreError, and afterwards all goes on."""
    a = await store_server.open(timeout=0.15)
    epoch = await a.lease.acquire("a", "http://a", 300)
    await store_server.raw.client_pause(400, all=False)
    assert (await a.lease.leader()).epoch == epoch
    with pytest.raises(StoreError):
        await a.decisions.commit(epoch, [Put("hold", "w", HOLD)])
    await store_server.raw.client_unpause()
    assert await store_server.told(lambda: a.decisions.commit(epoch, [Put("hold", "w", HOLD)])) is True


async def test_a_read_only_or_full_server_is_could_not_tell(store_server: Any) -> None:
    """A replica, and a server out of memory, make writes StoreError with the reason, and write no part of a batch."""
    a, raw = await store_server.open(), store_server.raw
    epoch = await a.lease.acquire("a", "http://a", 300)
    batch = [Put("kept", "half", b"1"), Put("hold", "w", HOLD)]
    await raw.config_set("maxmemory", 1)
    with pytest.raises(StoreError, match="maxmemory"):
        await a.decisions.commit(epoch, batch)
    await raw.config_set("maxmemory", 0)
    await raw.execute_command("REPLICAOF", "127.0.0.1", "1")
    for ask in (lambda: a.decisions.commit(epoch, batch), lambda: a.lease.renew(epoch, 300), lambda: a.kept.put("k", b"v")):
        with pytest.raises(StoreError, match=r"(?i)read.?only"):
            await ask()
    await raw.execute_command("REPLICAOF", "NO", "ONE")
    assert await a.kept.get("half") is None
    assert await a.decisions.commit(epoch, batch) is True


async def test_forgotten_scripts_are_sent_again(store_server: Any) -> None:
    """A server that lost its scripts (restart, SCRIPT FLUSH) gets them again without the caller noticing."""
    a = await store_server.open()
    epoch = await a.lease.acquire("a", "http://a", 300)
    assert await a.lease.renew(epoch, 300) is True
    await store_server.raw.script_flush()
    assert await a.lease.renew(epoch, 300) is True
    assert await a.decisions.commit(epoch, []) is True

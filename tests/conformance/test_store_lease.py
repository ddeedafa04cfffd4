"""The lease: one holder at any time, epochs that only rise, and three answers that are never mixed up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sentinel.store import Leader, Put, StoreError


async def test_lease_changes_hands_only_when_free(store_server: Any) -> None:
    """A lease that runs is given to nobody else; released, it goes to the next one under the next epoch."""
    a, b = await store_server.open(), await store_server.open()
    assert await a.lease.leader() is None
    assert await a.lease.acquire("a", "http://a", 30) == 1
    assert await b.lease.acquire("b", "http://b", 30) is None
    assert await b.lease.leader() == Leader(holder="a", url="http://a", epoch=1)
    assert await b.lease.release(1) is False
    assert await a.lease.release(1) is True
    assert await a.lease.release(1) is False
    assert await b.lease.leader() is None
    assert await b.lease.acquire("b", "http://b", 30) == 2


async def test_lease_ends_by_the_servers_clock(store_server: Any) -> None:
    """A lease that is not renewed ends; then renewing it is False and it is free."""
    a, b = await store_server.open(), await store_server.open()
    epoch = await a.lease.acquire("a", "http://a", 0.05)
    while await a.lease.leader():
        await asyncio.sleep(0.01)
    assert await a.lease.renew(epoch, 30) is False
    assert await a.decisions.commit(epoch, []) is False
    assert await b.lease.acquire("b", "http://b", 30) == epoch + 1


async def test_renewing_extends(store_server: Any) -> None:
    """A renewed lease lasts as long as it was renewed for."""
    a = await store_server.open()
    epoch = await a.lease.acquire("a", "http://a", 1)
    assert await a.lease.renew(epoch, 500) is True
    assert 499_000 < await store_server.raw.pttl("{sentinel}:lease") <= 500_000


async def test_a_holder_that_asks_again_gets_a_new_epoch(store_server: Any) -> None:
    """Acquiring one's own lease again fences off what one still had on the way under the old epoch."""
    a = await store_server.open()
    first = await a.lease.acquire("a", "http://a", 30)
    second = await a.lease.acquire("a", "http://a", 30)
    assert second == first + 1
    assert await a.decisions.commit(first, [Put("kept", "k", b"1")]) is False
    assert await a.decisions.commit(second, [Put("kept", "k", b"1")]) is True


async def test_two_processes_of_one_name_are_two(store_server: Any) -> None:
    """A second process with the same name and address neither gets, renews, releases nor uses the first one's lease."""
    a, twin = await store_server.open(), await store_server.open()
    epoch = await a.lease.acquire("a", "http://a", 30)
    assert await twin.lease.acquire("a", "http://a", 30) is None
    assert await twin.lease.renew(epoch, 30) is False
    assert await twin.lease.release(epoch) is False
    assert await twin.decisions.commit(epoch, [Put("kept", "k", b"1")]) is False


async def test_epoch_never_falls_after_a_flush(store_server: Any) -> None:
    """When the store is emptied, the living leader has lost its lease, and the next epoch is above all that were seen."""
    a, b = await store_server.open(), await store_server.open()
    for _ in range(6):
        epoch = await a.lease.acquire("a", "http://a", 30)
    await b.lease.leader()
    await store_server.raw.flushall()
    assert await a.lease.renew(epoch, 30) is False
    assert await a.decisions.commit(epoch, []) is False
    assert await b.lease.acquire("b", "http://b", 30) == epoch + 1
    await store_server.raw.flushall()
    assert await a.lease.acquire("a", "http://a", 30) > epoch


async def test_prefixes_are_separate(store_server: Any) -> None:
    """Two fleets on one server do not see each other."""
    a, b = await store_server.open(prefix="east"), await store_server.open(prefix="west")
    assert await a.lease.acquire("a", "http://a", 30) == 1
    assert await b.lease.acquire("b", "http://b", 30) == 1


@pytest.mark.parametrize("garbage", ["string", "fields", "endless", "counter"])
async def test_garbage_instead_of_a_lease_is_named(store_server: Any, garbage: str) -> None:
    """A key of another type or with nonsense in it is StoreError naming that key, never a lost race."""
    a, raw = await store_server.open(), store_server.raw
    if garbage == "string":
        await raw.set("{sentinel}:lease", "x")
    elif garbage == "fields":
        await raw.hset("{sentinel}:lease", mapping={"holder": "a", "epoch": "seven"})
    elif garbage == "endless":
        await raw.hset("{sentinel}:lease", mapping={"token": "t", "holder": "a", "url": "u", "epoch": "1"})
    else:
        await raw.set("{sentinel}:epoch", "seven")
    named = r"\{sentinel\}:epoch" if garbage == "counter" else r"\{sentinel\}:lease"
    with pytest.raises(StoreError, match=named):
        await a.lease.acquire("a", "http://a", 30)
    if garbage == "string":
        for ask in (lambda: a.lease.renew(1, 30), lambda: a.lease.release(1), a.lease.leader, lambda: a.decisions.commit(1, [])):
            with pytest.raises(StoreError, match=named):
                await ask()
    if garbage == "fields":
        with pytest.raises(StoreError, match=named):
            await a.lease.leader()


async def test_a_lease_without_time_is_refused(store_server: Any) -> None:
    """A lease that would never begin is a mistake of the caller, said in a sentence."""
    a = await store_server.open()
    for ttl in (0, -1, 0.0001):
        with pytest.raises(ValueError, match="wanted at least"):
            await a.lease.acquire("a", "http://a", ttl)


async def test_racing_candidates_never_write_out_of_turn(store_server: Any) -> None:
    """Under a storm of candidates whose leases keep ending, epochs are unique and no old epoch writes after a newer one."""
    epochs: list[int] = []
    written = 0  # the highest epoch whose commit has come back as done
    commits = 0

    async def candidate(name: str) -> None:
        nonlocal written, commits
        store = await store_server.open()
        loop = asyncio.get_running_loop()
        end = loop.time() + 0.6
        while loop.time() < end:
            epoch = await store.lease.acquire(name, f"http://{name}", 0.015)
            if epoch is None:
                await asyncio.sleep(0.001)
                continue
            epochs.append(epoch)
            for turn in range(50):
                before = written
                if not await store.decisions.commit(epoch, [Put("kept", "turn", str(turn).encode())]):
                    break
                assert epoch >= before, "an old epoch wrote after a newer one had"
                written = max(written, epoch)
                commits += 1
                if turn % 7 == 0:
                    await asyncio.sleep(0.004)

    await asyncio.gather(*(candidate(f"c{i}") for i in range(4)))
    assert len(epochs) == len(set(epochs)) > 2
    assert sorted(epochs) == list(range(1, len(epochs) + 1))
    assert commits > len(epochs)

"""The lease: one leader at a time, one that knows when to stop, and a standby that takes over."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest_asyncio

from sentinel.boottime import boottime
from sentinel.controller.leader import STILL, Leader, Lease
from sentinel.store import Store
from sentinel.testing.control import RedisServer, until

TTL = 0.6


class Candidate:
    """One controller's leader loop; ``reign`` is what it leads with, ``now`` whether it leads."""

    def __init__(self, store: Store, name: str) -> None:
        self.name, self.store = name, store
        self.lease: Lease | None = None
        self.epochs: list[int] = []
        self.end = asyncio.Event()
        self.again = False
        leader = Leader(store.lease, apart=store.apart, holder=name, url=f"http://{name}", ttl=TTL, lead=self._lead)
        self.task = asyncio.create_task(leader.run())

    async def _lead(self, lease: Lease) -> bool:
        self.lease = lease
        self.epochs.append(lease.epoch)
        try:
            await self.end.wait()
            self.end.clear()
            return self.again
        finally:
            self.lease = None

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@pytest_asyncio.fixture
async def server(program: Callable[[str], Path]) -> AsyncIterator[RedisServer]:
    server = RedisServer(program("redis-server"))
    try:
        await server.start()
        yield server
    finally:
        server.close()


@pytest_asyncio.fixture
async def candidate(server: RedisServer) -> AsyncIterator[Callable[[str], asyncio.Future[Candidate]]]:
    made: list[Candidate] = []

    async def make(name: str) -> Candidate:
        made.append(Candidate(await server.open(timeout_s=0.2), name))
        return made[-1]

    yield make  # type: ignore[misc]
    server.resume()
    for c in made:
        await c.stop()
        await c.store.close()


class TestLease:
    def test_it_counts_from_before_the_question_and_keeps_a_margin(self) -> None:
        """A lease ends for us before it ends for the store, however long the answer took."""
        now = [100.0]
        lease = Lease(1, 10.0, asked_at=95.0, clock=lambda: now[0])
        assert lease.valid()
        now[0] = 103.9
        assert lease.valid()
        now[0] = 104.0  # 95 + 10 - margin of 1
        assert not lease.valid()
        lease.renewed(103.0)
        assert lease.valid()

    def test_what_has_ended_stays_so(self) -> None:
        """An answer to a renewal that was under way when the leadership ended does not bring it back."""
        lease = Lease(1, 10.0, asked_at=100.0, clock=lambda: 100.0)
        lease.end()
        lease.renewed(100.0)
        assert not lease.valid()

    def test_the_clock_never_goes_back(self) -> None:
        """The clock is the machine's own, not the wall's, so that a time server cannot lengthen a lease."""
        assert boottime() <= boottime()


class TestLeader:
    async def test_one_leads_and_renews(self, candidate) -> None:
        """Of two, one leads for many lease periods under one epoch while the other stands by."""
        a = await candidate("a")
        await until(lambda: a.lease, "a leads")
        b = await candidate("b")
        await asyncio.sleep(3 * TTL)
        assert a.lease is not None
        assert a.lease.valid()
        assert (len(a.epochs), b.epochs) == (1, [])

    async def test_a_clean_stop_hands_over_without_waiting_for_the_lease(self, candidate) -> None:
        """Cancelled, the leader gives the lease back, and the standby leads under a higher epoch."""
        a = await candidate("a")
        await until(lambda: a.lease, "a leads")
        b = await candidate("b")
        await a.stop()
        leader = await b.store.lease.leader()
        assert leader is None or leader.holder == "b"
        await until(lambda: b.lease, "b leads")
        assert b.epochs[0] > a.epochs[0]

    async def test_a_leader_that_vanishes_is_replaced_within_two_periods(self, candidate, server: RedisServer) -> None:
        """Without a word from the leader, the standby takes over after the lease has run out, and not before."""
        gone = await server.open()
        loop = asyncio.get_running_loop()
        began = loop.time()
        epoch = await gone.lease.acquire("gone", "http://gone", TTL)
        b = await candidate("b")
        await until(lambda: b.lease, "b leads")
        took = loop.time() - began
        await gone.close()
        assert epoch is not None
        assert b.epochs[0] > epoch
        assert took >= TTL * 0.95  # no sooner; how much later is this machine's mood, and the loop's bound is a third of the lease

    async def test_a_store_that_stops_ends_the_leadership_before_the_lease(self, candidate, server: RedisServer) -> None:
        """The leader steps down by its own clock; when the store is back somebody leads again, under a new epoch."""
        a = await candidate("a")
        await until(lambda: a.lease, "a leads")
        lease = a.lease
        server.pause()
        await until(lambda: a.lease is None, "a steps down by itself")
        assert lease is not None
        assert not lease.valid()
        server.resume()
        await until(lambda: a.lease, "a leads again")
        assert a.epochs[1] > a.epochs[0]

    async def test_a_short_pause_of_the_store_is_survived(self, candidate, server: RedisServer) -> None:
        """A store that cannot tell for less than the lease costs no leadership."""
        a = await candidate("a")
        await until(lambda: a.lease, "a leads")
        server.pause()
        await asyncio.sleep(TTL / 4)
        server.resume()
        await asyncio.sleep(TTL)
        assert len(a.epochs) == 1
        assert a.lease is not None

    async def test_a_leadership_that_wants_to_go_on_gets_a_new_epoch(self, candidate) -> None:
        """When leading returns True the next leadership follows at once and nobody comes in between."""
        a = await candidate("a")
        await until(lambda: a.lease, "a leads")
        b = await candidate("b")
        a.again = True
        a.end.set()
        await until(lambda: len(a.epochs) == 2 and a.lease, "a leads on")
        assert a.epochs[1] == a.epochs[0] + 1
        assert b.epochs == []

    async def test_a_lease_flushed_away_is_noticed(self, candidate, server: RedisServer) -> None:
        """A renewal that says False ends the leadership at once, without waiting for the lease to run out."""
        a = await candidate("a")
        await until(lambda: a.lease, "a leads")
        thief = await server.open()
        await thief._client.flushall()  # type: ignore[attr-defined]
        await until(lambda: a.lease is None, "a steps down")
        await until(lambda: a.lease, "a leads again")
        await thief.close()
        assert a.epochs[1] > a.epochs[0]

    async def test_a_busy_loop_keeps_its_lease(self, candidate) -> None:
        """A controller whose loop does not come round for longer than its lease leads on, under the same epoch."""
        a = await candidate("a")
        await until(lambda: a.lease, "a leads")
        for _ in range(2):
            time.sleep(1.5 * TTL)
            assert a.lease is not None
            assert a.lease.valid()
            await asyncio.sleep(TTL / 5)
        leader = await a.store.lease.leader()
        assert leader is not None
        assert [leader.epoch] == a.epochs

    async def test_a_loop_that_stands_still_loses_its_lease(self, candidate) -> None:
        """After some leases without a round of it nobody renews any more, so that another controller can lead."""
        a = await candidate("a")
        await until(lambda: a.lease, "a leads")
        lease = a.lease
        time.sleep((STILL + 2) * TTL)
        assert not lease.valid()
        assert await a.store.lease.leader() is None
        await until(lambda: len(a.epochs) == 2, "a leads again, under a new epoch")

"""Admission by lease on real servers: limits of all gateways together, fairness, and what becomes of what the dead held."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from sentinel.durations import Duration
from sentinel.gateway.admission import LeaseAdmission
from sentinel.gateway.guards import Refusal, Slot
from sentinel.settings_gateway import AdmissionSettings, PoolLimits, TenantLimits
from sentinel.store.admission import AdmissionRecords
from sentinel.store.rates import RateRecords

LEASE = 1.5


def settings(block: int = 8, lease: float = LEASE, **limits: int) -> AdmissionSettings:
    return AdmissionSettings(
        lease=Duration(lease), margin=Duration(0.2), tick=Duration(0.05), replicas=1, block=block, default=PoolLimits(**limits)
    )  # fmt: skip


class Clock:
    """The real one, which a test may push on, as if the process had stood still."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class Fleet:
    """Gateways with a store and a clock of their own each."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.made: list[LeaseAdmission] = []
        self.clocks: list[Clock] = []

    async def add(self, made: AdmissionSettings, tenants: dict[str, TenantLimits] | None = None) -> LeaseAdmission:
        self.clocks.append(Clock())
        store = await self.server.open(timeout=0.5)
        records = AdmissionRecords(store, made.lease)
        gateway = LeaseAdmission(records, made, tenants or {}, owner=f"g{len(self.made)}", clock=self.clocks[-1], draw=lambda: 0.5)
        await gateway.start()
        self.made.append(gateway)
        return gateway

    async def settled(self) -> None:
        """Until the store knows what everybody holds."""
        while any(g.tenure.settling for g in self.made):
            await asyncio.sleep(0.02)


@asynccontextmanager
async def fleet(
    server: Any, count: int, made: AdmissionSettings, tenants: dict[str, TenantLimits] | None = None
) -> AsyncIterator[Fleet]:
    gateways = Fleet(server)
    for _ in range(count):
        await gateways.add(made, tenants)
    await gateways.settled()
    try:
        yield gateways
    finally:
        for gateway in gateways.made:
            await gateway.stop()


async def take(
    gateway: LeaseAdmission, count: int, *, tenant: str = "t", worker: str = "w", tokens: int = 10, wait: float = 1.0
) -> list[Slot]:
    asked = await asyncio.gather(*(gateway.admit("p", worker, tenant, tokens, wait) for _ in range(count)))
    return [slot for slot in asked if isinstance(slot, Slot)]


def refused(answer: Slot | Refusal) -> Refusal:
    assert isinstance(answer, Refusal)
    return answer


@pytest.mark.parametrize("block", [0, 8])
async def test_a_limit_is_one_for_all_gateways(store_server: Any, block: int) -> None:
    """However many ask at three gateways at once, the pool never runs more than its limit, and all of it can be used."""
    async with fleet(store_server, 3, settings(block, requests=20)) as f:
        slots = [s for got in await asyncio.gather(*(take(g, 15, wait=0.4) for g in f.made)) for s in got]
        assert len(slots) == 20 == sum(g.held for g in f.made)
        assert len({s.id for s in slots}) == 20 and all(s.fence > 0 for s in slots)


async def test_what_is_given_back_is_given_back_once(store_server: Any) -> None:
    """Releasing twice, or what another gateway gave, changes nothing; everything returned, the store holds nothing for anybody."""
    async with fleet(store_server, 2, settings(requests=5)) as f:
        a, b = f.made
        slots = await take(a, 5)
        assert len(slots) == 5
        for slot in slots * 2:
            a.release(slot)
            b.release(slot)
        assert a.held == 0 and all(x["used"] == 0 for x in a.picture().values())
        assert len(await take(b, 5)) == 5
        records = AdmissionRecords(await store_server.open(), LEASE)
        assert sum(h.allotted for h in await records.held("pool/p")) <= 5


async def test_three_gateways_share_evenly(store_server: Any) -> None:
    """When each of three gateways could use everything, none is more than a tenth away from a third."""
    async with fleet(store_server, 3, settings(requests=60)) as f:
        done: Counter[int] = Counter()
        ends = time.monotonic() + 2.5

        async def client(n: int) -> None:
            while time.monotonic() < ends:
                slot = await f.made[n].admit("p", "w", "t", 1, 0.5)
                if isinstance(slot, Slot):
                    await asyncio.sleep(0.01)
                    f.made[n].release(slot)
                    if time.monotonic() > ends - 2.0:
                        done[n] += 1
                else:
                    await asyncio.sleep(0.005)

        await asyncio.gather(*(client(n) for n in range(3) for _ in range(40)))
        mean = sum(done.values()) / 3
        assert all(abs(count - mean) <= 0.1 * mean for count in done.values()), done


async def test_less_than_one_each_goes_round(store_server: Any) -> None:
    """A limit of one serves three gateways in turn: none of them keeps it for itself."""
    async with fleet(store_server, 3, settings(requests=1)) as f:
        done: Counter[int] = Counter()

        async def client(n: int) -> None:
            while len(done) < 3:
                slot = await f.made[n].admit("p", "w", "t", 1, 5.0)
                if isinstance(slot, Slot):
                    assert sum(g.held for g in f.made) == 1
                    done[n] += 1
                    await asyncio.sleep(0.01)
                    f.made[n].release(slot)

        await asyncio.wait_for(asyncio.gather(*(client(n) for n in range(3))), 20)


async def test_what_is_held_ready_goes_to_who_needs_it(store_server: Any) -> None:
    """A gateway that was busy and is idle hoards nothing: another one soon gets all of the limit."""
    async with fleet(store_server, 2, settings(block=64, requests=40)) as f:
        a, b = f.made
        for slot in await take(a, 30):
            a.release(slot)
        got: list[Slot] = []
        ends = time.monotonic() + 5
        while len(got) < 40 and time.monotonic() < ends:
            got += await take(b, 40 - len(got), wait=0.3)
        assert len(got) == 40


async def test_tokens_are_limited_too(store_server: Any) -> None:
    """Estimated tokens count: a tenant's, a worker's and a pool's; who asks for more than there ever is, is told so at once."""
    made = settings(tokens=1000, worker_tokens=800)
    async with fleet(store_server, 1, made, {"small": TenantLimits(tokens=300)}) as f:
        (a,) = f.made
        assert len(await take(a, 5, tenant="small", tokens=100, wait=0.2)) == 3
        assert len(await take(a, 9, tenant="big", tokens=100, wait=0.2)) == 5, "the worker's 800"
        assert len(await take(a, 9, tenant="big", worker="v", tokens=100, wait=0.2)) == 2, "the pool's 1000"
        never = refused(await a.admit("p", "w", "small", 301, 9.0))
        assert never.limit == "tenant" and "301 tokens" in never.why


async def test_reserved_capacity_is_lent_to_nobody(store_server: Any) -> None:
    """What is reserved for a tenant stays free for it under any load of others, at every gateway, and it may use the rest, too."""
    tenants = {"gold": TenantLimits(reserved={"p": 6})}
    async with fleet(store_server, 2, settings(requests=10), tenants) as f:
        a, b = f.made
        assert len(await take(a, 20, tenant="x", wait=0.3)) == 4
        gold = await take(b, 20, tenant="gold", wait=0.3)
        assert len(gold) == 6
        assert refused(await a.admit("p", "w", "x", 1, 0.1)).limit == "pool"
        for slot in gold:
            b.release(slot)
        assert len(await take(a, 9, tenant="gold", wait=0.5)) == 6


async def test_a_tenant_with_reserved_slots_gives_the_common_ones_back_first(store_server: Any) -> None:
    """As its requests end, a tenant holds its own slots last: the common ones are for everybody again."""
    tenants = {"gold": TenantLimits(reserved={"p": 4})}
    async with fleet(store_server, 1, settings(requests=8), tenants) as f:
        (a,) = f.made
        gold = await take(a, 8, tenant="gold", wait=0.5)
        assert len(gold) == 8
        for slot in gold[:4]:
            a.release(slot)
        assert len(await take(a, 8, tenant="x", wait=0.3)) == 4


async def test_tenants_take_turns(store_server: Any) -> None:
    """A tenant with a hundred waiting requests does not keep out one with a single request."""
    async with fleet(store_server, 1, settings(requests=2)) as f:
        (a,) = f.made
        first = await take(a, 2)
        order: list[str] = []

        async def one(tenant: str) -> None:
            slot = await a.admit("p", "w", tenant, 1, 5.0)
            assert isinstance(slot, Slot)
            order.append(tenant)
            a.release(slot)

        loud = [asyncio.create_task(one("loud")) for _ in range(100)]
        await asyncio.sleep(0)
        quiet = asyncio.create_task(one("quiet"))
        await asyncio.sleep(0)
        for slot in first:
            a.release(slot)
        await asyncio.gather(quiet, *loud)
        assert order.index("quiet") <= 2


async def test_overload_is_refused_at_once(store_server: Any) -> None:
    """At three times what it can carry the pool stays full, and a refusal takes milliseconds, with a time to come back."""
    async with fleet(store_server, 1, settings(requests=20)) as f:
        (a,) = f.made
        done, took, retry = [0], [], []
        ends = time.monotonic() + 2.0

        async def client() -> None:
            while time.monotonic() < ends:
                began = time.monotonic()
                slot = await a.admit("p", "w", "t", 1, 0.05)
                if isinstance(slot, Refusal):
                    took.append(time.monotonic() - began)
                    retry.append(slot.retry_after_s)
                    await asyncio.sleep(0.02)
                    continue
                await asyncio.sleep(0.05)
                a.release(slot)
                done[0] += 1

        await asyncio.gather(*(client() for _ in range(60)))
        assert done[0] > 0.8 * 20 * 2.0 / 0.055
        quick = sorted(took)[int(len(took) * 0.5)]
        assert len(took) > 100 and quick < 0.025, "half of the time that it would have waited at most"
        assert all(0.1 <= r <= 45 for r in retry)


async def test_who_leaves_the_queue_takes_nothing_along(store_server: Any) -> None:
    """Requests that are cancelled while they wait, or just as they were let in, leave no slot behind."""
    async with fleet(store_server, 1, settings(requests=3)) as f:
        (a,) = f.made
        for _ in range(30):
            slots = await take(a, 3)
            waiting = [asyncio.create_task(a.admit("p", "w", f"t{n}", 1, 5.0)) for n in range(6)]
            await asyncio.sleep(0)
            for slot in slots:
                a.release(slot)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert a.held == a.waiting == 0
        assert all(x["used"] == x["waiting"] == 0 for x in a.picture().values())


async def test_a_process_that_stood_still_admits_nothing_until_it_renewed(store_server: Any) -> None:
    """After a pause longer than its lease a gateway hands out nothing from what it held; others have it by then."""
    async with fleet(store_server, 2, settings(requests=10)) as f:
        a, b = f.made
        await take(a, 10)
        f.clocks[0].ahead = 1000.0  # it stood still
        assert a.tenure.until < f.clocks[0]()
        for _ in range(100):
            answer = asyncio.create_task(a.admit("p", "w", "t", 1, 0.0))
            await asyncio.sleep(0)
            assert not answer.done() or isinstance(answer.result(), Refusal) or a.tenure.until > f.clocks[0]()
            answer.cancel()
        while a.tenure.until < f.clocks[0]():
            await asyncio.sleep(0.01)
        assert await take(b, 1, wait=0.2) == []


async def test_what_ends_after_a_standstill_lets_nobody_in_before_the_lease_is_renewed(store_server: Any) -> None:
    """A slot that comes free, or a place in the queue, goes to who waits only under a lease that still holds."""
    async with fleet(store_server, 1, settings(requests=2)) as f:
        (a,) = f.made
        slots = await take(a, 2)
        waits = [asyncio.create_task(a.admit("p", "w", "t", 1, 60.0)) for _ in range(3)]
        await asyncio.sleep(0.1)
        store_server.pause()
        f.clocks[0].ahead = 30.0  # it stood still
        for slot in slots:
            a.release(slot)
        waits.pop().cancel()
        for _ in range(20):
            await asyncio.sleep(0)
            assert a.held == 0 or a.tenure.until > f.clocks[0]()
        assert a.held == 0
        store_server.resume()
        assert all(isinstance(slot, Slot) for slot in await asyncio.gather(*waits))


async def test_a_lease_that_was_over_is_registered_anew(store_server: Any) -> None:
    """An owner that the store has forgotten is told so, says what it still runs, and goes on."""
    async with fleet(store_server, 2, settings(requests=10)) as f:
        a, b = f.made
        assert len(await take(a, 4)) == 4
        await store_server.raw.hdel("{sentinel}:owners", "g0")
        await asyncio.sleep(LEASE / 2)
        assert len(await take(b, 10, wait=0.5)) == 6
        assert a.held == 4


async def test_a_store_that_lost_its_data_is_told_again(store_server: Any) -> None:
    """After a flush the running requests are in the store again within a lease, and meanwhile nobody gets more than its part."""
    async with fleet(store_server, 2, settings(requests=10)) as f:
        a, b = f.made
        assert len(await take(a, 8)) == 8
        await store_server.raw.flushall()
        while not b.tenure.settling:
            await asyncio.sleep(0.01)
        assert len(await take(b, 10, wait=0.1)) <= 5
        await f.settled()
        records = AdmissionRecords(await store_server.open(), LEASE)
        assert {h.owner: h.allotted for h in await records.held("pool/p")}["g0"] == 8


async def test_without_the_store_each_gateway_has_its_part(store_server: Any) -> None:
    """While the store is away a gateway goes on within the limit divided by the gateways there were; then they share anew."""
    async with fleet(store_server, 2, settings(requests=20)) as f:
        a, b = f.made
        store_server.pause()
        while not (a.tenure.away and b.tenure.away):
            await asyncio.sleep(0.02)
        await asyncio.sleep(LEASE)
        assert [len(await take(g, 30, wait=0.1)) for g in f.made] == [10, 10]
        store_server.resume()
        while a.tenure.away or b.tenure.away:
            await asyncio.sleep(0.02)
        await f.settled()
        assert sum(g.held for g in f.made) == 20
        assert await take(a, 5, wait=0.2) == []


async def test_a_slow_store_leaves_no_gap(store_server: Any) -> None:
    """A store that answers nothing for as long as anybody would wait: alone a gateway never has to refuse for want of a lease."""
    made = settings(requests=20)
    a = LeaseAdmission(AdmissionRecords(await store_server.open(timeout=60.0), LEASE), made, {}, owner="a")
    await a.start()
    store_server.pause()
    while not a.tenure.away:
        await asyncio.sleep(0.02)
    ends = time.monotonic() + 2 * LEASE
    while time.monotonic() < ends:
        (slot,) = await take(a, 1, wait=0.0)
        a.release(slot)
        await asyncio.sleep(0.01)
    assert not a.refused
    store_server.resume()
    await a.stop()


async def test_a_gateway_that_starts_without_the_store_is_careful(store_server: Any) -> None:
    """A gateway that never reached the store assumes as many gateways as it was told to, and admits its part of each limit."""
    made = AdmissionSettings(lease=Duration(LEASE), margin=Duration(0.2), replicas=4, default=PoolLimits(requests=20))
    a = LeaseAdmission(AdmissionRecords(await store_server.open(timeout=0.3), LEASE), made, {}, owner="a")
    store_server.pause()
    await a.start()
    assert len(await take(a, 30, wait=0.1)) == 5
    store_server.resume()
    await a.stop()


async def test_a_gateway_that_leaves_gives_back_at_once(store_server: Any) -> None:
    """Stopping a gateway frees what it held before its lease ends, and answers who waits."""
    f, made = Fleet(store_server), settings(lease=30.0, requests=8)
    a, b = await f.add(made), await f.add(made)
    held = await take(a, 4)
    waits = asyncio.create_task(a.admit("p", "w", "t", 1, 9.0))
    await asyncio.sleep(0.05)
    await a.stop()
    assert refused(await waits).limit in ("pool", "fenced")
    assert refused(await a.admit("p", "w", "t", 1, 0.0)).limit == "fenced"
    records = AdmissionRecords(await store_server.open(), 30.0)
    assert await records.held("pool/p") == []
    for slot in held:
        a.release(slot)
    await b.stop()


async def test_limits_may_change_while_requests_run(store_server: Any) -> None:
    """A new configuration holds for who comes now and for who waits; what runs keeps its slot and gives it back."""
    async with fleet(store_server, 1, settings(requests=2)) as f:
        (a,) = f.made
        slots = await take(a, 2)
        waits = [asyncio.create_task(a.admit("p", "w", "t", 1, 5.0)) for _ in range(3)]
        await asyncio.sleep(0.02)
        a.configure(settings(requests=5), {})
        slots += [s for s in await asyncio.gather(*waits) if isinstance(s, Slot)]
        assert len(slots) == 5
        a.configure(settings(), {})
        more = await take(a, 50)
        assert len(more) == 50
        for slot in slots + more:
            a.release(slot)
        assert a.held == 0 and all(x["used"] == 0 for x in a.picture().values())


async def test_nothing_is_lost_whatever_happens(store_server: Any) -> None:
    """A minute's worth of arrivals, ends, cancellations, flushes and a store that comes and goes: at the end nothing is held."""
    made = settings(requests=12, tokens=400, worker_requests=8)
    async with fleet(store_server, 2, made, {"a": TenantLimits(requests=5, reserved={"p": 3}), "b": TenantLimits(tokens=200)}) as f:
        rolls = itertools.cycle((3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9))

        async def client(n: int) -> None:
            for _ in range(25):
                gateway = f.made[n % 2]
                asked = asyncio.create_task(gateway.admit("p", f"w{n % 3}", "abc"[n % 3], next(rolls) * 9, next(rolls) / 40))
                if next(rolls) == 9:
                    await asyncio.sleep(next(rolls) / 900)
                    asked.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    slot = await asked
                    if isinstance(slot, Slot):
                        await asyncio.sleep(next(rolls) / 500)
                        gateway.release(slot)
                        if next(rolls) == 5:
                            gateway.release(slot)

        async def trouble() -> None:
            await asyncio.sleep(0.2)
            await store_server.raw.flushall()
            await asyncio.sleep(0.2)
            store_server.pause()
            await asyncio.sleep(0.5)
            store_server.resume()

        await asyncio.gather(trouble(), *(client(n) for n in range(30)))
        for gateway in f.made:
            assert gateway.held == gateway.waiting == 0
            assert all(x["used"] == x["waiting"] == 0 for x in gateway.picture().values())


async def test_a_rate_is_one_for_all_gateways(store_server: Any) -> None:
    """Requests per minute are counted over all gateways, per tenant; who is over is told so at once, and when to come back."""
    tenants = {"metered": TenantLimits(rate="40/hour")}
    gateways = []
    for n in range(3):
        store = await store_server.open()
        gateways.append(
            LeaseAdmission(
                AdmissionRecords(store, LEASE), settings(), tenants, owner=f"g{n}", rates=RateRecords(store), draw=lambda: 0.5
            )
        )
        await gateways[-1].start()
    answers = [await g.enter("metered") for g in gateways * 20]
    assert sum(a is None for a in answers) == 40
    over = answers[-1]
    assert over and over.limit == "rate" and "40 requests" in over.why and over.retry_after_s == 135.0
    assert await gateways[0].enter("other") is None
    for gateway in gateways:
        await gateway.stop()


async def test_a_rate_waits_for_no_store_that_hangs(store_server: Any) -> None:
    """However long the store's own deadline, all of a tenant's requests at once are through, or told no, before it is over."""
    store = await store_server.open(timeout=3600.0)
    a = LeaseAdmission(
        AdmissionRecords(store, LEASE), settings(), {"metered": TenantLimits(rate="40/hour")}, owner="g", rates=RateRecords(store)
    )
    await a.start()
    store_server.pause()
    answers = await asyncio.gather(*(a.enter("metered") for _ in range(50)))
    assert answers.count(None) == 40 and {r.limit for r in answers if r} == {"rate"}
    store_server.resume()
    await a.stop()


async def test_a_rate_without_the_store_is_a_part_of_it(store_server: Any) -> None:
    """While the store is away a gateway lets its part of a tenant's rate through."""
    store = await store_server.open(timeout=0.3)
    tenants = {"metered": TenantLimits(rate="40/hour")}
    a = LeaseAdmission(AdmissionRecords(store, LEASE), settings(), tenants, owner="g", rates=RateRecords(store))
    await a.start()
    store_server.pause()
    a.tenure.owners = 4
    assert [await a.enter("metered") for _ in range(30)].count(None) == 10
    store_server.resume()
    await a.stop()

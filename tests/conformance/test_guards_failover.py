"""The shared guards while their store fails over: real servers and Redis Sentinels, the primary killed amid requests.

What is held and open must outlive it where the new primary has it, and be told again where that one came up empty.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from sentinel.durations import Duration
from sentinel.gateway.admission import LeaseAdmission
from sentinel.gateway.breakers import SharedBreakers
from sentinel.gateway.guards import Outcome, Slot
from sentinel.settings_gateway import AdmissionSettings, BreakerSettings, PoolLimits, TenantLimits
from sentinel.store import Store
from sentinel.store.admission import AdmissionRecords
from sentinel.store.breakers import BreakerRecords
from sentinel.store.rates import RateRecords
from sentinel.testing.failover import RedisPair

LEASE = 2.0
LIMIT, GATEWAYS = 12, 3
SHARE = LIMIT // GATEWAYS
POLICY = BreakerSettings(base_open=Duration(300), max_open=Duration(300), jitter=0.0)
MADE = AdmissionSettings(
    lease=Duration(LEASE), margin=Duration(0.4), tick=Duration(0.05), replicas=1, block=2, default=PoolLimits(requests=LIMIT)
)


class Replica:
    """One gateway's guards. ``slots``: what it holds."""

    def __init__(self, store: Store, n: int) -> None:
        self.store = store
        tenants = {"metered": TenantLimits(rate="60/hour")}
        self.admission = LeaseAdmission(AdmissionRecords(store, LEASE), MADE, tenants, owner=f"g{n}", rates=RateRecords(store))
        self.breakers = SharedBreakers(BreakerRecords(store, POLICY), host=f"h{n}", process="x")
        self.breakers.members({"p": ("w1", "w2", "w3", "w4")})
        self.slots: list[Slot] = []

    async def take(self, count: int, wait_s: float = 0.1) -> int:
        asked = await asyncio.gather(*(self.admission.admit("p", "w1", "t", 1, wait_s) for _ in range(count)))
        got = [slot for slot in asked if isinstance(slot, Slot)]
        self.slots += got
        return len(got)

    @property
    def away(self) -> bool:
        return self.admission.tenure.away


@pytest_asyncio.fixture
async def fleet(program: Callable[[str], Path]) -> AsyncIterator[tuple[RedisPair, list[Replica]]]:
    pair, stores, replicas = RedisPair(program("redis-server")), list[Store](), list[Replica]()
    try:
        await pair.start()
        for n in range(GATEWAYS):
            stores.append(await pair.open(timeout_s=1.0))
            replicas.append(Replica(stores[-1], n))
            await replicas[-1].admission.start()
            await replicas[-1].breakers.start()
        await until(lambda: not any(r.admission.tenure.settling or r.away for r in replicas))
        yield pair, replicas
    finally:
        for replica in replicas:
            await replica.admission.stop()
            await replica.breakers.stop()
        for store in stores:
            await store.close()
        pair.close()


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not what():
            await asyncio.sleep(0.01)


async def fails(replicas: list[Replica], worker: str) -> None:
    """Two hosts see it fail until nobody sends there any more."""
    while any(r.breakers.closed(worker) for r in replicas):
        for replica in replicas[:2]:
            if permit := await replica.breakers.permit(worker):
                replica.breakers.ended(permit, Outcome.FAILED)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("loses", [False, True])
async def test_guards_through_a_failover(fleet: tuple[RedisPair, list[Replica]], loses: bool) -> None:
    """The primary is killed; the other server takes over with what it has, or (``loses``) with nothing. Meanwhile no gateway holds
    more than it did or its static share; afterwards all that runs is known again, and the limit, breakers and rates hold."""
    pair, replicas = fleet
    a, b, c = replicas
    assert [await a.take(6), await b.take(4)] == [6, 4]
    await fails(replicas, "w1")
    assert [await r.admission.enter("metered") for r in replicas * 20].count(None) == 60
    await asyncio.sleep(0.3)  # until the replica has it
    most = [max(SHARE, r.admission.picture().get("pool/p", {}).get("cap", 0)) for r in replicas]

    async def rush() -> None:
        for replica, at_most in zip(replicas, most, strict=True):
            await replica.take(2, 0.02)
            assert len(replica.slots) == replica.admission.held <= at_most

    old, new = pair.servers
    if loses:
        await pair.ask(new, "REPLICAOF", "NO", "ONE")
        await pair.ask(new, "FLUSHALL")
    pair.kill(old)
    await until(lambda: all(r.away for r in replicas))
    while any(r.away for r in replicas):
        # Who hears a new primary that knows nothing has its breakers' word, too, and may have it before its admission's.
        assert loses or not any(r.breakers.closed("w1") for r in replicas)
        await rush()
        if loses and len(c.slots) == SHARE:
            await pair.appoint(new)
    assert len(c.slots) == SHARE, "it went on with its static share"
    while any(r.away or r.admission.tenure.settling for r in replicas):
        await rush()

    records = AdmissionRecords(a.store, LEASE)
    assert {h.owner: h.allotted for h in await records.held("pool/p")} == {"g0": 6, "g1": 4, "g2": 4}
    assert [await r.take(3) for r in replicas] == [0, 0, 0], "more than the limit runs, since each had its share"
    for _ in range(5):
        a.admission.release(a.slots.pop())
    ends = asyncio.get_running_loop().time() + LEASE
    while asyncio.get_running_loop().time() < ends or sum(r.admission.held for r in replicas) < LIMIT:
        for replica in replicas:
            await replica.take(2)
        assert sum(r.admission.held for r in replicas) <= LIMIT
    if loses:
        await until(lambda: all(r.breakers.closed("w1") for r in replicas))
    else:
        assert not any(r.breakers.closed("w1") for r in replicas)
        assert None not in [await r.admission.enter("metered") for r in replicas]
    await fails(replicas, "w2")
    stands = {s.worker: s.state for s in await BreakerRecords(a.store, POLICY).listing({"w1": "p", "w2": "p"})}
    assert stands == {"w1": "closed" if loses else "open", "w2": "open"}
    assert not any(r.breakers.away or r.breakers.trips_alone for r in replicas)

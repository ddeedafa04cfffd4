"""Requests that are larger than a gateway's static share of a limit in tokens, while the store is away or does not know all yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sentinel.durations import Duration
from sentinel.gateway.admission import LeaseAdmission
from sentinel.gateway.guards import Refusal, Slot
from sentinel.settings_gateway import AdmissionSettings, PoolLimits
from sentinel.store.admission import AdmissionRecords

LIMIT, REPLICAS, LEASE = 1000, 4, 3.0
SHARE = LIMIT // REPLICAS
MADE = AdmissionSettings(
    lease=Duration(LEASE), margin=Duration(0.2), tick=Duration(0.05), replicas=REPLICAS, default=PoolLimits(tokens=LIMIT)
)  # fmt: skip


@asynccontextmanager
async def gateway(server: Any, name: str, made: AdmissionSettings = MADE, *, alone: bool = False) -> AsyncIterator[LeaseAdmission]:
    """``alone``: the store is away when it starts."""
    store = await server.open(timeout=0.3)
    if alone:
        server.pause()
    admission = LeaseAdmission(AdmissionRecords(store, made.lease), made, {}, owner=name)
    await admission.start()
    try:
        yield admission
    finally:
        await admission.stop()


async def ask(admission: LeaseAdmission, tokens: int, wait_s: float = 0.1, *, worker: str = "w") -> Slot | Refusal:
    return await admission.admit("p", worker, "t", tokens, wait_s)


async def test_alone_one_request_may_be_as_large_as_the_limit(store_server: Any) -> None:
    """Without the store a gateway that holds nothing lets one request in that is larger than its share, and nothing beside it;
    what is larger than the limit is never let in."""
    async with gateway(store_server, "a", alone=True) as a:
        for _ in range(3):
            large = await ask(a, LIMIT)
            assert isinstance(large, Slot)
            assert isinstance(await ask(a, 1), Refusal) and isinstance(await ask(a, LIMIT), Refusal)
            a.release(large)
        never = await ask(a, LIMIT + 1)
        assert isinstance(never, Refusal) and never.never
        small = await ask(a, SHARE)
        assert isinstance(small, Slot)
        assert isinstance(await ask(a, SHARE + 1), Refusal), "it holds something already"
        a.release(small)
        store_server.resume()


async def test_alone_a_large_request_keeps_nobody_out_for_ever(store_server: Any) -> None:
    """At the head of the queue it waits until what runs has ended, is let in, and those behind it follow."""
    async with gateway(store_server, "a", alone=True) as a:
        runs = await ask(a, 100)
        assert isinstance(runs, Slot)
        large, behind = (asyncio.create_task(ask(a, tokens, 10.0)) for tokens in (LIMIT, 100))
        await asyncio.sleep(0.05)
        assert not large.done() and not behind.done()
        a.release(runs)
        got = await asyncio.wait_for(large, 5)
        assert isinstance(got, Slot) and not behind.done()
        a.release(got)
        assert isinstance(await asyncio.wait_for(behind, 5), Slot)
        store_server.resume()


async def test_a_store_that_settles_lets_large_requests_in(store_server: Any) -> None:
    """Before every gateway has said what it holds, each may have one request that is larger than its share, as far as what others
    are known to hold leaves room for it."""
    async with gateway(store_server, "a") as a, gateway(store_server, "b") as b:
        large = await ask(a, 800, 1.0)
        assert isinstance(large, Slot) and a.tenure.settling
        assert isinstance(await ask(b, 800, 0.2), Refusal), "200 are left"
        assert isinstance(await ask(a, 150, 0.2), Refusal), "it holds more than its share"
        assert isinstance(await ask(b, 150, 1.0), Slot) and b.tenure.settling
        a.release(large)


async def test_a_store_that_settles_lets_large_requests_in_beside_other_limits(store_server: Any) -> None:
    """The same where the request needs a place under limits in requests as well."""
    limits = PoolLimits(requests=20, worker_requests=8, tokens=LIMIT, worker_tokens=900)
    made = AdmissionSettings(lease=Duration(LEASE), margin=Duration(0.2), tick=Duration(0.05), replicas=REPLICAS, default=limits)
    async with gateway(store_server, "a", made) as a:
        assert isinstance(await ask(a, 800, 1.0), Slot) and a.tenure.settling


async def test_what_is_ready_is_no_reason_against_a_large_request(store_server: Any) -> None:
    """A gateway that holds tokens ready and uses none is one that holds nothing."""
    async with gateway(store_server, "a") as a:
        small = await ask(a, 100, 1.0)
        assert isinstance(small, Slot)
        while a.picture()["pool-tokens/p"]["cap"] < SHARE:
            await asyncio.sleep(0.01)
        a.release(small)
        assert isinstance(await ask(a, 900, 1.0), Slot) and a.tenure.settling


async def test_limits_in_requests_are_shared_out_as_ever(store_server: Any) -> None:
    """A gateway's share of a limit in requests stays the limit by the gateways, also of one that holds nothing."""
    made = AdmissionSettings(lease=Duration(LEASE), margin=Duration(0.2), replicas=3, default=PoolLimits(requests=4, tokens=LIMIT))
    async with gateway(store_server, "a", made, alone=True) as a:
        assert [isinstance(await ask(a, 1), Slot) for _ in range(3)] == [True, False, False]
        store_server.resume()

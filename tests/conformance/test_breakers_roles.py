"""The shared breakers where roles are apart, and what a gateway that comes late counts."""

from __future__ import annotations

import asyncio
from typing import Any

from sentinel.durations import Duration
from sentinel.gateway.breakers import SharedBreakers
from sentinel.gateway.guards import Outcome
from sentinel.gateway.models import Plan
from sentinel.model import Fleet, Role, RouteEntry, RoutePool, Routes, WorkerState
from sentinel.settings_gateway import BreakerSettings
from sentinel.store.breakers import BreakerRecords

POLICY = BreakerSettings(base_open=Duration(60), poll=Duration(0.1), jitter=0.0)
ROLES = {**{f"prefill-{n}": Role.PREFILL for n in range(2)}, **{f"decode-{n}": Role.DECODE for n in range(8)}}


def plan() -> Plan:
    workers = tuple(RouteEntry(worker=name, url="", role=role, state=WorkerState.ACTIVE) for name, role in ROLES.items())
    return Plan(Routes(version=1, pools=(RoutePool(pool="p", weight=1.0, workers=workers),)), Fleet())


async def started(server: Any, host: str) -> SharedBreakers:
    made = SharedBreakers(BreakerRecords(await server.open(), POLICY), host=host, process="x")
    made.members(plan().members(), plan().prefills)
    await made.start()
    await asyncio.sleep(0.1)  # until it listens
    return made


async def fail(gateway: SharedBreakers, worker: str) -> None:
    for _ in range(6):
        permit = await gateway.permit(worker)
        if permit is not None:
            gateway.ended(permit, Outcome.FAILED)
        await asyncio.sleep(0.02)


async def until(what: Any) -> None:
    async with asyncio.timeout(10):
        while not what():
            await asyncio.sleep(0.01)


async def test_the_share_is_of_those_who_do_the_same(store_server: Any) -> None:
    """Of two prefill workers in a pool of ten only one opens; when both fail the pool is in panic and both are tried."""
    gateway = await started(store_server, "h1")
    try:
        await fail(gateway, "prefill-0")
        await until(lambda: gateway.states()["prefill-0"] == "open")
        await fail(gateway, "prefill-1")
        await until(lambda: gateway.panics() == ["p"])
        assert gateway.states()["prefill-1"] == "closed"
        assert None not in [await gateway.permit(worker) for worker in ("prefill-0", "prefill-1")]
    finally:
        await gateway.stop()


async def test_a_trip_is_counted_by_those_who_saw_it(store_server: Any) -> None:
    """A gateway that starts, or whose worker comes back into rotation, while a breaker is open finds it so and counts no trip."""
    first = await started(store_server, "h1")
    second = None
    try:
        await fail(first, "decode-0")
        await until(lambda: first.trips == 1)
        await asyncio.sleep(0.05)
        second = await started(store_server, "h2")
        await until(lambda: second is not None and second.states()["decode-0"] == "open")
        first.members({"p": [w for w in ROLES if w != "decode-0"]})
        await asyncio.sleep(0.05)
        first.members(plan().members(), plan().prefills)
        await until(lambda: first.states()["decode-0"] == "open")
        assert (first.trips, second.trips) == (1, 0)
    finally:
        await first.stop()
        if second:
            await second.stop()

"""Many workers that are full: what it costs to find that out, one after the other."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import Any

import pytest

from sentinel.durations import Duration
from sentinel.gateway.admission import ASK_S, LeaseAdmission
from sentinel.gateway.guards import Refusal, Slot
from sentinel.settings_gateway import AdmissionSettings, PoolLimits
from sentinel.store.admission import AdmissionRecords
from tests.conformance.test_gateway_guarded import gateways

SETTINGS = AdmissionSettings(lease=Duration(3.0), margin=Duration(0.2), replicas=1, default=PoolLimits(worker_requests=4))
MANY = 40


@pytest.mark.parametrize("count", [1, 2])
async def test_a_full_worker_is_known_by_one_answer(store_server: Any, count: int) -> None:
    """Who does not want to wait is told once the store has said that there is no more, and without a question where all of the
    limit is here. Nothing ends meanwhile, so nobody knows how fast things end."""
    async with AsyncExitStack() as stack:
        held: list[LeaseAdmission] = []
        for n in range(count):
            store = await store_server.open()
            held.append(LeaseAdmission(AdmissionRecords(store, SETTINGS.lease), SETTINGS, {}, owner=f"g{n}"))
            await held[-1].start()
            stack.push_async_callback(held[-1].stop)
        for worker in range(MANY):
            for n in range(4):
                assert isinstance(await held[n % count].admit("p", f"w{worker}", "t", 10, 3.0), Slot)
        asked, began = held[0].tenure.statements, time.monotonic()
        for worker in range(MANY):
            refusal = await held[0].admit("p", f"w{worker}", "t", 10, 0.0)
            assert isinstance(refusal, Refusal) and refusal.limit == "worker"
        assert time.monotonic() - began < MANY * ASK_S / 2
        if count == 1:
            assert held[0].tenure.statements <= asked + 2, "its ticks at most"


async def test_a_place_that_comes_free_is_found_behind_full_ones(store_server: Any) -> None:
    """Being quick about full workers overlooks no free one."""
    limits = PoolLimits(worker_requests=1)
    async with gateways(store_server, 2, "a", "b", "c", limits=limits) as (here, there):
        slots = [await there.admission.admit("p", worker, "x", 1, 2.0) for worker in ("a", "b")]
        assert all(isinstance(slot, Slot) for slot in slots)
        for n in range(12):
            async with here.post(user=f"{n}") as answer:
                assert answer.status == 200
                assert (await answer.json())["id"] == "chatcmpl-c"
        for slot in slots:
            there.admission.release(slot)  # type: ignore[arg-type]

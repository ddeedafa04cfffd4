"""Admission while the store takes its time: what nobody has said to be used up is waited for, not refused."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from sentinel.durations import Duration
from sentinel.gateway.admission import LeaseAdmission
from sentinel.gateway.guards import Refusal, Slot
from sentinel.settings_gateway import AdmissionSettings, PoolLimits
from sentinel.store.admission import AdmissionRecords

SETTINGS = AdmissionSettings(lease=Duration(6.0), tick=Duration(0.05), replicas=1, default=PoolLimits(worker_requests=16))


async def test_a_worker_that_nobody_uses_is_not_full(store_server: Any) -> None:
    """A gateway that has been idle holds nothing ready; while its question is under way a request waits for the answer."""
    gateway = LeaseAdmission(AdmissionRecords(await store_server.open(), SETTINGS.lease), SETTINGS, {}, owner="g")
    await gateway.start()
    try:
        slot = await gateway.admit("p", "w2", "t", 10, 1.0)
        assert isinstance(slot, Slot)
        gateway.release(slot)  # from now on it is known how fast things end here: one in some seconds
        while any(limit["cap"] for limit in gateway.picture().values()):
            await asyncio.sleep(0.05)  # an idle limit is given back
        store_server.pause()
        asked = asyncio.ensure_future(gateway.admit("p", "w1", "t", 10, 2.0))
        await asyncio.sleep(0.05)
        other = asyncio.ensure_future(gateway.admit("p", "w2", "t", 10, 2.0))
        await asyncio.sleep(0.05)
        store_server.resume()
        assert isinstance(await asked, Slot)
        assert isinstance(await other, Slot)
    finally:
        store_server.resume()
        await gateway.stop()


@pytest.mark.parametrize("limits", [PoolLimits(), PoolLimits(worker_requests=16)])
async def test_a_lease_that_is_over_keeps_out_only_what_is_limited(store_server: Any, limits: PoolLimits) -> None:
    """A gateway that did not run past its lease hands out nothing limited before it has renewed; else nobody waits."""
    slept = 0.0
    settings = AdmissionSettings(lease=Duration(6.0), replicas=1, default=limits)
    records = AdmissionRecords(await store_server.open(), settings.lease)
    gateway = LeaseAdmission(records, settings, {}, owner="g", clock=lambda: time.monotonic() + slept)
    await gateway.start()
    store_server.pause()
    try:
        slept = 60.0
        got = await gateway.admit("p", "w", "t", 10, 0.0)
        assert (got.limit if isinstance(got, Refusal) else "") == ("fenced" if limits.worker_requests else "")
    finally:
        store_server.resume()
        await gateway.stop()

"""Clients that vanish by the hundred while they wait: no slot, no place in line and no turn is lost with them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sentinel.gateway.guards import Slot
from tests.conformance.test_admission_shared import fleet, settings, take

MANY = 1000


@pytest.mark.parametrize("tenants", [1, 40])
async def test_a_thousand_that_vanish_at_once_leave_nothing_behind(store_server: Any, tenants: int) -> None:
    """All who wait are cancelled in the round of the loop in which a slot comes free: it goes to nobody, nothing is held or waited
    for afterwards, the store hears so, and the next request is admitted."""
    async with fleet(store_server, 1, settings(lease=0.6, requests=1)) as f:
        (a,) = f.made
        (slot,) = await take(a, 1)
        waiting = [asyncio.create_task(a.admit("p", "w", f"t{n % tenants}", 10, 60.0)) for n in range(MANY)]
        await asyncio.sleep(0)
        assert a.waiting == MANY
        for task in waiting:
            task.cancel()
        a.release(slot)
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended)
        assert a.held == a.waiting == 0
        scope = a._lanes.scopes["pool/p"]
        assert (scope.used, scope.waiters, scope.waiting, len(scope.queue)) == (0, 0, 0, 0)
        assert len(await take(a, 1)) == 1


async def test_who_is_alive_is_let_in_among_those_that_vanished(store_server: Any) -> None:
    """One request in a hundred stays: the slot that comes free in the round in which all others vanish is its own."""
    async with fleet(store_server, 1, settings(lease=0.6, requests=1)) as f:
        (a,) = f.made
        (slot,) = await take(a, 1)
        waiting = [asyncio.create_task(a.admit("p", "w", f"t{n % 3}", 10, 60.0)) for n in range(MANY)]
        await asyncio.sleep(0)
        stays = waiting.pop(500)
        for task in waiting:
            task.cancel()
        a.release(slot)
        got = await asyncio.wait_for(stays, 5)
        await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(got, Slot) and (a.held, a.waiting) == (1, 0)
        a.release(got)

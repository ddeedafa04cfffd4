"""What a gateway does not need any more is nobody's: the store hears of it, whatever becomes of the statement that says so."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from sentinel.store.admission import AdmissionRecords
from tests.conformance.test_admission_shared import LEASE, fleet, settings, take


async def allotted(records: AdmissionRecords, limit: str, seconds: float) -> int:
    """What the living owners are allotted of it, once that is nothing, or after so many seconds."""
    ends = time.monotonic() + seconds
    while (held := sum(h.allotted for h in await records.held(limit))) and time.monotonic() < ends:
        await asyncio.sleep(0.02)
    return held


async def test_a_limit_that_goes_away_is_given_up(store_server: Any) -> None:
    """The new configuration of one gateway does not know a limit any more: what it was allotted is the others' at once, whose
    configuration is still the old one. When the limit is back it holds for what still runs."""
    async with fleet(store_server, 2, settings(requests=8)) as f:
        a, b = f.made
        slots = await take(a, 8)
        assert len(slots) == 8 and await take(b, 1, wait=0.1) == []
        a.configure(settings(), {})
        got = await take(b, 8, wait=LEASE)
        assert len(got) == 8
        for slot in got:
            b.release(slot)
        a.configure(settings(requests=8), {})
        assert len(await take(a, 1, wait=0.1)) == 0, "eight of the old ones still run"
        for slot in slots:
            a.release(slot)
        assert len(await take(a, 8)) == 8


async def test_a_statement_that_was_not_heard_is_said_again(store_server: Any) -> None:
    """A gateway that gives back what it held ready, and is not registered just then, leaves nothing behind when it is again."""
    async with fleet(store_server, 1, settings(requests=8)) as f:
        (a,) = f.made
        for slot in await take(a, 4):
            a.release(slot)
        records = AdmissionRecords(await store_server.open(), LEASE)
        while not sum(h.allotted for h in await records.held("pool/p")):
            await asyncio.sleep(0.01)
        while a.picture()["pool/p"]["cap"]:
            await store_server.raw.hdel("{sentinel}:owners", "g0")
        fence = a.tenure.fence
        while a.tenure.fence == fence:
            await asyncio.sleep(0.01)
        assert await allotted(records, "pool/p", LEASE / 2) == 0, "and others that use the limit would keep it there"

"""What the controller reads of the shared breakers and the table of gateways, and what it may not overrule there."""

from __future__ import annotations

import asyncio
from typing import Any

from sentinel.durations import Duration
from sentinel.settings_gateway import BreakerSettings
from sentinel.store.breakers import PINS_BY, BreakerRecords
from sentinel.store.gateways import Gateways

POLICY = BreakerSettings(base_open=Duration(0.1), jitter=0.0)
OTHERS = ("w2", "w3", "w4")


async def _fails(records: BreakerRecords, reporter: str, times: int = 5) -> None:
    version = (await records.listing({"w1": "p"}))[0].version
    await records.failed("w1", "p", OTHERS, reporter, version=version, fine=0, failed=times, draw=0.0)


async def test_an_open_breaker_names_the_hosts_that_opened_it(store_server: Any) -> None:
    """Who saw the failures is known for as long as it is open, a failed probe's host too, and forgotten when it closes."""
    records = BreakerRecords(await store_server.open(), POLICY)
    await records.seen("h2/1", [("w1", 0, 1)])
    await _fails(records, "h1/1", 4)
    await _fails(records, "h2/1", 4)
    (opened,) = await records.listing({"w1": "p"}, evidence=True)
    assert (opened.state, opened.hosts) == ("open", "h1 h2")
    await asyncio.sleep(0.12)
    assert (await records.permit("w1", "p", "h3/1#1"))[1]
    assert (await records.ended("w1", "p", "h3/1#1", "failed", 0.0)).hosts == "h1 h2 h3"
    await asyncio.sleep(0.25)
    for number in range(POLICY.probes):
        assert (await records.permit("w1", "p", f"h1/1#{number}"))[1]
        closed = await records.ended("w1", "p", f"h1/1#{number}", "fine", 0.0)
    assert (closed.state, closed.hosts) == ("closed", "")


async def test_a_persons_pin_is_not_the_controllers_to_change(store_server: Any) -> None:
    """Sentinel's own pin yields to a person's; a person's pin stays, both ways, until that person takes it away or it expires."""
    records = BreakerRecords(await store_server.open(), POLICY)
    assert (await records.pin("w1", "p", "open", lasts_s=60, by=PINS_BY)).pin == "open"
    assert (await records.pin("w1", "p", "closed", lasts_s=60, by="ann", why="it is well")).pin_by == "ann"
    for state in ("open", ""):
        kept = await records.pin("w1", "p", state, lasts_s=60, by=PINS_BY)
        assert (kept.pin, kept.pin_by, kept.why) == ("closed", "ann", "it is well")
    assert (await records.pin("w1", "p", "", lasts_s=0, by="bob")).pin == ""
    before = (await records.listing({"w1": "p"}))[0].version
    assert (await records.pin("w1", "p", "", lasts_s=0, by=PINS_BY)).version == before  # nothing to take away: nothing changes


async def test_who_is_behind_is_named(store_server: Any) -> None:
    """Those that are there and obey an older table are named once each; those that fell silent are not waited for."""
    gateways = Gateways(await store_server.open(), settle_s=0.05)
    await gateways.obey("g1", "a", 6, 30)
    await gateways.obey("g2", "b", 5, 30)
    await gateways.obey("g3", "b", 4, 30)
    await gateways.obey("g4", "c", 1, 0.05)
    await asyncio.sleep(0.1)
    assert await gateways.behind(6) == ["b"] and not await gateways.acked(6)
    assert await gateways.behind(4) == []

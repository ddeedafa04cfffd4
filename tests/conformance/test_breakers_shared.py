"""The shared breakers on real servers: when they open, whom they let through, and what each gateway hears of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sentinel.durations import Duration
from sentinel.gateway.breakers import SharedBreakers
from sentinel.gateway.guards import Outcome, Permit
from sentinel.settings_gateway import BreakerSettings
from sentinel.store.breakers import BreakerRecords

POLICY = BreakerSettings(base_open=Duration(0.1), jitter=0.0, poll=Duration(0.2))
NAMES = ("w1", "w2", "w3", "w4")
WORKERS = dict.fromkeys(NAMES, "p")


async def until(what: Any) -> None:
    while not what():
        await asyncio.sleep(0.005)


@asynccontextmanager
async def gateways(server: Any, count: int = 3, policy: BreakerSettings = POLICY) -> AsyncIterator[list[SharedBreakers]]:
    """Gateways on hosts of their own, with a store of their own each."""
    made = []
    for n in range(count):
        made.append(
            SharedBreakers(BreakerRecords(await server.open(timeout=0.3), policy), host=f"h{n}", process="x", draw=lambda: 0.5)
        )
        made[-1].members({"p": NAMES})
        await made[-1].start()
    await asyncio.sleep(0.1)  # until they listen
    try:
        yield made
    finally:
        for gateway in made:
            await gateway.stop()


async def spend(gateway: SharedBreakers, worker: str, outcome: Outcome, times: int = 1) -> None:
    for _ in range(times):
        permit = await gateway.permit(worker)
        assert permit is not None
        gateway.ended(permit, outcome)


async def test_all_gateways_know_at_once(store_server: Any) -> None:
    """What two gateways see fail is open for the third, too, by the push and without anyone's asking."""
    async with gateways(store_server, policy=BreakerSettings(base_open=Duration(60), poll=Duration(60))) as (a, b, c):
        await spend(a, "w1", Outcome.FAILED, 3)
        await spend(b, "w1", Outcome.FAILED, 3)
        await until(lambda: not (a.closed("w1") or b.closed("w1") or c.closed("w1")))
        assert [await g.permit("w1") for g in (a, b, c)] == [None] * 3
        assert all(g.closed("w2") for g in (a, b, c))


async def test_one_hosts_word_is_not_enough_while_others_see_it_work(store_server: Any) -> None:
    """Failures that one host sees alone open nothing as long as another host has traffic there; without such traffic they do."""
    async with gateways(store_server) as (a, b, _):
        await spend(b, "w1", Outcome.FINE, 2)
        await asyncio.sleep(0.15)  # until told
        await spend(a, "w1", Outcome.FAILED, 50)
        await spend(a, "w2", Outcome.FAILED, 50)
        await until(lambda: not b.closed("w2"))
        assert a.closed("w1") and b.closed("w1")


async def test_client_errors_and_pressure_open_nothing(store_server: Any) -> None:
    """No number of 400s, 429s, 503s or broken clients opens a breaker; the store then knows no failure at all."""
    async with gateways(store_server) as fleet:
        for gateway in fleet:
            for outcome in (Outcome.FINE, Outcome.BUSY, Outcome.IGNORED):
                await spend(gateway, "w1", outcome, 200)
        await asyncio.sleep(0.25)
        records = BreakerRecords(await store_server.open(), POLICY)
        (standing,) = await records.listing({"w1": "p"}, evidence=True)
        assert (standing.state, standing.volume, standing.failed) == ("closed", 600, 0)
        assert all(g.closed("w1") for g in fleet)


async def test_half_open_lets_exactly_so_many_through(store_server: Any) -> None:
    """Of three hundred requests at three gateways at once, exactly as many as the policy says reach a half-open worker."""
    async with gateways(store_server) as fleet:
        await spend(fleet[0], "w1", Outcome.FAILED, 3)
        await spend(fleet[1], "w1", Outcome.FAILED, 3)
        await until(lambda: fleet[2].states()["w1"] == "open")
        for _ in range(3):
            await asyncio.sleep(0.12)
            permits = [p for p in await asyncio.gather(*(g.permit("w1") for g in fleet * 100)) if p]
            if permits:
                break
        assert len(permits) == POLICY.probes and all(p.probe for p in permits)
        for gateway in fleet:
            for permit in permits:
                gateway.ended(permit, Outcome.FINE)
                gateway.ended(permit, Outcome.FINE)
        await until(lambda: all(g.states()["w1"] == "closed" for g in fleet))


async def test_a_probe_that_fails_opens_again_for_longer(store_server: Any) -> None:
    """One failed probe opens the worker again, at the next step of the back-off, whatever the other probes say."""
    records = BreakerRecords(await store_server.open(), POLICY)
    opened = await records.failed("w1", "p", NAMES[1:], "h/1", version=0, fine=0, failed=9, draw=0.0)
    assert (opened.state, opened.trips, round(opened.left)) == ("open", 1, 100)
    await asyncio.sleep(0.11)
    half, given = await records.permit("w1", "p", "x")
    assert given and half.state == "half_open"
    await records.permit("w1", "p", "y")
    again = await records.ended("w1", "p", "x", "failed", 0.0)
    assert (again.state, again.trips, round(again.left)) == ("open", 2, 200)
    assert (await records.ended("w1", "p", "y", "fine", 0.0)).state == "open"


async def test_probes_of_the_dead_come_back_while_others_ask(store_server: Any) -> None:
    """A probe whose holder says nothing more is free again when its own lease ends, though it is asked for all the time."""
    policy = BreakerSettings(base_open=Duration(0.1), jitter=0.0, probes=1, probe_lease=Duration(1.0))
    records = BreakerRecords(await store_server.open(), policy)
    await records.failed("w1", "p", NAMES[1:], "h/1", version=0, fine=0, failed=9, draw=0.0)
    await asyncio.sleep(0.11)
    assert (await records.permit("w1", "p", "dead"))[1]
    refused = 0
    for n in itertools.count():
        if (await records.permit("w1", "p", f"x{n}"))[1]:
            break
        refused += 1
        await asyncio.sleep(0.01)
    assert refused > 20
    assert (await records.ended("w1", "p", "dead", "failed", 0.0)).state == "half_open", "its word came too late"
    assert (await records.ended("w1", "p", f"x{n}", "fine", 0.0)).state == "closed"


async def opened(gateway: SharedBreakers, worker: str) -> list[Permit]:
    """Let it fail, wait until its time is over, and take every probe."""
    await spend(gateway, worker, Outcome.FAILED, 5)
    await until(lambda: gateway.states()[worker] == "open")
    await until(lambda: gateway.closed(worker))
    permits = [p for p in [await gateway.permit(worker) for _ in range(9)] if p]
    assert len(permits) == POLICY.probes and all(p.probe for p in permits)
    return permits


async def test_a_probe_is_over_with_its_first_byte(store_server: Any) -> None:
    """Probes whose streams go on for minutes close the breaker when they begin; each counts once, however it is told."""
    async with gateways(store_server, 2) as (a, b):
        permits = await opened(a, "w1")
        for permit in permits:
            assert b.states()["w1"] != "closed"
            a.begun(permit)
            a.begun(permit)
            await asyncio.sleep(0.02)
        await until(lambda: a.states()["w1"] == b.states()["w1"] == "closed")
        for permit in permits * 2:
            a.ended(permit, Outcome.FINE)
        await asyncio.sleep(0.15)
        (standing,) = await BreakerRecords(await store_server.open(), POLICY).listing({"w1": "p"}, evidence=True)
        assert (standing.state, standing.volume, a.stale) == ("closed", 0, 0)


async def test_a_stream_that_was_a_probe_still_counts_when_it_breaks(store_server: Any) -> None:
    """After the breaker closed it is a failure like any other, told once; what was sent before the breaker opened is not."""
    async with gateways(store_server, 1) as (a,):
        old = await a.permit("w1")
        assert old is not None
        permits = await opened(a, "w1")
        for permit in permits:
            a.begun(permit)
        await until(lambda: a.states()["w1"] == "closed")
        for permit in [*permits, *permits, old]:
            a.ended(permit, Outcome.FAILED)
        await asyncio.sleep(0.15)
        (standing,) = await BreakerRecords(await store_server.open(), POLICY).listing({"w1": "p"}, evidence=True)
        assert (standing.state, standing.volume, standing.failed, a.stale) == ("closed", 3, 3, 1)
        await spend(a, "w1", Outcome.FAILED, POLICY.min_requests - 3)
        await until(lambda: a.states()["w1"] == "open")


async def test_a_probe_that_breaks_while_others_are_out_opens_again(store_server: Any) -> None:
    """A good beginning is no success for a worker that breaks the same answer before the breaker has closed."""
    async with gateways(store_server, 1) as (a,):
        first, *_ = await opened(a, "w1")
        a.begun(first)
        await asyncio.sleep(0.05)
        a.ended(first, Outcome.FAILED)
        await until(lambda: a.states()["w1"] == "open")
        (standing,) = await BreakerRecords(await store_server.open(), POLICY).listing({"w1": "p"})
        assert standing.trips == 2


async def test_a_probe_that_nobody_waited_for_is_free_at_once(store_server: Any) -> None:
    """A request that leaves, or a store that answers too late, takes no probe along, though its lease would be long."""
    policy = BreakerSettings(base_open=Duration(0.1), jitter=0.0, probes=1, probe_lease=Duration(3600), poll=Duration(3600))
    store = await store_server.open(timeout=30.0)
    a = SharedBreakers(BreakerRecords(store, policy), host="h", process="x", draw=lambda: 0.5)
    a.members({"p": NAMES})
    await a.start()
    await spend(a, "w1", Outcome.FAILED, 5)
    await until(lambda: a.states()["w1"] == "open")
    await until(lambda: a.closed("w1"))
    store_server.pause()
    leaves = asyncio.create_task(a.permit("w1"))
    await asyncio.sleep(0.02)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    assert await a.permit("w1") is None
    store_server.resume()
    while (permit := await a.permit("w1")) is None:
        await asyncio.sleep(0.01)
    assert permit.probe
    a.ended(permit, Outcome.IGNORED)
    await asyncio.sleep(0.1)
    store_server.pause()
    await until(lambda: a.closed("w1"))
    assert await a.permit("w1") is None, "the store is too slow"
    store_server.resume()
    while await a.permit("w1") is None:
        await asyncio.sleep(0.01)
    await a.stop()


async def test_late_words_do_not_count(store_server: Any) -> None:
    """What was sent before a breaker opened and closed again says nothing about it afterwards."""
    async with gateways(store_server, 1) as (a,):
        old = await a.permit("w1")
        assert old is not None
        await spend(a, "w1", Outcome.FAILED, 5)
        await until(lambda: a.states()["w1"] == "open")
        await until(lambda: a.closed("w1"))
        for _ in range(POLICY.probes):
            await spend(a, "w1", Outcome.FINE)
        await until(lambda: a.states()["w1"] == "closed")
        for _ in range(50):
            a.ended(old, Outcome.FAILED)
        await asyncio.sleep(0.15)
        assert a.states()["w1"] == "closed" and a.stale == 50


async def test_a_pool_that_fails_as_a_whole_is_tried_as_a_whole(store_server: Any) -> None:
    """When all workers fail, half of the pool at most is open, the pool is in panic, and requests may go to every worker."""
    async with gateways(store_server) as fleet:
        for gateway in fleet:
            for worker in NAMES:
                for _ in range(9):
                    gateway.ended(Permit(worker=worker), Outcome.FAILED)
        await until(lambda: all(g.panics() == ["p"] for g in fleet))
        records = BreakerRecords(await store_server.open(), POLICY)
        standing = await records.listing(WORKERS)
        assert sum(s.state != "closed" for s in standing) == 2 and all(s.panic_left > 0 for s in standing)
        for gateway in fleet:
            for worker in NAMES:
                assert gateway.closed(worker) and await gateway.permit(worker) is not None


async def test_the_last_worker_is_never_opened(store_server: Any) -> None:
    """A pool of one worker is never left without it, whatever it does."""
    records = BreakerRecords(await store_server.open(), BreakerSettings(max_share=1.0))
    standing = await records.failed("w1", "p", [], "h/1", version=0, fine=0, failed=99, draw=0.0)
    assert standing.state == "closed" and standing.panic_left > 0


async def test_a_pin_outranks_what_is_seen(store_server: Any) -> None:
    """Pinned closed it stays in whatever fails, pinned open it stays out even in panic; afterwards what is seen counts again."""
    async with gateways(store_server, 1) as (a,):
        records = BreakerRecords(await store_server.open(), POLICY)
        await records.pin("w1", "p", "closed", lasts_s=0.8, by="ada", why="a trial")
        await records.pin("w2", "p", "open", lasts_s=0.8, by="ada")
        await until(lambda: not a.closed("w2"))
        for worker in ("w1", "w3", "w4"):
            await spend(a, worker, Outcome.FAILED, 20)
        await until(lambda: a.panics() == ["p"])
        assert a.closed("w1") and not a.closed("w2") and await a.permit("w2") is None
        await until(lambda: a.closed("w2"))
        assert (await records.listing({"w1": "p"}))[0].pin == ""


async def test_a_store_that_is_away_leaves_what_was_known(store_server: Any) -> None:
    """Without the store an open breaker stays open, this gateway goes on by the same thresholds, and the store's word ends that."""
    async with gateways(store_server, 1) as (a,):
        records = BreakerRecords(await store_server.open(), POLICY)
        await records.pin("w1", "p", "open", lasts_s=60, by="ada")
        await until(lambda: not a.closed("w1"))
        store_server.pause()
        await spend(a, "w2", Outcome.FAILED, POLICY.min_requests)
        await until(lambda: a.away)
        await until(lambda: a.states()["w2"] == "open")
        assert a.trips_alone == 1 and not a.closed("w1")
        await until(lambda: a.closed("w2"))
        for _ in range(POLICY.probes):
            await spend(a, "w2", Outcome.FINE)
        await until(lambda: a.states()["w2"] == "closed")
        await spend(a, "w2", Outcome.FAILED, POLICY.min_requests)
        await until(lambda: a.states()["w2"] == "open")
        store_server.resume()
        await until(lambda: not a.away)
        await records.pin("w2", "p", "closed", lasts_s=60, by="ada")
        await until(lambda: a.states() == {"w1": "open", "w2": "closed", "w3": "closed", "w4": "closed"})


async def test_a_store_that_lost_its_data_is_believed(store_server: Any) -> None:
    """After a flush every breaker is closed, and failures open it again as if for the first time."""
    async with gateways(store_server, 1) as (a,):
        await spend(a, "w1", Outcome.FAILED, 5)
        await until(lambda: a.states()["w1"] == "open")
        await store_server.raw.flushall()
        await until(lambda: a.states()["w1"] == "closed")
        await spend(a, "w1", Outcome.FAILED, 5)
        await until(lambda: a.states()["w1"] == "open")


async def test_ordinary_requests_ask_nothing(store_server: Any) -> None:
    """Ten thousand requests cost the store a handful of questions."""
    async with gateways(store_server, 1) as (a,):
        before = a.questions
        await spend(a, "w1", Outcome.FINE, 10_000)
        await asyncio.sleep(0.3)
        assert a.questions - before < 20
        (standing,) = await BreakerRecords(await store_server.open(), POLICY).listing({"w1": "p"}, evidence=True)
        assert standing.volume == 10_000

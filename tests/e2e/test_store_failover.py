"""Two controllers and a Redis that fails over, seen from outside: what must never happen does not, whatever dies.

See outside.py for what is real and what is played.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.outside import LEASE_S, Outside, outside


@pytest_asyncio.fixture
async def site(program: Callable[[str], Path], tmp_path: Path) -> AsyncIterator[Outside]:
    async with outside(program("redis-server"), tmp_path) as site:
        yield site


async def settled(site: Outside) -> None:
    """Wait until nothing is under way: every doubt mended and back in service, every dead worker out, nothing in between."""

    def quiet() -> bool:
        return all(
            site.state(n.worker) == ("out" if n.dead_since else "active") or n.worker in site.held_in for n in site.nodes.values()
        )

    await site.until(quiet, "every drain ends", 90)


async def test_a_leader_killed_between_deciding_and_acting(site: Outside) -> None:
    """SIGKILL after the eviction is durable and before the agent heard of it, then of Redis' primary during the next drain: each
    is carried out once, one alert each, and takeover takes few lease periods."""
    site.hands_tied = True
    site.dies("w1")
    await site.until(lambda: site.state("w1") == "out", "w1 leaves the table")
    began = time.monotonic()
    await site.kill("c1")
    await site.leads("c2")
    periods = (time.monotonic() - began) / LEASE_S
    print(f"takeover after {periods:.2f} lease periods")
    site.hands_tied = False
    await site.until(lambda: site.did("w1") == ["kill_worker"], "the kill is carried out")

    await site.begin("c1")
    site.nodes["w2"].running = 3
    site.doubt("w2")
    await site.until(lambda: site.state("w2") == "out", "w2 gets nothing new")
    old = await site.pair.primary()
    site.pair.kill(old)
    await site.pair.changed(old)
    site.nodes["w2"].running = 0
    await settled(site)
    assert site.did("w2") == ["stop_worker", "reset_gpu", "start_worker"]
    assert site.did("w1") == ["kill_worker"]
    assert len(site.dedup_keys()) == 1, "one alert; the drain on doubt mended itself without one"
    assert all(not n.did for n in site.nodes.values() if n.worker not in ("w1", "w2")), "no burst of drains"
    assert periods < 6, "a generous bound on what is two periods on an idle machine"


@pytest.mark.long
async def test_a_paused_leader_wakes_up_and_does_nothing(site: Outside) -> None:
    """SIGSTOP of the leader, with a page that it could not deliver and a drain under way, for three leases: the other finishes
    both; awake again it acts on nothing and writes nothing."""
    site.status = 503
    site.dies("w1")
    site.nodes["w2"].running = 2
    site.doubt("w2")
    await site.until(lambda: site.did("w1") and site.state("w2") == "out", "both are under way")
    site.freeze("c1")
    caller = await site.leads("c2")
    site.status = 200
    await site.until(lambda: site.accepted, "the page arrives")
    await asyncio.sleep(2 * LEASE_S)
    epoch = (await caller.get("/v1/status"))[1]["leader"]["epoch"]
    site.wake("c1")
    await site.role_is("c1", "standby")
    await asyncio.sleep(2 * LEASE_S)
    assert len(site.accepted) == 1
    site.nodes["w2"].running = 0
    await settled(site)
    assert (await caller.get("/v1/status"))[1]["leader"]["epoch"] == epoch
    assert site.did("w1") == ["kill_worker"]
    assert site.did("w2") == ["stop_worker", "reset_gpu", "start_worker"]


@pytest.mark.long
@pytest.mark.parametrize("how", ["kill", "pause", "ask"])
async def test_redis_fails_over_in_the_middle_of_a_drain(site: Outside, how: str) -> None:
    """The primary killed, paused or told to hand over while two workers drain and a third dies: all is done once."""
    site.nodes["w1"].running = site.nodes["w2"].running = 2
    site.doubt("w1")
    await site.asked({"verb": "drain", "target": "w2", "reason": "swap a cable", "deadline_s": 120})
    await site.asked({"verb": "hold", "target": "w5", "keep": "in", "reason": "mine"})
    site.held_in.add("w5")
    await site.until(lambda: site.state("w1") == site.state("w2") == "out", "both drain")
    old = await site.pair.primary()
    if how == "kill":
        site.pair.kill(old)
    elif how == "pause":
        site.pair.pause(old)
    else:
        await site.pair.fail_over()
    site.dies("w3")
    site.doubt("w5")
    await site.pair.changed(old)
    if how == "pause":
        site.pair.resume(old)
    await site.until(lambda: site.did("w3") == ["kill_worker"], "what died meanwhile is evicted")
    site.nodes["w1"].running = site.nodes["w2"].running = 0
    await site.until(lambda: site.state("w1") == "active" and site.state("w2") == "out", "the drains end")
    await site.until(lambda: site.accepted, "a person is paged")
    await asyncio.sleep(2 * LEASE_S)
    assert site.did("w1") == ["stop_worker", "reset_gpu", "start_worker"]
    assert site.did("w3") == ["kill_worker"]
    assert max(site.dedup_keys().values()) == 1
    assert not site.did("w4")
    assert not site.did("w5")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
async def test_chaos(site: Outside, seed: int) -> None:
    """Kills, pauses and failovers at random for half a minute, with faults between them: the observer finds nothing broken, and
    once it is over every drain ends."""
    chance = random.Random(seed)
    await site.asked({"verb": "hold", "target": "w6", "keep": "in", "reason": "mine"})
    site.held_in.add("w6")
    site.doubt("w6")
    faults = [("doubt", "w1"), ("dies", "w2"), ("doubt", "w3"), ("doubt", "w4"), ("doubt", "w5")]
    chance.shuffle(faults)
    strikes = ["kill leader", "freeze leader", "kill primary", "pause primary", "ask", "kill replica", "kill a Sentinel", "both"]
    chance.shuffle(strikes)
    for strike in strikes:
        if faults:
            what, worker = faults.pop()
            getattr(site, what)(worker)
        await asyncio.sleep(chance.uniform(0, 0.6))
        print("strike:", strike)
        await struck(site, strike, chance)
        await asyncio.sleep(chance.uniform(0.5, 2.0))
    await settled(site)
    assert not site.broken


async def struck(site: Outside, strike: str, chance: random.Random) -> None:
    """Carry out one strike, and mend what it broke after a while."""
    pair = site.pair
    primary = await pair.primary()
    replica = next(p for p in pair.servers if p != primary)
    leader, _ = await site.leader()
    if strike in ("kill leader", "both"):
        await site.kill(leader)
    elif strike == "freeze leader":
        site.freeze(leader)
        await asyncio.sleep(chance.uniform(1.2, 3) * LEASE_S)
        site.wake(leader)
    if strike in ("kill primary", "both"):
        pair.kill(primary)
        await pair.changed(primary)
        pair.begin(primary, replica=True)
    elif strike == "pause primary":
        pair.pause(primary)
        await pair.changed(primary)
        pair.resume(primary)
    elif strike == "ask":
        await pair.fail_over()
        await pair.changed(primary)
    elif strike == "kill replica":
        pair.kill(replica)
        await asyncio.sleep(1)
        pair.begin(replica, replica=True)
    elif strike == "kill a Sentinel":
        watcher = chance.choice(pair.sentinels)
        pair.kill(watcher)
        await asyncio.sleep(1)
        pair.watch_again(watcher)
    if leader not in site.processes:
        await site.begin(leader)
    await pair.whole()

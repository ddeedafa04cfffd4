"""A drain proved on real Dynamo: frontend, discovery and request plane of ai-dynamo 1.6.1; only the engine is its simulator.

``test_one_worker_out_and_back`` runs in CI; the rest needs minutes and runs with ``make test-long``.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from sentinel.model import Role
from sentinel.serving.adapters import open_discovery
from sentinel.serving.dynamo import DynamoAdapter
from tests.e2e.dynamo import DynamoRig, MemoryKeep, Mocker, RigHands, low_port, rig


def adapter(dynamo: DynamoRig) -> DynamoAdapter:
    discovery = open_discovery(dynamo.settings, dynamo.http)
    assert discovery
    return DynamoAdapter(dynamo.settings, discovery, RigHands(dynamo), MemoryKeep(), dynamo.http)


async def idle(a: DynamoAdapter, mocker: Mocker) -> None:
    """Drained: nothing in flight on two looks running, since a request may be on its way when the entry goes."""
    quiet = 0
    async with asyncio.timeout(60):
        while quiet < 2:
            quiet = quiet + 1 if await a.in_flight(mocker.worker) == 0 else 0
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture(params=["file", "etcd"])
async def dynamo(request: pytest.FixtureRequest, tmp_path: Path, program: Callable[[str], Path]) -> AsyncIterator[DynamoRig]:
    etcd = program("etcd") if request.param == "etcd" else None
    async with rig(tmp_path, 3, request.param, etcd=etcd) as made:
        yield made


async def test_one_worker_out_and_back(tmp_path: Path) -> None:
    """With 20 streams running, a worker drains to nothing in flight and returns by a pinned request; no stream fails."""
    async with rig(tmp_path, 3) as dynamo:
        a, victim = adapter(dynamo), dynamo.workers[0]
        load = asyncio.create_task(dynamo.load(streams=20, tokens=100, seconds=4))
        await asyncio.sleep(0.5)
        assert await a.in_flight(victim.worker)
        assert await a.deroute(victim.worker)
        await dynamo.until(lambda: _out(dynamo, victim), 5)
        await idle(a, victim)
        assert not load.done()
        ok, why = await a.verify(victim.worker, 10)
        assert ok, why
        assert await a.reroute(victim.worker)
        assert victim.hexid in await dynamo.routable()
        counts = await load
        assert (counts.ok, counts.failed, dict(counts.errors)) == (counts.sent, 0, {})


async def _out(dynamo: DynamoRig, mocker: Mocker) -> bool:
    return mocker.hexid not in await dynamo.routable()


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_ten_drains_fail_no_request(dynamo: DynamoRig) -> None:
    """Ten drains under 20 streams, worker after worker: out, idle, ended, started anew, verified, back; no request fails."""
    a = adapter(dynamo)
    ended = asyncio.Event()

    async def traffic() -> tuple[int, int, dict[str, int]]:
        sent = failed = 0
        errors: dict[str, int] = {}
        while not ended.is_set():
            counts = await dynamo.load(streams=20, tokens=100, seconds=2)
            sent, failed = sent + counts.sent, failed + counts.failed
            errors |= counts.errors
        return sent, failed, errors

    load = asyncio.create_task(traffic())
    await asyncio.sleep(0.5)
    for n in range(10):
        victim = dynamo.workers[n % 3]
        assert await a.deroute(victim.worker)
        await idle(a, victim)
        assert await a.stop(victim.worker, hard=False, key=f"stop {n}")
        assert await a.start(victim.worker, key=f"start {n}")
        ok, why = await a.verify(victim.worker, 20)
        assert ok, why
        assert await a.reroute(victim.worker)
    ended.set()
    sent, failed, errors = await load
    assert sent > 100
    assert (failed, errors) == (0, {})


@pytest.mark.long
async def test_a_killed_worker_leaves_at_once_and_its_streams_move(dynamo: DynamoRig) -> None:
    """SIGKILL, then its stale entry is deleted: the frontend stops naming it long before its lease ends, and no stream fails."""
    a, victim = adapter(dynamo), dynamo.workers[1]
    await a.look(victim.worker)
    load = asyncio.create_task(dynamo.load(streams=20, tokens=200, seconds=4))
    await asyncio.sleep(1)
    assert await a.stop(victim.worker, hard=True, key="kill")
    await dynamo.until(lambda: _out(dynamo, victim), 3)  # without the deletion: 7 to 10 s with files, up to 30 s with etcd
    assert not await a.reroute(victim.worker)
    assert await a.look(victim.worker) is None
    counts = await load
    assert (counts.failed, dict(counts.errors)) == (0, {})
    assert await a.start(victim.worker, key="again")
    ok, why = await a.verify(victim.worker, 20)
    assert ok, why


@pytest.mark.long
async def test_a_hung_worker_is_taken_out_without_its_help_and_ended(dynamo: DynamoRig) -> None:
    """SIGSTOP: it answers nothing, its entry is removed by what was known of it, a kill frees its streams."""
    a, victim = adapter(dynamo), dynamo.workers[2]
    await a.look(victim.worker)
    load = asyncio.create_task(dynamo.load(streams=20, tokens=200, seconds=4))
    await asyncio.sleep(1)
    await dynamo.kill(victim.name, signal.SIGSTOP)
    assert await a.deroute(victim.worker)
    await dynamo.until(lambda: _out(dynamo, victim), 3)
    assert await a.in_flight(victim.worker) is None
    assert not await a.reroute(victim.worker)
    assert await a.stop(victim.worker, hard=True, key="kill")
    counts = await load
    assert (counts.failed, dict(counts.errors)) == (0, {})


@pytest.mark.long
async def test_a_worker_out_for_longer_than_its_lease_comes_back(dynamo: DynamoRig) -> None:
    """The owner keeps an entry alive again that somebody else wrote back: still routable after a lease's time."""
    a, victim = adapter(dynamo), dynamo.workers[0]
    assert await a.deroute(victim.worker)
    await asyncio.sleep(12)
    assert victim.hexid not in await dynamo.routable()
    assert await a.reroute(victim.worker)
    await dynamo.until(lambda: _in(dynamo, victim), 3)
    await asyncio.sleep(14 if dynamo.discovery.startswith("file") else 32)  # past 10 s of age, past a lease of 30 s
    assert victim.hexid in await dynamo.routable()


@pytest.mark.long
async def test_a_disaggregated_pair_is_verified_by_role(tmp_path: Path) -> None:
    """Prefill and decode workers each answer a request pinned to them, out and back, even when the other is out and tested too."""
    async with rig(tmp_path, 0, front_args=("--router-mode", "kv")) as dynamo:
        ports = ("--bootstrap-ports", str(low_port()))
        prefill = await dynamo.add("prefill", Role.PREFILL, "--disaggregation-mode", "prefill", *ports)
        decode = await dynamo.add("decode", Role.DECODE, "--disaggregation-mode", "decode")
        a = adapter(dynamo)
        for mocker in (prefill, decode):
            ok, why = await a.verify(mocker.worker, 20)
            assert ok, why
            assert await a.deroute(mocker.worker)
            await dynamo.until(lambda m=mocker: _out(dynamo, m), 5)
            ok, why = await a.verify(mocker.worker, 20)
            assert ok, why
            assert await a.reroute(mocker.worker)
        for mocker in (prefill, decode):
            assert await a.deroute(mocker.worker)

        async def back(mocker: Mocker) -> bool:  # each needs the other to answer: the first one back lets the second pass
            ok, _ = await a.verify(mocker.worker, 20)
            return ok and await a.reroute(mocker.worker)

        assert await asyncio.gather(back(prefill), back(decode)) == [True, True]
        decode.role = Role.BOTH  # by the wrong role nobody is found
        ok, why = await a.verify(decode.worker, 3)
        assert not ok


@pytest.mark.long
async def test_a_kv_router_obeys_too(tmp_path: Path) -> None:
    """The router that follows KV events drops and takes back a worker like the others."""
    async with rig(tmp_path, 3, front_args=("--router-mode", "kv")) as dynamo:
        a, victim = adapter(dynamo), dynamo.workers[0]
        load = asyncio.create_task(dynamo.load(streams=20, tokens=100, seconds=6))
        await asyncio.sleep(1)
        assert await a.deroute(victim.worker)
        await idle(a, victim)
        await asyncio.sleep(1)
        assert await a.in_flight(victim.worker) == 0
        assert await a.reroute(victim.worker)
        async with asyncio.timeout(4):
            while not await a.in_flight(victim.worker):
                await asyncio.sleep(0.05)
        counts = await load
        assert (counts.failed, dict(counts.errors)) == (0, {})


async def _in(dynamo: DynamoRig, mocker: Mocker) -> bool:
    return mocker.hexid in await dynamo.routable()

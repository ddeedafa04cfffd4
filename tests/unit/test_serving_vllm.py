"""Plain vLLM workers: rotation confirmed by the published table, looks over the network, ends only by an agent's hands."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from sentinel.model import Role, RouteEntry, RoutePool, Routes, Worker, WorkerState
from sentinel.serving import AdapterError
from sentinel.serving.vllm import VllmAdapter
from tests.unit.standin_worker import RecordingHands, StandInVllm, standing


def table(state: WorkerState) -> Routes:
    entry = RouteEntry(worker="w", url="http://w", role=Role.BOTH, state=state)
    return Routes(version=1, pools=(RoutePool(pool="p", weight=1.0, workers=(entry,)),))


@pytest_asyncio.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def made(http: aiohttp.ClientSession, routes: Routes | None = None, hands: RecordingHands | None = None) -> VllmAdapter:
    async def published() -> Routes | None:
        return routes

    return VllmAdapter(hands or RecordingHands(), published, http)


def worker(server: StandInVllm | None = None) -> Worker:
    return Worker(name="w", pool="p", url=server.url if server else "http://127.0.0.1:9", nodes=("t01", "t02"))


@pytest.mark.parametrize("state", list(WorkerState))
async def test_rotation_is_what_the_published_table_says(http: aiohttp.ClientSession, state: WorkerState) -> None:
    """Derouted means that clients are told not to use it; rerouted that they are."""
    adapter = made(http, table(state))
    active = state is WorkerState.ACTIVE
    assert await adapter.deroute(worker()) is not active
    assert await adapter.reroute(worker()) is active


async def test_no_table_means_that_it_cannot_be_told(http: aiohttp.ClientSession) -> None:
    """Without a published table nobody knows what clients do."""
    with pytest.raises(AdapterError, match="no route table"):
        await made(http).deroute(worker())


async def test_a_look_tells_health_load_and_progress(http: aiohttp.ClientSession) -> None:
    """Load and progress come from the metrics; a process that is gone is None; one that hangs cannot be told."""
    server = StandInVllm()
    adapter = made(http)
    async with standing(server):
        server.running(3)
        seen = await adapter.look(worker(server))
        assert seen and (seen.healthy, seen.running, seen.waiting, seen.progress) == (True, 3, 0, 150.0)
        assert await adapter.in_flight(worker(server)) == 3
        server.mute = True
        with pytest.raises(AdapterError, match="no answer within"):
            await adapter.look(worker(server))
        assert await adapter.in_flight(worker(server)) is None
    assert await adapter.look(worker(server)) is None
    assert await adapter.in_flight(worker(server)) == 0


async def test_verify_wants_a_right_answer_in_time(http: aiohttp.ClientSession) -> None:
    """One token, and nothing less: a green health does not verify a frozen engine, and busy is asked again."""
    server = StandInVllm()
    adapter = made(http)
    async with standing(server):
        assert (await adapter.verify(worker(server), 5))[0] is True
        server.refuses = (500, "cannot schedule new futures after shutdown")
        ok, why = await adapter.verify(worker(server), 5)
        assert not ok
        assert "HTTP 500" in why
        server.refuses = (503, "busy")
        ok, why = await adapter.verify(worker(server), 0.5)
        assert not ok
        assert server.asked > 3
        server.refuses, server.frozen = None, True
        ok, why = await adapter.verify(worker(server), 0.3)
        assert not ok
        assert "no right answer within 0.3 s" in why


async def test_starting_and_stopping_is_asked_of_the_first_node(http: aiohttp.ClientSession) -> None:
    """The agent's allow-list decides; a refusal, and a worker on no node, are False."""
    hands = RecordingHands()
    adapter = made(http, hands=hands)
    assert await adapter.stop(worker(), hard=False, key="1")
    assert await adapter.stop(worker(), hard=True, key="2")
    assert await adapter.start(worker(), key="3")
    assert [(a, k) for _, a, _, k in hands.asked] == [("stop_worker", "1"), ("kill_worker", "2"), ("start_worker", "3")]
    assert {n for n, _, _, _ in hands.asked} == {"t01"}
    assert all(args == {"worker": "w"} for _, _, args, _ in hands.asked)
    assert not await made(http, hands=RecordingHands(ok=False, refused=True)).stop(worker(), hard=True, key="4")
    assert not await made(http).start(Worker(name="w", pool="p", url="http://x"), key="5")
    assert not await adapter.scale_to("p", Role.BOTH, 3)

"""Requests that wait or try again while the fleet changes: whom they may still be sent to, and what their first try leaves free."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from sentinel.durations import Duration
from sentinel.gateway.alone import AloneAdmission, AloneBreakers, BreakerRules, Limits
from sentinel.gateway.classify import Budget
from sentinel.gateway.guards import Outcome, Refusal, Slot
from sentinel.gateway.upstream import Connection, Origin
from sentinel.model import Role, RouteEntry, RoutePool, Routes, WorkerState
from tests.gateway_site import Site
from tests.unit.test_gateway_failures import Heard

FULL = Limits(worker=1)


class Gate:
    """Holds up the first answer of every worker until it is opened; what came after that gets ``later``, one after another."""

    def __init__(self, site: Site, *later: int) -> None:
        self._open = asyncio.Event()
        self._held: set[str] = set()
        self._later = list(later)
        for stand in site.stands.values():
            stand.handler = self._handle

    async def _handle(self, request: web.Request) -> web.Response:
        if request.host not in self._held:
            self._held.add(request.host)
            await self._open.wait()
            return web.json_response({"id": "held"})
        return web.json_response({"id": "later"}, status=self._later.pop(0) if self._later else 200)

    def open(self) -> None:
        self._open.set()


async def status(site: Site, user: str) -> int:
    async with site.post(user=user) as answer:
        await answer.read()
        return int(answer.status)


async def waiting(site: Site, count: int) -> list[asyncio.Task[int]]:
    """As many requests as there are workers, which they fill, and ``count`` more that wait for a place."""
    tasks = [asyncio.create_task(status(site, f"{n}")) for n in range(len(site.stands) + count)]
    while sum(len(stand.requests) for stand in site.stands.values()) < len(site.stands):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # the others are in line
    return tasks


async def test_who_waits_for_a_worker_that_leaves_goes_elsewhere() -> None:
    """The table is obeyed by those who chose before it came: a drained worker gets nothing more, whatever comes free there."""
    async with Site("a", "b", limits=FULL, queue=Duration(3.0)) as site:
        for left, stays in (("a", "b"), ("b", "a")):
            gate = Gate(site)
            before = len(site.stands[left].requests)
            tasks = await waiting(site, 3)
            site.route(2, **{left: WorkerState.OUT})
            gate.open()
            assert await asyncio.gather(*tasks) == [200] * 5
            assert len(site.stands[left].requests) == before + 1, "only what it had before"
            assert len(site.stands[stays].requests) >= 4
            site.route(2)
            for stand in site.stands.values():
                stand.requests.clear()
        await site.free()


async def test_who_waits_for_a_worker_that_is_cordoned_goes_elsewhere() -> None:
    """A new session is not let in by a worker that keeps only those it has."""
    async with Site("a", "b", limits=FULL, queue=Duration(3.0)) as site:
        gate = Gate(site)
        tasks = await waiting(site, 2)
        site.route(2, a=WorkerState.CORDONED)
        gate.open()
        assert await asyncio.gather(*tasks) == [200] * 4
        assert len(site.stands["a"].requests) == 1
        await site.free()


async def test_who_waits_for_a_worker_whose_breaker_opens_goes_elsewhere() -> None:
    """What fails there ends in time for those behind it."""
    breakers = AloneBreakers(BreakerRules(volume=1, open_s=60.0))
    async with Site("a", "b", limits=FULL, queue=Duration(3.0), breakers=breakers) as site:
        gate = Gate(site)
        tasks = await waiting(site, 4)
        sick = site.stands["a"]
        await sick.stop()
        gate.open()
        assert await asyncio.gather(*tasks) == [200] * 6
        assert breakers.states()["a"] == "open" and len(sick.requests) == 1
        await site.free()


@pytest.mark.parametrize("limits", [Limits(tenant=1), Limits(pool=1), FULL])
async def test_a_second_try_has_the_place_of_the_first(limits: Limits) -> None:
    """A limit that the request itself uses up does not keep it from being tried again."""
    async with Site("a", "b", limits=limits) as site:
        async with site.post(user="u") as answer:
            home = str((await answer.json())["id"]).removeprefix("chatcmpl-")
        site.stands[home].status = 500
        assert await status(site, "u") == 200
        await site.free()


async def test_who_waited_is_tried_a_second_time() -> None:
    """That every worker was full does not mean that every worker was asked."""
    async with Site("a", "b", limits=FULL, queue=Duration(3.0)) as site:
        gate = Gate(site, 500)
        tasks = await waiting(site, 1)
        gate.open()
        assert await asyncio.gather(*tasks) == [200] * 3
        metrics = await site.metrics()
        assert metrics['sentinel_gateway_unretried_total{why="nowhere"}'] == 0
        await site.free()


async def test_a_failure_is_no_refusal() -> None:
    """A worker without another one fails: that is counted as its failure, and not as a request that was not let in."""
    async with Site("a") as site:
        site.stands["a"].status = 500
        assert await status(site, "u") == 500
        metrics = await site.metrics()
        assert metrics['sentinel_gateway_unretried_total{why="nowhere"}'] == 1
        assert not any(count for name, count in metrics.items() if name.startswith("sentinel_gateway_refused_total"))


async def test_a_second_try_that_finds_nobody_costs_nothing() -> None:
    """The budget is for tries that are made; it is taken before anybody is waited for, so that no more are made than it has."""
    budget = Budget(0.0, 1.0)
    assert budget.spend() and not budget.spend()
    budget.give_back()
    assert budget.spend()
    async with Site("a", "b", retry_reserve=1, retry_share=0.0) as site:
        for stand in site.stands.values():
            stand.status = 500
        site.route(1, b=WorkerState.OUT)
        for n in range(3):
            assert await status(site, f"{n}") == 500
        metrics = await site.metrics()
        assert metrics['sentinel_gateway_unretried_total{why="nowhere"}'] == 3
        site.route(1)
        site.stands["b"].status = 200
        site.stands["a"].requests.clear()
        assert 200 in [await status(site, f"{n}") for n in range(8)]


class Slow(AloneAdmission):
    """Takes a while to say that a worker is full, as a store does that is asked about each."""

    asked = 0

    async def admit(self, pool: str, worker: str, tenant: str, tokens: int, wait_s: float) -> Slot | Refusal:
        self.asked += 1
        await asyncio.sleep(0.02)
        return Refusal(limit="worker", why="full", retry_after_s=1.0)


@pytest.mark.parametrize("queue", [0.0, 0.2])
async def test_looking_for_a_place_is_waiting(queue: float) -> None:
    """However many workers are full, a request is told so when its time to wait is over."""
    admission = Slow()
    async with Site("a", admission=admission, queue=Duration(queue)) as site:  # type: ignore[arg-type]
        url = site.stands["a"].url
        rows = tuple(RouteEntry(worker=f"w{n}", url=url, role=Role.BOTH, state=WorkerState.ACTIVE) for n in range(500))
        site.gateway.obey(Routes(version=2, pools=(RoutePool(pool="p", weight=1.0, workers=rows),)))
        async with site.post() as answer:
            assert answer.status == 503 and "Retry-After" in answer.headers
        assert 1 < admission.asked < 100


class Far(Origin):
    """A worker to which connecting takes until ``near``."""

    near: asyncio.Event

    async def connection(self, *, fresh: bool = False) -> Connection:
        await self.near.wait()
        return await super().connection(fresh=fresh)


async def test_who_is_still_being_connected_goes_elsewhere() -> None:
    """What is sent is sent by the table of its moment, however long the way there was; leaving blames nobody."""
    async with Site("a", "b") as site:
        async with site.post(user="u") as answer:
            home = str((await answer.json())["id"]).removeprefix("chatcmpl-")
        stand = site.stands[home]
        stand.requests.clear()
        far = site.gateway.desk._origins[stand.url] = Far(stand.url, connect_s=2.0, idle_s=4.0)
        far.near = asyncio.Event()
        asking = asyncio.create_task(status(site, "u"))
        while not site.gateway.active:
            await asyncio.sleep(0.01)
        site.route(2, **{home: WorkerState.OUT})
        far.near.set()
        assert await asking == 200 and not stand.requests
        await site.free()


async def test_a_client_that_leaves_during_the_second_try_takes_no_failure_back() -> None:
    """The worker has failed, whoever still waits for the answer; and what the request held is given back."""
    async with Site("a", "b", limits=FULL, queue=Duration(5.0)) as site:
        gate = Gate(site)
        filling = asyncio.create_task(status(site, "u"))
        while not (full := [name for name, stand in site.stands.items() if stand.requests]):
            await asyncio.sleep(0.01)
        home = "a" if full == ["b"] else "b"
        site.stands[home].handler, site.stands[home].status = None, 500
        heard = Heard(site)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5), site.post(user="v") as answer:
                await answer.read()
        async with asyncio.timeout(5):
            while not (told := [outcome for worker, outcome in heard.outcomes if worker == home]):
                await asyncio.sleep(0.01)
        assert told == [Outcome.FAILED]
        gate.open()
        assert await filling == 200
        await site.free()


async def test_a_breaker_does_not_refuse_what_nobody_else_can_take() -> None:
    """Of two workers one is open, and the other is drained: the open one is asked, and its answer passed on."""
    breakers = AloneBreakers(BreakerRules(volume=1, open_s=60.0))
    async with Site("a", "b", breakers=breakers) as site:
        permit = await breakers.permit("a")
        assert permit is not None
        breakers.ended(permit, Outcome.FAILED)
        assert breakers.states()["a"] == "open"
        async with site.post() as answer:
            assert answer.status == 200
        assert not site.stands["a"].requests
        site.route(2, b=WorkerState.OUT)
        async with site.post() as answer:
            assert answer.status == 200
        assert len(site.stands["a"].requests) == 1
        await site.free()


async def test_a_busy_answer_that_is_still_coming_is_kept_while_another_worker_is_sought() -> None:
    """It may be the only one there is: its client gets it whole, and no worker is blamed for having no room."""

    async def busy(request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(status=503, headers={"content-type": "application/json"})
        await out.prepare(request)
        await out.write(b'{"error": {"message": "full", ')
        for part in (b'"type": "server_error", ', b'"code": 503}}'):
            await asyncio.sleep(0.1)
            await out.write(part)
        return out

    async with Site("a", "b", limits=FULL, queue=Duration(0.5)) as site:
        gate = Gate(site)
        filling = asyncio.create_task(status(site, "u"))
        while not (full := [name for name, stand in site.stands.items() if stand.requests]):
            await asyncio.sleep(0.01)
        home = "a" if full == ["b"] else "b"
        site.stands[home].handler = busy
        heard = Heard(site)
        async with site.post(user="v") as answer:
            assert answer.status == 503
            assert (await answer.json())["error"]["message"] == "full"
        assert [outcome for worker, outcome in heard.outcomes if worker == home] == [Outcome.BUSY]
        gate.open()
        assert await filling == 200
        await site.free()


async def test_what_a_kept_connection_had_begun_to_compute_needs_a_budget_elsewhere() -> None:
    """Only what breaks at once is a race with a worker's keep-alive timer. Later the worker had the request, is not sent it again,
    and a try elsewhere is a second one: requests that kill workers must not go round for nothing."""

    async def dies(request: web.Request) -> web.Response:
        await asyncio.sleep(1.2)
        assert request.transport
        request.transport.abort()
        return web.Response()

    async with Site("a", "b", retry_reserve=0, retry_share=0.0) as site:
        async with site.post(user="u") as answer:
            home = str((await answer.json())["id"]).removeprefix("chatcmpl-")
        site.stands[home].handler = dies
        assert await status(site, "u") == 502
        assert [len(stand.requests) for stand in site.stands.values() if stand.name == home] == [2]
        metrics = await site.metrics()
        assert metrics['sentinel_gateway_unretried_total{why="budget"}'] == 1
        await site.free()


async def test_a_full_limit_takes_no_probe() -> None:
    """Who is turned away for want of room has not asked for a half-open worker's probe, which another request could have used."""
    breakers = AloneBreakers(BreakerRules(volume=1, open_s=0.05))
    async with Site("a", "b", limits=Limits(pool=1), queue=Duration(0.0), breakers=breakers) as site:
        permit = await breakers.permit("a")
        assert permit is not None
        breakers.ended(permit, Outcome.FAILED)
        assert breakers.states()["a"] == "open"
        gate = Gate(site)
        filling = asyncio.create_task(status(site, "u"))
        while not site.stands["b"].requests:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        heard = Heard(site)
        assert [await status(site, f"{n}") for n in range(5)] == [503] * 5
        assert not heard.outcomes
        gate.open()
        assert await filling == 200
        await site.free()

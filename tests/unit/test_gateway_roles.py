"""Pools whose roles are apart, a Dynamo frontend as one worker, and more than one pool of a model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace

from sentinel.durations import Duration
from sentinel.gateway.alone import AloneBreakers, BreakerRules
from sentinel.gateway.models import Plan, frontend_name
from sentinel.model import Fleet, Pool, Role, RouteEntry, RoutePool, Routes, Worker, WorkerState
from tests.gateway_site import MODEL, Site

S = WorkerState


def apart(site: Site, *prefill: str) -> None:
    """``prefill`` are prefill workers, the others decoders."""
    entries = tuple(
        RouteEntry(worker=s.name, url=s.url, role=Role.PREFILL if s.name in prefill else Role.DECODE, state=S.ACTIVE)
        for s in site.stands.values()
    )
    site.gateway.obey(Routes(version=9, pools=(RoutePool(pool="p", weight=1.0, workers=entries),)))


async def hands_over(request: web.Request) -> web.Response:
    ask = json.loads(await request.read())
    assert (ask["max_tokens"], ask["stream"], ask["kv_transfer_params"]["do_remote_decode"]) == (1, False, True)
    assert "stream_options" not in ask
    return web.json_response({"choices": [], "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1, 2]}})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_worker_comes_first(stream: bool) -> None:
    """It makes one token; the decoder gets the client's request with what the prefill worker said about its KV."""
    async with Site("pre", "dec") as site:
        apart(site, "pre")
        site.stands["pre"].handler = hands_over
        async with site.post(stream=stream, max_tokens=50, unknown=[1], stream_options={"include_usage": True}) as answer:
            assert answer.status == 200 and b"chatcmpl-dec" in await answer.read()
        ask = json.loads(site.stands["dec"].requests[0][1])
        assert (ask["max_tokens"], ask["unknown"], ask["stream"]) == (50, [1], stream)
        assert ask["kv_transfer_params"]["remote_block_ids"] == [1, 2]
        await site.free()


async def test_a_prefill_that_fails_is_tried_elsewhere_and_what_it_says_of_the_request_is_the_answer() -> None:
    """One other prefill worker is asked; a 400 of it goes to the client as it is; with none left the client hears what happened."""
    async with Site("pre1", "pre2", "dec", first_byte=Duration(0.5)) as site:
        apart(site, "pre1", "pre2")
        for stand in (site.stands["pre1"], site.stands["pre2"]):
            stand.handler = hands_over
        broken = site.stands["pre1"]
        broken.handler, broken.status = None, 500
        for n in range(6):
            async with site.post(content=f"{n}") as answer:
                assert answer.status == 200
        assert broken.requests
        site.stands["pre2"].handler, site.stands["pre2"].status = None, 500
        async with site.post() as answer:
            assert answer.status == 500 and "says 500" in (await answer.json())["error"]["message"]
        for stand in (site.stands["pre1"], site.stands["pre2"]):
            stand.status = 400
        before = len(site.stands["dec"].requests)
        async with site.post() as answer:
            assert answer.status == 400
        for stand in (site.stands["pre1"], site.stands["pre2"]):
            stand.freeze_after, stand.status = 0, 200
        async with site.post() as answer:
            assert answer.status == 504
        assert len(site.stands["dec"].requests) == before
        apart(site)
        async with site.post() as answer:
            assert answer.status == 503
        counted = {name: n for name, n in (await site.metrics()).items() if "refused_total" in name and 'limit="prefill"' in name}
        assert list(counted.values()) == [1.0]
        await site.free()


async def test_the_last_prefill_worker_is_asked_however_its_breaker_stands() -> None:
    """One of two has its breaker open and the other leaves: what is left is asked, since a breaker never refuses alone."""
    async with Site("pre1", "pre2", "dec", breakers=AloneBreakers(BreakerRules(volume=2))) as site:
        apart(site, "pre1", "pre2")
        for stand in (site.stands["pre1"], site.stands["pre2"]):
            stand.handler = hands_over
        bad = site.stands["pre1"]
        bad.handler, bad.status = None, 500
        for n in range(40):
            async with site.post(content=f"{n}") as answer:
                await answer.read()
        assert not site.breakers.closed("pre1")
        bad.handler = hands_over
        (pool,) = site.gateway.desk.routes.pools
        left = tuple(replace(e, state=S.OUT) if e.worker == "pre2" else e for e in pool.workers)
        site.gateway.obey(Routes(version=11, pools=(replace(pool, workers=left),)))
        async with site.post() as answer:
            assert answer.status == 200
        await site.free()


async def test_a_prefill_that_nobody_else_can_do_keeps_no_budget() -> None:
    """One prefill worker that fails again and again leaves others their second tries."""
    async with Site("pre", "dec", retry_reserve=1, retry_share=0.0) as site:
        apart(site, "pre")
        site.stands["pre"].status = 500
        for n in range(3):
            async with site.post(content=f"{n}") as answer:
                assert answer.status == 500
        metrics = await site.metrics()
        assert metrics['sentinel_gateway_unretried_total{why="nowhere"}'] == 3
        assert metrics['sentinel_gateway_unretried_total{why="budget"}'] == 0
        await site.free()


async def test_a_session_is_prefilled_where_it_is() -> None:
    """A pool that gets no new sessions any more goes on prefilling for those that its decoders have."""
    async with Site("pre", "dec") as site:
        apart(site, "pre")
        site.stands["pre"].handler = hands_over
        for version, weight in ((9, 1.0), (10, 0.0)):
            (pool,) = site.gateway.desk.routes.pools
            site.gateway.obey(Routes(version=version, pools=(replace(pool, weight=weight),)))
            async with site.post(headers={"x-session-id": "s"}) as answer:
                assert answer.status == 200
        await site.free()


async def test_a_client_that_leaves_during_prefill_leaves_nothing() -> None:
    """Both workers are let go and no slot is held."""
    async with Site("pre", "dec") as site:
        apart(site, "pre")
        site.stands["pre"].freeze_after = 0
        task = asyncio.create_task(site.post().__aenter__())
        while not site.stands["pre"].requests:
            await asyncio.sleep(0.01)
        task.cancel()
        await site.free()


def table(*states: S, weight: float = 1.0, role: Role = Role.DECODE) -> RoutePool:
    entries = tuple(RouteEntry(worker=f"d{n}", url="", role=role, state=state, capacity=16) for n, state in enumerate(states))
    return RoutePool(pool="dyn", weight=weight, workers=entries)


def fleet(**models: str) -> Fleet:
    workers = tuple(Worker(name=f"d{n}", pool="dyn", url="", adapter="dynamo") for n in range(6))
    return Fleet(pools=tuple(Pool(name=name, model=model) for name, model in models.items()), workers=workers)


def test_a_dynamo_frontend_is_one_worker() -> None:
    """It is worth what its active workers are, takes requests while both roles are there, and leaves when the last one does."""

    def seen(pool: RoutePool) -> RouteEntry:
        plan = Plan(Routes(version=3, pools=(pool,)), fleet(dyn="m"), ["http://front:8000"])
        routes = plan.pools("m")
        assert routes is not None
        (entry,) = routes.pools[0].workers
        assert (entry.worker, entry.url, entry.role) == (frontend_name("dyn"), "http://front:8000", Role.BOTH)
        return entry

    assert seen(table(S.ACTIVE, S.ACTIVE, S.OUT)).capacity == 32
    assert seen(table(S.ACTIVE, S.CORDONED)).state is S.ACTIVE
    assert seen(table(S.OUT, S.CORDONED)).state is S.OUT
    split = table(S.ACTIVE, S.ACTIVE)
    prefill = RouteEntry(worker="d5", url="", role=Role.PREFILL, state=S.OUT)
    assert seen(RoutePool(pool="dyn", weight=1.0, workers=(*split.workers, prefill))).state is S.OUT


def test_several_dynamo_frontends_share_their_workers_worth() -> None:
    """Each is a worker of its own, with its part of the capacity, so that one that dies leaves the others."""
    pool = table(S.ACTIVE, S.ACTIVE, S.OUT)
    plan = Plan(Routes(version=3, pools=(pool,)), fleet(dyn="m"), ["http://one:8000", "http://two:8000"])
    routes = plan.pools("m")
    assert routes is not None
    seen = [(e.worker, e.url, e.capacity) for e in routes.pools[0].workers]
    assert seen == [("dyn.frontend", "http://one:8000", 16), ("dyn.frontend2", "http://two:8000", 16)]
    assert plan.members() == {"dyn": ["dyn.frontend", "dyn.frontend2"]}


def test_models_lead_to_their_pools() -> None:
    """A model has its own pools and no others; pools that name none take the rest; a pool of weight 0 serves nothing."""
    both: dict[str, Any] = {"role": Role.BOTH, "state": S.ACTIVE}
    pools = tuple(
        RoutePool(pool=name, weight=weight, workers=(RouteEntry(worker=f"{name}-w", url=f"http://{name}", **both),))
        for name, weight in (("one", 1.0), ("spill", 0.3), ("idle", 0.0), ("rest", 1.0))
    )
    plan = Plan(Routes(version=1, pools=pools), fleet(one="m", spill="m", idle="n", rest=""))
    assert plan.names("m") == ["one", "spill"] and plan.names("n") == ["idle"] and plan.names("other") == ["rest"]
    assert plan.models(lambda _: True) == ["m"]
    assert plan.models(lambda worker: worker == "spill-w") == ["m"]
    assert plan.models(lambda _: False) == []
    assert Plan(Routes(), fleet(one=MODEL)).pools(MODEL) is None

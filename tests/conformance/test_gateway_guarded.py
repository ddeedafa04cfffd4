"""A whole gateway, or several, with the shared guards on real servers: what a client sees of limits, breakers and the store."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from sentinel.durations import Duration
from sentinel.gateway.admission import LeaseAdmission
from sentinel.gateway.breakers import SharedBreakers
from sentinel.gateway.sessions import Holders
from sentinel.model import WorkerState
from sentinel.settings_gateway import AdmissionSettings, BreakerSettings, PoolLimits, TenantLimits
from sentinel.store.admission import AdmissionRecords
from sentinel.store.breakers import BreakerRecords
from sentinel.store.rates import RateRecords
from sentinel.store.responses import ResponseRecords
from sentinel.tokens import digest
from tests.gateway_site import Site

LEASE = 1.5
POLICY = BreakerSettings(
    base_open=Duration(0.1), jitter=0.0, poll=Duration(0.2), flush=Duration(0.02), probe_lease=Duration(1.0)
)  # fmt: skip


@asynccontextmanager
async def gateways(
    server: Any, count: int, *names: str, limits: PoolLimits = PoolLimits(), tenants: dict[str, TenantLimits] | None = None,  # noqa: B008
    patience_s: float = 2.0, **more: Any,
) -> AsyncIterator[list[Site]]:  # fmt: skip
    """Gateways on hosts of their own in front of the same workers, each with a store of its own on the server."""
    made = AdmissionSettings(lease=Duration(LEASE), margin=Duration(0.2), tick=Duration(0.05), replicas=1, default=limits)
    sites: list[Site] = []
    async with AsyncExitStack() as stack:
        for n in range(count):
            store = await server.open(timeout=patience_s)
            admission = LeaseAdmission(
                AdmissionRecords(store, LEASE), made, tenants or {}, owner=f"g{n}", rates=RateRecords(store), draw=lambda: 0.5
            )
            breakers = SharedBreakers(BreakerRecords(store, POLICY), host=f"h{n}", process="x", draw=lambda: 0.5)
            for guard in (admission, breakers):
                await guard.start()
                stack.push_async_callback(guard.stop)
            site = Site(
                *names, beside=sites[0] if sites else None, admission=admission, breakers=breakers,
                holders=Holders(ResponseRecords(store), patience_s=patience_s), **more,
            )  # fmt: skip
            sites.append(await stack.enter_async_context(site))
        while any(s.admission.tenure.settling for s in sites):  # type: ignore[union-attr]
            await asyncio.sleep(0.02)
        yield sites
        for site in sites:
            await site.free()


class Keeping:
    """Makes workers keep their responses as vLLM does: in memory, each its own, and 404 for those of others."""

    def __init__(self, site: Site) -> None:
        self.serial = itertools.count()
        for name, stand in site.stands.items():
            stand.handler = self.handler(name, set())

    def handler(self, name: str, kept: set[str]) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            ask = await request.json()
            if (previous := ask.get("previous_response_id")) is not None and previous not in kept:
                return web.json_response({"error": {"message": f"Response with id '{previous}' not found."}}, status=404)
            made = f"resp_{next(self.serial)}"
            kept.add(made)
            if not ask.get("stream"):
                return web.json_response({"id": made, "object": "response", "output": [{"id": "msg_1"}], "by": name})
            out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await out.prepare(request)
            first = f'{{"type":"response.created","response":{{"id":"{made}","object":"response"}},"by":"{name}"}}'
            await out.write(f"event: response.created\ndata: {first}\n\n".encode())
            await asyncio.sleep(0.05)
            await out.write(b'event: response.completed\ndata: {"type":"response.completed"}\n\n')
            return out

        return handle


async def respond(site: Site, text: str, *, stream: bool = False, **more: Any) -> tuple[int, str, str]:
    """Status, id and worker of one more response."""
    body = {"model": "m", "input": text, "stream": stream, **more}
    async with site.http.post(site.url + "/v1/responses", json=body) as answer:
        told = (await answer.read()).decode()
    await site.gateway.desk.holders.told()  # of a stream it is written down while it runs, and these take no time
    if answer.status != 200:
        return answer.status, "", ""
    return 200, "resp_" + told.partition("resp_")[2].partition('"')[0], told.partition('"by":')[2].strip(' "')[0]


async def test_a_response_is_gone_on_from_where_it_is(store_server: Any) -> None:
    """Turn after turn, streamed or not, at whichever gateway: the worker that holds the response, also while it is cordoned."""
    async with gateways(store_server, 3, "a", "b", "c") as sites:
        Keeping(sites[0])
        where = Counter[str]()
        for n in range(12):
            status, response, by = await respond(sites[n % 3], f"talk {n}", stream=n % 2 == 0)
            where[by] += 1
            for turn in range(4):
                if turn == 3:
                    for site in sites:
                        site.route(2 + n, **{by: WorkerState.CORDONED})
                status, response, again = await respond(
                    sites[(n + turn) % 3], f"and {n}.{turn}", stream=turn % 2 == 0, previous_response_id=response
                )
                assert (status, again) == (200, by)
            for site in sites:
                site.route(2 + n)
        assert len(where) > 1, "they would have been there anyway"


async def test_who_holds_a_response_is_asked_and_nobody_else(store_server: Any) -> None:
    """Busy is busy, never another worker's *not found*; one that has left, or a response that nobody knows, is anybody's."""
    async with gateways(store_server, 2, "a", "b") as (one, two):
        Keeping(one)
        _, response, by = await respond(one, "hello")
        other = "b" if by == "a" else "a"
        kept = one.stands[by].handler

        async def busy(_: web.Request) -> web.Response:
            return web.json_response({"error": {"message": "full"}}, status=503)

        one.stands[by].handler = busy
        before = len(one.stands[other].requests)
        assert [(await respond(s, "more", previous_response_id=response))[0] for s in (one, two)] == [503, 503]
        assert len(one.stands[other].requests) == before
        one.stands[by].handler = kept
        assert (await respond(two, "more", previous_response_id=response))[::2] == (200, by)
        for site in (one, two):
            site.route(2, **{by: WorkerState.OUT})
        assert (await respond(two, "more", previous_response_id=response))[0] == 404
        assert (await respond(two, "more", previous_response_id="resp_of_nobody" * 30))[0] == 404
        assert (await respond(two, "new"))[::2] == (200, other)


async def test_without_the_store_a_gateway_knows_its_own_responses(store_server: Any) -> None:
    """A store that is away costs a response its other gateways, and no request its answer."""
    async with gateways(store_server, 1, "a", "b", patience_s=0.2) as (site,):
        Keeping(site)
        store_server.pause()
        for n in range(6):
            status, response, by = await respond(site, f"talk {n}", stream=n % 2 == 0)
            assert status == 200
            assert (await respond(site, "more", previous_response_id=response))[::2] == (200, by)
        store_server.resume()
        while site.admission.tenure.away:  # type: ignore[union-attr]
            await asyncio.sleep(0.02)


async def test_a_rate_counts_requests_and_not_tries(store_server: Any) -> None:
    """However often a request is tried elsewhere it counts once; past the rate 429 says when to come back."""
    async with gateways(store_server, 2, "a", "b", tenants={"default": TenantLimits(rate="10/hour")}) as sites:
        sites[0].stands["a"].status = 500
        answers = []
        for n in range(14):
            async with sites[n % 2].post("/v1/embeddings", input="x") as answer:
                answers.append((answer.status, answer.headers.get("Retry-After"), (await answer.json()).get("error")))
        assert [status for status, _, _ in answers] == [200] * 10 + [429] * 4
        assert len(sites[0].stands["a"].requests) > 0
        assert all(error["code"] == "rate_limit_exceeded" and int(after or 0) >= 1 for _, after, error in answers[10:])


async def test_tenants_get_what_is_theirs(store_server: Any, tmp_path: Path) -> None:
    """Reserved slots are there for their tenant however much others ask; a tenant's own limit of tokens is its own affair."""
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{name} {digest(name)}\n" for name in ("gold", "thin", "rest")), "utf-8")
    tenants = {"gold": TenantLimits(reserved={"p": 2}), "thin": TenantLimits(tokens=400)}
    async with gateways(store_server, 1, "a", keys=keys, limits=PoolLimits(requests=4), tenants=tenants, queue=0.1) as (site,):
        site.stands["a"].freeze_after = 0

        async def ask(tenant: str, **more: Any) -> tuple[int, str]:
            async with site.post(headers={"Authorization": f"Bearer {tenant}"}, **more) as answer:
                return answer.status, (await answer.json()).get("error", {}).get("code", "")

        assert await ask("thin", max_tokens=5000) == (400, "too_many_tokens"), "it would never fit, so it is no use to come again"
        held = [asyncio.create_task(ask("rest")) for _ in range(6)]
        while len(done := [t for t in held if t.done()]) < 4:
            await asyncio.sleep(0.02)
        assert [t.result() for t in done] == [(503, "overloaded")] * 4
        gold = [asyncio.create_task(ask("gold")) for _ in range(2)]
        while len(site.stands["a"].requests) < 4:
            await asyncio.sleep(0.01)
        site.stands["a"].thawed.set()
        assert [(await t)[0] for t in [*set(held).difference(done), *gold]] == [200] * 4


async def test_streams_that_go_on_keep_no_breaker_half_open(store_server: Any) -> None:
    """A worker that failed and answers again is back for everybody as soon as its probes' streams have begun."""
    async with gateways(store_server, 2, "a", "b") as sites:
        stand = sites[0].stands["a"]
        stand.status = 500
        while any(s.breakers.states()["a"] != "open" for s in sites):
            for n, site in enumerate(sites):
                async with site.post("/v1/embeddings", input=f"{n}"):
                    pass
        stand.status, stand.events, stand.pause_s = 200, 100_000, 0.02
        sites[0].stands["b"].events, sites[0].stands["b"].pause_s = 100_000, 0.02
        streams = []
        for n in itertools.count():
            streams.append(await sites[n % 2].post("/v1/completions", prompt=f"{n}", stream=True).__aenter__())
            await streams[-1].content.readany()
            if all(s.breakers.states()["a"] == "closed" for s in sites):
                break
            await asyncio.sleep(0.05)
        assert all(not s.content.at_eof() for s in streams)
        assert len([1 for _, body in stand.requests if b'"stream"' in body]) >= POLICY.probes
        for stream in streams:
            stream.close()


async def test_workers_that_all_fail_are_all_tried(store_server: Any) -> None:
    """A pool that fails as a whole is in panic: clients go on getting the workers' own answers, and the first to heal serves."""
    async with gateways(store_server, 2, "a", "b", "c", "d") as sites:
        stands = sites[0].stands
        for stand in stands.values():
            stand.status = 500
        while any(s.breakers.panics() != ["p"] for s in sites):  # type: ignore[attr-defined]
            for n, site in enumerate(sites * 4):
                async with site.post("/v1/embeddings", input=f"{n}") as answer:
                    assert answer.status in (500, 502, 503)
        before = {name: len(stand.requests) for name, stand in stands.items()}
        statuses = Counter[int]()
        for n in range(40):
            async with sites[n % 2].post(content=f"{n}") as answer:
                statuses[answer.status] += 1
        assert statuses == {500: 40} and all(len(stand.requests) > before[name] for name, stand in stands.items())
        for stand in stands.values():
            stand.status = 200
        async with sites[0].post(content="again") as answer:
            assert answer.status == 200


async def test_overload_is_a_plateau(store_server: Any) -> None:
    """At three times what it can carry a pool answers as many as at once its load, and refuses the rest sooner than they would
    have had their turn, each with a time to come back."""
    slots, takes = 6, 0.2
    async with gateways(store_server, 2, "a", "b", limits=PoolLimits(requests=slots), queue=0.4) as sites:
        running, most = 0, 0

        async def handle(_: web.Request) -> web.Response:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                await asyncio.sleep(takes)
            finally:
                running -= 1
            return web.json_response({})

        for stand in sites[0].stands.values():
            stand.handler = handle
        loop = asyncio.get_running_loop()

        async def offered(times: int, seconds: float) -> tuple[int, list[float]]:
            done, refused = 0, list[float]()
            ends = loop.time() + seconds

            async def client(site: Site) -> None:
                nonlocal done
                while (began := loop.time()) < ends:
                    async with site.post("/v1/embeddings", input="x") as answer:
                        await answer.read()
                    if answer.status == 200:
                        done += 1
                    else:
                        assert answer.status == 503 and int(answer.headers["Retry-After"]) >= 1
                        refused.append(loop.time() - began)
                        await asyncio.sleep(takes)

            await asyncio.gather(*(client(sites[n % 2]) for n in range(times * slots)))
            return done, refused

        await offered(1, 0.5)  # it learns how long things take
        at_once, _ = await offered(1, 2.0)
        at_thrice, refused = await offered(3, 2.0)
        assert most <= slots
        assert at_thrice >= 0.8 * at_once
        assert refused and sorted(refused)[len(refused) // 2] < takes


async def test_nothing_is_held_when_all_is_over(store_server: Any) -> None:
    """Clients that leave, workers that break in every way, refusals and a store that loses its data: in the end nothing is held."""
    tenants = {"default": TenantLimits(requests=6, tokens=4000, rate="100000/hour")}
    times = {"stall": Duration(0.1), "first_byte": Duration(0.1), "answer": Duration(0.1), "queue": 0.1}
    limits = PoolLimits(requests=8, worker_requests=5, tokens=5000)
    async with gateways(store_server, 2, "a", "b", limits=limits, tenants=tenants, **times) as sites:

        async def one(n: int) -> None:
            stand = sites[0].stands["ab"[n % 2]]
            how = n % 7
            stand.status, stand.freeze_after, stand.cut_after = (500 if how == 0 else 200), None, None
            if how in (1, 2):
                stand.freeze_after = how - 1
            elif how in (3, 4):
                stand.cut_after = how - 3
            with contextlib.suppress(Exception):
                async with asyncio.timeout(0.02 * (n % 5) or None):
                    async with sites[n % 2].post(content=f"{n}", stream=n % 3 > 0, max_tokens=n * 7 % 900) as answer:
                        await answer.read()

        async def trouble() -> None:
            await asyncio.sleep(0.2)
            await store_server.raw.flushall()

        async def waves() -> None:
            for wave in range(8):
                await asyncio.gather(*(one(wave * 20 + n) for n in range(20)))

        await asyncio.gather(waves(), trouble())
        for stand in sites[0].stands.values():
            stand.thawed.set()
        for site in sites:
            await site.free()
            assert all(x["used"] == x["waiting"] == 0 for x in site.admission.picture().values())  # type: ignore[union-attr]
        while any(state != "closed" for s in sites for state in s.breakers.states().values()):  # no probe is held for ever either
            for stand in sites[0].stands.values():
                stand.status, stand.freeze_after, stand.cut_after = 200, None, None
            for site in sites:
                async with site.post("/v1/embeddings", input="x"):
                    pass
            await asyncio.sleep(0.02)

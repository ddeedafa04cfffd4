"""A controller and two real gateways on one Redis: it hears what their clients feel, waits for their word, and holds breakers."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest_asyncio

from sentinel.decide.decider import Decider
from sentinel.decide.rules.policy_file import default_policy
from sentinel.model import Fleet, Pool, Worker
from sentinel.store.gateways import Gateways
from sentinel.testing.control import Caller, RedisServer, ServingStandIn, running_controller, until
from tests.conftest import free_port
from tests.gateway_process import lives, short_folder, started, tables
from tests.gateway_site import MODEL, Stand

NAMES = ("a", "b", "c", "d")
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


class Rig:
    """``serving`` stands where the workers' own process control would; the workers that gateways ask are ``stands``."""

    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.folder, self.redis = folder, redis
        self.stands = {name: Stand(name) for name in NAMES}
        self.serving = ServingStandIn()
        self.gateways: dict[str, tuple[subprocess.Popen[bytes], str, str]] = {}  # name → process, its address, its admin address
        self.http: aiohttp.ClientSession
        self.caller: Caller

    async def gateway(self, name: str) -> None:
        port, admin = free_port(), free_port()
        file = self.folder / f"{name}.toml"
        file.write_text(
            f'[gateway]\nname = "{name}"\nlisten = "127.0.0.1:{port}"\nadmin = "127.0.0.1:{admin}"\nretry_reserve = 1000\n'
            f'presence = "4s"\n[gateway.breakers]\nbase_open = "20s"\n[store]\nurl = "{self.redis.url}"\n'
            f'{tables("p", MODEL, {s.name: s.url for s in self.stands.values()})}',
            "utf-8",
        )
        process = started(file)
        self.gateways[name] = process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}"

    async def serves(self, name: str) -> None:
        process, _, admin = self.gateways[name]

        async def healthy() -> bool:
            lives(process, self.folder / f"{name}.toml")
            try:
                async with self.http.get(f"{admin}/healthz") as answer:
                    return answer.status == 200
            except aiohttp.ClientError:
                return False

        await soon(healthy, f"{name} serves")

    def signal(self, name: str, number: signal.Signals) -> None:
        self.gateways[name][0].send_signal(number)

    async def send(self, name: str, times: int) -> None:
        """So many requests by this gateway, whatever comes of them."""
        for number in range(times):
            url, headers = f"{self.gateways[name][1]}/v1/chat/completions", {"x-session-id": f"{name}-{number}"}
            async with self.http.post(url, json=ASK, headers=headers) as answer:
                await answer.read()

    async def breaker(self, name: str, worker: str) -> str:
        async with self.http.get(f"{self.gateways[name][2]}/routes") as answer:
            return next(w["breaker"] for w in (await answer.json())["workers"] if w["worker"] == worker)

    async def status(self) -> dict[str, Any]:
        return (await self.caller.get("/v1/status"))[1]

    async def worker(self, name: str) -> dict[str, Any]:
        return next(w for w in (await self.status())["workers"] if w["worker"] == name)

    async def now(self, target: str) -> str:
        return (await self.caller.get(f"/v1/explain/{target}"))[1]["now"]

    async def ask(self, verb: str, target: str, **more: Any) -> None:
        status, told = await self.caller.post("/v1/ask", {"verb": verb, "target": target, "reason": "a test", **more})
        assert status == 200, told


async def soon(holds: Callable[[], Awaitable[Any]], what: str, seconds: float = 30.0) -> None:
    """Wait until something that must be asked for holds."""
    try:
        async with asyncio.timeout(seconds):
            while not await holds():
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"waited {seconds:g} s in vain: {what}") from None


@pytest_asyncio.fixture
async def rig(program: Callable[[str], Path], tmp_path: Path) -> AsyncIterator[Rig]:
    redis = RedisServer(program("redis-server"))
    with short_folder() as folder:
        made = Rig(folder, redis)
        await redis.start()
        store = await redis.open()
        try:
            for stand in made.stands.values():
                await stand.start()
            fleet = Fleet(
                pools=(Pool(name="p", model=MODEL, floor=0.5),),
                workers=tuple(Worker(name=s.name, pool="p", url=s.url, nodes=(f"t-{s.name}",)) for s in made.stands.values()),
            )
            async with (
                aiohttp.ClientSession() as made.http,
                running_controller(
                    store, tmp_path, fleet=fleet, decider=lambda: Decider(default_policy()), serving=made.serving
                ) as (controller, made.caller),
            ):
                await until(lambda: controller.term, "it leads")
                for name in ("g1", "g2"):
                    await made.gateway(name)
                for name in ("g1", "g2"):
                    await made.serves(name)
                await soon(lambda: _heard(made), "both gateways are heard and obey the table")
                yield made
        finally:
            for process, _, _ in made.gateways.values():
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
            for stand in made.stands.values():
                await stand.stop()
            await store.close()
            redis.close()


async def _heard(rig: Rig) -> bool:
    told = await rig.status()
    return [(g["gateway"], g["obeys"] >= told["routes_version"]) for g in told["gateways"]] == [("g1", True), ("g2", True)]


async def test_what_clients_feel_is_evidence_and_a_person_may_overrule_it(rig: Rig) -> None:
    """A worker that fails its clients is an incident with both gateways as witnesses; a person's pin holds at every gateway."""
    rig.stands["a"].status = 500
    await asyncio.gather(rig.send("g1", 40), rig.send("g2", 40))
    await soon(lambda: _accused(rig), "the open breaker is an incident")
    breaker = (await rig.worker("a"))["breaker"]
    assert breaker["state"] == "open" and breaker["seen_by"] == ["g1", "g2"]
    assert "its breaker is open" in await rig.now("a")
    assert (await rig.status())["drains"] == []  # what has not lasted drains nothing

    rig.stands["a"].status = 200
    await rig.ask("pin", "a", keep="in", lasts_s=60)
    await rig.ask("pin", "b", keep="out", lasts_s=60)
    for name in ("g1", "g2"):
        await soon(lambda name=name: _is(rig, name, "a", "closed"), f"{name} goes by the pin")  # type: ignore[misc]
        await soon(lambda name=name: _is(rig, name, "b", "open"), f"{name} goes by the pin")  # type: ignore[misc]
    before = len(rig.stands["b"].requests)
    await rig.send("g1", 20)
    assert len(rig.stands["b"].requests) == before
    await soon(lambda: _says(rig, "b", "held open by ada"), "explain says whose pin it is")
    await rig.ask("unpin", "b")
    await soon(lambda: _is(rig, "g2", "b", "closed"), "it is held no more")


async def test_a_drained_worker_is_idle_only_by_every_gateways_word(rig: Rig) -> None:
    """While a gateway stands still nobody believes that nothing is in flight, and status names it; when it goes on, or is not heard
    of for its presence, the drain goes on, too."""
    rig.signal("g2", signal.SIGSTOP)
    await rig.ask("drain", "a", deadline_s=60)
    await soon(lambda: _says(rig, "a", "obey the table without it: g2"), "explain names the gateway")
    assert rig.serving.did("in_flight") == [] and (await rig.worker("a"))["waits_for"] == ["g2"]
    rig.signal("g2", signal.SIGCONT)
    await soon(lambda: _drain(rig, "a", "out"), "it obeys, and the worker is out")

    rig.signal("g2", signal.SIGSTOP)
    await rig.ask("drain", "b", deadline_s=60)
    await soon(lambda: _drain(rig, "b", "out"), "it is not heard of any more, and the worker is out")
    presences = Gateways(store := await rig.redis.open())
    assert await presences.lost() == ["g2"]
    await store.close()


async def _accused(rig: Rig) -> bool:
    return [(i["fault"], i["culprit"]) for i in (await rig.status())["incidents"]] == [("worker-failing", "a")]


async def _is(rig: Rig, gateway: str, worker: str, breaker: str) -> bool:
    return await rig.breaker(gateway, worker) == breaker


async def _says(rig: Rig, worker: str, words: str) -> bool:
    return words in await rig.now(worker)


async def _drain(rig: Rig, worker: str, state: str) -> bool:
    return any(d["worker"] == worker and d.get("state") == state for d in (await rig.status())["drains"])

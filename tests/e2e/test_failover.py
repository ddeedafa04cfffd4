"""Controllers that die and a store that stops: what was decided is finished, nothing is lost, nothing acts twice.

The controllers of the first half are real processes, started as systemd would and killed as a kernel would; Redis is real and
is really stopped. The workers and the pager's receiver are small local HTTP servers; the node's agent is played by the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from sentinel.decide.decider import Decider
from sentinel.decide.rules.policy_file import default_policy, default_policy_text
from sentinel.model import Action, Finding, Kind, Report, Severity, gpu_component
from sentinel.testing.control import Caller, PagerStandIn, RedisServer, ServingStandIn, running_controller, until, write_tokens
from sentinel.testing.decisions import PCIS, rack
from tests.e2e.played import Played

SENTINEL = Path(sys.executable).parent / "sentinel"
LEASE_S = 1.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def off_bus(node: str, at: float) -> Finding:
    return Finding(
        id=f"{node}:boot:1", check="xid.79", component=gpu_component(node, PCIS[0]), at=at, kind=Kind.EVENT,
        severity=Severity.FATAL, action=Action.REBOOT_NODE, summary="GPU has fallen off the bus",
    )  # fmt: skip


def fatal(node: str, session: str = "s1", seq: int = 1) -> Any:
    now = time.time()
    report = Report(node=node, session=session, seq=seq, at=now, snapshot=True, findings=(off_bus(node, now),))
    return json.loads(msgspec.json.encode(report))


class Receiver(Played):
    """The workers a and b, with ``busy`` requests each."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = {"a": 0, "b": 0}

    def running(self, worker: str) -> int | None:
        return self.busy.get(worker)


class Site:
    """Two controller processes on one Redis, with a two-worker fleet."""

    def __init__(self, directory: Path, redis: RedisServer, receiver: Receiver, session: aiohttp.ClientSession) -> None:
        self.directory, self.receiver, self.session = directory, receiver, session
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.callers: dict[str, Caller] = {}
        tokens = write_tokens(directory, ["t01", "t02"])
        for name in ("c1", "c2"):
            port = free_port()
            self.callers[name] = Caller(session, f"http://127.0.0.1:{port}")
            (directory / f"{name}.toml").write_text(
                f"""
                [controller]
                name = "{name}"
                listen = "127.0.0.1:{port}"
                lease = "{int(LEASE_S * 1000)}ms"
                tick = "100ms"
                watch = "500ms"
                node_tokens = "{tokens["node_tokens"]}"
                operator_tokens = "{tokens["operator_tokens"]}"
                journal_dir = "{directory}/journal-{name}"
                [store]
                url = "{redis.url}"
                timeout = "300ms"
                [paging]
                webhook_url = "{receiver.url}/page"
                [[pools]]
                name = "chat"
                floor = 0.0
                [[nodes]]
                name = "t01"
                [[nodes]]
                name = "t02"
                [[workers]]
                name = "a"
                pool = "chat"
                url = "{receiver.url}/a"
                gpus = ["t01/gpu@{PCIS[0]}"]
                [[workers]]
                name = "b"
                pool = "chat"
                url = "{receiver.url}/b"
                gpus = ["t02/gpu@{PCIS[0]}"]
                """,
                "utf-8",
            )

    async def start(self, name: str) -> None:
        log = (self.directory / f"{name}.log").open("ab")
        argv = [SENTINEL, "controller", "--config", self.directory / f"{name}.toml"]
        self.processes[name] = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log)
        log.close()

    async def role(self, name: str) -> str:
        try:
            return str((await self.callers[name].get("/healthz", who=None))[1]["role"])
        except (aiohttp.ClientError, OSError):
            return "away"

    async def leads(self, name: str) -> Caller:
        async with asyncio.timeout(30):
            while await self.role(name) != "leader":
                await asyncio.sleep(0.02)
        return self.callers[name]

    async def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> int:
        process = self.processes.pop(name)
        process.send_signal(how)
        return await process.wait()

    async def drains(self, caller: Caller) -> dict[str, str]:
        """worker → where its drain stands."""
        return {d["worker"]: d.get("state", "requested") for d in (await caller.get("/v1/status"))[1]["drains"]}

    async def close(self) -> None:
        for name in list(self.processes):
            with contextlib.suppress(ProcessLookupError):
                await self.kill(name)


@pytest_asyncio.fixture
async def redis(program: Callable[[str], Path]) -> AsyncIterator[RedisServer]:
    server = RedisServer(program("redis-server"))
    try:
        await server.start()
        yield server
    finally:
        server.close()


@pytest_asyncio.fixture
async def site(redis: RedisServer, tmp_path: Path) -> AsyncIterator[Site]:
    receiver = Receiver()
    await receiver.serve()
    async with aiohttp.ClientSession() as session:
        site = Site(tmp_path, redis, receiver, session)
        try:
            await site.start("c1")
            await site.leads("c1")
            await site.start("c2")
            yield site
        finally:
            await site.close()
            await receiver.unserve()


async def standing_by(site: Site, name: str) -> None:
    async with asyncio.timeout(30):
        while await site.role(name) != "standby":
            await asyncio.sleep(0.02)


async def state(site: Site, caller: Caller, worker: str, wanted: str) -> None:
    async with asyncio.timeout(30):
        while (await site.drains(caller)).get(worker) != wanted:
            await asyncio.sleep(0.02)


class TestKilledLeader:
    @pytest.mark.parametrize("paged", ["before the kill", "after the kill"])
    async def test_the_standby_finishes_what_was_decided(self, site: Site, paged: str) -> None:
        """SIGKILL after the eviction was decided and before it was carried out: the standby carries it out, one page comes."""
        site.receiver.status = 200 if paged == "before the kill" else 503
        await standing_by(site, "c2")
        leader = site.callers["c1"]
        assert (await leader.post("/v1/report", fatal("t01"), who="t01"))[0] == 200
        if paged == "before the kill":  # and its Done durable, which is what keeps the standby from sending it again
            async with asyncio.timeout(10):
                while 'sentinel_effects_pending{effect="SendPage"} 0.0' not in (await leader.get("/metrics", who=None))[1]:
                    await asyncio.sleep(0.02)
        else:
            await until(lambda: site.receiver.refused, "the receiver refuses the page for now")
        await site.kill("c1")  # the agent has not fetched the command: nothing was carried out
        site.receiver.status = 200
        standby = await site.leads("c2")
        routes = (await standby.get("/v1/routes", who=None))[1]
        assert {e["worker"]: e["state"] for p in routes["pools"] for e in p["workers"]} == {"a": "out", "b": "active"}
        status, commands = await standby.get("/v1/commands?node=t01&wait=20", who="t01")
        assert status == 200
        assert [c["action"] for c in commands] == ["kill_worker"]
        result = {"id": commands[0]["id"], "node": "t01", "ok": True, "detail": "gone"}
        assert (await standby.post("/v1/results", result, who="t01"))[0] == 204
        await state(site, standby, "a", "out")
        # The agent sends its unacknowledged state again, as it does to every new leader: the same fault, not another one.
        assert (await standby.post("/v1/report", fatal("t01", session="s2"), who="t01"))[0] == 200
        await until(lambda: site.receiver.accepted, "the page arrives")
        assert len((await standby.get("/v1/incidents"))[1]) == 1
        await asyncio.sleep(3 * LEASE_S)  # long enough for a second page to show itself
        assert len(site.receiver.accepted) == 1
        assert (await standby.get("/v1/commands?node=t01&wait=0", who="t01"))[1] == []

    async def test_a_persons_drain_waits_on_under_the_next_leader(self, site: Site) -> None:
        """A drain that waits for requests in flight is neither forgotten nor hurried by a change of leader."""
        site.receiver.busy["a"] = 2
        await standing_by(site, "c2")
        ask = {"verb": "drain", "target": "a", "reason": "swap a cable", "deadline_s": 60}
        status, answer = await site.callers["c1"].post("/v1/ask", ask)
        assert status == 200
        await site.kill("c1")
        standby = await site.leads("c2")
        await asyncio.sleep(0.5)
        assert (await site.drains(standby))["a"] in ("requested", "derouted")
        site.receiver.busy["a"] = 0
        await state(site, standby, "a", "out")
        assert (await standby.get(f"/v1/drains/{answer['drains'][0]['id']}"))[1]["by"] == "ada"

    async def test_sigterm_hands_over_cleanly(self, site: Site) -> None:
        """A clean stop exits 0 while polls are held open, and the standby leads without waiting for the lease."""
        await standing_by(site, "c2")
        poll = asyncio.create_task(site.callers["c1"].get("/v1/commands?node=t01&wait=60", who="t01"))
        await asyncio.sleep(0.2)
        assert await site.kill("c1", signal.SIGTERM) == 0
        await site.leads("c2")
        await asyncio.gather(poll, return_exceptions=True)

    async def test_sighup_takes_a_new_fleet_and_keeps_the_old_on_a_bad_file(self, site: Site) -> None:
        """A worker added to the file is known after SIGHUP; a broken file changes nothing and ends nothing."""
        leader = site.callers["c1"]
        file = site.directory / "c1.toml"
        more = f'[[workers]]\nname = "c"\npool = "chat"\nurl = "{site.receiver.url}/c"\nnodes = ["t02"]\n'
        file.write_text(file.read_text() + more)
        os.kill(site.processes["c1"].pid, signal.SIGHUP)

        async def workers() -> list[str]:
            return [w["worker"] for w in (await leader.get("/v1/status"))[1]["workers"]]

        async with asyncio.timeout(10):
            while await workers() != ["a", "b", "c"]:
                await asyncio.sleep(0.02)
        file.write_text("[controller]\nleese = 1\n")
        os.kill(site.processes["c1"].pid, signal.SIGHUP)
        async with asyncio.timeout(10):
            while "is not used" not in (site.directory / "c1.log").read_text():
                await asyncio.sleep(0.02)
        assert await workers() == ["a", "b", "c"]

    async def test_a_new_policy_takes_effect_in_the_same_leadership(self, site: Site) -> None:
        """Another policy takes effect by SIGHUP under the same epoch; one that cannot be used is refused and the last one stays."""
        await standing_by(site, "c2")
        leader = site.callers["c1"]
        site.receiver.busy["a"] = 1
        await leader.post("/v1/ask", {"verb": "drain", "target": "a", "reason": "x", "deadline_s": 60})
        before = (await leader.get("/v1/status"))[1]["leader"]["epoch"]
        policy = site.directory / "policy.toml"
        policy.write_text(default_policy_text().replace('mode = "enforce"', 'mode = "observe"'))
        file = site.directory / "c1.toml"
        file.write_text(file.read_text().replace("tick =", f'policy = "{policy}"\ntick =', 1))
        os.kill(site.processes["c1"].pid, signal.SIGHUP)

        async def told() -> dict[str, Any]:
            return (await leader.get("/v1/status"))[1]

        async with asyncio.timeout(10):
            while (await told())["mode"] != "observe":
                await asyncio.sleep(0.02)
        policy.write_text(default_policy_text().replace("[pace]", "[pase]"))
        os.kill(site.processes["c1"].pid, signal.SIGHUP)
        async with asyncio.timeout(10):
            while "is not used" not in (site.directory / "c1.log").read_text():
                await asyncio.sleep(0.02)
        now = await told()
        assert (now["mode"], now["leader"]["epoch"]) == ("observe", before)
        assert "a" in await site.drains(leader)
        site.receiver.busy["a"] = 0
        await state(site, leader, "a", "out")

    async def test_a_frozen_leader_wakes_up_harmless(self, site: Site) -> None:
        """A leader that is stopped past its lease finds another one when it wakes, says so, and acts no more."""
        await standing_by(site, "c2")
        os.kill(site.processes["c1"].pid, signal.SIGSTOP)
        standby = await site.leads("c2")
        assert (await standby.post("/v1/report", fatal("t01"), who="t01"))[0] == 200
        os.kill(site.processes["c1"].pid, signal.SIGCONT)
        await standing_by(site, "c1")
        status, answer = await site.callers["c1"].post("/v1/ask", {"verb": "drain", "target": "b", "reason": "x"})
        assert (status, answer["leader"]) == (421, standby.url)
        assert set(await site.drains(standby)) == {"a"}


class TestStoppedStore:
    async def test_nothing_is_lost_and_nothing_acts_twice(self, redis: RedisServer, tmp_path: Path) -> None:
        """Redis stopped for several lease periods: nobody leads, nothing is acknowledged; afterwards all goes on once."""
        serving, pager = ServingStandIn(), PagerStandIn()
        serving.busy["decode-2"] = 1
        stores = [await redis.open(timeout_s=0.2) for _ in range(2)]
        async with contextlib.AsyncExitStack() as stack:
            pairs = [
                await stack.enter_async_context(
                    running_controller(
                        store, tmp_path, fleet=rack(), decider=partial(Decider, default_policy()), nodes=("t03",), serving=serving,
                        pager=pager, name=name,
                    )
                )
                for store, name in zip(stores, ("c1", "c2"), strict=True)
            ]

            def leading() -> Caller | None:
                return next((caller for controller, caller in pairs if controller.term), None)

            await until(leading, "one of them leads")
            caller = leading()
            assert caller is not None
            status, asked = await caller.post("/v1/ask", {"verb": "drain", "target": "decode-2", "reason": "swap a cable"})
            assert status == 200
            await until(lambda: serving.did("in_flight"), "the drain waits for what is in flight")

            redis.pause()
            during = asyncio.create_task(caller.post("/v1/report", fatal("t03"), who="t03"))
            await until(lambda: leading() is None, "nobody leads while nothing can be made durable")
            acted = [c for c in serving.calls if c[0] not in ("look", "in_flight")]
            assert (await during)[0] in (421, 503)
            for _, other in pairs:
                assert (await other.post("/v1/ask", {"verb": "drain", "target": "decode-3", "reason": "x"}))[0] in (421, 503)
            await asyncio.sleep(2.0)  # two more lease periods
            assert [c for c in serving.calls if c[0] not in ("look", "in_flight")] == acted
            assert pager.pages == []
            redis.resume()

            await until(leading, "one of them leads again")
            caller = leading()
            assert caller is not None
            for _ in range(3):  # the agent repeats what was not acknowledged, and once more because an answer got lost
                assert (await caller.post("/v1/report", fatal("t03"), who="t03"))[0] == 200
            serving.busy["decode-2"] = 0

            async def drain() -> Any:
                return (await caller.get(f"/v1/drains/{asked['drains'][0]['id']}"))[1]

            async with asyncio.timeout(20):
                while (await drain()).get("state") != "out":
                    await asyncio.sleep(0.02)
            await until(lambda: pager.pages, "a person is paged")
            await asyncio.sleep(0.3)
            assert [(v, w) for v, w, _ in serving.calls if v == "kill"] == [("kill", "decode-1")]
            assert len(pager.pages) == 1
            assert serving.did("deroute").count("decode-2") == 1
            assert {d["worker"] for d in (await caller.get("/v1/status"))[1]["drains"] if d.get("kind", "drain") == "drain"} == {
                "decode-1", "decode-2",
            }  # fmt: skip
        for store in stores:
            await store.close()


class TestStarting:
    async def test_systemd_is_told(self, redis: RedisServer, tmp_path: Path) -> None:
        """READY once the port answers, keep-alives while the work makes progress, STOPPING on the way out."""
        receiver = Receiver()
        await receiver.serve()
        told: list[str] = []
        path = redis.directory / "notify"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.bind(str(path))
            sock.setblocking(False)
            async with aiohttp.ClientSession() as session:
                site = Site(tmp_path, redis, receiver, session)
                os.environ |= {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "300000"}
                try:
                    await site.start("c1")
                finally:
                    del os.environ["NOTIFY_SOCKET"], os.environ["WATCHDOG_USEC"]

                def hear() -> str:
                    with contextlib.suppress(BlockingIOError):
                        while True:
                            told.append(sock.recv(4096).decode())
                    return "\n".join(told)

                await until(lambda: hear().count("WATCHDOG=1") >= 3, "keep-alives come")
                await site.leads("c1")
                assert await site.kill("c1", signal.SIGTERM) == 0
                assert told[0].startswith("READY=1")
                assert "STOPPING=1" in hear()
        await receiver.unserve()

    @pytest.mark.parametrize(
        ("old", "new", "says"),
        [
            ("listen =", "listen = \"127.0.0.1\" #", "controller.listen"), ("[controller]", "[agent]\n[controler]", "controler"),
            ("tick =", "policy = \"/nowhere\"\ntick =", "controller.policy"), ("url = \"unix", "url = \"ftp", "store.url"),
        ],
    )  # fmt: skip
    async def test_what_cannot_work_is_a_sentence(self, redis: RedisServer, tmp_path: Path, old: str, new: str, says: str) -> None:
        """A file that a controller cannot run with ends it with 1 and one sentence, without a traceback."""
        receiver = Receiver()
        receiver.url = "http://127.0.0.1:1"
        async with aiohttp.ClientSession() as session:
            site = Site(tmp_path, redis, receiver, session)
            file = tmp_path / "c1.toml"
            file.write_text(file.read_text().replace(old, new, 1))
            await site.start("c1")
            assert await site.processes.pop("c1").wait() == 1
        log = (tmp_path / "c1.log").read_text()
        assert says in log
        assert "Traceback" not in log

    async def test_a_port_that_is_taken_is_one_sentence(self, site: Site) -> None:
        """Two controllers on one port: the second one ends and says which key to change."""
        file = site.directory / "c2.toml"
        await site.kill("c2")
        file.write_text(file.read_text().replace(site.callers["c2"].url[7:], site.callers["c1"].url[7:]))
        await site.start("c2")
        assert await site.processes.pop("c2").wait() == 1
        log = (site.directory / "c2.log").read_text()
        assert "controller.listen" in log
        assert "Traceback" not in log

    async def test_it_stands_by_while_the_store_is_away(self, redis: RedisServer, tmp_path: Path) -> None:
        """A controller that starts before its store waits for it, answers that nobody leads, and leads once it is there."""
        receiver = Receiver()
        await receiver.serve()
        redis.pause()
        async with aiohttp.ClientSession() as session:
            site = Site(tmp_path, redis, receiver, session)
            try:
                await site.start("c1")
                await standing_by(site, "c1")
                status, answer = await site.callers["c1"].get("/v1/status")
                assert (status, answer["leader"]) == (421, None)
                redis.resume()
                await site.leads("c1")
            finally:
                await site.close()
        await receiver.unserve()

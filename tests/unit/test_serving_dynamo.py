"""Dynamo workers in and out of rotation: nothing lost by a crash, nobody dead brought back, nobody else touched."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from sentinel.config import DynamoSettings
from sentinel.model import Routes, Worker, WorkerSeen
from sentinel.serving import AdapterError
from sentinel.serving.adapters import Serving, open_discovery
from sentinel.serving.discovery import Entry
from sentinel.serving.discovery_file import FileDiscovery
from sentinel.serving.dynamo import DynamoAdapter
from tests.unit.standin_worker import MemoryKeep, RecordingHands, StandInDynamoWorker, StandInFrontend, standing

HEX = "2cd8a17d4531f6d6"
OTHER = "aa3ab7b132725b16"


class Stage:
    """One registered worker, a bystander, a frontend, and the adapter."""

    def __init__(self, folder: Path, http: aiohttp.ClientSession) -> None:
        self.kv = folder
        self.server = StandInDynamoWorker(HEX)
        self.front = StandInFrontend(folder)
        self.keep = MemoryKeep()
        self.hands = RecordingHands()
        self.http = http
        self.with_frontend = True
        for hexid in (HEX, OTHER):
            self.register(hexid)
            self.register(hexid, "worker_kv_query_source_1")

    def adapter(self) -> DynamoAdapter:
        """A new one each time: what a controller that just took over knows is nothing."""
        settings = DynamoSettings(discovery=f"file:{self.kv}", frontend=self.front.url if self.with_frontend else "")
        return DynamoAdapter(settings, FileDiscovery(self.kv), self.hands, self.keep, self.http)

    @property
    def worker(self) -> Worker:
        return Worker(name="w", pool="p", url=self.server.url, adapter="dynamo", nodes=("t01",))

    def path(self, hexid: str, endpoint: str = "generate") -> Path:
        name = f"dynamo%2Fbackend%2F{endpoint.replace('_', '%5F')}%2F{hexid}"
        return self.kv / "v1" / "instances" / name

    def register(self, hexid: str, endpoint: str = "generate") -> None:
        self.path(hexid, endpoint).parent.mkdir(parents=True, exist_ok=True)
        transport = {"tcp": f"127.0.0.1:1/{hexid}/dynamo/backend/{endpoint}"}
        body = {"type": "Endpoint", "instance_id": int(hexid, 16), "transport": transport}
        self.path(hexid, endpoint).write_text(json.dumps(body))


@pytest_asyncio.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with aiohttp.ClientSession() as http:
        made = Stage(tmp_path, http)
        async with standing(made.server, made.front):
            yield made


async def test_out_and_back_touches_only_the_entry_that_takes_requests(stage: Stage) -> None:
    """Deroute removes it, reroute writes the very same bytes; the router's index and other workers stay."""
    adapter, body = stage.adapter(), stage.path(HEX).read_bytes()
    for _ in range(2):
        assert await adapter.deroute(stage.worker)
        assert not stage.path(HEX).exists()
    assert stage.path(HEX, "worker_kv_query_source_1").exists()
    assert stage.path(OTHER).exists()
    for _ in range(2):
        assert await adapter.reroute(stage.worker)
        assert stage.path(HEX).read_bytes() == body


async def test_the_body_is_durable_before_the_entry_goes(stage: Stage) -> None:
    """When it cannot be kept, nothing is removed."""
    stage.keep.fails = ConnectionError("store away")
    with pytest.raises(ConnectionError):
        await stage.adapter().deroute(stage.worker)
    assert stage.path(HEX).exists()


async def test_another_controller_can_put_it_back(stage: Stage) -> None:
    """What was removed before a crash is written back by whoever comes after, and asking twice in between loses nothing."""
    assert await stage.adapter().deroute(stage.worker)
    assert await stage.adapter().deroute(stage.worker)
    assert await stage.adapter().reroute(stage.worker)
    assert stage.path(HEX).exists()


async def test_a_crash_between_keeping_and_removing_is_finished(stage: Stage) -> None:
    """The entry was kept and is still there: deroute again removes it, and it can still come back."""
    body = stage.path(HEX).read_bytes()
    assert await stage.adapter().deroute(stage.worker)
    stage.path(HEX).write_bytes(body)
    assert await stage.adapter().deroute(stage.worker)
    assert not stage.path(HEX).exists()
    assert await stage.adapter().reroute(stage.worker)
    assert stage.path(HEX).read_bytes() == body


async def test_a_dead_worker_is_not_put_back(stage: Stage) -> None:
    """Dynamo would send requests to it until the entry expires."""
    adapter = stage.adapter()
    assert await adapter.deroute(stage.worker)
    await stage.server.close()
    assert not await adapter.reroute(stage.worker)
    assert not stage.path(HEX).exists()


async def test_a_restarted_worker_counts_by_its_own_registration(stage: Stage) -> None:
    """The entry of the process before is never written back for the new one."""
    adapter = stage.adapter()
    assert await adapter.deroute(stage.worker)
    stage.server.hexid = "bb00000000000001"
    assert not await adapter.reroute(stage.worker)
    assert not stage.path(HEX).exists()
    stage.register(stage.server.hexid)
    assert await adapter.reroute(stage.worker)


async def test_a_worker_that_leaves_by_itself_later_is_not_put_back(stage: Stage) -> None:
    """Once it was back, its own registration counts: a worker that deregistered to shut down must stay out."""
    adapter = stage.adapter()
    await adapter.deroute(stage.worker)
    await adapter.reroute(stage.worker)
    stage.path(HEX).unlink()
    assert not await adapter.reroute(stage.worker)
    assert not stage.path(HEX).exists()


async def test_a_hung_worker_leaves_rotation_when_its_id_was_ever_seen(stage: Stage) -> None:
    """By a look, by an agent's report, or by what an earlier controller kept; only when nobody knows is it an error."""
    stage.server.mute = True
    with pytest.raises(AdapterError, match="cannot be told from the other"):
        await stage.adapter().deroute(stage.worker)
    adapter = stage.adapter()
    adapter.learn("w", HEX)
    assert await adapter.deroute(stage.worker)
    assert not stage.path(HEX).exists()
    stage.register(HEX)
    assert await stage.adapter().deroute(stage.worker)
    assert not stage.path(HEX).exists()
    assert stage.path(OTHER).exists()


async def test_a_stale_id_does_not_leave_the_new_process_in_rotation(stage: Stage) -> None:
    """The worker restarted since it was last seen: both the stale entry and the new one go."""
    adapter = stage.adapter()
    await adapter.look(stage.worker)
    stage.server.hexid = "bb00000000000001"
    stage.register(stage.server.hexid)
    assert await adapter.deroute(stage.worker)
    assert not stage.path(HEX).exists()
    assert not stage.path(stage.server.hexid).exists()
    assert await adapter.reroute(stage.worker)
    assert stage.path(stage.server.hexid).exists()


async def test_a_worker_that_does_not_run_is_out_already(stage: Stage) -> None:
    """A refused connection is a fact: there is no process that could take a request."""
    await stage.server.close()
    assert await stage.adapter().deroute(stage.worker)


async def test_in_flight_and_look_come_from_the_system_server(stage: Stage) -> None:
    """Dynamo's own gauge; unknown, not zero, when its server is gone, since that ends before the streams do."""
    adapter = stage.adapter()
    stage.server.in_flight = 5
    assert await adapter.in_flight(stage.worker) == 5
    seen = await adapter.look(stage.worker)
    assert seen and (seen.healthy, seen.running, seen.progress, seen.instance) == (True, 5, 194366.0, HEX)
    stage.server.mute = True
    with pytest.raises(AdapterError):
        await adapter.look(stage.worker)
    await stage.server.close()
    assert await adapter.look(stage.worker) is None
    assert await adapter.in_flight(stage.worker) is None


async def test_verify_registers_asks_and_takes_out_again(stage: Stage) -> None:
    """Dynamo reaches a chosen worker only while it is registered; a right answer brings nothing back, a wrong one takes out."""
    adapter, body = stage.adapter(), stage.path(HEX).read_bytes()
    assert (await adapter.verify(stage.worker, 5))[0]
    assert stage.path(HEX).exists()  # it was in rotation, and rightly so
    await adapter.deroute(stage.worker)
    ok, why = await adapter.verify(stage.worker, 5)
    assert (ok, stage.path(HEX).exists()) == (True, False), why
    assert await adapter.reroute(stage.worker)
    assert stage.path(HEX).read_bytes() == body
    stage.front.answers_as = int(OTHER, 16)
    ok, why = await adapter.verify(stage.worker, 5)
    assert (ok, stage.path(HEX).exists()) == (False, False)
    assert OTHER in why
    stage.front.answers_as, stage.front.frozen = None, True
    ok, why = await adapter.verify(stage.worker, 0.3)
    assert (ok, stage.path(HEX).exists()) == (False, False)
    stage.front.frozen = False
    assert (await adapter.verify(stage.worker, 5))[0]


async def test_a_worker_that_says_it_is_not_ready_is_not_tried(stage: Stage) -> None:
    """While it is asked it gets other requests too, so one whose own canary failed is not registered for the sake of a test."""
    adapter, asked = stage.adapter(), stage.front.asked
    await adapter.deroute(stage.worker)
    stage.server.health = (503, '{"status":"notready","endpoints":{"generate":"notready"}}')
    ok, why = await adapter.verify(stage.worker, 0.3)
    assert (ok, stage.front.asked) == (False, asked)
    assert "not ready" in why


async def test_verify_waits_for_a_worker_that_still_loads(stage: Stage) -> None:
    """A started worker opens its port late and registers by itself; until the deadline it is asked again, and passes at once."""
    adapter = stage.adapter()
    stage.path(HEX).unlink()
    ok, _ = await adapter.verify(stage.worker, 0.3)
    assert not ok
    await stage.server.close()
    ok, why = await adapter.verify(stage.worker, 0.3)
    assert not ok
    assert "nothing listens" in why
    verifying = asyncio.create_task(adapter.verify(stage.worker, 20))
    await asyncio.sleep(0.3)
    assert not verifying.done()
    await stage.server.start()
    stage.register(HEX)
    assert (await verifying)[0]


async def test_a_stop_ends_a_verification(stage: Stage) -> None:
    """Worse news during the active test: the worker is ended at once, and the test does not outlive it."""
    adapter = stage.adapter()
    stage.front.refuses = (500, "no answer from the worker")
    verifying = asyncio.create_task(adapter.verify(stage.worker, 3600))
    while not stage.front.asked:
        await asyncio.sleep(0.01)
    stopping = asyncio.create_task(adapter.stop(stage.worker, hard=True, key="k"))
    async with asyncio.timeout(20):
        assert await stopping
        ok, why = await verifying
    assert not ok
    assert not stage.path(HEX).exists(), why


async def test_verify_without_a_frontend_says_what_is_missing(stage: Stage) -> None:
    """No token can be asked, so nothing is proved."""
    stage.with_frontend = False
    ok, why = await stage.adapter().verify(stage.worker, 5)
    assert not ok
    assert "[dynamo] frontend" in why


async def test_a_killed_workers_entry_goes_at_once_and_for_good(stage: Stage) -> None:
    """Otherwise it draws requests until its lease ends; and it never comes back."""
    adapter = stage.adapter()
    await adapter.look(stage.worker)
    assert await adapter.stop(stage.worker, hard=True, key="k")
    assert stage.hands.asked == [("t01", "kill_worker", {"worker": "w"}, "k")]
    assert not stage.path(HEX).exists()
    assert not await adapter.reroute(stage.worker)
    assert not stage.path(HEX).exists()


@pytest.mark.parametrize("out_by", ["deroute", "stop"])
async def test_a_worker_that_is_out_stays_out_when_somebody_restarts_it(stage: Stage, out_by: str) -> None:
    """Its new process registers by itself, and Dynamo would route to it: the next look removes that, under any controller."""
    adapter = stage.adapter()
    await adapter.look(stage.worker)
    assert await (adapter.deroute(stage.worker) if out_by == "deroute" else adapter.stop(stage.worker, hard=True, key="k"))
    stage.server.hexid = new = "bb00000000000001"
    later = stage.adapter()
    await later.look(stage.worker)  # it still loads
    stage.register(new)
    await later.look(stage.worker)
    assert not stage.path(new).exists()
    assert stage.path(OTHER).exists()
    assert await later.reroute(stage.worker)  # once it is wanted, the very process that is there comes back
    assert stage.path(new).exists()
    await stage.adapter().look(stage.worker)
    assert stage.path(new).exists()


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("back_by", ["verify", "reroute"])
async def test_a_worker_that_is_wanted_again_is_left_alone(stage: Stage, back_by: str, looks: bool) -> None:
    """Verify and reroute take the process that is there now, seen by a look before or not; only reroute leaves it in rotation."""
    adapter = stage.adapter()
    assert await adapter.deroute(stage.worker)
    assert await adapter.stop(stage.worker, hard=False, key="k")
    assert await adapter.start(stage.worker, key="k2")
    stage.server.hexid = new = "bb00000000000001"
    stage.register(new)
    if looks:
        await adapter.look(stage.worker)
        assert not stage.path(new).exists()
    if back_by == "verify":
        assert (await adapter.verify(stage.worker, 5))[0]
        assert not stage.path(new).exists()
        adapter = stage.adapter()  # another controller may be the one that ends it
    assert await adapter.reroute(stage.worker)
    for looker in (adapter, stage.adapter()):
        await looker.look(stage.worker)
        assert stage.path(new).exists()


async def test_a_refused_stop_changes_nothing(stage: Stage) -> None:
    """What the agent did not do is not finished in discovery either."""
    stage.hands = RecordingHands(ok=False, refused=True)
    adapter = stage.adapter()
    await adapter.look(stage.worker)
    assert not await adapter.stop(stage.worker, hard=True, key="k")
    assert stage.path(HEX).exists()


async def test_workers_are_listed_as_discovery_has_them(stage: Stage) -> None:
    """Every registered one, by name where its id is known; garbage among the entries is passed over."""
    (stage.kv / "v1" / "instances" / "dynamo%2Fbackend%2Fgenerate%2Fnot-hex").write_text("x")
    (stage.kv / "v1" / "instances" / ".tmp_half").write_text("x")
    stage.path("00000000000000aa").write_bytes(b"\xff not json")
    adapter = stage.adapter()
    adapter.learn("w", HEX)
    assert {w.instance: w.worker for w in await adapter.list_workers()} == {HEX: "w", OTHER: "", "00000000000000aa": ""}


async def test_the_facade_speaks_to_the_adapter_that_is_named(stage: Stage) -> None:
    """A Dynamo worker without discovery set is one sentence, not a wrong drain; agents' reports teach instance ids."""

    async def routes() -> Routes | None:
        return None

    settings = DynamoSettings(discovery=f"file:{stage.kv}")
    serving = Serving.open(settings, hands=stage.hands, keep=stage.keep, routes=routes, session=stage.http)
    stage.server.mute = True
    serving.learn([WorkerSeen(worker="w", instance=HEX), WorkerSeen(worker="v")])
    assert await serving.deroute(stage.worker)
    assert not stage.path(HEX).exists()
    with pytest.raises(AdapterError, match="no route table"):
        await serving.deroute(Worker(name="v", pool="p", url="http://x"))
    bare = Serving.open(DynamoSettings(), hands=stage.hands, keep=stage.keep, routes=routes, session=stage.http)
    with pytest.raises(AdapterError, match=r"\[dynamo\] discovery is not set"):
        await bare.deroute(stage.worker)
    assert open_discovery(DynamoSettings(), stage.http) is None


def test_an_entry_knows_what_its_key_says() -> None:
    """Endpoint and instance are parts of the key; the address is in the body, where the body can be read."""
    entry = Entry(key=f"v1/instances/dynamo/backend/generate/{HEX}", body=b'{"transport":{"tcp":"10.0.0.1:5/x"}}')
    assert (entry.endpoint, entry.instance, entry.address) == ("generate", HEX, "10.0.0.1:5")
    assert Entry(key=entry.key, body=b"\xff").address == ""

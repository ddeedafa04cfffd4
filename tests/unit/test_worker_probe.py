"""The worker probe: a frozen engine is found behind a green health, and nothing that is merely slow, busy or quiet is."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from probes import Context, Probe, ProbeError
from probes.worker import WorkerProbe
from sentinel.model import Action, Finding, Reading, Severity, Suspect, WorkerSeen
from tests.unit.standin_worker import StandInDynamoWorker, StandInFrontend, StandInVllm, standing


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Watcher:
    """The probe on one node, its memory, and what was said last."""

    def __init__(self, proc: Path, **options: Any) -> None:
        self.clock = Clock()
        context = Context(node="t01", proc=proc, options={"deadline_s": 0.15, "canary_s": 0.15, "scan": False, **options})
        self.probe = WorkerProbe(context, clock=self.clock, mono=self.clock)
        self.memory: dict[str, Any] = {}
        self.readings: list[Reading] = []
        self.findings: list[Finding] = []

    async def look(self, after: float = 2.0) -> dict[str, Finding]:
        self.clock.now += after
        reading = msgspec.json.decode(msgspec.json.encode(await self.probe.read()), type=Reading)  # as a recording has it
        self.readings.append(reading)
        self.findings = self.probe.assess(reading, self.memory, {})
        json.dumps(self.memory)
        return {f.check: f for f in self.findings}

    def seen(self) -> WorkerSeen:
        return msgspec.convert(self.readings[-1].data["workers"], list[WorkerSeen])[0]


@pytest_asyncio.fixture
async def vllm() -> AsyncIterator[StandInVllm]:
    server = StandInVllm()
    async with standing(server):
        yield server


def watch(server: StandInVllm, proc: Path, **options: Any) -> Watcher:
    return Watcher(proc, workers=[{"name": "w", "url": server.url}], **options)


def present(said: dict[str, Finding]) -> set[str]:
    return {check for check, finding in said.items() if finding.present}


async def test_a_healthy_worker_is_measured_and_fine(vllm: StandInVllm, tmp_path: Path) -> None:
    """Every check that was measured says so, and the reading is what a report carries."""
    watcher = watch(vllm, tmp_path)
    assert isinstance(watcher.probe, Probe)
    vllm.running(2)
    said = await watcher.look()
    assert set(said) == {"worker.unreachable", "worker.dead", "worker.stalled", "worker.frozen"}
    assert present(said) == set()
    seen = watcher.seen()
    assert (seen.worker, seen.engine, seen.healthy, seen.running, seen.waiting, seen.progress) == ("w", "vllm", True, 2, 0, 150.0)
    assert str(said["worker.frozen"].component) == "t01/worker@w"
    await watcher.probe.close()


async def test_a_frozen_engine_is_found_behind_a_green_health(vllm: StandInVllm, tmp_path: Path) -> None:
    """Running, no step for stall_s, and a token that nobody answers: only then the verdict, once, with one id while it lasts."""
    watcher = watch(vllm, tmp_path)
    vllm.running(3)
    await watcher.look()
    vllm.frozen = True
    for _ in range(4):
        assert present(await watcher.look()) == set()
        assert vllm.asked == 0
    said = await watcher.look()
    assert present(said) == {"worker.stalled", "worker.frozen"}
    frozen, stalled = said["worker.frozen"], said["worker.stalled"]
    assert (frozen.severity, frozen.action, frozen.suspect) == (Severity.FATAL, Action.RESTART_WORKER, Suspect.APP)
    assert frozen.certainty == 0.95
    assert (stalled.severity, stalled.suspect, stalled.certainty) == (Severity.WARNING, Suspect.APP, 0.6)
    assert watcher.seen().healthy is True
    again = await watcher.look()
    assert again["worker.frozen"].id == frozen.id
    assert vllm.asked == 1
    vllm.frozen = False
    vllm.step()
    said = await watcher.look()
    assert present(said) == set()
    assert said["worker.frozen"].id != frozen.id
    await watcher.probe.close()


async def test_a_stall_that_answers_a_token_is_doubt_only(vllm: StandInVllm, tmp_path: Path) -> None:
    """The token itself is progress where the engine makes it; where another rank makes it, the stalled rank stays doubtful."""
    watcher = watch(vllm, tmp_path)
    vllm.ranks["1"] = dict(vllm.ranks["0"])
    vllm.running(3, "1")
    await watcher.look()
    for _ in range(12):
        vllm.step(rank="0")
        said = await watcher.look()
    assert present(said) == {"worker.stalled"}
    assert "engine 1" in said["worker.stalled"].summary
    assert vllm.asked == 1
    await watcher.probe.close()


async def test_a_long_prefill_is_not_a_stall(vllm: StandInVllm, tmp_path: Path) -> None:
    """No token is counted while a long prompt is worked off, but its chunks take KV cache."""
    watcher = watch(vllm, tmp_path)
    vllm.running(1)
    await watcher.look()
    for _ in range(20):
        vllm.ranks["0"]["kv_cache_usage_perc"] += 0.01
        assert present(await watcher.look()) == set()
    assert vllm.asked == 0
    await watcher.probe.close()


async def test_a_worker_that_never_made_a_token_gets_longer(vllm: StandInVllm, tmp_path: Path) -> None:
    """The first request may compile kernels for a minute."""
    vllm.ranks["0"] |= {"generation_tokens_total": 0, "prompt_tokens_total": 0}
    vllm.frozen = True
    watcher = watch(vllm, tmp_path)
    vllm.running(1)
    await watcher.look()
    assert present(await watcher.look(60)) == set()
    assert present(await watcher.look(61)) == {"worker.stalled", "worker.frozen"}
    await watcher.probe.close()


@pytest.mark.parametrize("status", [429, 503])
async def test_busy_is_never_sick(vllm: StandInVllm, tmp_path: Path, status: int) -> None:
    """A worker that turns the token away is alive."""
    watcher = watch(vllm, tmp_path)
    vllm.running(3)
    vllm.refuses = (status, "busy")
    await watcher.look()
    for _ in range(10):
        assert "worker.frozen" not in present(await watcher.look(5))
    await watcher.probe.close()


async def test_an_engine_that_froze_while_idle_is_asked_twice(vllm: StandInVllm, tmp_path: Path) -> None:
    """Its gauges show nothing running, so now and then a token is asked; one miss is checked before anything is said."""
    watcher = watch(vllm, tmp_path)
    await watcher.look()
    assert present(await watcher.look(31)) == set()
    assert vllm.asked == 1
    assert present(await watcher.look(2)) == set()
    vllm.frozen = True
    assert present(await watcher.look(31)) == set()
    said = await watcher.look(2)
    assert present(said) == {"worker.frozen"}
    assert vllm.asked == 3
    await watcher.probe.close()


async def test_gone_is_a_fact_and_only_where_something_answered(vllm: StandInVllm, tmp_path: Path) -> None:
    """A refused connection before the first answer is a worker being started; after it, the worker is gone."""
    watcher = watch(vllm, tmp_path)
    await vllm.close()
    for _ in range(3):
        assert await watcher.look() == {}
    await vllm.start()
    assert present(await watcher.look()) == set()
    await vllm.close()
    said = await watcher.look()
    assert present(said) == {"worker.unreachable"}
    gone = said["worker.unreachable"]
    assert (gone.severity, gone.action, gone.certainty) == (Severity.FATAL, Action.RESTART_WORKER, 1.0)
    await vllm.start()
    assert present(await watcher.look()) == set()
    await watcher.probe.close()


async def test_a_timeout_is_not_gone(vllm: StandInVllm, tmp_path: Path) -> None:
    """A process that takes connections and answers nothing is first doubt, then frozen; never unreachable."""
    watcher = watch(vllm, tmp_path)
    await watcher.look()
    vllm.mute = True
    assert await watcher.look() == {}
    assert await watcher.look(5) == {}
    said = await watcher.look(6)
    assert present(said) == {"worker.stalled", "worker.frozen"}
    assert "worker.unreachable" not in said
    vllm.mute = False
    vllm.step()
    assert present(await watcher.look()) == set()
    await watcher.probe.close()


async def test_one_missed_look_stops_no_clock_and_starts_none(vllm: StandInVllm, tmp_path: Path) -> None:
    """What was not measured is neither movement nor standstill."""
    watcher = watch(vllm, tmp_path)
    vllm.running(3)
    await watcher.look()
    vllm.mute = True
    await watcher.look(9)
    vllm.mute = False
    vllm.step()
    assert present(await watcher.look(9)) == set()
    await watcher.probe.close()


async def test_a_dead_engine_says_so_itself(vllm: StandInVllm, tmp_path: Path) -> None:
    """503 from /health is EngineDead; while vLLM rescales its experts the same status means busy."""
    watcher = watch(vllm, tmp_path)
    vllm.health = (503, '{"error":"The model is currently scaling. Please try again later."}')
    assert "worker.dead" not in await watcher.look()
    vllm.health = (503, "")
    said = await watcher.look()
    assert present(said) == {"worker.dead"}
    assert said["worker.dead"].action is Action.RESTART_WORKER
    vllm.health = (200, "")
    assert present(await watcher.look()) == set()
    await watcher.probe.close()


async def test_a_hung_dynamo_worker_is_asked_through_the_frontend(tmp_path: Path) -> None:
    """The request is pinned to it, and its instance id is remembered while its own server says nothing."""
    worker, front = StandInDynamoWorker("2cd8a17d4531f6d6"), StandInFrontend(tmp_path)
    instances = tmp_path / "v1" / "instances"
    instances.mkdir(parents=True)
    (instances / f"dynamo%2Fbackend%2Fgenerate%2F{worker.hexid}").write_text("{}")
    async with standing(worker, front):
        watcher = Watcher(tmp_path, workers=[{"name": "d", "system_url": worker.url, "engine": "dynamo"}], frontend=front.url)
        worker.in_flight = 2
        assert present(await watcher.look()) == set()
        assert (watcher.seen().instance, watcher.seen().running) == (worker.hexid, 2)
        front.frozen = True
        said = await watcher.look(11)
        assert present(said) == {"worker.stalled", "worker.frozen"}
        assert front.asked == 1
        await watcher.probe.close()


async def test_dynamos_own_canary_counts_where_no_frontend_is_known(tmp_path: Path) -> None:
    """Standing still alone is doubt; its own health check turning from ready to not ready is the second witness."""
    worker = StandInDynamoWorker("2cd8a17d4531f6d6")
    async with standing(worker):
        watcher = Watcher(tmp_path, workers=[{"name": "d", "system_url": worker.url, "engine": "dynamo"}])
        worker.in_flight = 2
        await watcher.look()
        assert present(await watcher.look(11)) == {"worker.stalled"}
        worker.health = (503, '{"status":"notready","endpoints":{"generate":"notready"}}')
        assert present(await watcher.look()) == {"worker.stalled", "worker.frozen"}
        await watcher.probe.close()


async def test_a_recording_is_judged_as_it_was_live(vllm: StandInVllm, tmp_path: Path) -> None:
    """The same readings, another probe with other options: the node's own limits travel with the reading."""
    watcher = watch(vllm, tmp_path, stall_s=3)
    vllm.running(3)
    await watcher.look()
    vllm.frozen = True
    live = [await watcher.look() for _ in range(3)]
    fresh, memory = WorkerProbe(Context(node="elsewhere")), dict[str, Any]()
    replayed = [fresh.assess(r, memory, {}) for r in watcher.readings][1:]
    assert [{f.check: f for f in said} for said in replayed] == live
    with pytest.raises(ProbeError, match="format 99"):
        fresh.assess(msgspec.structs.replace(watcher.readings[0], format=99), {}, {})
    await watcher.probe.close()


async def test_one_that_takes_connections_and_never_answered_is_being_started(vllm: StandInVllm, tmp_path: Path) -> None:
    """Nothing is found about it, however long; once it has answered, the same silence is a stall."""
    vllm.mute = True
    watcher = watch(vllm, tmp_path)
    for _ in range(4):
        assert present(await watcher.look(20.0)) == set()
    vllm.mute = False
    await watcher.look()
    vllm.mute = True
    await watcher.look()
    assert "worker.stalled" in present(await watcher.look(20.0))
    await watcher.probe.close()


@pytest.mark.parametrize(
    "text",
    [
        'vllm:num_requests_running{engine="0"} 1e308\nvllm:num_requests_running{engine="0"} 1e308\n',
        'vllm:num_requests_running{engine="0"} NaN\nvllm:generation_tokens_total{engine="0"} -Inf\n',
        "".join(f'vllm:num_requests_running{{engine="{i}"}} 1\n' for i in range(5000)),
        'dynamo_component_requests_total{dynamo_endpoint="generate",worker_id="\x1b[2J"} 1\n',
        "# " + "x" * (9 << 20) + "\n",
    ],
    ids=["sums beyond all numbers", "no numbers", "five thousand engines", "an id that is none", "9 MiB"],
)
async def test_nonsense_of_one_worker_is_not_measured(vllm: StandInVllm, tmp_path: Path, text: str) -> None:
    """What one worker's metrics cannot mean is left out as not measured, and the others are seen as before."""
    other = StandInVllm()
    async with standing(other):
        other.running(2)
        vllm.ranks, vllm.extra = {}, text
        watcher = Watcher(tmp_path, workers=[{"name": "w", "url": vllm.url}, {"name": "o", "url": other.url}], deadline_s=2.0)
        await watcher.look()
        w, o = msgspec.convert(watcher.readings[-1].data["workers"], list[WorkerSeen])
        assert (w.healthy, w.running, w.instance) == (True, None, "")
        assert o.running == 2
        await watcher.probe.close()


async def test_numbers_that_go_back_are_a_restart(vllm: StandInVllm, tmp_path: Path) -> None:
    """Counters that began anew have moved; that is no stall."""
    watcher = watch(vllm, tmp_path, stall_s=5.0)
    vllm.running(2)
    for tokens in (1000, 400, 90, 10):
        vllm.ranks["0"]["generation_tokens_total"] = tokens
        assert present(await watcher.look(6.0)) == set()
    await watcher.probe.close()


async def test_a_redirect_is_not_followed(vllm: StandInVllm, tmp_path: Path) -> None:
    """A worker does not decide whom its node asks next: its redirect is an answer that says nothing about the engine."""
    vllm.health, vllm.headers = (307, ""), {"Location": f"{vllm.url}/v1/models"}
    watcher = watch(vllm, tmp_path)
    await watcher.look()
    assert watcher.readings[-1].data["workers"][0]["health"]["status"] == 307
    assert watcher.seen().healthy is None
    await watcher.probe.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stal_s": 3}, "stal_s"),
        ({"workers": [{"name": "w", "url": "ftp://x"}]}, "'w' needs"),
        ({"workers": [{"name": "w", "url": "http://x", "engine": "sglang"}]}, "'w' needs"),
        ({"workers": [{"url": "http://x"}]}, "name"),
        ({"stall_s": "long"}, "stall_s"),
        ({"workers": [{"name": "w", "url": "http://x:99999"}]}, "'w' needs"),
        ({"workers": [{"name": "w", "url": "http://[::1"}]}, "'w' needs"),
        ({"workers": [{"name": "w", "url": "http://"}]}, "'w' needs"),
    ],
)
def test_wrong_options_are_one_sentence(options: dict[str, Any], says: str) -> None:
    """A misspelt threshold must not silently keep its default."""
    with pytest.raises(ProbeError, match=says):
        WorkerProbe(Context(node="t01", options=options))

"""``sentinel gateway`` as it is run: real processes, a real store, OpenAI's own SDK; routes by push, acknowledged."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import openai
import pytest
import pytest_asyncio

from sentinel.gateway.processes import Processes
from sentinel.model import WorkerState
from tests.conftest import free_port
from tests.gateway_process import neighbours
from tests.gateway_rig import ASK, Rig, client, running
from tests.gateway_site import MODEL


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running() as made:
        yield made


async def test_the_openai_sdk_works_unchanged(rig: Rig) -> None:
    """Whole and streamed chat, completions' models, embeddings' path, and each kind of error as the SDK's own exception."""
    process, url, _ = await rig.gateway()
    async with client(url) as sdk:
        whole = await sdk.chat.completions.create(**ASK)  # type: ignore[call-overload]
        assert whole.choices[0].message.content == "hello" and whole._request_id
        words = []
        async for piece in await sdk.chat.completions.create(**ASK, stream=True):  # type: ignore[call-overload]
            words.append(piece.choices[0].delta.content)
        assert words == [f"word{n} " for n in range(5)]
        assert [model.id async for model in sdk.models.list()] == [MODEL]
        assert (await sdk.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError, match="not served here") as gone:
            await sdk.chat.completions.create(**{**ASK, "model": "other"})  # type: ignore[call-overload]
        assert gone.value.code == "model_not_found" and gone.value.param == "model"
        with pytest.raises(openai.AuthenticationError, match="no tenant has this"):
            await sdk.with_options(api_key="wrong").models.list()
        for stand in rig.stands.values():
            stand.cut_after = 2
        got = []
        with pytest.raises(openai.APIError, match="send it again"):
            async for piece in await sdk.chat.completions.create(**ASK, stream=True):  # type: ignore[call-overload]
                got.append(piece)
        assert len(got) == 2
        with pytest.raises(openai.APIError, match="send it again"):
            async for _ in await sdk.responses.create(model=MODEL, input="hello", stream=True):
                pass
        for stand in rig.stands.values():
            stand.cut_after, stand.status = None, 503
        with pytest.raises(openai.InternalServerError) as busy:
            await sdk.chat.completions.create(**ASK)  # type: ignore[call-overload]
        assert busy.value.response.headers["retry-after"] == "1"
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


async def test_routes_reach_every_gateway_by_push_and_are_acknowledged(rig: Rig) -> None:
    """With a poll of a minute only a push can be that quick: all acknowledge, and from then on nobody sends there."""
    _, one, _ = await rig.gateway()
    _, two, _ = await rig.gateway(processes=2)
    while len(await rig.gateways.all()) < 3 or not await rig.gateways.acked(rig.version):
        await asyncio.sleep(0.01)
    took = []
    for turn in range(10):
        out, stays = ("a", "b") if turn % 2 else ("b", "a")
        began = time.monotonic()
        version = await rig.publish(**{out: WorkerState.OUT})
        while not await rig.gateways.acked(version):
            await asyncio.sleep(0.001)
        took.append(time.monotonic() - began)
        before = len(rig.stands[out].requests)
        async with client(one) as first, client(two) as second:
            for sdk in (first, second):
                for n in range(3):
                    ask = {**ASK, "messages": [{"role": "user", "content": f"{turn}.{n}"}]}
                    assert (await sdk.chat.completions.create(**ask)).id == f"chatcmpl-{stays}"  # type: ignore[call-overload]
        assert len(rig.stands[out].requests) == before
    assert sorted(took)[len(took) // 2] < 5  # a poll would take up to a minute


async def test_processes_share_a_port_and_come_back(rig: Rig) -> None:
    """Both answer on one port; one that is killed is replaced, and its presence is replaced as well; SIGTERM ends them all."""
    process, url, _ = await rig.gateway(processes=2)
    while len(await rig.gateways.all()) < 2:
        await asyncio.sleep(0.01)
    children = _children(process.pid)
    assert len(children) == 2
    os.kill(children[0], signal.SIGKILL)
    known = {p.id for p in await rig.gateways.all()}
    while len([p for p in await rig.gateways.all() if p.left_s > 0 and p.id not in known]) < 1:
        await asyncio.sleep(0.05)
    async with client(url, max_retries=2) as sdk:
        for _ in range(8):
            await sdk.chat.completions.create(**ASK)  # type: ignore[call-overload]
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 0
    while [p for p in await rig.gateways.all() if p.left_s > 0]:  # the killed one's ends by itself
        await asyncio.sleep(0.05)


async def test_one_that_drains_for_long_takes_nobody_along(rig: Rig) -> None:
    """A process of two that is told to stop, and waits for a stream, is heard of until it ends: systemd is never told that one
    hangs. The stream ends well, the other process stays, and a new one takes its place."""
    silent_s, port, admin = 3.0, free_port(), neighbours(2)
    command = [sys.executable, "-c", "from sentinel.cli.main import main; main()", "gateway", "--config"]
    watcher = Processes(2, [*command, str(rig.file(port, admin, processes=2))], silent_s)
    running = asyncio.create_task(watcher.run())
    for stand in rig.stands.values():
        stand.events, stand.pause_s = 100, 2 * silent_s / 100
    try:
        await watcher._up.wait()
        first, second = (watcher._children[k].pid for k in (0, 1))
        async with aiohttp.ClientSession() as http:
            streams = []
            while not await _in_flight(http, admin):
                streams.append(asyncio.create_task(_stream(f"http://127.0.0.1:{port}")))
                await asyncio.sleep(0.05)
        os.kill(first, signal.SIGTERM)
        while not all(stream.done() for stream in streams):
            assert watcher.alive()
            await asyncio.sleep(0.05)
        assert [stream.result() for stream in streams] == [100] * len(streams)
        async with asyncio.timeout(40):
            while watcher._children.get(0) is None or watcher._children[0].pid == first or 0 not in watcher._heard:
                assert watcher.alive()
                await asyncio.sleep(0.05)
        assert watcher._children[1].pid == second
    finally:
        os.kill(os.getpid(), signal.SIGTERM)  # taken by the loop
        status = await asyncio.wait_for(running, 40)
    assert status == 0


async def _in_flight(http: aiohttp.ClientSession, admin: int) -> bool:
    async with http.get(f"http://127.0.0.1:{admin}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return any(line.startswith("sentinel_gateway_in_flight{") and not line.endswith(" 0.0") for line in lines)


async def _stream(url: str) -> int:
    async with client(url) as sdk:
        return len([1 async for _ in await sdk.chat.completions.create(**ASK, stream=True)])  # type: ignore[call-overload]


async def test_sigterm_drains(rig: Rig) -> None:
    """Streams that are under way end as if nothing had happened, and the gateway leaves the table of gateways."""
    process, url, _ = await rig.gateway()
    for stand in rig.stands.values():
        stand.events, stand.pause_s = 60, 0.02
    async with client(url) as sdk:

        async def one(n: int) -> int:
            ask = {**ASK, "messages": [{"role": "user", "content": f"{n}"}]}
            return len([1 async for _ in await sdk.chat.completions.create(**ask, stream=True)])  # type: ignore[call-overload]

        streams = [asyncio.create_task(one(n)) for n in range(20)]
        while sum(len(s.requests) for s in rig.stands.values()) < 20:
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.gather(*streams) == [60] * 20
    while process.poll() is None:
        await asyncio.sleep(0.02)
    assert process.returncode == 0 and await rig.gateways.all() == []


async def test_a_dead_store_does_not_stop_a_gateway(rig: Rig) -> None:
    """With the store away requests go on by the last table, and drains of others are obeyed again once it is back."""
    process, url, _ = await rig.gateway()
    assert rig.store.server and rig.store.server.pid
    os.kill(rig.store.server.pid, signal.SIGSTOP)
    try:
        async with client(url) as sdk:
            for n in range(5):
                ask = {**ASK, "messages": [{"role": "user", "content": f"{n}"}]}
                assert (await sdk.chat.completions.create(**ask)).choices  # type: ignore[call-overload]
    finally:
        os.kill(rig.store.server.pid, signal.SIGCONT)
    version = await rig.publish(a=WorkerState.OUT)
    while not (await rig.gateways.all() and await rig.gateways.acked(version)):
        await asyncio.sleep(0.05)
    async with client(url) as sdk:
        assert (await sdk.chat.completions.create(**ASK)).id == "chatcmpl-b"  # type: ignore[call-overload]
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]


def test_a_wrong_file_is_one_sentence(tmp_path: Path, program: Callable[[str], Path]) -> None:
    """A port that is taken, and a gateway open to everybody, are said in a sentence; the status is 1."""
    for text, sentence in (
        ('[gateway]\nlisten = "0.0.0.0:0"\n', "gateway.keys: missing"),
        ('[gateway]\nlisten = "127.0.0.1:1"\nadmin = "127.0.0.1:1"\n', "gateway.admin: 127.0.0.1:1 is gateway.listen too"),
    ):
        file = tmp_path / "gateway.toml"
        file.write_text(text, "utf-8")
        command = [sys.executable, "-c", "from sentinel.cli.main import main; main()", "gateway", "--config", str(file)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 1 and sentence in ran.stderr and "Traceback" not in ran.stderr

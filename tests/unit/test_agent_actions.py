"""Local actions: what can never be run, what is run once, and how it ends."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from sentinel.agent.actions import Actions, NotAllowed, check, fill, run_vector
from sentinel.agent.ledger import Ledger
from sentinel.agent.link import Link
from sentinel.config import AgentSettings, ConfigError
from sentinel.model import Command, CommandResult

ALLOWED = {"reset_gpu": ("systemctl", "start", "reset@{gpu}.service"), "kill": ("/bin/kill", "{pid}"), "show": ("x", "--id={pid}")}


def command(action: str, name: str = "c1", node: str = "n", **args: str) -> Command:
    return Command(id=name, node=node, action=action, args=args, deadline_s=10.0)


def test_placeholders_are_filled() -> None:
    """A value that fits goes where the vector says, within one argument."""
    assert fill(ALLOWED, command("reset_gpu", gpu="0009:01:00.0")) == ("systemctl", "start", "reset@0009:01:00.0.service")


@pytest.mark.parametrize(
    ("action", "args", "complaint"),
    [
        ("reboot", {}, "not in this node's allow-list"),
        ("reset_gpu", {}, "needs the argument 'gpu'"),
        ("reset_gpu", {"gpu": "0; rm -rf /"}, "does not fit"),
        ("reset_gpu", {"gpu": "$(id)"}, "does not fit"),
        ("reset_gpu", {"gpu": "a\nb"}, "does not fit"),
        ("reset_gpu", {"gpu": "0000:01:00.0\n"}, "does not fit"),
        ("reset_gpu", {"gpu": ""}, "does not fit"),
        ("reset_gpu", {"gpu": "x" * 129}, "does not fit"),
        ("reset_gpu", {"gpu": "../../etc/shadow"}, "does not fit"),
        ("reset_gpu", {"gpu": "{gpu}"}, "does not fit"),
        ("kill", {"pid": "-1"}, "read as an option"),
    ],
)
def test_what_does_not_fit_is_refused(action: str, args: dict[str, str], complaint: str) -> None:
    """Every value that could mean more than itself is refused with a sentence."""
    with pytest.raises(NotAllowed, match=complaint):
        fill(ALLOWED, command(action, **args))


def test_a_dash_is_fine_where_the_vector_leads() -> None:
    """A value may begin with a dash where the vector itself puts something before it."""
    assert fill(ALLOWED, command("show", pid="-1")) == ("x", "--id=-1")


@given(st.text())
def test_a_filled_vector_has_the_shape_of_the_allowed_one(value: str) -> None:
    """Whatever the network sends, the vector keeps its length and its fixed parts, or is refused."""
    try:
        vector = fill(ALLOWED, command("reset_gpu", gpu=value))
    except NotAllowed:
        return
    assert len(vector) == 3
    assert vector[:2] == ("systemctl", "start")
    assert vector[2].isascii()
    assert not set(vector[2]) & set(" \n\t;|&$`'\"\\<>(){}*?!~#%")


@pytest.mark.parametrize("vector", [(), ("",), ("{what}",), ("/bin/{what}", "x")])
def test_a_senseless_allow_list_is_one_sentence(vector: tuple[str, ...]) -> None:
    """No program, or one that the network would choose, is an error of the configuration."""
    with pytest.raises(ConfigError, match=r"agent\.actions\.a: "):
        check({"a": vector})


async def test_it_ends_as_the_program_ends() -> None:
    """Exit status and the tail of what was said on both streams; nothing of our environment, no stdin."""
    os.environ["SENTINEL_SECRET_FOR_TEST"] = "x"
    ok, said = await run_vector(("/bin/sh", "-c", "echo out; echo err >&2; env; cat; exit 3"), 10)
    assert not ok
    assert said.startswith("exit status 3: ")
    assert "out" in said
    assert "err" in said
    assert "SENTINEL_SECRET" not in said
    assert await run_vector(("/bin/true",), 10) == (True, "exit status 0")
    assert await run_vector(("/no/such/program",), 10) == (False, "/no/such/program cannot be run: No such file or directory")
    ok, said = await run_vector(("/bin/sh", "-c", "head -c 100000 /dev/zero | tr '\\0' x; echo; echo end"), 10)
    assert ok
    assert said.endswith("end")
    assert len(said) < 5000


async def test_the_deadline_kills_the_whole_group(tmp_path: Path) -> None:
    """Past its deadline the program and its children are gone, also when they ignore SIGTERM."""
    pids = tmp_path / "pids"
    script = f"trap '' TERM; echo $$ > {pids}; sleep 60 & echo $! >> {pids}; echo begun; wait"
    ok, said = await run_vector(("/bin/sh", "-c", script), 0.3)
    assert not ok
    assert said == "killed at its deadline of 0.3 s: begun"
    for pid in pids.read_text().split():
        await _until(lambda p=pid: not _alive(p))


async def test_what_is_left_running_is_let_be(tmp_path: Path) -> None:
    """A program that starts a server and ends has ended, though the server still holds its output."""
    pid = tmp_path / "pid"
    began = time.monotonic()
    ok, said = await run_vector(("/bin/sh", "-c", f"sleep 60 & echo $! > {pid}; echo started"), 30)
    assert (ok, said) == (True, "exit status 0: started")
    assert time.monotonic() - began < 20
    server = pid.read_text().strip()
    assert _alive(server)
    os.kill(int(server), 9)


async def test_what_is_left_running_may_go_on_talking(tmp_path: Path) -> None:
    """A server that goes on writing to the output it was given is not killed by a pipe that nobody reads."""
    alive = tmp_path / "alive"
    later = f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; head -c 200000 /dev/zero; echo hi && touch {alive}"
    script = f"({later}) & echo started"
    assert await run_vector(("/bin/sh", "-c", script), 30) == (True, "exit status 0: started")
    (tmp_path / "go").touch()
    await _until(alive.exists)


@pytest.mark.parametrize(
    ("vector", "words"),
    [
        (("/bin/echo", "a\0b"), "cannot be run"),
        (("/bin/echo", "\ud800"), "cannot be run"),
        (("/bin/echo", "x" * 3_000_000), "cannot be run: Argument list too long"),
        (("/bin/sh", "-c", "kill -35 $$"), "killed by signal 35"),
        (("/bin/sh", "-c", "kill -STOP $$"), "killed at its deadline"),
    ],
)
async def test_what_ends_oddly_is_one_sentence_and_leaves_nothing_open(vector: tuple[str, ...], words: str) -> None:
    """However a program fails to run or to end, that is told in words, and its pipe is closed."""
    await run_vector(("/bin/true",), 10)  # the loop's own descriptors for children are there from now on
    before = _descriptors()
    ok, said = await run_vector(vector, 0.3)
    assert not ok
    assert words in said
    await _until(lambda: _descriptors() <= before)


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def _until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


# --- at most once ----------------------------------------------------------------------------------------------------


def test_a_begun_command_is_never_begun_again(tmp_path: Path) -> None:
    """After a restart a finished command keeps its result, an interrupted one has failed; neither begins again."""
    ledger = Ledger(tmp_path / "l", "n")
    assert ledger.begin("done")
    ledger.end(CommandResult(id="done", node="n", ok=True, detail="fine"))
    assert ledger.begin("cut")
    again = Ledger(tmp_path / "l", "n")
    assert not again.begin("done")
    assert not again.begin("cut")
    assert [(r.id, r.ok) for r in again.untold()] == [("done", True), ("cut", False)]
    result = again.result("cut")
    assert result
    assert "interrupted by a restart" in result.detail
    again.told("done")
    assert [r.id for r in Ledger(tmp_path / "l", "n").untold()] == ["cut"]


def test_a_half_written_ledger_line_is_no_begin(tmp_path: Path) -> None:
    """A begin cut off by a crash never ran, so it may begin; lines before and after it count."""
    path = tmp_path / "l"
    ledger = Ledger(path, "n")
    ledger.begin("a")
    with path.open("ab") as file:
        file.write(b'{"id":"b')  # a full disk, say
    ledger.begin("c")
    again = Ledger(path, "n")
    assert (again.begin("a"), again.begin("b"), again.begin("c")) == (False, True, False)


def test_a_full_disk_does_not_stop_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that cannot be made shorter is used as it is: nothing of it is forgotten, and nothing new is begun."""
    ledger = Ledger(tmp_path / "l", "n")
    ledger.begin("cut")
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    again = Ledger(tmp_path / "l", "n")
    assert [(r.id, r.ok) for r in again.untold()] == [("cut", False)]
    assert not again.begin("cut")
    with pytest.raises(OSError, match="No space left"):
        again.begin("new")


@pytest.mark.parametrize("damage", [b"\xff" * 30, b"[" * 100_000, b'{"id":"x","y":' + b"[" * 100_000, b'{"id":1}', b"\0" * 50])
def test_a_damaged_ledger_keeps_what_can_be_read(tmp_path: Path, damage: bytes) -> None:
    """Lines that are none are passed over, whatever they are; the others count."""
    path = tmp_path / "l"
    Ledger(path, "n").begin("a")
    path.write_bytes(damage + b"\n" + path.read_bytes())
    assert not Ledger(path, "n").begin("a")


def test_the_ledger_is_bounded(tmp_path: Path) -> None:
    """Only the newest commands are remembered, and the file does not grow for ever."""
    ledger = Ledger(tmp_path / "l", "n", keep=10)
    for i in range(200):
        ledger.begin(f"c{i}")
    again = Ledger(tmp_path / "l", "n", keep=10)
    assert not again.begin("c199")
    assert again.begin("c0")
    assert (tmp_path / "l").read_bytes().count(b"{") < 80


class Desk:
    """A controller that offers commands and takes results; it may be away for results."""

    def __init__(self, *commands: Command) -> None:
        self.commands = list(commands)
        self.results: list[CommandResult] = []
        self.away = False
        self.polls = 0

    async def offer(self, request: web.Request) -> web.Response:
        self.polls += 1
        done = {r.id for r in self.results}
        return web.Response(body=msgspec.json.encode([c for c in self.commands if c.id not in done]))

    async def result(self, request: web.Request) -> web.Response:
        if self.away:
            return web.Response(status=503)
        self.results.append(msgspec.json.decode(await request.read(), type=CommandResult))
        return web.Response(status=204)


@asynccontextmanager
async def actions(
    tmp_path: Path, desk: Desk, carry_out: Any, allowed: dict[str, tuple[str, ...]], **more: Any
) -> AsyncIterator[Actions]:
    app = web.Application()
    app.add_routes([web.get("/v1/commands", desk.offer), web.post("/v1/results", desk.result)])
    server = web.AppRunner(app, shutdown_timeout=0.1)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{server.addresses[0][1]}"
    async with aiohttp.ClientSession() as session:
        link = Link(AgentSettings(node="n", controllers=(url,)), session)
        made = Actions("n", allowed, link, tmp_path / "l", carry_out=carry_out, **more)
        task = asyncio.create_task(made.run())
        try:
            yield made
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await made.stop()
            await server.cleanup()


async def test_a_command_offered_again_and_again_runs_once(tmp_path: Path) -> None:
    """It runs once while results cannot be delivered, is offered meanwhile, and its one result arrives after a restart."""
    ran: list[tuple[str, ...]] = []

    async def carry_out(vector: tuple[str, ...], deadline_s: float) -> tuple[bool, str]:
        ran.append(vector)
        return True, "done"

    desk = Desk(command("kill", pid="1"))
    desk.away = True
    async with actions(tmp_path, desk, carry_out, ALLOWED):
        await _until(lambda: desk.polls >= 3)
    desk.away = False
    async with actions(tmp_path, desk, carry_out, ALLOWED):
        await _until(lambda: desk.results)
    assert len(ran) == 1
    assert [(r.id, r.ok, r.detail) for r in desk.results] == [("c1", True, "done")]


async def test_an_interrupted_command_is_reported_and_not_run_again(tmp_path: Path) -> None:
    """A command that was under way when the agent ended is reported as failed by the next run, without being offered."""
    begun = asyncio.Event()

    async def carry_out(vector: tuple[str, ...], deadline_s: float) -> tuple[bool, str]:
        assert not begun.is_set(), "it was run twice"
        begun.set()
        await asyncio.sleep(60)
        return True, ""

    desk = Desk(command("kill", pid="1"))
    async with actions(tmp_path, desk, carry_out, ALLOWED):
        await begun.wait()
    async with actions(tmp_path, desk, carry_out, ALLOWED):
        await _until(lambda: desk.results)
    assert [(r.id, r.ok, r.refused) for r in desk.results] == [("c1", False, False)]
    assert "interrupted by a restart" in desk.results[0].detail


async def test_resets_run_one_after_the_other(tmp_path: Path) -> None:
    """Two resets never overlap, while another action runs beside them."""
    now: set[str] = set()
    overlaps: list[set[str]] = []

    async def carry_out(vector: tuple[str, ...], deadline_s: float) -> tuple[bool, str]:
        now.add(" ".join(vector))
        overlaps.append(set(now))
        await asyncio.sleep(0.1)
        now.discard(" ".join(vector))
        return True, ""

    allowed = {"reset_gpu": ("reset", "{gpu}"), "reboot_node": ("reboot",), "start_worker": ("start",)}
    desk = Desk(
        command("reset_gpu", "a", gpu="0"),
        command("reset_gpu", "b", gpu="1"),
        command("reboot_node", "c"),
        command("start_worker", "d"),
    )
    async with actions(tmp_path, desk, carry_out, allowed):
        await _until(lambda: len(desk.results) == 4)
    assert all(len(o - {"start"}) <= 1 for o in overlaps)
    assert any("start" in o and len(o) == 2 for o in overlaps)


async def test_a_reset_runs_while_the_driver_is_let_go(tmp_path: Path) -> None:
    """Our own driver child would make a reset fail: it is released for a reset, and for nothing else."""
    held, seen = True, {}

    @asynccontextmanager
    async def release() -> AsyncIterator[bool]:
        nonlocal held
        held = False
        yield True
        held = True

    async def carry_out(vector: tuple[str, ...], deadline_s: float) -> tuple[bool, str]:
        seen[vector[0]] = held
        return True, ""

    desk = Desk(command("start_worker", "a"))
    async with actions(tmp_path, desk, carry_out, {"reset_gpu": ("reset",), "start_worker": ("start",)}, release=release):
        await _until(lambda: desk.results)
        desk.commands.append(command("reset_gpu", "b"))
        await _until(lambda: len(desk.results) == 2)
    assert seen == {"start": True, "reset": False}


async def test_another_nodes_command_is_refused(tmp_path: Path) -> None:
    """A command that names another node is answered as refused and nothing runs."""

    async def carry_out(vector: tuple[str, ...], deadline_s: float) -> tuple[bool, str]:
        raise AssertionError("ran")

    desk = Desk(command("kill", node="other", pid="1"))
    async with actions(tmp_path, desk, carry_out, ALLOWED):
        await _until(lambda: desk.results)
    assert desk.results[0].refused
    assert "other" in desk.results[0].detail


async def test_a_command_that_cannot_be_recorded_is_not_run(tmp_path: Path) -> None:
    """Without a ledger it could run twice; so it is refused with the reason."""

    async def carry_out(vector: tuple[str, ...], deadline_s: float) -> tuple[bool, str]:
        raise AssertionError("ran")

    desk = Desk()
    async with actions(tmp_path, desk, carry_out, ALLOWED):
        (tmp_path / "l").mkdir()  # nobody can append to a directory, not even root
        desk.commands = [command("kill", pid="1")]
        await _until(lambda: desk.results)
    assert desk.results[0].refused
    assert "could not be recorded" in desk.results[0].detail

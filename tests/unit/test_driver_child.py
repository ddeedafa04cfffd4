"""The driver child, for real: a process with a thread per GPU over a simulated NVML, and a parent that never waits for ever."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pynvml
import pytest

from probes import Context, Probe, ProbeError
from probes.gpu import GpuProbe
from sentinel.agent.assembly import Agent
from sentinel.agent.driver import ChildDriver
from sentinel.agent.driver_protocol import Pauses, longest_read_s
from sentinel.agent.probing import context, interval_s, load_probes
from sentinel.config import AgentSettings, ConfigError
from sentinel.durations import Duration
from sentinel.testing.nvml_kinds import gb200_tray
from sentinel.testing.nvml_state import STATE_FILE, FakeState

FAKE = "sentinel.testing.nvml:from_file"
DEADLINE_S = 0.6
QUICK = Pauses(first=0.05, most=0.2, steady=60.0, reopen=0.1, refresh=60.0)


class Tray:
    """A simulated tray whose state can be changed while the child runs."""

    def __init__(self, path: Path) -> None:
        self.path, self.state = path, gb200_tray()
        self.save()
        self.drivers: list[ChildDriver] = []

    def save(self) -> None:
        self.state.save(self.path)

    def driver(self, deadline_s: float = DEADLINE_S, pauses: Pauses = QUICK, nvml: str = FAKE) -> ChildDriver:
        driver = ChildDriver(deadline_s, nvml=nvml, env={**os.environ, STATE_FILE: str(self.path)}, pauses=pauses)
        self.drivers.append(driver)
        return driver


@pytest.fixture
async def tray(tmp_path: Path) -> AsyncIterator[Tray]:
    made = Tray(tmp_path / "nvml.json")
    yield made
    made.state = FakeState()  # releases whatever hangs
    for driver in made.drivers:
        await driver.close(0.1)


async def warm(driver: ChildDriver) -> dict[str, Any]:
    """The first reading: a new process may take longer than a short deadline on a busy machine."""
    return await until(driver.read, lambda r: "hung_s" not in r and len(r["gpus"]) > 0 and not hung(r))


async def until(read: Callable[[], Awaitable[dict[str, Any]]], good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    end = time.monotonic() + 20
    while True:
        try:
            reading = await read()
            if good(reading):
                return reading
        except ProbeError:
            pass
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.02)


def hung(reading: dict[str, Any]) -> list[str | None]:
    return [g["pci"] for g in reading["gpus"] if "hung_s" in g]


async def test_a_tray_is_read_through_the_child(tray: Tray) -> None:
    """Every GPU's values arrive, and what is simulated is named so."""
    reading = await warm(tray.driver())
    assert [g["pci"] for g in reading["gpus"]] == ["0008:01:00.0", "0009:01:00.0", "0018:01:00.0", "0019:01:00.0"]
    assert all(g["rows_pending"] is False for g in reading["gpus"])
    assert (reading["error"], reading["driver"], reading["nvml"]) == (None, "580.159.04", FAKE)


async def test_the_real_binding_says_what_this_machine_has(tray: Tray) -> None:
    """Without NVIDIA's library the child reports that, and nobody dies of it; with a driver it names the one that NVML names."""
    driver = tray.driver(deadline_s=10, nvml="pynvml")
    probe = GpuProbe(Context(node="n", driver=driver))
    first = await probe.read()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        assert first.data["error"]["code"] == 12
        assert (await driver.read())["error"]["code"] == 12  # known without asking again
        assert [f.check for f in probe.assess(first, {}, {})] == ["driver.missing"]
    else:
        assert (first.data["error"], first.data["driver"]) == (None, pynvml.nvmlSystemGetDriverVersion())
        assert len(first.data["gpus"]) == pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    assert driver.restarts == 0


async def test_one_hung_gpu_costs_the_others_one_deadline_once(tray: Tray) -> None:
    """The stuck GPU is named with how long; the others are read; the next look does not wait for it; it comes back by itself."""
    driver = tray.driver()
    await warm(driver)
    tray.state.gpus[1].hang = ("*",)
    tray.save()
    first = await driver.read()
    assert hung(first) == ["0009:01:00.0"]
    assert len([g for g in first["gpus"] if g.get("rows_pending") is False]) == 3
    started = time.monotonic()
    again = await driver.read()
    assert time.monotonic() - started < first["gpus"][1]["hung_s"]
    assert again["gpus"][1]["hung_s"] > first["gpus"][1]["hung_s"]
    assert driver.hung == ("0009:01:00.0",)
    pid = driver.pid
    tray.state.gpus[1].hang = ()
    tray.save()
    await until(driver.read, lambda r: not hung(r))
    assert (driver.pid, driver.hung) == (pid, ())


async def test_at_most_one_thread_is_ever_stuck_per_gpu(tray: Tray) -> None:
    """However often it is asked, a stuck GPU holds one thread, in one process that is left alone."""
    driver = tray.driver(deadline_s=0.2)
    await warm(driver)
    pid, threads = driver.pid, _threads(driver)
    tray.state.gpus[0].hang = tray.state.gpus[2].hang = ("nvmlDeviceGetFieldValues",)
    tray.save()
    for _ in range(5):
        assert hung(await driver.read()) == ["0008:01:00.0", "0018:01:00.0"]
    assert (driver.pid, _threads(driver)) == (pid, threads)


def _threads(driver: ChildDriver) -> int:
    return len(list(Path(f"/proc/{driver.pid}/task").iterdir()))


async def test_a_hung_initialisation_is_named(tray: Tray) -> None:
    """When nvmlInit does not return, the reading says for how long, and later everything is there."""
    tray.state.hang_init = True
    tray.save()
    driver = tray.driver()
    assert (await until(driver.read, lambda r: "hung_s" in r))["gpus"] == []
    tray.state.hang_init = False
    tray.save()
    assert len((await warm(driver))["gpus"]) == 4


async def test_a_child_that_dies_is_replaced_after_a_pause(tray: Tray) -> None:
    """Its death is told in one sentence, about the monitor; a new one takes over."""
    driver = tray.driver(pauses=Pauses(first=0.8, most=0.8))
    await warm(driver)
    assert driver.pid
    os.kill(driver.pid, signal.SIGKILL)
    with pytest.raises(ProbeError, match="died of signal 9"):
        for _ in range(3):  # the news of its death may come a moment after the next question
            await driver.read()
            await asyncio.sleep(0.05)
    with pytest.raises(ProbeError, match="the next one starts in"):
        await driver.read()
    assert len((await warm(driver))["gpus"]) == 4
    assert driver.restarts == 1


async def test_a_child_that_takes_no_question_is_replaced(tray: Tray) -> None:
    """One that reads nothing, so that no call can be under way, is ended and replaced."""
    module = tray.path.with_name("slow_nvml.py")
    module.write_text("import time\ndef forever():\n    time.sleep(3600)\n")
    quick = Pauses(first=0.05, most=0.2, start=0.6)
    env = {**os.environ, "PYTHONPATH": str(tray.path.parent)}
    driver = ChildDriver(DEADLINE_S, nvml="slow_nvml:forever", env=env, pauses=quick)
    tray.drivers.append(driver)
    with pytest.raises(ProbeError, match="took no question"):
        await driver.read()
    await asyncio.sleep(0.1)
    with pytest.raises(ProbeError, match="took no question"):
        await driver.read()
    assert driver.restarts >= 1


@pytest.mark.parametrize("busy", [False, True])
async def test_a_child_that_is_stopped_is_no_hung_driver(tray: Tray, busy: bool) -> None:
    """SIGSTOP, between calls or in one, is about the monitor: it is told to go on, and no GPU is ever called hung."""
    driver = tray.driver(2.0)  # long beside what a busy machine may take to put one question
    await warm(driver)
    pid = driver.pid
    assert pid
    if busy:
        tray.state.gpus[1].hang = ("*",)
        tray.save()
    else:
        os.kill(pid, signal.SIGSTOP)
    reading = asyncio.create_task(driver.read())
    await asyncio.sleep(0.1)
    if busy:
        os.kill(pid, signal.SIGSTOP)
    tray.state.gpus[1].hang = ()
    tray.save()
    with pytest.raises(ProbeError, match="stopped by a signal and is told to go on"):
        await reading
    assert hung(await until(driver.read, lambda r: len(r["gpus"]) == 4)) == []
    assert driver.pid == pid


async def test_the_time_a_child_was_stopped_counts_against_no_gpu(tray: Tray) -> None:
    """A call that the stop interrupted has its whole deadline again once the child goes on; what was overdue before stays named."""
    driver = tray.driver(1.5)
    await warm(driver)
    assert driver.pid
    tray.state.gpus[0].hang = ("*",)
    tray.save()
    assert hung(await driver.read()) == ["0008:01:00.0"]
    tray.state.gpus[1].hang = ("*",)
    tray.save()
    reading = asyncio.create_task(driver.read())
    await asyncio.sleep(0.1)
    os.kill(driver.pid, signal.SIGSTOP)
    with pytest.raises(ProbeError, match="stopped by a signal and is told to go on"):
        await reading
    assert driver.hung == ("0008:01:00.0",)
    reading = asyncio.create_task(driver.read())
    await asyncio.sleep(0.3)
    tray.state.gpus[1].hang = ()
    tray.save()
    assert hung(await reading) == ["0008:01:00.0"]


STAND_IN = """#!{python}
import json, sys
for line in sys.stdin:
    number = json.loads(line).get("read")
    sys.stdout.write({says})
    sys.stdout.flush()
"""


@pytest.mark.parametrize(
    "says",
    [
        "'garbage' * 1000",
        "'[' * 200000 + chr(10)",
        "'x' * 3000000",
        "'[1, 2]' + chr(10)",
        *(
            repr("".join(f"{line}\n" for line in lines))
            for lines in (
                ['{"ack": 1, "asked": [77]}'],
                ['{"ack": 1, "asked": null}'],
                ['{"ack": 1}', '{"opened": 3}'],
                ['{"ack": 1}', '{"opened": {"error": null, "driver": "1", "count": 900000000}}'],
                ['{"ack": 1}', '{"opened": {"error": null, "driver": "1", "count": 1}}', '{"gpu": 0, "data": 5}'],
            )
        ),
    ],
)
async def test_a_child_that_says_what_it_cannot_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    """Whatever comes out of the child that the protocol does not know ends it, as a failure to look: never a GPU that hangs."""
    program = tmp_path / "child"
    program.write_text(STAND_IN.replace("{python}", sys.executable).replace("{says}", says))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    driver = ChildDriver(0.5, pauses=Pauses(first=0.05, most=0.1, start=2.0))
    with pytest.raises(ProbeError, match=r"what the protocol does not know|took no question"):
        await driver.read()
    await driver.close(0.1)


async def test_a_look_is_over_when_it_was_promised_to_be(tray: Tray) -> None:
    """With a driver that never answers, at any stage, a reading ends within the time that those who wait for it count with."""
    promised = longest_read_s(DEADLINE_S, QUICK)
    for stage in ({"hang_init": True}, {"hang_init": False, "gpus": [g for g in tray.state.gpus if g.hang != ("*",)]}):
        for name, value in stage.items():
            setattr(tray.state, name, value)
        if not tray.state.hang_init:
            tray.state.gpus[0].hang = ("*",)
        tray.save()
        async with asyncio.timeout(promised):
            await tray.driver().read()


async def test_who_waits_for_a_reading_waits_long_enough(tmp_path: Path) -> None:
    """The runner gives a read of the GPUs its deadline, its start, and the other probe's turn, whatever deadline is configured."""
    for deadline in (1.0, 10.0, 120.0):
        settings = AgentSettings(node="t", state_dir=tmp_path / str(deadline), listen="", driver_deadline=Duration(deadline))
        agent = Agent(settings, [])
        await agent.start()
        assert agent.runner.deadline_s >= 2 * longest_read_s(deadline)
        await agent.stop()


async def test_a_gpu_that_raises_what_nobody_knows_is_looked_at_again(tray: Tray) -> None:
    """After a list of GPUs changed under the child its answers make no sense; a fresh child sees what is there now."""
    driver = tray.driver(pauses=Pauses(first=0.05, most=0.2, refresh=0.3))
    await warm(driver)
    gone = tray.state.gpus.pop(2)
    tray.save()
    reading = await until(driver.read, lambda r: len(r["gpus"]) == 3)
    assert gone.pci not in [g["pci"] for g in reading["gpus"]]


async def test_a_slow_initialisation_is_not_held_against_the_gpus(tray: Tray) -> None:
    """What initialising took of the time is not counted as a GPU's hang: each has its own deadline, from its own question."""
    tray.state.hang_init = True
    tray.save()
    driver = tray.driver(deadline_s=1.5)
    reading = asyncio.create_task(driver.read())
    await asyncio.sleep(1.2)
    tray.state.hang_init = False
    tray.save()
    got = await reading
    assert not hung(got)
    assert [g["rows_pending"] for g in got["gpus"]] == [False] * 4


async def test_no_old_value_is_passed_off_as_new(tray: Tray) -> None:
    """Every value in a reading was asked for by that reading, from the first one on."""
    driver = tray.driver(deadline_s=10)
    for pending in (1, 0, 1, 0, 1):
        for gpu in tray.state.gpus:
            gpu.set(rows_pending=pending)
        tray.save()
        assert [g["rows_pending"] for g in (await driver.read())["gpus"]] == [bool(pending)] * 4


async def test_library_and_module_that_differ_are_tried_again_by_a_fresh_child(tray: Tray) -> None:
    """Code 18 is the reading's error; a loaded library stays the old one, so another process asks later."""
    tray.state.init_error = 18
    tray.save()
    driver = tray.driver(deadline_s=10)
    reading = await driver.read()
    assert reading["error"]["code"] == 18
    assert driver.pid is None
    tray.state.init_error = 0
    tray.save()
    assert len((await warm(driver))["gpus"]) == 4
    assert driver.restarts == 0


async def test_a_lost_gpu_keeps_its_address(tray: Tray) -> None:
    """A GPU whose handle cannot be had any more is named by the address it had; a fresh child looks again."""
    driver = tray.driver(pauses=Pauses(first=0.05, reopen=0.1, refresh=0.0))
    await warm(driver)
    tray.state.gpus[3].gone = tray.state.gpus[3].no_handle = 15
    tray.save()
    lost = await until(driver.read, lambda r: any("error" in g for g in r["gpus"]))
    first = driver.pid
    lost = await until(driver.read, lambda r: any("error" in g for g in r["gpus"]))
    assert [(g["pci"], g["error"]["code"]) for g in lost["gpus"] if "error" in g] == [("0019:01:00.0", 15)]
    assert driver.pid != first


async def test_addresses_are_forgotten_when_the_count_changes(tray: Tray) -> None:
    """With one GPU fewer the indices mean other GPUs, so none is named by an old index."""
    driver = tray.driver(pauses=Pauses(first=0.05, refresh=0.0))
    await warm(driver)
    tray.state.gpus[0].gone = 15
    tray.save()
    await until(driver.read, lambda r: any("error" in g for g in r["gpus"]))
    del tray.state.gpus[0]
    tray.state.gpus[0].no_handle = 15
    tray.save()
    reading = await until(driver.read, lambda r: len(r["gpus"]) == 3)
    assert [g["pci"] for g in reading["gpus"]] == [None, "0018:01:00.0", "0019:01:00.0"]


async def test_the_driver_is_let_go_of_for_a_repair(tray: Tray) -> None:
    """Inside ``released`` no process of ours holds the driver; afterwards it is read again."""
    driver = tray.driver()
    await warm(driver)
    pid = driver.pid
    async with driver.released() as free:
        assert free
        assert not Path(f"/proc/{pid}").exists()
    assert len((await warm(driver))["gpus"]) == 4


async def test_a_stuck_driver_cannot_be_let_go_of(tray: Tray) -> None:
    """With a call under way the child is not killed for a repair, and the caller is told."""
    driver = tray.driver(deadline_s=0.2)
    await warm(driver)
    tray.state.gpus[0].hang = ("*",)
    tray.save()
    assert hung(await driver.read())
    pid = driver.pid
    async with driver.released() as free:
        assert not free
    assert driver.pid == pid


async def test_close_ends_even_a_stuck_child_and_soon(tray: Tray) -> None:
    """At shutdown the child is asked, waited for, and only then killed."""
    driver = tray.driver(deadline_s=0.2)
    await warm(driver)
    tray.state.gpus[0].hang = ("*",)
    tray.save()
    await driver.read()
    pid = driver.pid
    await driver.close(0.2)
    assert not Path(f"/proc/{pid}").exists()
    assert driver.pid is None


async def test_the_child_outlives_signals_meant_for_its_parent(tray: Tray) -> None:
    """Ctrl-C in a terminal and a TERM to the whole group leave a call under way alone."""
    driver = tray.driver()
    await warm(driver)
    pid = driver.pid
    assert pid
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    assert len((await driver.read())["gpus"]) == 4
    assert driver.pid == pid


def test_the_child_speaks_lines_and_ends_with_its_parent(tmp_path: Path) -> None:
    """Question, acknowledgement, answers; the end of standard input is the parent's death."""
    path = tmp_path / "nvml.json"
    gb200_tray().save(path)
    command = [sys.executable, "-m", "sentinel.agent.driver_child", FAKE]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env={**os.environ, STATE_FILE: str(path)}, bufsize=0) as child:
        assert child.stdin
        assert child.stdout
        said: list[dict[str, Any]] = []
        for number, lines in ((1, 2), (2, 7)):
            child.stdin.write(b'{"read":%d}\n' % number)
            while len(said) < lines:
                line = json.loads(child.stdout.readline())
                listens = line.pop("listens", None)  # of the listener: with an acknowledgement and by itself, whenever it changes
                said += [line] if line else []
                assert line or listens
        child.stdin.close()
        assert child.wait(30) == 0
    assert said[0] == {"ack": 1, "asked": []}
    assert said[1] == {"opened": {"error": None, "driver": "580.159.04", "count": 4}}
    assert said[2] == {"ack": 2, "asked": [0, 1, 2, 3]}
    assert sorted(x["gpu"] for x in said[3:]) == [0, 1, 2, 3]


async def test_our_own_fault_is_not_called_a_hang(tray: Tray) -> None:
    """A bug while reading a GPU is told as such, for that GPU, and the thread lives on."""
    tray.state.gpus[2].set(pids=[1])
    tray.state.gpus[2].answers["nvmlDeviceGetRepairStatus"] = []  # a shape that no driver has
    tray.save()
    driver = tray.driver()
    reading = await warm(driver)
    assert "IndexError" in reading["gpus"][2]["failed"]
    found = GpuProbe(Context(node="n", driver=driver))
    findings = found.assess(await found.read(), {}, {"gpus": 4})
    assert [f.check for f in findings if f.present] == ["gpu.unreadable"]
    tray.state.gpus[2].set(repair_pending=False)
    tray.save()
    await until(driver.read, lambda r: r["gpus"][2].get("rows_pending") is False)


# -- which probes run ---------------------------------------------------------------------------------------------------------


def points(**values: str) -> list[EntryPoint]:
    return [EntryPoint(name, value, "sentinel.probes") for name, value in values.items()]


def test_one_broken_site_probe_leaves_the_others_alone() -> None:
    """A probe that cannot be imported, or is none, is told and left out."""
    broken: dict[str, Exception] = {}
    found = load_probes(
        AgentSettings(node="t01"),
        None,
        found=points(gpu="probes.gpu:GpuProbe", site="no_such_module:Probe", odd="pathlib:Path"),
        on_broken=broken.__setitem__,
    )
    assert [p.name for p in found] == ["gpu"]
    assert sorted(broken) == ["odd", "site"]


def test_a_probes_own_table_reaches_it() -> None:
    """Options come from the configuration, an override wins, and ``enabled = false`` leaves a probe out."""
    settings = AgentSettings(node="t01", probes={"gpu": {"interval": "2s"}})
    assert context(settings, "gpu", None, {"interval": "9s"}).options == {"interval": "9s"}
    (probe,) = load_probes(settings, None, found=points(gpu="probes.gpu:GpuProbe"))
    assert isinstance(probe, Probe)
    assert interval_s(settings, probe) == 2.0
    assert interval_s(AgentSettings(node="t01"), probe) == probe.interval_s
    off = AgentSettings(node="t01", probes={"gpu": {"enabled": False}})
    assert load_probes(off, None, found=points(gpu="probes.gpu:GpuProbe")) == []


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"gpuu": {}}, r"agent\.probes\.gpuu: no such probe; installed are gpu"),
        ({"gpu": {"enabled": "no"}}, r"agent\.probes\.gpu\.enabled: expected true or false, got 'no'"),
        ({"gpu": {"intervall": "5s"}}, r"agent\.probes\.gpu: unknown option 'intervall'"),
    ],
)
def test_a_wrong_probe_table_is_one_sentence(table: dict[str, dict[str, Any]], sentence: str) -> None:
    """What was wrong and where, before anything runs."""
    with pytest.raises(ConfigError, match=sentence):
        load_probes(AgentSettings(node="t01", probes=table), None, found=points(gpu="probes.gpu:GpuProbe"))


@pytest.mark.parametrize("value", ["5", 5, "-5s", "0s", "1ms"])
def test_a_wrong_interval_is_one_sentence(value: Any) -> None:
    """An interval is a duration, and long enough that its probe is no busy loop."""
    settings = AgentSettings(node="t01", probes={"gpu": {"interval": value}})
    (probe,) = load_probes(settings, None, found=points(gpu="probes.gpu:GpuProbe"))
    with pytest.raises(ConfigError, match=r"agent\.probes\.gpu\.interval: expected"):
        interval_s(settings, probe)

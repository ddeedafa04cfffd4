"""NVML's own Xid events: heard by one thread of the real driver child over a simulated NVML, and kept by its parent."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest

from probes import Context, ProbeError
from probes.gpu import GpuProbe
from probes.kernel_log import KernelLogProbe
from probes.thresholds import load, using
from sentinel.agent import driver_listener
from sentinel.agent.assembly import Agent
from sentinel.agent.driver import ChildDriver
from sentinel.agent.driver_heard import KINDS, Heard
from sentinel.agent.driver_listener import CODES, Listener, raw_s
from sentinel.agent.driver_protocol import Listens, Pauses, Said
from sentinel.config import AgentSettings
from sentinel.model import Finding
from sentinel.testing.kmsg import KERNEL, USER, record
from sentinel.testing.nvml import FakeNvml
from sentinel.testing.nvml_kinds import gb200_tray
from sentinel.testing.nvml_state import NOT_SUPPORTED, STATE_FILE, FakeState

FAKE = "sentinel.testing.nvml:from_file"
QUICK = Pauses(first=0.05, most=0.2, steady=60.0, reopen=0.1, refresh=60.0)
PCI = "0008:01:00.0"


class Tray:
    def __init__(self, path: Path) -> None:
        self.path, self.state = path, gb200_tray()
        self.save()
        self.driver = self.made(deadline_s=0.6)

    def made(self, deadline_s: float) -> ChildDriver:
        self.driver = ChildDriver(deadline_s, nvml=FAKE, env={**os.environ, STATE_FILE: str(self.path)}, pauses=QUICK)
        return self.driver

    def save(self) -> None:
        self.state.save(self.path)

    async def until(self, good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        return await until(self.driver.read, lambda r: good(r["xid_events"]))


async def until(read: Callable[[], Awaitable[dict[str, Any]]], good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    end = time.monotonic() + 20
    while True:
        try:
            if good(reading := await read()):
                return reading
        except ProbeError:
            pass
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.05)


@pytest.fixture
async def tray(tmp_path: Path) -> AsyncIterator[Tray]:
    made = Tray(tmp_path / "nvml.json")
    yield made
    made.state = FakeState()  # releases whatever hangs
    made.save()
    await made.driver.close(0.2)


def heard(events: dict[str, Any]) -> list[tuple[Any, int, int]]:
    return [(h["pci"], h["xid"], h["count"]) for h in events["heard"]]


async def test_an_event_is_heard_with_its_gpu_and_counted(tray: Tray) -> None:
    """Every GPU is listened to; an Xid raised after that arrives by address and code, and the same one again raises the count."""
    first = await tray.until(lambda e: len(e["listening"]) == 4)
    assert first["xid_events"]["heard"] == []
    tray.state.gpus[0].raise_xid(31).raise_xid(31)
    tray.state.gpus[1].raise_xid(79)
    tray.save()
    events = (await tray.until(lambda e: len(e["heard"]) == 2 and e["heard"][0]["count"] == 2))["xid_events"]
    assert heard(events) == [(PCI, 31, 2), ("0009:01:00.0", 79, 1)]
    for entry in events["heard"]:
        assert entry["since"] <= entry["after"] <= entry["at"] <= events["now"]
    reading = await GpuProbe(Context(node="n", driver=tray.driver)).read()
    assert heard(reading.data["xid_events"]) == heard(events)  # a gpu reading carries them


async def test_a_gpu_that_knows_no_such_event_is_not_listened_to(tray: Tray) -> None:
    """Not supported, by its mask or by an error, is not the same as having heard nothing."""
    tray.state.gpus[0].event_types = NOT_SUPPORTED
    tray.state.gpus[2].event_types = 0x7
    tray.save()
    reading = await tray.until(lambda e: len(e["listening"]) > 0)
    assert sorted(reading["xid_events"]["listening"]) == ["0009:01:00.0", "0019:01:00.0"]


async def test_a_gpu_that_hangs_stops_no_event(tray: Tray) -> None:
    """While one GPU's own thread is stuck in the driver, another GPU's Xid is heard."""
    await tray.until(lambda e: len(e["listening"]) == 4)
    tray.state.gpus[1].hang = ("*",)
    tray.save()
    await until(tray.driver.read, lambda r: any("hung_s" in g for g in r["gpus"]))
    tray.state.gpus[0].raise_xid(95)
    tray.save()
    reading = await tray.until(lambda e: bool(e["heard"]))
    assert heard(reading["xid_events"]) == [(PCI, 95, 1)]
    assert [g["pci"] for g in reading["gpus"] if "hung_s" in g] == ["0009:01:00.0"]


async def test_a_wait_that_hangs_stops_no_reading(tray: Tray) -> None:
    """A listener stuck in the driver is called deaf after a while; the GPUs are read all the same, and close ends it."""
    await tray.until(lambda e: len(e["listening"]) == 4)
    tray.state.hang_wait = True
    tray.save()
    reading = await tray.until(lambda e: not e["listening"])
    assert [g["rows_pending"] for g in reading["gpus"]] == [False] * 4
    async with tray.driver.released() as free:
        assert not free  # a call is under way in that process
    began = time.monotonic()
    await tray.driver.close(0.2)
    assert time.monotonic() - began < 5
    assert tray.driver.pid is None


async def test_the_record_outlives_the_child_that_heard_it(tray: Tray) -> None:
    """Let go of for a repair the child ends, and its event set with it; the next one listens anew and the count goes on."""
    await tray.until(lambda e: len(e["listening"]) == 4)
    tray.state.gpus[0].raise_xid(13)
    tray.save()
    before = (await tray.until(lambda e: bool(e["heard"])))["xid_events"]
    pid = tray.driver.pid
    async with tray.driver.released() as free:
        assert (free, tray.driver.pid) == (True, None)
        assert not Path(f"/proc/{pid}").exists()
    after = (await tray.until(lambda e: len(e["listening"]) == 4))["xid_events"]
    assert heard(after) == [(PCI, 13, 1)]  # an old event is not heard a second time
    assert after["listening"][PCI] > before["listening"][PCI]
    tray.state.gpus[0].raise_xid(13)
    tray.save()
    await tray.until(lambda e: heard(e) == [(PCI, 13, 2)])


# -- the listener alone -------------------------------------------------------------------------------------------------------


class Ear:
    """A listener in this process, and what it sends."""

    def __init__(self, state: FakeState) -> None:
        self.sent: list[dict[str, Any]] = []
        self.waits = self.sets = self.freed = 0
        ear = self

        class Counting(FakeNvml):
            def nvmlEventSetCreate(self) -> Any:
                ear.sets += 1
                return super().nvmlEventSetCreate()

            def nvmlEventSetWait_v2(self, events: Any, timeout_ms: int) -> Any:
                ear.waits += 1
                return super().nvmlEventSetWait_v2(events, timeout_ms)

            def nvmlEventSetFree(self, events: Any) -> None:
                ear.freed += 1
                super().nvmlEventSetFree(events)

        self.listener = Listener(Counting(state), self.sent.append, pause_s=0.2)
        self.listener.start(len(state.gpus))

    def wait(self, good: Callable[[], bool]) -> None:
        end = time.monotonic() + 10
        while not good():
            assert time.monotonic() < end, "it never came"
            time.sleep(0.02)

    def events(self) -> list[Any]:
        return [tuple(x[:3]) for m in list(self.sent) for x in m.get("xids", ())]


def test_a_lost_gpu_ends_the_set_and_the_others_are_listened_to_again() -> None:
    """What was heard before the loss is told, the set is freed, and the next one has the GPUs that are left."""
    state = gb200_tray()
    ear = Ear(state)
    ear.wait(lambda: len(ear.listener.state()["since"]) == 4)
    state.gpus[1].raise_xid(79)
    state.gpus[1].gone = 15
    ear.wait(lambda: len(ear.listener.state()["since"]) == 3)
    assert ear.events() == [("0009:01:00.0", 79, 1)]
    assert ear.freed == ear.sets - 1
    state.gpus[3].raise_xid(48)
    ear.wait(lambda: len(ear.events()) == 2)


@pytest.mark.parametrize("code", [10, 15, 999, 2])
def test_whatever_a_wait_answers_nothing_spins(code: int) -> None:
    """A wait that fails or comes back at once, for ever, is asked a few times a second at most."""
    state = gb200_tray()
    state.wait_error = code
    ear = Ear(state)
    ear.wait(lambda: ear.waits > 0)
    time.sleep(0.6)
    assert ear.waits < 10
    assert ear.sets - ear.freed in (0, 1)  # each is freed before the next is made


def test_a_storm_of_events_is_few_messages_and_bounded_memory() -> None:
    """Three thousand events of garbage codes arrive counted, none is lost, and no more than a bounded number is ever kept."""
    state = gb200_tray()
    ear = Ear(state)
    ear.wait(lambda: len(ear.listener.state()["since"]) == 4)
    state.gpus[0].xids += [31] * 2000 + [(1 << 64) - 1, *range(10**6, 10**6 + 999)]
    ear.wait(lambda: sum(n for _, _, n in ear.events()) == 3000)
    told = [m["xids"] for m in ear.sent if "xids" in m]
    assert len(told) < 60
    assert max(map(len, told)) <= CODES
    assert (PCI, (1 << 64) - 1) in {(p, x) for p, x, _ in ear.events()}


def test_an_event_of_an_unknown_device_belongs_to_no_gpu() -> None:
    """A handle that was never registered names nobody: the number is kept, the GPU is not guessed."""
    sent: list[dict[str, Any]] = []
    listener = Listener(FakeNvml(gb200_tray()), sent.append)
    listener._hear(listener._gpus.get(driver_listener._place(7)), 31)
    assert [x[:3] for x in sent[-1]["xids"]] == [[None, 31, 1]]


def test_the_parents_record_is_bounded_and_keeps_the_latest() -> None:
    """Past its bound the kind that was heard longest ago goes; a child that ended is listening to nobody."""
    record = Heard()
    record.take(Said(listens=Listens(since={PCI: 1.0})))
    for code in range(KINDS + 10):
        record.take(Said(xids=[(PCI, code, 1, 1.0, 2.0, 3.0), (PCI, 5, 1, 1.0, 2.0, 3.0)]))
    kept = {h["xid"]: h["count"] for h in record.answer()["heard"]}
    assert len(kept) == KINDS
    assert kept[5] == KINDS + 11
    assert record.answer()["listening"] == {PCI: 1.0}
    record.child_ended()
    assert record.answer()["listening"] == {}
    assert record.answer()["now"] <= raw_s()


# -- the whole agent ----------------------------------------------------------------------------------------------------------


async def test_a_deaf_log_is_noticed_and_a_heard_one_is_not(tray: Tray, tmp_path: Path) -> None:
    """The real agent with both probes: an Xid with its kernel line is one fault; one whose only line user space wrote is a miss."""
    log = tmp_path / "kmsg"
    log.touch()
    state = tmp_path / "state"
    state.mkdir()
    settings = AgentSettings(node="n", state_dir=state, kmsg=log, listen="")
    settings = msgspec.structs.replace(settings, probes={"gpu": {"interval": "300ms"}, "kernel_log": {"interval": "300ms"}})
    context = Context(node="n", kmsg=log, state=state, driver=tray.made(deadline_s=10.0))
    (tmp_path / "site.toml").write_text("[kernel_log]\nmatch_s = 2.0\nmatch_again_s = 2.0\n")
    found: list[Finding] = []

    async def seen(check: str) -> None:
        end = time.monotonic() + 20
        while check not in {f.check for f in found}:
            assert time.monotonic() < end, f"{check} never came, only {agent._compare._memory}"
            await asyncio.sleep(0.1)

    with using(load(tmp_path / "site.toml")):
        agent = Agent(settings, [GpuProbe(context), KernelLogProbe(context)])
        take = agent.known.take
        agent.known.take = lambda probe, told: found.extend(told) or take(probe, told)  # type: ignore[method-assign,func-returns-value]
        await agent.start()
        try:
            await tray.until(lambda e: len(e["listening"]) == 4 and e["now"] - max(e["listening"].values()) > 4.0)
            for lines, (code, facility) in enumerate(((31, KERNEL), (79, USER)), 1):
                with log.open("ab") as file:
                    file.write(record(f"NVRM: Xid (PCI:0008:01:00): {code}, pid=1, name=x, y", lines, facility=facility))
                tray.state.gpus[0].raise_xid(code)
            tray.save()
            await seen("kernel_log.missed_xid")
        finally:
            await agent.stop()
    told = [f for f in found if f.check in ("kernel_log.missed_xid", "nvml.untold_xid", "xid.31", "xid.79")]
    assert [(f.check, f.facts["xid"]) for f in told] == [("xid.31", 31), ("kernel_log.missed_xid", 79)]
    assert 'sentinel_xid_listening{gpu="0008:01:00.0"} 1.0' in generate_latest(agent.metrics.registry).decode()

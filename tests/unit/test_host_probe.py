"""The host probe: what /proc and /sys show of a node becomes the right finding, and what they hide becomes none."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes import Context, ProbeError
from probes.gpu import GpuProbe
from probes.host import HostProbe, library_versions, module_version, sleepers
from probes.thresholds import shipped
from sentinel.model import Action, Finding, Kind, Reading, Severity, Suspect

BY = shipped().host
VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.159.04  Release Build  (builder@host)\nGCC version: 13\n"
IN_DRIVER: dict[str, Any] = {"wchan": "os_acquire_rwlock_read", "stack": ""}


class Machine:
    """A node's /proc, /sys, libraries and state folder below one root."""

    def __init__(self, root: Path) -> None:
        self.root, self.at, self.mono = root, 1_800_000_000.0, 1000.0
        self.memory: dict[str, Any] = {}
        self.clock: dict[str, Any] | None = {"status": 1, "maxerror_us": 500}
        for name in ("proc/sys/kernel/random", "proc/pressure", "proc/driver/nvidia", "sys/bus/pci/devices", "lib", "state"):
            (root / name).mkdir(parents=True)
        self.write("proc/meminfo", "MemTotal:       960000000 kB\nMemFree:  1 kB\nMemAvailable:   800000000 kB\n")
        self.write("proc/pressure/memory", "some avg10=0.00 avg60=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")
        self.write("proc/vmstat", "nr_free_pages 5\noom_kill 2\n")
        self.write("proc/sys/kernel/random/boot_id", "one\n")
        self.write("proc/sys/kernel/hung_task_detect_count", "0\n")
        self.write("proc/driver/nvidia/version", VERSION)
        self.library("580.159.04")
        for pci in ("0008:01:00.0", "0009:01:00.0"):
            self.gpu(pci)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def library(self, version: str) -> None:
        link = self.root / "lib/libnvidia-ml.so.1"
        link.unlink(missing_ok=True)
        self.write(f"lib/libnvidia-ml.so.{version}", "")
        link.symlink_to(f"libnvidia-ml.so.{version}")

    def gpu(self, pci: str, driver: str | None = "nvidia", kind: str = "0x030200") -> None:
        device = self.root / "sys/bus/pci/devices" / pci
        self.write(f"sys/bus/pci/devices/{pci}/vendor", "0x10de\n")
        self.write(f"sys/bus/pci/devices/{pci}/class", f"{kind}\n")
        if driver:
            (device / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")

    def process(self, pid: int, state: str = "D", switches: int = 7, started: int = 99, **files: Any) -> None:
        self.write(f"proc/{pid}/stat", f"{pid} (a) b (c) {state} 1 " + "0 " * 17 + f"{started} 0 0\n")
        self.write(f"proc/{pid}/status", f"Name:\tx\nvoluntary_ctxt_switches:\t{switches}\nnonvoluntary_ctxt_switches:\t1\n")
        for name, text in files.items():
            self.write(f"proc/{pid}/{name}", text)

    def probe(self, **options: Any) -> HostProbe:
        context = Context(node="t01", proc=self.root / "proc", sys=self.root / "sys", state=self.root / "state",
                          options={"libraries": [str(self.root / "lib")], **options})  # fmt: skip
        return HostProbe(context, clock=lambda: self.clock)

    def look(self, after_s: float = 30.0, step_s: float = 0.0, **data: Any) -> list[Finding]:
        self.at, self.mono = self.at + after_s + step_s, self.mono + after_s
        read = asyncio.run(self.probe().read())
        # The disk of this test's machine is not what is judged.
        plenty = {"free_mib": 10_000, "total_mib": 20_000, "free_files": 5, "read_only": False}
        data = json.loads(json.dumps({**read.data, "mono": self.mono, "spool": plenty, **data}))
        reading = Reading(probe="host", node="t01", at=self.at, boot_id=read.boot_id, data=data)
        found = self.probe().assess(reading, self.memory, {"gpus": 2})
        self.memory = json.loads(json.dumps(self.memory))
        return found

    def present(self, *args: Any, **kwargs: Any) -> dict[str, Finding]:
        return {f.check: f for f in self.look(*args, **kwargs) if f.present}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_healthy_node_has_nothing_present(machine: Machine) -> None:
    """Every state is measured and fine; a process at work, and one that waits for a disk, are no findings."""
    machine.process(5, "S")
    machine.process(6, "D", wchan="io_schedule")
    for _ in range(20):
        assert machine.present() == {}
    assert {f.check for f in machine.look()} == {
        "driver.process_hung", "driver.version_mismatch", "host.gpu_count", "host.gpu_unbound", "host.clock_unsynchronised",
        "host.memory_pressure", "host.spool_space",
    }  # fmt: skip


# -- stuck in the driver ------------------------------------------------------------------------------------------------------


def test_a_process_stuck_in_the_driver_grows_from_doubt_to_fact(machine: Machine) -> None:
    """The same sleep in the driver is nothing at first, noted after a minute, and fatal after the time of several time-outs."""
    machine.process(77, **IN_DRIVER)
    seen = {round(n * 30.0): machine.present().get("driver.process_hung") for n in range(8)}
    assert seen[0] is None and seen[30] is None
    assert (noted := seen[round(BY.stuck_noted_s)]) and noted.severity is Severity.WARNING
    assert (sure := seen[round(BY.stuck_sure_s)]) and (sure.severity, sure.action) == (Severity.FATAL, Action.REBOOT_NODE)
    assert sure.certainty >= 0.8 and sure.id == noted.id and "os_acquire_rwlock_read" in " ".join(sure.evidence)
    machine.process(77, "S", **IN_DRIVER)
    assert machine.present() == {}


def test_a_busy_process_that_is_often_in_the_driver_is_not_stuck(machine: Machine) -> None:
    """Found in the driver at every look, but its context switches go on: it works."""
    for n in range(20):
        machine.process(77, switches=n, **IN_DRIVER)
        assert machine.present() == {}


def test_another_process_with_the_same_number_begins_anew(machine: Machine) -> None:
    """A pid that was given to a new process does not inherit how long the old one was stuck."""
    for n in range(12):
        machine.process(77, started=n // 2, **IN_DRIVER)
        assert machine.present() == {}


@pytest.mark.parametrize(("files", "fatal"), [
    ({"wchan": "nv_wait_for_something"}, True),
    ({"wchan": "0", "stack": "[<0>] __schedule+0x1/0x2\n[<0>] _nv031337rm+0x18/0x50 [nvidia]\n"}, True),
    ({"wchan": "uvm_va_space_down_read"}, True),
    ({"wchan": "nvme_wait_freeze"}, None),
    ({"wchan": "rpc_wait_bit_killable"}, None),  # NFS
    ({}, None),
])  # fmt: skip
def test_where_it_sleeps_decides(machine: Machine, files: dict[str, Any], fatal: bool | None) -> None:
    """Only a function of NVIDIA's modules makes it the driver's; a disk, a network file system or nothing known does not."""
    machine.process(77, **files)
    for _ in range(8):
        found = machine.present()
    assert ({c: f.severity for c, f in found.items()} == ({"driver.process_hung": Severity.FATAL} if fatal else {}))


def test_an_open_device_alone_is_doubt(machine: Machine) -> None:
    """A process in uninterruptible sleep that holds the GPU and shows no function may hang in the driver: never fatal."""
    machine.process(77)
    (machine.root / "proc/77/fd").mkdir()
    (machine.root / "proc/77/fd/3").symlink_to("/dev/nvidia0")
    for _ in range(12):
        found = machine.present()
    assert found["driver.process_hung"].severity is Severity.WARNING and found["driver.process_hung"].certainty < 0.8


def test_a_storm_of_sleepers_is_bounded(machine: Machine) -> None:
    """However many processes hang, a reading stays small."""
    for pid in range(100, 300):
        machine.process(pid, **IN_DRIVER)
    got = sleepers(machine.root / "proc")
    assert got is not None and len(got) == 32


# -- the driver's versions ----------------------------------------------------------------------------------------------------


def test_a_library_that_was_replaced_is_seen_without_the_driver(machine: Machine) -> None:
    """The library on disk differs from the loaded module: the monitor's check, as a part of its own beside the gpu probe's."""
    machine.library("580.200.01")
    found = machine.present()["driver.version_mismatch"]
    assert (found.severity, found.action, found.suspect) == (Severity.WARNING, Action.REBOOT_NODE, Suspect.MONITOR)
    gpu = GpuProbe(Context(node="t01"))
    blind = Reading(probe="gpu", node="t01", at=1.0, data={"error": {"code": 18, "text": "mismatch"}, "gpus": []})
    same = gpu.assess(blind, {}, {})[0]
    assert same.check == found.check and same.component != found.component and same.component.covers(found.component)
    machine.library("580.159.04")
    assert machine.present() == {}


@pytest.mark.parametrize(("text", "version"), [
    (VERSION, "580.159.04"),
    ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n", "535.104.05"),
    ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  610.12  Release Build\n", "610.12"),
    ("", None), ("NVRM version: none\n", None), ("GCC version: 580.159.04 Kernel Module 580.159.04\n", None),
])  # fmt: skip
def test_the_modules_version_is_read_from_its_own_line(machine: Machine, text: str, version: str | None) -> None:
    """Every spelling that the module prints is understood, and nothing else is taken for one."""
    machine.write("proc/driver/nvidia/version", text)
    assert module_version(machine.root / "proc") == version


def test_without_a_module_or_a_library_nothing_is_said(machine: Machine) -> None:
    """A driver that is not loaded, or a library that lives in a container, is not measured."""
    (machine.root / "lib/libnvidia-ml.so.1").unlink()
    assert library_versions((machine.root / "lib",)) == []
    assert "driver.version_mismatch" not in {f.check for f in machine.look()}


# -- the rest of the node -----------------------------------------------------------------------------------------------------


def test_gpus_on_the_bus_are_counted(machine: Machine) -> None:
    """A GPU that left the bus is named; switches and display cards are none; one without a driver is found as that."""
    machine.gpu("0000:07:00.0", kind="0x068000")
    machine.gpu("0000:08:00.0", kind="0x030000")
    assert machine.present() == {}
    device = machine.root / "sys/bus/pci/devices/0009:01:00.0"
    (device / "driver").unlink()
    assert set(machine.present()) == {"host.gpu_unbound"}
    (device / "vendor").unlink()
    found = machine.present()["host.gpu_count"]
    assert found.facts["gone"] == ["0009:01:00.0"] and found.severity is Severity.WARNING


def test_memory_must_be_short_again_and_again(machine: Machine) -> None:
    """One bad moment is nothing; it is the application's, and a kill is told once."""
    machine.write("proc/pressure/memory", "some avg60=60.00\nfull avg10=1.00 avg60=45.00 avg300=0.00 total=0\n")
    for _ in range(BY.memory_run - 1):
        assert machine.present() == {}
    found = machine.present()["host.memory_pressure"]
    assert (found.severity, found.suspect) == (Severity.WARNING, Suspect.APP)
    machine.write("proc/pressure/memory", "full avg60=0.00\n")
    machine.write("proc/vmstat", "oom_kill 4\n")
    event = machine.present()["host.oom_kill"]
    assert (event.kind, event.count) == (Kind.EVENT, 2)
    assert machine.present() == {}


def test_the_clock_is_judged_by_what_the_kernel_and_its_own_uptime_say(machine: Machine) -> None:
    """Not known to be synchronised is information; a step between two looks is told once; no answer says nothing."""
    machine.clock = {"status": 0x40, "maxerror_us": 16_000_000}
    assert machine.present()["host.clock_unsynchronised"].severity is Severity.INFO
    machine.clock = None
    found = machine.look(step_s=-BY.clock_step_s - 1)
    assert [f.check for f in found if f.present] == ["host.clock_step"]
    assert "host.clock_unsynchronised" not in {f.check for f in found}
    assert machine.present() == {}


@pytest.mark.parametrize("spool", [
    {"free_mib": BY.spool_free_mib - 1, "free_files": 9, "read_only": False},
    {"free_mib": 9999, "free_files": 0, "read_only": False},
    {"free_mib": 9999, "free_files": None, "read_only": True},
])  # fmt: skip
def test_a_spool_without_room_is_the_monitors(machine: Machine, spool: dict[str, Any]) -> None:
    """No bytes, no files left, or a disk that turned read-only: the monitor is to be mended."""
    found = machine.present(spool=spool)["host.spool_space"]
    assert (found.action, found.suspect) == (Action.FIX_MONITOR, Suspect.MONITOR)


def test_tasks_that_the_kernel_calls_hung_are_told_once(machine: Machine) -> None:
    """The kernel's own count rises: an event with how many."""
    machine.present()
    machine.write("proc/sys/kernel/hung_task_detect_count", "3\n")
    assert machine.present()["host.hung_task"].count == 3
    assert machine.present() == {}


def test_a_node_that_shows_nothing_is_not_judged(tmp_path: Path) -> None:
    """Empty /proc and no /sys: nothing is present and hardly anything is measured; without /proc the probe says so."""
    (tmp_path / "proc").mkdir()
    probe = HostProbe(Context(node="t01", proc=tmp_path / "proc", sys=tmp_path / "no", state=tmp_path / "no",
                              options={"libraries": []}), clock=lambda: None)  # fmt: skip
    reading = asyncio.run(probe.read())
    assert [f.check for f in probe.assess(reading, {}, {"gpus": 4})] == ["driver.process_hung"]
    gone = HostProbe(Context(node="t01", proc=tmp_path / "nowhere", state=tmp_path))
    with pytest.raises(ProbeError, match="no folder"):
        asyncio.run(gone.read())


@pytest.mark.parametrize("options", [{"colour": 1}, {"libraries": "x"}, {"libraries": [1]}])
def test_an_option_that_cannot_be_meant_is_named(options: dict[str, Any]) -> None:
    """A wrong option is refused in one sentence that names it."""
    with pytest.raises(ProbeError, match=next(iter(options))):
        HostProbe(Context(node="t01", options=options))


# -- anything at all ----------------------------------------------------------------------------------------------------------

junk = st.binary(max_size=200)
FILES = (
    "proc/77/stat", "proc/77/status", "proc/77/stack", "proc/77/wchan", "proc/meminfo", "proc/pressure/memory", "proc/vmstat",
    "proc/driver/nvidia/version", "proc/sys/kernel/hung_task_detect_count", "sys/bus/pci/devices/0008:01:00.0/vendor",
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys(FILES, junk)))
def test_any_bytes_in_any_file_are_survived(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
    """Whatever stands in the files, the probe reads and judges it, and calls nothing fatal."""
    machine = Machine(tmp_path_factory.mktemp("host"))
    for name, content in files.items():
        path = machine.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"77 (x) D" + content if name == "proc/77/stat" else content)
    for _ in range(2):
        assert not [f for f in machine.look() if f.severity is Severity.FATAL]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KEYS = ("mono", "stuck", "gpus", "module", "libraries", "clock", "memory", "hung_tasks", "spool")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), values), min_size=1, max_size=4))
def test_any_recording_is_judged(datas: list[dict[str, Any]]) -> None:
    """A recording may hold anything under any key; judging it never raises, and its memory stays plain JSON."""
    memory: dict[str, Any] = {}
    for n, data in enumerate(datas):
        HostProbe(Context(node="t01")).assess(Reading(probe="host", node="t01", at=30.0 * n, data=data), memory, {"gpus": 4})
        json.dumps(memory)

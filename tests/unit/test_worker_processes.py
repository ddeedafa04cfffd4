"""Serving processes found in /proc: which they are, where they listen, which GPUs they hold. The tree here is made by hand."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from probes import Context, processes
from probes.worker import WorkerProbe
from tests.unit.standin_worker import StandInVllm, standing

GPU0, GPU1 = "0009:01:00.0", "0019:01:00.0"
VLLM = ("/usr/bin/python3", "/usr/local/bin/vllm", "serve", "meta/llama", "--port", "8100", "--tensor-parallel-size", "2")


class Proc:
    """A hand-made /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "self").mkdir()
        for minor, pci in ((0, GPU0), (1, GPU1)):
            info = root / "driver" / "nvidia" / "gpus" / pci / "information"
            info.parent.mkdir(parents=True)
            info.write_text(f"Model: \t\t NVIDIA GB200\nBus Location: \t {pci}\nDevice Minor: \t {minor}\n")

    def add(self, pid: int, argv: tuple[str, ...], *, parent: int = 1, started: int = 500, files: tuple[str, ...] = (),
            listens: dict[int, int] | None = None, environ: str = "", state: str = "S") -> None:  # fmt: skip
        """``listens``: port → inode."""
        folder = self.root / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "net").mkdir()
        (folder / "cmdline").write_bytes("\0".join(argv).encode() + b"\0")
        (folder / "environ").write_bytes(environ.encode())
        rest = ["0"] * 17
        (folder / "stat").write_text(f"{pid} (a (strange) name) {state} {parent} {' '.join(rest)} {started} 0 0\n")
        for n, target in enumerate([*files, *(f"socket:[{i}]" for i in (listens or {}).values())]):
            (folder / "fd" / str(n)).symlink_to(target)
        lines = [f"  0: 0100007F:{port:04X} 00000000:0000 0A 0:0 0:0 0 0 0 {inode} 1" for port, inode in (listens or {}).items()]
        (folder / "net" / "tcp").write_text("\n".join(["  sl  local_address", *lines, "short line", ""]))


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


@pytest.mark.parametrize(
    ("argv", "engine"),
    [
        (VLLM, "vllm"),
        (("python3", "-m", "vllm.entrypoints.openai.api_server", "--port", "1"), "vllm"),
        (("python3", "-m", "dynamo.vllm", "--model", "x"), "dynamo"),
        (("python3", "-m", "dynamo.mocker"), "dynamo"),
        (("python3", "-m", "dynamo.frontend"), None),
        (("python3", "-m", "dynamo.planner"), None),
        (("vim", "vllm"), None),
        (("VLLM::EngineCore",), None),
        (("grep", "vllm serve"), None),
    ],
)
def test_serving_command_lines_are_told_from_others(argv: tuple[str, ...], engine: str | None) -> None:
    """Frontends, planners, rank processes and people's tools are no workers."""
    assert processes.engine_of(argv) == engine


def test_a_worker_is_its_topmost_process_with_all_its_ranks(proc: Proc) -> None:
    """GPUs of its descendants are its own; an open file that enumeration explains holds no GPU."""
    proc.add(100, VLLM, listens={8100: 11, 40000: 12}, files=("/dev/nvidia0",) * 4 + ("/dev/nvidia1",) * 4)
    proc.add(101, ("VLLM::EngineCore",), parent=100)
    proc.add(102, ("VLLM::Worker_TP0",), parent=101, files=("/dev/nvidia0",) * 14 + ("/dev/nvidia1",) * 4)
    proc.add(103, ("VLLM::Worker_TP1",), parent=101, files=("/dev/nvidia0",) * 4 + ("/dev/nvidia1",) * 14)
    proc.add(104, (*VLLM, "--api-server-count", "2"), parent=100)
    proc.add(200, ("bash",), files=("/dev/nvidia0",) * 20)
    (found,) = processes.find(proc.root)
    assert (found.engine, found.pid, found.started, found.port, found.gpus) == ("vllm", 100, 500, 8100, (GPU0, GPU1))
    assert set(found.family) == {100, 101, 102, 103, 104}
    assert found.ports == (8100, 40000)


def test_a_dynamo_worker_answers_on_its_system_port(proc: Proc) -> None:
    """The port stands in its environment; without one there is nothing to ask."""
    proc.add(100, ("python3", "-m", "dynamo.vllm"), environ="A=1\0DYN_SYSTEM_PORT=19000\0")
    proc.add(101, ("python3", "-m", "dynamo.vllm"), environ="DYN_SYSTEM_PORT=-1")
    assert [(s.pid, s.port) for s in processes.find(proc.root)] == [(100, 19000), (101, None)]


def test_what_may_not_be_looked_into_is_not_measured(proc: Proc) -> None:
    """Somebody else's descriptors are closed to an ordinary user: None, not "holds no GPU"."""
    proc.add(100, VLLM)
    (proc.root / "100" / "fd").rmdir()
    (found,) = processes.find(proc.root)
    assert found.gpus is None


def test_processes_that_end_midway_and_nonsense_are_left_out(proc: Proc) -> None:
    """A pid without files, a stat line that is cut short, a kernel thread."""
    proc.add(100, VLLM)
    (proc.root / "300").mkdir()
    proc.add(301, VLLM)
    (proc.root / "301" / "stat").write_text("301 (x")
    proc.add(302, VLLM)
    (proc.root / "302" / "cmdline").write_bytes(b"")
    assert [s.pid for s in processes.find(proc.root)] == [100]


def test_alive_means_this_very_process(proc: Proc) -> None:
    """A zombie is not alive, nor is another process with a reused pid; without /proc nobody knows."""
    proc.add(100, VLLM)
    proc.add(101, VLLM, state="Z")
    assert processes.alive(proc.root, 100, 500) is True
    assert processes.alive(proc.root, 100, 501) is False
    assert processes.alive(proc.root, 101, 500) is False
    assert processes.alive(proc.root, 999, 500) is False
    assert processes.alive(proc.root / "nowhere", 100, 500) is None


def test_this_very_machine_can_be_read() -> None:
    """The real /proc holds this test's process with its real start time."""
    assert os.getpid() in processes.command_lines(Path("/proc"))
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    assert processes.alive(Path("/proc"), os.getpid(), started) is True
    assert isinstance(processes.find(Path("/proc")), list)


class Driver:
    """Stands in for the driver's child process."""

    async def read(self) -> dict[str, Any]:
        gpus = [{"pci": GPU0, "pids": [102]}, {"pci": GPU1, "pids": [999]}, {"pci": "0029:01:00.0", "hung_s": 12.0}]
        return {"error": None, "driver": "580.159.04", "gpus": gpus}


async def test_a_configured_worker_is_known_by_its_port_and_the_driver_knows_its_gpus(proc: Proc) -> None:
    """The driver counts contexts, so its list wins over open files; others found are reported without a name."""
    proc.add(100, VLLM, listens={8100: 11}, files=("/dev/nvidia1",) * 14)
    proc.add(102, ("VLLM::Worker_TP0",), parent=100)
    proc.add(300, ("python3", "-m", "dynamo.vllm"))
    options = {"workers": [{"name": "decode-01", "url": "http://127.0.0.1:8100"}], "deadline_s": 0.5}
    probe = WorkerProbe(Context(node="t01", proc=proc.root, driver=Driver(), options=options))
    named, other = (await probe.read()).data["workers"]
    assert (named["worker"], named["pid"], named["gpus"], named["gpus_by"]) == ("decode-01", 100, [GPU0], "driver")
    assert (other["worker"], other["label"], other["pid"], other["gpus"]) == ("", "dynamo-300", 300, [])
    assert "health" not in other
    await probe.close()


@pytest.mark.parametrize("named", [False, True])
async def test_an_ended_process_is_missed_only_where_somebody_expects_it(proc: Proc, named: bool) -> None:
    """A worker that was only found by its process ends quietly, as at every roll-out; one in the configuration is gone."""
    server = StandInVllm()
    async with standing(server):
        port = server.url.rpartition(":")[2]
        proc.add(40, ("vllm", "serve", "m", "--port", port))
        workers = [{"name": "w", "url": server.url}] if named else []
        probe = WorkerProbe(Context(node="t", proc=proc.root, options={"scan_s": 0.0, "deadline_s": 2.0, "workers": workers}))
        memory: dict[str, Any] = {}
        assert not [f for f in probe.assess(await probe.read(), memory, {}) if f.present]
        shutil.rmtree(proc.root / "40")
        await server.close()
        said = {f.check: f.present for f in probe.assess(await probe.read(), memory, {})}
        assert said["worker.unreachable"] is named
        await probe.close()

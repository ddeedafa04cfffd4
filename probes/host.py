"""The node itself, as far as serving depends on it: who hangs in the driver, GPUs on the bus, memory, clock, the spool's disk.

This module exists because a driver that hangs takes its callers with it, and the kernel shows that without asking the driver.
What always holds:

* Nothing here opens the driver or runs a program: only files under ``proc`` and ``sys``, ``statvfs`` and ``adjtimex``.
* A process is stuck when its very same sleep lasts from look to look (its context switches stand still), never by one sample.
* A library that differs from the loaded module is seen on disk, by a node whose own driver child still has the old one open.
* What may not be read (another user's process, a kernel without the file) is None, and nothing is said of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from probes import Context, ProbeError
from probes.host_policy import judge_host
from probes.judging import Judge
from sentinel.model import READING_FORMAT, Finding, Reading, pci_address

OPTIONS = frozenset({"enabled", "interval", "libraries"})
LIBRARIES = ("/usr/lib/aarch64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")  # Debian's, others'
NVIDIA, GPU_CLASS = "0x10de", "0x0302"  # PCI vendor; 3D controller: data-centre GPUs, not NVSwitches (0x0680) nor display cards
STUCK_MOST = 32  # processes kept in a reading
_VERSION = re.compile(r"\b(\d{3,4}\.\d{1,4}(?:\.\d{1,4})?)\b")
_SWITCHES = re.compile(r"^(?:non)?voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)
_FULL = re.compile(r"^full .*?avg60=(\d+(?:\.\d+)?)", re.MULTILINE)
_MIB = 1 << 20


class Timex(ctypes.Structure):
    """The head of the kernel's ``struct timex`` (linux/timex.h); the rest is room for what it writes behind it."""

    _fields_ = (
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long), ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long), ("status", ctypes.c_int), ("rest", ctypes.c_byte * 256),
    )  # fmt: skip


def clock_status() -> dict[str, Any] | None:
    """What the kernel knows about its clock: ``status`` (STA_* bits) and ``maxerror_us``; None where it cannot be asked."""
    try:
        timex = Timex()  # modes 0: only asking
        if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)) < 0:
            return None
    except (OSError, AttributeError):
        return None
    return {"status": int(timex.status), "maxerror_us": int(timex.maxerror)}


class HostProbe:
    name = "host"
    interval_s = 30.0

    def __init__(self, context: Context, *, clock: Callable[[], dict[str, Any] | None] = clock_status) -> None:
        unknown = sorted(set(context.options) - OPTIONS)
        if unknown:
            raise ProbeError(f"unknown option {unknown[0]!r}; the host probe knows {', '.join(sorted(OPTIONS))}")
        where = context.options.get("libraries", LIBRARIES)
        if not isinstance(where, list | tuple) or not all(isinstance(p, str) for p in where):
            raise ProbeError(f"libraries: wanted a list of folders, got {where!r}")
        self._context, self._clock = context, clock
        self._libraries = tuple(map(Path, where))
        self._looking_since: float | None = None

    async def read(self) -> Reading:
        """Look once, in a thread of its own: a file system that has gone away must not hold up the agent.

        Raises ProbeError when ``proc`` cannot be read at all, and while an earlier look has not come back.
        """
        if self._looking_since is not None:
            raise ProbeError(f"an earlier look has not come back for {time.monotonic() - self._looking_since:.0f} s")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Reading] = loop.create_future()
        self._looking_since = time.monotonic()

        def look() -> None:
            reading: Reading | Exception
            try:
                reading = self._look()
            except Exception as error:  # told to whoever asked
                reading = error
            self._looking_since = None
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
                loop.call_soon_threadsafe(_settle, answer, reading)

        threading.Thread(target=look, name="host probe", daemon=True).start()
        return await answer

    def _look(self) -> Reading:
        proc = self._context.proc
        if not proc.is_dir():
            raise ProbeError(f"{proc} is no folder that can be read")
        data: dict[str, Any] = {
            "mono": time.clock_gettime(time.CLOCK_BOOTTIME),
            "stuck": sleepers(proc),
            "gpus": gpus_on_bus(self._context.sys),
            "module": module_version(proc),
            "libraries": library_versions(self._libraries),
            "clock": self._clock(),
            "memory": memory(proc),
            "hung_tasks": _number(_text(proc / "sys/kernel/hung_task_detect_count")),
            "spool": space(self._context.state),
        }
        boot = (_text(proc / "sys/kernel/random/boot_id") or "").strip()
        return Reading(probe=self.name, node=self._context.node, at=time.time(), boot_id=boot, data=data)

    def assess(self, reading: Reading, memory: dict[str, Any], expected: Mapping[str, Any]) -> list[Finding]:
        """Judge one reading. ``expected``: ``gpus`` where known. Raises ProbeError for a reading of another format."""
        if reading.format != READING_FORMAT:
            raise ProbeError(f"a host reading of format {reading.format}; this sentinel knows format {READING_FORMAT}")
        if memory.get("boot") not in (None, reading.boot_id):
            memory.clear()
        memory["boot"] = reading.boot_id
        judge = Judge(reading.node, reading.at, memory)
        judge_host(judge, reading.data, memory, expected)
        return judge.findings()

    def describe(self, reading: Reading) -> list[str]:
        """The reading in words."""
        data = reading.data
        gpus, stuck, spool, memory = (data.get(k) for k in ("gpus", "stuck", "spool", "memory"))
        return [
            f"{'?' if gpus is None else len(gpus)} GPUs on the bus, driver module {data.get('module') or 'not loaded'}",
            f"{'?' if stuck is None else len(stuck)} processes in uninterruptible sleep",
            "memory not measured" if not memory else f"{memory['available_mib']} of {memory['total_mib']} MiB available",
            "spool not measured" if not spool else f"{spool['free_mib']} MiB free for the spool",
        ]

    def commit(self, reading: Reading) -> None:
        """Nothing is consumed by looking."""

    async def close(self) -> None:
        """Nothing is held open."""


def _settle(answer: asyncio.Future[Reading], reading: Reading | Exception) -> None:
    if answer.done():  # given up meanwhile
        return
    if isinstance(reading, Exception):
        answer.set_exception(reading)
    else:
        answer.set_result(reading)


# -- what is read -------------------------------------------------------------------------------------------------------------


def sleepers(proc: Path) -> list[dict[str, Any]] | None:
    """Processes in uninterruptible sleep: ``pid``, ``started``, ``comm``, ``switches``, ``where`` and whether they hold the driver.

    ``where`` is the kernel function it sleeps in (and, for root, those that led there); ``nvidia``: it has the driver's device
    open. Each None where this user may not look. Only files that need no lock of the process's memory are read: its command
    line would wait behind the very hang that is looked for. Plain calls: a node has thousands of processes.
    """
    found: list[dict[str, Any]] = []
    root = str(proc)
    try:
        names = os.listdir(root)  # noqa: PTH208
    except OSError:
        return None
    for name in names:
        if not name.isdigit():
            continue
        try:
            fd = os.open(f"{root}/{name}/stat", os.O_RDONLY | os.O_CLOEXEC)
            try:
                head, _, tail = os.read(fd, 4096).rpartition(b")")
            finally:
                os.close(fd)
        except OSError:
            continue  # it ended meanwhile
        if tail[1:2] != b"D" or len(found) >= STUCK_MOST:
            continue
        words = tail.split()
        started = _number(words[19].decode("ascii", "replace")) if len(words) > 19 else None
        comm = head.partition(b"(")[2].decode("utf-8", "replace")
        found.append({"pid": int(name), "started": started, "comm": comm, **_sleep(proc / name)})
    return sorted(found, key=lambda p: p["pid"])


def _sleep(process: Path) -> dict[str, Any]:
    counts = _SWITCHES.findall(_text(process / "status") or "")
    frames = [line.split("] ")[-1].split("+")[0] for line in (_text(process / "stack") or "").splitlines()[:12]]
    wchan = (_text(process / "wchan") or "").strip()
    where = [f for f in ([wchan] if wchan not in ("", "0") else []) + frames if f]
    holds: bool | None = None
    try:
        links = [os.readlink(fd) for fd in list((process / "fd").iterdir())[:4096]]  # noqa: PTH115
        holds = any(link.startswith("/dev/nvidia") for link in links)
    except OSError:
        pass
    return {"switches": sum(map(int, counts)) if counts else None, "where": where or None, "nvidia": holds}


def gpus_on_bus(sys: Path) -> list[dict[str, Any]] | None:
    """NVIDIA's data-centre GPUs among the PCI devices: ``pci`` and the ``driver`` that holds it ("" for none)."""
    try:
        devices = sorted((sys / "bus/pci/devices").iterdir())
    except OSError:
        return None
    found = []
    for device in devices:
        if (_text(device / "vendor") or "").strip() != NVIDIA or not (_text(device / "class") or "").startswith(GPU_CLASS):
            continue
        try:
            found.append({"pci": pci_address(device.name), "driver": _link(device / "driver")})
        except ValueError:
            continue
    return found


def module_version(proc: Path) -> str | None:
    """Version of the kernel module that is loaded, as ``/proc/driver/nvidia/version`` says; None: none is."""
    line = (_text(proc / "driver/nvidia/version") or "").partition("\n")[0]
    match = _VERSION.search(line.partition("Kernel Module")[2]) if line.startswith("NVRM version:") else None
    return match[1] if match else None


def library_versions(folders: tuple[Path, ...]) -> list[str]:
    """Versions of the driver's library on disk, by where its ``libnvidia-ml.so.1`` leads."""
    found = []
    for folder in folders:
        target = Path(os.path.realpath(folder / "libnvidia-ml.so.1")).name
        match = re.fullmatch(r"libnvidia-ml\.so\.(\d{3,4}\.[\d.]{1,16})", target)
        if match:
            found.append(match[1])
    return sorted(set(found))


def memory(proc: Path) -> dict[str, Any] | None:
    """MiB in all and available, share of the last minute in which all work waited for memory, and kills for want of it."""
    values: dict[str, int] = {}
    for line in (_text(proc / "meminfo") or "").splitlines():
        key, _, rest = line.partition(":")
        number = _number(rest.split()[0] if rest.split() else None)
        if key in ("MemTotal", "MemAvailable") and number is not None:
            values[key] = number // 1024
    if len(values) < 2:
        return None
    full = _FULL.search(_text(proc / "pressure/memory") or "")
    kills = next((_number(w[1]) for line in (_text(proc / "vmstat") or "").splitlines() if (w := line.split())[:1] == ["oom_kill"]
                  and len(w) > 1), None)  # fmt: skip
    return {"total_mib": values["MemTotal"], "available_mib": values["MemAvailable"],
            "full_avg60": float(full[1]) if full else None, "oom_kills": kills}  # fmt: skip


def space(folder: Path) -> dict[str, Any] | None:
    """Room where the agent keeps what it has not yet sent; None where the folder cannot be asked."""
    try:
        stat = os.statvfs(folder)
    except OSError:
        return None
    return {"free_mib": stat.f_bavail * stat.f_frsize // _MIB, "total_mib": stat.f_blocks * stat.f_frsize // _MIB,
            "free_files": stat.f_favail if stat.f_files else None, "read_only": bool(stat.f_flag & os.ST_RDONLY)}  # fmt: skip


def _text(path: Path) -> str | None:
    try:
        with path.open("rb", buffering=0) as file:
            return (file.read(1 << 16) or b"").decode("utf-8", "replace")
    except OSError:
        return None


def _link(path: Path) -> str | None:
    try:
        return os.readlink(path).rpartition("/")[2]  # noqa: PTH115
    except FileNotFoundError:
        return ""
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None

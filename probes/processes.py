"""Which serving processes run on this node, on which ports, and which GPUs they hold, read from /proc.

This module exists so that a worker nobody configured is still seen, and a configured one is known by its process. What
always holds:

* Only reading, under the ``proc`` root that is handed in; a process that ends meanwhile, or that this user may not look
  into, is left out or left None: not measured.
* A worker is the topmost process with a serving command line; its engine and rank processes are its descendants.
* An open device file does not mean that a GPU is used: CUDA opens every GPU it may see.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from sentinel.model import pci_address

# Modules of Dynamo whose process serves; its frontends, planners and routers hold no engine.
_DYNAMO_WORKERS = ("dynamo.vllm", "dynamo.sglang", "dynamo.trtllm", "dynamo.mocker", "dynamo.common.backend")

# cuInit alone opens each visible /dev/nvidiaN four times, a context on it ten times more (measured: H200, driver 580.159.04).
_ENUMERATED = 4

_HINT = re.compile(rb"vllm|dynamo")
_LINE_MAX = 1 << 16
_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp


class Process(msgspec.Struct, frozen=True):
    pid: int
    parent: int
    started: int  # clock ticks since boot: with the pid, it names one process for ever
    argv: tuple[str, ...]


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """One serving process. ``port``: where its HTTP answers (Dynamo: its system server); None: not known."""

    engine: str
    pid: int
    started: int
    port: int | None = None
    host: str = "127.0.0.1"
    ports: tuple[int, ...] = ()  # everything it and its descendants listen on
    family: tuple[int, ...] = ()  # its pid and those of its descendants
    gpus: tuple[str, ...] | None = None  # by open descriptors; None: could not be looked into


def find(proc: Path) -> list[Serving]:
    """Every serving process on this node. Raises OSError when ``proc`` cannot be listed at all."""
    lines = command_lines(proc)
    engines = {pid: engine for pid, line in lines.items() if _HINT.search(line) and (engine := engine_of(_words(line)))}
    if not engines:
        return []  # the usual node without a worker: nothing more is read
    table = {pid: p for pid, line in lines.items() if (p := _process(proc, pid, line))}
    children: dict[int, list[int]] = {}
    for p in table.values():
        children.setdefault(p.parent, []).append(p.pid)
    minors = gpu_minors(proc)
    return [_look_into(proc, table[pid], engine, _family(pid, children), minors)
            for pid, engine in sorted(engines.items())
            if pid in table and not _ancestors(pid, table) & engines.keys()]  # fmt: skip


def command_lines(proc: Path) -> dict[int, bytes]:
    """pid → command line as the kernel has it; kernel threads and zombies have none. Plain calls: a node has thousands."""
    lines = {}
    root = str(proc)
    for name in os.listdir(root):  # noqa: PTH208
        if name.isdigit():
            try:
                with open(f"{root}/{name}/cmdline", "rb", buffering=0) as file:  # noqa: PTH123
                    line = file.read(_LINE_MAX)
            except OSError:
                continue  # it ended meanwhile
            if line:
                lines[int(name)] = line
    return lines


def _process(proc: Path, pid: int, line: bytes) -> Process | None:
    try:
        with open(f"{proc}/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123
            after = file.read(4096).rpartition(b")")[2].split()
        return Process(pid, int(after[1]), int(after[19]), _words(line))
    except (OSError, IndexError, ValueError):
        return None


def _words(line: bytes) -> tuple[str, ...]:
    return tuple(line.rstrip(b"\0").decode(errors="replace").split("\0"))


def alive(proc: Path, pid: int, started: int) -> bool | None:
    """Whether this very process is still there (a zombie is not); None: could not be told."""
    try:
        after = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return after[0] not in ("Z", "X") and int(after[19]) == started
    except FileNotFoundError:
        return False if proc.is_dir() else None
    except (OSError, IndexError, ValueError):
        return None


def engine_of(argv: Iterable[str]) -> str | None:
    """``"vllm"`` or ``"dynamo"`` when this command line serves a model, else None."""
    words = list(argv)[:12]
    for here, following in zip(words, [*words[1:], ""], strict=True):
        name = here.rpartition("/")[2]
        if (name == "vllm" and following == "serve") or (here == "-m" and following.startswith("vllm.entrypoints")):
            return "vllm"
        if here == "-m" and any(following == m or following.startswith(m + ".") for m in _DYNAMO_WORKERS):
            return "dynamo"
    return None


def option(argv: Iterable[str], name: str) -> str | None:
    """The value of ``--name value`` or ``--name=value``."""
    words = list(argv)
    for here, following in zip(words, [*words[1:], ""], strict=True):
        if here == name:
            return following or None
        if here.startswith(name + "="):
            return here[len(name) + 1 :] or None
    return None


def listening(proc: Path, pids: Iterable[int]) -> dict[int, set[int]]:
    """TCP ports each of these processes listens on, seen in the network namespace of each."""
    found: dict[int, set[int]] = {}
    for pid in pids:
        inodes = {m[1] for link in _descriptors(proc, pid) or () if (m := re.fullmatch(r"socket:\[(\d+)\]", link))}
        if not inodes:
            continue
        for table in ("net/tcp", "net/tcp6"):
            try:
                lines = (proc / str(pid) / table).read_text(errors="replace").splitlines()[1:]
            except OSError:
                continue
            for fields in map(str.split, lines):
                if len(fields) > 9 and fields[3] == _LISTEN and fields[9] in inodes:
                    found.setdefault(pid, set()).add(int(fields[1].rpartition(":")[2], 16))
    return found


def gpu_minors(proc: Path) -> dict[int, str]:
    """Device minor number → PCI address, as the driver lists its GPUs."""
    found = {}
    for info in sorted((proc / "driver/nvidia/gpus").glob("*/information")):
        try:
            minor = re.search(r"^Device Minor:\s*(\d+)", info.read_text(errors="replace"), re.MULTILINE)
            if minor:
                found[int(minor[1])] = pci_address(info.parent.name)
        except (OSError, ValueError):
            continue
    return found


def gpus_held(proc: Path, pids: Iterable[int], minors: Mapping[int, str]) -> tuple[str, ...] | None:
    """GPUs on which these processes have more open than enumeration opens. None when none of them can be looked into."""
    held: set[str] = set()
    readable = False
    for pid in pids:
        links = _descriptors(proc, pid)
        if links is None:
            continue
        readable = True
        opened = Counter(int(m[1]) for link in links if (m := re.fullmatch(r"/dev/nvidia(\d+)", link)))
        held |= {minors[minor] for minor, times in opened.items() if times > _ENUMERATED and minor in minors}
    return tuple(sorted(held)) if readable else None


def _look_into(proc: Path, process: Process, engine: str, family: tuple[int, ...], minors: Mapping[int, str]) -> Serving:
    ports = listening(proc, family)
    own = ports.get(process.pid, set())
    host = option(process.argv, "--host") or "127.0.0.1"
    if engine == "dynamo":
        port = _number(_environment(proc, process.pid).get("DYN_SYSTEM_PORT"))
    else:
        port = _number(option(process.argv, "--port")) or (min(own) if len(own) == 1 else 8000)  # vLLM's own default
    return Serving(
        engine=engine,
        pid=process.pid,
        started=process.started,
        port=port,
        host="127.0.0.1" if engine == "dynamo" or host in ("0.0.0.0", "::", "localhost") else host,
        ports=tuple(sorted(set().union(*ports.values()))),
        family=family,
        gpus=gpus_held(proc, family, minors),
    )


def _descriptors(proc: Path, pid: int) -> list[str] | None:
    try:
        names = list((proc / str(pid) / "fd").iterdir())
    except OSError:
        return None
    links = []
    for name in names:
        try:
            links.append(str(name.readlink()))
        except OSError:
            continue
    return links


def _environment(proc: Path, pid: int) -> dict[str, str]:
    try:
        pairs = (proc / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() and 0 < int(text) < 65536 else None


def _family(pid: int, children: Mapping[int, list[int]]) -> tuple[int, ...]:
    family = [pid]
    for member in family:  # grows while it is walked
        family.extend(c for c in children.get(member, ()) if c not in family)
    return tuple(family)


def _ancestors(pid: int, table: Mapping[int, Process]) -> set[int]:
    above: set[int] = set()
    here = table[pid].parent
    while here in table and here not in above:
        above.add(here)
        here = table[here].parent
    return above

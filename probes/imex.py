"""The IMEX domain of this node, as NVIDIA's own tool prints it: who shares memory with whom across the rack.

This module exists so that a domain's trouble is noticed where GPUs export memory over NVLink, and blamed on the right node.
What always holds:

* The tool is run as a process of its own, with a deadline, and killed past it; while one cannot be killed no second is begun.
* No tool on this host: nothing was measured, nothing is said. No daemon: normal unless ``expected.imex`` says otherwise.
* Table and JSON give the same reading (``probes.imex_text``); what it means is in ``probes.imex_policy``.

Options of ``[agent.probes.imex]``: ``tool`` (path; ``/usr/bin/nvidia-imex-ctl``), ``config`` (passed as ``-c``), ``deadline_s``
(10). Expectations: ``imex = true`` (a daemon has to run here), ``imex_nodes`` (how many have to be ready).

``Reading.data``: ``tool`` (None: there is none); ``answered``; ``why`` not; ``hung_s`` past the deadline; and what was parsed:
``domain``, ``nodes``, ``links``, ``own`` (this node's index by its addresses and name; None: not known).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from probes import Context, ProbeError
from probes.imex_policy import judge_domain
from probes.imex_text import parse
from probes.judging import Judge
from probes.thresholds import limits
from sentinel.model import READING_FORMAT, Action, Component, Finding, Reading, Severity, Suspect

TOOL = "/usr/bin/nvidia-imex-ctl"
OUTPUT_MAX = 1 << 20  # bytes; 18 nodes print about 40 kB of JSON
OPTIONS = frozenset({"enabled", "interval", "tool", "config", "deadline_s"})
_LOCAL = re.compile(r"\|-- (\d+\.\d+\.\d+\.\d+)\s+/32 host LOCAL")


class ImexProbe:
    name = "imex"
    interval_s = 30.0

    def __init__(self, context: Context, *, hostname: str | None = None) -> None:
        options = context.options
        unknown = sorted(set(options) - OPTIONS)
        if unknown:
            raise ProbeError(f"unknown option {unknown[0]!r}; the imex probe knows {', '.join(sorted(OPTIONS))}")
        deadline = options.get("deadline_s")  # None: the threshold's
        usable = isinstance(deadline, int | float) and not isinstance(deadline, bool) and 0 < deadline <= 300
        if deadline is not None and not usable:
            raise ProbeError(f"deadline_s: expected seconds, more than 0 and at most 300, got {deadline!r}")
        for key in ("tool", "config"):
            if not isinstance(options.get(key, ""), str):
                raise ProbeError(f"{key}: expected a path, got {options[key]!r}")
        self._context, self._deadline = context, deadline
        self._tool = str(options.get("tool", TOOL))
        self._arguments = ["-N", "-j", *(["-c", str(options["config"])] if options.get("config") else [])]
        self._hostname = socket.gethostname() if hostname is None else hostname
        self._stuck: tuple[asyncio.subprocess.Process, float] | None = None

    async def read(self) -> Reading:
        """Run the tool once. Never raises for what the tool does; a tool that cannot be started is a ProbeError."""
        data: dict[str, Any] = {"tool": self._tool if os.access(self._tool, os.X_OK) else None, "answered": None, "own": None}
        if data["tool"]:
            data |= await self._ask()
            if data["answered"]:
                data["own"] = _own(data["nodes"], _addresses(self._context.proc), self._hostname)
        boot = _text(self._context.proc / "sys/kernel/random/boot_id").strip()
        return Reading(probe=self.name, node=self._context.node, at=time.time(), boot_id=boot, data=data)

    def assess(self, reading: Reading, memory: dict[str, Any], expected: Mapping[str, Any]) -> list[Finding]:
        """Judge one reading. Raises ProbeError for a reading of another format and an expectation of the wrong kind."""
        return assess(reading, memory, expected)

    def describe(self, reading: Reading) -> list[str]:
        data = reading.data
        if data.get("tool") is None:
            return ["no nvidia-imex-ctl here: not measured"]
        if not data.get("answered"):
            return [f"no answer: {data.get('why') or 'no reason given'}"]
        ready = sum(n.get("status") == "READY" for n in data["nodes"].values())
        return [f"domain {data['domain'] or 'of unknown state'}, {ready} of {len(data['nodes'])} nodes ready"]

    def commit(self, reading: Reading) -> None:
        """Nothing is consumed by looking."""

    async def close(self) -> None:
        if self._stuck:
            _kill(self._stuck[0])
            self._stuck = None

    async def _ask(self) -> dict[str, Any]:
        if self._stuck:
            process, since = self._stuck
            if process.returncode is None:
                return {"answered": False, "why": "an earlier call has not come back", "hung_s": time.monotonic() - since}
            self._stuck = None
        began = time.monotonic()
        try:
            process = await asyncio.create_subprocess_exec(
                self._tool, *self._arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT, start_new_session=True, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
            )  # fmt: skip
        except OSError as error:
            raise ProbeError(f"{self._tool}: could not be started: {error.strerror or error}") from None
        assert process.stdout is not None  # noqa: S101  (a pipe was asked for)
        try:
            async with asyncio.timeout(limits().imex.deadline_s if self._deadline is None else self._deadline):
                output = await _bounded(process.stdout)
                await process.wait()
        except TimeoutError:
            _kill(process)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await _bounded(process.stdout)  # what is left in the pipe, so that it closes
                    await process.wait()
            if process.returncode is None:  # it sits in the kernel: killed when the kernel lets it go
                self._stuck = (process, began)
            return {"answered": False, "why": "no answer within the deadline", "hung_s": time.monotonic() - began}
        except BaseException:
            _kill(process)
            raise
        text = output.decode("utf-8", "replace")
        found = parse(text)
        if not found:
            first = next((line.strip() for line in text.splitlines() if line.strip()), "")
            return {"answered": False, "why": first[:200] or f"it printed nothing and ended with {process.returncode}"}
        return {"answered": True, **found[0]}


def assess(reading: Reading, memory: dict[str, Any], expected: Mapping[str, Any]) -> list[Finding]:
    if reading.format != READING_FORMAT:
        raise ProbeError(f"an imex reading of format {reading.format}; this sentinel knows format {READING_FORMAT}")
    wanted, required = expected.get("imex_nodes"), expected.get("imex")
    if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 0):
        raise ProbeError(f"expected.imex_nodes: wanted a whole number, got {wanted!r}")
    if required is not None and not isinstance(required, bool):
        raise ProbeError(f"expected.imex: wanted true or false, got {required!r}")
    if memory.get("boot") not in (None, reading.boot_id):
        memory.clear()
    memory["boot"] = reading.boot_id
    data, j = reading.data, Judge(reading.node, reading.at, memory)
    if data.get("tool") is None:
        return []  # not measured
    here = Component(node=reading.node, device="imex")
    hung = j.steady("imex.tool", here, "hung_s" in data, limits().imex.run)
    if hung is not None:
        j.state("imex.tool", here, hung, severity=Severity.WARNING, action=Action.FIX_MONITOR, suspect=Suspect.MONITOR,
                evidence=(f"hung_s={data.get('hung_s', 0):.1f}",),
                summary="nvidia-imex-ctl does not come back within its deadline: the domain's state is not known.")
    if "hung_s" in data:
        return j.findings()
    missing = j.steady("imex.running", here, required is True and not data["answered"], limits().imex.run)
    if missing is not None and (required or j.was("imex.running", here)):
        j.state("imex.running", here, missing, severity=Severity.WARNING, action=Action.RESTART_IMEX,
                evidence=(str(data.get("why", "")),), summary="No IMEX daemon answers on this node, where one is expected.")
    if data["answered"]:
        judge_domain(j, data, memory, wanted)
    else:  # its domain ended with the daemon: whatever was said about it is over
        for key in [k for k in memory["since"] if not k.startswith(("imex.running", "imex.tool"))]:
            check, _, component = key.partition("@")
            j.state(check, Component.parse(component), False)
        j.lasts_s("imex.starting", here, False)
        memory["runs"] = {k: v for k, v in memory["runs"].items() if k.startswith(("imex.running", "imex.tool"))}
        memory.pop("filled", None)
        memory.pop("accused", None)
    return j.findings()


def _own(nodes: Mapping[str, Any], addresses: set[str], hostname: str) -> str | None:
    short = hostname.partition(".")[0]
    mine = [
        index for index, node in nodes.items()
        if node.get("host") in addresses or (short and short in ((node.get(k) or "").partition(".")[0] for k in ("name", "host")))
    ]
    return mine[0] if len(mine) == 1 else None


def _addresses(proc: Path) -> set[str]:
    """This host's IPv4 addresses, as the kernel's routing table lists them."""
    found = re.findall(_LOCAL, _text(proc / "net/fib_trie").replace("\n", " ")) if (proc / "net/fib_trie").exists() else []
    return {a for a in found if not a.startswith("127.")}


async def _bounded(stream: asyncio.StreamReader) -> bytes:
    kept = bytearray()
    while chunk := await stream.read(65536):
        kept += chunk[: OUTPUT_MAX - len(kept)]  # what is beyond is read and dropped, so that the tool can end
    return bytes(kept)


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""

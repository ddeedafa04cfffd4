"""The serving workers of this node: found, looked at, and asked for one token when they seem to stand still.

This module exists because a frozen engine is invisible to every health check: with vLLM's engine process stopped,
``/health``, ``/metrics`` and ``/v1/models`` go on answering 200 (vllm#36451; measured on 0.32). What always holds:

* Standing still is requests running while no number that the engine's own steps change has changed. That alone is doubt; it
  becomes a verdict only when a request of one token, sent now, gets no answer either.
* A long prefill is not standing still: every chunk of it takes KV cache, and that counts as movement.
* 429 and 503 are busy, never sick; a timeout is never "gone". Gone is a refused connection where something answered before.
* A worker that never answered yet is being started or is kept stopped: nothing is found about it.
* ``read`` and ``assess`` fold readings with the same pure functions (``probes.standing``), so that a recording replays to
  the same findings.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec

from probes import Context, ProbeError, engine, processes, standing
from probes.engine import Metrics, Token
from probes.processes import Serving
from probes.threshold_tables import Worker
from sentinel.model import Component, Finding, Reading

FORMAT = 1
DRIVER_PATIENCE_S = 1.0


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The probe's table of the configuration; times in seconds. Those that may be None outrank ``[worker]`` of the thresholds."""

    workers: tuple[Target, ...] = ()
    scan: bool = True  # also look for serving processes in /proc
    scan_s: float = 30.0  # it reads every command line of the node; a worker that ended is noticed at once
    frontend: str = ""  # a Dynamo frontend, for requests pinned to one worker
    deadline_s: float | None = None
    stall_s: float | None = None
    warmup_s: float | None = None
    idle_s: float | None = None
    canary_s: float | None = None
    canary_again_s: float | None = None
    interval: Any = None  # the runner's, read there
    enabled: Any = None


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker to look at. ``url``: its OpenAI server (vLLM); ``system_url``: its system server (Dynamo)."""

    name: str
    url: str = ""
    system_url: str = ""
    engine: str = "vllm"
    role: Literal["prefill", "decode", "both"] = "both"  # in a disaggregated Dynamo: which of its two kinds
    model: str = ""

    @property
    def looks(self) -> str:
        """Where its /health and /metrics answer."""
        return ((self.system_url or self.url) if self.engine == "dynamo" else self.url).rstrip("/")


class WorkerProbe:
    """``options["workers"]`` lists the configured ones; others are found by their command lines."""

    name = "worker"
    interval_s = 2.0

    def __init__(
        self, context: Context, *, clock: Callable[[], float] = time.time, mono: Callable[[], float] = time.monotonic
    ) -> None:
        try:
            self._options = msgspec.convert(dict(context.options), Options)
        except msgspec.ValidationError as error:
            raise ProbeError(f"agent.probes.worker: {error}") from None
        for t in self._options.workers:
            if t.engine not in ("vllm", "dynamo") or not _is_address(t.looks):
                raise ProbeError(
                    f'agent.probes.worker.workers: {t.name!r} needs engine "vllm" with url, or "dynamo" with system_url, as http://host:port'
                )
        options = msgspec.structs.asdict(self._options)
        self._own = {k: v for k in Worker.__struct_fields__ if (v := options.get(k)) is not None}
        self._by = standing.by(self._own)
        self._context, self._clock, self._mono = context, clock, mono
        self._session: aiohttp.ClientSession | None = None
        self._found: dict[str, tuple[Serving, float]] = {}  # label → process, when it was last there
        self._held: dict[int, list[str]] | None = None  # pid → GPUs, as the driver says
        self._asking: asyncio.Task[dict[str, Any]] | None = None
        self._scanned = float("-inf")
        self._states: dict[str, dict[str, Any]] = {}

    async def read(self) -> Reading:
        self._by = standing.by(self._own)
        await self._scan()
        mine = {label: s for label, (s, _) in self._found.items()}
        looks = []
        for t in self._options.workers:
            port = urlsplit(t.looks).port
            label = next((k for k, s in mine.items() if port is not None and port in (s.port, *s.ports)), "")
            looks.append(self._look(t.name, t, mine.pop(label, None)))
        for label, s in mine.items():
            base = f"http://{f'[{s.host}]' if ':' in s.host else s.host}:{s.port}" if s.port else ""
            found = Target(name="", url=base if s.engine == "vllm" else "", system_url=base, engine=s.engine)
            looks.append(self._look(label, found, s))
        workers = await asyncio.gather(*looks)
        self._states = {w["label"]: standing.fold(self._states.get(w["label"], {}), w) for w in workers}
        data = {"workers": workers, "limits": self._own}  # the thresholds are those of whoever judges
        return Reading(probe=self.name, node=self._context.node, at=self._clock(), format=FORMAT, data=data)

    def assess(self, reading: Reading, memory: dict[str, Any], expected: Mapping[str, Any]) -> list[Finding]:
        """Judge one reading against those before it. Raises ProbeError for a recording of another format."""
        if reading.format != FORMAT:
            raise ProbeError(f"a worker reading of format {reading.format} cannot be judged; wanted format {FORMAT}")
        findings: list[Finding] = []
        states: dict[str, Any] = memory.setdefault("states", {})
        told: dict[str, dict[str, list[Any]]] = memory.setdefault("told", {})  # label → check → [present, since]
        limits = standing.by(reading.data["limits"])
        labels = set()
        for seen in reading.data["workers"]:
            label = seen["label"]
            labels.add(label)
            states[label] = standing.fold(states.get(label, {}), seen)
            for verdict in standing.judge(seen, states[label], limits):
                findings.append(self._finding(reading, label, verdict, told.setdefault(label, {})))
        for label in [k for k in states if k not in labels]:  # forgotten: what was said about it ends
            for check, (present, _) in list(told.get(label, {}).items()):
                if present:
                    over = standing.Verdict(check, False, summary="this worker is not there any more and is not expected")
                    findings.append(self._finding(reading, label, over, told[label]))
            del states[label]
            told.pop(label, None)
        return findings

    def commit(self, reading: Reading) -> None:
        """Nothing to move: every reading is whole."""

    async def close(self) -> None:
        if self._asking:
            self._asking.cancel()
        if self._session:
            await self._session.close()
            self._session = None

    def _finding(self, reading: Reading, label: str, verdict: standing.Verdict, told: dict[str, list[Any]]) -> Finding:
        said = told.get(verdict.check)
        if said is None or said[0] != verdict.present:
            told[verdict.check] = said = [verdict.present, reading.at]
        component = Component(node=reading.node, device=f"worker@{label}")
        return Finding(
            id=f"{verdict.check}:{component}:{said[1]:.3f}:{'on' if verdict.present else 'off'}",
            check=verdict.check,
            component=component,
            at=reading.at,
            present=verdict.present,
            severity=verdict.severity,
            action=verdict.action,
            suspect=verdict.suspect,
            certainty=verdict.certainty,
            summary=f"{label} {verdict.summary}" if verdict.summary else "",
            evidence=verdict.evidence,
        )

    async def _scan(self) -> None:
        now = self._mono()
        proc = self._context.proc
        last = [s for s, at in self._found.values() if at == self._scanned]
        gone = any(processes.alive(proc, s.pid, s.started) is False for s in last)
        if not self._options.scan or (now - self._scanned < self._options.scan_s and not gone):
            return
        self._scanned = now
        try:
            there = await asyncio.to_thread(processes.find, proc)
        except OSError:
            return  # not measured: what was found stays
        await self._ask_driver()
        for s in there:
            self._found[f"{s.engine}-{s.port or s.pid}"] = (s, now)
        self._found = {k: (s, at) for k, (s, at) in self._found.items() if now - at < self._by["forget_s"]}

    async def _ask_driver(self) -> None:
        """Take the driver's own list of compute processes: it counts contexts, where open files count what may be seen.

        A driver that hangs must not hang this probe: its answer is taken up at a later scan, and until then the last one holds.
        """
        if self._context.driver is None:
            return
        if self._asking is None:
            self._asking = asyncio.create_task(self._context.driver.read(), name="worker probe asks the driver")
        await asyncio.wait({self._asking}, timeout=DRIVER_PATIENCE_S)
        if not self._asking.done():
            return
        asked, self._asking = self._asking, None
        if asked.cancelled() or asked.exception() is not None:
            return
        gpus = [g for g in asked.result().get("gpus") or () if isinstance(g.get("pids"), list) and g.get("pci")]
        held: dict[int, list[str]] = {}
        for g in gpus:
            for pid in g["pids"]:
                held.setdefault(int(pid), []).append(str(g["pci"]))
        self._held = held if gpus else None

    def _gpus(self, s: Serving) -> tuple[list[str], str | None]:
        if self._held is not None:
            return sorted({g for pid in s.family for g in self._held.get(pid, ())}), "driver"
        return (list(s.gpus), "descriptors") if s.gpus is not None else ([], None)

    async def _look(self, label: str, target: Target, process: Serving | None) -> dict[str, Any]:
        seen: dict[str, Any] = {"label": label, "worker": target.name, "engine": target.engine, "url": target.url}
        seen["mono"] = self._mono()
        if target.system_url:
            seen["system_url"] = target.system_url
        if process:
            seen |= {"pid": process.pid, "started": process.started}
            seen["alive"] = processes.alive(self._context.proc, process.pid, process.started)
            seen["gpus"], seen["gpus_by"] = self._gpus(process)
        if not target.looks:
            return seen  # a Dynamo worker without a system server: its process is all there is to see
        await self._measure(seen, target)
        before = self._states.get(label, {})
        state = standing.fold(before, seen)
        if standing.wants_token(state, self._by):
            token = await self._token(target, state["instance"])
            if token:
                await self._measure(seen, target)  # what moved while the token was awaited counts too
                seen["mono"] = self._mono()
                seen["token"] = msgspec.to_builtins(token)
        if not seen.get("instance") and process and state["who"] == standing.who(seen):
            seen["instance"] = state["instance"]  # a hung process keeps the id that it said when it still answered
        return seen

    async def _measure(self, seen: dict[str, Any], target: Target) -> None:
        session, deadline = self._http(), self._by["deadline_s"]
        health, text = await asyncio.gather(
            engine.ask(session, "GET", f"{target.looks}/health", deadline_s=deadline, limit=65536),
            engine.ask(session, "GET", f"{target.looks}/metrics", deadline_s=deadline),
        )
        got = engine.parse(text.body) if text.how == "answered" and text.status == 200 else Metrics()
        seen |= {
            "health": {"how": health.how, "status": health.status, "seconds": health.seconds, "why": health.why},
            "healthy": engine.healthy(target.engine, health),
            "running": got.running,
            "waiting": got.waiting,
            "progress": got.progress,
            "instance": got.instance,
            "ranks": {k: {"running": r.running, "moving": list(r.moving)} for k, r in got.ranks.items()},
        }
        if not got.ranks and got.in_flight is not None:
            seen["ranks"] = {"": {"running": got.in_flight, "moving": list(got.answered)}}

    async def _token(self, target: Target, instance: str) -> Token | None:
        if target.engine == "vllm":
            return await engine.one_token(self._http(), target.url, deadline_s=self._by["canary_s"], model=target.model)
        if not self._options.frontend or not instance:
            return None
        return await engine.one_token(
            self._http(),
            self._options.frontend,
            deadline_s=self._by["canary_s"],
            model=target.model,
            instance=instance,
            role=target.role,
        )

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), trust_env=False)
        return self._session


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket without its other half, a port beyond all ports
        return False

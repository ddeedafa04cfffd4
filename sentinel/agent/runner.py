"""Runs the probes: when, how long at most, and never one at the expense of another.

This module exists so that a probe only looks and judges. What always holds:

* One reading of a probe at a time; a turn that comes while it is still looking is skipped, missed turns become one.
* A probe that raises, does not come back within its deadline, or finds what cannot be sent, costs only itself:
  ``sentinel_probe_success`` goes to 0 and after ``patience`` failures in a row there is one finding ``probe.failed`` about the
  monitor, never about hardware.
* A probe with a file descriptor is read when that turns readable, in batches, with the event loop given back in between:
  reading takes at most about four fifths of the loop's time, however much there is to read.
* ``commit`` comes only after the sink says that everything found is safely spooled.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from time import perf_counter
from typing import Any

import msgspec
import structlog
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.interval import IntervalTrigger

from probes import Probe, ProbeError, Woken
from probes.profile import with_hints
from sentinel.model import Action, Component, Finding, Reading, Severity, Suspect

log = structlog.get_logger()

Sink = Callable[[str, Reading | None, list[Finding]], Awaitable[bool]]
Observer = Callable[[str, bool, float], None]  # probe, success, seconds

BEAT_S = 2.0  # how often the scheduler shows that it lives
_JITTER = 0.1  # share of the interval, so that the nodes of a rack do not all look in the same millisecond
_REARM_S = 0.001  # least pause between two woken readings
LEAST_DEADLINE_S = 30.0  # of one read
_FINDING_BYTES = 64 * 1024  # as JSON; a report has to fit into 4 MiB
_AFTER_FAILURE_S = 1.0  # a descriptor that stays readable while its probe fails must not spin

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[Finding]).decode


@dataclass
class _Job:
    probe: Probe
    interval_s: float
    memory: dict[str, Any]
    running: bool = False
    failures: int = 0
    failing_since: float = 0.0
    told: bool = False  # probe.failed is out
    ok: bool | None = None
    error: str = ""
    stuck: bool = False  # commit failed, and that has been told
    fd: int | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class Runner:
    """Schedules ``probes`` from ``start`` to ``stop``.

    ``sink(probe, reading, findings)`` takes what was found and says True once it is safe; ``reading`` is None for what the
    runner itself found (``probe.failed``). ``intervals`` overrides a probe's own cadence, seconds by name. ``memories`` are
    the probes' memories by name, handed on at a reload. ``deadline_s``: of one read; three intervals where that is more.
    """

    def __init__(
        self,
        node: str,
        probes: Sequence[Probe],
        sink: Sink,
        *,
        clock: Callable[[], float],
        observe: Observer = lambda probe, ok, seconds: None,
        expected: Mapping[str, Any] | None = None,
        intervals: Mapping[str, float] | None = None,
        memories: dict[str, dict[str, Any]] | None = None,
        patience: int = 3,
        deadline_s: float = LEAST_DEADLINE_S,
    ) -> None:
        self.node = node
        self.beat = 0.0  # loop time of the scheduler's last sign of life
        self.memories = {} if memories is None else memories
        self._sink, self._clock, self._observe = sink, clock, observe
        self._expected = expected or {}
        self._patience, self.deadline_s = patience, deadline_s
        self._scheduler = AsyncIOScheduler(timezone=UTC)
        self._closing = False
        self._jobs = {
            p.name: _Job(p, (intervals or {}).get(p.name, p.interval_s), self.memories.setdefault(p.name, {})) for p in probes
        }

    @property
    def status(self) -> dict[str, bool | None]:
        """Probe → its last read succeeded; None: has not run yet."""
        return {name: job.ok for name, job in self._jobs.items()}

    @property
    def errors(self) -> dict[str, str]:
        """Probe → the sentence of its last failure, for those that fail now."""
        return {name: job.error for name, job in self._jobs.items() if job.ok is False}

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.beat = loop.time()
        now = datetime.now(UTC)
        for name, job in self._jobs.items():
            self._scheduler.add_job(
                self._run,
                IntervalTrigger(seconds=job.interval_s, jitter=job.interval_s * _JITTER, timezone=UTC),
                args=[job],
                id=name,
                coalesce=True,
                max_instances=1,
                misfire_grace_time=None,  # late is late, not never
                next_run_time=now + timedelta(seconds=random.uniform(0, min(0.2, job.interval_s))),  # noqa: S311
            )
        self._scheduler.add_job(
            self._heartbeat, IntervalTrigger(seconds=BEAT_S, timezone=UTC), args=[loop], id=" beat", coalesce=True,
            max_instances=1, misfire_grace_time=None,
        )  # fmt: skip
        self._scheduler.start()
        for job in self._jobs.values():
            self._watch(job, loop)

    async def stop(self) -> None:
        """End the schedule and the readings under way, and close the probes; none of them can hold this up for long."""
        self._closing = True
        loop = asyncio.get_running_loop()
        if self._scheduler.running:
            self._scheduler.pause()
            await asyncio.sleep(0)  # what it just began takes its first step; cancelled before that, it would be logged as an error
            self._scheduler.shutdown(wait=False)
            await asyncio.sleep(0)  # apscheduler shuts down in a callback of the loop
        for job in self._jobs.values():
            self._unwatch(job, loop)
        await asyncio.gather(*(self._close(job) for job in self._jobs.values()))

    async def _close(self, job: _Job) -> None:
        for task in job.tasks:
            task.cancel()
        if job.tasks:
            await asyncio.wait(job.tasks, timeout=1.0)
        try:
            async with asyncio.timeout(1.0):
                await job.probe.close()
        except Exception as error:
            log.warning("probe could not be closed", probe=job.probe.name, error=_sentence(error))

    def rephase(self) -> None:
        """Run everything now and count intervals from here: apscheduler plans by the wall clock, which may be set back."""
        for job in self._scheduler.get_jobs():
            job.modify(next_run_time=datetime.now(UTC))

    # -----------------------------------------------------------------------------------------------------------------

    async def _heartbeat(self, loop: asyncio.AbstractEventLoop) -> None:
        self.beat = loop.time()

    async def _run(self, job: _Job) -> None:
        """One turn, as a task of its own: apscheduler forgets about its tasks when it shuts down, we must not."""
        if job.running or self._closing:
            return
        task = asyncio.create_task(self._turn(job), name=f"probe {job.probe.name}")
        job.tasks.add(task)
        task.add_done_callback(job.tasks.discard)
        with suppress(asyncio.CancelledError):  # only a scheduler that shuts down does that, and would log it as an error
            await asyncio.wait([task])

    async def _turn(self, job: _Job) -> None:
        job.running = True
        name = job.probe.name
        started = perf_counter()
        try:
            try:
                async with asyncio.timeout(max(self.deadline_s, 3 * job.interval_s)):
                    reading = await job.probe.read()
                findings = _sendable(job.probe.assess(reading, job.memory, with_hints(self._expected, self.memories)))
            except (Exception, SystemExit, asyncio.CancelledError) as error:  # whatever a probe does wrong stays with it
                if isinstance(error, asyncio.CancelledError) and _cancelled():
                    raise
                self._observe(name, False, perf_counter() - started)
                await self._failed(job, error)
                return
            self._observe(name, True, perf_counter() - started)
            recovered = self._succeeded(job)
            try:
                if await self._sink(name, reading, findings + recovered):
                    job.probe.commit(reading)
                job.stuck = False
            except Exception as error:
                if not job.stuck:
                    log.error("the cursor could not be moved; after a restart this is found again", probe=name,
                              error=_sentence(error), exc_info=not isinstance(error, OSError))  # fmt: skip
                job.stuck = True
        finally:
            job.running = False

    async def _failed(self, job: _Job, error: BaseException) -> None:
        job.ok, job.error = False, _sentence(error)
        job.failures += 1
        if job.failures == 1:
            job.failing_since = self._clock()
            expected = isinstance(error, OSError | ProbeError)  # TimeoutError is one
            log.warning("probe failed", probe=job.probe.name, error=job.error, exc_info=not expected)
        if job.failures >= self._patience:
            if not job.told:
                log.error("probe keeps failing", probe=job.probe.name, failures=job.failures, error=job.error)
            job.told = True
        await self._sink(job.probe.name, None, [self._finding(job, present=True)] if job.told else [])

    def _succeeded(self, job: _Job) -> list[Finding]:
        told, job.told = job.told, False
        if job.failures:
            log.info("probe works again", probe=job.probe.name, after_failures=job.failures)
        ended = [self._finding(job, present=False)] if told else []
        job.ok, job.error, job.failures = True, "", 0
        return ended

    def _finding(self, job: _Job, *, present: bool) -> Finding:
        name = job.probe.name
        return Finding(
            id=f"{self.node}/probe.failed/{name}/{job.failing_since:.3f}",
            check="probe.failed",
            component=Component(node=self.node, device=f"probe@{name}"),
            at=self._clock(),
            present=present,
            severity=Severity.WARNING,
            action=Action.FIX_MONITOR,
            suspect=Suspect.MONITOR,
            summary=f"The probe {name} failed {job.failures} times in a row: {job.error}" if present else "",
            evidence=(job.error,) if present and job.error else (),
            count=max(1, job.failures),
        )

    # --- descriptors -------------------------------------------------------------------------------------------------

    def _watch(self, job: _Job, loop: asyncio.AbstractEventLoop) -> None:
        if not isinstance(job.probe, Woken) or self._closing:
            return
        try:
            fd = job.probe.fileno()
            loop.add_reader(fd, self._woken, job, loop)
        except (OSError, ValueError, NotImplementedError, ProbeError):
            # Not open (no permission), or a plain file, which epoll refuses: it is read by its interval.
            job.fd = None
            return
        job.fd = fd

    def _unwatch(self, job: _Job, loop: asyncio.AbstractEventLoop) -> None:
        if job.fd is not None:
            loop.remove_reader(job.fd)
            job.fd = None

    def _woken(self, job: _Job, loop: asyncio.AbstractEventLoop) -> None:
        self._unwatch(job, loop)  # level-triggered: it would call again at once while the reading is under way
        task = asyncio.create_task(self._drain(job, loop), name=f"woken {job.probe.name}")
        job.tasks.add(task)
        task.add_done_callback(job.tasks.discard)

    async def _drain(self, job: _Job, loop: asyncio.AbstractEventLoop) -> None:
        started = perf_counter()
        if not job.running:
            await self._turn(job)
        pause = _AFTER_FAILURE_S if job.ok is False else max(_REARM_S, (perf_counter() - started) / 4)
        await asyncio.sleep(min(pause, _AFTER_FAILURE_S))
        self._watch(job, loop)  # asks for the descriptor again: a probe may have opened a new one


def _cancelled() -> bool:
    """Whether it is this task that somebody cancels, and not something that its probe waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _sendable(findings: list[Finding]) -> list[Finding]:
    """The findings as the controller will read them. Raises ProbeError when they would not arrive as what they are."""
    try:
        lines = [_encode(f) for f in findings]
        for finding, line in zip(findings, lines, strict=True):
            if len(line) > _FINDING_BYTES:
                raise ProbeError(f"finding {str(finding.id)[:100]!r} has {len(line)} bytes; wanted at most {_FINDING_BYTES}")
        return _decode(b"[%b]" % b",".join(lines))
    except (TypeError, ValueError, AttributeError, RecursionError, msgspec.MsgspecError) as error:
        raise ProbeError(f"it found what is no finding, or cannot be written as JSON: {error}") from None


def _sentence(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "it did not come back within its deadline"
    if isinstance(error, SystemExit):
        return "it tried to end the agent"
    return str(error) or type(error).__name__

"""One agent, put together: probes into what is known, news into the spool, the spool to the controller, commands to actions.

This module exists so that a daemon, a test and a simulated rack run the very same agent. What always holds:

* Nothing global: no signal handlers, no event-loop policy, no default registry. Many agents live in one event loop.
* A reading's news is in the spool's memory, and on its way to the controller, before the disk is waited for; the probe's
  cursor moves only once it is on disk.
* Without controllers the agent stands alone: it measures and shows, and keeps nothing for anybody.
* A part that ends by itself is a bug: it is logged, ``down`` is set, and ``alive()`` turns False for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import aiohttp
import structlog
from prometheus_client import CollectorRegistry

from probes import Probe
from sentinel import __version__
from sentinel.agent import state
from sentinel.agent.actions import CarryOut, Release, check, run_vector, unreleased
from sentinel.agent.comparing import Comparing
from sentinel.agent.connection import Connection
from sentinel.agent.driver_protocol import longest_read_s
from sentinel.agent.known import Known
from sentinel.agent.metrics import AgentMetrics, KnownCollector
from sentinel.agent.place import Whereabouts
from sentinel.agent.probing import interval_s
from sentinel.agent.runner import BEAT_S, LEAST_DEADLINE_S, Runner
from sentinel.agent.spool import Flusher
from sentinel.agent.status import StatusServer
from sentinel.config import AgentSettings, ConfigError
from sentinel.model import Finding, Reading

log = structlog.get_logger()

_DISK_S = 2.0  # a probe waits no longer than this for the disk; its cursor then stays where it is
_BEATS = 3  # the scheduler is dead when it has missed so many


class Agent:
    """``agent = Agent(settings, probes)``; ``await agent.start()``; ``await agent.stop()``. Any number of them in one loop.

    * ``settings``: each agent needs a ``state_dir`` of its own (it is locked). ``listen = ""`` serves no HTTP; a port of 0
      takes a free one, which ``agent.port`` then says. ``controllers = ()`` stands alone.
    * ``probes``: instances of ``probes.Probe``; the agent runs and closes them. Intervals: ``settings.probes``, else their own.
    * ``clock``: seconds since the epoch, for what is reported.
    * ``session``: a shared aiohttp session, which the agent does not close; None: one of its own.
    * ``registry``: where its metrics go; None: one of its own (``agent.metrics.registry``). One registry per agent.
    * ``carry_out(vector, deadline_s) -> (ok, detail)``: how an allowed argument vector is run; the default runs the program.
    * ``release()``: an async context in which nobody of ours holds the GPUs' driver; a reset runs inside it.
    ``start`` and ``reconfigure`` raise ConfigError with one sentence; a failed ``reconfigure`` has changed nothing.
    """

    def __init__(
        self,
        settings: AgentSettings,
        probes: Sequence[Probe],
        *,
        clock: Callable[[], float] = time.time,
        session: aiohttp.ClientSession | None = None,
        registry: CollectorRegistry | None = None,
        carry_out: CarryOut = run_vector,
        release: Release = unreleased,
    ) -> None:
        self.settings = settings
        self.known = Known()
        self._whereabouts = Whereabouts(settings.proc)
        self.metrics = AgentMetrics(registry)
        self._compare = Comparing()
        self.down = asyncio.Event()
        self.connection: Connection | None = None
        self._probes = probes
        self._clock, self._carry_out, self._release = clock, carry_out, release
        self._shared_session = session
        self._session: aiohttp.ClientSession | None = None
        self._memories: dict[str, dict[str, Any]] = {}
        self._status: StatusServer | None = None
        self._undo = contextlib.AsyncExitStack()  # what start did, to be undone in reverse
        self._disk_told = False

    @property
    def port(self) -> int | None:
        """Where /metrics and /healthz really are; None when they are not served."""
        return self._status.port if self._status else None

    async def start(self) -> None:
        self.runner = self._runner(self.settings, self._probes)
        try:
            await self._start(self.settings)
        except BaseException:
            await self.stop()
            raise

    async def _start(self, settings: AgentSettings) -> None:
        check(settings.actions)
        undo = self._undo
        undo.callback(os.close, state.locked(settings.state_dir))
        self.spool = state.open_spool(settings)
        self.flusher = Flusher(self.spool)
        undo.push_async_callback(self._close_spool)
        self.known.seen(self.spool.batch(count=10_000, size=settings.spool_max_bytes).findings)
        self.metrics.registry.register(KnownCollector(self.known, self.spool, lambda: self.flusher.error))
        self.metrics.expect_actions(settings.actions)
        undo.push_async_callback(self._close_http)
        if settings.listen:
            self._status = await StatusServer.open(settings.listen, self.metrics.registry, self.health)
        self.connection = self._connection(settings)
        undo.push_async_callback(self._disconnect)
        if self.connection:
            self.connection.start(self._spawn)
        await self.runner.start()
        undo.callback(self._spawn("overseer", self._oversee()).cancel)

    async def stop(self) -> None:
        """End everything and close the probes; what was found and not acknowledged stays in the spool."""
        if hasattr(self, "runner"):
            await self.runner.stop()
        await self._undo.aclose()

    async def reconfigure(self, settings: AgentSettings, probes: Sequence[Probe]) -> None:
        """Take over a new configuration while running. Actions under way go on; memories and states of probes that stay do too."""
        old = self.settings
        for key in ("node", "state_dir", "driver_deadline"):
            if getattr(old, key) != getattr(settings, key):
                raise ConfigError(f"agent.{key}: cannot change while the agent runs; restart it for that")
        runner = self._runner(settings, probes)
        check(settings.actions)
        connection = self.connection if self.connection and settings.controllers else self._connection(settings)
        status = self._status
        if settings.listen != old.listen:
            status = await StatusServer.open(settings.listen, self.metrics.registry, self.health) if settings.listen else None
        try:
            if connection:
                connection.reconfigure(settings)
        except ConfigError:
            if status is not None and status is not self._status:
                await status.close()
            raise
        # From here on nothing can fail.
        if status is not self._status:
            stale, self._status = self._status, status
            if stale:
                await stale.close()
        self.settings = settings
        if connection is not self.connection:
            await self._disconnect()
            self.connection = connection
            if connection:
                connection.start(self._spawn)
        self.metrics.expect_actions(settings.actions)
        self.spool.max_bytes = settings.spool_max_bytes
        await self.runner.stop()
        names = [p.name for p in probes]
        self.known.keep_only(names)
        self.metrics.forget_probes(names)
        self.runner, self._probes = runner, probes
        await runner.start()

    def alive(self) -> bool:
        """Whether the work makes progress: the loop runs (it asks), the scheduler beats, no part has ended by itself."""
        return not self.down.is_set() and asyncio.get_running_loop().time() - self.runner.beat < _BEATS * BEAT_S

    def health(self) -> tuple[bool, dict[str, Any]]:
        """(alive, detail as JSON values): what works, what does not, and why."""
        detail: dict[str, Any] = {
            "node": self.settings.node, "version": __version__, "alive": self.alive(),
            "probes": self.runner.status, "errors": self.runner.errors,
            "spool": {"waiting": len(self.spool), "bytes": self.spool.bytes, "dropped": self.spool.dropped},
            "disk": self.flusher.error,
            "controller": self.connection.health() if self.connection else None,
        }
        return bool(detail["alive"]), detail

    # --- what a probe found ------------------------------------------------------------------------------------------

    async def take(self, probe: str, reading: Reading | None, findings: list[Finding]) -> bool:
        """The runner's sink. True: everything is safe, the cursor may move."""
        if reading is None:
            self.known.forget_workers(probe)
        else:
            findings = [*findings, *self._compare(reading)]
            self.metrics.count_reading(reading)
            self._whereabouts.take(reading)
            if "workers" in reading.data:
                try:
                    self.known.take_workers(probe, reading.data["workers"])
                except ValueError as error:
                    log.error("a probe's workers are not workers", probe=probe, error=str(error))
        news = self.known.take(probe, findings)
        self.metrics.expect_gpus({gpu for f in findings if (gpu := f.component.gpu)})
        if not news:
            return True
        self.metrics.count_xids(news)
        told = [n.finding for n in news]
        for finding in told:
            (log.warning if finding.present else log.info)(
                "found" if finding.present else "ended", check=finding.check, component=str(finding.component),
                severity=finding.severity.value, summary=finding.summary, id=finding.id,
            )  # fmt: skip
        if self.connection is None:
            return True
        self.spool.add(told)
        self.connection.reporter.wake()
        try:
            async with asyncio.timeout(_DISK_S):
                await asyncio.shield(self.flusher.flush())
        except (TimeoutError, OSError) as error:
            if not self._disk_told:
                log.error("findings are sent but cannot be kept on disk", error=str(error) or "the disk does not answer")
            self._disk_told = True
            return False
        self._disk_told = False
        return True

    # --- parts -------------------------------------------------------------------------------------------------------

    def _runner(self, settings: AgentSettings, probes: Sequence[Probe]) -> Runner:
        return Runner(
            settings.node,
            probes,
            self.take,
            clock=self._clock,
            observe=self.metrics.observe,
            expected=settings.expected,
            intervals={p.name: interval_s(settings, p) for p in probes},
            memories=self._memories,
            deadline_s=max(LEAST_DEADLINE_S, 2 * longest_read_s(float(settings.driver_deadline))),  # two probes ask in turn
        )

    def _connection(self, settings: AgentSettings) -> Connection | None:
        if not settings.controllers:
            log.info("no controllers are configured; the agent stands alone")
            return None
        return Connection(
            settings, self._http(), spool=self.spool, flusher=self.flusher, known=self.known, metrics=self.metrics,
            probes=lambda: self.runner.status, place=self._whereabouts.place,
            clock=self._clock, carry_out=self._carry_out, release=self._release,
        )  # fmt: skip

    async def _disconnect(self) -> None:
        gone, self.connection = self.connection, None
        if gone:
            await gone.stop()

    def _http(self) -> aiohttp.ClientSession:
        if self._shared_session is not None:
            return self._shared_session
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=8, keepalive_timeout=60.0))
        return self._session

    async def _close_spool(self) -> None:
        try:
            async with asyncio.timeout(_DISK_S):
                await self.flusher.flush()
        except (TimeoutError, OSError) as error:
            log.error("the spool could not be written at the end", error=str(error) or "the disk does not answer")
        self.flusher.close()

    async def _close_http(self) -> None:
        if self._session:
            await self._session.close()
        if self._status:
            await self._status.close()

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work
            except Exception:
                log.exception("a part of the agent ended by itself; the agent is down", part=name)
                self.down.set()

        return asyncio.create_task(guarded(), name=f"agent {self.settings.node} {name}")

    async def _oversee(self) -> None:
        """What must not depend on the scheduler: notice that the wall clock was set, and try a sick disk again."""
        loop = asyncio.get_running_loop()
        offset = time.time() - loop.time()
        while True:
            await asyncio.sleep(1.0)
            now = time.time() - loop.time()
            if abs(now - offset) > 1.0:
                log.warning("the wall clock was set; probes are scheduled anew", by_s=round(now - offset, 3))
                self.runner.rephase()
            offset = now
            if self.flusher.error:
                self.flusher.flush()

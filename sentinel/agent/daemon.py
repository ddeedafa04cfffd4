"""The agent as a service: signals, systemd, reload, and an end within five seconds.

What always holds:

* READY=1 comes after the first probes are scheduled; WATCHDOG=1 only while ``Agent.alive()``.
* SIGTERM and SIGINT end it cleanly. SIGHUP reads the configuration again; one that cannot be used changes nothing and is
  told in one sentence.
* The driver's child outlives reloads and ends last.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import disable_created_metrics

from probes import Probe, ProbeError
from probes.thresholds import use
from sentinel.agent.assembly import Agent
from sentinel.agent.driver import ChildDriver
from sentinel.agent.heap import settle
from sentinel.agent.probing import load_probes, thresholds
from sentinel.agent.service import Service
from sentinel.config import AgentSettings, ConfigError, Settings, load
from sentinel.model import Finding, Reading

log = structlog.get_logger()

Make = Callable[[AgentSettings], Sequence[Probe]]

_END_S = 4.5  # in all; systemd and the person waiting are promised five seconds


class Installed:
    """The installed probes. All of them, before and after a reload, read the GPUs through one child: a second child beside one
    that hangs in the driver would be a second stuck call."""

    def __init__(self, settings: AgentSettings) -> None:
        self.driver = ChildDriver(float(settings.driver_deadline))

    def __call__(self, settings: AgentSettings) -> Sequence[Probe]:
        broken: list[Probe] = []
        probes = load_probes(
            settings, self.driver, on_broken=lambda name, error: broken.append(_Broken(settings.node, name, error))
        )
        return [*probes, *broken]


class _Broken:
    """Stands where a probe that could not be loaded would be, so that its absence shows as a probe that fails."""

    interval_s = 30.0

    def __init__(self, node: str, name: str, error: Exception) -> None:
        self.node, self.name, self._error = node, name, error

    async def read(self) -> Reading:
        raise ProbeError(f"it could not be loaded: {self._error!r}")

    def assess(self, reading: Reading, memory: dict[str, Any], expected: Mapping[str, Any]) -> list[Finding]:
        return []

    def commit(self, reading: Reading) -> None:
        pass

    async def close(self) -> None:
        pass


def _agent_table(settings: Settings, config_path: Path) -> AgentSettings:
    if settings.agent is None:
        raise ConfigError(f"{config_path}: agent: missing; wanted an [agent] table for the agent")
    return settings.agent


async def run(settings: Settings, config_path: Path, *, probes: Make | None = None) -> int:
    """Run until a signal ends it; returns an exit status, 1 when a part of it broke. Raises ConfigError when it cannot start.

    ``probes``: where they come from instead of the entry points (for tests; a site's own go through the entry points).
    """
    own = _agent_table(settings, config_path)
    loop = asyncio.get_running_loop()
    service = Service()
    ending, again = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    loop.add_signal_handler(signal.SIGHUP, again.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # blocked since the command began: see sentinel.cli.daemons

    disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for every counter that says when it was made: nobody reads it
    installed = Installed(own)
    make = probes or installed
    use(thresholds(own))
    agent = Agent(own, make(own), release=installed.driver.released)
    watchdog = None
    try:
        await agent.start()
        watchdog = asyncio.create_task(service.watchdog(agent.alive), name="watchdog")
        service.ready(_status(agent))
        log.info("agent started", node=own.node, probes=list(agent.runner.status), controllers=own.controllers, port=agent.port)
        settle()
        waits = [asyncio.create_task(event.wait()) for event in (ending, agent.down, again)]
        while True:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if ending.is_set() or agent.down.is_set():
                break
            again.clear()
            waits[-1] = asyncio.create_task(again.wait())
            service.reloading()
            await _reload(agent, config_path, make)
            service.ready(_status(agent))
    finally:
        service.stopping()
        try:
            async with asyncio.timeout(_END_S):
                await agent.stop()
                await installed.driver.close()
        except TimeoutError:
            log.error("not everything could be ended in time", seconds=_END_S)
        use(None)
        if watchdog:  # kept until here: stopping is work, too, and may hang
            watchdog.cancel()
    log.info("agent stopped", node=own.node)
    return 1 if agent.down.is_set() else 0


async def _reload(agent: Agent, config_path: Path, make: Make) -> None:
    """Take over the file's new content, or keep everything as it is."""
    probes: Sequence[Probe] = ()
    try:
        settings = _agent_table(load(config_path), config_path)
        numbers = thresholds(settings)
        probes = make(settings)
        await agent.reconfigure(settings, probes)
    except Exception as error:  # a site's probe may raise anything when it is made
        log.error("the new configuration is not used; the old one stays", error=str(error) or repr(error))
        for probe in probes:
            await probe.close()
    else:
        use(numbers)
        log.info("configuration read again", file=str(config_path), probes=[p.name for p in probes])


def _status(agent: Agent) -> str:
    controllers = len(agent.settings.controllers)
    return f"{len(agent.runner.status)} probes; " + (f"{controllers} controllers" if controllers else "no controllers: standalone")

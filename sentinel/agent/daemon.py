"""The agent as a service: signals, systemd, reload, and an end within five seconds.

What always holds:

* READY=1 comes after the first probes are scheduled; WATCHDOG=1 only while ``Agent.alive()``.
* SIGTERM and SIGINT end it cleanly. SIGHUP reads the configuration again; one that cannot be used changes nothing and is
  told in one sentence.
* The driver's child is started with the probes that read through it, and ends after them.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from probes import Probe, ProbeError
from sentinel.agent.assembly import Agent
from sentinel.agent.driver import ChildDriver
from sentinel.agent.probing import load_probes
from sentinel.agent.service import Service
from sentinel.config import AgentSettings, ConfigError, Settings, load
from sentinel.model import Finding, Reading

log = structlog.get_logger()

Loaded = tuple[Sequence[Probe], Callable[[], Awaitable[None]]]  # probes, and what to end after they are closed


def with_driver(settings: AgentSettings) -> Loaded:
    """The installed probes, reading the GPUs through a child process."""
    driver = ChildDriver(float(settings.driver_deadline))
    broken: list[Probe] = []
    probes = load_probes(settings, driver, on_broken=lambda name, error: broken.append(_Broken(settings.node, name, error)))
    return [*probes, *broken], driver.close


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


async def run(settings: Settings, config_path: Path, *, loaded: Callable[[AgentSettings], Loaded] = with_driver) -> int:
    """Run until a signal ends it; returns an exit status, 1 when a part of it broke. Raises ConfigError when it cannot start.

    ``loaded`` is where probes come from; a site's own go through the entry points, so only tests change it.
    """
    own = _agent_table(settings, config_path)
    loop = asyncio.get_running_loop()
    service = Service()
    ending, again = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    loop.add_signal_handler(signal.SIGHUP, again.set)

    probes, close = loaded(own)
    agent = Agent(own, probes)
    try:
        await agent.start()
    except BaseException:
        await close()
        raise
    watchdog = asyncio.create_task(service.watchdog(agent.alive), name="watchdog")
    service.ready(_status(agent))
    log.info("agent started", node=own.node, probes=[p.name for p in probes], controllers=own.controllers, port=agent.port)
    gc.collect()
    gc.freeze()  # what the start left behind lives as long as we do; no later collection needs to walk it

    waits = [asyncio.create_task(event.wait()) for event in (ending, agent.down, again)]
    try:
        while True:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if ending.is_set() or agent.down.is_set():
                break
            again.clear()
            waits[-1] = asyncio.create_task(again.wait())
            service.reloading()
            close = await _reload(agent, config_path, loaded, close)
            service.ready(_status(agent))
    finally:
        service.stopping()
        for task in waits:
            task.cancel()
        # The watchdog goes on until the end: stopping is work, too, and may hang.
        await agent.stop()
        await close()
        watchdog.cancel()
        log.info("agent stopped", node=own.node)
    return 1 if agent.down.is_set() else 0


async def _reload(
    agent: Agent, config_path: Path, loaded: Callable[[AgentSettings], Loaded], close: Callable[[], Awaitable[None]]
) -> Callable[[], Awaitable[None]]:
    """Take over the file's new content, or keep everything as it is. Returns what must be closed at the end."""
    probes: Sequence[Probe] = ()
    new_close: Callable[[], Awaitable[None]] | None = None
    try:
        settings = _agent_table(load(config_path), config_path)
        probes, new_close = loaded(settings)
        await agent.reconfigure(settings, probes)
    except Exception as error:  # a site's probe may raise anything when it is made
        log.error("the new configuration is not used; the old one stays", error=str(error) or repr(error))
        for probe in probes:
            await probe.close()
        if new_close:
            await new_close()
        return close
    log.info("configuration read again", file=str(config_path), probes=[p.name for p in probes])
    await close()
    return new_close


def _status(agent: Agent) -> str:
    controllers = len(agent.settings.controllers)
    return f"{len(agent.runner.status)} probes; " + (f"{controllers} controllers" if controllers else "no controllers: standalone")

"""What exists only while controllers are configured: the link, what is reported over it, and the commands that come back.

What always holds: making a Connection does all that can fail (ConfigError, nothing started); ``start`` and ``stop`` cannot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from sentinel.agent.actions import Actions, CarryOut, Release
from sentinel.agent.known import Known
from sentinel.agent.link import Link
from sentinel.agent.metrics import AgentMetrics
from sentinel.agent.reporter import Reporter
from sentinel.agent.spool import Flusher, Spool
from sentinel.config import AgentSettings, ConfigError
from sentinel.model import Place

Spawn = Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[None]]


class Connection:
    def __init__(
        self,
        settings: AgentSettings,
        http: aiohttp.ClientSession,
        *,
        spool: Spool,
        flusher: Flusher,
        known: Known,
        metrics: AgentMetrics,
        probes: Callable[[], dict[str, bool | None]],
        place: Callable[[], Place | None],
        clock: Callable[[], float],
        carry_out: CarryOut,
        release: Release,
    ) -> None:
        self.link = Link(settings, http)
        self.reporter = Reporter(
            settings.node,
            self.link,
            spool,
            known,
            probes=probes,
            place=place,
            clock=clock,
            flush=flusher.flush,
            snapshot_s=settings.snapshot,
            boot_id=_boot_id(settings),
            errors=lambda why: metrics.report_errors.labels(why).inc(),
            acked=metrics.last_ack.set,
        )
        try:
            self.actions = Actions(
                settings.node,
                settings.actions,
                self.link,
                settings.state_dir / "actions.jsonl",
                count=metrics.count_action,
                carry_out=carry_out,
                release=release,
            )
        except OSError as error:
            name = error.filename or settings.state_dir
            raise ConfigError(f"agent.state_dir: {name} cannot be used: {error.strerror or error}") from None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, spawn: Spawn) -> None:
        self._tasks = [spawn("reporter", self.reporter.run()), spawn("commands", self.actions.run())]

    async def stop(self) -> None:
        """End reports and actions; what is not acknowledged stays in the spool."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.actions.stop()

    def reconfigure(self, settings: AgentSettings) -> None:
        """Take over controllers, token, trust, allow-list and snapshot interval. Raises ConfigError, and then nothing changed."""
        self.link.configure(settings)
        self.actions.allowed = settings.actions
        self.reporter.snapshot_s = settings.snapshot

    def health(self) -> dict[str, Any]:
        return {
            "url": self.link.url,
            "last_ack": self.reporter.last_ack,
            "trouble": self.reporter.trouble or None,
            "actions_running": self.actions.running,
        }


def _boot_id(settings: AgentSettings) -> str:
    try:
        return (settings.proc / "sys/kernel/random/boot_id").read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""

"""The agent's own HTTP: /metrics for Prometheus and /healthz for whoever asks whether it lives. Read-only, by default local.

``/healthz`` is 200 while the loops run and 503 when they do not; that probes fail or no controller is heard is in its JSON,
not in its status, since restarting the agent would not mend either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.aiohttp import make_aiohttp_handler

from sentinel.config import ConfigError

Health = Callable[[], tuple[bool, dict[str, Any]]]


class StatusServer:
    """One listening socket; ``port`` is the real one."""

    def __init__(self, runner: web.AppRunner, port: int) -> None:
        self._runner, self.port = runner, port

    @classmethod
    async def open(cls, listen: str, registry: CollectorRegistry, health: Health) -> StatusServer:
        """Serve on ``host:port``. Raises ConfigError when that is no address or cannot be listened on."""
        host, _, port = listen.rpartition(":")
        if not port.isdigit() or int(port) > 65535 or not host:
            raise ConfigError(f'agent.listen: expected "host:port", got {listen!r}')

        async def healthz(_: web.Request) -> web.Response:
            alive, detail = health()
            return web.Response(
                status=200 if alive else 503, body=msgspec.json.encode(detail) + b"\n", content_type="application/json"
            )

        app = web.Application()
        app.router.add_get("/healthz", healthz)
        app.router.add_get("/metrics", make_aiohttp_handler(registry))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        try:
            await web.TCPSite(runner, host.strip("[]"), int(port)).start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(f"agent.listen: {listen} cannot be listened on: {error.strerror or error}") from None
        return cls(runner, int(runner.addresses[0][1]))

    async def close(self) -> None:
        await self._runner.cleanup()

"""One gateway process: its public port, its admin port, and the route table that it obeys.

This module exists so that a daemon, a test and the demo build the same gateway from parts that they hand in. What always holds:

* The presence is written, with no version, before the first connection is taken, so that the controller never overlooks one.
* A version is acknowledged only after the table is in force here.
* ``stop``: /healthz says 503 first, then nothing new is taken, then answers go on until they end or the drain is over; those that
  are left get an error as their last event, or 503 where they had not begun. Only then does the gateway leave the table of
  gateways.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
from collections.abc import AsyncIterator, Callable, Sequence

import structlog
from aiohttp import web

from sentinel.config import ConfigError
from sentinel.gateway.admin import admin_application
from sentinel.gateway.answers import Answers
from sentinel.gateway.classify import Trouble
from sentinel.gateway.desk import Desk
from sentinel.gateway.errors import ApiError
from sentinel.gateway.forward import Forward
from sentinel.gateway.front import Front
from sentinel.gateway.models import configured
from sentinel.model import Fleet, Routes
from sentinel.settings import GatewaySettings
from sentinel.store import StoreError
from sentinel.store.gateways import Gateways

log = structlog.get_logger(__name__)

BACKLOG = 1024
LOOK_S = 0.02  # between two looks at who is still connected
SWEEP_S = 1.0
CUT_S = 1.0  # what is left for the last events of answers that were cut
_STOPS = ApiError(
    503, "this gateway is stopping and could not wait for this answer", kind="server_error", code="stopping", retry_after_s=1.0
)


class Gateway:
    """``start`` serves; ``stop`` ends cleanly. ``watch``: the published tables, oldest first, for ever; None: there is no store."""

    def __init__(
        self,
        desk: Desk,
        *,
        boot: str = "",
        process: int = 0,
        watch: Callable[[], AsyncIterator[Routes]] | None = None,
        gateways: Gateways | None = None,
        on_routes: Callable[[Routes], None] = lambda _: None,
    ) -> None:
        self.desk, self._process, self._answers = desk, process, Answers(desk)
        self.settings: GatewaySettings = desk.settings
        self.id = boot or secrets.token_hex(8)  # never used twice
        self._watch, self._gateways, self._on_routes = watch, gateways, on_routes
        self._front: Front | None = None
        self._public: web.ServerRunner | None = None
        self._admin: web.AppRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()
        self.port = self.admin_port = 0

    async def start(self) -> None:
        """Raises ConfigError when an address cannot be bound or a certificate cannot be used."""
        tls = _tls(self.settings)
        await self._present()
        self._front = Front(Forward(self.desk), keepalive_s=float(self.settings.keepalive), errors=self.desk.meters.errors)
        self._public = web.ServerRunner(self._front, shutdown_timeout=CUT_S)
        self._admin = web.AppRunner(admin_application(self.desk, self.id), access_log=None, shutdown_timeout=1.0)
        for runner in (self._public, self._admin):
            await runner.setup()
        try:
            self.admin_port = await _bind(self._admin, "admin", self.settings.admin, offset=self._process)
            self.port = await _bind(self._public, "listen", self.settings.listen, tls=tls, shared=True)
        except ConfigError:
            await self._public.cleanup()
            await self._admin.cleanup()
            raise
        self._tasks = [asyncio.create_task(self._sweep(), name="sweep")]
        if self._watch is not None:
            self._tasks.append(asyncio.create_task(self._follow(self._watch()), name="follow"))
        if self._gateways is not None:
            self._tasks.append(asyncio.create_task(self._tell(self._gateways), name="tell"))
        log.info("gateway is up", port=self.port, admin=self.admin_port, routes=self.desk.routes.version)

    async def stop(self) -> None:
        self.desk.stopping = True
        await asyncio.sleep(float(self.settings.unready))
        if self._public is not None and self._front is not None:
            for site in tuple(self._public.sites):
                await site.stop()
            await self._drained(self._front, float(self.settings.drain))
            await self._public.cleanup()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._gateways is not None:
            with contextlib.suppress(StoreError):
                await self._gateways.leave(self.id)
        if self._admin is not None:
            await self._admin.cleanup()
        self.desk.close()

    def obey(self, routes: Routes) -> None:
        """Go by this table, if it is not older than the one of now."""
        if routes.version < self.desk.routes.version:
            return
        self.desk.obey(routes)
        self._news.set()
        self._on_routes(routes)

    def reconfigure(self, fleet: Fleet, frontends: Sequence[str]) -> None:
        """Go on with other pools and workers. Without a published table they are the table."""
        self.desk.reconfigure(fleet, frontends)
        if not self.desk.routes.version:
            self.desk.obey(configured(fleet))
        self._on_routes(self.desk.routes)

    async def wait(self) -> None:
        """Returns only when a part ended, which is a bug; raises what ended it."""
        if self._tasks:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    @property
    def active(self) -> int:
        """Requests that are being answered."""
        return sum(self.desk.guards.load.values())

    async def _drained(self, front: Front, seconds: float) -> None:
        until = asyncio.get_running_loop().time() + seconds
        while True:
            for client in front.clients:
                if client.idle:
                    client.force_close()
            front.sweep(LOOK_S, CUT_S)  # who does not take the last bytes holds up nobody
            if not front.connections or asyncio.get_running_loop().time() > until:
                break
            await asyncio.sleep(LOOK_S)
        left = [client.relay for client in front.clients if client.relay is not None]
        for relay in left:
            relay.fail(Trouble.STOPPING)
        for client in front.clients:
            if client.asks is not None and not client.begun:
                self._answers.tell(_STOPS, client.asks, client)
                client.force_close()
        if front.connections:
            log.warning("not every answer could be waited for", cut=len(front.connections), streams=len(left), seconds=seconds)

    async def _follow(self, tables: AsyncIterator[Routes]) -> None:
        async for routes in tables:
            self.obey(routes)

    async def _present(self) -> None:
        if self._gateways is not None:
            try:
                await self._gateways.obey(self.id, self.settings.name, 0, float(self.settings.presence))
            except StoreError as error:
                log.warning("the store does not answer; serving goes on without it", error=str(error))

    async def _tell(self, gateways: Gateways) -> None:
        """Say which version is obeyed: at once when it changes, and again before the presence ends."""
        presence = float(self.settings.presence)
        away = False
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), presence / 3)
            self._news.clear()
            try:
                await gateways.obey(self.id, self.settings.name, self.desk.routes.version, presence)
                away = False
            except StoreError as error:
                if not away:
                    log.warning("the store does not hear which routes are obeyed", error=str(error))
                away = True
                await asyncio.sleep(min(0.1, presence / 10))
                self._news.set()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.desk.sweep()
            if self._front is not None:
                self._front.sweep(SWEEP_S, float(self.settings.stall))


async def _bind(
    runner: web.BaseRunner, key: str, listen: str, *, offset: int = 0, tls: ssl.SSLContext | None = None, shared: bool = False
) -> int:
    """Returns the port. ``shared``: other processes bind the same one."""
    host, _, port = listen.rpartition(":")
    number = int(port) + offset if int(port) else 0
    before = len(runner.addresses)
    try:
        site = web.TCPSite(
            runner, host.strip("[]"), number, ssl_context=tls, backlog=BACKLOG, reuse_address=True, reuse_port=shared or None
        )
        await site.start()
    except OSError as error:
        raise ConfigError(f"gateway.{key}: {host}:{number} cannot be bound: {error.strerror or error}") from None
    return int(runner.addresses[before][1])


def _tls(settings: GatewaySettings) -> ssl.SSLContext | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"gateway.tls_cert: {settings.tls_cert} with {settings.tls_key} cannot be used: {error}") from None
    return context

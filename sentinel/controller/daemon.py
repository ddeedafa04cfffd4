"""The controller as a process: built from its file, announced to systemd, stopped and reloaded by signals.

This module exists so that everything else in this package gets its parts handed in. What always holds:

* The port is bound before the lease is asked for, so that the address other controllers are told is one that answers.
* SIGTERM gives the lease back; what is not finished stays pending for the next leader.
* SIGHUP takes a new fleet and policy or, when the file cannot be used, keeps the old ones and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
import structlog
from aiohttp import web

from sentinel.agent.service import Service
from sentinel.config import ConfigError, ControllerSettings, Settings, load
from sentinel.controller.api import Api
from sentinel.controller.auth import Tokens
from sentinel.controller.commands import CommandDesk
from sentinel.controller.core import Decides, SteppedDown
from sentinel.controller.effects import Pager
from sentinel.controller.journal import Journal
from sentinel.controller.leader import Leader, Lease
from sentinel.controller.ledger import Ledger
from sentinel.controller.metrics import Gauges, Metrics
from sentinel.controller.term import Term
from sentinel.decide.decider import Decider
from sentinel.decide.policy import Policy, PolicyError, default_policy_text, load_policy
from sentinel.model import Fleet
from sentinel.paging import build_pager
from sentinel.serving import Adapter
from sentinel.serving.facade import Serving
from sentinel.store import Store, StoreError, open_store

log = structlog.get_logger(__name__)

WEDGED = 30.0  # seconds without an end of one batch: then systemd is no longer told that we are alive
LEADER_KNOWN = 0.5  # seconds for which the answer of the store about who leads is good enough


class Controller:
    """One controller process. ``start`` binds and begins to stand by; ``stop`` ends cleanly. Implements ``api.Seat``."""

    def __init__(
        self,
        settings: ControllerSettings,
        fleet: Fleet,
        *,
        store: Store,
        serving: Adapter,
        desk: CommandDesk,
        pager: Pager,
        decider: Callable[[], Decides],
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises ConfigError when a token file or certificate is wrong."""
        self.settings, self.fleet = settings, fleet
        self.name, self.url = settings.name, settings.advertise.rstrip("/")
        self.decider = decider  # makes a fresh one for each leadership
        self._store, self._serving, self._desk, self._pager, self._clock = store, serving, desk, pager, clock
        self._metrics = metrics or Metrics()
        self._journal = Journal(settings.journal_dir, settings.journal_max_bytes)
        self._metrics.registry.register(Gauges(self, lambda: self._journal.errors))
        self._nodes = Tokens(settings.node_tokens, "controller.node_tokens", "node")
        self._operators = Tokens(settings.operator_tokens, "controller.operator_tokens", "operator")
        self._tls = _tls(settings)
        self._current: Term | None = None
        self._leading: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self._leader: tuple[float, str | None] = (float("-inf"), None)

    # -- what the API and the gauges ask ------------------------------------------------------------------------------

    @property
    def term(self) -> Term | None:
        term = self._current
        return term if term is not None and term.ready and term.lease.valid() else None

    @property
    def epoch(self) -> int:
        return self.term.lease.epoch if self.term else 0

    @property
    def ledger(self) -> Ledger | None:
        return self.term.ledger if self.term else None

    def last_reports(self) -> list[tuple[str, float]]:
        return list(self.term.last_reports()) if self.term else []

    async def leader_url(self) -> str | None:
        asked, url = self._leader
        if time.monotonic() - asked > LEADER_KNOWN:
            try:
                leader = await self._store.lease.leader()
                url = leader.url if leader else None
            except StoreError as error:
                log.debug("it could not be told who leads", error=str(error))
                url = None
            self._leader = (time.monotonic(), url)
        return url

    # -- running ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind, serve, and begin to ask for the lease. Raises ConfigError when the address cannot be bound."""
        api = Api(self, nodes=self._nodes, operators=self._operators, desk=self._desk, metrics=self._metrics, clock=self._clock)
        self._runner = web.AppRunner(api.application(), access_log=None, shutdown_timeout=2.0)
        await self._runner.setup()
        host, port = _address(self.settings.listen)
        try:
            await web.TCPSite(self._runner, host, port, ssl_context=self._tls, reuse_address=True).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(f"controller.listen: {self.settings.listen} cannot be bound: {error.strerror or error}") from None
        if not self.url:
            bound = self._runner.addresses[0]
            shown = socket.gethostname() if host in ("", "0.0.0.0", "::") else host
            self.url = f"{'https' if self._tls else 'http'}://{f'[{shown}]' if ':' in shown else shown}:{bound[1]}"
        leader = Leader(
            self._store.lease, holder=self.name, url=self.url, ttl=float(self.settings.lease), lead=self._lead,
            on_error=self._metrics.store_errors.inc,
        )
        self._leading = asyncio.create_task(leader.run(), name="leader")
        log.info("controller is up", url=self.url, workers=len(self.fleet.workers))

    async def wait(self) -> None:
        """Returns only when the leader loop ended, which it does only by a bug or by ``stop``; raises what ended it."""
        if self._leading is not None:
            await self._leading

    async def stop(self) -> None:
        """Give the lease back, let go of every caller, close the port."""
        if self._leading is not None:
            self._leading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._leading
        if self._runner is not None:
            await self._runner.cleanup()
        self._journal.close()

    async def reload(self, fleet: Fleet, decider: Callable[[], Decides] | None = None) -> None:
        """Go on with another fleet and, where one is given, another way to make deciders (another policy)."""
        self.fleet = fleet
        if decider is not None:
            self.decider = decider
        term = self._current
        if term is None:
            return
        if decider is not None:
            term.restart()
            return
        with contextlib.suppress(SteppedDown):  # the next leadership begins with this fleet anyway
            await term.reload(fleet)

    def alive(self) -> bool:
        """Whether the work makes progress."""
        return self._current is None or self._current.core.stuck_for() < WEDGED

    async def _lead(self, lease: Lease) -> bool:
        term = self._current = Term(
            lease=lease, decider=self.decider(), fleet=self.fleet, store=self._store.decisions, serving=self._serving,
            desk=self._desk, pager=self._pager, journal=self._journal, metrics=self._metrics, tick=float(self.settings.tick),
            watch=float(self.settings.watch), clock=self._clock,
        )  # fmt: skip
        try:
            await term.run()
        finally:
            self._current = None
            self._desk.let_go()
        return term.again


async def run(settings: Settings, config_path: Path) -> int:
    """Run until SIGTERM or SIGINT. Raises ConfigError when the settings cannot be used; returns an exit status."""
    own = settings.controller
    if own is None:
        raise ConfigError(f"{config_path}: has no [controller] table; wanted one on a host that runs 'sentinel controller'")
    policy = _policy(own)
    service, stopping, reloading = Service(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    loop.add_signal_handler(signal.SIGHUP, reloading.set)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        try:
            store = await open_store(settings.store, own.journal_dir.parent)
        except StoreError as error:
            raise ConfigError(f"store.url: {error}") from None
        stack.push_async_callback(store.close)
        metrics, desk = Metrics(), CommandDesk()
        controller = Controller(
            own, settings.fleet(), store=store, desk=desk, decider=partial(Decider, policy), metrics=metrics,
            serving=Serving(settings, session, hands=desk, keep=store.kept), pager=build_pager(settings, session, metrics.registry),
        )  # fmt: skip
        await controller.start()
        stack.push_async_callback(controller.stop)
        service.ready(f"listens on {controller.url}")
        parts = {
            asyncio.create_task(work, name=name)
            for name, work in (
                ("signal", stopping.wait()),
                ("leader", controller.wait()),
                ("reload", _reload(reloading, controller, service, config_path, settings=settings, policy=policy)),
            )
        }
        watchdog = asyncio.create_task(service.watchdog(controller.alive), name="watchdog")
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        service.stopping()
        log.info("controller stops")
        for task in (*parts, watchdog):
            task.cancel()
        await asyncio.gather(*parts, watchdog, return_exceptions=True)
        for task in done:
            if task.get_name() != "signal":
                log.error("a part of the controller ended by itself", part=task.get_name(), exc_info=task.exception())
                return 1
    return 0


async def _reload(
    asked: asyncio.Event, controller: Controller, service: Service, path: Path, *, settings: Settings, policy: Policy
) -> None:
    """Re-read the file whenever ``asked`` is set; a bad one keeps everything as it is."""
    while True:
        await asked.wait()
        asked.clear()
        service.reloading()
        try:
            new = load(path)
            if new.controller is None:
                raise ConfigError(f"{path}: has no [controller] table any more")
            changed = _policy(new.controller)
        except ConfigError as error:
            log.warning("the changed configuration is not used; the one of before stays in force", error=str(error))
            service.ready(f"listens on {controller.url}; the changed configuration is not used: {error}")
            continue
        for table in ("store", "paging", "dynamo"):
            if getattr(new, table) != getattr(settings, table):
                log.warning("a change of this table takes effect only with a restart", table=table)
        if settings.controller and msgspec.structs.replace(new.controller, policy=None) != msgspec.structs.replace(
            settings.controller, policy=None
        ):
            log.warning("of [controller], only a changed policy takes effect without a restart")
        # A decider is made for one policy, so another policy is another leadership, from what is durable.
        maker = None if changed == policy else partial(Decider, changed)
        await controller.reload(new.fleet(), maker)
        settings, policy = new, changed
        log.info("configuration read again", workers=len(new.workers), new_policy=maker is not None)
        service.ready(f"listens on {controller.url}")


def _policy(settings: ControllerSettings) -> Policy:
    try:
        return load_policy(settings.policy.read_text("utf-8") if settings.policy else default_policy_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"controller.policy: {settings.policy} cannot be read: {error}") from None
    except PolicyError as error:
        raise ConfigError(f"controller.policy: {settings.policy or 'the shipped policy'}: {error}") from None


def _address(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f'controller.listen: expected "host:port", got {listen!r}')
    return host.strip("[]"), int(port)


def _tls(settings: ControllerSettings) -> ssl.SSLContext | None:
    if settings.tls_cert is None and settings.tls_key is None:
        return None
    if settings.tls_cert is None or settings.tls_key is None:
        raise ConfigError("controller: tls_cert and tls_key go together; only one of them is set")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"controller.tls_cert: {settings.tls_cert} with {settings.tls_key} cannot be used: {error}") from None
    return context

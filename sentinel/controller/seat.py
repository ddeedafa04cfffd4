"""One controller process: its port, its turn at the lease, and the leadership that is there now.

This module exists so that a daemon, a test and the demo build the same controller from parts that they hand in. What always
holds:

* The port is bound before the lease is asked for, so that the address other controllers are told is one that answers.
* Each leadership is a Term made anew; between two of them nothing is answered but who leads.
* ``stop`` gives the lease back; what is not finished stays pending for the next leader.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial

import structlog
from aiohttp import web

from sentinel.config import ConfigError, ControllerSettings
from sentinel.controller.api import Api
from sentinel.controller.auth import Tokens
from sentinel.controller.clock import Steady
from sentinel.controller.commands import CommandDesk
from sentinel.controller.core import Decides, SteppedDown
from sentinel.controller.effects import Pager
from sentinel.controller.gateways import GatewayWatch
from sentinel.controller.journal import Journal
from sentinel.controller.leader import Leader, Lease
from sentinel.controller.ledger import Ledger
from sentinel.controller.metrics import Gauges, Metrics
from sentinel.controller.term import Serves, Term
from sentinel.decide.rules.policy import Mode
from sentinel.decide.rules.policy_file import default_policy_text, load_policy
from sentinel.model import Fleet
from sentinel.store import Store, StoreError
from sentinel.store.breakers import BreakerRecords
from sentinel.store.gateways import Gateways

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
        serving: Serves,
        desk: CommandDesk,
        pager: Pager,
        decider: Callable[[], Decides],
        policy: str = "",
        runbooks: str = "",
        metrics: Metrics | None = None,
        frontends: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``policy``: text of the rules, checked; the shipped ones when empty. ``runbooks``: base of the links in pages, ours when
        empty. ``frontends``: how many Dynamo frontends there are. Raises ConfigError when a file is wrong."""
        self.settings, self.fleet = settings, fleet
        self.name, self.url = settings.name, settings.advertise.rstrip("/")
        self._runbooks = runbooks.rstrip("/")
        self.decider = decider  # makes a fresh one for each leadership, which is then told the policy
        self.policy = policy or default_policy_text()
        self._frontends = frontends
        self._store, self._serving, self._desk, self._pager, self._clock = store, serving, desk, pager, Steady(clock)
        self._metrics = metrics or Metrics()
        self._journal = Journal(settings.journal_dir, settings.journal_max_bytes)
        self._metrics.registry.register(Gauges(self, lambda: self._journal.errors))
        self._nodes = Tokens(settings.node_tokens, "controller.node_tokens", "node")
        self._operators = Tokens(settings.operator_tokens, "controller.operator_tokens", "operator")
        self._tls = _tls(settings)
        self._current: Term | None = None
        self._memory: tuple[int, Ledger] | None = None  # epoch, and what was durable when it ended
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

    @property
    def mode(self) -> Mode:
        return load_policy(self.policy).mode

    def last_reports(self) -> list[tuple[str, float]]:
        return list(self.term.last_reports()) if self.term else []

    def held_back(self) -> frozenset[str]:
        return self.term.core.decider.held_back() if self.term else frozenset()

    async def leader_url(self) -> str | None:
        asked, url = self._leader
        if time.monotonic() - asked > LEADER_KNOWN:
            self._leader = (time.monotonic(), url)  # whoever asks meanwhile gets the old answer: the store is asked once
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
        self._runner = web.AppRunner(api.application(), access_log=None, shutdown_timeout=2.0, auto_decompress=False)
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
            self._store.lease, apart=self._store.apart, holder=self.name, url=self.url, ttl=float(self.settings.lease),
            lead=self._lead, on_error=self._metrics.store_errors.inc,
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

    async def reload(self, fleet: Fleet, policy: str) -> None:
        """Go on with another fleet and another policy (its text, checked); what is the same as before changes nothing."""
        self.fleet, self.policy = fleet, policy
        if self._current is not None:
            with contextlib.suppress(SteppedDown):  # the next leadership begins with these anyway
                await self._current.reload(fleet, policy)

    def alive(self) -> bool:
        """Whether the work makes progress."""
        return self._current is None or self._current.core.stuck_for() < WEDGED

    async def _lead(self, lease: Lease) -> bool:
        term = self._current = Term(
            lease=lease, decider=self.decider(), fleet=self.fleet, policy=self.policy, store=self._store.decisions,
            serving=self._serving, desk=self._desk, pager=self._pager, journal=self._journal, metrics=self._metrics,
            tick=float(self.settings.tick), watch=float(self.settings.watch), runbooks=self._runbooks or f"{self.url}/runbooks",
            clock=self._clock,
            gateways=partial(GatewayWatch, Gateways(self._store), BreakerRecords(self._store), frontends=self._frontends),
            memory=self._memory[1] if self._memory and self._memory[0] == self._store.lease.before else None,
        )  # fmt: skip
        try:
            await term.run()
        finally:
            self._memory = (lease.epoch, term.ledger) if term.led else self._memory
            self._current = None
            self._desk.let_go()
        return False


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

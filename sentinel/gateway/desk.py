"""What is the same for all requests of one gateway process: settings, keys, the route table, guards, sessions, connections.

This module exists so that a request's way is handed one thing. What always holds: ``plan`` is replaced as a whole, so a request
sees one table from its beginning to its choice; workers that left the table keep their connections only for what is in flight.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import Metric

from sentinel.gateway.attempt import Guards
from sentinel.gateway.guards import Admission, Breakers
from sentinel.gateway.keys import Keys
from sentinel.gateway.meters import Meters, gauges
from sentinel.gateway.models import Plan
from sentinel.gateway.sessions import Holders, Homes
from sentinel.gateway.upstream import Origin
from sentinel.model import Fleet, Routes
from sentinel.settings import GatewaySettings


class Follows(Breakers, Protocol):
    """Breakers that are told who is in rotation, and tell how they stand."""

    def members(self, pools: dict[str, list[str]], apart: frozenset[str] = frozenset()) -> None: ...
    def states(self) -> dict[str, str]: ...


class Desk:
    def __init__(
        self,
        settings: GatewaySettings,
        fleet: Fleet,
        *,
        breakers: Follows,
        admission: Admission,
        frontends: Sequence[str] = (),
        worker_key: str = "",
        limits: Callable[[], Mapping[str, Mapping[str, int]]] = dict,
        holders: Holders | None = None,
    ) -> None:
        """``frontends``: base URLs of the Dynamo frontends. ``limits``: how each limit stands, for the metrics. ``holders``: what
        all gateways share; None: this one is alone. Raises ConfigError when the file of keys is wrong."""
        self.settings, self.fleet, self.frontends = settings, fleet, frontends
        self.keys = Keys(settings.keys)
        self.worker_key = worker_key.encode()
        self.guards = Guards(breakers, admission, self.out)
        self.breakers, self._limits = breakers, limits
        self.homes: Homes[str] = Homes()
        self.holders = holders or Holders()
        self.meters = Meters(self._gauges)
        self.routes = Routes()
        self.plan = Plan(self.routes, fleet, frontends)
        self.began = int(time.time())
        self.stopping = False
        self._met: set[tuple[str, str]] = set()  # workers whose series have begun, each with its pool
        self._origins: dict[str, Origin] = {}
        self._tls = ssl.create_default_context()

    def obey(self, routes: Routes) -> None:
        """From now on every choice is made by this table."""
        self.routes = routes
        self._plan_anew()

    def reconfigure(self, fleet: Fleet, frontends: Sequence[str]) -> None:
        """Another configuration of pools and workers, under the same table."""
        self.fleet, self.frontends = fleet, frontends
        self._plan_anew()

    def _plan_anew(self) -> None:
        self.plan = Plan(self.routes, self.fleet, self.frontends)
        self.breakers.members(self.plan.members(), self.plan.prefills)
        new = self.plan.pool_of.items() - self._met
        self._met |= new
        for worker, pool in new:
            self.meters.know(pool, worker)
        urls = set(self.plan.url_of.values())
        for url in self._origins.keys() - urls:
            self._origins.pop(url).close()

    def out(self, worker: str) -> bool:
        """Whether the table of now has it in rotation no more."""
        return self.plan.out(worker)

    def origin(self, url: str) -> Origin:
        found = self._origins.get(url)
        if found is None:
            s = self.settings
            found = self._origins[url] = Origin(url, connect_s=float(s.connect), idle_s=float(s.idle), tls=self._tls)
        return found

    def sweep(self) -> None:
        """Close connections that have been idle for too long, and sort what was measured; to be called every second."""
        self.meters.fold()
        for origin in self._origins.values():
            origin.sweep()

    def close(self) -> None:
        for origin in self._origins.values():
            origin.close()
        self._origins.clear()

    def _gauges(self) -> Iterable[Metric]:
        pool_of = self.plan.pool_of
        yield gauges(
            "sentinel_gateway_in_flight", "Requests that a worker has from this gateway.", ["pool", "worker"],
            {(pool, worker): float(self.guards.load.get(worker, 0)) for worker, pool in pool_of.items()},
        )  # fmt: skip
        states = self.breakers.states()
        yield gauges(
            "sentinel_gateway_breaker", "1 for how a worker's breaker stands, as this gateway goes by it.",
            ["pool", "worker", "state"],
            {
                (pool, worker, state): float(states.get(worker, "closed") == state)
                for worker, pool in pool_of.items()
                for state in ("closed", "open", "half_open")
            },
        )  # fmt: skip
        yield gauges("sentinel_gateway_routes_version", "Version of the route table that is obeyed.", [], {(): self.routes.version})
        yield gauges(
            "sentinel_gateway_limit", "Each limit of admission: what it is; what this gateway may use, uses, and has waiting.",
            ["limit", "of"], {(limit, of): float(n) for limit, numbers in self._limits().items() for of, n in numbers.items()},
        )  # fmt: skip
        yield gauges("sentinel_gateway_sessions", "Sessions whose worker is remembered.", [], {(): len(self.homes)})

"""Which limits a request meets, from the configuration: per pool, per worker and per tenant, in requests and in tokens.

This module exists so that the configuration is looked at once for each combination of pool, worker and tenant, and never on the way
of a request. What always holds: one name is one limit, whoever asks for it; what a new configuration does not name is not handed
out any more, and what of it is in use runs out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from sentinel.gateway.scopes import Lane, Own, Scope
from sentinel.settings_gateway import AdmissionSettings, TenantLimits

FORGET_S = 300.0  # a combination that nobody used for so long


class Lanes:
    """``scopes``: every limit by its name; ``known``: (pool, worker, tenant) → its lane."""

    def __init__(self, settings: AdmissionSettings, tenants: Mapping[str, TenantLimits], share: Callable[[int], int]) -> None:
        """``share``: of a limit that is met for the first time, what may be handed out before the store was asked."""
        self._settings, self._tenants, self._share = settings, tenants, share
        self.scopes: dict[str, Scope] = {}
        self.known: dict[tuple[str, str, str], Lane] = {}
        self._owns: dict[tuple[str, str], Own] = {}
        self._swept = 0.0

    def configure(self, settings: AdmissionSettings, tenants: Mapping[str, TenantLimits]) -> None:
        self._settings, self._tenants = settings, tenants
        for scope in self.scopes.values():
            scope.limit = 0
        for key in list(self.known):
            self.make(*key)
        for scope in self.scopes.values():
            scope.cap = scope.cap if scope.limit else 0

    def make(self, pool: str, worker: str, tenant: str) -> Lane:
        limits = self._settings.pools.get(pool, self._settings.default)
        mine = self._tenants.get(tenant) or self._tenants.get("default") or TenantLimits()
        lane = Lane(pool, worker, tenant)
        counts = [("worker", worker, limits.worker_requests), ("tenant", tenant, mine.requests)]
        sizes = [("pool", pool, limits.tokens), ("worker", worker, limits.worker_tokens), ("tenant", tenant, mine.tokens)]
        lane.sizes = tuple(self._scope(f"{k}-tokens/{name}", k, limit, sized=True) for k, name, limit in sizes if limit)
        lane.counts = tuple(self._scope(f"{k}/{name}", k, limit) for k, name, limit in counts if limit)
        if limits.requests:
            kept = sum(t.reserved.get(pool, 0) for t in self._tenants.values())
            common = self._scope(f"pool/{pool}", "pool", max(0, limits.requests - kept))
            if part := mine.reserved.get(pool):
                reserved = self._scope(f"reserved/{pool}/{tenant}", "pool", part)
                reserved.beside = (common, tenant)
                lane.own = self._owns.setdefault((pool, tenant), Own(reserved, common))
            else:
                lane.counts += (common,)
        self.known[pool, worker, tenant] = lane
        return lane

    def sweep(self, now: float, running: Iterable[Lane]) -> None:
        """Now and then, forget what nobody used for long."""
        if now - self._swept < FORGET_S:
            return
        self._swept = now
        used = {id(lane) for lane in running}
        for key in [k for k, lane in self.known.items() if now - lane.used_at > FORGET_S and id(lane) not in used]:
            del self.known[key]
        named = {s.name for lane in self.known.values() for s in (*lane.counts, *lane.sizes)}
        named |= {s.name for own in self._owns.values() for s in (own.reserved, own.common)}
        named |= {s.name for s in self.scopes.values() if s.used or s.cap or s.waiters or s.said != (0, 0, 0)}
        for name in self.scopes.keys() - named:
            del self.scopes[name]

    def _scope(self, name: str, kind: str, limit: int, *, sized: bool = False) -> Scope:
        scope = self.scopes.get(name)
        if scope is None:
            scope = self.scopes[name] = Scope(name, kind, limit, sized=sized)
            scope.cap = self._share(limit)
        scope.limit = limit
        return scope

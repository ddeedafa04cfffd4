"""What simulated gateways see of a simulated fleet's workers, and tell: shared breakers, answers, panic.

This module exists so that scenarios have clients. Simulated: who answers, and when the shared breaker is open (at once and for as
long as nothing answers, never more than the default share of a pool; no half-open probes). What the decider makes of it is the real
thing. What always holds: only workers in rotation are seen; gateways that are cut off from the store tell nothing at all.
"""

from __future__ import annotations

from typing import Protocol

from sentinel.decide.state.events import Relay
from sentinel.model import Fleet, WorkerState
from sentinel.settings_gateway import BreakerSettings
from sentinel.sim.readings import Process
from sentinel.testing.decisions import World


class Clients(Protocol):
    """What they need of the simulated fleet."""

    world: World

    def process(self, worker: str) -> Process: ...


class Relays:
    def __init__(self, fleet: Clients) -> None:
        self._fleet = fleet
        self.hosts: tuple[str, ...] = ()  # gateway hosts that see traffic; none: the fleet has no gateway
        self.failing: set[str] = set()  # workers whose answers fail behind a green /health
        self.cut = False  # from the store
        self._told: dict[str, Relay] = {}

    def tell(self) -> None:
        """One round of what they see."""
        if not self.hosts or self.cut:
            return
        seen: dict[str, Relay] = {}
        panics: list[str] = []
        plan: Fleet = self._fleet.world.fleet
        for pool in plan.pools:
            members = [w.name for w in plan.workers if w.pool == pool.name and self._serves(w.name)]
            bad = [name for name in members if self._fails(name)]
            most = int(BreakerSettings().max_share * len(members))
            if len(bad) > most:
                panics.append(pool.name)
            seen |= {name: Relay(worker=name, answers=name not in bad) for name in members}
            seen |= {name: self._open(name) for name in bad[:most]}
        changed = [relay for name, relay in seen.items() if relay != self._told.get(name)]
        self._told |= seen
        self._fleet.world.relayed(*changed, gateways=len(self.hosts), panics=panics)

    def _serves(self, worker: str) -> bool:
        return self._fleet.world.state_of(worker) in (WorkerState.ACTIVE, WorkerState.CORDONED)

    def _fails(self, worker: str) -> bool:
        process = self._fleet.process(worker)
        return not process.up or process.frozen or worker in self.failing

    def _open(self, worker: str) -> Relay:
        why = f"9 of 9 requests failed in 10 s, seen by {', '.join(self.hosts)}"
        return Relay(worker=worker, breaker="open", why=why, hosts=self.hosts)

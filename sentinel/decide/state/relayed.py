"""What the gateways see of the workers, as the store tells it: soft, and only as good as it is fresh.

This module exists so that everything which asks "do the gateways reach it?" asks one place, and gets an answer only while there is
somebody to give one. What always holds:

* No gateway that is heard, or nothing from the store for ``STALE_S``: nothing is known of any worker, and nothing is concluded.
* An answer through a gateway counts as having come at the beginning of the window that it was seen in, never later than it did.
* Workers behind a Dynamo frontend are not seen one by one: of them nothing is ever known here.
"""

from __future__ import annotations

from collections.abc import Iterable

from sentinel.decide.state.events import Relay, Relayed, Replica

FAILING, PANIC = "gateway.failing", "gateway.panic"  # checks: of a worker, of a pool
VERSIONS = 2**53  # the store's scripts reckon in doubles: no table of ours has a version from here on
STALE_S = 15.0  # as long as a node may say nothing (timing.silent_after): several of the controller's rounds


class Relays:
    """``replicas`` and ``panics`` as they were told last."""

    def __init__(self) -> None:
        self.replicas: tuple[Replica, ...] = ()
        self.panics: frozenset[str] = frozenset()
        self._workers: dict[str, Relay] = {}
        self._odd: dict[str, None] = {}  # not plainly closed
        self._at = self._window = 0.0

    def fold(self, event: Relayed) -> None:
        self._at, self._window = event.at, event.window
        self.panics = frozenset(event.panics)
        if event.replicas is not None:
            self.replicas = event.replicas
        for relay in event.workers:
            self._workers[relay.worker] = relay
            if relay.breaker == "closed" and not relay.pin:
                self._odd.pop(relay.worker, None)
            else:
                self._odd[relay.worker] = None

    def heard(self, now: float) -> bool:
        """Whether there is a gateway, and the store has told of it lately."""
        return now - self._at <= STALE_S and any(r.there for r in self.replicas)

    def of(self, worker: str) -> Relay:
        return self._workers.get(worker) or Relay(worker=worker)

    def odd(self) -> Iterable[Relay]:
        """Those whose breaker is not plainly closed."""
        return [self._workers[name] for name in self._odd]

    def answers(self, worker: str, now: float) -> bool:
        """Whether the gateways get answers from it."""
        return self.heard(now) and self.of(worker).answers

    def answered_since(self, worker: str, at: float, now: float) -> bool:
        """Whether they certainly got one after ``at``."""
        return self.answers(worker, now) and self._at - self._window > at

    def speak_against(self, worker: str, now: float) -> bool:
        """Whether they say now that it fails: they are heard, and its breaker is open (half-open, a probe may yet close it), by
        nobody's pin."""
        relay = self.of(worker)
        return self.heard(now) and relay.breaker == "open" and not relay.pin

    @property
    def newest(self) -> int:
        """Of the versions of route tables that gateways have obeyed: they ignore whatever is below. 0: none is known."""
        return max((v for r in self.replicas if (v := max(r.version, r.newest)) < VERSIONS), default=0)

    def behind(self, version: int, now: float) -> list[str]:
        """Names of those that obey an older route table than this one."""
        return [r.name for r in self.replicas if r.there and r.version < version] if self.heard(now) else []

"""The controller's own numbers, in the names that docs/architecture.md lists.

This module exists so that dashboards and alerts have one source. What always holds: a counter that an alert takes the
increase of is there at 0 before anything happened (a series born at 1 never alerts); what a gauge says about decisions is
read from the durable ledger at the time of the scrape, so that a closed incident's series ends with it.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sentinel.controller.ledger import Ledger
from sentinel.decide.rules.policy import Mode
from sentinel.decide.state.events import AwaitIdle, Deroute, Look, Repair, Reroute, SendPage, StartWorker, StopWorker, Verify
from sentinel.model import DrainState, Response, WorkerState

REPORT_OUTCOMES = (
    "accepted", "repeated", "gap", "clock_off", "malformed", "too_large", "no_token", "wrong_node", "busy", "not_leader", "failed",
    "foreign", "absurd",
)
EFFECTS = (Deroute, Reroute, AwaitIdle, StopWorker, StartWorker, Repair, Verify, Look, SendPage)


class Metrics:
    """One registry per controller process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.reports = Counter("sentinel_reports_total", "Reports by what became of them.", ["outcome"], registry=r)
        self.store_errors = Counter("sentinel_store_errors_total", "Times the store's answer could not be told.", registry=r)
        self.decider_errors = Counter("sentinel_decider_errors_total", "Events the decider failed on: bugs.", registry=r)
        self.drains = Counter("sentinel_drains_total", "Drains that ended.", ["response", "outcome"], registry=r)
        self.decision = Histogram(
            "sentinel_decision_seconds", "From an event's arrival in the queue until what it caused is durable.",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0), registry=r,
        )
        for outcome in REPORT_OUTCOMES:
            self.reports.labels(outcome)
        self.accepted = self.reports.labels("accepted")  # of nearly every report: not looked up each time
        for response in Response:
            for state in (DrainState.DONE, DrainState.CANCELLED):
                self.drains.labels(response.value, state.value)


class Leads(Protocol):
    """What the gauges are read from; all empty on a controller that stands by."""

    @property
    def epoch(self) -> int: ...

    @property
    def ledger(self) -> Ledger | None: ...

    @property
    def mode(self) -> Mode: ...

    def last_reports(self) -> Iterable[tuple[str, float]]: ...

    def held_back(self) -> frozenset[str]: ...


class Gauges(Collector):
    """Reads the durable ledger at scrape time."""

    def __init__(self, state: Leads, journal_errors: Callable[[], int]) -> None:
        self._state, self._journal_errors = state, journal_errors

    def collect(self) -> Iterable[Metric]:
        ledger = self._state.ledger
        yield GaugeMetricFamily("sentinel_leader", "1 on the controller that leads.", value=float(ledger is not None))
        yield GaugeMetricFamily("sentinel_epoch", "Fencing epoch of this leadership; 0: stands by.", value=self._state.epoch)
        yield GaugeMetricFamily("sentinel_journal_lost_entries", "Entries the disk did not take.", value=self._journal_errors())
        if ledger is None:
            return
        yield _family(
            "sentinel_mode", "1 for how far sentinel goes by itself: observe, advise or enforce.", ["mode"],
            {(m.value,): m is self._state.mode for m in Mode},
        )
        yield _family(
            "sentinel_node_last_report_timestamp_seconds", "When a node's latest report arrived.", ["node"],
            {(node,): at for node, at in self._state.last_reports()},
        )
        yield _family(
            "sentinel_incidents_open", "Incidents that are open.", ["fault", "severity"],
            Tally((i.fault, i.severity.value) for i in ledger.open_incidents()),
        )
        yield _family(
            "sentinel_drains", "Drains by where they stand.", ["state"],
            {(s.value,): 0 for s in DrainState} | Tally((d.state.value,) for d in ledger.drains.values()),
        )
        yield _family(
            "sentinel_effects_pending", "Effects decided and not yet done.", ["effect"],
            {(e.__name__,): 0 for e in EFFECTS} | Tally((type(e).__name__,) for e in ledger.pending.values()),
        )
        held_back = self._state.held_back()
        yield _family(
            "sentinel_budget_blocked", "Workers that doubt would take out and a budget keeps in.", ["pool", "role"],
            {(w.pool, w.role.value): 0 for w in ledger.fleet.workers}
            | Tally((w.pool, w.role.value) for w in ledger.fleet.workers if w.name in held_back),
        )  # fmt: skip
        yield from self._workers(ledger)

    @staticmethod
    def _workers(ledger: Ledger) -> Iterable[Metric]:
        states = ledger.states()
        roles = {(w.pool, w.role.value) for w in ledger.fleet.workers}
        count = {(*r, s.value): 0 for r in sorted(roles) for s in WorkerState} | Tally(
            (w.pool, w.role.value, states[w.name].value) for w in ledger.fleet.workers
        )
        yield _family("sentinel_workers", "Workers by where they stand in the route table.", ["pool", "role", "state"], count)
        whole: Tally[tuple[str, str]] = Tally()
        ready: dict[tuple[str, str], float] = dict.fromkeys(sorted(roles), 0.0)
        for w in ledger.fleet.workers:
            key = (w.pool, w.role.value)
            if not w.standby:
                whole[key] += w.capacity  # type: ignore[assignment]
            if states[w.name] is WorkerState.ACTIVE:
                ready[key] += w.capacity
        yield _family(
            "sentinel_pool_capacity_ratio", "Capacity that takes new sessions, of what the pool has without its standby workers.",
            ["pool", "role"], {k: v / whole[k] for k, v in ready.items() if whole[k]},
        )
        yield _family(
            "sentinel_pool_floor", "Share of a role's capacity that doubtful drains leave in the pool.", ["pool"],
            {(p.name,): p.floor for p in ledger.fleet.pools},
        )
        yield _family(
            "sentinel_pool_weight", "Share of new sessions that the route table sends to a pool.", ["pool"],
            {(p.pool,): p.weight for p in (ledger.routes.pools if ledger.routes else ())},
        )


def _family(name: str, text: str, labels: list[str], values: Mapping[Any, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(list(key), float(value))
    return family

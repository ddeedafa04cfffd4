"""What the shared guards have to say on /metrics, read off them at each scrape.

This module exists so that the guards count with plain numbers and know no metrics library. What always holds: nothing here costs a
request anything, and what is decided without the store shows as such.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from sentinel.gateway.admission import LeaseAdmission
from sentinel.gateway.breakers import SharedBreakers


class GuardMeters(Collector):
    """One per gateway process, registered beside the gateway's own."""

    def __init__(self, admission: LeaseAdmission, breakers: SharedBreakers) -> None:
        self._admission, self._breakers = admission, breakers

    def collect(self) -> Iterable[Metric]:
        admission, breakers, tenure = self._admission, self._breakers, self._admission.tenure
        yield _each(
            "sentinel_gateway_panic", "1 while so many of a pool's workers fail that all are tried.", "pool",
            {pool: float(pool in breakers.panics()) for pool in breakers.pools()},
        )  # fmt: skip
        yield _each(
            "sentinel_gateway_alone", "1 while the store is away and this gateway goes by what it knows: its share of limits, "
            "breakers of its own.", "guard", {"admission": float(tenure.away), "breakers": float(breakers.away)},
        )  # fmt: skip
        yield _each(
            "sentinel_gateway_questions_total", "What the store was asked or told by the guards.", "guard",
            {"admission": float(tenure.statements), "breakers": float(breakers.questions)}, CounterMetricFamily,
        )  # fmt: skip
        yield _each(
            "sentinel_gateway_breaker_trips_total", "Breakers opened, as this gateway heard (all) or decided (alone).", "by",
            {"all": float(breakers.trips), "alone": float(breakers.trips_alone)}, CounterMetricFamily,
        )  # fmt: skip
        yield CounterMetricFamily(
            "sentinel_gateway_breaker_late_total",
            "Outcomes of requests from before a breaker changed: not counted.",
            float(breakers.stale),
        )
        yield GaugeMetricFamily("sentinel_gateway_admitted", "Requests that hold a slot of this gateway.", float(admission.held))
        yield GaugeMetricFamily("sentinel_gateway_waiting", "Requests that wait to be admitted.", float(admission.waiting))
        yield GaugeMetricFamily(
            "sentinel_gateway_settling", "1 while the store does not know yet what everybody holds.", float(tenure.settling)
        )
        yield GaugeMetricFamily(
            "sentinel_gateway_lease_seconds",
            "For how long what is held may still be handed out; below 0 nothing is.",
            tenure.left(),
        )


def _each(
    name: str, text: str, label: str, values: dict[str, float],
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:  # fmt: skip
    family = kind(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family

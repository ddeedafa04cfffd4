"""The gateway's own numbers, counted in plain integers and shown as Prometheus text when somebody asks.

This module exists because a histogram of prometheus-client costs some microseconds a sample (a lock, a label look-up), which at
ten thousand events a second would be a fifth of a core. What always holds:

* Counting is an addition; names, labels and text are made at scrape time.
* A counter that an alert reads is there at 0 as soon as its worker or pool is known.
* What is measured is what the client gets here: first byte written, gaps between what was written, events per second.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

FIRST = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)  # seconds
GAP = (0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)  # seconds; 10 ms is 100 tokens/s
RATE = (5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 80.0, 100.0, 120.0, 150.0, 200.0, 300.0)  # events or tokens per second
OUTCOMES = ("ok", "client_error", "absent", "busy", "failed", "broken", "gone", "refused")


class Histogram:
    """``add`` only appends, which is all that a stream may cost; samples are sorted into buckets when somebody looks, and each
    second (``fold``), so that they do not pile up."""

    __slots__ = ("_new", "add", "bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._new: list[float] = []
        self.add = self._new.append

    def fold(self) -> None:
        if self._new:
            bounds, counts = self.bounds, self.counts
            for value in self._new:
                counts[bisect_left(bounds, value)] += 1
            self.sum += sum(self._new)
            self._new.clear()

    def buckets(self) -> list[tuple[str, float]]:
        self.fold()
        total, shown = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            shown.append((bound, float(total)))
        return shown


class Flow:
    """What is measured of one worker's answers."""

    __slots__ = ("first", "gaps", "rate")

    def __init__(self) -> None:
        self.first, self.gaps, self.rate = Histogram(FIRST), Histogram(GAP), Histogram(RATE)

    def fold(self) -> None:
        self.first.fold()
        self.gaps.fold()
        self.rate.fold()


class Meters(Collector):
    """One per gateway process; ``registry`` is what /metrics shows."""

    def __init__(self, gauges: Callable[[], Iterable[Metric]] = tuple) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        self._gauges = gauges
        self.flows: dict[tuple[str, str], Flow] = {}  # pool, worker
        self.requests: Counter[tuple[str, str, str, str]] = Counter()  # pool, worker, tenant, outcome
        self.refused: Counter[tuple[str, str, str]] = Counter()  # pool, tenant, limit
        self.retries: Counter[tuple[str, str, str]] = Counter()  # pool, worker that failed, why
        self.broken: Counter[tuple[str, str, str]] = Counter()  # pool, worker, why
        self.errors: Counter[int] = Counter(dict.fromkeys((400, 401, 404, 408, 413, 500), 0))  # by status
        self.unretried: Counter[str] = Counter({"budget": 0, "nowhere": 0})

    def flow(self, pool: str, worker: str) -> Flow:
        found = self.flows.get((pool, worker))
        if found is None:
            found = self.flows[pool, worker] = Flow()
        return found

    def fold(self) -> None:
        """To be called every second."""
        for flow in self.flows.values():
            flow.fold()

    def know(self, pool: str, worker: str) -> None:
        """A worker that may be sent requests: its series begin at 0."""
        self.flow(pool, worker)
        for why in ("reset", "stall", "closed_early"):
            self.broken[pool, worker, why] += 0
        for why in ("refused", "reset", "first_byte", "status"):
            self.retries[pool, worker, why] += 0

    def collect(self) -> Iterable[Metric]:
        place = ["pool", "worker"]
        yield _counters(
            "sentinel_gateway_requests_total", "Requests by how they ended; worker: the one that answered last.",
            [*place, "tenant", "outcome"], self.requests,
        )  # fmt: skip
        yield _counters(
            "sentinel_gateway_refused_total", "Requests that were not let in, by limit.", ["pool", "tenant", "limit"], self.refused
        )
        yield _counters(
            "sentinel_gateway_retries_total", "Tries repeated on another worker before a byte reached the client; worker: the "
            "one that failed.", [*place, "why"], self.retries,
        )  # fmt: skip
        yield _counters(
            "sentinel_gateway_unretried_total", "Failed tries that were not repeated, by why.", ["why"],
            {(why,): count for why, count in self.unretried.items()},
        )  # fmt: skip
        yield _counters(
            "sentinel_gateway_errors_total", "Errors that this gateway answered with by itself.", ["status"],
            {(str(status),): count for status, count in self.errors.items()},
        )  # fmt: skip
        yield _counters(
            "sentinel_gateway_stream_errors_total", "Answers that broke after their first byte.", [*place, "why"], self.broken
        )
        for name, text, which in (
            ("sentinel_gateway_first_byte_seconds", "From a request's head to the first byte of its answer's body.", "first"),
            ("sentinel_gateway_gap_seconds", "Between two pieces of one stream.", "gaps"),
            ("sentinel_gateway_tokens_per_second", "Events of a stream, about one a token, by the whole time it took.", "rate"),
        ):
            family = HistogramMetricFamily(name, text, labels=place)
            for key, flow in self.flows.items():
                shown: Histogram = getattr(flow, which)
                family.add_metric(list(key), shown.buckets(), shown.sum)
            yield family
        yield from self._gauges()


def _counters(name: str, text: str, labels: list[str], values: Mapping[Any, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(list(key), float(value))
    return family


def gauges(name: str, text: str, labels: list[str], values: Mapping[Any, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(list(key), float(value))
    return family

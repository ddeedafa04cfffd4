"""What the agent says about itself and its node on /metrics; the names are docs/architecture.md's.

What always holds:

* One registry per agent, nothing global: eighteen agents in one process do not meet.
* Findings are collected at scrape time from what is known then, so that a GPU that left leaves the metrics as well.
* A counter that an alert reads exists at 0 before the first event: ``increase()`` over a series born at 1 is 0. So every
  fatal Xid is there for every GPU that anything was found about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from probes.catalog import xids
from sentinel import __version__
from sentinel.agent.known import Known, News
from sentinel.agent.spool import Spool
from sentinel.model import Reading, Severity

OUTCOMES = ("ok", "failed", "refused")


def fatal_xids() -> tuple[int, ...]:
    return tuple(code for code, xid in xids().items() if xid.judged.severity is Severity.FATAL)


class AgentMetrics:
    """Counts and gauges that the agent's parts set; ``registry`` is what /metrics shows."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        r = self.registry
        self.probe_success = Gauge("sentinel_probe_success", "Whether the probe's last read succeeded", ["probe"], registry=r)
        self.probe_seconds = Gauge(
            "sentinel_probe_duration_seconds", "How long the probe's last read and assessment took", ["probe"], registry=r
        )
        self.xid = Counter("sentinel_xid", "Xid errors in the kernel log", ["gpu", "xid"], registry=r)
        self.listening = Gauge("sentinel_xid_listening", "Whether NVML's Xid events of this GPU are heard", ["gpu"], registry=r)
        self.log_lines = Counter("sentinel_kernel_log_lines", "Kernel log lines read", registry=r)
        self.log_skipped = Counter(
            "sentinel_kernel_log_skipped", "Kernel log records not looked at, or lost to us", ["why"], registry=r
        )
        self.report_errors = Counter("sentinel_report_errors", "Attempts to report that failed", ["why"], registry=r)
        for why in ("unreachable", "refused"):
            self.report_errors.labels(why)
        for why in ("user_space", "malformed", "oversized", "lost"):
            self.log_skipped.labels(why)
        self.last_ack = Gauge(
            "sentinel_report_last_ack_timestamp_seconds", "When the controller last acknowledged a report", registry=r
        )
        self.actions = Counter("sentinel_actions", "Local actions by how they ended", ["action", "outcome"], registry=r)
        Gauge("sentinel_agent_info", "Always 1; the version is the label", ["version"], registry=r).labels(__version__).set(1)
        ProcessCollector(registry=r)
        self._fatal = fatal_xids()
        self._gpus: set[str] = set()

    def observe(self, probe: str, ok: bool, seconds: float) -> None:
        self.probe_success.labels(probe).set(1 if ok else 0)
        self.probe_seconds.labels(probe).set(seconds)

    def forget_probes(self, keep: Iterable[str]) -> None:
        """After a reload: a probe that no longer runs has no status."""
        stay = set(keep)
        for gauge in (self.probe_success, self.probe_seconds):
            for metric in tuple(next(iter(gauge.collect())).samples):
                if metric.labels["probe"] not in stay:
                    gauge.remove(metric.labels["probe"])

    def expect_actions(self, names: Iterable[str]) -> None:
        for name in names:
            for outcome in OUTCOMES:
                self.actions.labels(name, outcome)

    def count_action(self, action: str, outcome: str) -> None:
        self.actions.labels(action, outcome).inc()

    def count_reading(self, reading: Reading) -> None:
        """What a probe says of its own reading. The kernel log's: ``lines`` read, ``skipped`` by why, ``lost`` to an overrun;
        the GPUs': which of them are listened to, where anybody listens."""
        if reading.probe == "gpu" and (events := reading.data.get("xid_events")):
            for pci in {g.get("pci") for g in reading.data.get("gpus", ())} - {None}:
                self.listening.labels(pci).set(1 if pci in events["listening"] else 0)
        if reading.probe != "kernel_log":
            return
        self.log_lines.inc(reading.data.get("lines", 0))
        for why, count in {**reading.data.get("skipped", {}), "lost": reading.data.get("lost", 0)}.items():
            self.log_skipped.labels(why).inc(count)

    def expect_gpus(self, gpus: Iterable[str]) -> None:
        for gpu in gpus:
            if gpu not in self._gpus:
                self._gpus.add(gpu)
                for code in self._fatal:
                    self.xid.labels(gpu, str(code))

    def count_xids(self, news: Iterable[News]) -> None:
        for finding, times in news:
            code = finding.facts.get("xid")
            if isinstance(code, int) and finding.check.startswith("xid.") and not finding.facts.get("history"):
                self.xid.labels(finding.component.gpu or "", str(code)).inc(times)


class KnownCollector(Collector):
    """At each scrape: what is known, what waits in the spool, and what was lost from it."""

    def __init__(self, known: Known, spool: Spool, spool_error: Callable[[], Any]) -> None:
        self._known, self._spool, self._spool_error = known, spool, spool_error

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        present = GaugeMetricFamily(
            "sentinel_finding_present", "Whether a state that was measured is there", labels=["check", "component", "severity"]
        )
        hung = GaugeMetricFamily("sentinel_driver_hung", "Whether a call into the driver is past its deadline", labels=["gpu"])
        for finding in tuple(self._known.states.values()):
            present.add_metric([finding.check, str(finding.component), finding.severity.value], finding.present)
            if finding.check == "driver.hung":
                hung.add_metric([finding.component.gpu or ""], finding.present)
        yield present
        yield hung
        yield GaugeMetricFamily("sentinel_spool_bytes", "Findings waiting for the controller", value=self._spool.bytes)
        yield GaugeMetricFamily("sentinel_spool_findings", "Findings waiting for the controller", value=len(self._spool))
        yield GaugeMetricFamily(
            "sentinel_spool_durable", "Whether what was found last is on disk", value=0 if self._spool_error() else 1
        )
        dropped = CounterMetricFamily(
            "sentinel_spool_dropped", "Findings given up: no room, or refused by the controller", labels=["severity"]
        )
        for severity, count in self._spool.dropped.items():
            dropped.add_metric([severity], count)
        yield dropped
        yield CounterMetricFamily(
            "sentinel_spool_damaged", "Records that were damaged on disk and skipped", value=self._spool.damaged
        )

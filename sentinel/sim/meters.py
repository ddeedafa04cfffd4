"""What a simulated worker shows on /metrics: vLLM's names, labels and buckets.

This module exists so that probes, adapters and dashboards read the demo's workers as they read real ones. What always
holds: every family that is read by fleet control exists from the first scrape, at zero, for every rank.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Meters:
    """vLLM's metric families, as far as fleet control reads them (names and buckets after vLLM 0.32's /metrics)."""

    def __init__(self, model: str, ranks: int) -> None:
        self.registry = registry = CollectorRegistry()
        labels = ("engine", "model_name")
        self._model = model
        seconds = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
        self.running = Gauge("vllm:num_requests_running", "Number of requests in model batches.", labels, registry=registry)
        self.waiting = Gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", labels, registry=registry)
        self.cache = Gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", labels, registry=registry)
        self.prompt = Counter("vllm:prompt_tokens", "Number of prefill tokens processed.", labels, registry=registry)
        self.generated = Counter("vllm:generation_tokens", "Number of generation tokens processed.", labels, registry=registry)
        self.success = Counter(
            "vllm:request_success", "Count of successfully processed requests.", (*labels, "finished_reason"), registry=registry
        )
        self.ttft = Histogram(
            "vllm:time_to_first_token_seconds", "Time to first token.", labels, buckets=seconds, registry=registry
        )
        self.itl = Histogram("vllm:inter_token_latency_seconds", "Inter-token latency.", labels, buckets=seconds, registry=registry)
        self.queued = Histogram(
            "vllm:request_queue_time_seconds", "Time in the WAITING phase.", labels, buckets=seconds, registry=registry
        )
        for rank in range(ranks):
            for family in (self.running, self.waiting, self.cache, self.prompt, self.generated, self.ttft, self.itl, self.queued):
                family.labels(*self.key(rank))
            for reason in ("stop", "length", "abort"):
                self.success.labels(*self.key(rank), reason)

    def key(self, rank: int) -> tuple[str, str]:
        return (str(rank), self._model)

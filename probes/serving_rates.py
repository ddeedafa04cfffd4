"""Throughput reports and counters in a serving log: is the engine making tokens, is its queue growing, are its numbers sound.

This module exists because vLLM's health check says green while its engine hangs: only the report "Running: 3, 0.0 tokens/s",
again and again, shows it. What always holds: time is what the reports themselves carry, else their usual distance; a single
report proves nothing; a stall that ended by itself is told and asks for nothing.
"""

from __future__ import annotations

from typing import Any

from probes.thresholds import limits


def happenings(data: dict[str, Any], names: dict[str, str], memory: dict[str, Any], make: Any) -> list[Any]:
    """What the samples and metrics of one reading say, as ``make(kind, where, line, …)``."""
    found = []
    waits = {names[e[1]]: e for e in data.get("events", ()) if e[0] in ("shm_wait", "hangs")}
    series: dict[tuple[str, str], list[list[Any]]] = {}
    for sample in data.get("samples", ()):
        series.setdefault((names[sample[0]], sample[1]), []).append(sample)
    for (where, engine), samples in series.items():
        said = _stall(samples, where, f"{where}/{engine}", waits.get(where), memory) or _queue(samples)
        for kind, sample, note, facts in said:
            rates = f"prompt={_whole(sample[5])} generation={_whole(sample[6])} tokens/s"
            text = (f"running={_whole(sample[7])} waiting={_whole(sample[8])} {rates}",)
            found.append(make(kind, where, *_place(sample), evidence=text, facts=facts, note=note))
        worst = max(samples, key=lambda s: s[9] or 0.0)
        if worst[9]:
            found.append(make("nan_logits", where, *_place(worst), evidence=(f"Corrupted: {worst[9]:g} reqs",)))
    return found + _metrics(data.get("metrics", ()), names, make)


Said = list[tuple[str, list[Any], str, dict[str, Any]]]


def _place(sample: list[Any]) -> tuple[Any, ...]:
    """Line, clock, at, last line, last at."""
    return sample[2], sample[3], sample[4], sample[2], sample[4]


def _idle_handed(sample: list[Any]) -> bool:
    """No tokens at all although somebody waits for some."""
    return not sample[5] and not sample[6] and bool(sample[7] or sample[8])


def _stall(samples: list[list[Any]], where: str, key: str, wait: list[Any] | None, memory: dict[str, Any]) -> Said:
    t = limits().serving_log
    runs: dict[str, list[Any]] = memory.setdefault("stalls", {})
    run = runs.get(key)  # [clock, at, reports, any running]
    longest: tuple[float, list[Any], bool] | None = None
    for sample in samples:
        if not _idle_handed(sample):
            run = None
            continue
        run = [sample[3], sample[4], 0, False] if run is None or run[0] != sample[3] else run
        run[2] += 1
        run[3] = run[3] or bool(sample[7])
        lasted = run[2] * t.report_s if run[1] is None or sample[4] is None else sample[4] - run[1] + t.report_s
        if lasted >= t.stall_s and run[2] > 1:
            longest = (lasted, sample, run[3])
    if run is None:
        runs.pop(key, None)
    else:
        runs[key] = run
    last = samples[-1]
    if run is not None and longest is None and wait is not None and wait[7] >= last[2]:
        longest = (t.stall_s, last, run[3])  # its own ranks, or a request, have waited for it
    if longest is None:
        return []
    lasted, sample, running = longest
    if run is None:
        return [("stall_over", sample, f"{lasted:.0f} s", {})]
    return [("stalled" if running else "stuck_queue", sample, f"for {lasted:.0f} s at least", {"stalled_s": round(lasted, 1)})]


def _queue(samples: list[list[Any]]) -> Said:
    t = limits().serving_log
    run: list[list[Any]] = []
    for sample in samples:
        longer = bool(run) and sample[8] is not None and sample[8] > run[-1][8]
        run = [*run, sample] if longer else [sample] if sample[8] is not None else []
    if len(run) >= t.growing_reports and run[-1][8] - run[0][8] >= t.growing_requests:
        return [("queue_growing", run[-1], f"from {run[0][8]:.0f} to {run[-1][8]:.0f}", {})]
    return []


def _metrics(metrics: Any, names: dict[str, str], make: Any) -> list[Any]:
    """Counters of a pasted /metrics: wrong numbers, and two scrapes between which no token was made."""
    found: list[Any] = []
    scrapes: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for group, name, labels, line, value in metrics:
        where = names.get(group, "worker@pasted")
        if value is None:
            continue
        if name == "vllm:corrupted_requests_total" and value > 0:
            found.append(make("nan_logits", where, line, evidence=(f"{name}{labels} {value:g}",)))
        elif name == "vllm:nixl_num_notifications_after_expiry_total" and value > 0:
            found.append(make("kv_invalid", where, line, evidence=(f"{name}{labels} {value:g}",)))
        else:
            scrapes.setdefault((where, labels, name), []).append((line, value))
    for (where, labels, name), values in scrapes.items():
        running = scrapes.get((where, labels, "vllm:num_requests_running"), ())
        made = name == "vllm:generation_tokens_total" and len(values) > 1 and values[0][1] == values[-1][1]
        if made and len(running) > 1 and all(v > 0 for _, v in running):
            text = f"{name}{labels} {values[-1][1]:g} in {len(values)} scrapes, running {running[-1][1]:g}"
            found.append(make("stalled", where, values[-1][0], evidence=(text,), note="no token between two scrapes"))
    return found


def _whole(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"

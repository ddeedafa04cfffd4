"""What each gateway costs and adds, all in one run: ours with everything on, beside a naive aiohttp proxy, nginx, Envoy,
vllm-router, smg and LiteLLM.

The gateway under test runs alone on one core; stand-in workers, the load and the store of our guards run on another. Three things:

* short: closed loop on 32 connections, answers of about 400 bytes; requests per second of wall time, and of the gateway's own CPU
* streams: 200 streams of 50 chunks a second; CPU seconds of the gateway per 1,000 chunks, memory per 1,000 streams
* first: time to the first chunk of a further stream on a kept connection, while those 200 run, less what the worker itself took,
  through each gateway and directly; what is added is the difference of the medians and of the 99th percentiles

Medians of three rounds, the gateways in turn within each round; the last line is one JSON object, and a table stands before it.
What is not installed is named as not measured (``python bench/rivals/install.py`` fetches the wheels; nginx is the system's).
``--only NAMES`` measures some; ``--quick``: one short round of ours, ``naive`` and ``bare`` (see bench/rivals/plain.py);
On a machine with other work: ``--wait 60`` waits so long at most, before each, for a moment in which nothing else runs; ``--nice
-10`` puts it before the others, for all gateways alike (needs root); and times to the first chunk as on an idle machine come from
``chrt --rr 1 … --parts streams``, since short requests would leave the others next to nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import tempfile
from pathlib import Path

import uvloop
from rivals.load import ready, short, streams
from rivals.others import OTHERS, Absent, Make
from rivals.ours import Site
from rivals.process import CORES, GATEWAY, LOAD, Process, ahead, calm, free_port, pin, script

Numbers = dict[str, float]
SHOWN = {  # column → key, digits
    "short/s": ("short_per_s", 0), "per CPU s": ("short_per_cpu_s", 0), "CPU s / 1,000 chunks": ("streams_cpu_per_1000", 4),
    "chunks/s": ("streams_chunks_per_s", 0), "first p50 ms": ("added_p50_ms", 2), "p99 ms": ("added_p99_ms", 2),
    "MiB / 1,000 streams": ("streams_mib_per_1000_streams", 1),
}  # fmt: skip


class Bench:
    """``lengths``: seconds of short requests, seconds of streams, probes."""

    def __init__(self, folder: Path, behind: list[int], lengths: tuple[float, float, int]) -> None:
        self.folder, self.behind, self.lengths = folder, behind, lengths
        self.parts, self.wait_s = ["short", "streams"], 0.0
        self.seen: dict[str, list[Numbers]] = {}
        self.missing: dict[str, str] = {}  # name → why it is not measured

    async def one(self, name: str, make: Make) -> None:
        """One gateway once: start it, put both loads on it, end it."""
        own = self.folder / name
        own.mkdir(exist_ok=True)
        port = free_port()
        try:
            start = make(own, port, self.behind)
        except Absent as why:
            self.missing[name] = str(why)
            return
        await calm(self.wait_s)
        process = Process(start.argv, GATEWAY, own / "log", env=start.env)
        try:
            if not await ready(port, start.patience_s, process.alive):
                self.missing[name] = f"it did not answer within {start.patience_s:g} s: {process.last_words()}"
                return
            short_s, stream_s, probes = self.lengths
            some = await short(port, process, short_s) if "short" in self.parts else {}
            many = await streams(port, process, self.behind[0], stream_s, probes) if "streams" in self.parts else {}
        except (AssertionError, OSError) as error:
            self.missing[name] = f"it failed under load: {error}"
            return
        finally:
            process.end()
        found = {f"short_{k}": v for k, v in some.items()} | {f"streams_{k}": v for k, v in many.items()}
        if many:
            found |= {f"added_{p}_ms": many[f"first_{p}_ms"] - many[f"direct_{p}_ms"] for p in ("p50", "p99")}
        self.seen.setdefault(name, []).append(found)
        print(f"{name}: " + ", ".join(f"{k} {v:.4g}" for k, v in found.items()), flush=True)

    def medians(self) -> dict[str, Numbers]:
        return {name: {k: statistics.median(r[k] for r in rows) for k in rows[0]} for name, rows in self.seen.items()}

    def ratio(self, name: str, to: str, key: str) -> float | None:
        """The median over the rounds of what ``name`` has for one of ``to``: what disturbs one disturbs the other."""
        pairs = [(a[key], b[key]) for a, b in zip(self.seen.get(name, ()), self.seen.get(to, ()), strict=False) if key in a]
        return round(statistics.median(a / b for a, b in pairs), 3) if pairs else None


def table(middle: dict[str, Numbers]) -> str:
    lines = ["| | " + " | ".join(SHOWN) + " |", "|---" * (len(SHOWN) + 1) + "|"]
    for name, row in middle.items():
        cells = [f"{row[key]:,.{digits}f}" if key in row else "" for key, digits in SHOWN.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


async def rounds(
    names: list[str], parts: list[str], count: int, lengths: tuple[float, float, int], wait_s: float
) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="sentinel-") as temporary:
        folder = Path(temporary)
        stand_ins = Process(script("worker.py"), LOAD, folder / "workers.log")
        behind = stand_ins.line()
        site = Site(folder, behind)
        try:
            await site.start()
            bench = Bench(folder, behind, lengths)
            bench.parts, bench.wait_s = parts, wait_s
            makes = {"ours": site.gateway} | OTHERS
            for _ in range(count):
                for name in names:
                    if name not in bench.missing:
                        await bench.one(name, makes[name])
        finally:
            await site.stop()
            stand_ins.end()
    middle = bench.medians()
    print(table(middle))
    for name, why in bench.missing.items():
        print(f"{name} is not measured: {why}")
    mine = middle.get("ours", {})
    return {
        "bench": "gateway", "store": site.kind, "rounds": count, "cores": len(CORES), "load_beside": os.getloadavg()[1],
        "short_ratio_to_naive": bench.ratio("ours", "naive", "short_per_s"),
        "cpu_s_per_1000_chunks": _shown(mine.get("streams_cpu_per_1000"), 4),
        "added_first_p50_ms": _shown(mine.get("added_p50_ms"), 3), "added_first_p99_ms": _shown(mine.get("added_p99_ms"), 3),
        "mib_per_1000_streams": _shown(mine.get("streams_mib_per_1000_streams"), 1),
        "ratios": {
            name: {
                "short_per_s": bench.ratio("ours", name, "short_per_s"),
                "cpu_per_1000_chunks": bench.ratio("ours", name, "streams_cpu_per_1000"),
            }
            for name in middle if name != "ours"
        },
        "not_measured": bench.missing,
        "medians": {name: {k: round(v, 4) for k, v in row.items()} for name, row in middle.items()},
    }  # fmt: skip


def _shown(value: float | None, digits: int) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, digits)


def main() -> None:
    every = ["ours", *OTHERS]
    parser = argparse.ArgumentParser(description="what each gateway costs and adds")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help=f"names out of {','.join(every)}")
    parser.add_argument("--parts", default="short,streams")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--wait", type=float, default=0.0)
    given = parser.parse_args()
    names = given.only.split(",") if given.only else (["ours", "naive", "bare"] if given.quick else every)
    if unknown := set(names) - set(every):
        parser.error(f"--only: {', '.join(sorted(unknown))} is not measured here; wanted names out of {', '.join(every)}")
    if given.nice:
        ahead(given.nice)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    pin(LOAD)
    lengths = (2.0, 4.0, 100) if given.quick else (5.0, 8.0, 300)
    count = given.rounds or (1 if given.quick else 3)
    print(json.dumps(uvloop.run(rounds(names, given.parts.split(","), count, lengths, given.wait))))


if __name__ == "__main__":
    main()

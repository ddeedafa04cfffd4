"""From a kernel line to a worker out of a real Dynamo frontend's rotation: milliseconds, through the whole system.

The way: a line with Xid 79 is written into a node's kernel log; ``sentinel agent`` reads, judges and reports it; ``sentinel
controller`` decides, commits to the embedded store and removes the worker's discovery entry; the frontend stops naming it. One
sample is the time from just before the write to the answer of the frontend's /health without the worker; it is asked over and
over, so each sample includes up to two such calls. The worker is killed too, and ``undrain`` brings it back for the next round.

Real: ai-dynamo's frontend, discovery and workers' processes, etcd, both daemons, everything on this one host. Simulated: the
kernel log, the GPUs' driver, the engines, PagerDuty. Two passes per kind of discovery, without and with streaming traffic.
Needs the packages of requirements/dynamo.txt (installed on first use, 330 MB) and, for etcd, Debian's etcd-server.

usage: dynamo_latency.py [--rounds 10] [--streams 20] [file] [etcd]; the last line is one JSON object
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.e2e.dynamo_site import site, traffic

REPEAT_S = 6.0  # a line about the same GPU within five seconds counts as the same occurrence


async def measure(kind: Literal["file", "etcd"], rounds: int, streams: int, folder: Path) -> dict[str, object]:
    """Milliseconds of each round, and what the clients saw."""
    took: list[float] = []
    last: dict[str, float] = {}
    etcd = Path(shutil.which("etcd") or "/usr/bin/etcd")
    async with site(folder, kind, etcd=etcd) as place, traffic(place.dynamo, streams=streams) as counts:
        for n in range(rounds):
            victim = place.dynamo.workers[n % 3]
            asking = asyncio.create_task(place.gone(victim.hexid))
            await asyncio.sleep(max(0.2, last.get(victim.name, 0.0) + REPEAT_S - time.time()))
            written = last[victim.name] = time.time()
            place.line(victim.name, 79, "GPU has fallen off the bus.")
            took.append((await asking - written) * 1000)
            drain = await place.drain_of(victim.name, "out")
            status, said = await place.cli("undrain", victim.name, "--reason", "bench/dynamo_latency.py goes on")
            assert status == 0, said
            await place.back(victim.name, drain["id"])
            await place.over(drain["incident"])
    took.sort()
    return {
        "p50_ms": round(statistics.median(took), 1),
        "max_ms": round(took[-1], 1),
        "rounds": rounds,
        "requests": {"sent": counts.sent, "failed": counts.failed},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("kinds", nargs="*", default=["file", "etcd"])
    given = parser.parse_args()
    result: dict[str, object] = {"bench": "dynamo_latency", "cores": os.cpu_count(), "streams": given.streams}
    for kind in given.kinds:
        passes = {}
        for name, streams in (("idle", 0), ("busy", given.streams)):
            with tempfile.TemporaryDirectory() as folder:
                passes[name] = asyncio.run(measure(kind, given.rounds, streams, Path(folder)))
            print(kind, name, passes[name], flush=True)
        result[kind] = passes
    print(json.dumps(result))


if __name__ == "__main__":
    main()

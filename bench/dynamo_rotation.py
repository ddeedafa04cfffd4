"""Milliseconds from ``deroute`` and ``reroute`` to their effect in a real Dynamo frontend, with file and with etcd discovery.

Real: ai-dynamo's frontend, discovery and request plane, etcd. Simulated: the engines (Dynamo's own mocker), 20 streams of
traffic. The effect is seen by asking the frontend's /health over and over, so each figure includes one such call. Needs the
packages of requirements/dynamo.txt (installed on first use, 330 MB) and, for etcd, Debian's etcd-server.

usage: dynamo_rotation.py [--rounds 20] [file] [etcd]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

from sentinel.serving.adapters import open_discovery
from sentinel.serving.dynamo import DynamoAdapter
from tests.e2e.dynamo import DynamoRig, MemoryKeep, RigHands, rig


async def until(dynamo: DynamoRig, hexid: str, *, routable: bool) -> float:
    while (hexid in await dynamo.routable()) is not routable:
        pass
    return time.perf_counter()


async def measure(kind: Literal["file", "etcd"], rounds: int, folder: Path) -> dict[str, object]:
    """Medians and worst of ``rounds`` times out and back under load, and what the clients saw."""
    async with rig(folder, 3, kind, etcd=Path(shutil.which("etcd") or "/usr/bin/etcd")) as dynamo:
        discovery = open_discovery(dynamo.settings, dynamo.http)
        assert discovery
        adapter = DynamoAdapter(dynamo.settings, discovery, RigHands(dynamo), MemoryKeep(), dynamo.http)
        victim = dynamo.workers[0]
        await adapter.look(victim.worker)
        load = asyncio.create_task(dynamo.load(streams=20, tokens=100, seconds=rounds * 0.45 + 1))
        await asyncio.sleep(1)
        out, back = [], []
        for _ in range(rounds):
            for verb, routable, times in ((adapter.deroute, False, out), (adapter.reroute, True, back)):
                seen = asyncio.create_task(until(dynamo, victim.hexid, routable=routable))
                begun = time.perf_counter()
                assert await verb(victim.worker)
                times.append((await seen - begun) * 1000)
                await asyncio.sleep(0.2)
        counts = await load
    return {
        "deroute_ms": {"p50": round(statistics.median(out), 1), "max": round(max(out), 1)},
        "reroute_ms": {"p50": round(statistics.median(back), 1), "max": round(max(back), 1)},
        "requests": {"sent": counts.sent, "failed": counts.failed},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("kinds", nargs="*", default=["file", "etcd"])
    given = parser.parse_args()
    result = {}
    for kind in given.kinds:
        with tempfile.TemporaryDirectory() as folder:
            result[kind] = asyncio.run(measure(kind, given.rounds, Path(folder)))
        print(kind, result[kind], flush=True)
    print(json.dumps({"bench": "dynamo_rotation", "rounds": given.rounds, **result}))


if __name__ == "__main__":
    main()

"""How soon three gateways obey a new route table, and the controller knows it: milliseconds, p50, p99 and worst.

Real: three ``sentinel gateway`` processes, one store (redis-server, else the embedded Valkey), the commit of a leader, the
gateways' acknowledgement. Simulated: nothing decides; a worker of the table goes out and comes back. One sample is the time from
just before the commit until the store names no gateway that is behind, asked every millisecond: an upper bound of when the last
of the three stopped sending by the old table. For tables of 8, 1,000 and 10,000 workers, ``--changes`` of each (default 100);
the three share this machine's cores. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from load.stores import likely
from rivals.process import free_port

from sentinel.model import Role, RouteEntry, RoutePool, Routes, WorkerState
from sentinel.store import PublishRoutes, Store
from sentinel.store.gateways import Gateways

GATEWAYS, SIZES, PAUSE_S = 3, (8, 1_000, 10_000), 0.1


def table(size: int) -> Routes:
    rows = (
        RouteEntry(worker=f"w{n}", url=f"http://10.0.{n // 250}.{n % 250}:8000", role=Role.BOTH, state=WorkerState.ACTIVE)
        for n in range(size)
    )
    return Routes(version=1, pools=(RoutePool(pool="p", weight=1.0, workers=tuple(rows)),))


def changed(routes: Routes, number: int) -> Routes:
    """The next version, in which one worker has left, or is back."""
    pool = routes.pools[0]
    rows = list(pool.workers)
    row = rows[number % len(rows)]
    state = WorkerState.OUT if row.state is WorkerState.ACTIVE else WorkerState.ACTIVE
    rows[number % len(rows)] = msgspec.structs.replace(row, state=state)
    pool = msgspec.structs.replace(pool, workers=tuple(rows))
    return Routes(version=routes.version + 1, pools=(pool,))


async def obeyed(gateways: Gateways, version: int) -> None:
    while not await gateways.acked(version):
        await asyncio.sleep(0.001)


async def measure(store: Store, url: str, folder: Path, size: int, changes: int) -> dict[str, float]:
    epoch = await store.lease.acquire("bench", "http://bench", 3600)
    assert epoch, "nobody else leads in this store"
    routes = table(size)
    assert await store.decisions.commit(epoch, [PublishRoutes(routes)])
    gateways, running = Gateways(store), []
    try:
        for number in range(GATEWAYS):
            file = folder / f"gateway{number}.toml"
            file.write_text(
                f'[gateway]\nname = "g{number}"\nlisten = "127.0.0.1:{free_port()}"\nadmin = "127.0.0.1:{free_port()}"\n'
                f'[store]\nurl = "{url}"\n[[pools]]\nname = "p"\n[[workers]]\nname = "w0"\npool = "p"\nurl = "http://10.0.0.0:8000"\n',
                "utf-8",
            )
            argv = [sys.executable, "-c", "from sentinel.cli.main import main; main()", "gateway", "--config", str(file)]
            running.append(subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=(folder / f"{number}.log").open("wb")))
        async with asyncio.timeout(60):
            while sum(p.version == 1 for p in await gateways.all()) < GATEWAYS:
                await asyncio.sleep(0.05)
        took: list[float] = []
        for number in range(changes):
            await asyncio.sleep(PAUSE_S)
            routes = changed(routes, number // 2)
            began = time.monotonic()
            assert await store.decisions.commit(epoch, [PublishRoutes(routes)])
            await obeyed(gateways, routes.version)
            took.append((time.monotonic() - began) * 1000)
    finally:
        for process in running:
            process.kill()
            process.wait()
    took.sort()
    p99 = took[min(len(took) - 1, len(took) * 99 // 100)]
    return {"p50_ms": round(statistics.median(took), 2), "p99_ms": round(p99, 2), "worst_ms": round(took[-1], 2)}


async def main(changes: int) -> None:
    result: dict[str, Any] = {"bench": "route_push", "gateways": GATEWAYS, "changes": changes}
    for size in SIZES:
        with tempfile.TemporaryDirectory(prefix="sentinel-") as folder:
            async with likely(Path(folder)) as (result["store"], url, store):
                result[f"workers_{size}"] = await measure(store, url, Path(folder), size, changes)
                print(f"{size} workers: {result[f'workers_{size}']}", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=100)
    uvloop.run(main(parser.parse_args().changes))

"""One real controller in a process of its own, for the benchmark to put load on.

What is real: the controller as the daemon builds it (HTTP, ingest, decider, journal, leader's lease) and the embedded store.
What is simulated: the serving adapter and the pager, which do at once what they are told and remember when. The benchmark
asks over standard input and output, one JSON line each: what has been spent, what has been decided.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from sentinel.config import ControllerSettings, StoreSettings
from sentinel.controller.auth import digest
from sentinel.controller.commands import CommandDesk
from sentinel.controller.metrics import Metrics
from sentinel.controller.seat import Controller
from sentinel.decide.decider import Decider
from sentinel.decide.rules.policy_file import default_policy
from sentinel.durations import Duration
from sentinel.heap import seldom
from sentinel.logs import configure
from sentinel.model import Drain, Fleet, Pool, Role, Worker, WorkerState, gpu_component
from sentinel.store import open_store
from sentinel.testing.control import PagerStandIn, ServingStandIn
from sentinel.testing.decisions import PCIS


def names(nodes: int) -> list[str]:
    return [f"n{i:05d}" for i in range(nodes)]


def fleet(nodes: int) -> Fleet:
    """A TP4 decoder on every tray, eighteen trays a rack, and a pool that takes over."""
    workers = [
        Worker(
            name=f"decode-{n}", pool="main", url=f"http://{n}", role=Role.DECODE, nodes=(n,), domain=f"rack-{i // 18}",
            gpus=tuple(gpu_component(n, p) for p in PCIS),
        )
        for i, n in enumerate(names(nodes))
    ]  # fmt: skip
    spare = Worker(name="spare", pool="overflow", url="http://spare", nodes=(names(nodes)[0],))
    pools = (Pool(name="main", overflow=("overflow",)), Pool(name="overflow", floor=0.0, primary=False))
    return Fleet(pools=pools, workers=(*workers, spare), nodes=tuple(names(nodes)))


class Adapter(ServingStandIn):
    """Remembers when each worker left rotation."""

    def __init__(self) -> None:
        super().__init__()
        self.derouted: dict[str, float] = {}

    async def deroute(self, worker: Worker) -> bool:
        self.derouted[worker.name] = time.time()
        return True

    async def look(self, worker: Worker) -> Any:
        self.looks = getattr(self, "looks", 0) + 1
        return await super().look(worker)


class Exact:
    """Every decision's time instead of a histogram's buckets; stands in the controller's metrics."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def observe(self, seconds: float) -> None:
        self.seconds.append(seconds)


class Bench:
    def __init__(self, controller: Controller, adapter: Adapter, exact: Exact, directory: Path) -> None:
        self.controller, self.adapter, self.exact, self.directory = controller, adapter, exact, directory

    def spent(self) -> dict[str, Any]:
        """CPU seconds so far, resident MiB, decision times since the last call, and what the journal holds."""
        use = resource.getrusage(resource.RUSAGE_SELF)
        took, self.exact.seconds = sorted(self.exact.seconds), []
        self.adapter.calls.clear()
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        return {
            "at": time.monotonic(), "cpu": use.ru_utime + use.ru_stime, "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            "decisions": len(took), "p50_ms": 1e3 * _share(took, 0.5), "p99_ms": 1e3 * _share(took, 0.99),
            "max_ms": 1e3 * _share(took, 1.0), "journal": sum(p.stat().st_size for p in (self.directory / "journal").iterdir()),
            "looks": getattr(self.adapter, "looks", 0),
        }  # fmt: skip

    def decided(self) -> dict[str, Any]:
        term = self.controller.term
        if term is None:
            return {"leads": False}
        states = term.ledger.states()
        main = [s for name, s in states.items() if name != "spare"]
        drains = [d for d in term.ledger.drains.values() if isinstance(d, Drain)]
        return {
            "leads": True, "epoch": term.lease.epoch, "url": self.controller.url, "workers": len(main),
            "active": main.count(WorkerState.ACTIVE),
            "out": main.count(WorkerState.OUT), "drains": len(drains), "doubtful": sum(d.doubtful for d in drains),
            "incidents": len(term.ledger.incidents), "backlog": term.core.backlog,
            "derouted": len(self.adapter.derouted), "last_derouted": max(self.adapter.derouted.values(), default=0.0),
        }  # fmt: skip


def _share(values: list[float], share: float) -> float:
    return values[min(int(len(values) * share), len(values) - 1)] if values else 0.0


async def serve(nodes: int, directory: Path, *, lease: float, profile: bool) -> None:
    seldom()  # as the daemon does
    tokens = directory / "nodes"
    tokens.write_text("".join(f"{n} {digest(f'token-of-{n}')}\n" for n in names(nodes)), "utf-8")
    store = await open_store(StoreSettings(), directory / "store")
    settings = ControllerSettings(name="bench", listen="127.0.0.1:0", journal_dir=directory / "journal", node_tokens=tokens,
                                  journal_max_bytes=8 << 30, lease=Duration(lease))  # fmt: skip
    adapter, metrics, exact = Adapter(), Metrics(), Exact()
    metrics.decision = exact  # type: ignore[assignment]
    controller = Controller(
        settings, fleet(nodes), store=store, serving=adapter, desk=CommandDesk(), pager=PagerStandIn(),
        decider=partial(Decider, default_policy()), metrics=metrics,
    )  # fmt: skip
    await controller.start()
    while controller.term is None:
        await asyncio.sleep(0.05)
    bench = Bench(controller, adapter, exact, directory)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    if profile:
        import cProfile  # noqa: PLC0415

        profiler = cProfile.Profile()
    while line := await reader.readline():
        verb = line.decode().strip()
        if verb == "profile":
            profiler.enable()
            answer: dict[str, Any] = {}
        elif verb == "profiled":
            profiler.disable()
            profiler.dump_stats(directory / "profile")
            answer = {}
        else:
            answer = bench.spent() if verb == "spent" else bench.decided()
        print(json.dumps(answer), flush=True)
    await controller.stop()
    await store.close()


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--nodes", type=int, required=True)
    ap.add_argument("--directory", type=Path, required=True)
    ap.add_argument("--lease", type=float, required=True)
    ap.add_argument("--profile", action="store_true")
    a = ap.parse_args()
    configure("json", "error")
    uvloop.run(serve(a.nodes, a.directory, lease=a.lease, profile=a.profile))


if __name__ == "__main__":
    main()

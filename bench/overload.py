"""Whether overload is a plateau: once, twice and three times what a pool can carry, through real gateways with real guards.

Real: two ``sentinel gateway`` daemons on one core that share a pool's limits through one store (redis-server, or the embedded one
where there is none), API keys, breakers, admission by lease. Simulated, on the other core: workers that take 0.1 to 0.3 s of
work and share themselves out like an engine, so that more than they can carry makes everything slower; and clients that arrive by
chance (Poisson) at so many times the pool's capacity, do not wait for each other, ignore Retry-After, and give up after a second.

* goodput: answers that came within that second, per second; ``plateau``: of three times, against the best of all three
* refused: from the last byte of a request to the first of its 503, as a client sees it: the short queue (0.25 s at most) and the
  round trip are in it. A request is let in line only when it can expect its turn in half of that time, so most are told at once
* lag: by how much the load's own millisecond is late, which is what the machine adds to everything
* unguarded, pool_only: three times through the same gateways without a limit, and with the pool's limit alone: then sessions that
  stay where their KV is make some workers slower than others (a quarter above the fair share is allowed)

Medians of three rounds; the first second of each does not count. The last line is one JSON object. ``--quick``: one short round;
``--nice -10`` keeps whatever else runs on the machine out of the way (needs root).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import uvloop
from rivals.load import ask
from rivals.others import Start
from rivals.ours import Site
from rivals.process import GATEWAY, LOAD, Process, ahead, free_port, pin
from rivals.worker import ANSWER, MODEL, answer

WORKERS, GATEWAYS = 4, 2
EACH = 20  # requests that one worker carries at full speed
WORK_S = (0.1, 0.3)
CAPACITY = WORKERS * EACH / (sum(WORK_S) / 2)  # requests per second
QUEUE_S = 0.25
LEASE_S = 3.0
DEADLINE_S = 1.0
POOL = f"[gateway.admission.pools.p]\nrequests = {WORKERS * EACH}\n"
BOTH = f"{POOL}worker_requests = {EACH}\n"


class Engine:
    """One worker's work, shared out evenly: up to ``EACH`` requests go on at full speed, more at their part of it."""

    def __init__(self) -> None:
        self._done, self._at = 0.0, 0.0  # work that each of those here had done to it, as of when
        self._jobs: list[tuple[float, int, asyncio.Transport]] = []
        self._serial = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, transport: asyncio.Transport) -> None:
        self._go_on()
        heapq.heappush(self._jobs, (self._done + random.uniform(*WORK_S), next(self._serial), transport))
        self._plan()

    def drop(self, transport: asyncio.Transport) -> None:
        """Whoever asked is gone: an engine stops computing."""
        self._go_on()
        self._jobs = [job for job in self._jobs if job[2] is not transport]
        heapq.heapify(self._jobs)
        self._plan()

    def _speed(self) -> float:
        return min(1.0, EACH / max(1, len(self._jobs)))

    def _go_on(self) -> None:
        now = time.monotonic()
        self._done += (now - self._at) * self._speed()
        self._at = now
        while self._jobs and self._jobs[0][0] <= self._done:
            heapq.heappop(self._jobs)[2].write(answer(b"200 OK", ANSWER))

    def _plan(self) -> None:
        if self._timer:
            self._timer.cancel()
        if self._jobs:
            left = max(0.0, self._jobs[0][0] - self._done) / self._speed()
            self._timer = asyncio.get_running_loop().call_later(left, self._ring)

    def _ring(self) -> None:
        self._go_on()
        self._plan()


class Worker(asyncio.Protocol):
    """One connection to an engine; one request at a time, as the gateway sends them."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.held = engine, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.held += data
        head, found, body = self.held.partition(b"\r\n\r\n")
        if found and len(body) >= int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]):
            self.held = b""
            self.engine.add(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.engine.drop(self.transport)


class Client(asyncio.Protocol):
    """One kept connection; ``ask`` is one request on it."""

    def __init__(self) -> None:
        self.waiter: asyncio.Future[int] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:  # answers are short, and come in one piece
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(int(data[9:12]))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(0)

    async def ask(self, request: bytes) -> int:
        """The status; 0 where there was none within ``DEADLINE_S``."""
        self.waiter = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEADLINE_S):
                return await self.waiter
        self.transport.abort()
        return 0


class Load:
    """Open loop: requests come when they come. ``took``: status → milliseconds of each."""

    def __init__(self, ports: list[int]) -> None:
        self.ports, self.idle = ports, [list[Client]() for _ in ports]
        self.took: dict[int, list[float]] = {}
        self.counts_from = 0.0

    async def one(self, n: int) -> None:
        which, loop = n % len(self.ports), asyncio.get_running_loop()
        began = time.monotonic()
        while self.idle[which] and self.idle[which][-1].transport.is_closing():
            self.idle[which].pop()
        if self.idle[which]:
            client = self.idle[which].pop()
        else:
            _, client = await loop.create_connection(Client, "127.0.0.1", self.ports[which])
        status = await client.ask(ask(n))
        if status:
            self.idle[which].append(client)
        if began >= self.counts_from:
            self.took.setdefault(status, []).append((time.monotonic() - began) * 1000)

    async def run(self, times: float, seconds: float) -> None:
        due = time.monotonic()
        self.counts_from, ends, tasks = due + 1.0, due + 1.0 + seconds, set[asyncio.Task[None]]()
        for n in itertools.count():
            due += random.expovariate(times * CAPACITY)
            if due > ends:
                break
            if (left := due - time.monotonic()) > 0:
                await asyncio.sleep(left)
            tasks.add(task := asyncio.create_task(self.one(n)))
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        for clients in self.idle:
            for client in clients:
                client.transport.abort()


class Limited(Site):
    """``limits``: the table of the pool's limits."""

    limits = ""

    def gateway(self, folder: Path, port: int, behind: list[int]) -> Start:
        workers = "".join(f'[[workers]]\nname = "{w}"\npool = "p"\nurl = "{u}"\n' for w, u in self.urls.items())
        file = folder / "gateway.toml"
        file.write_text(
            f'[gateway]\nlisten = "127.0.0.1:{port}"\nadmin = "127.0.0.1:{free_port()}"\nkeys = "{self.folder}/keys"\n'
            f'queue = "{QUEUE_S * 1000:.0f}ms"\n[gateway.admission]\nlease = "{LEASE_S:g}s"\nreplicas = {GATEWAYS}\n{self.limits}'
            f'[store]\nurl = "{self.url}"\n[[pools]]\nname = "p"\nmodel = "{MODEL}"\n{workers}',
            "utf-8",
        )
        return Start([sys.executable, "-c", "from sentinel.cli.main import main; main()", "gateway", "--config", str(file)])


async def lags(late: list[float]) -> None:
    while True:
        began = time.monotonic()
        await asyncio.sleep(0.001)
        late.append((time.monotonic() - began) * 1000 - 1.0)


async def up(port: int, process: Process) -> None:
    for _ in range(1200):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        assert process.alive(), process.last_words()
        await asyncio.sleep(0.05)
    raise AssertionError(f"the gateway did not come up: {process.last_words()}")


async def measure(folder: Path, site: Limited, limits: str, times: list[float], seconds: float) -> dict[str, float]:
    """One round of new gateways."""
    site.limits, found = limits, dict[str, float]()
    ports = [free_port() for _ in range(GATEWAYS)]
    processes = []
    for port in ports:
        own = folder / f"gateway-{port}"
        own.mkdir()
        processes.append(Process(site.gateway(own, port, site.behind).argv, GATEWAY, own / "log"))
    try:
        await asyncio.gather(*map(up, ports, processes))
        await asyncio.sleep(LEASE_S + 0.5)  # until the store knows what everybody holds; till then each has an equal part
        for n in times:
            load, late = Load(ports), list[float]()
            before = sum(p.cpu() for p in processes)
            lag = asyncio.create_task(lags(late))
            await load.run(n, seconds)
            lag.cancel()
            found[f"lag_p99_ms_{n:g}x"] = sorted(late)[int(len(late) * 0.99)]
            found[f"goodput_{n:g}x"] = len(load.took.get(200, [])) / seconds
            found[f"gave_up_{n:g}x"] = len(load.took.get(0, [])) / seconds
            found[f"gateway_core_{n:g}x"] = (sum(p.cpu() for p in processes) - before) / (seconds + 1.0)
            if refused := sorted(load.took.get(503, [])):
                found[f"refused_{n:g}x"] = len(refused) / seconds
                found[f"refused_p50_ms_{n:g}x"] = refused[len(refused) // 2]
                found[f"refused_p99_ms_{n:g}x"] = refused[int(len(refused) * 0.99)]
                found[f"refused_within_10_ms_{n:g}x"] = sum(r < 10 for r in refused) / len(refused)
            assert not load.took.keys() - {200, 503, 0}, load.took.keys()
    finally:
        for process in processes:
            process.end()
    return found


async def main(rounds: int, seconds: float) -> None:
    pin(LOAD)
    loop = asyncio.get_running_loop()
    engines = [Engine() for _ in range(WORKERS)]
    servers = [await loop.create_server(lambda e=e: Worker(e), "127.0.0.1", 0, backlog=1024) for e in engines]
    behind = [s.sockets[0].getsockname()[1] for s in servers]
    with tempfile.TemporaryDirectory(prefix="sentinel-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        site = Limited(folder, behind)
        await site.start()
        try:
            seen = []
            for _ in range(rounds):
                guarded = await measure(folder, site, BOTH, [1, 2, 3], seconds)
                coarse = await measure(folder, site, POOL, [3], seconds)
                without = await measure(folder, site, "", [3], seconds)
                best = max(guarded[f"goodput_{n}x"] for n in (1, 2, 3))
                guarded["plateau"] = guarded["goodput_3x"] / best
                guarded["goodput_of_capacity"] = guarded["goodput_3x"] / CAPACITY
                others = {"pool_only_goodput_3x": coarse["goodput_3x"], "unguarded_goodput_3x": without["goodput_3x"]}
                seen.append(guarded | others)
                print(json.dumps({k: round(v, 3) for k, v in seen[-1].items()}), flush=True)
        finally:
            await site.stop()
    keys = [key for key in seen[0] if all(key in s for s in seen)]
    medians = {key: round(statistics.median(s[key] for s in seen), 3) for key in keys}
    fixed = {"bench": "overload", "store": site.kind, "gateways": GATEWAYS, "capacity_per_s": CAPACITY, "queue_s": QUEUE_S}
    print(json.dumps(fixed | medians | {"load_beside": os.getloadavg()[1]}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--nice", type=int, default=0)
    told = parser.parse_args()
    ahead(told.nice)
    uvloop.run(main(1 if told.quick else 3, 2.0 if told.quick else 5.0))

"""Gateways as they are run, for tests and benchmarks that put real engines behind them.

What always holds: the gateways are processes of ``sentinel gateway`` on one port, from a file, with a real store; routes come by
push, and a table counts as published when every gateway obeys it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import aiohttp

from sentinel.config import DynamoSettings, StoreSettings
from sentinel.gateway.models import frontend_name
from sentinel.model import Role, RouteEntry, RoutePool, Routes, WorkerState
from sentinel.store import PublishRoutes, Store, StoreError, open_store
from sentinel.store.gateways import Gateways
from sentinel.tokens import digest
from tests.gateway_process import lives, neighbours, started, tables

KEY = "key-of-alice"
POOL = "chat"
RETRIES, BROKEN = "sentinel_gateway_retries_total", "sentinel_gateway_stream_errors_total"
REFUSED = "sentinel_gateway_refused_total"  # by pool, tenant and limit
UNRETRIED = "sentinel_gateway_unretried_total"  # by why: the budget, or nowhere to go


class Front:
    """``workers``: name → base URL, in one pool. Use as a context: gateways, store and routes are up inside."""

    def __init__(
        self, workers: dict[str, str], model: str, *, processes: int = 2, more: str = "", dynamo: DynamoSettings | None = None
    ) -> None:
        """``more``: lines of ``[gateway]``. ``dynamo``: the workers are Dynamo's, behind these frontends."""
        self.workers, self.model, self._processes, self._more, self._dynamo = workers, model, processes, more, dynamo
        fronts = dynamo.every_frontend if dynamo else ()
        self.asked = tuple(frontend_name(POOL, n) for n in range(1, len(fronts) + 1)) or tuple(workers)  # who gets requests
        self.folder = Path(tempfile.mkdtemp(prefix="sentinel-"))  # short enough for a unix socket
        self.version = 0
        self.url, self._admin = "", 0
        self.process: subprocess.Popen[bytes] | None = None
        self.store: Store

    async def __aenter__(self) -> Front:
        try:
            self.store = await open_store(StoreSettings(url=f"embedded:{self.folder}"))
            self._gateways = Gateways(self.store)
            self._epoch = await self.store.lease.acquire("test", "http://test", 3600) or 0
            await self.publish()
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(self.process.wait, 20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        if hasattr(self, "store"):
            await self.store.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def publish(self, **states: WorkerState) -> None:
        """A table in which each worker is ACTIVE but for ``states``; returns when every gateway obeys it."""
        self.version += 1
        entries = tuple(
            RouteEntry(worker=name, url=url, role=Role.BOTH, state=states.get(name, WorkerState.ACTIVE))
            for name, url in self.workers.items()
        )
        table = Routes(version=self.version, pools=(RoutePool(pool=POOL, weight=1.0, workers=entries),))
        while not await self._committed(table):
            await asyncio.sleep(0.1)
        while self.process is not None and not await self._acked():
            await asyncio.sleep(0.005)

    async def _committed(self, table: Routes) -> bool:
        """A store that is slow to answer is asked again, here and below: beside engines that start it may take its time."""
        try:
            assert await self.store.decisions.commit(self._epoch, [PublishRoutes(table)])
        except StoreError:
            return False
        return True

    async def _acked(self) -> bool:
        try:
            return await self._gateways.acked(self.version)
        except StoreError:
            return False

    async def counted(self) -> Counter[str]:
        """Every sample of every process's /metrics, added up."""
        total: Counter[str] = Counter()
        async with aiohttp.ClientSession() as http:
            for number in range(self._processes):
                async with http.get(f"http://127.0.0.1:{self._admin + number}/metrics") as answer:
                    total += Counter(samples(await answer.text()))
        return total

    async def in_flight(self, worker: str) -> int:
        """Requests that all gateways have on it."""
        return round((await self.counted())[f'sentinel_gateway_in_flight{{pool="{POOL}",worker="{worker}"}}'])

    async def idle(self, worker: str) -> None:
        while await self.in_flight(worker):
            await asyncio.sleep(0.05)

    async def spread(self, least: int) -> None:
        """Wait until each worker has that many requests: a breaker may still be half-open after what was done before."""
        async with asyncio.timeout(120):
            while min([await self.in_flight(worker) for worker in self.asked]) < least:
                await asyncio.sleep(0.2)

    async def _start(self) -> None:
        port, self._admin = neighbours(1), neighbours(self._processes)
        self.url = f"http://127.0.0.1:{port}"
        (self.folder / "keys").write_text(f"alice {digest(KEY)}\n", "utf-8")
        adapter = f'adapter = "{"dynamo" if self._dynamo else "vllm"}"\n'
        workers = tables(POOL, self.model, self.workers, adapter)
        if self._dynamo:
            first, *others = self._dynamo.every_frontend
            workers += f'[dynamo]\ndiscovery = "{self._dynamo.discovery}"\nfrontend = "{first}"\nfrontends = {json.dumps(others)}\n'
        file = self.folder / "gateway.toml"
        file.write_text(
            f'[gateway]\nlisten = "127.0.0.1:{port}"\nadmin = "127.0.0.1:{self._admin}"\nkeys = "{self.folder}/keys"\n'
            f'processes = {self._processes}\ndrain = "10s"\n{self._more}\n'
            f'[store]\nurl = "embedded:{self.folder}"\n{workers}',
            "utf-8",
        )
        self.process = started(file)
        for _ in range(600):
            lives(self.process, file)
            here = [p for p in await self._gateways.all() if p.left_s > 0]
            if len(here) == self._processes and await self._gateways.acked(self.version):
                with contextlib.suppress(aiohttp.ClientError):
                    await self.counted()
                    return
            await asyncio.sleep(0.05)
        raise AssertionError(file.with_suffix(".log").read_text("utf-8", "replace"))


def samples(text: str) -> dict[str, float]:
    """The samples of a Prometheus text by their name with labels."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def total(counted: dict[str, float], name: str) -> int:
    """All series of one metric together."""
    return round(sum(value for key, value in counted.items() if key.partition("{")[0] == name))

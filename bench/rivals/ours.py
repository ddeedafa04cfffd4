"""``sentinel gateway`` as it is run, with everything on, and the store that its guards share.

The daemon itself, from a configuration file: API keys, breakers, admission with block leases (limits per pool, worker and tenant,
in requests and tokens, none of which the load reaches), a tenant's rate, the published route table, metrics. The store is a real
redis-server on the load's core, since it runs on another machine; where there is none, the embedded one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from load.stores import redis_program

from rivals.others import Start
from rivals.process import LOAD, Process, free_port
from rivals.worker import MODEL
from sentinel.config import StoreSettings
from sentinel.model import Role, RouteEntry, RoutePool, Routes, WorkerState
from sentinel.store import PublishRoutes, Store, StoreError, open_store
from sentinel.tokens import digest


class Site:
    """The store with a published table over these workers. ``start`` before ``gateway``."""

    def __init__(self, folder: Path, behind: list[int]) -> None:
        self.folder, self.behind = folder, behind
        self.urls = {f"w{n}": f"http://127.0.0.1:{port}" for n, port in enumerate(behind)}
        self.redis: Process | None = None
        self.store: Store
        self.kind = ""

    async def start(self) -> None:
        self.url, self.kind = f"embedded:{self.folder}/store", "embedded Valkey"
        if program := redis_program():
            argv = [program, "--port", "0", "--unixsocket", f"{self.folder}/redis.sock", "--appendonly", "no", "--save", ""]
            self.redis = Process(argv, LOAD, self.folder / "redis.log")
            self.url, self.kind = f"unix://{self.folder}/redis.sock", "redis-server"
        self.store = await open_store(StoreSettings(url=self.url))
        for _ in range(200):
            try:
                epoch = await self.store.lease.acquire("bench", "http://bench", 3600)
                break
            except StoreError:
                epoch = None
        assert epoch, "the store does not answer"
        entries = tuple(RouteEntry(worker=w, url=u, role=Role.BOTH, state=WorkerState.ACTIVE) for w, u in self.urls.items())
        table = Routes(version=1, pools=(RoutePool(pool="p", weight=1.0, workers=entries),))
        assert await self.store.decisions.commit(epoch, [PublishRoutes(table)])
        (self.folder / "keys").write_text(f"bench {digest('bench-key')}\n", "utf-8")

    def gateway(self, folder: Path, port: int, behind: list[int]) -> Start:
        workers = "".join(f'[[workers]]\nname = "{w}"\npool = "p"\nurl = "{u}"\n' for w, u in self.urls.items())
        file = folder / "gateway.toml"
        file.write_text(
            f'[gateway]\nlisten = "127.0.0.1:{port}"\nadmin = "127.0.0.1:{free_port()}"\nkeys = "{self.folder}/keys"\n'
            "[gateway.admission.pools.p]\nrequests = 5000\ntokens = 50000000\nworker_requests = 2000\nworker_tokens = 20000000\n"
            '[gateway.tenants.bench]\nrequests = 4000\ntokens = 40000000\nrate = "100000000/minute"\n'
            f'[store]\nurl = "{self.url}"\n[[pools]]\nname = "p"\nmodel = "{MODEL}"\n{workers}',
            "utf-8",
        )
        return Start([sys.executable, "-c", "from sentinel.cli.main import main; main()", "gateway", "--config", str(file)])

    async def stop(self) -> None:
        await self.store.close()
        if self.redis is not None:
            self.redis.end()

"""``sentinel gateway`` as it is run, for tests: real processes in front of stand-in workers, and a real store that they share.

What always holds: the workers are in the test's own process (they count what reached them), the gateways are not; what was started
is ended by ``stop``.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import openai

from sentinel.config import StoreSettings
from sentinel.model import Role, RouteEntry, RoutePool, Routes, WorkerState
from sentinel.store import PublishRoutes, Store, open_store
from sentinel.store.gateways import Gateways
from sentinel.tokens import digest
from tests.conftest import free_port
from tests.gateway_process import lives, neighbours, short_folder, started, tables
from tests.gateway_site import MODEL, Stand


class Rig:
    """A store, workers ``a`` and ``b``, and as many gateways as a test starts."""

    def __init__(self, folder: Path, store: str = "") -> None:
        """``store``: the URL of one that runs already; else an embedded one."""
        self.folder, self.url = folder, store or f"embedded:{folder}"
        self.stands = {name: Stand(name) for name in ("a", "b")}
        self.store: Store
        self.gateways: Gateways
        self.epoch = self.version = 0
        self.running: list[subprocess.Popen[bytes]] = []

    async def start(self) -> None:
        for stand in self.stands.values():
            await stand.start()
        (self.folder / "keys").write_text(f"alice {digest('key-a')}\n", "utf-8")
        self.store = await open_store(StoreSettings(url=self.url))
        self.gateways = Gateways(self.store)
        epoch = await self.store.lease.acquire("test", "http://test", 600)
        assert epoch
        self.epoch = epoch
        await self.publish()

    async def publish(self, **states: WorkerState) -> int:
        self.version += 1
        entries = tuple(
            RouteEntry(worker=s.name, url=s.url, role=Role.BOTH, state=states.get(s.name, WorkerState.ACTIVE))
            for s in self.stands.values()
        )
        table = Routes(version=self.version, pools=(RoutePool(pool="p", weight=1.0, workers=entries),))
        assert await self.store.decisions.commit(self.epoch, [PublishRoutes(table)])
        return self.version

    def file(self, port: int, admin: int, *, processes: int = 1, more: str = "") -> Path:
        """A gateway's configuration. ``more``: tables below ``[gateway]``."""
        file = self.folder / f"gateway-{port}.toml"
        file.write_text(
            f'[gateway]\nlisten = "127.0.0.1:{port}"\nadmin = "127.0.0.1:{admin}"\nkeys = "{self.folder}/keys"\n'
            f'processes = {processes}\nfirst_byte = "3s"\nstall = "3s"\ndrain = "10s"\npoll = "60s"\npresence = "2s"\n{more}'
            f'[store]\nurl = "{self.url}"\n{tables("p", MODEL, {s.name: s.url for s in self.stands.values()})}',
            "utf-8",
        )
        return file

    async def gateway(self, *, processes: int = 1, more: str = "") -> tuple[subprocess.Popen[bytes], str, str]:
        """Returns the process and its two addresses, once it serves. ``more``: as of ``file``."""
        port, admin = free_port(), neighbours(processes)
        file = self.file(port, admin, processes=processes, more=more)
        process = started(file)
        self.running.append(process)
        async with aiohttp.ClientSession() as http:
            for number in range(processes):
                for _ in range(600):
                    lives(process, file)
                    try:
                        async with http.get(f"http://127.0.0.1:{admin + number}/healthz") as answer:
                            if answer.status == 200:
                                break
                    except aiohttp.ClientError:
                        await asyncio.sleep(0.02)
        return process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}"

    async def stop(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()
        for stand in self.stands.values():
            await stand.stop()
        await self.store.close()


@contextlib.asynccontextmanager
async def running(store: str = "") -> AsyncIterator[Rig]:
    """A rig that is up. ``store``: as of ``Rig``."""
    with short_folder() as folder:
        made = Rig(folder, store)
        try:
            await made.start()
            yield made
        finally:
            await made.stop()


def client(url: str, **more: int) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key-a", max_retries=more.get("max_retries", 0), timeout=10.0)


ASK = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}

"""Every adapter behind one: each worker is spoken to by the adapter that its configuration names.

This module exists so that the controller never asks what kind a worker is. What always holds: a verb reaches exactly the
adapter named by ``worker.adapter``; one that was not set up is an AdapterError that says which setting is missing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import aiohttp

from sentinel.config import DynamoSettings
from sentinel.model import Role, Routes, Worker, WorkerSeen
from sentinel.serving import Adapter, AdapterError, Hands, Keep
from sentinel.serving.discovery import Discovery
from sentinel.serving.discovery_etcd import EtcdDiscovery
from sentinel.serving.discovery_file import FileDiscovery
from sentinel.serving.dynamo import DynamoAdapter, instances
from sentinel.serving.vllm import VllmAdapter

Scale = Callable[[str, Role, int], Awaitable[bool]]  # pool, role, workers wanted in all → asked for, or refused


def open_discovery(settings: DynamoSettings, session: aiohttp.ClientSession) -> Discovery | None:
    """The backend that ``dynamo.discovery`` names; None when it names none."""
    kind, _, where = settings.discovery.partition(":")
    if kind == "file":
        return FileDiscovery(Path(where))
    return EtcdDiscovery(where, session) if kind == "etcd" else None


class Serving:
    """The controller's Adapter. Owns nothing that it was handed; ``open`` builds the usual one."""

    def __init__(self, vllm: Adapter, dynamo: DynamoAdapter | None = None, scale: Scale | None = None) -> None:
        self._vllm, self._dynamo, self._scale = vllm, dynamo, scale

    @classmethod
    def open(
        cls,
        settings: DynamoSettings,
        *,
        hands: Hands,
        keep: Keep,
        routes: Callable[[], Awaitable[Routes | None]],
        session: aiohttp.ClientSession,
        scale: Scale | None = None,
    ) -> Serving:
        discovery = open_discovery(settings, session)
        dynamo = DynamoAdapter(settings, discovery, hands, keep, session) if discovery else None
        return cls(VllmAdapter(hands, routes, session), dynamo, scale)

    def learn(self, seen: Iterable[WorkerSeen]) -> None:
        """Take in what an agent reported of its node's workers (Dynamo's instance ids change at every start)."""
        if self._dynamo:
            for worker, instance in instances(seen).items():
                self._dynamo.learn(worker, instance)

    async def list_workers(self) -> list[WorkerSeen]:
        both = await self._vllm.list_workers()
        return both + await self._dynamo.list_workers() if self._dynamo else both

    async def deroute(self, worker: Worker) -> bool:
        return await self._for(worker).deroute(worker)

    async def reroute(self, worker: Worker) -> bool:
        return await self._for(worker).reroute(worker)

    async def look(self, worker: Worker) -> WorkerSeen | None:
        return await self._for(worker).look(worker)

    async def in_flight(self, worker: Worker) -> int | None:
        return await self._for(worker).in_flight(worker)

    async def verify(self, worker: Worker, deadline_s: float) -> tuple[bool, str]:
        return await self._for(worker).verify(worker, deadline_s)

    async def stop(self, worker: Worker, *, hard: bool, key: str) -> bool:
        return await self._for(worker).stop(worker, hard=hard, key=key)

    async def start(self, worker: Worker, *, key: str) -> bool:
        return await self._for(worker).start(worker, key=key)

    async def scale_to(self, pool: str, role: Role, count: int) -> bool:
        """Ask the site's own means (``[controller] scale_out``); False where there are none: standbys are started by name."""
        return await self._scale(pool, role, count) if self._scale else False

    def _for(self, worker: Worker) -> Adapter:
        if worker.adapter == "vllm":
            return self._vllm
        if worker.adapter == "dynamo" and self._dynamo:
            return self._dynamo
        if worker.adapter == "dynamo":
            raise AdapterError(f"{worker.name} is a Dynamo worker, but [dynamo] discovery is not set")
        raise AdapterError(f"{worker.name}: no adapter is called {worker.adapter!r}")

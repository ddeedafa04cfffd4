"""The gateways of the stage: three real ``sentinel gateway`` processes in front of the rack, as a site has them on three hosts.

This module exists so that what clients see in the demo went through what a site's clients go through. What always holds:

* Each is a process with a configuration file of its own and a name of its own (breakers count names as hosts); they share nothing
  but the store.
* Each public port is bound here and never listened on, so that a killed gateway refuses connections and a new one gets the same
  address; the admin ports are whatever was free.
* What is said of them is read where an operator would read it: on their admin ports, and in the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from sentinel.sim.crew import SENTINEL, Crew, StageError, free_port
from sentinel.sim.files import write_gateway
from sentinel.sim.rack import PLACES
from sentinel.store import Store
from sentinel.store.admission import AdmissionRecords
from sentinel.store.breakers import BreakerRecords

NAMES = ("gateway-1", "gateway-2", "gateway-3")
LEASE_S = 4.0  # of admission; shipped: 10 s
LOOK_S = 2.0
TRIPS = "sentinel_gateway_breaker_trips_total"


class Replicas:
    """``start`` begins them, ``up`` waits until they serve by a table. ``slots``: what one worker runs at once; they let in a
    quarter more, so that its queue is never empty when there is too much, and shows the controller that there is."""

    def __init__(self, folder: Path, crew: Crew, http: aiohttp.ClientSession, *, slots: int) -> None:
        self._folder, self._crew, self._http, self._slots = folder, crew, http, slots + max(1, slots // 4)
        self._reserved: dict[str, socket.socket] = {}
        self.urls: dict[str, str] = {}  # name → public base URL
        self.lives: dict[str, list[str]] = {name: [] for name in NAMES}  # name → the ids of its processes, oldest first
        self.admin: dict[str, str] = {}  # name → base URL of its admin port

    async def start(self, store: str, workers: Mapping[str, str]) -> None:
        """``store``: its URL. ``workers``: worker → base URL."""
        for name in NAMES:
            self._reserved[name] = reserved = socket.socket()
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind(("127.0.0.1", 0))
            self.urls[name] = f"http://127.0.0.1:{reserved.getsockname()[1]}"
            admin = f"127.0.0.1:{free_port()}"
            self.admin[name] = f"http://{admin}"
            write_gateway(
                self._folder, name, listen=self.urls[name].removeprefix("http://"), admin=admin, store=store, urls=workers,
                slots=self._slots, lease_s=LEASE_S,
            )  # fmt: skip
            await self.revive(name)

    async def up(self, version: int, within_s: float, names: Sequence[str] = NAMES) -> None:
        """Wait until each serves by this table or a newer one. Raises StageError when one does not within ``within_s`` seconds."""
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        waiting = list(names)
        while waiting:
            ended = [name for name in waiting if name in self._crew.ended()]
            if ended or loop.time() > until:
                name = (ended or waiting)[0]
                raise StageError(f"{name} does not serve: {self._crew.last_words(name)}")
            shown = await self.look(waiting[0])
            if shown is None or shown["version"] < version:
                await asyncio.sleep(0.05)
                continue
            self.lives[waiting[0]].append(shown["id"])
            waiting.pop(0)

    async def kill(self, name: str) -> None:
        """SIGKILL: its connections break, its address refuses, what it held in the store stays until its lease ends."""
        await self._crew.kill(name)

    async def revive(self, name: str) -> None:
        await self._crew.spawn(name, *SENTINEL, "gateway", "--config", str(self._folder / f"{name}.toml"))

    def close(self) -> None:
        for reserved in self._reserved.values():
            reserved.close()

    # -- looking ------------------------------------------------------------------------------------------------------

    async def look(self, name: str) -> dict[str, Any] | None:
        """What its admin port says of the table, the breakers and what is in flight; None: it does not answer."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(LOOK_S), self._http.get(f"{self.admin[name]}/routes") as answer:
                shown: dict[str, Any] = await answer.json()
                return shown
        return None

    @staticmethod
    async def breakers(store: Store) -> dict[str, str]:
        """Worker → how its breaker stands in the store, for those that are not closed."""
        listed = await BreakerRecords(store).listing({p.name: p.pool for p in PLACES.values()})
        return {s.worker: s.state for s in listed if s.state != "closed"}

    async def counts(self) -> Counter[str]:
        """Their counters by name, added up; a process that died took its own along. Trips, which all of them see, count once."""
        total: Counter[str] = Counter()
        for name in NAMES:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with asyncio.timeout(LOOK_S), self._http.get(f"{self.admin[name]}/metrics") as answer:
                    text = await answer.text()
                own: Counter[str] = Counter()
                for family in text_string_to_metric_families(text):
                    for sample in family.samples:
                        if family.type == "counter":
                            own[sample.name] += int(sample.value)
                total[TRIPS] = max(total[TRIPS], own.pop(TRIPS, 0))
                total += own
        return total

    async def held(self, store: Store, owner: str) -> int:
        """Slots that the store counts as this process's, over all workers."""
        records = AdmissionRecords(store, LEASE_S)
        listed = await asyncio.gather(*(records.held(f"worker/{place}") for place in PLACES))
        return sum(one.allotted for limit in listed for one in limit if one.owner == owner)


_SHOWN = {
    "sentinel_gateway_retries_total": "tries repeated on another worker",
    "sentinel_gateway_stream_errors_total": "streams that broke",
    TRIPS: "breakers opened",
}


def told_by(counters: Mapping[str, int]) -> dict[str, int]:
    """The counters that a summary shows, by what they mean."""
    return {what: counters.get(name, 0) for name, what in _SHOWN.items()}

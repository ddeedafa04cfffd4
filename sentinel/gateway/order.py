"""Whom to ask for one request, best first: by what it goes on from, its session, and who was busy a moment ago.

This module exists so that the way of a request (``forward``) need not know where its worker comes from. What always holds: a
request that goes on from a response is for the worker that holds it, and for nobody else while that one keeps its sessions; whoever
said that it is busy is asked last for a while, which is this process's own memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sentinel.gateway.ask import Kind
from sentinel.gateway.incoming import Incoming
from sentinel.gateway.routing import choose, idlest, keeper
from sentinel.model import Role, RouteEntry, Routes

if TYPE_CHECKING:
    from sentinel.gateway.desk import Desk

BUSY_S = 1.0  # for so long a worker that said 429 or 503, or took no connection, is the last to be asked
NOWHERE_S = 1.0  # for so long what two workers do not serve is asked of no second one


class Order:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._busy: dict[str, float] = {}  # worker → until when it is asked last
        self._nowhere: dict[tuple[str, Kind], float] = {}  # what two workers in a row do not serve → until when that is believed

    async def of(self, x: Incoming, routes: Routes) -> Iterator[RouteEntry]:
        """The workers of ``routes`` for this request, one by one as they are asked for."""
        if x.ask.previous:
            entry = keeper(routes, await self._desk.holders.of(x.tenant, x.ask.previous))
            if entry is not None:
                return iter((entry,))
        load = self._desk.guards.load
        if not x.session:
            order = idlest(routes, Role.DECODE, x.request_id.hex(), load)
        else:
            home = self._desk.homes.of(x.session)
            order = choose(routes, Role.DECODE, x.session, load=load, home=home, goes_on=x.ask.goes_on)
        return self._steered(order) if self._busy else order

    def busy(self, worker: str) -> None:
        """It has no room now."""
        self._busy[worker] = time.monotonic() + BUSY_S

    def absent(self, x: Incoming) -> bool:
        """Whether two workers said a moment ago that they do not serve this: the next one would say so too (embeddings of a chat
        model, say), and a client that goes on asking is not worth twice its requests."""
        return time.monotonic() < self._nowhere.get((x.ask.model, x.kind), 0.0)

    def nowhere(self, x: Incoming) -> None:
        """A second worker does not serve this either."""
        self._nowhere[x.ask.model, x.kind] = time.monotonic() + NOWHERE_S

    def _steered(self, order: Iterator[RouteEntry]) -> Iterator[RouteEntry]:
        now = time.monotonic()
        self._busy = {worker: until for worker, until in self._busy.items() if until > now}
        late = []
        for entry in order:
            if entry.worker in self._busy:
                late.append(entry)
            else:
                yield entry
        yield from late

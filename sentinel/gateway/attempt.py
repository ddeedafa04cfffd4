"""One try of one request on one worker: what it holds, and that all of it is given back.

This module exists so that there is one place where a slot, a breaker's permit and a connection end together. What always holds:
``end`` may be called at any time, twice as well; after it nothing is held, the breaker has heard how it went, and a connection
whose answer was not read to its end is closed, so that the worker stops computing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sentinel.gateway.classify import Trouble, not_here, of_status, of_trouble
from sentinel.gateway.framing import Head
from sentinel.gateway.guards import Admission, Breakers, Outcome, Permit, Slot
from sentinel.gateway.incoming import Incoming
from sentinel.gateway.upstream import Broken, Connection, Origin
from sentinel.model import RouteEntry

_STALE = (Trouble.RESET, Trouble.EARLY)
_STALE_S = 1.0  # after which a kept connection that breaks is no race with its keep-alive timer any more: the worker had begun


class Guards:
    """What every try passes, and what this gateway itself has in flight per worker. ``out``: of a worker, by the
    table of now."""

    def __init__(self, breakers: Breakers, admission: Admission, out: Callable[[str], bool]) -> None:
        self.breakers, self.admission, self.out = breakers, admission, out
        self.load: dict[str, int] = {}


class Attempt:
    """``trouble`` or ``head`` is set once it has begun. ``absent``: its worker says that it does not serve this."""

    __slots__ = (
        "_ended", "_guards", "_permit", "_sent", "_slot", "absent", "adopted", "connection", "entry", "head", "outcome", "pool",
        "trouble", "why",
    )  # fmt: skip

    def __init__(self, guards: Guards, entry: RouteEntry, permit: Permit, slot: Slot) -> None:
        self._guards, self._permit, self._slot = guards, permit, slot
        self.entry, self.pool = entry, slot.pool
        self.connection: Connection | None = None
        self.head: Head | None = None
        self.trouble: Trouble | None = None
        self.why = ""
        self.outcome = Outcome.IGNORED
        self._ended = self._sent = self.adopted = self.absent = False
        guards.load[entry.worker] = guards.load.get(entry.worker, 0) + 1

    async def begin(self, x: Incoming, origin: Origin, key: bytes, patience_s: float, *, body: bytes = b"") -> None:
        """Send the request and wait for the beginning of an answer. ``body``: instead of the request's own."""
        body = body or x.body
        head = x.head(origin.host, origin.path, key, len(body))
        try:
            self.connection = await self._connected(origin)
            try:
                sent = time.monotonic()
                self.head = await self.connection.ask(head, body, patience_s)
            except Broken as error:
                stale, self._sent = self.connection, True
                late = time.monotonic() - sent > _STALE_S
                if late or not (stale.used and stale.silent and error.trouble in _STALE):
                    raise
                stale.abort()
                self.connection = await self._connected(origin, fresh=True)
                self.head = await self.connection.ask(head, body, patience_s)
            self.absent = not_here(self.head.status, own_key=bool(key), goes_on=bool(x.ask.previous))
        except Broken as error:
            self.trouble, self.why = error.trouble, str(error)

    async def _connected(self, origin: Origin, *, fresh: bool = False) -> Connection:
        connection = await origin.connection(fresh=fresh)
        if self._guards.out(self.entry.worker):  # while it was connected: nobody sends by an old table
            connection.abort()
            raise Broken(Trouble.REFUSED, "it left rotation before it was asked")
        return connection

    def adopt(self, other: Attempt) -> None:
        """Pass on what ``other`` got instead; it says nothing about this one's worker."""
        self.connection, self.head, self.trouble, self.why = other.connection, other.head, other.trouble, other.why
        self.absent, other.connection, self.adopted = other.absent, None, True

    def judge(self, *, out: bool) -> None:
        """What its beginning says. ``out``: the worker has left rotation."""
        if self.trouble is not None:
            self.outcome = of_trouble(self.trouble, out=out)
        elif self.head is not None:
            told = self.connection.told if self.connection is not None else 0
            self.outcome = of_status(told or self.head.status, out=out)
            self.why = f"its stream began with an error, {told}" if told else f"it answered {self.head.status}"
            if self.absent:
                self.outcome = Outcome.IGNORED if out else Outcome.BUSY
            if self._permit.probe and self.outcome is Outcome.FINE:
                self._guards.breakers.begun(self._permit)

    def broke(self, trouble: Trouble, *, out: bool, told: int = 500) -> None:
        """Its answer broke after it had begun. ``told``: the status of an error that the worker itself told."""
        self.trouble = trouble
        self.outcome = of_status(told, out=out) if trouble is Trouble.WORKER_ERROR else of_trouble(trouble, out=out)
        if self.outcome is Outcome.BUSY and told != 429:  # it had room when it began: Dynamo says 503 of a worker that died
            self.outcome = Outcome.FAILED

    @property
    def reached(self) -> bool:
        """Whether its worker may have done anything for the request; else another try asks nobody twice, and needs no budget."""
        return (self._sent or self.trouble is not Trouble.REFUSED) and not self.absent

    @property
    def reason(self) -> str:
        """A word for the metrics."""
        if self.trouble is not None:
            return self.trouble.value
        if self.absent:
            return "absent"
        return "busy" if self.outcome is Outcome.BUSY else "status"

    def make_room(self) -> None:
        """It failed: its part of the limits is free, also for its own second try. The answer that it got may be the only one."""
        connection = self.connection
        if connection is not None and self.trouble is not None:
            connection.abort()
        self._guards.admission.release(self._slot)

    def end(self) -> None:
        if self._ended:
            return
        self._ended = True
        load, worker = self._guards.load, self.entry.worker
        load[worker] -= 1
        if not load[worker]:
            del load[worker]
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort()
        self._guards.breakers.ended(self._permit, self.outcome)
        self._guards.admission.release(self._slot)

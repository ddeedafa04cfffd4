"""Where sessions live: session → the worker that answered it last, and response → the worker that holds it.

This module exists because the order of ``routing`` moves a session only when it must, but bounded load and retries do move some;
whoever was moved stays where it went, since its KV is there now. What always holds:

* ``Homes`` are neither shared nor durable. A gateway that does not know a session looks where it would have gone, which is the same
  at every gateway.
* ``Holders`` are shared, since nobody can tell from a response's id where it would have gone. What a whole answer says is shared
  before the client has it. Without the store each gateway knows its own answers.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from hashlib import blake2b
from typing import Generic, TypeVar

import msgspec

from sentinel.store import StoreError
from sentinel.store.responses import ResponseRecords

SESSIONS_MAX = 200_000  # about 40 MB; the longest unused goes first
PATIENCE_S = 0.5  # that one answer or question waits for the store: who does not hear goes to a worker that knows nothing of it
AWAY_S = 1.0  # after one that the store did not answer, none is asked for so long
_FIRST_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,256})"')

Name = TypeVar("Name", str, bytes)
T = TypeVar("T")


class Homes(Generic[Name]):
    def __init__(self, most: int = SESSIONS_MAX) -> None:
        self._most = most
        self._homes: OrderedDict[Name, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def of(self, session: Name) -> str:
        """The worker's name; "" when it is not known."""
        return self._homes.get(session, "")

    def settle(self, session: Name, worker: str) -> None:
        if not session:
            return
        self._homes[session] = worker
        self._homes.move_to_end(session)
        if len(self._homes) > self._most:
            self._homes.popitem(last=False)


class Holders:
    """Responses of /v1/responses that a later request may go on from (``previous_response_id``), by tenant."""

    def __init__(
        self,
        records: ResponseRecords | None = None,
        most: int = SESSIONS_MAX,
        *,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``records``: what all gateways share; None: this one is alone."""
        self._records, self._patience_s, self._clock = records, patience_s, clock
        self._known: Homes[bytes] = Homes(most)
        self._telling: set[asyncio.Task[None]] = set()
        self._away_until = 0.0

    async def of(self, tenant: str, response: str) -> str:
        """The worker that holds it; "" when it is not known."""
        name = _name(tenant, response)
        if (worker := self._known.of(name)) or self._records is None:
            return worker
        return await self._asked(self._records.of(name), "")

    async def keep(self, tenant: str, response: str, worker: str) -> None:
        """``worker`` made it; known to all when this returns, unless the store is away."""
        if not response:
            return
        name = _name(tenant, response)
        self._known.settle(name, worker)
        if self._records is not None:
            await self._asked(self._records.put(name, worker), None)

    def keep_soon(self, tenant: str, response: str, worker: str) -> None:
        """The same for an answer that goes on for a while: nothing waits for it."""
        task = asyncio.create_task(self.keep(tenant, response, worker), name="holder")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def told(self) -> None:
        """Wait until what ``keep_soon`` was given is known to all, or the store was not to be had."""
        await asyncio.gather(*self._telling)

    async def _asked(self, question: Coroutine[object, object, T], otherwise: T) -> T:
        """A store that is away holds up one request a second, and no other."""
        if self._clock() < self._away_until:
            question.close()
            return otherwise
        try:
            async with asyncio.timeout(self._patience_s):
                return await question
        except (StoreError, TimeoutError):
            self._away_until = self._clock() + AWAY_S
            return otherwise


class _Answer(msgspec.Struct):
    id: str = ""


def response_id(answer: bytes) -> str:
    """Of a whole answer of /v1/responses; "" when it has none."""
    try:
        return msgspec.json.decode(answer, type=_Answer).id
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def first_id(piece: bytes) -> str:
    """Of the first piece of a stream, whose first event (``response.created``) begins with the response and its id."""
    found = _FIRST_ID.search(piece)
    return found[1].decode(errors="replace") if found else ""


def _name(tenant: str, response: str) -> bytes:
    """What a response is remembered by: of one length, and telling nobody whose it is."""
    return blake2b(f"{tenant}\0{response}".encode(errors="surrogatepass"), digest_size=16).digest()

"""What stands between a request and a worker: the shared breaker and the admission, as the proxy sees them.

This module exists so that the proxy can be read, tested and measured without a store. What always holds:

* Nothing here waits for the store on the way of an ordinary request: a closed breaker and a slot of a leased block are answered
  from memory; only a half-open probe and an empty block ask.
* Whatever was given is given back exactly once, however the request ends; giving back twice is harmless.
* When the store is away each gateway goes on with what it knows: the last state of every breaker, its static share of every limit.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from enum import StrEnum
from typing import Protocol

import structlog

from sentinel.model import Base

log = structlog.get_logger(__name__)


class Outcome(StrEnum):
    """How one try on one worker ended, as breakers count it (design: 2xx and 4xx are fine, 429 and 503 are back-pressure)."""

    FINE = "fine"  # 2xx, and 4xx: the client's own mistake says nothing about the worker
    BUSY = "busy"  # 429, 503, and a worker that does not serve the model (yet): neutral, and steers the next choice
    FAILED = "failed"  # 500, 502, 504, refused, reset, no first byte in time, stalled
    IGNORED = "ignored"  # the client went away, or the worker was being drained


class Permit(Base, frozen=True, kw_only=True, omit_defaults=True):
    """Leave to send one request to a worker. ``probe``: id of a half-open breaker's lease; "" while it is closed."""

    worker: str
    probe: str = ""
    version: int = 0  # of the breaker's record when it was given: a late outcome does not count against a newer one


class Breakers(Protocol):
    def closed(self, worker: str) -> bool:
        """Whether requests may be routed to it now, by the local copy; True as well while the pool is in panic."""
        ...

    async def permit(self, worker: str) -> Permit | None:
        """Leave for one request; None while it is open, or half-open with every probe taken."""
        ...

    def last(self, worker: str) -> Permit | None:
        """Leave for a request that nobody else can take, however its breaker stands; None: somebody holds it open. Of the workers
        in rotation one at least is closed, or all are tried: where a copy says otherwise it is behind, or others have left."""
        ...

    def begun(self, permit: Permit) -> None:
        """A fine answer has begun. That ends a probe: a stream that goes on for minutes must not keep the next one waiting. What
        breaks afterwards is told by ``ended`` like any failure. Never raises, never waits."""
        ...

    def ended(self, permit: Permit, outcome: Outcome) -> None:
        """How it ended; reaches the store soon, a failure at once. Never raises, never waits."""
        ...


class Slot(Base, frozen=True, kw_only=True, omit_defaults=True):
    """One admitted request: an entry in this gateway's owner lease."""

    id: str
    pool: str
    worker: str
    tenant: str
    tokens: int = 0
    fence: int = 0


class Refusal(Base, frozen=True, kw_only=True, omit_defaults=True):
    """Not admitted: which limit, and after how many seconds it is worth asking again. ``never``: this request is too large for
    the limit, and always will be."""

    limit: str  # "pool", "worker", "tenant", "queue", "fenced": 503; "rate": 429
    why: str  # one sentence for the client
    retry_after_s: float
    never: bool = False


class Admission(Protocol):
    async def enter(self, tenant: str) -> Refusal | None:
        """One more request of this tenant, however many tries it will take; a refusal when its rate is used up."""
        ...

    async def admit(self, pool: str, worker: str, tenant: str, tokens: int, wait_s: float) -> Slot | Refusal:
        """A slot now, or within ``wait_s`` seconds in a fair queue; else a refusal. ``tokens``: estimated, prompt and answer."""
        ...

    def release(self, slot: Slot) -> None:
        """Give it back; never raises, never waits, twice is harmless."""
        ...


broken: ContextVar[asyncio.Event | None] = ContextVar("broken", default=None)  # set by who runs the guards, before it starts them


def told_if_broken(task: asyncio.Task[None]) -> None:
    """For the guards' own tasks, which end only by ``stop``: what else ends one is a bug, said at once, and told to who runs them
    (``broken``). Without its lease a gateway admits nothing; without news of breakers it goes by those it knows."""
    if not task.cancelled():
        log.error("a part of the guards ended by itself", part=task.get_name(), exc_info=task.exception())
        if told := broken.get():
            told.set()

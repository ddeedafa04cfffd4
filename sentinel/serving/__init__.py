"""Serving adapters: one per thing that serves, all with the same verbs.

This package exists so that the controller drains a Dynamo worker and a plain vLLM with the same seven words. What always
holds: every verb is idempotent; True means done, False means it could not be done and nothing changed, and AdapterError
means that it could not be told. ``stop`` is only ever asked for after ``deroute``.
"""

from __future__ import annotations

from typing import Protocol

from sentinel.model import CommandResult, Role, Worker, WorkerSeen


class AdapterError(Exception):
    """It could not be told whether the verb took effect; the sentence says what was asked and what came back."""


class Hands(Protocol):
    """Local actions on a node, through its agent's allow-list."""

    async def run(self, node: str, action: str, args: dict[str, str], *, key: str, why: str, deadline_s: float) -> CommandResult:
        """Carry out one action once; ``key`` makes repeating it harmless. Raises AdapterError when the agent stays silent."""
        ...


class Keep(Protocol):
    """A small durable place for what an adapter must have again after a crash (a removed discovery entry's body)."""

    async def put(self, key: str, value: bytes) -> None: ...

    async def get(self, key: str) -> bytes | None: ...

    async def drop(self, key: str) -> None: ...


class Adapter(Protocol):
    async def list_workers(self) -> list[WorkerSeen]:
        """Every worker that takes requests now, as the serving system itself sees it."""
        ...

    async def deroute(self, worker: Worker) -> bool: ...

    async def reroute(self, worker: Worker) -> bool: ...

    async def look(self, worker: Worker) -> WorkerSeen | None:
        """Health, load and progress over the network; None: not reachable. Fields that were not measured are None."""
        ...

    async def in_flight(self, worker: Worker) -> int | None:
        """Requests being worked on or waiting inside the worker; None: could not be measured."""
        ...

    async def verify(self, worker: Worker, deadline_s: float) -> tuple[bool, str]:
        """One token asked of this very worker; (answered rightly, sentence)."""
        ...

    async def stop(self, worker: Worker, *, hard: bool, key: str) -> bool: ...

    async def start(self, worker: Worker, *, key: str) -> bool: ...

    async def scale_to(self, pool: str, role: Role, count: int) -> bool:
        """Ask the serving system for this many workers; False where it has no such means."""
        ...

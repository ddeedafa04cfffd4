"""Which worker holds a response of /v1/responses, for all gateways: a memory of fixed size in the store.

This module exists because only the worker that made a response can go on from it (vLLM 0.32 keeps them in a dictionary of its
process, entrypoints/openai/responses/serving.py), the id says nothing of that worker, and the next turn may come in at any
gateway. What always holds: it is one hash of at most ``SLOTS`` fields, so it can never crowd out what the fleet is led by; a new
response takes the place of an older one with the same slot (at 100 a second half of them are known after 30 minutes); what is not
known any more is only routed like any other request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sentinel.store.client import Store

SLOTS = 1 << 18  # about 25 MB when full


class ResponseRecords:
    """The memory. ``name``: a digest of at least eight bytes. Raises StoreError when it could not be told."""

    def __init__(self, store: Store) -> None:
        self._door = store._door  # of this package
        self._key = self._door.key("responses")

    async def put(self, name: bytes, worker: str) -> None:
        """Remember it; may be lost by a failover."""
        await self._door.ask("HSET", self._key, _slot(name), name + worker.encode())

    async def of(self, name: bytes) -> str:
        """The worker; "" when it is not known."""
        found: bytes | None = await self._door.ask("HGET", self._key, _slot(name))
        return found[len(name) :].decode(errors="replace") if found and found.startswith(name) else ""


def _slot(name: bytes) -> int:
    return int.from_bytes(name[:8], "big") % SLOTS

"""Which gateways there are, and which version of the route table each of them obeys.

This module exists so that the controller can know when no gateway sends anything to a worker any more: publishing a table is not
the same as its being obeyed. What always holds:

* A gateway is there from before its first request until it says goodbye, or is not heard of for its ``presence``; that ends by the
  server's clock.
* It writes a version after it has stopped routing by any older one, never before.
* One that went silent does not hold the others up: ``acked`` speaks of those that are heard. ``lost`` names the silent ones for ten
  minutes: each may still route by the last table it saw, for as long as it cannot reach the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from sentinel.store.errors import StoreError

if TYPE_CHECKING:
    from sentinel.store.client import Store

LOST_S = 600.0  # a gateway that went silent is named for so long


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway process. ``version``: of the table that it obeys; 0: none yet, or its own configuration's. ``left_s``: seconds
    until it counts as lost; below 0: it does."""

    id: str
    name: str
    version: int
    left_s: float


class _Body(msgspec.Struct, frozen=True):
    name: str
    version: int


class Gateways:
    """The table of gateways. Every method raises StoreError when it could not be told."""

    def __init__(self, store: Store) -> None:
        self._door = store._door  # of this package
        self._key = self._door.key("gateways")

    async def obey(self, process: str, name: str, version: int, presence_s: float) -> None:
        """Say that ``process`` (an id never used twice) is there and routes by ``version``; holds for ``presence_s`` seconds."""
        body = msgspec.json.encode(_Body(name, version))
        await self._door.run("present", [self._key], [process, body, round(presence_s * 1000), round(LOST_S * 1000)])

    async def leave(self, process: str) -> None:
        """It routes nothing any more."""
        await self._door.ask("HDEL", self._key, process)

    async def all(self) -> list[Presence]:
        """Everyone who is there, and those that were lost within ten minutes (``left_s`` below 0)."""
        answer = await self._door.run("presences", [self._key], [])
        now, entries = float(answer[0]), answer[1:]
        return sorted((self._read(f, v, now) for f, v in zip(entries[::2], entries[1::2], strict=True)), key=lambda p: p.id)

    async def acked(self, version: int) -> bool:
        """Whether every gateway that is there obeys ``version`` or a newer table; True as well when there is none."""
        return not await self.behind(version)

    async def behind(self, version: int) -> list[str]:
        """Names of those that are there and obey an older table than ``version``."""
        return sorted({p.name for p in await self.all() if p.left_s > 0 and p.version < version})

    async def lost(self) -> list[str]:
        """Names of those that went silent without a goodbye."""
        return [p.name for p in await self.all() if p.left_s <= 0]

    def _read(self, process: bytes, value: bytes, now: float) -> Presence:
        until, _, body = value.partition(b" ")
        try:
            told = msgspec.json.decode(body, type=_Body)
            return Presence(id=process.decode(), name=told.name, version=told.version, left_s=(float(until) - now) / 1000)
        except (msgspec.MsgspecError, ValueError) as error:
            name = process.decode(errors="replace")
            raise StoreError(f"{self._key}: what stands under {name!r} is no gateway's presence: {error}") from None

"""Which gateways there are, and which version of the route table each of them obeys.

This module exists so that the controller can know when no gateway sends anything to a worker any more: publishing a table is not
the same as its being obeyed. What always holds:

* A gateway is there from before its first request until it says goodbye, or is not heard of for its ``presence``; that ends by the
  server's clock.
* It writes a version after it has stopped routing by any older one, never before.
* One that went silent does not hold the others up, and ``lost`` names it for ten minutes: it may still route by the last table it
  saw, for as long as it cannot reach the store.
* Silence of all at once says nothing. Gateways and the leader speak with the store every second; when nobody has for ``AWAY_S``, it
  was away or is another server, and whoever was there has ``SETTLE_S`` to speak. A store that is new, or lost its data, does not
  know who is there before that time is over: then ``behind`` could not tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from sentinel.store.errors import StoreError

if TYPE_CHECKING:
    from sentinel.store.client import Store

LOST_S = 600.0  # a gateway that went silent is named for so long
AWAY_S = 1.5  # less than what is left of a presence of 3 s when its gateway fails to renew it, and more than any healthy pause
SETTLE_S = 5.0  # a gateway renews every third of its presence, after at most store.timeout in a question that was lost


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

    def __init__(self, store: Store, *, settle_s: float = SETTLE_S) -> None:
        self._door = store._door  # of this package
        self._key = self._door.key("gateways")
        self._settle_s = settle_s

    async def obey(self, process: str, name: str, version: int, presence_s: float) -> None:
        """Say that ``process`` (an id never used twice) is there and routes by ``version``; holds for ``presence_s`` seconds."""
        await self._run(process, msgspec.json.encode(_Body(name, version)), round(presence_s * 1000))

    async def leave(self, process: str) -> None:
        """It routes nothing any more."""
        await self._door.ask("HDEL", self._key, process)

    async def all(self) -> list[Presence]:
        """Everyone who is there, and those that were lost within ten minutes (``left_s`` below 0)."""
        return (await self._look())[1]

    async def acked(self, version: int) -> bool:
        """Whether every gateway that spoke and is there obeys ``version`` or a newer table; True as well when there is none."""
        return not _older(await self.all(), version)

    async def behind(self, version: int, newest: int | None = None) -> list[str]:
        """Names of those that are there and obey an older table than ``version``: while there are any, they may send by it.

        Raises StoreError as well where nobody can know: before those that are there had time to speak with a new store, and while
        one obeys a table above ``newest``, the last that was published: what is published now does not reach it.
        """
        known_s, found = await self._look()
        if ahead := next((p for p in found if newest is not None and p.left_s > 0 and p.version > newest), None):
            raise StoreError(f"{self._key}: {ahead.name} obeys table {ahead.version}, and the last one published is {newest}")
        older = _older(found, version)
        if not older and known_s < self._settle_s:
            raise StoreError(f"{self._key}: began {known_s:.1f} s ago; gateways have {self._settle_s:g} s to say who is there")
        return older

    async def lost(self) -> list[str]:
        """Names of those that went silent without a goodbye."""
        return [p.name for p in await self.all() if p.left_s <= 0]

    async def _look(self) -> tuple[float, list[Presence]]:
        """For how many seconds the store has known of gateways, and all of them by id."""
        now, born, *entries = await self._run()
        found = [self._read(f, v, float(now)) for f, v in zip(entries[::2], entries[1::2], strict=True)]
        return (float(now) - float(born)) / 1000, sorted(found, key=lambda p: p.id)

    async def _run(self, *said: str | bytes | int) -> list[bytes]:
        bounds = [round(s * 1000) for s in (LOST_S, AWAY_S, self._settle_s)]
        answer: list[bytes] = await self._door.run("presences", [self._key, f"{self._key}:heard"], [*bounds, *said])
        return answer

    def _read(self, process: bytes, value: bytes, now: float) -> Presence:
        until, _, body = value.partition(b" ")
        try:
            told = msgspec.json.decode(body, type=_Body)
            return Presence(id=process.decode(), name=told.name, version=told.version, left_s=(float(until) - now) / 1000)
        except (msgspec.MsgspecError, ValueError) as error:
            name = process.decode(errors="replace")
            raise StoreError(f"{self._key}: what stands under {name!r} is no gateway's presence: {error}") from None


def _older(presences: Iterable[Presence], version: int) -> list[str]:
    return sorted({p.name for p in presences if p.left_s > 0 and p.version < version})

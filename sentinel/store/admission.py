"""Limits that all gateways share, leased: what each of them may hold of each limit, and what it holds now.

This module exists so that a limit is a limit for all gateways together, and that what a dead gateway held comes back by itself.
What always holds here:

* What the living owners are allotted of a limit never adds up to more than the limit, but for requests that already run when a
  store that lost its data hears of them again.
* An owner says what it holds, never what it adds or takes away: saying it twice, late, or to a store that forgot everything is
  harmless. What it held is nobody's when its lease is over by the server's clock.
* Under contention each owner gets an equal part, or what it wants where that is less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sentinel.store.errors import StoreError

if TYPE_CHECKING:
    from sentinel.store.client import Store

TURN_S = 1.0  # what cannot be divided goes round among those who want it, this long each


class Need(NamedTuple):
    """One owner's word on one limit, in the limit's units (requests or tokens). See ``lua/admission.lua``."""

    limit: str
    at_most: int  # for all owners together
    keep: int
    demand: int
    want: int
    head: int


class Grant(NamedTuple):
    """``caps``: what the owner may hold now of each limit that it spoke of, in that order."""

    fence: int
    settling_s: float  # above 0: the store does not know yet what everybody holds
    owners: int
    caps: list[int]


class Held(NamedTuple):
    """What one living owner holds of one limit, for people and the controller."""

    owner: str
    allotted: int
    demand: int


class AdmissionRecords:
    """The leases. Every method raises StoreError when it could not be told what happened."""

    def __init__(self, store: Store, lease_s: float) -> None:
        self._door = store._door  # of this package
        self._lease = f"{lease_s * 1000:.0f}"
        self._owners, self._memory = self._door.key("owners"), self._door.key("admission")

    async def state(self, owner: str, seq: int, needs: Sequence[Need], *, full: bool, owners: int) -> Grant | None:
        """Say what is held and wanted. ``full``: ``needs`` is everything that is held; only then is the owner registered.

        ``seq`` rises with every call. None: the owner is not registered (its lease was over, or the store lost it): whatever it
        was allotted may be somebody else's.
        """
        keys = [self._owners, self._memory, *(self._limit(need.limit) for need in needs)]
        args = [owner, f"{seq}", "1" if full else "0", self._lease, f"{owners}", f"{TURN_S * 1000:.0f}"]
        args += [f"{number}" for need in needs for number in need[1:]]
        answer = await self._door.run("admission", keys, args, sure=False)  # a failover makes it settle anew
        if answer[0] == b"lost":
            return None
        if answer[0] != b"ok":
            raise StoreError(f"{self._owners}: a later statement of {owner} is already there, so this one says nothing")
        return Grant(answer[1], answer[2] / 1000, answer[3], answer[4:])

    async def leave(self, owner: str) -> None:
        """Give everything back at once."""
        await self._door.write("HDEL", self._owners, owner)

    async def held(self, limit: str) -> list[Held]:
        """What the living owners hold of a limit; a living owner says it anew within a third of its lease."""
        owners = await self._door.ask("HGETALL", self._owners)
        seconds, micros = await self._door.ask("TIME")
        now = int(seconds) * 1000 + int(micros) // 1000
        alive = {name for name, told in owners.items() if int(told.split()[0]) > now}
        entries = await self._door.ask("HGETALL", self._limit(limit))
        return [Held(name.decode(), *map(int, told.split()[:2])) for name, told in sorted(entries.items()) if name in alive]

    def _limit(self, name: str) -> str:
        return self._door.key(f"limit:{name}")

"""Who leads: one lease with a fencing epoch, held by at most one process at any time by the server's clock.

What always holds here:

* The epoch rises each time the lease is acquired and never falls, not even after the store was flushed: a process never
  accepts or makes an epoch below one that it has seen.
* No epoch is given twice, not even by a store that came back older after a failover or a crash: the first lease that a server
  gives in a new life as primary leaps over all that may have been given and lost (acquire.lua).
* A lease that is still running is given to nobody else. The process that holds it may acquire it again, and gets a new
  epoch, which also fences off whatever it still had on the way under the old one.
* Who asks is told by a token drawn at random per open store, so two processes with one name are still two.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import msgspec

from sentinel.store.errors import StoreError

if TYPE_CHECKING:
    from sentinel.store.door import Door


class Leader(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds the lease now, where it is reached, and under which epoch."""

    holder: str
    url: str
    epoch: int


class Lease:
    """The leader's lease. Times are seconds; the smallest the server can count is a millisecond."""

    def __init__(self, door: Door, token: str = "") -> None:
        """``token``: of a lease of this process, to ask for the same one over another door."""
        self._door = door
        self.key = door.key("lease")
        self.token = token or secrets.token_hex(16)
        self._seen = 0  # the highest epoch that this process knows of
        self.before = 0  # the highest epoch known before ours, when it was acquired last

    async def acquire(self, holder: str, url: str, ttl_s: float) -> int | None:
        """Take the lease for ``ttl_s`` seconds. Returns its epoch, or None while somebody else holds it."""
        keys = [self.key, self._door.key("epoch"), self._door.key("home")]
        answer = await self._door.run("acquire", keys, [self.token, holder, url, _milliseconds(ttl_s), self._seen])
        ours, epoch, *before = map(int, answer)
        self._seen = max(self._seen, epoch)
        if not ours:
            return None
        self.before = before[0]
        return epoch

    async def renew(self, epoch: int, ttl_s: float) -> bool:
        """Extend the lease to ``ttl_s`` seconds from now. False: it is not ours any more (ended, taken, or flushed)."""
        return bool(await self._door.run("renew", [self.key], [self.token, epoch, _milliseconds(ttl_s)]))

    async def release(self, epoch: int) -> bool:
        """Give the lease back at once. False: it was not ours."""
        return bool(await self._door.run("release", [self.key], [self.token, epoch]))

    async def leader(self) -> Leader | None:
        """Who leads now; None when nobody does."""
        holder, url, epoch = await self._door.ask("HMGET", self.key, "holder", "url", "epoch")
        if holder is None and url is None and epoch is None:
            return None
        try:
            found = Leader(holder=holder.decode(), url=url.decode(), epoch=int(epoch))
        except (AttributeError, ValueError, TypeError):
            raise StoreError(f"{self.key} is no lease: holder={holder!r}, url={url!r}, epoch={epoch!r}") from None
        self._seen = max(self._seen, found.epoch)
        return found


def _milliseconds(ttl_s: float) -> int:
    ttl = round(ttl_s * 1000)
    if ttl < 1:
        raise ValueError(f"a lease of {ttl_s!r} s is none; wanted at least 0.001")
    return ttl

"""The published route table, as gateways and clients read it: pushed to them, with a slow poll behind the push.

The table stands in the store as a whole, with the news since then in a list behind it (``route_news``): what one batch changed is
a row or two, and the whole of ten thousand workers a megabyte, which is written anew at most once a second. What always holds:

* A watcher never sees a table older than one it has seen, and losing the store costs it news, not the table it has. It goes on
  trying until it is closed.
* News are believed only upon the very version that they build on; whoever misses some reads everything.
* Of whatever is pushed, only what is newer is decoded.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from sentinel.model import Routes
from sentinel.model.route_news import RouteNews, applied
from sentinel.store.errors import StoreError

if TYPE_CHECKING:
    from redis.asyncio.client import PubSub

    from sentinel.store.door import Door

_DECODER = msgspec.json.Decoder(Routes)
_NEWS = msgspec.json.Decoder(RouteNews)
_HEAD = re.compile(rb'\{"type":"(Routes|RouteNews)","version":(\d+)[,}]')
_HEAD_BYTES = 63  # more than the longest head, and less than a list of them would cost


class Keys:
    """Where the table stands; both are names of channels, too. Readers of before the news know the first only."""

    def __init__(self, door: Door) -> None:
        self.whole, self.news = door.key("routes"), door.key("routes:news")

    @property
    def reads(self) -> list[tuple[str, ...]]:
        """What ``joined`` wants, in its order."""
        return [("GET", self.whole), ("LRANGE", self.news, "0", "-1")]

    def joined(self, body: bytes | None, chain: Sequence[bytes]) -> Routes | None:
        """The table with its news. Raises StoreError naming the key that cannot be read.

        News that are older than the table (it was written by a controller that knows none) are passed over; behind a gap the table
        stays as it is.
        """
        if body is None:
            return None
        key = self.whole
        try:
            table = _DECODER.decode(body)
            key = self.news
            for news in map(_NEWS.decode, chain):
                if news.before == table.version:
                    table = applied(table, news)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            what = "route table" if key == self.whole else "list of news of the route table"
            raise StoreError(f"{key} is no {what}: {error}") from None
        return table


def stands_in_news(table: Routes | None, chain: Sequence[bytes]) -> bool:
    """Whether this, as read with its news, is what only they say: readers that know none have an older one."""
    return table is not None and bool(chain) and _version(chain[-1]) == table.version


class RouteTable:
    """Reads the table; it is written by Decisions.commit only."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._keys = Keys(door)

    async def current(self) -> Routes | None:
        whole, chain = await self._door.ask_all(self._keys.reads)
        return self._keys.joined(whole, chain)

    async def watch(self, poll_s: float) -> AsyncIterator[Routes]:
        """The table as it stands, then each newer one. Tables between two looks may be skipped; the newest never is.

        Never raises for the store's sake: while the store is away or holds garbage, nothing is yielded.
        """
        have: Routes | None = None
        while True:
            try:
                async with self._door.subscribed(self._keys.whole, self._keys.news) as channel:
                    looked = await self.current()  # after subscribing: nothing falls between the two
                    while True:
                        if looked is not None and (have is None or looked.version > have.version):
                            have = looked
                            yield have
                        looked = await self._next(channel, have, poll_s)
            except StoreError:
                await asyncio.sleep(min(poll_s, 0.5))

    async def _next(self, channel: PubSub, have: Routes | None, poll_s: float) -> Routes | None:
        """``have`` with all that was pushed; what the store holds, after ``poll_s`` without a push or one that is of no use."""
        message = await channel.get_message(timeout=poll_s)
        if message is not None:
            try:
                table = have
                while message is not None:  # what came while the last table was taken in is one step
                    table = _with(table, message["data"])
                    message = await channel.get_message(timeout=0)
                return table
            except (ValueError, msgspec.MsgspecError):  # a gap; or anyone who may publish can push garbage
                return await self.current()  # what counts is what is stored
        await self._door.still(channel)
        return await self._newer(have)

    async def _newer(self, have: Routes | None) -> Routes | None:
        """What the store holds, read as a whole only when it is not ``have``."""
        whole, keys = self._keys.whole, self._keys
        heads = await self._door.ask_all([("GETRANGE", whole, "0", str(_HEAD_BYTES)), ("LINDEX", keys.news, "-1")])
        known = [_version(head) for head in heads]
        if have is None or known[0] is None or max(v for v in known if v is not None) > have.version:
            return await self.current()
        return have


def _version(body: bytes | None) -> int | None:
    head = _HEAD.match(body or b"")
    return int(head[2]) if head else None


def _with(have: Routes | None, body: bytes) -> Routes | None:
    """Raises ValueError or MsgspecError for what is no table, and no news upon this one."""
    head = _HEAD.match(body)
    if head is None:
        raise ValueError("no route table")
    if have is not None and int(head[2]) <= have.version:
        return have
    if head[1] == b"Routes":
        return _DECODER.decode(body)
    if have is None:
        raise ValueError("news without a table")
    return applied(have, _NEWS.decode(body))

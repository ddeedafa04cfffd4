"""The published route table, as gateways and clients read it: pushed to them, with a slow poll behind the push.

What always holds here: a watcher never sees a table older than one it has seen, and losing the store costs it news, not the
table it has. It goes on trying until it is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec

from sentinel.model import Routes
from sentinel.store.errors import StoreError

if TYPE_CHECKING:
    from redis.asyncio.client import PubSub

    from sentinel.store.door import Door

_DECODER = msgspec.json.Decoder(Routes)


def decode_routes(key: str, body: bytes | None) -> Routes | None:
    """Raises StoreError naming ``key`` when ``body`` is no route table."""
    if body is None:
        return None
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(f"{key} is no route table: {error}") from None


class RouteTable:
    """Reads the table; it is written by Decisions.commit only."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._key = door.key("routes")  # also the channel's name

    async def current(self) -> Routes | None:
        return decode_routes(self._key, await self._door.ask("GET", self._key))

    async def watch(self, poll_s: float) -> AsyncIterator[Routes]:
        """The table as it stands, then each newer one. Tables between two looks may be skipped; the newest never is.

        Never raises for the store's sake: while the store is away or holds garbage, nothing is yielded.
        """
        newest = -1
        while True:
            try:
                async with self._door.subscribed(self._key) as channel:
                    looked: Routes | None = await self.current()  # after subscribing: nothing falls between the two
                    while True:
                        if looked is not None and looked.version > newest:
                            newest = looked.version
                            yield looked
                        looked = await self._next(channel, poll_s)
            except StoreError:
                await asyncio.sleep(min(poll_s, 0.5))

    async def _next(self, channel: PubSub, poll_s: float) -> Routes | None:
        """What was pushed; after ``poll_s`` without a push, or one that cannot be read, what the store holds."""
        message = await channel.get_message(timeout=poll_s)
        if message is not None:
            try:
                return _DECODER.decode(message["data"])
            except (msgspec.MsgspecError, UnicodeDecodeError):
                pass  # anyone who may publish can push garbage; what counts is what is stored
        await self._door.still(channel)
        return await self.current()

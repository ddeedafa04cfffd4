"""The connection, and the one place where what redis-py and the network do becomes the three answers of this package.

What always holds here:

* Nothing is retried behind the caller's back: only the caller knows whether a write may be sent twice.
* Every question has a deadline (``store.timeout``); past it, and for anything else that is no answer, StoreError is raised
  with a sentence that names the key or script and the server.
* No more than ``AT_ONCE`` questions are under way; others wait their turn within their deadline. So a store that stands still for
  a moment, with hundreds who ask, is late and not away.
* A connection whose question was given up is closed, never put back: no answer is ever read as that of another question.
* Where the store fails over, an answer counts only when ``primary`` says so.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sentinel.store.errors import StoreError

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.client import PubSub

    from sentinel.store.primary import Primary

# A question has a connection to itself. A server answers one at a time, so more of them would only queue there; a hundred processes
# have to fit into its 10,000 clients (redis.conf, maxclients); and a store that awakes should not find thousands of TLS handshakes.
AT_ONCE = 64


class Door:
    """What the parts of this package ask through: commands, sure writes, all-at-once reads, scripts, and a channel."""

    def __init__(self, client: Redis, server: str, prefix: str, timeout_s: float, primary: Primary | None = None) -> None:
        """``primary``: of a store that fails over; it says when an answer counts."""
        self._client = client
        self._server = server
        self._prefix = prefix
        self._primary = primary
        self._turns = asyncio.Semaphore(AT_ONCE)
        self.timeout_s = timeout_s

    def key(self, name: str) -> str:
        return f"{{{self._prefix}}}:{name}"

    async def ask(self, *command: str | bytes | int) -> Any:
        """One command; its answer as redis-py parses it, with bytes left as bytes."""
        async with self._asking(f"{command[0]!s} {command[1]!s}" if len(command) > 1 else str(command[0])):
            return await self._client.execute_command(*command)  # type: ignore[no-untyped-call]

    async def write(self, *command: str | bytes) -> None:
        """One command that writes; done when this returns."""
        async with self._asking(f"{command[0]!s} {command[1]!s}"), self._counting() as client:
            await client.execute_command(*command)  # type: ignore[no-untyped-call]

    async def ask_all(self, commands: Sequence[tuple[str, ...]]) -> list[Any]:
        """Several reads of one moment (MULTI … EXEC)."""
        async with self._asking(f"reading {self.key('*')}"), self._client.pipeline(transaction=True) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            answers: list[Any] = await pipe.execute()
            return answers

    async def run(self, script: str, keys: Sequence[str], args: Sequence[str | bytes | int], *, sure: bool = True) -> Any:
        """Run ``lua/<script>.lua`` on the server; its text is sent only when the server does not know it yet.

        ``sure=False`` is for what may be lost or be of yesterday when the store fails over, and has to be quick.
        """
        from redis.exceptions import NoScriptError  # noqa: PLC0415  (redis-py is slow to import; see the package)

        text, sha = _script(script)
        async with self._asking(f"script {script} on {keys[0]}"), self._counting(sure=sure) as client:
            try:
                return await client.evalsha(sha, len(keys), *keys, *args)
            except NoScriptError:
                return await client.eval(text, len(keys), *keys, *args)

    @asynccontextmanager
    async def subscribed(self, *channels: str) -> AsyncIterator[PubSub]:
        """A subscription to all of them, in force when the body begins; a lost connection raises StoreError out of the body."""
        pubsub = self._client.pubsub(ignore_subscribe_messages=True)
        try:
            async with self._asking(f"subscribing to {channels[0]}"):
                await pubsub.subscribe(*channels)
            with _translated(f"channel {channels[0]}", self._server):
                yield pubsub
        finally:
            await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def still(self, channel: PubSub) -> None:
        """Raises StoreError when the subscription is on a server that is not the primary any more, or may not be."""
        if self._primary:
            connection: Any = channel.connection
            async with self._asking("the channel's server"):
                try:
                    await self._primary.check((connection.host, int(connection.port)))
                except StoreError:  # connections that wait for their next question lead there as well
                    await self._client.connection_pool.disconnect(inuse_connections=False)
                    raise

    @asynccontextmanager
    async def _counting(self, *, sure: bool = True) -> AsyncIterator[Redis]:
        """A client whose answers count once the body has ended: with one server, at once."""
        if self._primary is None or not sure:
            yield self._client
            return
        async with self._client.client() as one:  # WAIT speaks of what its own connection has written
            yield one
            await self._primary.confirm(one)

    @asynccontextmanager
    async def _asking(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.timeout_s), self._turns:
                with _translated(what, self._server):
                    yield
        except TimeoutError:
            raise StoreError(f"{what}: no answer from {self._server} within {self.timeout_s:g} s") from None


@contextmanager
def _translated(what: str, server: str) -> Iterator[None]:
    """Every error of redis-py and of the socket becomes StoreError; cancellation and our own errors pass."""
    from redis.exceptions import RedisError  # noqa: PLC0415

    try:
        yield
    except StoreError as error:
        raise StoreError(f"{what}: {server}: {error}") from error
    except (RedisError, OSError) as error:
        raise StoreError(f"{what}: {server}: {_sentence(error)}") from error


def _sentence(error: BaseException) -> str:
    from redis.exceptions import ClusterDownError, MovedError  # noqa: PLC0415

    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MovedError | ClusterDownError):
        return f"is a node of a Redis Cluster, which sentinel does not use ({text}); wanted one server, or Redis Sentinel"
    if "ompiling" in text and "script" in text:
        return f"does not take our scripts ({text}); wanted Redis 7.0 or later, or Valkey"
    return text


@cache
def _script(name: str) -> tuple[str, str]:
    text = (Path(__file__).parent / "lua" / f"{name}.lua").read_text("utf-8")
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

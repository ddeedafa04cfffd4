"""The connection, and the one place where what redis-py and the network do becomes the three answers of this package.

What always holds here:

* Nothing is retried behind the caller's back: only the caller knows whether a write may be sent twice.
* Every question has a deadline (``store.timeout``); past it, and for anything else that is no answer, StoreError is raised
  with a sentence that names the key or script and the server.
* A connection whose question was given up is closed, never put back: no answer is ever read as that of another question.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sentinel.config import ConfigError, read_secret
from sentinel.model import Routes
from sentinel.store.decisions import Decisions
from sentinel.store.embedded import Embedded
from sentinel.store.errors import StoreError
from sentinel.store.lease import Lease
from sentinel.store.routes import RouteTable

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.client import PubSub

    from sentinel.config import StoreSettings

DEFAULT_STATE_DIR = Path("/var/lib/sentinel")
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]+")


class Door:
    """What the parts of this package ask through: single commands, all-at-once reads, scripts, and a channel."""

    def __init__(self, client: Redis, server: str, prefix: str, timeout_s: float) -> None:
        self._client = client
        self._server = server
        self._prefix = prefix
        self.timeout_s = timeout_s

    def key(self, name: str) -> str:
        return f"{{{self._prefix}}}:{name}"

    async def ask(self, *command: str | bytes | int) -> Any:
        """One command; its answer as redis-py parses it, with bytes left as bytes."""
        async with self._asking(f"{command[0]!s} {command[1]!s}" if len(command) > 1 else str(command[0])):
            return await self._client.execute_command(*command)  # type: ignore[no-untyped-call]

    async def ask_all(self, commands: Sequence[tuple[str, str]]) -> list[Any]:
        """Several reads of one moment (MULTI … EXEC)."""
        async with self._asking(f"reading {self.key('*')}"), self._client.pipeline(transaction=True) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            answers: list[Any] = await pipe.execute()
            return answers

    async def run(self, script: str, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        """Run ``lua/<script>.lua`` on the server; its text is sent only when the server does not know it yet."""
        from redis.exceptions import NoScriptError  # noqa: PLC0415  (redis-py is slow to import; see the package)

        text, sha = _script(script)
        async with self._asking(f"script {script} on {keys[0]}"):
            try:
                return await self._client.evalsha(sha, len(keys), *keys, *args)
            except NoScriptError:
                return await self._client.eval(text, len(keys), *keys, *args)

    @asynccontextmanager
    async def subscribed(self, channel: str) -> AsyncIterator[PubSub]:
        """A subscription that is in force when the body begins; a lost connection raises StoreError out of the body."""
        pubsub = self._client.pubsub(ignore_subscribe_messages=True)
        try:
            async with self._asking(f"subscribing to {channel}"):
                await pubsub.subscribe(channel)
            with _translated(f"channel {channel}", self._server):
                yield pubsub
        finally:
            await pubsub.aclose()  # type: ignore[no-untyped-call]

    @asynccontextmanager
    async def _asking(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.timeout_s):
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
    except (RedisError, OSError) as error:
        raise StoreError(f"{what}: {server}: {_sentence(error)}") from error


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if "ompiling" in text and "script" in text:
        return f"does not take our scripts ({text}); wanted Redis 7.0 or later, or Valkey"
    return text


@cache
def _script(name: str) -> tuple[str, str]:
    text = (Path(__file__).parent / "lua" / f"{name}.lua").read_text("utf-8")
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class Kept:
    """A small durable map for adapters (``sentinel.serving.Keep``); last write wins, StoreError when it cannot be told."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def put(self, key: str, value: bytes) -> None:
        await self._door.ask("HSET", self._door.key("kept"), key, value)

    async def get(self, key: str) -> bytes | None:
        value: bytes | None = await self._door.ask("HGET", self._door.key("kept"), key)
        return value

    async def drop(self, key: str) -> None:
        await self._door.ask("HDEL", self._door.key("kept"), key)


class Store:
    """An open store. ``lease``, ``decisions`` and ``kept`` are its parts; close it when done."""

    def __init__(self, client: Redis, door: Door, server: Embedded | None = None) -> None:
        self._client = client
        self._door = door
        self._table = RouteTable(door)
        self.server = server  # the embedded server as this process sees it; None for one that runs elsewhere
        self.lease = Lease(door)
        self.decisions = Decisions(door, self.lease)
        self.kept = Kept(door)

    async def routes(self) -> Routes | None:
        """The published route table; None when none was ever published."""
        return await self._table.current()

    def watch_routes(self, poll_s: float = 1.0) -> AsyncIterator[Routes]:
        """The current table, then every newer one, for ever; lost connections are mended inside. See RouteTable.watch."""
        return self._table.watch(poll_s)

    async def ping(self) -> None:
        """Ask for a sign of life. Raises StoreError when there is none."""
        await self._door.ask("PING")

    async def close(self) -> None:
        """Let go of the connections; an embedded server that this process runs is stopped."""
        await self._client.aclose()
        if self.server:
            await self.server.stop()


async def connect(settings: StoreSettings, state_dir: Path | None) -> Store:
    """See sentinel.store.open_store."""
    if not _PREFIX.fullmatch(settings.prefix):
        raise ConfigError(f"store.prefix: {settings.prefix!r} cannot name keys; wanted letters, digits, '_', '.', ':' or '-'")
    embedded = None
    if settings.url.startswith("embedded:"):
        where = settings.url.removeprefix("embedded:")
        embedded = Embedded(Path(where) if where else (state_dir or DEFAULT_STATE_DIR) / "store")
        await embedded.start()
    client = _client(settings, embedded)
    name = f"the embedded store in {embedded.directory}" if embedded else f"the store at {settings.url}"
    return Store(client, Door(client, name, settings.prefix, float(settings.timeout)), embedded)


def _client(settings: StoreSettings, embedded: Embedded | None) -> Redis:
    from redis.asyncio import Redis  # noqa: PLC0415
    from redis.asyncio.retry import Retry  # noqa: PLC0415
    from redis.backoff import NoBackoff  # noqa: PLC0415

    options: dict[str, Any] = {
        "protocol": 2,  # plain answers; no maintenance pushes that some servers offer on RESP3
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,  # a question's deadline is Door's; a subscription has none
        "socket_connect_timeout": float(settings.timeout),
        "client_name": "sentinel",
    }
    if embedded:
        return Redis(unix_socket_path=embedded.socket, **options)
    parts = urlsplit(settings.url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(f'store.url: expected "embedded:", redis://, rediss:// or unix://, got {settings.url!r}')
    if parts.password is not None or "password=" in parts.query:
        raise ConfigError("store.url: holds a password; wanted store.password_file, a file that only sentinel can read")
    if settings.password_file:
        options["password"] = read_secret(settings.password_file, "store.password_file")
    try:
        client = Redis.from_url(settings.url, **options)
        client.connection_pool.make_connection()  # type: ignore[no-untyped-call]  # checks the options, connects not
        return client
    except (ValueError, TypeError) as error:
        raise ConfigError(f"store.url: {settings.url!r} cannot be used: {error}") from None

"""An open store: its parts put together, and the way from settings to a server.

What always holds: the embedded server, where there is one, is up before the client is made; a store that is closed holds
nothing open; a setting that cannot work is a ConfigError before anything is asked.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sentinel.config import ConfigError, read_secret
from sentinel.model import Routes
from sentinel.store.decisions import Decisions
from sentinel.store.door import AT_ONCE, Door
from sentinel.store.embedded import Embedded
from sentinel.store.lease import Lease
from sentinel.store.routes import RouteTable
from sentinel.store_url import Sentinels, problem, sentinels

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from sentinel.config import StoreSettings
    from sentinel.store.primary import Primary

DEFAULT_STATE_DIR = Path("/var/lib/sentinel")
LISTENING = 8  # subscriptions of one process at once; there are two, to the routes and to the breakers
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]+")


class Kept:
    """A small durable map for adapters (``sentinel.serving.Keep``); last write wins, StoreError when it cannot be told."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def put(self, key: str, value: bytes) -> None:
        await self._door.write("HSET", self._door.key("kept"), key, value)

    async def get(self, key: str) -> bytes | None:
        value: bytes | None = await self._door.ask("HGET", self._door.key("kept"), key)
        return value

    async def drop(self, key: str) -> None:
        await self._door.write("HDEL", self._door.key("kept"), key)


class Store:
    """An open store. ``lease``, ``decisions`` and ``kept`` are its parts; close it when done."""

    def __init__(self, connect: Callable[[], tuple[Redis, Door, Primary | None]], server: Embedded | None = None) -> None:
        self._connect = connect
        self._client, self._door, self._primary = connect()
        door = self._door
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

    @asynccontextmanager
    async def apart(self) -> AsyncIterator[Lease]:
        """The same lease over connections of the running loop's own, for another thread."""
        client, door, primary = self._connect()
        try:
            yield Lease(door, self.lease.token)
        finally:
            await _close(client, primary)

    async def ping(self) -> None:
        """Ask for a sign of life. Raises StoreError when there is none."""
        await self._door.ask("PING")

    async def close(self) -> None:
        """Let go of the connections; an embedded server that this process runs is stopped."""
        await _close(self._client, self._primary)
        if self.server:
            await self.server.stop()


async def _close(client: Redis, primary: Primary | None) -> None:
    await client.aclose()
    if primary:
        await primary.aclose()


async def connect(settings: StoreSettings, state_dir: Path | None) -> Store:
    """See sentinel.store.open_store."""
    if not _PREFIX.fullmatch(settings.prefix):
        raise ConfigError(f"store.prefix: {settings.prefix!r} cannot name keys; wanted letters, digits, '_', '.', ':' or '-'")
    embedded = None
    if settings.url.startswith("embedded:"):
        where = settings.url.removeprefix("embedded:")
        embedded = Embedded(Path(where) if where else (state_dir or DEFAULT_STATE_DIR) / "store")
        await embedded.start()
    name = f"the embedded store in {embedded.directory}" if embedded else f"the store at {settings.url}"

    secret = cache(read_secret)  # a file that is gone later must not end a leadership

    def once() -> tuple[Redis, Door, Primary | None]:
        client, primary = _client(settings, embedded, secret)
        return client, Door(client, name, settings.prefix, float(settings.timeout), primary), primary

    return Store(once, embedded)


def _client(settings: StoreSettings, embedded: Embedded | None, read: Callable[[Path, str], str]) -> tuple[Redis, Primary | None]:
    from redis.asyncio import Redis  # noqa: PLC0415
    from redis.asyncio.retry import Retry  # noqa: PLC0415
    from redis.backoff import NoBackoff  # noqa: PLC0415

    options: dict[str, Any] = {
        "protocol": 2,  # plain answers; no maintenance pushes that some servers offer on RESP3
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,  # a question's deadline is Door's; a subscription has none
        "socket_connect_timeout": float(settings.timeout),
        "client_name": "sentinel",
        "max_connections": AT_ONCE + LISTENING,  # past it redis-py fails, so Door never lets it come to that
    }
    if embedded:
        return Redis(unix_socket_path=embedded.socket, **options), None
    if sentence := problem(settings.url):
        raise ConfigError(sentence)
    secret = read(settings.password_file, "store.password_file") if settings.password_file else None
    try:
        if where := sentinels(settings.url):
            return _failing_over(where, settings, options, secret, read)
        client = Redis.from_url(settings.url, **(options | ({"password": secret} if secret else {})))
        client.connection_pool.make_connection()  # type: ignore[no-untyped-call]  # checks the options, connects not
        return client, None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"store.url: {settings.url!r} cannot be used: {error}") from None


def _failing_over(
    where: Sentinels, settings: StoreSettings, options: dict[str, Any], secret: str | None, read: Callable[[Path, str], str]
) -> tuple[Redis, Primary]:
    from redis.asyncio.connection import parse_url  # noqa: PLC0415

    from sentinel.store.primary import Primary  # noqa: PLC0415

    tls = dict(parse_url(f"{'rediss' if where.tls else 'redis'}://x?{where.query}"))
    tls = {k: v for k, v in tls.items() if k not in ("host", "connection_class")} | ({"ssl": True} if where.tls else {})
    keys = settings.sentinels_password_file
    password = read(keys, "store.sentinels_password_file") if keys else None
    primary = Primary(
        where.hosts, where.service, float(settings.timeout), sentinel_kwargs={**options, **tls, "password": password},
        **options, **tls, username=where.user or None, password=secret,
    )  # fmt: skip
    client: Redis = primary.master_for(where.service)
    for pool in (client.connection_pool, *(s.connection_pool for s in primary.sentinels)):
        pool.make_connection()  # type: ignore[no-untyped-call]  # checks the options, connects not
    return client, primary

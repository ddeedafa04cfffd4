"""What was decided, made durable before it is acted on: incidents, drains, holds, effects still to be done, routes.

What always holds here:

* A commit is one script: it writes all of its changes, or none. It writes only while the lease is ours under that epoch.
* Commits of one process are done in the order in which they were asked for. One that timed out here and reaches the
  server later than its successor is refused there.
* Committing the same changes again is harmless, so after StoreError the caller may simply do that. After WentBack, a
  StoreError too, it has to write again what the store has lost as well.
* Effects still pending come back in the order in which they were decided. Their bytes are JSON that is not looked into.
* A route table is written as its news where it builds on one that we have written (``routes``), and as a whole with the first
  commit after ``WHOLE_S``, and with a new leader's first one where the leader before left news: so the chain of news stays short,
  and readers that know none are a second or two behind at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from sentinel.model import Drain, Hold, Incident, Routes
from sentinel.model.route_news import difference
from sentinel.store.errors import StoreError, WentBack
from sentinel.store.routes import Keys, stands_in_news

if TYPE_CHECKING:
    from sentinel.store.door import Door
    from sentinel.store.lease import Lease

Table = Literal["incident", "drain", "hold", "pending", "kept"]
TABLES: tuple[Table, ...] = ("incident", "drain", "hold", "pending", "kept")

WHOLE_S = 1.0  # seconds from the first news until the whole table is written again

T = TypeVar("T", Incident, Drain, Hold)


class Put(msgspec.Struct, frozen=True):
    """Write ``value`` under ``key``; it replaces what stood there. A noun (or an effect) is written as its JSON."""

    kind: Table
    key: str
    value: msgspec.Struct | bytes

    def body(self) -> bytes:
        return self.value if isinstance(self.value, bytes) else msgspec.json.encode(self.value)


class Drop(msgspec.Struct, frozen=True):
    """Remove what stands under ``key``; nothing there is as good."""

    kind: Table
    key: str


class PublishRoutes(msgspec.Struct, frozen=True):
    """Replace the route table and push it to everyone who watches; its version must be above that of the one it replaces."""

    routes: Routes


Change = Put | Drop | PublishRoutes


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that had been decided at one moment. Tuples are ordered by key, pending by decision."""

    incidents: tuple[Incident, ...] = ()
    drains: tuple[Drain, ...] = ()
    holds: tuple[Hold, ...] = ()
    pending: dict[str, bytes] = {}  # effect id → its JSON
    routes: Routes | None = None
    head: tuple[int, int] = (0, 0)  # epoch and number of the last commit in it: what rises with every commit


class _Table(msgspec.Struct, frozen=True):
    """The route table as our last commit left it."""

    epoch: int
    routes: Routes
    news_since: float | None = None  # when the first of the news behind the whole table were written; None: there are none


class Decisions:
    """The durable decisions, written by the leader and read by the next one."""

    def __init__(self, door: Door, lease: Lease, clock: Callable[[], float] = time.monotonic) -> None:
        self._door = door
        self._lease = lease
        self._clock = clock
        self._routes = Keys(door)
        self._turn = asyncio.Lock()
        self._seq = 0
        self._table: _Table | None = None
        self._left: Routes | None = None  # the table as another leader left it, where only its news say so
        self.head = (0, 0)  # epoch and number of our last commit that is known to be done

    async def commit(self, epoch: int, changes: Sequence[Change], *, anew: bool = False) -> bool:
        """Write all of ``changes``, in their order, if the lease is ours under ``epoch``. False: it is not; nothing was written.

        Raises WentBack, with nothing written, when an earlier commit of ours under this epoch is not there any more, unless
        ``anew`` says that ``changes`` make up for that; ValueError, with nothing written, when a route table's version does not
        rise (the same table again is fine); and StoreError when it could not be told whether anything was written.
        """
        async with self._turn:
            if anew or (self._table and self._table.epoch != epoch):
                self._table = None
            answer = await self._commit(epoch, changes, anew)
            if answer == b"gap":  # somebody removed the table that our news build on, or it is written as a whole already
                self._table = None
                answer = await self._commit(epoch, changes, anew)
        key = self._lease.key
        if answer == b"fenced":
            return False
        if answer.startswith(b"stale "):
            raise ValueError(f"{self._routes.whole}: {answer[6:].decode()}")
        if answer == b"lost":
            raise WentBack(f"{key}: the store has lost commits of epoch {epoch} that it had said were done")
        if answer == b"late":
            raise StoreError(f"{key}: a later commit of epoch {epoch} is already there, so this one was not written")
        return True

    async def _commit(self, epoch: int, changes: Sequence[Change], anew: bool) -> bytes:
        self._seq += 1
        seq, table, now = self._seq, self._table, self._clock()
        keys = [self._door.key(name) for name in ("lease", "routes", "routes:news", *TABLES, "head")]
        done = self.head[1] if self.head[0] == epoch and not anew else -1
        args: list[str | bytes | int] = [self._lease.token, epoch, seq, done]
        for index, change in enumerate(changes):
            if isinstance(change, PublishRoutes):
                newer = table and change.routes.version > table.routes.version
                news = difference(table.routes, change.routes) if table and newer else None
                if table is None or news is None:
                    args += _whole(change.routes)
                    table = _Table(epoch, change.routes)
                else:
                    args += ["news", 3, f"{news.before} {news.version}", msgspec.json.encode(news)]
                    table = _Table(epoch, change.routes, now if table.news_since is None else table.news_since)
            else:
                args += self._packed(change, epoch, index)
        if table and table.news_since is not None and now - table.news_since >= WHOLE_S:
            args += _whole(table.routes)
            table = _Table(epoch, table.routes)
        elif table is None and self._left is not None:
            args += _whole(self._left)
            table = _Table(epoch, self._left)
        answer = bytes(await self._door.run("commit", keys, args))
        if answer == b"ok":
            self.head, self._table, self._left = (epoch, seq), table, None
        return answer

    def _packed(self, change: Put | Drop, epoch: int, index: int) -> list[str | bytes | int]:
        """One change as the script reads it: what, where, key, value (four arguments each)."""
        where = TABLES.index(change.kind) + 4
        if isinstance(change, Drop):
            return ["drop", where, change.key, b""]
        value = change.body()
        if change.kind == "pending":  # a hash has no order of its own, and effects of one lane must keep theirs
            value = msgspec.json.encode((epoch, self._seq, index, msgspec.Raw(value)))
        return ["put", where, change.key, value]

    async def load(self) -> Stored:
        """Everything, as of one moment. Raises StoreError naming the key and field that cannot be read."""
        key = self._door.key
        commands: list[tuple[str, ...]] = [("HGETALL", key(t)) for t in ("incident", "drain", "hold", "pending")]
        commands += [("GET", key("head")), *self._routes.reads]
        incidents, drains, holds, pending, head, whole, news = await self._door.ask_all(commands)
        routes = self._routes.joined(whole, news)
        self._left = routes if stands_in_news(routes, news) else None
        return Stored(
            incidents=_decoded(key("incident"), incidents, Incident),
            drains=_decoded(key("drain"), drains, Drain),
            holds=_decoded(key("hold"), holds, Hold),
            pending=_ordered(key("pending"), pending),
            routes=routes,
            head=_head(key("head"), head),
        )


def _whole(routes: Routes) -> list[str | bytes | int]:
    return ["routes", 2, routes.version, msgspec.json.encode(routes)]


def _head(key: str, text: bytes | None) -> tuple[int, int]:
    try:
        epoch, seq = map(int, (text or b"0 0").split())
    except ValueError:
        raise StoreError(f"{key} is {text!r}; wanted the epoch and number of the last commit") from None
    return epoch, seq


def _decoded(key: str, entries: dict[bytes, bytes], kind: type[T]) -> tuple[T, ...]:
    decoder = msgspec.json.Decoder(kind)
    found: list[T] = []
    for field, value in sorted(entries.items()):
        try:
            found.append(decoder.decode(value))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            name = field.decode(errors="replace")
            raise StoreError(f"{key}: what stands under {name!r} is no {kind.__name__}: {error}") from None
    return tuple(found)


def _ordered(key: str, entries: dict[bytes, bytes]) -> dict[str, bytes]:
    decoder = msgspec.json.Decoder(tuple[int, int, int, msgspec.Raw])
    found: list[tuple[tuple[int, int, int], str, bytes]] = []
    for field, value in entries.items():
        try:
            epoch, seq, index, effect = decoder.decode(value)
            found.append(((epoch, seq, index), field.decode(), bytes(effect)))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            name = field.decode(errors="replace")
            raise StoreError(f"{key}: what stands under {name!r} is no pending effect: {error}") from None
    return {name: effect for _, name, effect in sorted(found)}

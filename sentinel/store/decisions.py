"""What was decided, made durable before it is acted on: incidents, drains, holds, effects still to be done, routes.

What always holds here:

* A commit is one script: it writes all of its changes, or none. It writes only while the lease is ours under that epoch.
* Commits of one process are done in the order in which they were asked for. One that timed out here and reaches the
  server later than its successor is refused there.
* Committing the same changes again is harmless, so after StoreError the caller may simply do that. After WentBack, a
  StoreError too, it has to write again what the store has lost as well.
* Effects still pending come back in the order in which they were decided. Their bytes are JSON that is not looked into.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from sentinel.model import Drain, Hold, Incident, Routes
from sentinel.store.errors import StoreError, WentBack
from sentinel.store.routes import decode_routes

if TYPE_CHECKING:
    from sentinel.store.door import Door
    from sentinel.store.lease import Lease

Table = Literal["incident", "drain", "hold", "pending", "kept"]
TABLES: tuple[Table, ...] = ("incident", "drain", "hold", "pending", "kept")

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


class Decisions:
    """The durable decisions, written by the leader and read by the next one."""

    def __init__(self, door: Door, lease: Lease) -> None:
        self._door = door
        self._lease = lease
        self._turn = asyncio.Lock()
        self._seq = 0
        self.head = (0, 0)  # epoch and number of our last commit that is known to be done

    async def commit(self, epoch: int, changes: Sequence[Change], *, anew: bool = False) -> bool:
        """Write all of ``changes``, in their order, if the lease is ours under ``epoch``. False: it is not; nothing was written.

        Raises WentBack, with nothing written, when an earlier commit of ours under this epoch is not there any more, unless
        ``anew`` says that ``changes`` make up for that; ValueError, with nothing written, when a route table's version does not
        rise (the same table again is fine); and StoreError when it could not be told whether anything was written.
        """
        async with self._turn:
            self._seq += 1
            seq = self._seq
            names = ("lease", "routes", *TABLES, "head")
            keys = [self._door.key(name) for name in names]
            done = self.head[1] if self.head[0] == epoch and not anew else -1
            args: list[str | bytes | int] = [self._lease.token, epoch, seq, done]
            for index, change in enumerate(changes):
                args += self._packed(change, epoch, index)
            answer = bytes(await self._door.run("commit", keys, args))
            if answer == b"ok":
                self.head = (epoch, seq)
        if answer == b"fenced":
            return False
        if answer.startswith(b"stale "):
            raise ValueError(f"{keys[1]}: {answer[6:].decode()}")
        if answer == b"lost":
            raise WentBack(f"{keys[0]}: the store has lost commits of epoch {epoch} that it had said were done")
        if answer == b"late":
            raise StoreError(f"{keys[0]}: a later commit of epoch {epoch} is already there, so this one was not written")
        return True

    def _packed(self, change: Change, epoch: int, index: int) -> list[str | bytes | int]:
        """One change as the script reads it: what, where, key, value (four arguments each)."""
        if isinstance(change, PublishRoutes):
            return ["routes", 2, change.routes.version, msgspec.json.encode(change.routes)]
        where = TABLES.index(change.kind) + 3
        if isinstance(change, Drop):
            return ["drop", where, change.key, b""]
        value = change.body()
        if change.kind == "pending":  # a hash has no order of its own, and effects of one lane must keep theirs
            value = msgspec.json.encode((epoch, self._seq, index, msgspec.Raw(value)))
        return ["put", where, change.key, value]

    async def load(self) -> Stored:
        """Everything, as of one moment. Raises StoreError naming the key and field that cannot be read."""
        key = self._door.key
        commands = [("HGETALL", key(t)) for t in ("incident", "drain", "hold", "pending")]
        commands += [("GET", key("routes")), ("GET", key("head"))]
        incidents, drains, holds, pending, routes, head = await self._door.ask_all(commands)
        return Stored(
            incidents=_decoded(key("incident"), incidents, Incident),
            drains=_decoded(key("drain"), drains, Drain),
            holds=_decoded(key("hold"), holds, Hold),
            pending=_ordered(key("pending"), pending),
            routes=decode_routes(key("routes"), routes),
            head=_head(key("head"), head),
        )


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

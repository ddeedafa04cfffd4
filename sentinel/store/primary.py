"""Which of several Redis servers is the primary, and when its answer counts: the store that fails over (Redis Sentinel).

Replication is asynchronous, so a failover may take back what the old primary said was done; and an old primary that was
paused or cut off goes on saying so for seconds. This module exists so that such an answer is "could not tell". What always
holds of every script and kept write that is answered:

* Most of the Sentinels that the URL names answered *after* it, and the newest of their configurations calls the server that
  gave it the primary, with no failover under way. Of two primaries at most one has that majority.
* A replica has what was written, unless none takes it in time; then the majority alone vouches for it. So one lost server
  loses nothing that was told done, and a replica that hangs does not stop decisions. What that leaves is in docs/production.md.
* A server that is not the primary any more is left at once; the next question goes to the new one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.exceptions import RedisError

from sentinel.store.errors import StoreError

if TYPE_CHECKING:
    from redis.asyncio import Redis

ANSWER_S = 0.5  # for one Sentinel to answer, connecting included
GRACE_S = 0.05  # for the others once most have answered: the one that leads a failover knows first
REPLICA_SHARE = 0.25  # of store.timeout that a replica may take to have a write
REPLICA_MUTE_S = 0.02  # the same while the last write was not taken in time

Address = tuple[str, int]


class Says(NamedTuple):
    """What one Sentinel says: who is primary by which configuration, and whether that is about to change."""

    primary: Address
    config_epoch: int
    down: bool  # so many Sentinels call it down that a failover may begin
    moving: bool  # this Sentinel leads a failover that has promoted nobody yet


class Primary(Sentinel):
    """The Sentinels of one service, asked all at once; also finds the server that a new connection goes to."""

    def __init__(self, hosts: tuple[Address, ...], service: str, timeout_s: float, **options: Any) -> None:
        """``options`` are redis-py's: ``sentinel_kwargs`` for the Sentinels' connections, all else for the servers'."""
        super().__init__(list(hosts), **options)  # type: ignore[no-untyped-call]
        self._hosts, self._service = hosts, service
        self._wait_s = timeout_s * REPLICA_SHARE
        self._taken = True  # a replica took the last write in time
        self._mute: set[int] = set()  # Sentinels that did not answer last time: asked, not waited for
        self._late: dict[int, asyncio.Task[Says | None]] = {}
        self._why: dict[int, str] = {}  # what kept each from answering

    @property
    def most(self) -> int:
        return len(self._hosts) // 2 + 1

    async def confirm(self, one: Redis) -> None:
        """Return when what ``one`` (a client of a single connection) was just answered counts. Raises StoreError when not."""
        wait_s = self._wait_s if self._taken else min(self._wait_s, REPLICA_MUTE_S)
        taken: int = await one.execute_command("WAIT", 1, max(1, int(wait_s * 1000)))  # type: ignore[no-untyped-call]
        self._taken = taken > 0
        connection = cast(Any, one.connection)
        here = (connection.host, int(connection.port))
        try:
            await self.check(here)
        except StoreError:
            await connection.disconnect()
            await one.connection_pool.disconnect(inuse_connections=False)
            raise

    async def check(self, here: Address) -> None:
        """Raises StoreError unless most Sentinels answer now and the newest of them call ``here`` the primary."""
        said = await self._asked()
        if len(said) < self.most:
            raise StoreError(f"only {len(said)} of {len(self._hosts)} Redis Sentinels answer{self._reasons()}; wanted most of them")
        newest = _newest(said)
        if other := next((s.primary for s in newest if s.primary != here), None):
            raise StoreError(f"{_shown(here)} is not the primary any more; the Redis Sentinels name {_shown(other)}")
        if any(s.moving for s in newest):
            raise StoreError(f"a failover away from {_shown(here)} is under way")

    async def discover_master(self, service_name: str) -> Address:
        """Where a new connection goes: whoever is primary by the newest configuration that any Sentinel tells."""
        said = await self._asked()
        if not said:
            raise MasterNotFoundError(f"no Redis Sentinel names a primary for {service_name!r}{self._reasons()}")
        newest = _newest(said)
        if any(s.down for s in newest):
            raise MasterNotFoundError(f"the Redis Sentinels call the primary of {service_name!r} down, and no other yet")
        return newest[0].primary

    async def aclose(self) -> None:
        for task in self._late.values():
            task.cancel()
        await asyncio.gather(*self._late.values(), return_exceptions=True)
        await super().aclose()

    async def _asked(self) -> list[Says]:
        """What the Sentinels say now. Those that answered last time are waited for, the others only until most have answered."""
        for n, late in list(self._late.items()):
            if late.done():
                del self._late[n]
                if late.result():
                    self._mute.discard(n)
        asked = {n: asyncio.create_task(self._ask(n)) for n in range(len(self._hosts)) if n not in self._late}
        try:
            if prompt := [task for n, task in asked.items() if n not in self._mute]:
                await asyncio.wait(prompt, timeout=GRACE_S)
            waiting = {task for task in asked.values() if not task.done()}
            while waiting and len(_told(asked.values())) < self.most:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._late |= {n: task for n, task in asked.items() if not task.done()}
        self._mute = {n for n in range(len(self._hosts)) if n in self._late or not asked[n].result()}
        return _told(asked.values())

    async def _ask(self, n: int) -> Says | None:
        """None when this Sentinel does not answer, or not with what was asked; ``_why`` says so then."""
        try:
            async with asyncio.timeout(ANSWER_S):
                ask: Any = self.sentinels[n].execute_command
                told = await ask("SENTINEL", "MASTER", self._service)
                host, port = await ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
            state = dict(zip(told[::2], told[1::2], strict=True))
            flags = state[b"flags"].split(b",")
            primary = (host.decode(), int(port))
            promoted = primary != (state[b"ip"].decode(), int(state[b"port"]))  # it already names the one that it promoted
            failing = b"failover_in_progress" in flags
            down = b"o_down" in flags and not promoted
            return Says(primary, int(state[b"config-epoch"]), down, failing and not promoted)
        except TimeoutError:
            self._why[n] = "no answer"
        except (RedisError, OSError, KeyError, ValueError, TypeError, AttributeError) as error:
            self._why[n] = " ".join(str(error).split()) or type(error).__name__
        return None

    def _reasons(self) -> str:
        reasons = [f"{_shown(self._hosts[n])}: {self._why[n]}" for n in sorted(self._mute) if n in self._why]
        return f" ({'; '.join(reasons)})" if reasons else ""


def _told(tasks: Any) -> list[Says]:
    return [said for task in tasks if task.done() and not task.cancelled() and (said := task.result())]


def _newest(said: list[Says]) -> list[Says]:
    """Those with the newest configuration: a Sentinel hears of a failover up to two seconds after the one that led it."""
    newest = max(s.config_epoch for s in said)
    return [s for s in said if s.config_epoch == newest]


def _shown(address: Address) -> str:
    return f"{address[0]}:{address[1]}"

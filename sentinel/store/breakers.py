"""The shared breakers: one record per worker in the store, and one script that holds every question and every transition.

This module exists so that all gateways go by one truth. What always holds here:

* A transition is made by the server, under the record's version and the server's clock; outcomes of earlier versions are ignored.
* Never more than the policy's share of a pool is open, tested with the opening itself; past that the pool is marked as in panic.
* A half-open worker gets as many probes as the policy says, over all gateways together. Each is a lease: the probe of a holder
  that died is free again when its own lease ends, however often others ask meanwhile.
* What a person or the controller pinned holds until it expires, whatever is reported; a person's pin is not the controller's to
  change.

A worker without a record is closed, at version 0: so is every worker of a store that lost its data.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from sentinel.settings_gateway import BreakerSettings
from sentinel.store.errors import StoreError

if TYPE_CHECKING:
    from sentinel.store.client import Store

PINS_BY = "sentinel"  # the controller itself, as the script knows it
CHUNK = 250  # workers asked or told about in one question, at most: the server does nothing else meanwhile
LISTEN_S = 5.0  # after so long without a push, look whether this is still the server to listen to
State = Literal["closed", "open", "half_open"]
Outcome = Literal["fine", "failed", "neutral"]


class Standing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker's breaker at one moment. ``left``, ``pin_left``, ``panic_left``: milliseconds still to go; ``since`` and ``now``:
    milliseconds since the epoch by the server's clock. ``volume`` and ``failed`` are of the window, and only where evidence was
    asked for. ``hosts``, with spaces between: those that saw what opened it; of a closed one those that saw failures in the window,
    likewise."""

    worker: str
    pool: str
    state: State
    version: int
    left: float = 0.0
    trips: int = 0
    since: float = 0.0
    wins: int = 0
    why: str = ""
    pin: Literal["", "open", "closed"] = ""
    pin_left: float = 0.0
    pin_by: str = ""
    panic_left: float = 0.0
    now: float = 0.0
    volume: int = 0
    failed: int = 0
    hosts: str = ""


_DECODER = msgspec.json.Decoder(Standing, strict=False)  # Lua knows one kind of number


class BreakerRecords:
    """The records, under one policy. Every method raises StoreError when it could not be told what happened."""

    def __init__(self, store: Store, policy: BreakerSettings | None = None) -> None:
        self._door = store._door  # of this package
        self.policy = p = policy or BreakerSettings()
        self._channel = self._door.key("breakers")
        self._policy: list[str] = [
            f"{max(1, round(p.window))}", f"{p.min_requests}", f"{p.failure_rate:.6g}", f"{p.reporters}",
            f"{p.base_open * 1000:.0f}", f"{p.max_open * 1000:.0f}", f"{p.jitter:.6g}", f"{p.probes}",
            f"{p.probe_lease * 1000:.0f}", f"{p.max_share:.6g}",
        ]  # fmt: skip

    async def seen(self, reporter: str, fine: Sequence[tuple[str, int, int]]) -> dict[str, int]:
        """Tell of requests that ended well: (worker, version of its permits, how many). Returns the versions that stand."""
        keys = [self._channel, self._panic(""), *(self._record(worker) for worker, _, _ in fine)]
        args = [reporter, *(str(n) for _, version, count in fine for n in (version, count))]
        versions = await self._ask("seen", "", "", keys, args)
        return {worker: int(version) for (worker, _, _), version in zip(fine, versions, strict=True)}

    async def failed(
        self, worker: str, pool: str, others: Sequence[str], reporter: str, *, version: int, fine: int, failed: int, draw: float
    ) -> Standing:
        """Tell of failures, and of what ended well beside them; may open the breaker, or mark the pool. ``others``: the pool's
        other workers in rotation. ``reporter``: host/process. ``draw``: of [0, 1), for the jitter."""
        keys = [self._channel, self._panic(pool), self._record(worker), *map(self._record, others)]
        args = [reporter, f"{version}", f"{fine}", f"{failed}", f"{draw:.6f}"]
        return _standing(await self._ask("failed", worker, pool, keys, args))

    async def permit(self, worker: str, pool: str, probe: str) -> tuple[Standing, bool]:
        """Ask for a probe of a breaker that is half-open, or open and over its time; True: it is ours for the probe lease."""
        standing, given = await self._ask("permit", worker, pool, self._keys(worker, pool), [probe])
        return _standing(standing), bool(given)

    async def ended(self, worker: str, pool: str, probe: str, outcome: Outcome, draw: float) -> Standing:
        """How a probe ended; one whose lease is over says nothing any more, and twice is harmless."""
        return _standing(await self._ask("ended", worker, pool, self._keys(worker, pool), [probe, outcome, f"{draw:.6f}"]))

    async def renew(self, worker: str, pool: str, probes: Sequence[str]) -> int:
        """Extend the leases of these probes; returns how many of them were still held."""
        return int(await self._ask("renew", worker, pool, self._keys(worker, pool), list(probes)))

    async def pin(
        self, worker: str, pool: str, state: Literal["open", "closed", ""], *, lasts_s: float, by: str, why: str = ""
    ) -> Standing:
        """Hold it open or closed for ``lasts_s`` seconds whatever is reported; "" takes the pin away. ``by``: a person, or
        ``PINS_BY``, which changes no person's pin: what then stands is returned."""
        args = [state, f"{lasts_s * 1000:.0f}", by, why]
        return _standing(await self._ask("pin", worker, pool, self._keys(worker, pool), args, sure=True))

    async def listing(self, workers: Mapping[str, str], *, evidence: bool = False) -> list[Standing]:
        """What stands for each of ``workers`` (worker → pool), as of one moment, so ask about a fleet by the ``CHUNK``;
        ``panic_left`` above 0: its pool is in panic. Without evidence nothing more is told of one that is closed, and not pinned,
        than its version."""
        pools = sorted(set(workers.values()))
        keys = [self._channel, *map(self._panic, pools), *map(self._record, workers)]
        args = [f"{len(pools)}", f"{int(evidence)}", *pools, *(part for pair in workers.items() for part in pair)]
        now, lefts, bodies = await self._ask("list", "", "", keys, args)
        panic = dict(zip(pools, lefts, strict=True))
        return [
            Standing(worker=worker, pool=pool, state="closed", version=body, panic_left=panic[pool], now=now)
            if isinstance(body, int)
            else _standing(body)
            for (worker, pool), body in zip(workers.items(), bodies, strict=True)
        ]

    async def watch(self) -> AsyncIterator[Standing]:
        """Every transition from now on, as it is pushed; goes on after lost connections. What falls between is for ``listing``."""
        while True:
            try:
                async with self._door.subscribed(self._channel) as channel:
                    while True:
                        message = await channel.get_message(timeout=LISTEN_S)
                        if message is None:
                            await self._door.still(channel)
                            continue
                        try:
                            yield _DECODER.decode(message["data"])
                        except (msgspec.MsgspecError, UnicodeDecodeError):
                            continue  # anyone who may publish can push garbage; what counts is what is stored
            except StoreError:
                await asyncio.sleep(0.2)

    async def _ask(self, verb: str, worker: str, pool: str, keys: Sequence[str], args: Sequence[str], *, sure: bool = False) -> Any:
        """``sure``: must outlive a failover. What was seen is soon seen again, and a lost probe comes back by its lease."""
        return await self._door.run("breaker", keys, [verb, worker, pool, *self._policy, *args], sure=sure)

    def _keys(self, worker: str, pool: str) -> list[str]:
        return [self._channel, self._panic(pool), self._record(worker)]

    def _record(self, worker: str) -> str:
        return self._door.key(f"breaker:{worker}")

    def _panic(self, pool: str) -> str:
        return self._door.key(f"panic:{pool}")


def _standing(body: bytes) -> Standing:
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(f"the breaker's script answered {body[:80]!r}, which is no standing: {error}") from None

"""One worker's breaker as one gateway knows it: what the store said last, and what has ended here since it was told last.

This module exists so that the way of an ordinary request stands in one place and is short. What always holds: nothing here asks
anybody; times are of this gateway's own monotonic clock; what was decided while the store was away has a negative version, which
the store ignores.
"""

from __future__ import annotations

from collections.abc import Iterable

from sentinel.gateway.breaker_rules import Record, State
from sentinel.gateway.guards import Permit
from sentinel.settings_gateway import BreakerSettings


class Copy:
    """``shut``: it is anything but plainly closed, so the slow way must look; ``plain``: the permit while it is closed."""

    __slots__ = (
        "alone", "apart", "asking", "dry", "ends", "failed", "fine", "half", "pin", "pin_ends", "plain", "pool", "shut", "since",
        "state", "version", "worker",
    )  # fmt: skip

    def __init__(self, worker: str, pool: str, since: float = 0.0) -> None:
        """``since``: when this gateway began to keep it."""
        self.worker, self.pool, self.since = worker, pool, since
        self.apart = False  # it prefills for the pool's others, so its peers are those that do that, too
        self.state: State = "closed"
        self.version = 0
        self.half = 0  # the version of being half-open from which it closed; 0: another way
        self.ends = 0.0  # of being open
        self.pin, self.pin_ends = "", 0.0
        self.dry = 0.0  # until then no probe is to be had
        self.asking = 0  # probes that are asked for at the moment
        self.fine = self.failed = 0
        self.shut = False
        self.plain = Permit(worker=worker)
        self.alone: Record | None = None  # its own record, while the store is away

    def adopt(self, state: State, version: int, ends: float, pin: str, pin_ends: float) -> None:
        if version != self.version:
            self.plain = Permit(worker=self.worker, version=version)
            self.fine = self.failed = 0  # of a version that is over
            self.half = self.version if (self.state, state) == ("half_open", "closed") else 0
        self.state, self.version, self.ends, self.pin, self.pin_ends = state, version, ends, pin, pin_ends
        self.dry = 0.0
        self.shut = state != "closed" or bool(pin)

    def counts(self, version: int) -> bool:
        """Whether what was sent under ``version`` says something now: a stream that was a probe goes on when its breaker closes."""
        return version == self.version or (self.half != 0 and version == self.half)

    def pinned(self, now: float) -> bool:
        return bool(self.pin) and now < self.pin_ends

    def effective(self, now: float) -> str:
        return self.pin if self.pinned(now) else self.state

    def may_probe(self, now: float) -> bool:
        """Whether it is worth asking for a probe: half-open or over its time, and not known to have none."""
        return now >= self.ends and now >= self.dry and not self.pinned(now)

    def take(self) -> tuple[int, int]:
        """What is to be told: fine and failed ones; they are told once."""
        fine, failed, self.fine, self.failed = self.fine, self.failed, 0, 0
        return fine, failed

    def leave(self, policy: BreakerSettings, now: float, probes: Iterable[str]) -> None:
        """Go on alone from what was known. ``probes``: those that this gateway holds."""
        if self.alone is None:
            ms = milliseconds(now)
            self.alone = Record(
                policy, state=self.state, version=self.version, ends=milliseconds(max(now, self.ends)), since=ms,
                trips=int(self.state != "closed"), pin=self.pin, pin_ends=milliseconds(max(now, self.pin_ends)),
                permits=dict.fromkeys(probes, ms + milliseconds(policy.probe_lease)),
            )  # fmt: skip

    def follow(self, now: float, version: int) -> None:
        """Say what the own record says; ``version`` is negative, and used if that is news."""
        record = self.alone
        if record is not None and record.state != self.state:
            ends = now + (record.ends - milliseconds(now)) / 1000 if record.state == "open" else 0.0
            self.adopt(record.state, version, ends, self.pin, self.pin_ends)


class Panics:
    """Pools of which so many workers fail that all are tried: as the store marked them, or this gateway alone."""

    def __init__(self) -> None:
        self._ends: dict[str, tuple[float, float]] = {}  # pool → when it ends by our clock, when it was marked by the server's

    def mark(self, pool: str, now: float, left: float, at: float) -> bool:
        """``left``: seconds to go, 0 for none; ``at``: the server's time. An answer from before the mark does not take it away.
        True: this is news."""
        ends, marked = self._ends.get(pool, (0.0, 0.0))
        if left > 0:
            self._ends[pool] = (now + left, at)
            return ends <= now
        if at > marked:
            self._ends.pop(pool, None)
        return False

    def on(self, pool: str, now: float) -> bool:
        return pool in self._ends and now < self._ends[pool][0]

    def all(self, now: float) -> list[str]:
        return sorted(pool for pool in self._ends if self.on(pool, now))


def milliseconds(seconds: float) -> int:
    return round(seconds * 1000)

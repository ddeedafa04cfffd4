"""The rules of one breaker as plain Python: what ``store/lua/breaker.lua`` does, for a gateway that cannot reach the store.

This module exists so that a gateway alone goes by the same thresholds as all of them together, and so that the tests can hold the
script against something that is easily read. Pure: time is handed in, in milliseconds. What always holds: the same calls at the
same times leave a ``Record`` and the script's record in the same state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from sentinel.settings_gateway import BreakerSettings

State = Literal["closed", "open", "half_open"]
Heard = Literal["ignored", "counted", "panic", "opened"]


@dataclass
class Record:
    """One worker's breaker. ``reports``: reporter (host/process) → second → [fine, failed]; ``permits``: probe → lease's end."""

    policy: BreakerSettings
    state: State = "closed"
    version: int = 0
    ends: int = 0
    trips: int = 0
    since: int = 0
    wins: int = 0
    pin: str = ""
    pin_ends: int = 0
    reports: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    permits: dict[str, int] = field(default_factory=dict)
    swept: int = 0  # second in which the silent were dropped last, though nobody counted
    won: set[str] = field(default_factory=set)  # probes whose answers began well, and may still break

    def pinned(self, now: int) -> str:
        return self.pin if self.pin_ends > now else ""

    def out(self, now: int) -> bool:
        """Whether it gets no ordinary traffic."""
        pin = self.pinned(now)
        return pin == "open" or (not pin and self.state != "closed")

    def seen(self, now: int, reporter: str, version: int, fine: int) -> None:
        if self.state == "closed" and version == self.version:
            self._count(now, reporter, fine, 0)

    def failed(
        self, now: int, reporter: str, version: int, fine: int, failed: int, *, draw: float, others_out: int, total: int
    ) -> Heard:
        """``others_out``: of the pool's other workers, those that are out; ``total``: the pool's workers, this one included."""
        if self.state != "closed" or version != self.version:
            return "ignored"
        self._count(now, reporter, fine, failed)
        sick = self.sick(now)
        if self.pinned(now) or failed == 0 or not sick:
            return "counted"
        if others_out + 1 > self.policy.max_share * total or others_out + 1 >= total:
            return "panic"
        self._open(now, draw)
        return "opened"

    def sick(self, now: int) -> bool:
        """Whether volume, rate and number of hosts are enough to open it."""
        self.sweep(now)
        volume = failures = 0
        seen, sick = set(), set()
        for reporter, seconds in self.reports.items():
            host = reporter.rpartition("/")[0] or reporter
            for second, (fine, failed) in seconds.items():
                if self.lately(now, second):
                    volume, failures = volume + fine + failed, failures + failed
                    seen.add(host)
                    if failed:
                        sick.add(host)
        enough = volume >= self.policy.min_requests and failures >= self.policy.failure_rate * volume
        return enough and len(sick) >= min(self.policy.reporters, len(seen))

    def lately(self, now: int, second: int) -> bool:
        """Whether it is in the window. One to come, as after the clock was set back, is not, but for the next: clocks differ."""
        return now // 1000 - max(1, round(self.policy.window)) < second <= now // 1000 + 1

    def sweep(self, now: int) -> None:
        """Forget the reporters that saw nothing in the window: each boot of a gateway is one."""
        self.reports = {r: seen for r, seen in self.reports.items() if any(self.lately(now, second) for second in seen)}

    def permit(self, now: int, probe: str) -> bool:
        """A probe, if there is one; turns a breaker that is over its time half-open."""
        if self.pinned(now) or self.state == "closed" or (self.state == "open" and now < self.ends):
            return False
        if self.state == "open":
            self._turn(now, "half_open", 0)
        self.permits = {p: ends for p, ends in self.permits.items() if ends > now}
        if len(self.permits) + self.wins >= self.policy.probes:
            return False
        self.permits[probe] = now + round(self.policy.probe_lease * 1000)
        return True

    def ended(self, now: int, probe: str, outcome: Literal["fine", "failed", "neutral"], draw: float) -> None:
        held = self.permits.pop(probe, 0) > now
        if self.state != "half_open" or not (held or (outcome == "failed" and probe in self.won)):
            return
        if outcome == "failed":
            self._open(now, draw)
        elif outcome == "fine":
            self.wins += 1
            self.won.add(probe)
            if self.wins >= self.policy.probes:
                self._turn(now, "closed", 0)

    def renew(self, now: int, probes: list[str]) -> int:
        held = [p for p in probes if self.permits.get(p, 0) > now]
        self.permits.update(dict.fromkeys(held, now + round(self.policy.probe_lease * 1000)))
        return len(held)

    def hold(self, now: int, pin: str, lasts_ms: int) -> None:
        self.pin, self.pin_ends = pin, now + lasts_ms if pin else 0
        self.version = max(self.version + 1, now)

    def _count(self, now: int, reporter: str, fine: int, failed: int) -> None:
        second = now // 1000
        kept = {s: n for s, n in self.reports.get(reporter, {}).items() if self.lately(now, s)}
        was = kept.get(second, [0, 0])
        kept[second] = [was[0] + fine, was[1] + failed]
        self.reports[reporter] = kept
        if not self.lately(now, self.swept):
            self.swept = second
            self.sweep(now)

    def _open(self, now: int, draw: float) -> None:
        longest = round(self.policy.max_open * 1000)
        calm = self.state == "closed" and self.since > 0 and now - self.since > longest
        self.trips = 1 if calm else self.trips + 1
        lasts = min(longest, round(self.policy.base_open * 1000) * self.trips) * (1 + self.policy.jitter * draw)
        self._turn(now, "open", now + math.floor(lasts))

    def _turn(self, now: int, state: State, ends: int) -> None:
        self.state, self.version, self.ends, self.since, self.wins = state, max(self.version + 1, now), ends, now, 0
        self.reports, self.permits, self.won = {}, {}, set()

"""What NVML counts and what is read seldom: errors per NVLink, C2C links to the CPU, spare memory banks. Reading only.

This module exists because counters of single links cost a round trip each (about 1 ms, measured on an H200), and a GPU has 18
links. What always holds:

* A link is asked only when the GPU's own sum of that counter has moved, so values per link are as new as the sum, at the cost
  of the sum. Where the driver gives no sum (Hopper), links are asked every ``SELDOM_S`` seconds.
* Each counter carries ``at``, the time up to which its values hold; a counter that nobody answers is absent.
* Counters are only read. Clearing them would change what every other program on the node sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

SELDOM_S = 120.0
ALL_LINKS = 0xFFFFFFFF  # scope of NVLink5 counters that sums over the GPU (DCGM asks its link-less fields so)
C2C_MOST = 64  # a GB200 has 14 at most (nvml.h GPM metrics name links 0 to 13); the rest is room

# nvml.h NVML_FI_DEV_*; scope = link. NVLink5 only; the sums of the first group are read by probes.nvml at its own pace.
PER_LINK = {
    "malformed_packets": 206,
    "buffer_overruns": 207,
    "receive_errors": 208,
    "receive_remote_errors": 209,
    "receive_general_errors": 210,
    "local_integrity_errors": 211,
    "transmit_discards": 212,
    "recovery_successful": 213,
    "recovery_failed": 214,
    "symbol_errors": 221,
}
FEC_TAIL = {f"fec_{k}": 235 + k for k in range(8, 16)}  # codewords that took k corrected symbols
LEGACY = {"dl_replay": 161, "dl_recovery": 162, "dl_crc": 163}  # Hopper and older
# Nanoseconds for which the clocks were held down, since the driver was loaded, by cause. The second table is the older one: its
# thermal counter takes 4 to 7 ms (measured on an H200), so it is asked for only where a driver does not know the first.
SLOWDOWN_NS = {"sw_thermal": 269, "hw_thermal": 270, "power_brake": 271}
VIOLATION_NS = {"power": 74, "thermal": 75, "sync_boost": 76, "board_limit": 77, "reliability": 79}
C2C_COUNT = 170
C2C = {"status": 171, "mbps": 172, "crc": 231, "replays": 232, "replays_b2b": 233, "power": 234}  # scope = link
BANKS = {"active": 303, "inactive": 304, "max": 305, "none": 306, "pending": 307}  # Blackwell's bank remapper
ONCE_IN_A_WHILE = {"link_version": 166, "switch_links": 147}

Ask = Callable[[list[tuple[str, int, int]]], dict[tuple[str, int], Any]]  # (name, field, scope) → value by (name, scope)


class Counters:
    """Reads one GPU again and again through ``ask``, which answers a batch of field values and leaves out what it cannot."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._seldom_at = float("-inf")
        self._seldom: dict[str, Any] = {}
        self._tail: dict[str, Any] = {}
        self._links: dict[str, dict[str, Any]] = {}  # counter → {"at", "links"}
        self._sums: dict[str, Any] = {}  # counter → the sum at which its links were asked
        self._by_cause = False  # the driver knows SLOWDOWN_NS

    def read(self, links: int, totals: Mapping[str, Any] | None, now: float) -> dict[str, Any]:
        """``links``: how many NVLinks; ``totals``: the GPU's sums of ``PER_LINK``, just read; ``now``: seconds."""
        due = not 0 <= now - self._seldom_at < SELDOM_S
        if due:
            self._seldom_at = now
            self._read_seldom(links)
        if links:
            self._read_links(links, {**(totals or {}), **self._tail}, now, due)
        return {**self._seldom, "link_counters": dict(self._links) or None, "fec_tail": self._tail or None,
                "seldom_at": self._seldom_at}  # fmt: skip

    def slowed(self, values: Mapping[tuple[str, int], Any]) -> dict[str, Any]:
        """Time spent slowed by the one source that this driver has; ``values``: what it answered to ``SLOWDOWN_NS``."""
        causes = {name: values[name, 0] for name in SLOWDOWN_NS if (name, 0) in values}
        self._by_cause = self._by_cause or bool(causes)
        got = {} if self._by_cause else self._ask([(name, field, 0) for name, field in VIOLATION_NS.items()])
        return {"slowdown_ns": causes or None, "violation_ns": {name: value for (name, _), value in got.items()} or None}

    def _read_seldom(self, links: int) -> None:
        wanted = [(name, field, 0) for name, field in (BANKS | {"c2c_count": C2C_COUNT}).items()]
        if links:
            wanted += [(name, field, 0) for name, field in ONCE_IN_A_WHILE.items()]
            wanted += [(name, field, ALL_LINKS) for name, field in FEC_TAIL.items()]
        got = self._ask(wanted)
        count = got.get(("c2c_count", 0))
        banks = {name: got[name, 0] for name in BANKS if (name, 0) in got}
        self._tail = {name: got[name, ALL_LINKS] for name in FEC_TAIL if (name, ALL_LINKS) in got}
        self._seldom = {
            **{name: got.get((name, 0)) for name in ONCE_IN_A_WHILE},
            "banks": banks or None,
            "c2c": None if count is None else {"count": int(count), **self._read_c2c(int(count))},
        }

    def _read_c2c(self, count: int) -> dict[str, list[Any]]:
        links = range(min(max(count, 0), C2C_MOST))
        got = self._ask([(name, field, link) for name, field in C2C.items() for link in links]) if links else {}
        lists = {name: [got.get((name, link)) for link in links] for name in C2C}
        return {name: values for name, values in lists.items() if any(v is not None for v in values)}

    def _read_links(self, links: int, sums: Mapping[str, Any], now: float, due: bool) -> None:
        every = PER_LINK | FEC_TAIL | LEGACY
        moved = {n for n in every if n in sums and (n not in self._links or sums[n] != self._sums.get(n))}
        moved |= {n for n in every if due and n not in sums}  # nobody says whether these have moved
        got = self._ask([(n, every[n], link) for n in sorted(moved) for link in range(links)]) if moved else {}
        for name in every:
            if name in moved:
                values = [got.get((name, link)) for link in range(links)]
                if all(v is None for v in values):
                    self._links.pop(name, None)
                    continue
                self._links[name] = {"at": now, "links": values}
                self._sums[name] = sums.get(name)
            elif name in self._links and name in sums:
                current = now if name in PER_LINK else self._seldom_at
                self._links[name] = {"at": current, "links": self._links[name]["links"]}

"""The InfiniBand and RoCE ports of this node: read from sysfs the way node_exporter does, judged by ``infiniband_findings``.

This module exists because a rail that is down, slow or flapping looks to an engine like a slow peer. What always holds:

* Only files below ``context.sys`` and ``context.proc`` are read; no tool is run and nothing is written.
* A file that is missing or refuses (``EINVAL``, no permission, "N/A (no PMA)") is ``None``: not measured, never zero.
* Some functions may not read their counters (firmware restricts them on GB200): the kernel then logs a failed ACCESS_REG at
  every look (node_exporter#3434). Such a device is named in the reading and its counters are left alone for an hour.
* A read of an adapter whose firmware hangs may never come back: each adapter is looked at in a thread of its own, at most one
  at a time; one past its deadline is ``{"name": …, "hung_s": …}`` and nothing else, and the others are still read.

``Reading.data``: ``devices`` [{name, pci, fw, board, hca, guid, virtual, ignored, netdevs {name: {up, carrier, downs}},
temperatures {label: {c, most_c}}, restricted, ports [{port, state, phys, rate_gbps, rate, layer, lid, sm_lid, counters {},
hw {}}]}], ``present`` (the class exists here), ``default_route`` [interfaces].
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from probes import Context, ProbeError
from probes.infiniband_findings import judge
from probes.infiniband_policy import WATCHED, WATCHED_HW
from probes.infiniband_usual import judge_usual
from probes.pci import address_of, number, number_of, text_of
from sentinel.model import READING_FORMAT, Finding, Reading

OPTIONS = frozenset({"enabled", "interval", "ignore"})
DEADLINE_S = 5.0  # for one adapter; a healthy one answers within milliseconds
RESTRICTED_AGAIN_S = 3600.0  # how long a device that refuses its counters is not asked for them again (judgement)
MOST_DEVICES, MOST_PORTS = 64, 8


class InfinibandProbe:
    """Option ``ignore``: names or PCI addresses of adapters that are somebody else's (storage, management)."""

    name = "infiniband"
    interval_s = 10.0  # an outage counts after 30 s; flaps in between show in link_downed

    def __init__(self, context: Context, *, clock: Callable[[], float] = time.time, deadline_s: float = DEADLINE_S) -> None:
        unknown = sorted(set(context.options) - OPTIONS)
        if unknown:
            raise ProbeError(f"unknown option {unknown[0]!r}; the infiniband probe knows {', '.join(sorted(OPTIONS))}")
        ignore = context.options.get("ignore", [])
        if not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
            raise ProbeError(f"ignore: wanted a list of adapters' names or PCI addresses, got {ignore!r}")
        self._context, self._clock, self._deadline_s = context, clock, deadline_s
        self._ignore = frozenset(ignore)
        self._looks: dict[str, _Look] = {}
        self._refused: dict[str, float] = {}  # device → monotonic time until which its counters are left alone

    async def read(self) -> Reading:
        """Look once. Never raises for a missing or broken tree: what is not there is not in the reading."""
        root = self._context.sys / "class/infiniband"
        names = sorted(_names(root))[:MOST_DEVICES]
        for gone in set(self._looks) - set(names):
            del self._looks[gone]
        looks = {name: self._look(root / name) for name in names}
        until = time.monotonic() + self._deadline_s
        while time.monotonic() < until and not all(look.done.is_set() for look in looks.values()):  # noqa: ASYNC110  (threads)
            await asyncio.sleep(0.002)
        devices = [self._taken(name, look) for name, look in looks.items()]
        proc = self._context.proc
        return Reading(
            probe=self.name, node=self._context.node, at=self._clock(),
            boot_id=text_of(proc / "sys/kernel/random/boot_id") or "",
            data={"devices": devices, "present": root.is_dir(), "default_route": sorted(self._default_route())},
        )

    def _look(self, device: Path) -> _Look:
        """The look under way at this device, or a new one."""
        look = self._looks.get(device.name)
        if look is None:
            counters = self._refused.get(device.name, 0.0) <= time.monotonic()
            look = self._looks[device.name] = _Look(lambda: read_device(device, counters=counters))
        return look

    def _taken(self, name: str, look: _Look) -> dict[str, Any]:
        if not look.done.is_set():
            return {"name": name, "hung_s": round(time.monotonic() - look.since, 3)}
        del self._looks[name]
        found = look.found or {"name": name, "pci": None, "failed": True}
        if found.pop("refused", False):
            self._refused[name] = time.monotonic() + RESTRICTED_AGAIN_S
        found["restricted"] = self._refused.get(name, 0.0) > time.monotonic()
        found["ignored"] = bool(self._ignore & {name, found["pci"]})
        return found

    def _default_route(self) -> set[str]:
        """Interfaces that the default route leaves by, and those below them (bond, bridge, VLAN)."""
        lines = (text_of(self._context.proc / "net/route") or "").splitlines()[1:]
        routes = {f[0] for f in map(str.split, lines) if len(f) > 7 and f[1] == "00000000" and f[7] == "00000000"}
        below = {n[6:] for r in routes for n in _names(self._context.sys / "class/net" / r) if n.startswith("lower_")}
        return routes | below

    def assess(self, reading: Reading, memory: dict[str, Any], expected: Mapping[str, Any]) -> list[Finding]:
        """Judge one reading. ``expected``: ``ib_ports`` (how many are active), ``ib_gbps`` (of each), ``ib_devices``
        (names or PCI addresses of the rails), where known; under ``hints`` the ``ib_gbps`` that is usual for this kind of node.
        Raises ProbeError for an expectation of the wrong kind."""
        return assess(reading, memory, expected)

    def describe(self, reading: Reading) -> list[str]:
        """The reading in words, one line for each port."""
        words = [line for device in reading.data.get("devices", ()) for line in _words(device)]
        return words or ["no InfiniBand or RoCE adapter here: not measured"]

    def commit(self, reading: Reading) -> None:
        """Nothing is consumed by looking."""

    async def close(self) -> None:
        """A look that hangs is a daemon thread and ends with the process."""


def assess(reading: Reading, memory: dict[str, Any], expected: Mapping[str, Any] | None = None) -> list[Finding]:
    """The probe's judgement, also of what was pasted."""
    if reading.format != READING_FORMAT:
        raise ProbeError(f"an infiniband reading of format {reading.format}; this sentinel knows format {READING_FORMAT}")
    return judge(reading, memory, expected or {}) + judge_usual(reading, memory, expected or {})


class _Look:
    """One device being read in a daemon thread, because a read may never come back."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self.since = time.monotonic()
        self.done = threading.Event()
        self.found: dict[str, Any] = {}
        self._read = read
        threading.Thread(target=self._run, name="infiniband look", daemon=True).start()

    def _run(self) -> None:
        try:
            self.found = self._read()
        finally:
            self.done.set()


# -- sysfs --------------------------------------------------------------------------------------------------------------------


def read_device(device: Path, *, counters: bool = True) -> dict[str, Any]:
    """One adapter below ``class/infiniband``. ``refused`` in the answer: it has counters and none of them may be read."""
    function = device / "device"
    found: dict[str, Any] = {
        "name": device.name, "pci": address_of(function) if function.exists() else None,
        "fw": text_of(device / "fw_ver"), "board": text_of(device / "board_id"), "hca": text_of(device / "hca_type"),
        "guid": text_of(device / "node_guid"), "virtual": (function / "physfn").exists(),
        "netdevs": {name: _netdev(function / "net" / name) for name in sorted(_names(function / "net"))[:MOST_PORTS]},
        "temperatures": dict(_temperatures(function / "hwmon")),
    }
    numbers = sorted(n for n in map(number, _names(device / "ports")) if n is not None)[:MOST_PORTS]
    found["ports"] = [_port(device / "ports" / str(n), n, counters) for n in numbers]
    asked = [p["counters"] for p in found["ports"] if p["counters"]]
    found["refused"] = counters and bool(asked) and all(value is None for c in asked for value in c.values())
    return found


def _port(port: Path, n: int, counters: bool) -> dict[str, Any]:
    rate = text_of(port / "rate")
    return {
        "port": n, "state": _leading(text_of(port / "state")), "phys": _leading(text_of(port / "phys_state")),
        "rate": rate, "rate_gbps": rate_gbps(rate), "layer": text_of(port / "link_layer"),
        "lid": number_of(port / "lid", 0), "sm_lid": number_of(port / "sm_lid", 0),
        "counters": _counters(port / "counters", WATCHED) if counters else {},
        "hw": _counters(port / "hw_counters", WATCHED_HW) if counters else {},
    }


def _counters(folder: Path, watched: Mapping[str, Any]) -> dict[str, int | None]:
    """The watched counters that exist; None for one that cannot be read or holds no number."""
    there = set(_names(folder))
    return {name: number_of(folder / name) for name in watched if name in there}


def _netdev(net: Path) -> dict[str, Any]:
    flags, carrier = number_of(net / "flags", 16), number_of(net / "carrier")
    return {
        "up": None if flags is None else bool(flags & 1),  # IFF_UP: somebody wants it
        "carrier": None if carrier is None else bool(carrier),  # unreadable (EINVAL) while it is not up
        "downs": number_of(net / "carrier_down_count"),
    }


def _temperatures(hwmon: Path) -> Iterator[tuple[str, dict[str, float | None]]]:
    """Sensors of the adapter and of its modules (mlx5 hwmon, Linux 6.7): label → degrees Celsius and the firmware's limit."""
    for chip in sorted(_names(hwmon)):
        for name in sorted(_names(hwmon / chip)):
            if name.startswith("temp") and name.endswith("_input"):
                value, most = number_of(hwmon / chip / name), number_of(hwmon / chip / name.replace("_input", "_crit"))
                label = text_of(hwmon / chip / name.replace("_input", "_label")) or name[:-6]
                yield label, {"c": None if value is None else value / 1000, "most_c": None if most is None else most / 1000}


def rate_gbps(text: str | None) -> float | None:
    """``400 Gb/sec (4X NDR)`` → 400.0."""
    try:
        value = float((text or "").split()[0][:16])
    except (ValueError, IndexError):
        return None
    return value if 0 < value < 1e6 else None


def _leading(text: str | None) -> int | None:
    """``4: ACTIVE`` → 4."""
    return number((text or "").partition(":")[0])


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []


def _words(device: Mapping[str, Any]) -> Iterator[str]:
    name = f"{device.get('name')}" + (f" ({device['pci']})" if device.get("pci") else "")
    if "hung_s" in device:
        yield f"{name}: no answer for {device['hung_s']:.0f} s"
        return
    hot = max((t["c"] for t in device.get("temperatures", {}).values() if t.get("c") is not None), default=None)
    for p in device.get("ports", ()):
        state = {1: "down", 2: "initialising", 3: "armed", 4: "active", 5: "deferred"}.get(p.get("state"), "not measured")
        left = [w for w in ("virtual", "ignored", "restricted") if device.get(w)]
        yield (f"{name} port {p.get('port')}: {p.get('layer') or '?'} {state}, {p.get('rate') or '?'}, "
               f"{'?' if hot is None else f'{hot:.0f}'}°C{''.join(f', {w}' for w in left)}")

"""What tools and the kernel print about network adapters, pasted, back into the readings of the probe ``infiniband``.

This module exists so that a person who pastes ``ibstat``, ``ibstatus``, ``ibv_devinfo``, ``perfquery``, ``mlxlink``, ``rdma link``,
``ibdev2netdev`` or mlx5's link lines gets the judgement that a live port gets. What always holds:

* A block counts only where its own head stands at a line's beginning (or behind the host's name, as pdsh puts it): what
  another program quotes is not judged. Text of any kind is read without an exception, with bounded work for each line.
* A paste has no past: its readings say ``alone``. The same block pasted twice is two readings, so that counters have a rise;
  mlx5's link lines are a port's history and become one reading each.
* mlx5's health lines that lost their ``mlx5_core`` on the way are given it back and judged as kernel lines.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Any

from probes import infiniband, kernel_episodes
from probes.nic_blocks import HEADS, Blocks
from probes.pasted import is_prefix
from probes.pasted_prefix import KERNEL, origin
from sentinel.model import Finding, Reading

LINE_CHARS = 1024
MOST_EVENTS = 2000  # link lines judged; the latest count

_LINK = re.compile(
    r"mlx5_core (?P<pci>[0-9a-fA-F:.]{7,16}) (?P<dev>[\w.-]{1,32}): "
    r"(?:Port: (?P<port>\d{1,3}) Link (?P<ib>DOWN|INIT|ARMED|ACTIVE)|Link (?P<eth>up|down)\s*$)"
)
_REFUSED = re.compile(r"mlx5_core (?P<pci>[0-9a-fA-F:.]{7,16}): [^\n]{0,80}ACCESS_REG\(0x805\)[^\n]{0,40}failed")
_EMPTY = re.compile(r"mlx5_core (?P<pci>[0-9a-fA-F:.]{7,16}): [^\n]{0,80}Port module event[^\n]{0,24}, Cable unplugged")
_TRIMMED = re.compile(
    r"^[\s\d:.,/TZ\[\]+-]{0,64}"
    r"(?P<body>(?:poll_health|print_health_info|mlx5_health_\w{1,40})(?::\d{1,6})?(?::?\(pid \d{1,9}\))?: .*"
    r"|Health issue observed, .*)"
)
_KERNEL_TIME = re.compile(r"\[ *(\d{1,12}\.\d{1,9})\]")
_CLOCK = re.compile(r"(?<!\d)(\d\d):(\d\d):(\d\d)(?:\.\d+)?(?!\d)")
_STATES = {"DOWN": (1, None), "INIT": (2, 5), "ARMED": (3, 5), "ACTIVE": (4, 5), "down": (1, 2), "up": (4, 5)}


def parse(text: str, node: str) -> Iterator[Reading]:
    """Readings of the probes ``infiniband`` and, for trimmed health lines, ``kernel_log``; none where the text has none."""
    lines = text.count("\n") + (not text.endswith("\n") and bool(text))
    if any(head in text for head in HEADS):
        blocks = Blocks()
        for line in _lines(text):
            blocks.line(line)
        for host, devices in blocks.snapshots():
            yield _reading(host or node, devices, lines, alone=True)
    yield from _history(text, node, lines)
    refused = {m["pci"] for line, m in _found(text, "ACCESS_REG(0x805)", _REFUSED) if is_prefix(line[: m.start()])}
    if refused:
        named: list[dict[str, Any]] = [{"name": pci, "pci": pci, "restricted": True, "ports": []} for pci in sorted(refused)[:64]]
        yield _reading(node, named, lines, alone=True)
    empty = {m["pci"] for line, m in _found(text, "Cable unplugged", _EMPTY) if is_prefix(line[: m.start()])}
    if empty:
        caged: list[dict[str, Any]] = [{"name": pci, "pci": pci, "cage_empty": True, "ports": []} for pci in sorted(empty)[:64]]
        yield _reading(node, caged, lines, alone=True)
    yield from _health(text, node)


def judge(reading: Reading, memory: dict[str, Any]) -> list[Finding]:
    """What is there, as the probe itself judges it; of a port's history only how it ends."""
    if reading.probe == "kernel_log":
        return kernel_episodes.assess(reading, memory.setdefault("kernel", {}))
    # A port's history is its own: another port's lines say nothing about it, nor do blocks of tools.
    of = "" if reading.data.get("alone") else reading.data["devices"][0]["name"]
    found = infiniband.assess(reading, memory.setdefault(f"history of {of}" if of else "alone", {}))
    return [] if reading.data.get("more") else [f for f in found if f.present]


def _lines(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        yield text[at: min(end, at + LINE_CHARS)].rstrip("\r")
        at = end + 1


def _found(text: str, mark: str, pattern: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
    """Lines that hold the mark and fit the pattern, found by searching the text as a whole."""
    at = text.find(mark)
    while at >= 0:
        start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
        line = text[start: min(len(text) if end < 0 else end, start + LINE_CHARS)].rstrip("\r")
        if (match := pattern.search(line)) is not None:
            yield line, match
        at = -1 if end < 0 else text.find(mark, end)


def _reading(node: str, devices: list[dict[str, Any]], lines: int, *, at: float = 0.0, **data: Any) -> Reading:
    return Reading(
        probe="infiniband", node=node, at=at, boot_id="pasted",
        data={"devices": devices, "present": True, "default_route": [], "lines": lines, "skipped": {}, **data},
    )


def _history(text: str, node: str, lines: int) -> Iterator[Reading]:
    """mlx5's link lines as readings of their port in order: a link that goes down after it was active counts in link_downed."""
    prefixes = ((line[: m.start()], m) for line, m in _found(text, "mlx5_core", _LINK))
    found = ((prefix, whose.host, m) for prefix, m in prefixes if (whose := origin(prefix)).author == KERNEL)
    ports: dict[tuple[str, str, int], dict[str, Any]] = {}
    last = 0.0
    for prefix, host, m in deque(found, maxlen=MOST_EVENTS):
        state, phys = _STATES[m["ib"] or m["eth"]]
        key = (host or node, m["dev"], int(m["port"] or 1))
        before = ports.get(key, {"state": 0, "downs": 0})
        last = max(last, _seconds(prefix))
        downs = before["downs"] + (state == 1 and before["state"] == 4)
        port = {"port": key[2], "layer": "InfiniBand" if m["ib"] else "Ethernet", "state": state, "phys": phys, "downs": downs}
        device = {"name": key[1], "pci": m["pci"], "ports": [{**port, "counters": {"link_downed": downs}}]}
        ports[key] = {**port, "device": device}
        yield _reading(key[0], [device], lines, at=last, more=True)
    for (host, _, _), port in ports.items():  # what holds at the end holds at a second look, too
        yield _reading(host, [port["device"]], lines, at=last, more=False)


def _seconds(prefix: str) -> float:
    """The time before a line, seconds since boot or midnight; 0.0 where none is printed."""
    if (match := _KERNEL_TIME.search(prefix)) is not None:
        return float(match[1])
    if (match := _CLOCK.search(prefix)) is not None:
        return int(match[1]) * 3600.0 + int(match[2]) * 60 + int(match[3])
    return 0.0


def _health(text: str, node: str) -> Iterator[Reading]:
    records: list[list[Any]] = []
    for mark in ("_health", "print_health_info", "Health issue observed"):
        for _, match in _found(text, mark, _TRIMMED):
            body = match["body"][:512]
            if "mlx5_core" not in body and all(r[3] != f"mlx5_core ?: {body}" for r in records[-64:]):
                records.append([4, len(records) + 1, 0, f"mlx5_core ?: {body}"])
            if len(records) >= MOST_EVENTS:
                break
    if records:
        data = {
            "records": records, "repeats": {}, "lines": 0, "skipped": {}, "lost": 0, "overruns": 0, "last_seq": None,
            "booted_at": None, "history_usec": None, "more": False,
        }
        yield Reading(probe="kernel_log", node=node, at=0.0, boot_id="pasted", data=data)

"""What a simulated tray's hardware, engines and IMEX daemons read when they are well, and the little state that they have.

This module exists so that the shapes of readings stand in one place, made by the fakes' and the tools' own readers where those
exist. What always holds: a reading made here is a healthy one but for the values that the caller says differ.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from probes.imex_text import parse
from probes.nvml import IndexReader
from sentinel.testing.decisions import PCIS
from sentinel.testing.nvml import FakeNvml
from sentinel.testing.nvml_kinds import gb200
from sentinel.testing.nvml_state import FakeState

RAILS = ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3")
NICS = ("0000:03:00.0", "0002:03:00.0", "0010:03:00.0", "0012:03:00.0")  # their PCI addresses
Values = dict[str, Any]


@dataclass
class Process:
    """One serving group's engine, as its first node's worker probe sees it. ``running``: requests in flight."""

    worker: str
    up: bool = True
    frozen: bool = False
    running: int = 8
    pid: int = 1000
    began: float = 0.0
    halted: float = 0.0  # when it froze or ended

    def start(self, now: float) -> None:
        self.up, self.frozen, self.pid, self.began = True, False, self.pid + 1, now

    def look(self, now: float) -> Values:
        """What the worker probe reads of it; a frozen engine answers /health and makes no step (vllm#36451)."""
        seen: Values = {"label": self.worker, "worker": self.worker, "engine": "vllm", "url": f"http://{self.worker}", "mono": now,
                        "pid": self.pid, "started": self.pid, "alive": self.up}  # fmt: skip
        if not self.up:
            refused = {"how": "refused", "status": None, "seconds": 0.0, "why": "refused"}
            return seen | {"health": refused, "healthy": None, "ranks": {}}
        steps = int(50 * ((self.halted if self.frozen else now) - self.began)) if self.running else 0
        return seen | {
            "health": {"how": "answered", "status": 200, "seconds": 0.002, "why": ""}, "healthy": True, "running": self.running,
            "waiting": 0, "progress": float(steps), "ranks": {"": {"running": self.running, "moving": [steps]}},
        }  # fmt: skip


class ImexDomain:
    """What the IMEX daemons of one rack say of each other, as ``nvidia-imex-ctl -N -j`` prints it."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self.lost: set[str] = set()  # whom its peers have lost
        self._said: dict[frozenset[str], Values] = {}

    def join(self, node: str, address: str) -> None:
        self.addresses[node] = address

    def seen_by(self, node: str) -> Values:
        """The reading of one member; a lost one has no daemon that answers."""
        if node in self.lost:
            return {"tool": "/usr/bin/nvidia-imex-ctl", "answered": False, "why": "no daemon answers", "own": None}
        key = frozenset(self.lost)
        if key not in self._said:
            self._said[key] = parse(self.printed())[0]
        own = str(list(self.addresses).index(node))
        return {"tool": "/usr/bin/nvidia-imex-ctl", "answered": True, **self._said[key], "own": own}

    def printed(self) -> str:
        """The tool's JSON, as every member prints it."""
        def row(of: str) -> Values:
            return {str(n): {"host": a, "status": "INVALID" if other in self.lost or of in self.lost else "CONNECTED"}
                    for n, (other, a) in enumerate(self.addresses.items())}  # fmt: skip

        nodes = {
            str(n): {"status": "UNAVAILABLE" if name in self.lost else "READY", "host": address, "hostName": name,
                     "version": "580.159.04", "connections": row(name)}
            for n, (name, address) in enumerate(self.addresses.items())
        }  # fmt: skip
        return json.dumps({"nodes": nodes, "timestamp": "0", "status": "DEGRADED" if self.lost else "UP"})


@functools.cache
def _template(index: int) -> Values:
    reader = IndexReader(FakeNvml(FakeState(gpus=[gb200(PCIS[index], index + 1)])), 0)
    return reader.read(0.0)


@functools.lru_cache(maxsize=4096)
def healthy_gpu(index: int, rack: str, tray: int) -> Values:
    """A healthy GB200's reading, as the fake driver's own reader makes it, with this place's identity."""
    name = hashlib.sha256(f"{rack}/{tray}/{index}".encode()).hexdigest()
    return {
        **_template(index), "index": index, "uuid": f"GPU-{name[:8]}-{name[8:12]}-4{name[13:16]}-8{name[17:20]}-{name[20:32]}",
        "fabric_cluster": hashlib.sha256(f"{rack}/nvlink".encode()).hexdigest()[:32], "utilization_percent": 90,
        "platform": {"chassis": f"SIM{name_of(rack)}", "slot": 10 + tray, "tray": tray, "host": 1, "module": index + 1},
    }  # fmt: skip


def name_of(rack: str) -> str:
    return hashlib.sha256(rack.encode()).hexdigest()[:10].upper()


def network_adapter(name: str, pci: str, differs: Mapping[str, Any]) -> Values:
    counters = {"symbol_error": 0, "link_error_recovery": 0, "link_downed": 0, "port_rcv_errors": 0, "port_xmit_discards": 0,
                "local_link_integrity_errors": 0, "excessive_buffer_overrun_errors": 0, "port_xmit_wait": 0}  # fmt: skip
    port = {"port": 1, "state": 4, "phys": 5, "rate": "400 Gb/sec (4X NDR)", "rate_gbps": 400.0, "layer": "InfiniBand", "lid": 12,
            "sm_lid": 1, "hw": {}}  # fmt: skip
    mine = {k: v for k, v in differs.items() if k in port}
    return {
        "name": name, "pci": pci, "fw": "28.41.1000", "board": "MT_0000000838", "hca": "MT4129", "guid": "0", "virtual": False,
        "ignored": False, "restricted": False, "netdevs": {}, "temperatures": {},
        "ports": [{**port, "counters": {k: differs.get(k, v) for k, v in counters.items()}, **mine}],
    }  # fmt: skip

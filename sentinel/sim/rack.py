"""The simulated GB200 NVL72 rack: its shape, what serves where, and the state of each GPU.

This module exists so that the demo, the tests and the benchmarks mean the same rack. What always holds:

* 18 trays of 4 GPUs, named t01 … t18, with the PCI addresses of a GB200 tray; every GPU belongs to exactly one worker.
* A serving group lives and dies together: a DEP8 prefill group holds the eight GPUs of two trays, a TP4 decoder one tray.
* State is only what differs from a healthy rack, so that mending something is forgetting it.
* Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sentinel.model import Role, gpu_component, pci_address

DOMAIN = "rack-1"
MODEL = "sim-moe"
DRIVER = "580.159.04"
NODES = tuple(f"t{n:02}" for n in range(1, 19))
GPUS = ("0008:01:00.0", "0009:01:00.0", "0018:01:00.0", "0019:01:00.0")
MAIN, OVERFLOW = "main", "overflow"


@dataclass(frozen=True)
class Place:
    """One worker of the rack. ``ranks``: data-parallel engines (8 in a DEP8 group, 1 in a TP4 decoder)."""

    name: str
    pool: str
    role: Role
    nodes: tuple[str, ...]
    standby: bool = False

    @property
    def ranks(self) -> int:
        return 4 * len(self.nodes) if self.role is Role.PREFILL else 1

    @property
    def capacity(self) -> float:
        """Sessions it is worth (one prefill group serves about four decoders: the 1:4 ratio of such fleets)."""
        return 12.0 if self.role is Role.PREFILL else 3.0

    @property
    def gpus(self) -> tuple[str, ...]:
        """Written components of its GPUs."""
        return tuple(str(gpu_component(node, pci)) for node in self.nodes for pci in GPUS)


def _places() -> tuple[Place, ...]:
    places = [Place(f"prefill-{n}", MAIN, Role.PREFILL, (f"t{2 * n - 1:02}", f"t{2 * n:02}")) for n in (1, 2)]
    places += [Place(f"decode-{n:02}", MAIN, Role.DECODE, (f"t{n + 4:02}",)) for n in range(1, 9)]
    places += [Place("spare-prefill-1", OVERFLOW, Role.PREFILL, ("t13", "t14"))]
    places += [Place(f"spare-decode-{n}", OVERFLOW, Role.DECODE, (f"t{n + 14:02}",), standby=n > 2) for n in range(1, 5)]
    return tuple(places)


PLACES = {p.name: p for p in _places()}


def workers_on(node: str) -> tuple[str, ...]:
    return tuple(p.name for p in PLACES.values() if node in p.nodes)


class NoSuchGpu(ValueError):
    """The rack has no such node or GPU; the sentence says which names it has."""


@dataclass
class Rack:
    """What is wrong, and where. Written by faults and repairs, read by the simulated driver."""

    gpus: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  # (node, PCI) → fields that differ
    drivers: dict[str, dict[str, Any]] = field(default_factory=dict)  # node → fields of the whole answer that differ

    def set_gpu(self, node: str, pci: str, values: Mapping[str, Any]) -> None:
        """Let fields of one GPU's reading differ. Raises NoSuchGpu."""
        self.gpus.setdefault(self.key(node, pci), {}).update(values)

    def set_driver(self, node: str, values: Mapping[str, Any]) -> None:
        self.key(node, GPUS[0])
        self.drivers.setdefault(node, {}).update(values)

    def mend_gpu(self, node: str, pci: str) -> None:
        self.gpus.pop(self.key(node, pci), None)

    def mend_node(self, node: str) -> None:
        """What a reboot does: every GPU of the tray comes back healthy, and so does the driver."""
        for pci in GPUS:
            self.mend_gpu(node, pci)
        self.drivers.pop(node, None)

    def lost(self, node: str, pci: str) -> bool:
        return bool(self.gpus.get(self.key(node, pci), {}).get("lost"))

    @staticmethod
    def key(node: str, pci: str) -> tuple[str, str]:
        try:
            pci = pci_address(pci)
        except ValueError as error:
            raise NoSuchGpu(str(error)) from None
        if node not in NODES or pci not in GPUS:
            has = f"{NODES[0]}…{NODES[-1]}, each with {', '.join(GPUS)}"
            raise NoSuchGpu(f"the simulated rack has no GPU {node}/{pci}; it has {has}")
        return node, pci

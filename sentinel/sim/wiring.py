"""How a simulated fleet is wired and what serves where: racks of eighteen trays, rails and leaf switches, serving groups, pools.

This module exists so that every simulated fleet is the same kind of fleet, however large. What always holds:

* A rack ``r1`` has trays ``r1t01`` … ``r1t18`` of four GPUs, is one NVLink domain and one IMEX domain, and rail N of all its trays
  ends at leaf switch ``r1-leafN``.
* Twelve trays serve in ``main``: two DEP8 prefill groups over two trays each, and a TP4 decoder on each of eight trays (1:4). The
  other six are its overflow pool: a prefill group, two decoders, and two decoders that stand by.
"""

from __future__ import annotations

from typing import Any

from sentinel.model import Fleet, NodePlace, Pool, Role, Worker, gpu_component
from sentinel.sim.readings import RAILS
from sentinel.testing.decisions import PCIS

TRAYS = 18
MAIN, OVERFLOW = "main", "overflow"


def nodes_of(rack: str, trays: int = TRAYS) -> tuple[str, ...]:
    return tuple(f"{rack}t{n:02}" for n in range(1, trays + 1))


def rack_name(number: int) -> str:
    """From 1."""
    return f"r{number}"


def groups(rack: str) -> list[tuple[str, str, Role, tuple[str, ...], bool]]:
    """Name, pool, role, nodes, standby of every serving group of one rack."""
    t = nodes_of(rack)
    found = [(f"{rack}-prefill-{n}", MAIN, Role.PREFILL, t[2 * n - 2 : 2 * n], False) for n in (1, 2)]
    found += [(f"{rack}-decode-{n}", MAIN, Role.DECODE, t[n + 3 : n + 4], False) for n in range(1, 9)]
    found += [(f"{rack}-spare-prefill", OVERFLOW, Role.PREFILL, t[12:14], False)]
    found += [(f"{rack}-spare-{n}", OVERFLOW, Role.DECODE, t[n + 13 : n + 14], n > 2) for n in range(1, 5)]
    return found


def plan(racks: int, **pool: Any) -> Fleet:
    """The configured fleet. ``pool``: settings of ``main`` other than the shipped ones (``floor=0.9``)."""
    workers: list[Worker] = []
    places: list[NodePlace] = []
    nodes: list[str] = []
    for rack in map(rack_name, range(1, racks + 1)):
        nodes += nodes_of(rack)
        for name, of, role, on, standby in groups(rack):
            gpus = tuple(gpu_component(n, p) for n in on for p in PCIS)
            url = f"http://{name}"
            workers.append(Worker(name=name, pool=of, url=url, role=role, gpus=gpus, nodes=on, domain=rack, standby=standby))
        for number, node in enumerate(nodes_of(rack), 1):
            leaves = {device: f"{rack}-leaf{k}" for k, device in enumerate(RAILS)}
            places.append(NodePlace(node=node, rack=rack, domain=rack, tray=number, leaves=leaves))
    pools = (Pool(name=MAIN, overflow=(OVERFLOW,), **pool), Pool(name=OVERFLOW, floor=0.0, primary=False))
    return Fleet(pools=pools, workers=tuple(workers), nodes=tuple(nodes), places=tuple(places))

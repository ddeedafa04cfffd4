"""Where one node stands, for the eye: what is known of its place, what nobody said, and what contradicts what.

What always holds: it is read from the topology and changes nothing; what is not known is absent, and named under ``unsaid``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sentinel.decide.topology import Topology


def placed(topology: Topology, node: str) -> dict[str, Any]:
    """Plain JSON values: site, rack, domain, tray, gpus {PCI address: UUID}, leaves {device: switch}, unsaid, contradictions."""
    told = {
        "site": topology.site(node),
        "rack": topology.rack(node),
        "domain": topology.domain(node),
        "tray": topology.tray(node),
        "gpus": {g.pci: g.uuid for g in topology.reported(node).gpus},
        "leaves": topology.configured(node).leaves,
        "unsaid": list(_unsaid(topology, node)),
        "contradictions": [f.summary for f in topology.contradictions.of(node)],
    }
    return {key: value for key, value in told.items() if value not in ("", None, {}, [])}


def _unsaid(topology: Topology, node: str) -> Iterator[str]:
    """What neither the configuration nor the node itself says, and correlation cannot use."""
    if not topology.rack(node):
        yield "rack"
    if not topology.domain(node):
        yield "domain"
    if topology.tray(node) is None:
        yield "tray"
    if not topology.reported(node).gpus:
        yield "gpus"
    yield from (f"leaf of {device}" for device in topology.reported(node).ports if not topology.leaf(node, device))

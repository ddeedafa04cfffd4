"""Where one node stands, for the eye: what is known of its place, what nobody said, and what contradicts what.

What always holds: it is read from the topology and changes nothing; what is not known is absent, and named under ``unsaid``.
"""

from __future__ import annotations

from typing import Any

from sentinel.decide.rack.topology import Topology


def placed(topology: Topology, node: str) -> dict[str, Any]:
    """Plain JSON values: site, rack, domain, tray, gpus {PCI address: UUID}, leaves {device: switch}, unsaid, contradictions."""
    reported, rack, domain, tray = topology.reported(node), topology.rack(node), topology.domain(node), topology.tray(node)
    # What neither the configuration nor the node itself says, and correlation cannot use.
    said = {"rack": bool(rack), "domain": bool(domain), "tray": tray is not None, "gpus": bool(reported.gpus)}
    unsaid = [name for name, known in said.items() if not known]
    unsaid += [f"leaf of {device}" for device in reported.ports if not topology.leaf(node, device)]
    told: dict[str, Any] = {
        "site": topology.site(node),
        "rack": rack,
        "domain": domain,
        "tray": tray,
        "gpus": {g.pci: g.uuid for g in reported.gpus},
        "leaves": topology.configured(node).leaves,
        "unsaid": unsaid,
        "contradictions": [f.summary for f in topology.contradictions.of(node)],
    }
    return {key: value for key, value in told.items() if value or value == 0}

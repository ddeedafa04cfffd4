"""Where everything stands: site, rack, NVLink domain, tray, GPU, link, switch ASIC, rail and leaf switch.

This module exists so that correlation asks one place what shares a part with what. What always holds: what a node reports of
itself and what the site configured complete each other; where they contradict, the configuration is used, and the
contradiction is a finding about the monitor, never about the hardware; what nobody said is "", and nothing is concluded from it.
"""

from __future__ import annotations

from collections.abc import Iterable

from sentinel.model import Finding, Fleet, NodePlace, Place


class Topology:
    def __init__(self) -> None:
        self._configured: dict[str, NodePlace] = {}
        self._reported: dict[str, Place] = {}
        self._asics: tuple[str, ...] = ()

    def load(self, fleet: Fleet) -> None:
        """Take in the configured picture, at start and whenever it changes."""
        self._configured = {p.node: p for p in fleet.places}
        self._asics = fleet.asics

    def heard(self, node: str, place: Place, at: float) -> list[Finding]:
        """Take in what a node says of itself; returns what contradicts the configuration or another node."""
        self._reported[node] = place
        return []

    def forget(self, node: str) -> None:
        """A node left the fleet."""
        self._reported.pop(node, None)

    def rack(self, node: str) -> str:
        """The rack it stands in (configured name, else chassis serial number); "" unknown."""
        configured, reported = self._configured.get(node), self._reported.get(node)
        return (configured.rack if configured else "") or (reported.chassis if reported else "")

    def domain(self, node: str) -> str:
        """Its NVLink domain (configured name, else cluster UUID and clique); "" unknown or none."""
        configured, reported = self._configured.get(node), self._reported.get(node)
        if configured and configured.domain:
            return configured.domain
        if reported is None or not reported.domain:
            return ""
        return reported.domain if reported.clique is None else f"{reported.domain}.{reported.clique}"

    def nodes_of_domain(self, domain: str) -> frozenset[str]:
        return frozenset(n for n in self._known() if self.domain(n) == domain)

    def asic(self, node: str, link: int) -> str:
        """The switch ASIC that this link index ends at, named within its NVLink domain; "" where the domain is unknown."""
        domain = self.domain(node)
        name = self._asics[link] if link < len(self._asics) else f"asic{link:02d}"
        return f"{domain}/{name}" if domain else ""

    def leaf(self, node: str, device: str) -> str:
        """The leaf switch that this InfiniBand device's cable ends at; "" unless the site said so."""
        configured = self._configured.get(node)
        return configured.leaves.get(device, "") if configured else ""

    def nodes_of_leaf(self, leaf: str) -> frozenset[str]:
        return frozenset(n for n, p in self._configured.items() if leaf in p.leaves.values())

    def node_at(self, address: str) -> str:
        """The node that IMEX peers know by this host name or address; "" unknown."""
        for node in self._known():
            configured, reported = self._configured.get(node), self._reported.get(node)
            known = (node, *(configured.addresses if configured else ()), *(reported.addresses if reported else ()))
            if address in known:
                return node
        return ""

    def _known(self) -> Iterable[str]:
        return dict.fromkeys((*self._configured, *self._reported))

"""Where everything stands, by index: site, rack, NVLink domain, tray, GPU, link, switch ASIC, rail and leaf switch.

This module exists so that every question about a place is answered in time that does not grow with the fleet. What always holds:
what a node reports of itself and what the site configured complete each other; where they contradict, the configuration is used;
what nobody said is "", and nothing is concluded from it. What was measured once stays until it is measured otherwise. All of it is
soft: a new leader hears it again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

from sentinel.addresses import canonical
from sentinel.decide.rack.pairing import Pairing
from sentinel.model import Component, Fleet, GpuPlace, NodePlace, Place, Worker

CLAIM_S = 120.0  # a node silent for this long (24 snapshots) claims its GPUs and its tray no more: they may have moved
Key = TypeVar("Key", bound=Hashable)
NOWHERE, _UNPLACED = Place(), NodePlace(node="")


class Places:
    def __init__(self) -> None:
        self._configured: dict[str, NodePlace] = {}
        self._named: dict[str, str] = {}  # node → NVLink domain that its own table, or else a worker on it, names
        self._expected: frozenset[str] = frozenset()
        self._asics: tuple[str, ...] = ()
        self._by_leaf: dict[str, frozenset[str]] = {}
        self._addressed: dict[str, str] = {}  # configured address or name → node
        self._said: dict[str, Place] = {}  # what each node said last
        self._places: dict[str, Place] = {}  # the same, with what it had measured before
        self._heard_at: dict[str, float] = {}
        self._ever: set[str] = set()  # nodes that this leader has heard, also those that have left since
        self._booted: set[str] = set()  # their GPUs are to be named anew
        self._claims: dict[str, set[str]] = {}  # GPU's UUID → nodes that report it
        self._trays: dict[tuple[str, int, int | None], set[str]] = {}  # chassis, tray, host → nodes
        self._reachable: dict[str, set[str]] = {}  # reported address → nodes
        self._domain_of: dict[str, str] = {}
        self._in_domain: dict[str, set[str]] = {}
        self._again: set[str] = set()  # nodes to be judged at their next report, whether or not they have changed
        self._now = 0.0
        self.racks, self.clusters, self.partitions = Pairing(), Pairing(), Pairing()

    # -- learning -----------------------------------------------------------------------------------------------------

    def load(self, fleet: Fleet) -> None:
        """Take in the configured picture, at start and whenever it changes."""
        self._configured = {p.node: p for p in fleet.places}
        self._named = {n: w.domain for w in reversed(fleet.workers) if w.domain for n in _nodes(w)}
        self._named |= {p.node: p.domain for p in fleet.places if p.domain}
        self._asics = fleet.asics
        leaves: dict[str, set[str]] = {}
        for place in fleet.places:
            for leaf in place.leaves.values():
                leaves.setdefault(leaf, set()).add(place.node)
        self._by_leaf = {leaf: frozenset(nodes) for leaf, nodes in leaves.items()}
        expected = frozenset({*fleet.nodes, *self._configured, *(n for w in fleet.workers for n in _nodes(w))})
        self._addressed = {canonical(a): p.node for p in fleet.places for a in p.addresses} | {canonical(n): n for n in expected}
        left, self._expected = self._expected - expected, expected
        for node in sorted(left):
            self.forget(node)
        self.racks, self.clusters, self.partitions = Pairing(), Pairing(), Pairing()
        self._domain_of, self._in_domain = {}, {}
        for node in dict.fromkeys((*self._named, *self._places)):
            self._pair(node)
        self._again |= self._places.keys()

    def rebooted(self, node: str) -> None:
        """A node began a new boot: the next GPUs that it names are all that it has."""
        self._booted.add(node)

    def forget(self, node: str) -> None:
        """A node left the fleet. What contradicted it is judged anew."""
        place = self._places.get(node)
        if place is not None:
            self._learn(node, place, NOWHERE)
        for table in (self._said, self._places, self._heard_at):
            table.pop(node, None)
        self._again.discard(node)
        self._booted.discard(node)
        self._move(node, "")

    def _learn(self, node: str, before: Place, now: Place) -> None:
        self._places[node] = now
        self._ever.add(node)
        self._again |= _index(self._claims, node, (g.uuid for g in before.gpus), [g.uuid for g in now.gpus if g.uuid])
        self._again |= _index(self._trays, node, _tray(before), _tray(now))
        _index(self._reachable, node, map(canonical, before.addresses), list(map(canonical, now.addresses)))
        self._pair(node)

    def _pair(self, node: str) -> None:
        """Match what it is called with what it reports, and put it, and those for which the match changed, into their domains."""
        place = self._places.get(node, NOWHERE)
        name, partition = self._named.get(node, ""), _partition(place)
        moved = self.racks.put(node, self.configured(node).rack, place.chassis)
        moved |= self.clusters.put(node, name, place.domain)
        moved |= self.partitions.put(node, name, partition)
        self._again |= moved
        for other in sorted({node, *moved}):
            self._move(other, self._named.get(other) or self._by_hardware(self._places.get(other, NOWHERE)))

    def _by_hardware(self, place: Place) -> str:
        partition = _partition(place)
        return self.partitions.name(partition) or partition

    def _move(self, node: str, domain: str) -> None:
        before = self._domain_of.get(node, "")
        if before == domain:
            return
        if before:
            self._in_domain[before].discard(node)
            if not self._in_domain[before]:
                del self._in_domain[before]
        self._domain_of.pop(node, None)
        if domain:
            self._domain_of[node] = domain
            self._in_domain.setdefault(domain, set()).add(node)

    # -- asking: one node -----------------------------------------------------------------------------------------------

    def configured(self, node: str) -> NodePlace:
        """What the site says of it; nothing is as good as an empty table."""
        return self._configured.get(node, _UNPLACED)

    def reported(self, node: str) -> Place:
        """What it says of itself, as last measured."""
        return self._places.get(node, NOWHERE)

    def named(self, node: str) -> str:
        """The NVLink domain that the configuration puts it in; "" it does not say."""
        return self._named.get(node, "")

    def known(self) -> Iterable[str]:
        """Every node that is configured or has said where it stands."""
        return dict.fromkeys((*sorted(self._expected), *self._places))

    def was_heard(self, node: str) -> bool:
        """Whether it has said where it stands, or never will because it is not of this fleet."""
        return node in self._ever or node not in self._expected

    def site(self, node: str) -> str:
        return self.configured(node).site

    def rack(self, node: str) -> str:
        """The rack it stands in (configured name, its own or that of the nodes in its chassis; else the chassis' serial number)."""
        chassis = self.reported(node).chassis
        return self.configured(node).rack or self.racks.name(chassis) or chassis

    def domain(self, node: str) -> str:
        """Its NVLink domain (configured name, its own or that of the nodes that share its cluster UUID and clique, else those as
        "uuid.clique"); "" unknown or none."""
        return self._domain_of.get(node, "")

    def tray(self, node: str) -> int | None:
        configured = self.configured(node).tray
        return self.reported(node).tray if configured is None else configured

    def asic(self, node: str, link: int) -> str:
        """The switch ASIC that this link index ends at, named within its NVLink domain; "" where the domain is unknown."""
        domain = self.domain(node)
        name = self._asics[link] if link < len(self._asics) else f"asic{link:02d}"
        return f"{domain}/{name}" if domain else ""

    def leaf(self, node: str, device: str) -> str:
        """The leaf switch that this InfiniBand device's cable ends at; "" unless the site said so."""
        return self.configured(node).leaves.get(device, "")

    def gpu(self, component: Component) -> GpuPlace | None:
        """The identity of the GPU that a component is or belongs to; None where its node has not named it."""
        return next((g for g in self.reported(component.node).gpus if g.pci == component.gpu), None)

    def disputed(self, component: Component) -> str:
        """Why nobody can say whose GPU this is, in one sentence; "" where nothing speaks against it."""
        gpu = self.gpu(component) if component.gpu else None
        others = self.claimants(gpu.uuid, component.node) if gpu else []
        if gpu is None or not others:
            return ""
        return f"{gpu.uuid} is claimed by {component.node} and by {', '.join(others)}, so nobody can say whose GPU this is"

    # -- asking: who shares it ------------------------------------------------------------------------------------------

    def nodes_of_domain(self, domain: str) -> frozenset[str]:
        return frozenset(self._in_domain.get(domain, ()))

    def nodes_of_leaf(self, leaf: str) -> frozenset[str]:
        return self._by_leaf.get(leaf, frozenset())

    def domains(self) -> Iterable[str]:
        return self._in_domain.keys()

    def leaves(self) -> Iterable[str]:
        return sorted(self._by_leaf)

    def node_at(self, address: str) -> str:
        """The node that IMEX peers know by this host name or address; "" unknown, or several report it (a bridge's, say)."""
        name = canonical(address)
        there = self._reachable.get(name, ())
        return self._addressed.get(name) or (next(iter(there)) if len(there) == 1 else name if name in self._places else "")

    def holder(self, address: str) -> str:
        """The node that the configuration gives this address, or whose name it is; "" none."""
        return self._addressed.get(canonical(address), "")

    def claimants(self, uuid: str, beside: str) -> list[str]:
        """The other nodes that report this GPU now."""
        return self._current(self._claims.get(uuid, ()), beside)

    def on_tray(self, node: str) -> list[str]:
        """The other nodes that report this node's own tray of its own chassis now."""
        return [n for key in _tray(self.reported(node)) for n in self._current(self._trays.get(key, ()), node)]

    def former(self, uuid: str, beside: str) -> str:
        """A node that had this GPU and has been silent since; "" none."""
        return next((n for n in sorted(self._claims.get(uuid, ())) if n != beside and self._stale(n)), "")

    def _current(self, nodes: Iterable[str], beside: str) -> list[str]:
        return sorted(n for n in nodes if n != beside and not self._stale(n))

    def _stale(self, node: str) -> bool:
        return self._now - self._heard_at.get(node, self._now) > CLAIM_S


def _nodes(worker: Worker) -> Iterable[str]:
    return dict.fromkeys((*worker.nodes, *(g.node for g in worker.gpus)))


def _partition(place: Place) -> str:
    return place.domain if not place.domain or place.clique is None else f"{place.domain}.{place.clique}"


def _tray(place: Place) -> list[tuple[str, int, int | None]]:
    return [(place.chassis, place.tray, place.host)] if place.chassis and place.tray is not None else []


def _index(table: dict[Key, set[str]], node: str, before: Iterable[Key], now: list[Key]) -> set[str]:
    """Put a node under its keys and take it from those it has left. Returns who shares one of them with it."""
    shared: set[str] = set()
    for key in before:
        if key in table and key not in now:
            table[key].discard(node)
            if not table[key]:
                del table[key]
    for key in now:
        there = table.setdefault(key, set())
        there.add(node)
        if len(there) > 1:
            shared |= there
    return shared

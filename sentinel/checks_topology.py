"""What the configuration may not say about where things stand: two nodes in one place, one node in two.

This module exists because correlation believes what the site says before what the hardware says, so a slip of the pen here would
become a wrong culprit. What always holds: a problem is one sentence that begins with the key, names what contradicts what, and
says what was wanted; what nobody said contradicts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sentinel.addresses import canonical
from sentinel.settings import NodeSettings, Settings, WorkerSettings

NVLINKS = 18  # of a GB200 GPU; each ends at another switch ASIC of its rack

_DEVICE = re.compile(r"[a-z][a-z0-9_]{0,62}[0-9]")  # mlx5_0, and what udev makes of it: ibp12s0, rocep3s0f0


def topology_problems(s: Settings) -> Iterator[str]:
    """Everything that is wrong with ``[[nodes]]``' places, ``[topology]`` and the workers' domains."""
    yield from _asics(s.topology.asics)
    for node in s.nodes:
        yield from _words(node)
    yield from _addresses(s.nodes)
    yield from _trays(s.nodes)
    yield from _racks(s.nodes)
    domains = {n.name: n.domain for n in s.nodes if n.domain}
    for worker in s.workers:
        yield from _worker(worker, domains)


def _asics(names: tuple[str, ...]) -> Iterator[str]:
    if names and len(names) != NVLINKS:
        yield f"topology.asics: {len(names)} names; wanted {NVLINKS}, one for each NVLink of a GPU, in the order of the links"
    for name in dict.fromkeys(n for n in names if names.count(n) > 1):
        yield f"topology.asics: {name!r} is there {names.count(name)} times; wanted {NVLINKS} different switch ASICs"
    yield from (f"topology.asics: {name!r} is no name; {_WANTED}" for name in names if not _named(name))


def _words(node: NodeSettings) -> Iterator[str]:
    where = f"nodes.{node.name}"
    for key in ("site", "rack", "domain"):
        value = getattr(node, key)
        if value and not _named(value):
            yield f"{where}.{key}: {value!r} is no name; {_WANTED}"
    for address in node.addresses:
        if not _named(address):
            yield f"{where}.addresses: {address!r} is no host name or IP address"
    for device, leaf in node.leaves.items():
        if not _DEVICE.fullmatch(device):
            yield f"{where}.leaves: {device!r} is no InfiniBand device; wanted its name alone, as in mlx5_0"
        if not _named(leaf):
            yield f"{where}.leaves.{device}: {leaf!r} names no leaf switch; {_WANTED}"


_WANTED = "wanted letters, digits or signs without spaces or '/'"


def _named(text: str) -> bool:
    return bool(text) and len(text) <= 128 and text.isprintable() and not any(c.isspace() or c == "/" for c in text)


def _addresses(nodes: tuple[NodeSettings, ...]) -> Iterator[str]:
    """Also a node's own name is one of its addresses."""
    holder = {canonical(n.name): n.name for n in nodes}
    for node in nodes:
        for address in node.addresses:
            other = holder.setdefault(canonical(address), node.name)
            if other != node.name:
                yield f"nodes.{node.name}.addresses: {address} is node {other!r} already; wanted each address at one node"


def _trays(nodes: tuple[NodeSettings, ...]) -> Iterator[str]:
    holder: dict[tuple[str, int], str] = {}
    for n in nodes:
        if n.rack and n.tray is not None and holder.setdefault((n.rack, n.tray), n.name) != n.name:
            first = holder[n.rack, n.tray]
            yield f"nodes.{n.name}.tray: tray {n.tray} of rack {n.rack!r} is node {first!r} already; wanted one node a tray"


def _racks(nodes: tuple[NodeSettings, ...]) -> Iterator[str]:
    """A rack stands at one site; an NVLink domain does not reach beyond its rack (a GB200 NVL72 domain is one rack)."""
    sites: dict[str, NodeSettings] = {}
    racks: dict[str, NodeSettings] = {}
    for n in nodes:
        if n.rack and n.site:
            first = sites.setdefault(n.rack, n)
            if first.site != n.site:
                yield f"nodes.{n.name}.site: rack {n.rack!r} is at {first.site!r} by node {first.name!r} and at {n.site!r} here"
        if n.domain and n.rack:
            first = racks.setdefault(n.domain, n)
            if first.rack != n.rack:
                yield (
                    f"nodes.{n.name}.domain: NVLink domain {n.domain!r} is in rack {first.rack!r} by node {first.name!r} and in "
                    f"{n.rack!r} here; wanted a domain within one rack"
                )


def _worker(w: WorkerSettings, domains: dict[str, str]) -> Iterator[str]:
    """A serving group's ranks talk over NVLink; where the nodes say no domain, the worker's own says it for them."""
    at = {node: domains[node] for node in dict.fromkeys((*w.nodes, *(g.partition("/")[0] for g in w.gpus))) if node in domains}
    if len(set(at.values())) > 1:
        told = ", ".join(f"{node} in {domain!r}" for node, domain in at.items())
        yield f"workers.{w.name}.gpus: they span two NVLink domains ({told}); wanted one"
    elif w.domain and at and w.domain not in at.values():
        node, domain = next(iter(at.items()))
        yield f"workers.{w.name}.domain: it is {w.domain!r}, but its node {node!r} is in {domain!r}"
    elif w.domain:
        for node in (*w.nodes, *(g.partition("/")[0] for g in w.gpus)):
            domains.setdefault(node, w.domain)  # what the next worker there has to agree with

"""Where this node stands, out of the latest readings: chassis, tray, NVLink domain, GPUs, InfiniBand devices, addresses.

This module exists so that the controller learns what shares a part with what from the hardware itself. What always holds:

* What was not measured is "" or None, and what was measured once stays until it is measured otherwise: a GPU that is lost, a
  fabric that is joining anew after a reset and a probe that failed do not move a node. Memory is this process': a boot begins anew.
* An NVLink domain is named only by a GPU that says its fabric is complete, with a cluster UUID that is not zero (Azure: a UUID of
  zeros, or another state, is not registered).
* Names and addresses are read below the procfs root that is handed in; nobody is asked over the network.
"""

from __future__ import annotations

import ipaddress
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sentinel.model import GpuPlace, Place, Reading, pci_address

JOINED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED
READ_MOST = 4 * 1024 * 1024  # bytes of the kernel's routing trie; a host that routes for others has a longer one
ADDRESSES_S = 60.0  # seconds between two looks at names and addresses
MOST = 64  # addresses, devices: bounds what a container host tells


class Whereabouts:
    """Takes the agent's readings as they come; ``place()`` is what a snapshot carries. ``clock``: seconds, monotonic."""

    def __init__(self, proc: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._proc, self._clock = proc, clock
        self._gpus: dict[str, dict[str, Any]] = {}  # PCI address → identity, as last measured in this boot
        self._ports: tuple[str, ...] = ()
        self._addresses: tuple[str, ...] = ()
        self._looked_at: float | None = None
        self._place: Place | None = None  # None: to be made anew

    def take(self, reading: Reading) -> None:
        """Remember what one reading of the gpu or infiniband probe says of identities; any other is nothing to it."""
        if reading.probe == "gpu":
            for pci, said in identities(reading.data):
                known = self._gpus.get(pci, {})
                if said.items() - known.items():
                    self._gpus[pci] = known | said
                    self._place = None
        elif reading.probe == "infiniband":
            ports = tuple(sorted(ports_of(reading.data)))[:MOST]
            if ports and ports != self._ports:
                self._ports, self._place = ports, None

    def place(self) -> Place | None:
        """What is known of this node's place; None: nothing at all."""
        now = self._clock()
        if self._looked_at is None or now - self._looked_at >= ADDRESSES_S:
            self._looked_at = now
            found = tuple(dict.fromkeys((*names(self._proc), *addresses(self._proc))))[:MOST]
            if found and found != self._addresses:
                self._addresses, self._place = found, None
        if self._place is None:
            self._place = place_of(self._gpus, self._ports, self._addresses)
        return self._place if self._place != Place() else None


def place_of(gpus: Mapping[str, Mapping[str, Any]], ports: tuple[str, ...], addresses: tuple[str, ...]) -> Place:
    """A Place out of identities by PCI address (as ``identities`` gives them). What GPUs differ in, most of them decide."""
    ordered = [{**gpus[pci], "pci": pci} for pci in sorted(gpus)]
    domain, clique = _most((g["cluster"], g.get("clique")) for g in ordered if g.get("cluster")) or ("", None)
    chassis, slot, tray, host = _most(
        (g["chassis"], g.get("slot"), g.get("tray"), g.get("host")) for g in ordered if g.get("chassis")
    ) or ("", None, None, None)

    def gpu(g: Mapping[str, Any]) -> GpuPlace:
        own = (g.get("cluster", ""), g.get("clique"))
        elsewhere = domain_name(*own) if own[0] and own != (domain, clique) else ""
        return GpuPlace(pci=g["pci"], uuid=g.get("uuid", ""), module=g.get("module"), domain=elsewhere)

    return Place(
        chassis=chassis, slot=slot, tray=tray, host=host, domain=domain, clique=clique,
        gpus=tuple(map(gpu, ordered)), ports=ports, addresses=addresses,
    )  # fmt: skip


def domain_name(cluster: str, clique: int | None) -> str:
    return cluster if clique is None else f"{cluster}.{clique}"


def _most(said: Iterable[tuple[Any, ...]]) -> Any:
    """What most of them say; among equals the first. None when nobody says anything."""
    return next((value for value, _ in Counter(said).most_common(1)), None)


# -- what readings say --------------------------------------------------------------------------------------------------------


def identities(data: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """PCI address and identity of every GPU that answered, without what it did not say."""
    for gpu in data.get("gpus") or ():
        if not gpu.get("uuid"):  # lost, hung, unreadable: it says nothing about who it is
            continue
        try:
            pci = pci_address(gpu.get("pci") or "")
        except ValueError:
            continue
        said: dict[str, Any] = {"uuid": str(gpu["uuid"])}
        platform = gpu.get("platform") or {}
        if platform.get("chassis"):  # without it the numbers are zeros that nobody set
            said |= {key: platform[key] for key in ("chassis", "slot", "tray", "host", "module") if platform.get(key) is not None}
        cluster = str(gpu.get("fabric_cluster") or "")
        if gpu.get("fabric_state") == JOINED and cluster.strip("0"):
            said |= {"cluster": cluster, "clique": gpu.get("fabric_clique")}
        yield pci, said


def ports_of(data: Mapping[str, Any]) -> Iterator[str]:
    """InfiniBand devices with a port; virtual functions and those that are somebody else's are no rails."""
    for device in data.get("devices") or ():
        if device.get("name") and device.get("ports") and not device.get("virtual") and not device.get("ignored"):
            yield str(device["name"])


# -- names and addresses ------------------------------------------------------------------------------------------------------


def names(proc: Path) -> Iterator[str]:
    """The kernel's own host name, whole and without its domain; a name that every host has is none."""
    name = _text(proc / "sys/kernel/hostname").strip()
    short = name.partition(".")[0]
    if short not in ("", "localhost", "(none)"):
        yield from dict.fromkeys((name, short))


def addresses(proc: Path) -> list[str]:
    """This host's IP addresses, in order, without loopback and link-local ones (those name nothing beyond the host's links)."""
    found: set[ipaddress.IPv4Address | ipaddress.IPv6Address] = {*_ipv4(_text(proc / "net/fib_trie").splitlines())}
    found |= {*_ipv6(_text(proc / "net/if_inet6").splitlines())}
    usable = (a for a in found if not a.is_loopback and not a.is_link_local)
    return [str(a) for a in sorted(usable, key=lambda a: (a.version, int(a)))]


def _ipv4(lines: Iterable[str]) -> Iterator[ipaddress.IPv4Address]:
    """``/proc/net/fib_trie``: a leaf ``|-- 10.0.1.3`` whose next lines say ``/32 host LOCAL``."""
    leaf = ""
    for line in lines:
        words = line.split()
        if len(words) == 2 and words[0] == "|--":
            leaf = words[1]
        elif leaf and words[:3] == ["/32", "host", "LOCAL"]:
            try:
                yield ipaddress.IPv4Address(leaf)
            except ValueError:
                leaf = ""


def _ipv6(lines: Iterable[str]) -> Iterator[ipaddress.IPv6Address]:
    """``/proc/net/if_inet6``: an address a line, 32 hex digits first."""
    for line in lines:
        word = line.partition(" ")[0]
        try:
            yield ipaddress.IPv6Address(bytes.fromhex(word))
        except ValueError:
            continue


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(READ_MOST).decode("ascii", "replace")
    except OSError:
        return ""

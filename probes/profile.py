"""What a healthy node of each kind looks like, and which kind this one is, from what its GPUs say about themselves.

This module exists so that nobody has to configure that a GB200 has eighteen NVLinks, and so that a product name alone never
decides anything. What always holds:

* A kind is ruled out by any measured fact that contradicts it; the product's name only chooses among those that are left.
* Where several are left, only that on which all of them agree is expected; where none is, nothing is.
* What the site says (``[agent.expected]``) wins, key by key. Probes that see no GPU get the rest as hints, which weigh less.
* ``gpus`` is never filled in: a machine with two passed-through GPUs is whole. The usual number is ``gpus_usual``, a hint.
* A kind once recognised stays for as long as its memory does: a GPU that has failed no longer shows what it is.

Sources: NVIDIA Health Validation (nvlink_bandwidth_count_speed: 18 links; 53125 MB/s on GB200 and GB300, 26562 on H100;
gpu_count: 4 on GB200 and GB300), nvml.h for architectures and link versions, a measured H200 host (18 links of 26562 MB/s, link
version 6); rates of the InfiniBand ports are those of NVIDIA's reference designs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from probes.thresholds import limits
from probes.windows import listed, number, table
from sentinel.model import Reading

HOPPER, BLACKWELL = 9, 10  # NVML_DEVICE_ARCH_*
NVLINK4, NVLINK5 = 6, 7  # NVML_NVLINK_VERSION_4_0, _5_0


@dataclass(frozen=True)
class Profile:
    """One kind of node. Speeds in MB/s per link and direction, as NVML gives them; InfiniBand in Gb/s per port."""

    name: str
    architecture: int
    gpus_usual: int
    nvlinks: int
    nvlink_mbps: int
    nvlink_version: int
    mnnvl: bool  # the NVLink domain spans nodes: registered with a cluster, no Fabric Manager on the node
    c2c: bool  # the GPU is joined to a Grace CPU
    pcie_width: int
    ib_gbps: int


PROFILES = (
    Profile("GB200", BLACKWELL, 4, 18, 53125, NVLINK5, mnnvl=True, c2c=True, pcie_width=16, ib_gbps=400),
    Profile("GB300", BLACKWELL, 4, 18, 53125, NVLINK5, mnnvl=True, c2c=True, pcie_width=16, ib_gbps=800),
    Profile("B200", BLACKWELL, 8, 18, 53125, NVLINK5, mnnvl=False, c2c=False, pcie_width=16, ib_gbps=400),
    Profile("H200", HOPPER, 8, 18, 26562, NVLINK4, mnnvl=False, c2c=False, pcie_width=16, ib_gbps=400),
    Profile("H100", HOPPER, 8, 18, 26562, NVLINK4, mnnvl=False, c2c=False, pcie_width=16, ib_gbps=400),
)
_BY_NAME = {p.name: p for p in PROFILES}
_EXPECTED = tuple(f.name for f in fields(Profile) if f.name not in ("name", "architecture"))
_OTHERS = frozenset({"GH200", "PCIE", "NVL"})  # boards of the same chips with other links: bridges in pairs, a Grace beside Hopper


def expected_for(reading: Reading, site: Mapping[str, Any], memory: dict[str, Any] | None = None) -> Mapping[str, Any]:
    """What to expect of the node of a ``gpu`` reading: its profile under what the site says.

    ``profile`` names the kinds it may be. ``nvlinks`` is given only where links are known to be wired: on a domain that spans
    nodes, or once one of them has been up (an H100 on a PCIe card has eighteen and none is).
    """
    gpus = [g for g in listed(reading.data.get("gpus")) if isinstance(g, Mapping) and "unread" in g]
    memory = {} if memory is None else memory
    kinds = recognise(gpus)
    if kinds is None:
        kinds = tuple(_BY_NAME[n] for n in memory.get("profile", ()) if n in _BY_NAME)
    wired = bool(memory.get("wired")) or any(s in (1, 2) for g in gpus for s in listed(g.get("links")))
    memory["profile"], memory["wired"] = [k.name for k in kinds], wired
    if not kinds:
        return dict(site)
    agreed = _agreed(kinds)
    if not (agreed.get("mnnvl") or wired):
        agreed.pop("nvlinks", None)
    return {**agreed, **site}


def with_hints(site: Mapping[str, Any], memories: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What a probe is handed as ``expected``: what the site says and, under ``hints``, what is usual for this kind of node.

    ``memories``: of the node's probes by name; the ``gpu`` probe's knows the kind. Hints are for probes that see no GPU. They stand
    below the site's word: a key that the site has is no hint, and what only a hint says drains and pages nobody.
    """
    named = memories.get("gpu", {}).get("kind", {}).get("profile", ())
    hints = _agreed([_BY_NAME[n] for n in named if n in _BY_NAME])
    return {**site, "hints": {key: value for key, value in hints.items() if key not in site}}


def _agreed(kinds: Sequence[Profile]) -> dict[str, Any]:
    """On what these kinds agree, and as ``profile`` their names; empty for none."""
    if not kinds:
        return {}
    values = {key: {getattr(kind, key) for kind in kinds} for key in _EXPECTED}
    return {"profile": "/".join(k.name for k in kinds), **{key: found.pop() for key, found in values.items() if len(found) == 1}}


def recognise(gpus: Iterable[Mapping[str, Any]]) -> tuple[Profile, ...] | None:
    """The kinds that the GPUs of one node may be of: empty for different kinds or an unknown one, None when none could tell."""
    found: set[tuple[Profile, ...]] = {kinds for g in gpus if (kinds := _kinds_of(g)) is not None}
    if not found:
        return None
    return found.pop() if len(found) == 1 else ()


def _kinds_of(gpu: Mapping[str, Any]) -> tuple[Profile, ...] | None:
    """None when this GPU said nothing that could tell."""
    words = set(str(gpu.get("name") or "").upper().replace("-", " ").split())
    if gpu.get("architecture") is None and not _fastest(gpu) and not _cluster(gpu):
        return None  # a name alone is no fact
    if words & _OTHERS:
        return ()
    left = [p for p in PROFILES if _fits(gpu, p)]
    named = [p for p in left if p.name in words]
    if named:
        return tuple(named)
    # A name that is another kind's (an RTX card, a kind to come) is no reason to expect these; no name at all leaves the facts.
    return () if words else tuple(p for p in left if gpu.get("link_count") in (None, p.nvlinks))


def _fits(gpu: Mapping[str, Any], kind: Profile) -> bool:
    """Whether nothing that this GPU says about itself contradicts the kind. What was not measured contradicts nothing."""
    c2c = number(table(gpu.get("c2c")).get("count"))
    fastest = _fastest(gpu)
    return (
        gpu.get("architecture") in (None, kind.architecture)
        and (number(gpu.get("link_count")) or 0) <= kind.nvlinks  # fewer: some are missing, or it is passed through alone
        and gpu.get("link_version") in (None, 0, kind.nvlink_version)
        and (not c2c or kind.c2c)  # a GB200 whose C2C links are gone is a sick GB200
        and (kind.mnnvl or not _cluster(gpu))
        and (not fastest or fastest <= kind.nvlink_mbps * (1 + limits().nvlink.speed_slack_share))
    )


def _cluster(gpu: Mapping[str, Any]) -> bool:
    return bool(str(gpu.get("fabric_cluster") or "").strip("0"))


def _fastest(gpu: Mapping[str, Any]) -> int:
    """Speed of its fastest link that is up, MB/s; 0 when none was measured."""
    speeds = zip(listed(gpu.get("link_speed_mbps")), listed(gpu.get("links")), strict=False)
    return max((number(s) or 0 for s, state in speeds if state == 1), default=0)

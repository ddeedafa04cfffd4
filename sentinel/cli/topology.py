"""``sentinel topology``: what stands where, who shares it, and what nobody has said.

This module exists so that whoever wonders why two faults were called one can see what sentinel believes to be connected. What
always holds: it shows the leader's picture and adds nothing to it; what is not known is listed as such.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import click

from sentinel.cli.draw import clean, draw
from sentinel.cli.leader import Leader
from sentinel.cli.operate import as_json, talks

_NAMED = 5  # nodes named in a line; the rest are counted


@click.command()
@as_json
@talks
def topology(*, leader: Leader, as_json: bool) -> None:
    """Show racks, NVLink domains, trays, nodes and GPUs, the workers' ranks, leaf switches, and what nobody said."""
    told = layout(leader.get("/v1/status"))
    if as_json:
        click.echo(json.dumps(told, indent=2, ensure_ascii=False))
        return
    racks = {n["rack"] for n in told["nodes"]}
    draw(
        f"{len(told['nodes'])} nodes in {len(racks)} racks", ("site", "rack", "domain", "tray", "node", "GPUs", "ranks"),
        ((n["site"], n["rack"], n["domain"], n["tray"], n["node"], str(len(n["gpus"])), n["ranks"]) for n in told["nodes"]),
    )  # fmt: skip
    draw(
        "workers", ("pool", "role", "worker", "ranks"),
        ((w["pool"], w["role"], w["worker"], _by_node(w["ranks"]) or "not known") for w in told["workers"]),
    )  # fmt: skip
    draw("leaf switches", ("leaf", "cables"), ((leaf, ", ".join(cables)) for leaf, cables in told["leaves"].items()))
    for what, nodes in told["unsaid"].items():
        click.echo(clean(f"nobody said: {what} of {_some(nodes)}"))
    for sentence in told["contradictions"]:
        click.echo(clean(sentence))


def layout(status: dict[str, Any]) -> dict[str, Any]:
    """The places in a status, sorted by rack, domain and tray; ``ranks`` of a worker are its GPUs in their order."""
    workers = [
        {"worker": w["worker"], "pool": w["pool"], "role": w["role"], "ranks": list(w.get("gpus", ()))}
        for w in status.get("workers", ())
    ]
    nodes: list[dict[str, Any]] = []
    leaves: dict[str, list[str]] = {}
    unsaid: dict[str, list[str]] = {}
    contradictions: dict[str, None] = {}
    for row in status.get("nodes", ()):
        place, name = row.get("place", {}), row["node"]
        tray = place.get("tray")
        nodes.append(
            {
                "node": name, "site": place.get("site", ""), "rack": place.get("rack", "?"), "domain": place.get("domain", "?"),
                "tray": "?" if tray is None else str(tray), "gpus": place.get("gpus", {}), "ranks": _on(name, workers),
            }
        )  # fmt: skip
        for device, leaf in place.get("leaves", {}).items():
            leaves.setdefault(leaf, []).append(f"{name} {device}")
        for what in place.get("unsaid", ()):
            unsaid.setdefault(what, []).append(name)
        contradictions.update(dict.fromkeys(place.get("contradictions", ())))
    nodes.sort(key=lambda n: (n["site"], n["rack"], n["domain"], n["tray"].zfill(4), n["node"]))
    return {
        "nodes": nodes,
        "workers": sorted(workers, key=lambda w: (w["pool"], w["role"], w["worker"])),
        "leaves": dict(sorted(leaves.items())),
        "unsaid": unsaid,
        "contradictions": list(contradictions),
    }


def _on(node: str, workers: Iterable[dict[str, Any]]) -> str:
    there = ((w["worker"], [i for i, gpu in enumerate(w["ranks"]) if gpu.partition("/")[0] == node]) for w in workers)
    return ", ".join(f"{name} {_run(ranks)}" for name, ranks in there if ranks)


def _by_node(gpus: list[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        ranks.setdefault(gpu.partition("/")[0], []).append(rank)
    return ", ".join(f"{_run(each)} on {node}" for node, each in ranks.items())


def _run(ranks: list[int]) -> str:
    """0, 1, 2, 3 → ``0-3``; with a gap, each by itself."""
    whole = len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1
    return f"{ranks[0]}-{ranks[-1]}" if whole else " ".join(map(str, ranks))


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")

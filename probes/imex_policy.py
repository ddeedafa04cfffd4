"""What the state of an IMEX domain means, and whom it accuses; pure, its numbers in ``thresholds.toml``.

This module exists because ``DEGRADED`` is a verdict about a domain that every member repeats: one dead tray makes seventeen
healthy ones say it. What always holds:

* The connection table decides. A node is accused by its column, by what the nodes that are ready see of it, never by its own
  row (an unreachable node's row is empty talk) and never because it reports.
* IMEX carries no word about GPUs: nothing here is fatal, nothing here drains. Versions or node lists that differ are software.
* A slot that was never filled is no fault unless the configuration says how many nodes are expected.
* No daemon is normal where no compute domain runs (DCGM passes NOT_INSTALLED, NOT_CONFIGURED and UNAVAILABLE likewise).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from probes.imex_text import CONNECTED, DISCONNECTED, INVALID, NODE_MAP, RECOVERING, VERSION
from probes.judging import Judge
from probes.thresholds import limits
from sentinel.model import Action, Component, Severity, Suspect

ACCUSED_MAX = 32  # names in one finding, and findings about peers in one reading
CUT = frozenset({DISCONNECTED, RECOVERING, INVALID})

_SLOT = re.compile(r"compute-domain-daemon-\S*\d+$")  # DRA names every slot of a domain, filled or not

Data = Mapping[str, Any]


def judge_domain(j: Judge, data: Data, memory: dict[str, Any], wanted: int | None) -> None:
    """Judge one parsed output. ``data``: as ``imex_text.parse`` gives it, with ``own`` (this node's index) where known."""
    here = Component(node=j.node, device="imex")
    nodes: Mapping[str, Any] = data["nodes"]
    links: Mapping[str, Mapping[str, str]] = data["links"]
    ready = [n for n, node in nodes.items() if node.get("status") == "READY"]
    own = data.get("own")
    filled = set(memory.get("filled", ())) | set(ready)
    memory["filled"] = sorted(filled)[:4096]

    _mismatch(j, here, data)
    _domain(j, here, data, ready)
    _own_daemon(j, here, nodes.get(own) if own is not None else None)
    _slots(j, here, len(ready), wanted, data)

    told = {a: row for a, row in links.items() if set(row.values()) != {INVALID}}  # nobody asked that node, or it did not answer
    accused, alone, paths = _attribute(told, ready, _accusable(nodes, filled))
    if own in alone:  # the others see each other; it is this node that they have lost
        accused.pop(own, None)
    steady = j.steady("imex.isolated", here, own is not None and own in alone, limits().imex.run)
    if steady is not None:
        j.state("imex.isolated", here, steady, severity=Severity.WARNING, action=Action.RESTART_IMEX, certainty=0.8,
                evidence=_row(links, own),
                summary="This node's IMEX daemon has lost the rest of its domain; the others see each other.")
    _peers(j, nodes, links, {**accused, **{n: [a for a in ready if a != n] for n in alone if n != own}}, memory)
    steady = j.steady("imex.path", here, bool(paths), limits().imex.run)
    if steady is not None:
        j.state("imex.path", here, steady, severity=Severity.WARNING, action=Action.INSPECT, suspect=Suspect.PEER, certainty=0.6,
                facts={"pairs": [list(p) for p in paths[:ACCUSED_MAX]]},
                evidence=tuple(f"{a}->{b}={links[a][b]}" for a, b in paths[:4]),
                summary=f"Some IMEX nodes do not reach each other though both reach others: {_pairs(paths)}.")


def _accusable(nodes: Mapping[str, Any], filled: set[str]) -> set[str]:
    """Slots whose loss means something: not those that an orchestrator named ahead and nobody has filled yet."""
    return {n for n, node in nodes.items() if n in filled or not _SLOT.search(node.get("host") or "")}


def _attribute(
    links: Mapping[str, Mapping[str, str]], ready: list[str], accusable: set[str]
) -> tuple[dict[str, list[str]], list[str], list[tuple[str, str]]]:
    """Who is to blame: (accused → who says so), nodes that are ready and alone, and single broken paths."""
    accused: dict[str, list[str]] = {}
    alone: list[str] = []
    paths: list[tuple[str, str]] = []
    up, reporters = set(ready), [n for n in ready if n in links]
    cut = {(a, b) for a in reporters for b, seen in links[a].items() if a != b and seen in CUT}
    for b in sorted({b for _, b in cut} - up):
        if b in accusable:
            accused[b] = [a for a in reporters if (a, b) in cut]
    broken = {frozenset(pair) for pair in cut if pair[1] in up}
    for n in ready:
        if len(ready) > 2 and sum(n in pair for pair in broken) * 2 > len(ready) - 1:
            alone.append(n)
    if len(alone) * 2 > len(ready):
        alone = []  # nobody sees anybody: no one culprit among them
    for a, b in sorted(cut):
        if b in up and a not in alone and b not in alone:
            paths.append((a, b))
    return accused, alone, paths


def _peers(
    j: Judge, nodes: Mapping[str, Any], links: Mapping[str, Mapping[str, str]], accused: Mapping[str, list[str]],
    memory: dict[str, Any],
) -> None:
    before = set(memory.get("accused", ()))
    for n in sorted(before | set(accused), key=_number)[:ACCUSED_MAX]:
        host = (nodes.get(n) or {}).get("name") or (nodes.get(n) or {}).get("host") or f"#{n}"
        where = Component(node=j.node, device=f"imex@{_safe(host)}")
        steady = j.steady("imex.peer", where, n in accused, limits().imex.run)
        if steady is None:
            continue
        says = accused.get(n, [])
        j.state("imex.peer", where, steady, severity=Severity.WARNING, action=Action.INSPECT, suspect=Suspect.PEER, certainty=0.9,
                facts={"peer": host, "index": n, "reporters": len(says)},
                evidence=tuple(f"{a}->{n}={links[a][n]}" for a in says[:4] if n in links.get(a, {})),
                summary=f"IMEX node {n} ({host}) is lost to {len(says)} of its peers: look there; those who report it are well.")
    memory["accused"] = sorted(accused, key=_number)[:ACCUSED_MAX]


def _mismatch(j: Judge, here: Component, data: Data) -> None:
    versions = sorted({node["version"] for node in data["nodes"].values() if node.get("version")})
    for check, bad, words in (
        ("imex.version", VERSION, f"daemons of different versions ({', '.join(versions[:4]) or 'not said'})"),
        ("imex.node_map", NODE_MAP, "daemons whose lists of nodes differ"),
    ):
        pairs = [(a, b) for a, row in data["links"].items() for b, seen in row.items() if seen == bad]
        steady = j.steady(check, here, bool(pairs), limits().imex.run)
        if steady is not None:
            j.state(check, here, steady, severity=Severity.WARNING, action=Action.RESTART_IMEX,
                    facts={"pairs": [list(p) for p in pairs[:ACCUSED_MAX]], "versions": versions[:8]},
                    evidence=tuple(f"{a}->{b}={bad}" for a, b in pairs[:4]),
                    summary=f"IMEX does not talk between {words}: install one, restart IMEX. No hardware is at fault.")


def _domain(j: Judge, here: Component, data: Data, ready: list[str]) -> None:
    nodes = data["nodes"]
    if data["domain"] is None and not nodes:
        return
    down = not ready and (data["domain"] == "DOWN" or bool(nodes))
    steady = j.steady("imex.domain", here, down, limits().imex.run)
    if steady is not None:
        states = sorted({node.get("status") or "unknown" for node in nodes.values()})
        j.state("imex.domain", here, steady, severity=Severity.WARNING, action=Action.RESTART_IMEX, certainty=0.8,
                facts={"domain": data["domain"], "nodes": len(nodes)},
                evidence=(f"domain={data['domain']}", f"nodes={','.join(states[:8])}"),
                summary=f"No node of the IMEX domain is ready ({len(nodes)} are listed): memory is not shared across nodes.")


def _own_daemon(j: Judge, here: Component, node: Mapping[str, Any] | None) -> None:
    if node is None or not node.get("status"):
        return
    lasts = j.lasts_s("imex.starting", here, node["status"] != "READY")
    if node["status"] == "READY" or lasts >= limits().imex.starting_s:
        j.state("imex.daemon", here, node["status"] != "READY", severity=Severity.WARNING, action=Action.RESTART_IMEX,
                evidence=(f"status={node['status']}",), facts={"status": node["status"]},
                summary=f"This node's IMEX daemon has been {node['status']} for {lasts:.0f} s.")


def _slots(j: Judge, here: Component, ready: int, wanted: int | None, data: Data) -> None:
    if wanted is None or not data["nodes"]:
        return
    steady = j.steady("imex.slots", here, ready < wanted, limits().imex.run)
    if steady is not None:
        j.state("imex.slots", here, steady, severity=Severity.WARNING, action=Action.INSPECT, suspect=Suspect.PEER, certainty=0.7,
                facts={"ready": ready, "expected": wanted}, evidence=(f"ready={ready}", f"domain={data['domain']}"),
                summary=f"{ready} nodes of the IMEX domain are ready; {wanted} are expected.")


def _row(links: Mapping[str, Mapping[str, str]], own: Any) -> tuple[str, ...]:
    row = links.get(own, {}) if own is not None else {}
    return tuple(f"{own}->{b}={seen}" for b, seen in row.items() if seen != CONNECTED)[:4]


def _pairs(paths: list[tuple[str, str]]) -> str:
    more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
    return ", ".join(f"{a} to {b}" for a, b in paths[:4]) + more


def _safe(host: str) -> str:
    return re.sub(r"[^\w.:#-]", "_", host)[:128]


def _number(index: str) -> tuple[int, str]:
    return (int(index) if index.isascii() and index.isdigit() else 1 << 30, index)

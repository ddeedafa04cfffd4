"""The patterns: which one thing explains what several parts show, each as one function that can be read, cited and tested.

What always holds:

* A pattern reads signs and the wiring, and changes nothing; the same signs in any order give the same answer.
* A GPU or node with a fatal fault of its own is never somebody's victim, and what its neighbours lose is its echo before it is
  anything else.
* What is too little for a pattern stays what it was: each part's own.

Thresholds, with where they come from: ``[correlation]`` of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sentinel.decide.faults.blame import (
    APP,
    GPU,
    IMEX,
    LEAF,
    PEER,
    SWITCH,
    Blame,
    blamed,
    count_of,
    joined,
    some,
    sure_of,
    within,
    without,
)
from sentinel.decide.faults.cover import links
from sentinel.decide.faults.culprit import is_pattern
from sentinel.decide.faults.signs import ECHOES, Sign, Sort, domain_of, links_of, rack_of
from sentinel.decide.state.picture import Picture
from sentinel.model import Action, Component, Severity, Suspect

_ELSEWHERE = (Suspect.PEER, Suspect.SWITCH)


def of_domain(p: Picture, field: str, signs: Sequence[Sign]) -> list[Blame]:
    """Everything that the signs of one NVLink domain, or of one node whose domain is unknown, amount to."""
    if all(s.sort is Sort.OWN for s in signs):
        return []  # nobody echoes it
    domain = field.partition(":")[2] if field.startswith("domain:") else ""
    own = own_faults(p, signs)
    places = {s.place for s in own}
    others = [s for s in signs if s.sort is not Sort.OWN and s.place not in places and s.node not in places]
    down = [s for s in others if s.sort is Sort.LINK or (not own and s.sort is Sort.PEER and links_of(s.finding))]
    found = [*links(p, domain, down)]
    found += lost_nodes(p, domain, own, without(others, found))
    left = [s for s in without(others, found) if s.sort in (Sort.PEER, Sort.IMEX) and s.finding.suspect in _ELSEWHERE]
    left += [s for s in signs if s.sort is Sort.LINK and s.place in places]  # a dead GPU's own links
    own = own or lone_link(without(others, found))
    return within(field, joined([*found, *echoes(p, domain, own, found, left)]))


def own_faults(p: Picture, signs: Iterable[Sign]) -> list[Sign]:
    """Fatal faults of a GPU or node itself, one for each, oldest first; none of a GPU that two nodes claim."""
    first: dict[str, Sign] = {}
    own = [s for s in signs if s.sort is Sort.OWN]
    for s in sorted(own, key=lambda s: (s.finding.at, str(s.finding.component), s.finding.check)):
        if not p.topology.disputed(s.finding.component):
            first.setdefault(s.place, s)
    return list(first.values())


def lone_link(signs: Iterable[Sign]) -> list[Sign]:
    """Where links of one GPU only are down, too few for a pattern, beside no other fault: what its peers lose, they lose to it."""
    down = sorted((s for s in signs if s.sort is Sort.LINK), key=lambda s: (s.finding.at, str(s.finding.component)))
    return down[:1] if len({s.place for s in down}) == 1 else []


# -- the IMEX domain --------------------------------------------------------------------------------------------------------


def lost_nodes(p: Picture, domain: str, own: Sequence[Sign], signs: Sequence[Sign]) -> Iterator[Blame]:
    """One node seen as gone by its IMEX peers: that node. Those who report it are well, and so is their domain but for it."""
    about = [s for s in signs if s.sort is Sort.IMEX]
    accused: dict[str, list[Sign]] = {}
    for s in about:
        peer = s.finding.facts.get("peer")
        node = p.topology.node_at(peer) if s.finding.check == "imex.peer" and isinstance(peer, str) else ""
        if node and domain and node != s.node and domain_of(p, node) == domain:
            accused.setdefault(node, []).append(s)
    dead = {s.node: s for s in own if s.finding.component.gpu is None}
    lost: dict[str, tuple[list[Sign], float]] = {}
    for node, says in accused.items():
        hears = sum(1 for n in p.topology.nodes_of_domain(domain) if n != node and (v := p.nodes.get(n)) is not None and v.reported)
        reporters = {s.node for s in says}
        if node in dead or len(reporters) >= max(2.0, p.policy.correlation.imex_reporters * hears):
            lost[node] = (says, min(0.95, len(reporters) / max(hears, 1)))
    for node, (says, sure) in sorted(lost.items()):
        # The domain's own verdicts (too few slots, paths, DEGRADED) are explained by the one node that is gone.
        more = [s for s in about if s.finding.check != "imex.peer" and (s.node == node or (len(lost) == 1 and s.node not in lost))]
        if node in dead:
            yield Blame(dead[node].finding, (*says, *more), 1.0)
            continue
        said = f"{node} is lost to {len({s.node for s in says})} of its IMEX peers: look there, those who report it are well"
        yield blamed(p, IMEX, Component(node=node), [*says, *more], sure=sure, said=said)


# -- echoes of somebody's fault ---------------------------------------------------------------------------------------------


def echoes(
    p: Picture, domain: str, own: Sequence[Sign], found: Sequence[Blame], signs: Sequence[Sign]
) -> Iterator[Blame]:
    """What peers of a fault see: that one's GPU; without a culprit, a peer's fault somewhere in the domain."""
    theirs = [s for s in own if s.finding.check != "node.unreachable"]  # a cut cable to the controller hurts no peer
    places = {s.place for s in own}
    for s in theirs:
        mine = tuple(e for e in signs if e.place == s.place)
        if mine:
            yield Blame(s.finding, mine, 1.0)
    others = [e for e in signs if e.place not in places]
    seen = [e for e in others if e.sort is Sort.PEER]  # IMEX tells of nodes, not of GPUs
    structural = [b for b in found if b.finding.check in (SWITCH, GPU)]
    if theirs:
        seen = [e for e in seen if not _told_long_before(p, e, theirs[0])]
    if seen and theirs and (len(theirs) == 1 or not structural):
        yield Blame(theirs[0].finding, tuple(seen), round(1 / len(theirs), 2))
    elif seen and structural:
        best = max(structural, key=lambda b: (len(b.members), str(b.finding.component)))
        yield best._replace(members=tuple(seen))
    else:
        seen = []
    others = without(others, [Blame(others[0].finding, tuple(seen), 1.0)]) if seen else others
    if others and domain:
        nodes = sorted({e.node for e in others})
        said = f"{count_of(nodes, 'node')} of NVLink domain {domain} ({some(nodes)}) accuse a peer or a switch; no culprit is known"
        yield blamed(p, PEER, Component(node=domain), others, sure=0.3, said=said, suspect=Suspect.PEER)


def _told_long_before(p: Picture, sign: Sign, culprit: Sign) -> bool:
    """Whether it had an open explanation before this fault can have caused it: what is new is not to blame for what is old."""
    incident = p.incidents.get(sign.incident)
    if incident is None or incident.closed_at is not None or not is_pattern(incident):
        return False
    return incident.opened_at < culprit.at - p.policy.correlation.window


# -- rails ------------------------------------------------------------------------------------------------------------------


def rails(p: Picture, field: str, signs: Sequence[Sign]) -> list[Blame]:
    """The same rail down on many nodes: the leaf switch at which they end, or what their rail shares where no leaf is known."""
    rules = p.policy.correlation
    kind, _, name = field.partition(":")
    if kind == "leaf":
        nodes = {s.node for s in signs}
        known = p.topology.nodes_of_leaf(name)
        if len(nodes) < max(float(rules.nodes_of_leaf), rules.leaf_share * len(known)):
            return []
        sure = min(0.95, len(nodes) / max(len(known), 1))
        said = f"{len(nodes)} of the {len(known)} nodes at leaf switch {name} have lost that rail: the leaf, not the nodes"
        return within(field, [blamed(p, LEAF, Component(node=name), signs, sure=sure, said=said)])
    racks: dict[str, list[Sign]] = {}
    for s in signs:
        racks.setdefault(rack_of(p, s.node), []).append(s)
    hit = [s for rack, on in racks.items() if rack and len({s.node for s in on}) >= rules.nodes_of_leaf for s in on]
    if not hit:
        return []
    nodes = {s.node for s in hit}
    said = f"{name} has lost its link on {len(nodes)} nodes ({some(sorted(nodes))}) at once; no leaf switch is configured for it"
    sure = min(0.5, sure_of(len(nodes), rules.nodes_of_leaf))
    return within(field, [blamed(p, LEAF, Component(node=field), hit, sure=sure, said=said)])


# -- applications -----------------------------------------------------------------------------------------------------------


def applications(p: Picture, field: str, signs: Sequence[Sign], culprits: Callable[[str], Sequence[Sign]]) -> list[Blame]:
    """One application's end: the serving group whose ranks it struck, or an application on so many trays.

    ``culprits``: the fresh fatal faults of a domain. Channels torn down beside one are its echo; an application that ends on many
    trays, some of them beside one, has ended because of it.
    """
    where = {s.node: domain_of(p, s.node) for s in signs}
    trays: dict[str, set[str]] = {}
    for node, domain in where.items():
        if domain:
            trays.setdefault(domain, set()).add(node)
    spread = {d for d, nodes in trays.items() if len(nodes) >= p.policy.correlation.app_trays}
    struck = {d: culprits(d) for d in sorted(trays)}
    first = {d: own[0] for d, own in struck.items() if own}
    causes = {d: s for d, s in first.items() if d in spread}
    told: dict[str, tuple[Sign, list[Sign]]] = {}
    rest: list[Sign] = []
    for s in signs:
        domain = where[s.node]
        only = next(iter(causes.values())) if len(causes) == 1 and domain in spread else None
        cause = first.get(domain) if s.finding.check in ECHOES or domain in spread else None
        cause = cause or only
        if cause is not None:
            told.setdefault(str(cause.finding.component), (cause, []))[1].append(s)
        else:
            rest.append(s)
    found = [Blame(cause.finding, tuple(members), 1.0) for cause, members in told.values()]
    storm = [s for s in rest if where[s.node] in spread]
    group = _group(p, storm)
    if storm and not group:
        nodes = {s.node for s in storm}
        said = f"an application ended on {len(nodes)} trays at once: one program, not that many faults"
        sure = sure_of(len(nodes), p.policy.correlation.app_trays)
        found.append(blamed(p, APP, Component(node="application"), storm, sure=sure, said=said, **_OF_APP))
        rest = [s for s in rest if where[s.node] not in spread]
    groups: dict[str, list[Sign]] = {}
    for s in rest:
        groups.setdefault(_group(p, [s]), []).append(s)
    for name, members in sorted(groups.items()):
        if name and len({s.place for s in members}) > 1:
            said = f"{name} ended on {len({s.place for s in members})} of its GPUs at once: its program, not that many faults"
            there = p.workers[name].nodes or (members[0].node,)
            place = Component(node=there[0], device=f"worker@{name}")
            found.append(blamed(p, APP, place, members, sure=0.9, said=said, **_OF_APP))
    return within(field, found)


_OF_APP: dict[str, Any] = {"severity": Severity.INFO, "action": Action.RESTART_WORKER, "suspect": Suspect.APP}


def _group(p: Picture, signs: Sequence[Sign]) -> str:
    """The one serving group whose ranks cover all of them; "" none, or several share them."""
    each = [frozenset(w.name for w in p.touching(s.finding.component)) for s in signs]
    both = frozenset.intersection(*each) if each else frozenset()
    return next(iter(both)) if len(both) == 1 else ""

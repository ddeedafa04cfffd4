"""Which links are down, and the fewest GPUs, cable cartridges and switches that explain it.

This module exists so that the covering of links by culprits, the one pattern that is more than a count, stands by itself. What
always holds: the explanation that covers most wins, and each sign is explained once: seventy-two GPUs that have lost six links
each are six switch ASICs, not seventy-two GPUs; what is too little for any of the three stays unexplained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sentinel.decide.faults.blame import CARTRIDGE, GPU, SWITCH, Blame, blamed, some, sure_of
from sentinel.decide.faults.signs import Sign, links_of
from sentinel.decide.rules.policy import Correlation
from sentinel.decide.state.picture import Picture
from sentinel.model import Action, Component, Severity

SWITCHES = "switches"  # more than _SWITCHES of a domain at once: their power or their fabric manager
_SWITCHES = 2

Cells = dict[tuple[str, int], list[Sign]]  # (GPU, link) → what says that it is down


class _Option(NamedTuple):
    check: str
    where: Component
    cells: frozenset[tuple[str, int]]
    gpus: int
    sure: float
    sentence: str
    facts: Mapping[str, Any]


def links(p: Picture, domain: str, signs: Sequence[Sign]) -> Iterator[Blame]:
    """The fewest GPUs, cartridges and switches that explain which links are down: the one that covers most, then the next."""
    rules, left = p.policy.correlation, _cells(signs)
    chosen: list[_Option] = []
    while left:
        options = [*_gpus(left, rules), *_cartridges(left, rules), *_asics(p, domain, left, rules)]
        if not options:
            break
        taken: set[tuple[str, int]] = set()
        for best in sorted(options, key=lambda o: (-len(o.cells), _RANK.index(o.check), str(o.where))):
            if taken & best.cells:
                break  # what is left of it may be too little: count again
            chosen.append(best)
            taken |= best.cells
        left = {cell: on for cell, on in left.items() if cell not in taken}
    chosen = _trays(domain, chosen)
    by_cell = {cell: n for n, o in enumerate(chosen) for cell in o.cells}
    shares: dict[int, list[Sign]] = {}
    for s in signs:  # each sign to the one that explains most of what it says
        told = Counter(by_cell[cell] for cell in _of(s) if cell in by_cell)
        if told:
            shares.setdefault(min(told, key=lambda n: (-told[n], n)), []).append(s)
    for n, members in sorted(shares.items()):
        o = chosen[n]
        gpu = {"severity": Severity.FATAL, "action": Action.RESET_GPU, "certainty": 0.9} if o.check == GPU else {}
        yield blamed(p, o.check, o.where, members, sure=o.sure, said=o.sentence, facts=o.facts, **gpu)


_RANK = (GPU, CARTRIDGE, SWITCH)


def _of(s: Sign) -> list[tuple[str, int]]:
    place = s.place
    return [(place, n) for n in links_of(s.finding)]


def _cells(signs: Iterable[Sign]) -> Cells:
    cells: Cells = {}
    for s in signs:
        for cell in _of(s):
            cells.setdefault(cell, []).append(s)
    return cells


def _gpus(cells: Cells, rules: Correlation) -> Iterator[_Option]:
    """Many links down on one GPU: that GPU."""
    down: dict[str, set[int]] = {}
    for gpu, n in cells:
        down.setdefault(gpu, set()).add(n)
    for gpu, mine in down.items():
        if len(mine) >= rules.links_of_gpu:
            said = f"{len(mine)} NVLinks of {gpu} are down and no switch or cartridge explains them: the GPU itself"
            yield _Option(GPU, Component.parse(gpu), frozenset((gpu, n) for n in mine), 1, 0.9, said, {"links": sorted(mine)})


def _cartridges(cells: Cells, rules: Correlation) -> Iterator[_Option]:
    """The same links down on several GPUs of one tray and nowhere else: that tray's cables."""
    down: dict[str, set[int]] = {}
    where: dict[int, set[str]] = {}
    for gpu, n in cells:
        down.setdefault(gpu, set()).add(n)
        where.setdefault(n, set()).add(_node(gpu))
    alike: dict[tuple[str, frozenset[int]], list[str]] = {}
    for gpu, mine in down.items():
        alike.setdefault((_node(gpu), frozenset(mine)), []).append(gpu)
    for (node, same), gpus in alike.items():
        if len(gpus) >= rules.gpus_of_cartridge and all(where[n] == {node} for n in same):
            told = ", ".join(map(str, sorted(same)))
            said = f"the same NVLinks ({told}) are down on {len(gpus)} GPUs of {node} and on no other tray: its cable cartridge"
            option = frozenset((g, n) for g in gpus for n in same)
            place = Component(node=node, device="nvlink-cartridge")
            sure = sure_of(len(gpus), rules.gpus_of_cartridge)
            yield _Option(CARTRIDGE, place, option, len(gpus), sure, said, {"links": sorted(same)})


def _asics(p: Picture, domain: str, cells: Cells, rules: Correlation) -> Iterator[_Option]:
    """One link index down on many GPUs of at least two trays: the switch ASIC that they all end at."""
    ends: dict[str, set[tuple[str, int]]] = {}
    for gpu, n in cells:
        asic = p.topology.asic(_node(gpu), n) if domain else ""
        if asic:
            ends.setdefault(asic, set()).add((gpu, n))
    for asic, there in ends.items():
        gpus = {gpu for gpu, _ in there}
        trays = {_node(gpu) for gpu in gpus}
        if len(gpus) >= rules.gpus_of_asic and len(trays) > 1:
            name = asic.removeprefix(f"{domain}/")
            told = ", ".join(map(str, sorted({n for _, n in there})))
            said = f"NVLink {told} is down on {len(gpus)} GPUs of {len(trays)} trays: the switch ASIC {name} where they end"
            place = Component(node=domain, device=name)
            sure = sure_of(len(gpus), rules.gpus_of_asic)
            yield _Option(SWITCH, place, frozenset(there), len(gpus), sure, said, {"asics": [asic]})


def _trays(domain: str, chosen: list[_Option]) -> list[_Option]:
    """ASICs of one tray (named "tray/asic") are that tray; more than two units at once are what all switches share."""
    asics = [o for o in chosen if o.check == SWITCH]
    if len(asics) < 2:
        return chosen
    units: dict[str, list[_Option]] = {}
    for o in asics:
        units.setdefault(o.where.device.partition("/")[0], []).append(o)
    if len(units) > _SWITCHES:
        units = {SWITCHES: asics}
    return [*(o for o in chosen if o.check != SWITCH), *(_together(domain, name, each) for name, each in sorted(units.items()))]


def _together(domain: str, name: str, each: list[_Option]) -> _Option:
    if len(each) == 1:
        return each[0]
    names = sorted(o.where.device for o in each)
    gpus = max(o.gpus for o in each)
    what = "what the switches share, power or their fabric manager" if name == SWITCHES else f"the switch tray {name}"
    said = f"the links to {len(each)} switch ASICs ({some(names)}) are down on up to {gpus} GPUs each: {what}"
    cells = frozenset(c for o in each for c in o.cells)
    facts = {"asics": [f"{domain}/{n}" for n in names]}
    return _Option(SWITCH, Component(node=domain, device=name), cells, gpus, max(o.sure for o in each), said, facts)


def _node(place: str) -> str:
    return place.partition("/")[0]

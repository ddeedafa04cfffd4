"""Which name of the configuration goes with which identity that the hardware reports: what most nodes carry together.

This module exists because a site calls a rack ``a01`` and its GPUs call it ``1820325000001``, and nobody writes down that the two
are one. What always holds: what most nodes agree on counts, among equals what holds the first node by name, so that the order in
which reports arrive does not matter; a name that is itself a reported identity of one of its nodes means that identity.
"""

from __future__ import annotations

from collections.abc import Iterable


class Pairing:
    def __init__(self) -> None:
        self._of: dict[str, tuple[str, str]] = {}  # node → (name, identity)
        self._by_name: dict[str, dict[str, set[str]]] = {}  # name → identity → nodes that carry both
        self._by_identity: dict[str, dict[str, set[str]]] = {}  # the same the other way round; "" is a name here: none given
        self._identity: dict[str, str] = {}
        self._name: dict[str, str] = {}

    def identity(self, name: str) -> str:
        """What most nodes of this name report; "" nothing yet."""
        return self._identity.get(name, "")

    def name(self, identity: str) -> str:
        """What most nodes with this identity are called; "" none of them has a name."""
        return self._name.get(identity, "")

    def nodes(self, name: str, identity: str) -> frozenset[str]:
        """The nodes that carry both."""
        return frozenset(self._by_name.get(name, {}).get(identity, ()))

    def put(self, node: str, name: str, identity: str) -> set[str]:
        """A node carries these ("": not known). Returns the nodes for which ``identity`` or ``name`` answers otherwise now."""
        before, now = self._of.get(node, ("", "")), (name, identity) if identity else ("", "")
        if before == now:
            return set()
        if before[1]:
            _take(self._by_identity, before[1], before[0], node)
            if before[0]:
                _take(self._by_name, before[0], before[1], node)
        if now[1]:
            self._of[node] = now
            self._by_identity.setdefault(identity, {}).setdefault(name, set()).add(node)
            if name:
                self._by_name.setdefault(name, {}).setdefault(identity, set()).add(node)
        else:
            self._of.pop(node, None)
        moved = _settle({before[0], now[0]}, self._by_name, self._identity)
        return moved | _settle({before[1], now[1]}, self._by_identity, self._name)


def _take(table: dict[str, dict[str, set[str]]], one: str, other: str, node: str) -> None:
    there = table[one]
    there[other].discard(node)
    if not there[other]:
        del there[other]
    if not there:
        del table[one]


def _settle(keys: Iterable[str], table: dict[str, dict[str, set[str]]], best: dict[str, str]) -> set[str]:
    """Judge anew what goes with each key; returns the nodes of those for which that has changed."""
    moved: set[str] = set()
    for key in keys:
        among = table.get(key, {})
        named = {other: nodes for other, nodes in among.items() if other}
        found = key if key in named else min(named, key=lambda other: (-len(named[other]), min(named[other])), default="")
        if found != best.get(key, ""):
            moved.update(*among.values())
            if found:
                best[key] = found
            else:
                del best[key]
    return moved

"""The topology: what every node and the site said about where it stands, and what contradicts what.

This module exists so that correlation asks one place what shares a part with what. What always holds: a contradiction is a finding
about the monitor, never about the hardware; a place that is reported unchanged costs one comparison.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from sentinel.decide.rack.contradictions import Contradictions
from sentinel.decide.rack.places import CLAIM_S, NOWHERE, Places
from sentinel.model import Finding, Incident, Place


class Topology(Places):
    """All that ``Places`` answers, and the findings that learning brings."""

    def __init__(self) -> None:
        super().__init__()
        self.contradictions = Contradictions(self)

    def restore(self, incidents: Iterable[Incident]) -> None:
        """A new leader: contradictions that an earlier one found stand until this one has heard every node they name."""
        self._again |= self.contradictions.restore(i for i in incidents if i.closed_at is None)

    def heard(self, node: str, place: Place | None, at: float) -> list[Finding]:
        """Take in what a node says of itself (None: it stands where it last said); returns what contradicts the configuration
        or another node."""
        place = self._said.get(node) if place is None else place
        if place is None:
            return []
        self._now, before = at, self._heard_at.get(node, at)
        self._heard_at[node] = at
        back = at - before > CLAIM_S
        if self._said.get(node) == place and not back and node not in self._again:
            return []
        self._said[node] = place
        known = self._places.get(node)
        merged = place if known is None else _merged(known, place, anew=node in self._booted)
        if place.gpus:
            self._booted.discard(node)
        found = []
        if merged != known or back:
            found = self.contradictions.changed(node, known, merged, at)
            self._learn(node, known or NOWHERE, merged)
        self._again.discard(node)
        found += self.contradictions.judge(node, at)
        if self.contradictions.stand(node):
            self._again.add(node)
        return found

    def forget(self, node: str) -> None:
        """A node left the fleet. What contradicted it is judged anew, and what it contradicted is over."""
        super().forget(node)
        self.contradictions.forget(node)

    def over(self, at: float) -> list[Finding]:
        """On ticks: what is over with nodes that left, since they report no more."""
        return self.contradictions.over(at)


def _merged(known: Place, said: Place, *, anew: bool) -> Place:
    """What is said now, completed by what was measured earlier. ``anew``: GPUs that are not named now are not here any more."""
    changes: dict[str, object] = {key: getattr(known, key) for key in ("ports", "addresses") if not getattr(said, key)}
    if not said.chassis:
        changes |= {"chassis": known.chassis, "slot": known.slot, "tray": known.tray, "host": known.host}
    if not said.domain:
        changes |= {"domain": known.domain, "clique": known.clique}
    named = {g.pci: g for g in said.gpus}
    if not anew or not named:
        gpus = {g.pci: g for g in known.gpus} | {g.pci: g for g in said.gpus if g.uuid}
        changes["gpus"] = tuple(gpus[pci] for pci in sorted(gpus))
    return msgspec.structs.replace(said, **changes)

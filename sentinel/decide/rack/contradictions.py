"""What two sources say differently about where something stands, as findings: once clear, until it is over, in one sentence each.

What always holds: a contradiction is about the monitor, never about the hardware, and takes nothing out of service; it is stated
with each report of its node while it stands, and stated as over often enough to count; after a change of leader it stands until
every node that it names has been heard again; what nobody said contradicts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from sentinel.decide.rack.places import Places
from sentinel.model import Action, Component, Finding, Incident, Kind, Place, Severity, Suspect

DRIFT, DUPLICATE, SAME_TRAY, SPLIT = "topology.drift", "topology.duplicate_gpu", "topology.same_tray", "topology.split_domain"
CHANGED = "topology.changed"
TIMES = 8  # how often it is said that one is over: more than a policy asks for (timing.clear_confirm) to believe it
AGREE = 2  # nodes of a rack that must agree on its chassis before a third one is called wrong: an HGX node is a chassis by itself


class Said(NamedTuple):
    """One contradiction of a node: the sentence, its parts, and the other nodes that it rests on."""

    sentence: str
    others: Sequence[str] = ()
    parts: Sequence[str] = ()


class Contradictions:
    def __init__(self, places: Places) -> None:
        self._at = places
        self._standing: dict[str, dict[str, Finding]] = {}  # node → check → as it is said
        self._ended: dict[str, dict[str, tuple[Finding, int]]] = {}  # the same, with how often it is still to be said
        self._left: set[str] = set()  # nodes that report no more

    def judge(self, node: str, at: float) -> list[Finding]:
        """What is to be said of this node with this report."""
        self._left.discard(node)
        now = dict(self._found(node))
        standing, ended = self._standing.setdefault(node, {}), self._ended.setdefault(node, {})
        for check, said in now.items():
            ended.pop(check, None)
            if check not in standing or standing[check].summary != said.sentence:
                standing[check] = self._finding(node, check, said, at)
        for check in [c for c in standing if c not in now]:
            if all(map(self._at.was_heard, standing[check].facts.get("nodes", ()))):
                ended[check] = (standing.pop(check), TIMES)
        found = [*(standing[check] for check in now), *self._over(node, at)]
        if not standing:
            del self._standing[node]
        return found

    def stand(self, node: str) -> bool:
        """Whether something is to be said of it with its next report."""
        return node in self._standing or node in self._ended

    def of(self, node: str) -> list[Finding]:
        """What stands against it now."""
        return list(self._standing.get(node, {}).values())

    def of_domain(self, node: str) -> bool:
        """Whether something stands against its NVLink domain, or its being one tray there: nothing is concluded from either."""
        standing = self._standing.get(node)
        if not standing:
            return False
        drift = standing[DRIFT].evidence if DRIFT in standing else ()
        return SPLIT in standing or SAME_TRAY in standing or any("NVLink domain" in part for part in drift)

    def restore(self, incidents: Iterable[Incident]) -> set[str]:
        """Take over what open incidents rest on; returns the nodes that it is about."""
        mine = [f for i in incidents for f in i.findings if f.check.startswith("topology.") and f.kind is Kind.STATE]
        for finding in mine:
            self._standing.setdefault(finding.component.node, {})[finding.check] = finding
        return {f.component.node for f in mine}

    def forget(self, node: str) -> None:
        """It left the fleet: whatever stood against it is over."""
        ended = self._ended.setdefault(node, {})
        ended.update({check: (finding, TIMES) for check, finding in self._standing.pop(node, {}).items()})
        if ended:
            self._left.add(node)
        else:
            del self._ended[node]

    def over(self, at: float) -> list[Finding]:
        """What is to be said of nodes that left."""
        return [f for node in sorted(self._left) for f in self._over(node, at)] if self._left else []

    def _over(self, node: str, at: float) -> list[Finding]:
        ended = self._ended.get(node, {})
        found = [msgspec.structs.replace(f, present=False, at=at) for f, _ in ended.values()]
        for check, (finding, times) in list(ended.items()):
            ended[check] = (finding, times - 1)
            if times <= 1:
                del ended[check]
        if not ended:
            self._ended.pop(node, None)
            self._left.discard(node)
        return found

    # -- what has changed ---------------------------------------------------------------------------------------------

    def changed(self, node: str, known: Place | None, now: Place, at: float) -> list[Finding]:
        """What a node says otherwise than before, or has from another node, as one event; nothing where it says nothing new."""
        parts = [] if known is None else list(_moved(known, now))
        before = {g.pci: g.uuid for g in known.gpus} if known else {}
        for gpu in now.gpus:
            was, came = before.get(gpu.pci, ""), self._at.former(gpu.uuid, node) if gpu.uuid else ""
            if gpu.uuid and gpu.uuid != was and (was or came):
                where = (f", was {was}" if was else "") + (f"; it was in {came} before" if came else "")
                parts.append(f"the GPU at {gpu.pci} is {gpu.uuid}{where}")
        if not parts:
            return []
        sentence = f"{node} has changed since it was last heard: {'; '.join(parts)}."
        said = Said(sentence, parts=parts)
        return [self._finding(node, CHANGED, said, at, kind=Kind.EVENT, severity=Severity.INFO, action=Action.NONE)]

    # -- what contradicts ---------------------------------------------------------------------------------------------

    def _found(self, node: str) -> Iterator[tuple[str, Said]]:
        place = self._at.reported(node)
        drift = [*self._rack(node, place), *self._domain(node, place), *self._tray(node, place), *self._addresses(node, place)]
        if drift:
            sentence = f"{node} does not stand where the configuration says: {'; '.join(s.sentence for s in drift)}."
            yield DRIFT, Said(sentence, [o for s in drift for o in s.others], [s.sentence for s in drift])
        yield from self._duplicates(node, place)
        others = self._at.on_tray(node)
        if others:
            both = _and([node, *others])
            why = "one of them is not where it says, or has two names"
            yield SAME_TRAY, Said(f"{both} report the same tray {place.tray} of the same chassis {place.chassis}: {why}.", others)
        away = [g for g in place.gpus if g.domain]
        if away:
            told = ", ".join(f"{g.pci} in {g.domain}" for g in away)
            yield SPLIT, Said(f"The GPUs of {node} are in different NVLink domains: {told}, the others in {place.domain}.")

    def _rack(self, node: str, place: Place) -> Iterator[Said]:
        rack, racks, chassis = self._at.configured(node).rack, self._at.racks, place.chassis
        if not rack or not chassis:
            return
        wanted, called = racks.identity(rack), racks.name(chassis)
        agree = sorted(racks.nodes(rack, wanted) - {node})
        there = sorted(racks.nodes(called, chassis) - {node})
        if chassis != wanted and len(agree) >= AGREE:
            where = f", which is rack {called}" if called and called != rack else ""
            yield Said(f"it reports chassis {chassis}{where}, and {_some(agree)} of its rack {rack} report {wanted}", agree[:3])
        elif called != rack and len(there) >= AGREE:
            yield Said(f"it is called rack {rack}, and reports chassis {chassis} like {_some(there)} of rack {called}", there[:3])

    def _domain(self, node: str, place: Place) -> Iterator[Said]:
        name, cluster = self._at.named(node), place.domain
        if not name or not cluster:
            return
        partition = cluster if place.clique is None else f"{cluster}.{place.clique}"
        wanted, called = self._at.clusters.identity(name), self._at.partitions.name(partition)
        agree = sorted(self._at.clusters.nodes(name, wanted) - {node})
        there = sorted(self._at.partitions.nodes(called, partition) - {node})
        if cluster != wanted and agree:
            yield Said(f"it reports NVLink domain {cluster}, and {_some(agree)} of its domain {name} report {wanted}", agree[:3])
        elif called != name and there:
            yield Said(f"it is called NVLink domain {name}, and is in {partition} with {_some(there)} of {called}", there[:3])

    def _tray(self, node: str, place: Place) -> Iterator[Said]:
        tray = self._at.configured(node).tray
        if tray is not None and place.tray is not None and tray != place.tray:
            yield Said(f"it reports tray {place.tray}, and not {tray}")

    def _addresses(self, node: str, place: Place) -> Iterator[Said]:
        held = ((a, self._at.holder(a)) for a in place.addresses)
        for address, holder in islice(((a, h) for a, h in held if h and h != node), 3):
            yield Said(f"it has the address {address}, which is that of {holder}")

    def _duplicates(self, node: str, place: Place) -> Iterator[tuple[str, Said]]:
        shared = [(g, others) for g in place.gpus if g.uuid and (others := self._at.claimants(g.uuid, node))]
        if not shared:
            return
        first, others = shared[0]
        more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        yield DUPLICATE, Said(
            f"{_and([node, *others])} claim the same GPU, {first.uuid} at {first.pci} of {node}{more}: until one of them does not, "
            "no doubt about it takes anything out of service.",
            list(dict.fromkeys(o for _, each in shared for o in each)),
            [f"{g.uuid} at {g.pci}, also in {', '.join(each)}" for g, each in shared],
        )

    def _finding(
        self, node: str, check: str, said: Said, at: float, *, kind: Kind = Kind.STATE,
        severity: Severity = Severity.WARNING, action: Action = Action.FIX_MONITOR,
    ) -> Finding:  # fmt: skip
        return Finding(
            id=f"{node}:{check}:{at:.3f}",
            check=check,
            component=Component(node=node),
            at=at,
            kind=kind,
            severity=severity,
            action=action,
            suspect=Suspect.MONITOR,
            summary=said.sentence,
            evidence=tuple(said.parts[:20]),
            facts={"nodes": list(said.others)} if said.others else {},
        )


def _moved(known: Place, now: Place) -> Iterator[str]:
    for field in ("chassis", "slot", "tray", "domain", "clique"):
        was, found = getattr(known, field), getattr(now, field)
        if was not in ("", None) and found not in ("", None) and was != found:
            yield f"{field} {found}, was {was}"


def _and(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

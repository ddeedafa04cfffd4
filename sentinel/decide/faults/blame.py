"""What a pattern answers: whom it blames, which signs that explains, how sure it is, and the sentence.

This module exists so that every pattern says what it found in the same way. What always holds: the finding of a pattern names
its culprit as a component and has a check ``rack.*``, for which the policy has a rule like for any other; its words do not
depend on the order of the signs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sentinel.decide.faults.signs import Sign
from sentinel.decide.state.picture import Picture
from sentinel.model import Action, Component, Finding, Severity

GPU, SWITCH, CARTRIDGE = "rack.gpu_nvlink", "rack.nvlink_switch", "rack.nvlink_cartridge"
IMEX, LEAF, APP, PEER = "rack.imex_peer", "rack.leaf_switch", "rack.app_fault", "rack.peer_fault"
_NAMED = 4  # of many names, how many a sentence tells
_SHOWN = 5  # signs whose first line goes along


class Blame(NamedTuple):
    """One explanation. ``finding``: what is said of the culprit, its own fault or a pattern's; the policy's rule for it decides."""

    finding: Finding
    members: tuple[Sign, ...]
    confidence: float


def blamed(
    p: Picture, check: str, where: Component, members: Sequence[Sign], *,
    sure: float, said: str, facts: Mapping[str, Any] | None = None, **words: Any,
) -> Blame:  # fmt: skip
    """A pattern's answer. ``said``: the sentence without its full stop; ``words``: what else the finding says."""
    by_place = sorted(members, key=lambda s: (str(s.finding.component), s.finding.check))
    fields: dict[str, Any] = {"severity": Severity.WARNING, "action": Action.INSPECT, **words}
    finding = Finding(
        id=f"{where}:{check}",
        check=check,
        component=where,
        at=p.now,
        summary=f"{said}.",
        evidence=tuple(f"{s.finding.component}: {line}" for s in by_place[:_SHOWN] for line in s.finding.evidence[:1]),
        facts={"nodes": len({s.node for s in members}), **(facts or {})},
        **fields,
    )
    return Blame(finding, tuple(by_place), round(sure, 2))


def within(field: str, blames: Sequence[Blame]) -> list[Blame]:
    """With each pattern's own finding the field that it was found in, so that a later leader knows."""
    for b in blames:
        if b.finding.check.startswith("rack."):
            b.finding.facts["field"] = field
    return list(blames)


def joined(blames: Iterable[Blame]) -> list[Blame]:
    """One blame for each culprit."""
    found: dict[tuple[Component, str], Blame] = {}
    for b in blames:
        key = (b.finding.component, b.finding.check)
        old = found.get(key)
        more = old is not None and b._replace(members=(*old.members, *b.members), confidence=min(old.confidence, b.confidence))
        found[key] = more or b
    return list(found.values())


def without(signs: Iterable[Sign], found: Iterable[Blame]) -> list[Sign]:
    explained = {s.key for b in found for s in b.members}
    return [s for s in signs if s.key not in explained]


def sure_of(many: int, enough: int) -> float:
    """How sure a count makes: 0.6 when it is just enough, more the further it goes beyond."""
    return round(1.0 - 0.4 * enough / max(many, enough), 2)


def some(names: Collection[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:_NAMED]) + (f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else "")


def count_of(names: Collection[str], what: str) -> str:
    return f"{len(names)} {what}{'' if len(names) == 1 else 's'}"

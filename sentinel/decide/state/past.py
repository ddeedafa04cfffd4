"""What the last day says: the same unit failing again is the unit's fault, however harmless or well mended each time was.

This module exists so that a GPU that fails, is reset and fails again does not go round for ever, and so that what looks like
an application's bug and always strikes one unit is looked at. The rules are those of NVSentinel's health-events-analyzer
(RepeatedXID13OnSameGPCAndTPC, RepeatedXID31OnSameGPU, RepeatedXIDErrorOnSameGPU); their numbers are the policy's
``[history]``. What always holds:

* Occurrences are read from the findings of the incidents that are kept, open or closed, and from nothing else: a new leader
  counts what the old one did. What an incident no longer keeps (beyond its first five findings and its latest fifteen) and
  what was dropped for want of room counts no more. That a group spans two nodes is soft where its GPUs are not configured.
* Occurrences less than a ``burst`` after the one before are one. A line of before the agent's first look does not count.
* An application's fault counts against a unit only when nothing else of that GPU, its node or its group had the same in
  that burst: a program that crashes on all its ranks accuses none of them.
* When an incident of this module ends, by a person's word too, counting begins anew. A reboot does not end it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sentinel.decide.state.picture import Picture
from sentinel.model import Action, Component, Finding, Incident, Kind, Severity, Suspect

APP, FATAL = "history.app_fault", "history.fatal"
CHECKS = (APP, FATAL)

_BY_TPC, _BY_GPU = "xid.13", "xid.31"
_SHOWN = 5  # occurrences whose line and time a finding carries


class Past:
    """Turns what repeats into findings, and says when it no longer does."""

    def __init__(self, picture: Picture) -> None:
        self.p = picture
        self._standing: set[tuple[Component, str]] = set()  # what was found and has not been said to be over

    def restore(self) -> None:
        """Go on with what an earlier leader had found."""
        self._standing = {(f.component, f.check) for i in self.p.open_incidents() for f in i.findings if f.check in CHECKS}

    def judge(self, node: str, findings: Iterable[Finding]) -> Iterator[Finding]:
        """After a report's own findings are folded: what they make of the last day of their GPUs."""
        news = [f for f in findings if f.present and f.component.node == node]  # most of a snapshot is fine, and costs no more
        touched = [(_gpu(f), check) for f in news for check, counts in ((APP, _of_app), (FATAL, _of_weight)) if counts(f)]
        for gpu, check in dict.fromkeys(touched):
            found = _LOOK[check](self.p, gpu)
            if found is not None:
                self._standing.add((gpu, check))
                yield found

    def tick(self) -> Iterator[Finding]:
        """What was found and is so no longer, said until it is believed."""
        for gpu, check in sorted(self._standing):
            if _LOOK[check](self.p, gpu) is not None:
                continue
            condition = self.p.conditions.get(gpu, check)
            if condition is None or not condition.present:
                self._standing.discard((gpu, check))
            else:
                yield Finding(id=f"{gpu}:{check}", check=check, component=gpu, at=self.p.now, present=False)


def recurs(p: Picture, component: Component) -> int:
    """How often the GPU of this component has failed for good in the window, when that is too often to repair it again; else 0."""
    found = _recurring(p, Component(node=component.node, device=component.device)) if component.gpu is not None else None
    return found.count if found else 0


def worth(p: Picture, finding: Finding, fault: str) -> tuple[str, str]:
    """The fault class that a page about this finding is of, and what it asks: that of a GPU that recurs, if it does."""
    found = _recurring(p, _gpu(finding)) if _of_weight(finding) else None
    rule = p.rules.rule_for(found) if found is not None else None
    return (rule.fault, found.summary) if found is not None and rule is not None and rule.page else (fault, "")


def told(p: Picture, incident: Incident) -> bool:
    """Whether another page about the same GPU has already said that it fails again and again: one page for the fifth time."""
    if not any(f.check == FATAL for f in incident.findings):
        return False
    others = (i for i in p.incidents_on(incident.culprit.partition("/")[0]) if i is not incident and i.culprit == incident.culprit)
    return any(s.what == "paged" and s.at >= incident.opened_at for i in others for s in i.history)


def _repeating(p: Picture, gpu: Component) -> Finding | None:
    """The unit of this GPU on which an application's fault has come back alone, the most frequent one."""
    rules, since = p.policy.history, _since(p, gpu, APP)
    nodes = {gpu.node, *(g.node for w in p.touching(gpu) for g in p.gpus_of(w))}
    told = _told(p, sorted(nodes), since, of_app=True)
    best: tuple[int, str, tuple[int, ...], list[Finding]] = (0, "", (), [])
    for check in (_BY_TPC, _BY_GPU):
        units: dict[tuple[int, ...], list[Finding]] = {}
        for burst in _bursts([f for f in told if f.check == check], rules.burst):
            struck = {unit for f in burst for unit in _units(f)}
            if len(struck) == 1 and all(_gpu(f) == gpu for f in burst):
                units.setdefault(struck.pop(), []).append(burst[0])
        for unit, alone in units.items():
            if len(alone) > best[0]:
                best = (len(alone), check, unit, alone)
    times, check, unit, alone = best
    if times < rules.app_repeats:
        return None
    where = f"GPC {unit[0]}, TPC {unit[1]} of {gpu}" if unit else str(gpu)
    facts = {"xid": int(check.removeprefix("xid.")), **({"gpc": unit[0], "tpc": unit[1]} if unit else {})}
    summary = (
        f"Xid {facts['xid']} {times} times in {rules.window / 3600:g} h on {where} and nowhere else at those times: "
        "suspect the GPU, not the application; run the field diagnostics"
    )
    return _found(APP, gpu, alone, summary, facts)


def _recurring(p: Picture, gpu: Component) -> Finding | None:
    """This GPU has had fatal Xids too often for another repair."""
    rules, since = p.policy.history, _since(p, gpu, FATAL)
    told = [f for f in _told(p, [gpu.node], since, of_app=False) if _gpu(f) == gpu]
    firsts = [burst[0] for burst in _bursts(told, rules.burst)]
    if len(firsts) < rules.fatal_repeats:
        return None
    codes = ", ".join(sorted({f.check.removeprefix("xid.") for f in told}))
    summary = (
        f"fatal Xids ({codes}) {len(firsts)} times in {rules.window / 3600:g} h on {gpu}: "
        "no repair lasts, so none is made by itself any more; contact support"
    )
    return _found(FATAL, gpu, firsts, summary, {})


_LOOK = {APP: _repeating, FATAL: _recurring}


def _found(check: str, gpu: Component, times: Sequence[Finding], summary: str, facts: dict[str, Any]) -> Finding:
    return Finding(
        id=f"{gpu}:{check}",
        check=check,
        component=gpu,
        at=times[-1].at,
        severity=Severity.WARNING if check == APP else Severity.FATAL,
        action=Action.INSPECT if check == APP else Action.CONTACT_SUPPORT,
        summary=summary,
        evidence=tuple(line for f in times[-_SHOWN:] for line in f.evidence[:1]),
        count=len(times),
        facts={**facts, "occurrences": [f.at for f in times[-_SHOWN:]]},
    )


# -- what is counted ------------------------------------------------------------------------------------------------------


def _told(p: Picture, nodes: Sequence[str], since: float, *, of_app: bool) -> list[Finding]:
    """What these nodes' kept incidents hold of one sort, each occurrence once, oldest first."""
    counts = _of_app if of_app else _of_weight
    # A fatal fault counts where its incident says that it is the GPU's own: not what a switch has done to it.
    about = (i for n in nodes for i in p.incidents_on(n) if of_app or i.culprit.partition("/")[0] == n)
    found = {f.id: f for i in about for f in i.findings if f.at > since and counts(f)}
    return sorted(found.values(), key=lambda f: (f.at, f.id))


def _since(p: Picture, gpu: Component, check: str) -> float:
    """Where the window begins, or where the last incident about this ended: what has led to one counts for no other."""
    ended = (
        i.closed_at
        for i in p.incidents_on(gpu.node)
        if i.closed_at is not None and not i.merged_into and i.culprit == str(gpu) and any(f.check == check for f in i.findings)
    )
    return max(p.now - p.policy.history.window, max(ended, default=0.0))


def _bursts(told: Sequence[Finding], gap: float) -> list[list[Finding]]:
    bursts: list[list[Finding]] = []
    for f in told:
        if bursts and f.at - bursts[-1][-1].at < gap:
            bursts[-1].append(f)
        else:
            bursts.append([f])
    return bursts


def _happened(f: Finding) -> bool:
    """Something that happened once on a GPU under our eyes, and not as somebody's test."""
    about_gpu = f.component.gpu is not None and f.kind is Kind.EVENT and f.present
    return about_gpu and not f.facts.get("history") and not f.facts.get("injected")


def _of_app(f: Finding) -> bool:
    return f.check in (_BY_TPC, _BY_GPU) and _happened(f)


def _of_weight(f: Finding) -> bool:
    return f.check.startswith("xid.") and f.severity is Severity.FATAL and f.suspect is Suspect.SELF and _happened(f)


def _gpu(f: Finding) -> Component:
    return Component(node=f.component.node, device=f.component.device)


def _units(f: Finding) -> set[tuple[int, ...]]:
    """What it struck: ``()`` for the whole GPU, or each GPC and TPC that its lines name; empty where they name none."""
    if f.check == _BY_GPU:
        return {()}
    named = [*_list(f.facts.get("units")), [f.facts.get("gpc"), f.facts.get("tpc")]]
    return {tuple(u) for u in named if isinstance(u, list) and len(u) == 2 and all(isinstance(n, int) for n in u)}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []

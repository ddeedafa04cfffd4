"""What no single key of a policy can show: rules that can never match or that contradict, repairs that go in a circle.

This module exists so that a policy which does something else than its author reads in it is refused before it decides anything.
What always holds: a problem is one sentence that names the rule by number and fault, or the table and key, says what was found
and what was wanted; nothing here is a matter of taste.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from sentinel.decide.rules.policy import REPAIRS, Policy, Rule
from sentinel.model import Action, Response, Severity, Suspect, Urgency

_DECIDES = ("response", "budgeted", "deadline", "repair", "confirm", "after", "page", "page_after", "close_after", "mode", "fault")


def problems(policy: Policy) -> Iterator[str]:
    """Everything that makes this policy unusable, in the order of the file."""
    if policy.history.window > policy.timing.keep_closed:
        yield (
            f"policy: history.window of {policy.history.window:g} s looks further back than incidents are kept "
            f"(timing.keep_closed, {policy.timing.keep_closed:g} s); wanted at most that"
        )
    yield from _ladders(policy)
    for number, rule in enumerate(policy.rule, 1):
        where = f"policy: rule {number} ({rule.fault})"
        yield from (f"{where}: {problem}" for problem in _alone(rule))
        yield from (f"{where} {problem}" for problem in _unreachable(policy.rule[: number - 1], rule))


def _ladders(policy: Policy) -> Iterator[str]:
    """[repair.X] then = Y: what is tried when X did not help."""
    known = [a.value for a in (Action.RESTART_WORKER, *REPAIRS)]
    wanted = f"wanted one of {', '.join(known)}"
    for name, entry in policy.repair.items():
        if name not in known:
            yield f"policy: [repair.{name}] is no repair; {wanted}"
        if entry.then and entry.then not in known:
            yield f"policy: [repair.{name}] then: {entry.then!r} is no repair; {wanted} or \"\" for a person"
    told: set[str] = set()
    for name in policy.repair:
        path = [name]
        while (then := policy.repair[path[-1]].then if path[-1] in policy.repair else "") and then not in path:
            path.append(then)
        if then and not told & set(path):
            told |= set(path)
            circle = " then ".join([*path[path.index(then) :], then])
            yield f"policy: [repair.{then}] goes in a circle: {circle}; wanted a last repair whose then is \"\", a person"


def _alone(rule: Rule) -> Iterator[str]:
    if rule.repair != "finding" and rule.repair not in {*REPAIRS, Action.RESTART_WORKER, Action.NONE}:
        yield f"repair {rule.repair!r} is no repair; wanted one of {[a.value for a in (Action.RESTART_WORKER, *REPAIRS)]}"
    if rule.page and rule.page not in set(Urgency):
        yield f"page {rule.page!r}; wanted one of {[u.value for u in Urgency]} or \"\""
    if not rule.checks:
        yield "checks is empty, so it can never match"
    if rule.response in (Response.STEER, Response.CORDON) and rule.repair != Action.NONE:
        yield f"repair {rule.repair!r} with response {rule.response.value!r}: a worker that serves on is not repaired; wanted none"


def _unreachable(earlier: tuple[Rule, ...], rule: Rule) -> Iterator[str]:
    """Whether the rules before it leave nothing for it, each alone or all together."""
    twin = next((n for n, r in enumerate(earlier, 1) if _match(r) == _match(rule)), None)
    if twin is not None:
        differs = next((k for k in _DECIDES if getattr(earlier[twin - 1], k) != getattr(rule, k)), None)
        other = f"rule {twin} ({earlier[twin - 1].fault})"
        if differs is None:
            yield f"can never match: {other} is the same rule"
        else:
            mine, theirs = _written(getattr(rule, differs)), _written(getattr(earlier[twin - 1], differs))
            yield f"contradicts {other}: both match the same, one says {differs} {theirs} and the other {mine}; wanted one of them"
        return
    takers: set[int] = set()
    sure = [(n, r) for n, r in enumerate(earlier, 1) if r.certainty <= rule.certainty]
    for check in rule.checks:
        over = [(n, r) for n, r in sure if any(_covers(g, check) for g in r.checks)]
        for kind in product(rule.severity or Severity, rule.action or Action, rule.suspect or Suspect):
            taker = next((n for n, r in over if _takes(r, *kind)), None)
            if taker is None:
                return
            takers.add(taker)
    if takers:
        names = " and ".join(f"rule {n} ({earlier[n - 1].fault})" for n in sorted(takers))
        yield f"can never match: {names} {'takes' if len(takers) == 1 else 'take'} all it would take"


def _match(rule: Rule) -> tuple[Any, ...]:
    return (set(rule.checks), set(rule.severity), set(rule.action), set(rule.suspect), rule.certainty)


def _takes(rule: Rule, severity: Severity, action: Action, suspect: Suspect) -> bool:
    return (
        (not rule.severity or severity in rule.severity)
        and (not rule.action or action in rule.action)
        and (not rule.suspect or suspect in rule.suspect)
    )


def _covers(glob: str, other: str) -> bool:
    """Whether every name that the second glob stands for is one that the first stands for; False also where it is not sure."""
    if glob in (other, "*"):
        return True
    if not set(other) & set("*?["):
        return fnmatchcase(other, glob)
    return not set(glob) & set("?[") and "[" not in other and fnmatchcase(other, glob)  # a star takes a star in


def _written(value: object) -> str:
    return repr(value.value if hasattr(value, "value") else value)

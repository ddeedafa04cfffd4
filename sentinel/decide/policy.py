"""The rules as typed data: one readable file, checked on load, consulted in order.

This module exists so that what sentinel does about a fault can be read, cited and changed in one place. What always holds:
a policy that cannot be used is refused as a whole, in one sentence that names the rule; a finding is decided by the first
rule that matches it; a finding that no rule matches is only noted.
"""

from __future__ import annotations

import pkgutil
import re
import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Annotated, Any, get_args

import msgspec

from sentinel.decide.policy_check import REPAIRS, problems
from sentinel.durations import Duration, parse_duration
from sentinel.model import Action, Finding, Response, Severity, Suspect


class PolicyError(Exception):
    """The policy cannot be used; the sentence says which rule or key, what was found and what was wanted."""


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the policy file."""


Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class Mode(StrEnum):
    """How far sentinel goes by itself."""

    OBSERVE = "observe"  # writes down what it would have done; nobody is paged, nothing is taken out
    ADVISE = "advise"  # pages, with the command that would do it; nothing is taken out
    ENFORCE = "enforce"

    @property
    def rank(self) -> int:
        return list(Mode).index(self)


class Timing(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    silent_after: Duration
    silent_page_after: Duration
    clear_confirm: Count
    verify_deadline: Duration
    retry: Duration
    unknown_tries: Count
    repair_memory: Duration
    repair_tries: Count
    keep_closed: Duration


class Hysteresis(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    flap_count: Count
    flap_window: Duration
    flap_hold: Duration
    dwell: Duration
    cool_down: Duration


class Systemic(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    window: Duration
    share: Share
    min_nodes: Count


class Budget(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    window: Duration


class History(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    window: Duration
    burst: Duration
    app_repeats: Count
    fatal_repeats: Count


class Capacity(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    headroom: Annotated[float, msgspec.Meta(ge=1.0, le=100.0)]
    shift_back_after: Duration
    shift_back_step: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
    shift_back_every: Duration
    standby_idle_after: Duration
    scale_out_after: Duration


class Correlation(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    window: Duration
    links_of_gpu: Count
    gpus_of_asic: Count
    gpus_of_cartridge: Count
    imex_reporters: Share
    nodes_of_leaf: Count
    leaf_share: Share
    app_trays: Count
    settle: Duration


class Pace(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sessions_per_s: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]
    burst: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]
    steer_share: Annotated[float, msgspec.Meta(gt=0.0, lt=1.0)]  # all or nothing would be no steering


class RepairRule(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    auto: bool
    then: str = ""  # the stronger repair when this one has failed, or did not last; "" a person


class Rule(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    checks: tuple[str, ...]
    fault: str
    response: Response
    severity: tuple[Severity, ...] = ()
    action: tuple[Action, ...] = ()
    suspect: tuple[Suspect, ...] = ()
    certainty: Share = 0.0  # at least this certain
    budgeted: bool = True
    deadline: Duration = Duration(120)
    repair: str = Action.NONE.value  # an Action, or "finding"
    confirm: Count = 1
    after: Duration = Duration(0)  # the response waits until a state has lasted this long
    page: str = ""  # an Urgency, or "" for nobody
    page_after: Duration = Duration(0)
    close_after: Duration = Duration(3600)  # an event without a drain stays on record as open this long
    mode: Mode | None = None  # at most this much is done by this rule; None: as the policy's own mode says

    def matches(self, finding: Finding) -> bool:
        return (
            any(fnmatchcase(finding.check, glob) for glob in self.checks)
            and (not self.severity or finding.severity in self.severity)
            and (not self.action or finding.action in self.action)
            and (not self.suspect or finding.suspect in self.suspect)
            and finding.certainty >= self.certainty
        )


class Policy(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Mode
    timing: Timing
    hysteresis: Hysteresis
    systemic: Systemic
    correlation: Correlation
    budget: Budget
    pace: Pace
    history: History
    capacity: Capacity
    repair: dict[str, RepairRule]
    rule: tuple[Rule, ...]

    def rule_for(self, finding: Finding) -> Rule | None:
        """The first rule that matches; None: nothing is done about such a finding (an ``info`` that no rule names)."""
        return next((r for r in self.rule if r.matches(finding)), None)

    def repair_for(self, rule: Rule, finding: Finding) -> Action:
        action = finding.action if rule.repair == "finding" else Action(rule.repair)
        return action if action in (*REPAIRS, Action.RESTART_WORKER) else Action.NONE

    def automatic(self, action: Action) -> bool:
        entry = self.repair.get(action.value)
        return entry is not None and entry.auto


class Rulebook:
    """The policy's rules with a memory: a fleet repeats the same few kinds of findings by the million."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._known: dict[tuple[str, Severity, Action, Suspect, float], Rule | None] = {}

    def rule_for(self, finding: Finding) -> Rule | None:
        kind = (finding.check, finding.severity, finding.action, finding.suspect, finding.certainty)
        try:
            return self._known[kind]
        except KeyError:
            if len(self._known) > _KINDS:
                self._known.clear()
            rule = self._known[kind] = self.policy.rule_for(finding)
            return rule


_KINDS = 10_000  # kinds of findings remembered; bounded because a check's name comes from outside

def _hook(kind: type, value: Any) -> Any:
    if kind is Duration:
        return parse_duration(value)
    raise NotImplementedError(kind)


@lru_cache(maxsize=8)  # a term begins with it, and the shell has just read the same text
def load_policy(text: str) -> Policy:
    """Read and check a policy. Raises PolicyError with one sentence, the first that ``examine`` has, when it cannot be used."""
    policy, wrong = examine(text)
    if policy is None or wrong:
        raise PolicyError(wrong[0])
    return policy


def examine(text: str) -> tuple[Policy | None, list[str]]:
    """The policy as far as it can be read, and everything that is wrong with it, one sentence each."""
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # tomllib's own error, a number of 5,000 digits, brackets without end
        return None, [f"policy is not valid TOML: {error}"]
    fields = {f.name: f for f in msgspec.structs.fields(Policy)}
    wrong = [f"policy: unknown key {k!r}; wanted {_near(k, fields)}" for k in raw if k not in fields]
    wrong += [f"policy: {k} is missing" for k in fields if k not in raw]
    rules = raw.get("rule", [])
    for name in [k for k in fields if k in raw and k != "rule"]:
        wrong += _misread(raw[name], fields[name].type, name)
    if not isinstance(rules, list):
        wrong.append("policy: rule is no list; wanted [[rule]] tables")
    else:
        for number, rule in enumerate(rules, 1):
            fault = rule.get("fault", "no fault") if isinstance(rule, dict) else "no table"
            wrong += _misread(rule, Rule, f"rule {number} ({fault})")
    if wrong:
        return None, wrong
    policy = msgspec.convert(raw, Policy, dec_hook=_hook)
    return policy, list(problems(policy))


def _misread(value: Any, kind: Any, where: str) -> list[str]:
    """Why a part of the file is not what it should be; empty when it is."""
    fields = {f.name for f in msgspec.structs.fields(kind)} if isinstance(kind, type) and issubclass(kind, Table) else set()
    unknown = [k for k in value if k not in fields] if fields and isinstance(value, dict) else []
    if unknown:
        return [f"policy: {where}: unknown key {k!r}; wanted {_near(k, fields)}" for k in unknown]
    try:
        msgspec.convert(value, kind, dec_hook=_hook)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        message = re.sub(r"Object missing required field `(\w+)`", r"\1 is missing", message)
        message = re.sub(r"Object contains unknown field `(\w+)`", r"unknown key '\1'", message)
        place = re.sub(r"\[.*?\]", "", place.rstrip("`")).lstrip(".")
        choices = _choices(kind, place)
        if choices and message.startswith("Invalid enum value"):
            message = f"{message.removeprefix('Invalid enum value ')}; wanted one of {', '.join(choices)}"
        return [f"policy: {where}: {place + ': ' if place else ''}{message}"]
    return []


def _choices(kind: Any, key: str) -> list[str]:
    """The words that this key may have; empty when it is no choice."""
    field = next((f for f in msgspec.structs.fields(kind) if f.name == key), None) if hasattr(kind, "__struct_fields__") else None
    kinds = [kind] if field is None else [field.type, *get_args(field.type)]
    return [str(c) for k in kinds if isinstance(k, type) and issubclass(k, StrEnum) for c in k]


def _near(key: str, known: Iterable[str]) -> str:
    """What was perhaps meant."""
    names = sorted(known)
    close = get_close_matches(key, names, n=1)
    return repr(close[0]) if close else f"one of {', '.join(names)}"


def default_policy_text() -> str:
    """The policy shipped with the package (package data, as fixed as code)."""
    data = pkgutil.get_data("sentinel.decide", "policy.toml")
    if data is None:
        raise PolicyError("the shipped policy.toml is missing from the installation")
    return data.decode("utf-8")


@lru_cache(maxsize=1)
def default_policy() -> Policy:
    return load_policy(default_policy_text())

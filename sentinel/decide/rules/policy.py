"""The rules as typed data, consulted in order (policy.toml; ``policy_file`` reads it, ``policy_check`` refuses what cannot work).

This module exists so that what sentinel does about a fault can be read, cited and changed in one place. What always holds: a
finding is decided by the first rule that matches it; a finding that no rule matches is only noted.
"""

from __future__ import annotations

from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated

import msgspec

from sentinel.durations import Duration
from sentinel.model import Action, Finding, Response, Severity, Suspect


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


REPAIRS = (
    Action.RESET_GPU, Action.RESTART_IMEX, Action.RESTART_FABRIC_MANAGER, Action.REBOOT_NODE, Action.POWER_CYCLE,
)  # fmt: skip
_KINDS = 10_000  # kinds of findings remembered; bounded because a check's name comes from outside

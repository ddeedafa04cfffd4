"""Other rules while the decider runs: swapped in place, so that a decision replays under the rules of its time.

This module exists so that a changed policy costs nobody a leadership. What always holds:

* A text that is no usable policy changes nothing (the shell refuses it with a sentence before it comes here).
* A state that the new rules treat as the old ones did keeps its count; one that they treat otherwise is raised anew.
* Nothing bursts: what only the new rules would take out counts as having turned bad just now, so that the systemic guard sees it,
  and waits its turn within the budgets like anything that was kept in.
"""

from __future__ import annotations

from sentinel.decide.faults.incidents import Incidents, by_place
from sentinel.decide.faults.systemic import Systemic, systemic_check
from sentinel.decide.rules.policy import Mode, Policy, Rule
from sentinel.decide.rules.policy_file import PolicyError, load_policy
from sentinel.decide.state.mode import mode_of
from sentinel.decide.state.moves import GENTLE
from sentinel.decide.state.picture import ENDED, Picture
from sentinel.decide.ways.waiting import Waiting
from sentinel.model import Response


def take_policy(p: Picture, incidents: Incidents, waiting: Waiting, systemic: Systemic, text: str) -> None:
    """Go on under these rules."""
    try:
        policy = load_policy(text)
    except PolicyError:
        return
    if policy == p.policy:
        return
    old = p.policy
    p.use_policy(policy)
    p.conditions.rules_changed(p.rules.rule_for, _alike)
    drains = by_place(p.drains.values())
    waiting.rules_changed()
    for incident in p.open_incidents():
        if systemic_check(incident):
            continue
        answered = any(d.response not in GENTLE or d.state not in ENDED for d in incidents.answering(incident, drains))
        for finding, rule in incidents.demands(incident):
            newly = _takes_out(policy, rule) and not _takes_out(old, old.rule_for(finding))
            if newly and not answered and p.conditions.stands(finding):
                if rule.budgeted and p.incidents[incident.id].closed_at is None:
                    systemic.turned(rule, finding)
                waiting.take(incident, rule, finding)


def _takes_out(policy: Policy, rule: Rule | None) -> bool:
    return rule is not None and rule.response is not Response.NONE and mode_of(policy, rule) is Mode.ENFORCE


def _alike(before: object, now: object) -> bool:
    """Whether two rules ask for the same of the fleet; whom they page, and how loudly, is no reason to count anew."""
    return (
        isinstance(before, Rule)
        and isinstance(now, Rule)
        and (before.fault, before.response, before.confirm, before.budgeted, before.repair, before.after)
        == (now.fault, now.response, now.confirm, now.budgeted, now.repair, now.after)
    )

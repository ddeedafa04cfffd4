"""How far sentinel goes by itself: observe, advise or enforce, for everything and for single rules.

This module exists so that everything that acts asks one place whether it may. What always holds:

* The lesser of the policy's mode and the rule's own one counts: a rule may say less than the policy, never more.
* Below ``enforce`` nothing is taken out of service, eased, stood down or started because of what was found, and nothing that is on
  its way is made worse; so the route table is that of an untouched fleet, but for what people ask. What was begun before the mode
  was lowered goes on to its return, and what is only eased returns at once.
* In ``observe`` nobody is paged (what was paged before is still resolved); in ``advise`` a page carries the command at once,
  since nothing mends itself.
* What would have been done is a step of its incident, once, and counts against the budgets as if it had been done: the shadow
  tells what would have happened, not a storm that the budgets would have held back.
* A person's command is carried out in every mode.
"""

from __future__ import annotations

from sentinel.decide.rules.policy import Mode, Policy, Rule
from sentinel.decide.state.picture import Picture
from sentinel.model import Incident


def mode_of(policy: Policy, rule: Rule | None) -> Mode:
    """What counts for this rule: the lesser of its own mode and the policy's. None: what no single rule decides."""
    own = rule.mode if rule is not None else None
    return policy.mode if own is None else min(policy.mode, own, key=lambda m: m.rank)


def acts(p: Picture, rule: Rule | None = None) -> bool:
    """Whether sentinel may do by itself what this rule asks for; without a rule: what the policy as a whole asks for."""
    return mode_of(p.policy, rule) is Mode.ENFORCE


def quiet(p: Picture, incident: Incident, rule: Rule | None) -> bool:
    """Whether nobody is paged for this: everything that asks for it is only observed."""
    asking = [rule] if rule is not None else [p.rules.rule_for(f) for f in incident.findings]
    return all(mode_of(p.policy, r) is Mode.OBSERVE for r in asking or [None])

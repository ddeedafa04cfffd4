"""On every tick: which incidents have ended, and which are due to be paged.

What always holds: an incident ends when what it was made of is proven fine or its drains have mended it, never by mere silence;
one that somebody would still be taken out for stays; nobody is called for what a systemic incident has called for already; a worker
that waits for a person is called for, also where its rule pages nobody.
"""

from __future__ import annotations

from collections.abc import Callable

from sentinel.decide.faults.incidents import Incidents, by_place
from sentinel.decide.faults.standing import Standing, is_standing
from sentinel.decide.faults.systemic import Systemic, systemic_check
from sentinel.decide.state import past
from sentinel.decide.state.picture import Picture
from sentinel.decide.ways.waiting import Waiting
from sentinel.model import Drain, DrainState, Incident, Urgency


def tend(
    p: Picture, incidents: Incidents, waiting: Waiting, *,
    systemic: Systemic, standing: Standing, orphaned: Callable[[Incident], str],
) -> None:  # fmt: skip
    """End and page what is due. ``orphaned``: why an incident has nobody left who could say that it is over; "" while it has."""
    drains_by_place, kept, covered = by_place(p.drains.values()), waiting.incidents_kept(), systemic.covers()
    for incident in p.open_incidents():
        if is_standing(incident):
            if over := standing.over(incident):
                incidents.close(incident, over)
            continue
        if systemic_check(incident):
            over = systemic.over(incident) if p.now - incident.opened_at > p.policy.timing.silent_after else ""
            if over:
                systemic.end(incident, over)
            else:
                systemic.call(incident)
            continue
        rule = p.rules.rule_for(incident.findings[0]) if incident.findings else None
        drains, held = incidents.answering(incident, drains_by_place), incident.id in kept
        stays = rule is None or held or (bool(incidents.demands(incident)) and not drains)
        after = float("inf") if rule is None or stays else float(rule.close_after)
        why = orphaned(incident) or incidents.over(incident, after, drains, kept=held)
        if why:
            incidents.close(incident, why)
            continue
        due = rule and rule.page and not incident.paged and p.now - incident.opened_at >= rule.page_after
        if rule and due and not covered(incident) and not past.told(p, incident):
            incidents.page(incident, rule.page, rule=rule)
        elif rule and not rule.page and not incident.paged and (left := next((d for d in drains if _is_a_persons(d)), None)):
            ask = f"{left.worker} is out of service and stays out until a person brings it back"
            incidents.page(incident, Urgency.WARNING.value, ask, rule=rule)


def _is_a_persons(drain: Drain) -> bool:
    """Whether sentinel took it out and waits for a person, who must know of it whatever the rule says about pages."""
    return drain.kind == "drain" and drain.by == "sentinel" and drain.state is DrainState.OUT and not drain.returns

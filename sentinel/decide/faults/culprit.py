"""Whom a finding accuses, and whether an incident is a pattern's. Pure.

What always holds: of one fault every finding names the same culprit, however far down the part is that shows it.
"""

from __future__ import annotations

from sentinel.model import Component, Finding, Incident


def culprit_of(finding: Finding) -> str:
    """Whom a finding accuses: the GPU and not its link, the worker and not its node, else the node."""
    c = finding.component
    if c.worker is not None:
        return c.worker
    if c.gpu is not None:
        return str(Component(node=c.node, device=c.device))
    return str(c) if finding.check.startswith("rack.") else c.node  # a pattern names exactly whom it blames


def is_pattern(incident: Incident) -> bool:
    """Whether it is what several signs amount to: then its first finding speaks for it, and the others are its evidence."""
    first = incident.findings[0].check if incident.findings else ""
    return first.startswith("rack.") and incident.culprit != "fleet"

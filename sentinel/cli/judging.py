"""A recording judged: every reading as the agent would have, each finding as one story, and the verdict over all of them.

What always holds: the memory of a probe is one node's own; a line that cannot be judged is skipped, counted and named.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from probes.profile import with_hints
from sentinel.cli import recording
from sentinel.cli.looking import Look, loaded, think
from sentinel.config import AgentSettings
from sentinel.model import Action, Component, Finding, Kind, Severity


@dataclass
class Story:
    """One finding over the length of a recording: the worst word about it, and when it began and ended."""

    finding: Finding
    first_at: float
    last_at: float
    ended: bool = False


def judge(settings: AgentSettings, stream: BinaryIO, tally: recording.Tally) -> tuple[list[Story], int, float]:
    """(stories in the order they began, readings judged, Unix time of the last of them)."""
    by_name = {p.name: p for p in loaded(settings, None)}
    memories: dict[str, dict[str, dict[str, Any]]] = {}  # by node and probe
    stories: dict[str, Story] = {}
    open_now: dict[tuple[str, Component], str] = {}
    judged, last_at = 0, tally.header.at
    for number, reading in recording.readings(stream, tally):
        each = by_name.get(reading.probe)
        if each is None:
            tally.skip(number, f"probe {reading.probe!r} is not installed here")
            continue
        look = Look(each, reading)
        of_node = memories.setdefault(reading.node, {})
        think(look, of_node.setdefault(reading.probe, {}), with_hints(settings.expected, of_node))
        if look.error:
            tally.skip(number, f"probe {reading.probe}: {look.error}")
            continue
        judged += 1
        last_at = max(last_at, reading.at)
        for finding in look.findings:
            place = (finding.check, finding.component)
            if not finding.present:
                ended = stories.get(open_now.pop(place, ""))
                if ended:
                    ended.ended, ended.last_at = True, finding.at
                continue
            story = stories.setdefault(finding.id, Story(finding, finding.at, finding.at))
            story.last_at = finding.at
            if finding.severity.rank >= story.finding.severity.rank:
                story.finding = finding
            if finding.kind is Kind.STATE:
                open_now[place] = finding.id
    return list(stories.values()), judged, last_at


def verdict(findings: Iterable[Finding]) -> tuple[Severity, Action]:
    """The worst severity, and the strongest action among those that are as bad."""
    found = list(findings)
    worst = max((f.severity for f in found), key=lambda s: s.rank, default=Severity.INFO)
    return worst, max((f.action for f in found if f.severity is worst), key=lambda a: a.rank, default=Action.NONE)


def verdict_document(tally: recording.Tally, stories: list[Story], judged: int) -> dict[str, Any]:
    """What ``assess --json`` prints."""
    severity, action = verdict(s.finding for s in stories)
    found = [
        {**msgspec.to_builtins(s.finding), "component": str(s.finding.component), "first_at": s.first_at, "last_at": s.last_at,
         "ended": s.ended} for s in stories
    ]
    return {
        "recording": {"format": tally.header.sentinel_recording, "version": tally.header.version, "node": tally.header.node},
        "judged": judged,
        "could_not_look": tally.missed,  # the latest of them; how many: missed
        "missed": tally.misses,
        "skipped": [{"line": number, "why": why} for number, why in tally.skipped],  # the first of them; how many: skipped_lines
        "skipped_lines": tally.skips,
        "findings": found,
        "verdict": {"severity": severity, "action": action},
    }

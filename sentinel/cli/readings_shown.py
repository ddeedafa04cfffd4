"""Looks and verdicts for the eye: one table each.

What always holds: text from the kernel, a probe or a recording reaches the terminal with its control characters taken out.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sentinel.cli import recording
from sentinel.cli.judging import Story, verdict
from sentinel.cli.looking import ANYTHING_A_PROBE_RAISES, Look
from sentinel.model import Action, Kind, Severity

COLOUR = {Severity.FATAL: "bold red", Severity.WARNING: "yellow", Severity.INFO: "dim"}


def plain(look: Look) -> dict[str, Any]:
    """One look as ``probe --json`` prints it."""
    findings = [{**msgspec.to_builtins(f), "component": str(f.component), "present": f.present} for f in look.findings]
    return {
        "probe": look.probe.name, "ok": look.reading is not None and not look.error, "error": look.error or None,
        "reading": look.reading, "findings": findings,
    }  # fmt: skip


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def _clean(text: str) -> str:
    """Control characters of foreign text would reach the terminal as commands."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _sees(look: Look) -> list[str]:
    describe = getattr(look.probe, "describe", None)  # a probe may offer its reading in words, one line per thing
    if look.reading is None:
        return []
    if describe is None:
        data = look.reading.data
        plain = [f"{k}={v}" for k, v in data.items() if isinstance(v, (int, float, str)) and v != ""]
        return [*plain[:6], *(f"{len(v)} {k}" for k, v in data.items() if isinstance(v, (list, dict)) and v)]
    try:
        return [str(x) for x in describe(look.reading)]
    except ANYTHING_A_PROBE_RAISES as error:
        return [f"(cannot be described: {error!r})"]


def show_looks(node: str, looks: list[Look]) -> None:
    """One row per probe: what it sees, what it thinks."""
    table = Table(title=Text(_clean(f"{node}, looked at once")), title_justify="left", expand=False)
    for column in ("probe", "sees", "thinks"):
        table.add_column(column, overflow="fold")
    for look in looks:
        thinks = Text()
        present = [f for f in look.findings if f.present]
        for f in sorted(present, key=lambda f: -f.severity.rank):
            where = str(f.component).partition("/")[2] or "the node"
            head = f"{f.severity.value} {f.check} at {where}" + (f" → {f.action.value}" if f.action is not Action.NONE else "")
            thinks.append(_clean(head), COLOUR[f.severity]).append(f"\n  {_clean(f.summary)}\n")
        fine = len(look.findings) - len(present)
        if look.error:
            thinks.append(_clean(look.error), "yellow")
        elif fine:
            thinks.append(f"{fine} states measured and fine", "green")
        else:
            thinks.append("nothing else to say" if present else "nothing to say", "dim")
        table.add_row(Text(_clean(look.probe.name)), Text("\n".join(map(_clean, _sees(look)))), thinks, end_section=True)
    _console().print(table)


def show_stories(tally: recording.Tally, stories: list[Story], judged: int, last_at: float) -> None:
    """One row per story, what could not be looked at or judged below it, the verdict last."""
    console = _console()
    head = tally.header
    title = f"{head.node or 'a node'}, recorded by sentinel {head.version or '?'}: {judged} readings judged"
    table = Table(title=Text(_clean(title)), title_justify="left")
    for column in ("first seen (UTC)", "lasted", "component", "finding", "action", "why"):
        table.add_column(column, overflow="fold")
    for s in sorted(stories, key=lambda s: s.first_at):
        f = s.finding
        lasted = "once" if f.kind is Kind.EVENT else f"{s.last_at - s.first_at:.0f} s" + ("" if s.ended else ", to the end")
        when = datetime.fromtimestamp(s.first_at, UTC).strftime("%Y-%m-%d %H:%M:%S") if 0 <= s.first_at < 1e11 else "?"
        finding = Text(f"{f.severity.value} {_clean(f.check)}", COLOUR[f.severity])
        table.add_row(when, lasted, Text(_clean(str(f.component))), finding, f.action.value, Text(_clean(f.summary)))
    console.print(table if stories else Text(_clean(f"{title}; nothing was found")))
    if tally.missed:
        console.print(Text(_clean(f"{tally.misses} looks could not be taken; the last: {tally.missed[-1].probe}: "
                                  f"{tally.missed[-1].could_not_look}")), style="yellow")
    for number, why in tally.skipped[:10]:
        console.print(Text(_clean(f"skipped line {number}: {why}")), style="yellow")
    if tally.skips > 10:
        console.print(Text(f"… and {tally.skips - 10} more skipped lines"), style="yellow")
    severity, action = verdict(s.finding for s in stories)
    console.print(Text(f"verdict: {severity.value}, {action.value}"), style=COLOUR[severity])

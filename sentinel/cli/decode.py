"""``sentinel decode``: paste a log or a tool's output, read what it is, what it means and what to do first.

What always holds: it needs no configuration, network or GPU; text of any kind gets an answer, of ``TEXT_BYTES`` at most;
``--json`` prints one object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from probes.decode import Decoded, decode_text
from probes.thresholds import ThresholdsError, load, using
from sentinel.decide.rules.policy_file import default_policy
from sentinel.model import Finding, Severity

TEXT_BYTES = 128 << 20  # a node's whole kernel log of months; a pipe that never ends must not take all memory
_UTF16 = (b"\xff\xfe", b"\xfe\xff")  # how a PowerShell redirect begins
_COLOUR = {Severity.INFO: "green", Severity.WARNING: "yellow", Severity.FATAL: "red"}
# The policy only notes these warnings, and opens nothing for them; whoever pastes one wants a page all the same.
_NEAREST = (
    ("driver.client_mismatch", "driver-upgrade"), ("driver.task_blocked", "driver-hung"), ("driver.", "monitor"),
    ("gpu.none_found", "gpu-off-bus"), ("gpu.unreadable", "gpu-off-bus"), ("gpu.probe_failed", "gpu-off-bus"),
    ("fabric_manager.", "gpu-fatal"), ("gpu.fabric_", "gpu-fatal"), ("gpu.recovery_action", "gpu-fatal"),
    ("xid.", "gpu-degraded"), ("gpu.", "gpu-degraded"), ("ib.", "nic-fatal"), ("nic.", "nic-fatal"), ("pcie.", "nic-fatal"),
    ("imex.", "imex-domain"), ("monitor.", "monitor"), ("kernel_log.", "monitor"),
)  # fmt: skip
_SKIPPED = {
    "quoted": "lines quote a fault inside another program's text and were not judged",
    "user_space": "lines were written by user space, not by the kernel, and were not judged",
    "malformed": "lines look like kernel records and are damaged",
}


@click.command()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True), default="-")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--node", default="pasted", show_default=True, help="The machine that the text comes from.")
@click.option("--thresholds", type=click.Path(path_type=Path), help="A site's thresholds.")
def decode(file: Path, as_json: bool, node: str, thresholds: Path | None) -> None:
    """Explain pasted text from FILE, or from standard input: kernel log, hardware tools, serving stack."""
    try:
        numbers = load(thresholds) if thresholds else None
    except ThresholdsError as error:
        raise click.ClickException(str(error)) from None
    text = _text(file)
    with using(numbers):
        decoded = decode_text(text, node)
    if not decoded.findings and (odd := _no_text(text)):
        click.echo(f"{file}: {odd}", err=True)
    try:
        if as_json:
            click.echo(json.dumps(decoded.to_json()))
        else:
            show(decoded, Console())
    except BrokenPipeError:
        raise  # whoever read it has seen enough
    except OSError as error:
        raise click.ClickException(f"standard output cannot be written: {error.strerror or error}") from None


def _text(file: Path) -> str:
    try:
        if str(file) != "-":
            with file.open("rb") as stream:
                data = stream.read(TEXT_BYTES + 1)
        elif sys.stdin is None:
            raise click.ClickException("standard input is closed; wanted text there, or the name of a file")
        else:
            data = sys.stdin.buffer.read(TEXT_BYTES + 1)
    except OSError as error:
        raise click.UsageError(f"{file}: cannot be read: {error.strerror or error}") from None
    if len(data) > TEXT_BYTES:
        click.echo(f"{file}: longer than {TEXT_BYTES >> 20} MiB; only that much of it is explained", err=True)
    data = data[:TEXT_BYTES]
    return data.decode("utf-16" if data.startswith(_UTF16) else "utf-8", "replace")


def _no_text(text: str) -> str:
    """Why there was nothing to explain, where the input is no log at all; "" for text."""
    if not text.strip():
        return "empty; wanted a log's lines or a tool's output"
    sample = text[:65536]
    if sum(c in "\0\ufffd" for c in sample) * 10 > len(sample):
        return "not text; wanted a log's lines or a tool's output, unpacked"
    return ""


def show(decoded: Decoded, console: Console) -> None:
    verdict = decoded.verdict
    if decoded.findings:
        table = Table(box=None, pad_edge=False)
        for column in ("severity", "check", "component", "times", "first action", "blames"):
            table.add_column(column, overflow="fold")  # an address that is cut short is none
        for f in decoded.findings:
            action = "taken back" if not f.present else f.action.value
            times = str(f.count)
            table.add_row(Text(f.severity.value, _COLOUR[f.severity]), f.check, str(f.component), times, action, f.suspect.value)
        console.print(table)
        console.print()
        for f in _told_once(decoded.findings):
            console.print(f"• {f.summary}", markup=False, highlight=False)
            if hint := _hint(f):
                console.print(f"  {hint}", markup=False, highlight=False)
        console.print()
    console.print(Text.assemble(
        "Verdict: ", (verdict.severity.value, _COLOUR[verdict.severity]),
        f"; first: {verdict.action.value.replace('_', ' ')}; leaves service: {verdict.drain}; incidents: {verdict.incidents}.",
    ))
    if not decoded.findings:
        console.print(verdict.why, markup=False, highlight=False)
    for name in sorted({r for f in decoded.findings if (r := runbook(f))}):
        console.print(f"Runbook: {name}", markup=False, highlight=False)
    for why, count in decoded.skipped.items():
        console.print(f"{count} {_SKIPPED.get(why, why)}.", markup=False, highlight=False)


def _told_once(findings: tuple[Finding, ...]) -> list[Finding]:
    """The first finding of each summary, in order."""
    first: dict[str, Finding] = {}
    for f in findings:
        first.setdefault(f.summary, f)
    return list(first.values())


def _hint(finding: Finding) -> str:
    """What to do first, where the finding says more than its action, and the page that says the rest."""
    if cause := finding.facts.get("caused_by"):
        return f"an echo of {cause if isinstance(cause, str) else f'Xid {cause}'}"
    first, page = str(finding.facts.get("first", "")), runbook(finding)
    return "; ".join(part for part in (f"first: {first}" if first else "", f"runbook: {page}" if page else "") if part)


def runbook(finding: Finding) -> str:
    """The name of the page that says what to do: the shipped policy's, else the nearest one; "" where there is nothing to do."""
    rule = default_policy().rule_for(finding) if finding.present else None
    if rule and rule.fault != "noted":
        return rule.fault
    if not finding.present or finding.severity is Severity.INFO or "caused_by" in finding.facts:
        return ""
    return next((page for beginning, page in _NEAREST if finding.check.startswith(beginning)), "")

"""``sentinel probe``, ``record`` and ``assess``: look at this machine, keep what was read, judge it anywhere.

What always holds: a one-time look moves no cursor and writes nothing that a running agent uses; what could not be looked at
is said in its place, beside what could; text from the kernel or a recording reaches the terminal with its control characters
taken out. Exit status: 0 done, 1 nothing could be looked at or judged, 2 the command line is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from probes import Probe, ProbeError
from probes.profile import with_hints
from probes.thresholds import using
from sentinel.agent.driver import ChildDriver
from sentinel.agent.driver_protocol import longest_read_s
from sentinel.agent.probing import load_probes, thresholds
from sentinel.cli import recording
from sentinel.config import AgentSettings, ConfigError, load
from sentinel.durations import parse_duration
from sentinel.model import Action, Component, Finding, Kind, Reading, Severity

MARGIN_S = 5.0  # past the longest look at the driver
COLOUR = {Severity.FATAL: "bold red", Severity.WARNING: "yellow", Severity.INFO: "dim"}
ANYTHING_A_PROBE_RAISES = Exception  # a site's probe is foreign code; its failure is told, with its name

_config = click.option("--config", "config_path", type=click.Path(path_type=Path), help="This host's TOML file, for [agent].")
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_numbers = click.option(
    "--thresholds", "numbers", type=click.Path(path_type=Path), help="A site's thresholds, instead of those that --config names."
)
_only = click.option("--only", multiple=True, metavar="PROBE", help="Only this probe; may be given again.")


@dataclass
class Look:
    """One look of one probe."""

    probe: Probe
    reading: Reading | None = None
    findings: list[Finding] = field(default_factory=list)
    error: str = ""  # why it could not look, or not judge


# -- commands -----------------------------------------------------------------------------------------------------------------


@click.command()
@click.option("--once", is_flag=True, help="Look once. (The agent is what looks again and again.)")
@_config
@_numbers
@_only
@_json
def probe(once: bool, config_path: Path | None, numbers: Path | None, only: tuple[str, ...], as_json: bool) -> None:
    """Show what each probe sees on this machine now, and what it thinks of it."""
    if not once:
        raise click.UsageError("wanted --once; to look again and again, run: sentinel agent --config FILE")
    settings = _settings(config_path, numbers)
    looks = asyncio.run(_look_once(settings, only))
    if as_json:
        click.echo(msgspec.json.encode({"node": settings.node, "at": time.time(), "probes": [_plain(x) for x in looks]}))
    else:
        _show_looks(settings.node, looks)
    if all(x.reading is None for x in looks):
        sys.exit(1)


@click.command()
@click.argument("out", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--for", "length", default="0s", show_default=True, metavar="DURATION", help="Go on for this long; 0s: look once.")
@click.option("--every", default="5s", show_default=True, metavar="DURATION", help="Pause between two looks.")
@click.option("--force", is_flag=True, help="Replace OUT when it exists.")
@_config
@_only
def record(*, out: Path, length: str, every: str, force: bool, config_path: Path | None, only: tuple[str, ...]) -> None:
    """Keep this machine's readings in OUT ("-": standard output), for sentinel assess here or elsewhere.

    A reading names GPUs by UUID, serial number and PCI address, and processes by id; it holds no request and no key.
    """
    settings = _settings(config_path)
    try:
        seconds, pause = float(parse_duration(length)), float(parse_duration(every))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    try:
        with _writable(out, force) as stream:
            count, missed = asyncio.run(_record(settings, only, stream, seconds, max(pause, 0.1)))
    except FileExistsError:
        raise click.ClickException(f"{out}: exists; wanted a new file, or --force to replace it") from None
    except OSError as error:
        raise click.ClickException(f"{out}: cannot be written: {error.strerror or error}") from None
    click.echo(f"{out}: {count} readings, {missed} looks that could not be taken", err=True)
    if not count:
        sys.exit(1)


@click.command()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@_config
@_numbers
@_json
def assess(file: Path, config_path: Path | None, numbers: Path | None, as_json: bool) -> None:
    """Judge a recording FILE ("-": standard input) as the agent would have, with [agent.expected] of --config where given."""
    settings = _settings(config_path, numbers)
    try:
        with _readable(file) as stream:
            tally = recording.open_recording(stream, str(file))
            stories, judged, last_at = _judge(settings, stream, tally)
    except recording.RecordingError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{file}: cannot be read: {error.strerror or error}") from None
    if as_json:
        click.echo(msgspec.json.encode(_verdict_document(tally, stories, judged)))
    else:
        _show_stories(tally, stories, judged, last_at)
    if not judged:
        raise click.ClickException(f"{file}: no reading in it could be judged")


# -- looking ------------------------------------------------------------------------------------------------------------------


def _settings(path: Path | None, numbers: Path | None = None) -> AgentSettings:
    """This host's [agent], and its thresholds in force until the command ends."""
    agent = AgentSettings()
    try:
        if path is not None:
            settings = load(path)
            if settings.agent is None:
                raise ConfigError(f"{path}: agent: missing; wanted an [agent] table")
            agent = settings.agent
        agent = msgspec.structs.replace(agent, thresholds=numbers or agent.thresholds)
        click.get_current_context().with_resource(using(thresholds(agent)))
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    return agent


@contextlib.asynccontextmanager
async def _probes(settings: AgentSettings, only: tuple[str, ...]) -> AsyncIterator[tuple[list[Probe], ChildDriver]]:
    """The probes over the real driver, with a state directory of their own: an agent's cursors stay where they are."""
    driver = ChildDriver(float(settings.driver_deadline))
    with tempfile.TemporaryDirectory(prefix="sentinel-look-") as state:
        private = msgspec.structs.replace(settings, state_dir=Path(state))
        found = _loaded(private, driver, only)
        try:
            yield found, driver
        finally:
            for each in found:
                with contextlib.suppress(ANYTHING_A_PROBE_RAISES):
                    await each.close()
            await driver.close()


def _loaded(settings: AgentSettings, driver: ChildDriver | None, only: tuple[str, ...] = ()) -> list[Probe]:
    def broken(name: str, error: Exception) -> None:
        click.echo(f"probe {name} is left out: it could not be loaded: {error}", err=True)

    try:
        found = load_probes(settings, driver, on_broken=broken)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    unknown = sorted(set(only) - {p.name for p in found})
    if unknown:
        raise click.UsageError(f"no probe is called {unknown[0]!r}; there are {', '.join(p.name for p in found)}")
    return [p for p in found if not only or p.name in only]


def _patience_s(settings: AgentSettings) -> float:
    return 2 * longest_read_s(float(settings.driver_deadline)) + MARGIN_S  # two probes ask the driver, one after the other


async def _look(each: Probe, within_s: float) -> Look:
    try:
        async with asyncio.timeout(within_s):
            return Look(each, await each.read())
    except TimeoutError:
        return Look(each, error=f"could not look: did not answer within {within_s:g} s")
    except OSError as error:
        return Look(each, error=f"could not look: {f'{error.filename}: {error.strerror}' if error.filename else error}")
    except ProbeError as error:
        return Look(each, error=f"could not look: {error}")
    except ANYTHING_A_PROBE_RAISES as error:
        return Look(each, error=f"could not look: it failed with {error!r}")


def _think(look: Look, memory: dict[str, Any], expected: dict[str, Any]) -> None:
    if look.reading is not None:
        try:
            look.findings = look.probe.assess(look.reading, memory, expected)
        except ANYTHING_A_PROBE_RAISES as error:
            look.error = str(error) if isinstance(error, ProbeError) else f"its reading cannot be judged: {error!r}"


async def _look_once(settings: AgentSettings, only: tuple[str, ...]) -> list[Look]:
    async with _probes(settings, only) as (found, _):
        looks = await asyncio.gather(*(_look(p, _patience_s(settings)) for p in found))
    memories: dict[str, dict[str, Any]] = {look.probe.name: {} for look in looks}
    for look in looks:  # by name: the gpu probe, which knows the kind of node, comes before those that it gives hints to
        _think(look, memories[look.probe.name], with_hints(settings.expected, memories))
    return looks


async def _record(
    settings: AgentSettings, only: tuple[str, ...], stream: BinaryIO, seconds: float, pause: float
) -> tuple[int, int]:
    count = missed = 0
    stream.write(recording.header(settings.node, time.time()))
    async with _probes(settings, only) as (found, _):
        end = time.monotonic() + seconds
        while True:
            for look in await asyncio.gather(*(_look(p, _patience_s(settings)) for p in found)):
                if look.reading is None:
                    missed += 1
                    stream.write(recording.line(recording.Missed(could_not_look=look.error, probe=look.probe.name, at=time.time())))
                else:
                    count += 1
                    stream.write(recording.line(look.reading))
            stream.flush()
            if time.monotonic() + pause > end:
                return count, missed
            await asyncio.sleep(pause)


@contextlib.contextmanager
def _writable(out: Path, force: bool) -> Iterator[BinaryIO]:
    if str(out) == "-":
        yield sys.stdout.buffer
        return
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
    with os.fdopen(os.open(out, flags, 0o640), "wb") as stream:
        yield stream


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[BinaryIO]:
    if str(file) == "-":
        yield sys.stdin.buffer
        return
    with file.open("rb") as stream:
        yield stream


# -- judging a recording ------------------------------------------------------------------------------------------------------


@dataclass
class Story:
    """One finding over the length of a recording: the worst word about it, and when it began and ended."""

    finding: Finding
    first_at: float
    last_at: float
    ended: bool = False


def _judge(settings: AgentSettings, stream: BinaryIO, tally: recording.Tally) -> tuple[list[Story], int, float]:
    by_name = {p.name: p for p in _loaded(settings, None)}
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
        _think(look, of_node.setdefault(reading.probe, {}), with_hints(settings.expected, of_node))
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


def _verdict(findings: Iterable[Finding]) -> tuple[Severity, Action]:
    """The worst severity, and the strongest action among those that are as bad."""
    found = list(findings)
    worst = max((f.severity for f in found), key=lambda s: s.rank, default=Severity.INFO)
    return worst, max((f.action for f in found if f.severity is worst), key=lambda a: a.rank, default=Action.NONE)


def _verdict_document(tally: recording.Tally, stories: list[Story], judged: int) -> dict[str, Any]:
    severity, action = _verdict(s.finding for s in stories)
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


# -- showing ------------------------------------------------------------------------------------------------------------------


def _plain(look: Look) -> dict[str, Any]:
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


def _show_looks(node: str, looks: list[Look]) -> None:
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


def _show_stories(tally: recording.Tally, stories: list[Story], judged: int, last_at: float) -> None:
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
    severity, action = _verdict(s.finding for s in stories)
    console.print(Text(f"verdict: {severity.value}, {action.value}"), style=COLOUR[severity])

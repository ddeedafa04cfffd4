"""``sentinel probe``, ``record`` and ``assess``: look at this machine, keep what was read, judge it anywhere.

What always holds: nothing that a running agent uses is written. Exit status: 0 done, 1 nothing could be looked at or judged,
2 the command line is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import click
import msgspec

from probes.thresholds import using
from sentinel.agent.probing import thresholds
from sentinel.cli import recording
from sentinel.cli.judging import judge, verdict_document
from sentinel.cli.looking import keep_looking, look_once
from sentinel.cli.readings_shown import plain, show_looks, show_stories
from sentinel.config import AgentSettings, ConfigError, load
from sentinel.durations import parse_duration

_config = click.option("--config", "config_path", type=click.Path(path_type=Path), help="This host's TOML file, for [agent].")
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_numbers = click.option(
    "--thresholds", "numbers", type=click.Path(path_type=Path), help="A site's thresholds, instead of those that --config names."
)
_only = click.option("--only", multiple=True, metavar="PROBE", help="Only this probe; may be given again.")


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
    looks = asyncio.run(look_once(settings, only))
    if as_json:
        click.echo(msgspec.json.encode({"node": settings.node, "at": time.time(), "probes": [plain(x) for x in looks]}))
    else:
        show_looks(settings.node, looks)
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
            count, missed = asyncio.run(keep_looking(settings, only, stream, seconds, max(pause, 0.1)))
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
            stories, judged, last_at = judge(settings, stream, tally)
    except recording.RecordingError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{file}: cannot be read: {error.strerror or error}") from None
    if as_json:
        click.echo(msgspec.json.encode(verdict_document(tally, stories, judged)))
    else:
        show_stories(tally, stories, judged, last_at)
    if not judged:
        raise click.ClickException(f"{file}: no reading in it could be judged")


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

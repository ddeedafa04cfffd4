"""Looks at this machine, one time or again and again, through the probes and the driver that the agent uses.

What always holds: a look moves no cursor and writes nothing that a running agent uses; what could not be looked at is said in
its place, beside what could.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import click
import msgspec

from probes import Probe, ProbeError
from probes.profile import with_hints
from sentinel.agent.driver import ChildDriver
from sentinel.agent.driver_protocol import longest_read_s
from sentinel.agent.probing import load_probes
from sentinel.cli import recording
from sentinel.config import AgentSettings, ConfigError
from sentinel.model import Finding, Reading

MARGIN_S = 5.0  # past the longest look at the driver
ANYTHING_A_PROBE_RAISES = Exception  # a site's probe is foreign code; its failure is told, with its name


@dataclass
class Look:
    """One look of one probe."""

    probe: Probe
    reading: Reading | None = None
    findings: list[Finding] = field(default_factory=list)
    error: str = ""  # why it could not look, or not judge


@contextlib.asynccontextmanager
async def open_probes(settings: AgentSettings, only: tuple[str, ...]) -> AsyncIterator[tuple[list[Probe], ChildDriver]]:
    """The probes over the real driver, with a state directory of their own: an agent's cursors stay where they are."""
    driver = ChildDriver(float(settings.driver_deadline))
    with tempfile.TemporaryDirectory(prefix="sentinel-look-") as state:
        private = msgspec.structs.replace(settings, state_dir=Path(state))
        found = loaded(private, driver, only)
        try:
            yield found, driver
        finally:
            for each in found:
                with contextlib.suppress(ANYTHING_A_PROBE_RAISES):
                    await each.close()
            await driver.close()


def loaded(settings: AgentSettings, driver: ChildDriver | None, only: tuple[str, ...] = ()) -> list[Probe]:
    """The probes that are installed and wanted. Raises click's errors for a bad configuration and for names that no probe has."""
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


def think(look: Look, memory: dict[str, Any], expected: dict[str, Any]) -> None:
    """Let the probe judge its reading; what it cannot judge is said in ``look.error``."""
    if look.reading is not None:
        try:
            look.findings = look.probe.assess(look.reading, memory, expected)
        except ANYTHING_A_PROBE_RAISES as error:
            look.error = str(error) if isinstance(error, ProbeError) else f"its reading cannot be judged: {error!r}"


async def look_once(settings: AgentSettings, only: tuple[str, ...]) -> list[Look]:
    """One look of every probe that is wanted, judged."""
    async with open_probes(settings, only) as (found, _):
        looks = await asyncio.gather(*(_look(p, _patience_s(settings)) for p in found))
    memories: dict[str, dict[str, Any]] = {look.probe.name: {} for look in looks}
    for look in looks:  # by name: the gpu probe, which knows the kind of node, comes before those that it gives hints to
        think(look, memories[look.probe.name], with_hints(settings.expected, memories))
    return looks


async def keep_looking(
    settings: AgentSettings, only: tuple[str, ...], stream: BinaryIO, seconds: float, pause: float
) -> tuple[int, int]:
    """Look every ``pause`` seconds for ``seconds``, and write what was read. Returns (readings, looks that were not taken)."""
    count = missed = 0
    stream.write(recording.header(settings.node, time.time()))
    async with open_probes(settings, only) as (found, _):
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

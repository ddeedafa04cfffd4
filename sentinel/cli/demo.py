"""``sentinel demo``: one simulated rack through the real agent, controller and store, with one scripted fault."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import click

from sentinel.durations import parse_duration
from sentinel.sim import scenarios

EXIT_NOT_HELD = 1


def _duration(_: click.Context, __: click.Parameter, value: str) -> float:
    try:
        seconds = float(parse_duration(value))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if not 10 <= seconds <= 3600:
        raise click.BadParameter(f"wanted between 10s and 1h, got {value}")
    return seconds


@click.command()
@click.option("--scenario", "name", default=scenarios.DEFAULT, show_default=True, metavar="NAME", help="Which fault; see --list.")
@click.option("--list", "listing", is_flag=True, help="List the scenarios.")
@click.option("--duration", default="60s", show_default=True, callback=_duration, help="End at the latest after this long.")
@click.option("--headless", is_flag=True, help="No live view; progress goes to standard error.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output; implies --headless.")
def demo(name: str, listing: bool, duration: float, headless: bool, as_json: bool) -> None:
    """Simulate one GB200 NVL72 rack, break something, and watch what sentinel does about it.

    Only the GPU readings, the kernel log and the engines in the workers are simulated. Exits 0 when everything that the
    scenario expects held, else 1.
    """
    if listing:
        for s in scenarios.SCENARIOS.values():
            click.echo(f"{s.name:<20} {s.title}")
        return
    scenario = scenarios.SCENARIOS.get(name)
    if scenario is None:
        known = ", ".join(scenarios.SCENARIOS)
        raise click.BadParameter(f"no scenario is called {name!r}; wanted one of {known}", param_hint="--scenario")
    import uvloop  # noqa: PLC0415

    from sentinel.sim.show import Show  # noqa: PLC0415  (imports half of the house; --list and errors must not wait for it)

    show = Show(scenario, duration, headless=headless or as_json)
    document = uvloop.run(_until_told(show.run()))
    if document is None:
        raise click.ClickException("stopped before the scenario had ended; everything it started is gone again")
    if as_json:
        click.echo(json.dumps(document, indent=2))
    if not document["ok"]:
        missed = [e["name"] for e in document["expectations"] if not e["held"]]
        click.echo(document["failed"] or f"not as expected: {'; '.join(missed)}", err=True)
        sys.exit(EXIT_NOT_HELD)


async def _until_told(run: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any] | None:
    """Run it; the first Ctrl-C, SIGTERM or SIGHUP lets it clean up (then None), further ones cannot disturb that."""
    task = asyncio.ensure_future(run)
    told = False

    def stop() -> None:
        nonlocal told
        if not told:
            told = True
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        return await task
    except asyncio.CancelledError:
        return None

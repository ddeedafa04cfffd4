"""Which probes run on this host, and the world each of them sees.

This module exists so that the agent and the command line look at a node through the very same probes. What always holds:

* Probes come from the entry points of the group ``sentinel.probes``: the shipped ones and a site's own, alike.
* One broken site probe never takes the others down: it is logged by name, handed to ``on_broken``, and left out.
* The thresholds are the shipped ones under what ``[agent] thresholds`` names; all probes of a process are judged by the same.
* A probe's own table of the configuration reaches it as ``context.options``; ``enabled = false`` leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import structlog

from probes import Context, Driver, Probe, ProbeError
from probes import thresholds as numbers
from probes.threshold_tables import Thresholds
from sentinel.config import AgentSettings, ConfigError
from sentinel.durations import parse_duration

GROUP = "sentinel.probes"
LEAST_INTERVAL_S = 0.1  # below it a probe is a busy loop

log = structlog.get_logger()


def context(settings: AgentSettings, name: str, driver: Driver | None, override: Mapping[str, Any] | None = None) -> Context:
    """The world as the probe ``name`` may see it; ``override`` wins over the probe's table of the configuration."""
    return Context(
        node=settings.node,
        sys=settings.sys,
        proc=settings.proc,
        kmsg=settings.kmsg,
        state=settings.state_dir,
        driver=driver,
        options={**settings.probes.get(name, {}), **(override or {})},
    )


def load_probes(
    settings: AgentSettings,
    driver: Driver | None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    found: list[EntryPoint] | None = None,
    on_broken: Callable[[str, Exception], None] | None = None,
) -> list[Probe]:
    """Every enabled probe, by name. ``found``: the entry points to use instead of the installed ones.

    Raises ConfigError when the configuration speaks of a probe that is not installed, or says something it cannot mean.
    """
    points = {p.name: p for p in (entry_points(group=GROUP) if found is None else found)}
    for name in settings.probes:
        if name not in points:
            raise ConfigError(f"agent.probes.{name}: no such probe; installed are {', '.join(sorted(points))}")
    probes: list[Probe] = []
    for name in sorted(points):
        seen = context(settings, name, driver, (overrides or {}).get(name))
        enabled = seen.options.get("enabled", True)
        if not isinstance(enabled, bool):
            raise ConfigError(f"agent.probes.{name}.enabled: expected true or false, got {enabled!r}")
        if not enabled:
            continue
        try:
            probe = points[name].load()(seen)
            if not isinstance(probe, Probe):
                raise TypeError(f"{points[name].value} lacks a part of the probe's shape (see probes.Probe)")
        except ProbeError as error:  # a probe's word for options that it cannot use
            raise ConfigError(f"agent.probes.{name}: {error}") from None
        except Exception as error:  # a site's probe may raise anything on import; the others must still run
            log.error("probe left out: it could not be loaded", probe=name, source=points[name].value, error=repr(error))
            if on_broken:
                on_broken(name, error)
            continue
        probes.append(probe)
    return probes


def thresholds(settings: AgentSettings) -> Thresholds:
    """By which numbers this host judges (``probes.thresholds.use`` puts them in force). Raises ConfigError with one sentence."""
    if settings.thresholds is None:
        return numbers.shipped()
    try:
        return numbers.load(settings.thresholds)
    except numbers.ThresholdsError as error:
        raise ConfigError(str(error)) from None


def interval_s(settings: AgentSettings, probe: Probe) -> float:
    """Seconds between two looks: the configuration's ``interval``, else the probe's own. Raises ConfigError."""
    value = settings.probes.get(probe.name, {}).get("interval")
    if value is None:
        return probe.interval_s
    try:
        seconds = float(parse_duration(value))
    except ValueError as error:
        raise ConfigError(f"agent.probes.{probe.name}.interval: {error}") from None
    if seconds < LEAST_INTERVAL_S:
        raise ConfigError(f"agent.probes.{probe.name}.interval: expected at least {LEAST_INTERVAL_S * 1000:g}ms, got {value!r}")
    return seconds

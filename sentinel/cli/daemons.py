"""``sentinel agent``, ``sentinel controller`` and ``sentinel gateway``: the daemons, as systemd starts them."""

from __future__ import annotations

import asyncio
import importlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import click

from sentinel.config import ConfigError, load

_config = click.option(
    "--config", "config_path", required=True, type=click.Path(path_type=Path), help="This host's TOML file (sentinel config check)."
)
_log = click.option("--log", "style", type=click.Choice(["json", "console"]), help="Form of log lines; a terminal gets console.")
_level = click.option("--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]), show_default=True)


@click.command()
@_config
@_log
@_level
def agent(config_path: Path, style: Literal["json", "console"] | None, log_level: str) -> None:
    """Watch this node: run the probes, report what they find, carry out allowed actions."""
    # A reload that comes while we start waits; by default it would end us, and systemd takes an end by SIGHUP for a wanted one.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    _run("sentinel.agent.daemon", config_path, style, log_level)


@click.command()
@_config
@_log
@_level
def controller(config_path: Path, style: Literal["json", "console"] | None, log_level: str) -> None:
    """Decide for the fleet: take reports in, drain, reroute, page; one leads, others stand by."""
    _run("sentinel.controller.daemon", config_path, style, log_level)


@click.command()
@_config
@_log
@_level
def gateway(config_path: Path, style: Literal["json", "console"] | None, log_level: str) -> None:
    """Serve OpenAI's API in front of the fleet: route, admit, retry, follow the route table."""
    _run("sentinel.gateway.daemon", config_path, style, log_level)


def _run(module: str, config_path: Path, style: Literal["json", "console"] | None, log_level: str) -> None:
    """Each daemon is ``async run(settings, config_path) -> exit status``."""
    _import_structlog_alone()
    importlib.import_module("sentinel.logs").configure(style, log_level)
    try:
        settings = load(config_path)
        daemon = importlib.import_module(module)  # late: a wrong file should cost a sentence, not a second of imports
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            status = runner.run(daemon.run(settings, config_path))
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    sys.exit(status)


def _import_structlog_alone() -> None:
    """Without rich, which structlog takes along where it is installed: 3 MiB on every node for what only tables use."""
    if "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # the import system's own word for "not to be had"
    try:
        importlib.import_module("structlog")
    finally:
        del sys.modules["rich"]


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415  (a wheel may be missing on a site's platform; asyncio's own loop will do)
    except ImportError:
        return None
    return uvloop.new_event_loop

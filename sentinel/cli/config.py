"""``sentinel config`` and ``sentinel token``: what must be right before a daemon is started.

Exit status: 0 fine, 1 the file cannot be used, 2 the command line is wrong.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path

import click

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@click.group()
def config() -> None:
    """Check configuration files, and show what can be configured."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> None:
    """Say whether FILE can be used, and what it sets up; one sentence names the first thing that is wrong."""
    from sentinel.config import ConfigError, load  # noqa: PLC0415  (msgspec is not needed to print a token or a help text)

    try:
        settings = load(file)
        if settings.agent and settings.agent.thresholds:
            from sentinel.agent.probing import thresholds as chosen  # noqa: PLC0415

            chosen(settings.agent)
        if settings.controller and settings.controller.policy:
            from sentinel.decide.rules.policy_file import PolicyError, load_policy  # noqa: PLC0415

            try:
                load_policy(settings.controller.policy.read_text("utf-8"))
            except (PolicyError, OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{settings.controller.policy}: {error}") from None
        for table, key in (("controller", "node_tokens"), ("controller", "operator_tokens"), ("gateway", "keys")):
            path = getattr(getattr(settings, table), key, None)
            if path is not None:
                from sentinel.tokens import read_tokens  # noqa: PLC0415

                read_tokens(path, f"{table}.{key}")
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    daemons = [name for name in ("agent", "controller", "gateway") if getattr(settings, name) is not None]
    counts = f"{len(settings.pools)} pools, {len(settings.workers)} workers, {len(settings.nodes)} nodes"
    click.echo(f"{file}: can be used by {' and '.join(daemons) or 'no daemon yet'}; {counts}")


@config.command()
def thresholds() -> None:
    """Print the shipped thresholds, with units and sources, to copy from: a site's own file holds only what it changes."""
    from probes.thresholds import shipped_text  # noqa: PLC0415

    click.echo(shipped_text(), nl=False)


@click.command()
@click.argument("name")
def token(name: str) -> None:
    """Make a token for the node or operator NAME. It is printed once and kept nowhere.

    The first line of the output is the token, for the node's or the operator's own file. The second is what the controllers
    get: the line for the file that controller.node_tokens or controller.operator_tokens names.
    """
    if not _NAME.fullmatch(name):
        raise click.UsageError(f"{name!r} is no name; wanted letters, digits, '-', '_' or '.'")
    fresh = secrets.token_urlsafe(32)
    click.echo(fresh)
    click.echo(f"{name} {hashlib.sha256(fresh.encode()).hexdigest()}")

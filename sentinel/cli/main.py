"""The command ``sentinel``: one file per command group, imported only when it is called.

Lazy, because an SRE at 3 a.m. types ``sentinel status`` and should not wait for Redis' client to import. Errors that are
the user's to mend are click exceptions with one sentence; anything else is a bug and says so with how to report it.
"""

from __future__ import annotations

import importlib
import io
import sys

import click

from sentinel import __version__

# command → (module, attribute, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "agent": ("sentinel.cli.daemons", "agent"),
    "controller": ("sentinel.cli.daemons", "controller"),
    "gateway": ("sentinel.cli.daemons", "gateway"),
    "config": ("sentinel.cli.config", "config"),
    "policy": ("sentinel.cli.policy", "policy"),
    "probe": ("sentinel.cli.readings", "probe"),
    "record": ("sentinel.cli.readings", "record"),
    "assess": ("sentinel.cli.readings", "assess"),
    "decode": ("sentinel.cli.decode", "decode"),
    "status": ("sentinel.cli.operate", "status"),
    "incidents": ("sentinel.cli.operate", "incidents"),
    "explain": ("sentinel.cli.operate", "explain"),
    "replay": ("sentinel.cli.replay", "replay"),
    "topology": ("sentinel.cli.topology", "topology"),
    "spare": ("sentinel.cli.spare", "spare"),
    "drain": ("sentinel.cli.operate", "drain"),
    "undrain": ("sentinel.cli.operate", "undrain"),
    "hold": ("sentinel.cli.operate", "hold"),
    "release": ("sentinel.cli.operate", "release"),
    "maintain": ("sentinel.cli.maintain", "maintain"),
    "breaker": ("sentinel.cli.breaker", "breaker"),
    "acknowledge": ("sentinel.cli.operate", "acknowledge"),
    "resolve": ("sentinel.cli.operate", "resolve"),
    "token": ("sentinel.cli.config", "token"),
    "demo": ("sentinel.cli.demo", "demo"),
}


class Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)  # noqa: S101  (a wrong table is a programming error)
        return command


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Watches GPUs, NVLink and workers; drains, reroutes, pages and repairs; says why."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal of another encoding shows a "?", not a traceback

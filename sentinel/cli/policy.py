"""``sentinel policy``: read the rules that decide, and check a file of one's own before it does.

Exit status of ``check``: 0 it can be used (warnings may be printed), 1 it cannot, 2 the command line is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import click


@click.group()
def policy() -> None:
    """Show and check the policy: what is done about what is found."""


@policy.command()
def show() -> None:
    """Print the shipped policy, with comments and sources; start your own from it."""
    from sentinel.decide.rules.policy_file import default_policy_text  # noqa: PLC0415  (msgspec is not needed to print a help text

    click.echo(default_policy_text(), nl=False)


@policy.command()
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> None:
    """Say whether FILE can be used as a policy; one sentence for each thing that is wrong."""
    from sentinel.decide.rules.policy_file import examine  # noqa: PLC0415

    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{file} cannot be read: {error}") from None
    rules, wrong = examine(text)
    if rules is None or wrong:
        for problem in wrong[:-1]:
            click.echo(f"Error: {file}: {problem}", err=True)
        raise click.ClickException(f"{file}: {wrong[-1]}")
    known = known_checks()
    for number, rule in enumerate(rules.rule, 1):
        for name in rule.checks:
            if not set(name) & set("*?[") and not is_known(name, known):
                click.echo(
                    f"Warning: {file}: rule {number} ({rule.fault}): no probe of sentinel's own makes the check {name!r}, so this "
                    "matches only if a probe of yours does",
                    err=True,
                )
    counts = f"{len(rules.rule)} rules, {sum(r.response.value != 'none' for r in rules.rule)} of them act on workers"
    click.echo(f"{file}: can be used; mode {rules.mode.value}, {counts}")


def known_checks() -> frozenset[str]:
    """The names of checks that the package itself makes, as they are written in its sources and its catalog of log lines."""
    found: set[str] = set()
    for package in ("probes", "sentinel.decide", "sentinel.agent"):
        for source in sources(resources.files(package)):
            found |= set(re.findall(r'"([a-z][a-z0-9]*\.[a-z0-9_]+)"', source))
    kinds = (resources.files("probes") / "catalog" / "serving_kinds.tsv").read_text("utf-8").splitlines()
    return frozenset(found | {f"serving.{line.split(chr(9))[0]}" for line in kinds if line and not line.startswith("#")})


def sources(folder: Traversable) -> Iterator[str]:
    """The text of every module of a package, those of its rooms too."""
    for file in folder.iterdir():
        if file.is_dir():
            yield from sources(file)
        elif file.name.endswith(".py"):
            yield file.read_text("utf-8")


def is_known(name: str, known: frozenset[str]) -> bool:
    return name in known or bool(re.fullmatch(r"s?xid\.\d+", name))

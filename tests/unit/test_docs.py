"""The documents tell the truth about what exists: commands, options, keys, defaults, files, fault classes and metrics."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from sentinel import config
from sentinel.cli.main import COMMANDS, main

TOP = Path(__file__).parents[2]
RUNBOOKS = sorted((TOP / "runbooks").glob("*.md"))
DOCUMENTS = [
    *(TOP / name for name in ("README.md", "CHANGELOG.md")),
    *sorted((TOP / "docs").glob("*.md")),
    *sorted((TOP / "deploy").rglob("*.md")),
    *RUNBOOKS,
]
PAGES = [path for path in RUNBOOKS if path.stem != "README"]


def text(path: Path) -> str:
    return path.read_text("utf-8")


def commands_in(document: str) -> set[str]:
    """Every ``sentinel …`` command line in a code span or a code block."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", document, flags=re.DOTALL))
    blocks = [line for block in re.findall(r"```\w*\n(.*?)```", document, flags=re.DOTALL) for line in block.splitlines()]
    found = set()
    for line in (*spans, *blocks):
        match = re.search(r"(?:^|\bbin/|[;&|] *|ssh NODE )(sentinel [a-z][^#]*)", line.strip())
        if match:
            found.add(match[1].strip())
    return found


def resolve(line: str) -> None:
    """Fails when a command line names a command or an option that does not exist, or leaves out a required one."""
    words = shlex.split(line.replace("…", "x"))[1:]
    command: click.Command = main
    context = click.Context(main, info_name="sentinel")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        assert found is not None, f"`{line}`: there is no command {words[0]!r}"
        command, words = found, words[1:]
    options = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)} | {"--help", "-h", "--version"}
    used = [word for word in words if word.startswith("--")]
    for word in used:
        assert word.split("=")[0] in options, f"`{line}`: {command.name} has no option {word}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(TOP)))
def test_commands_exist(path: Path) -> None:
    """Every command line in a document names a command and options that exist."""
    for line in sorted(commands_in(text(path))):
        resolve(line)


def test_cli_map_is_complete() -> None:
    """docs/cli.md lists every command."""
    listed = text(TOP / "docs/cli.md")
    for name in COMMANDS:
        assert re.search(rf"`sentinel {name}\b", listed), f"docs/cli.md does not name {name}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(TOP)))
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link leads to a file of the project, and every named path of the project exists."""
    document = text(path)
    for link in re.findall(r"\]\(([^)#\s]+)", document):
        if not re.match(r"[a-z]+:", link):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"
    folders = "docs|deploy|runbooks|alerts|dashboards|sentinel|probes|bench|tests|requirements"
    for named in re.findall(rf"`((?:{folders})/[\w./@-]*)`", document):
        assert (TOP / named).exists(), f"{path.name} names {named}"


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "agent": config.AgentSettings,
    "controller": config.ControllerSettings,
    "gateway": config.GatewaySettings,
    "store": config.StoreSettings,
    "paging": config.PagingSettings,
    "dynamo": config.DynamoSettings,
    "pools": config.PoolSettings,
    "workers": config.WorkerSettings,
    "nodes": config.NodeSettings,
    "topology": config.TopologySettings,
}


def default_of(field: msgspec.structs.FieldInfo) -> Any:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    return field.default_factory() if field.default_factory is not msgspec.NODEFAULT else msgspec.NODEFAULT


@pytest.mark.parametrize("section", SECTIONS)
def test_configuration_is_documented(section: str) -> None:
    """docs/configuration.md has every key of the section, no other, and the default that the code has."""
    body = re.search(rf"^## \[+{section}\]+$(.*?)(?=^## |\Z)", text(TOP / "docs/configuration.md"), flags=re.DOTALL | re.MULTILINE)
    assert body, f"no chapter about [{section}]"
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", body[1], flags=re.MULTILINE))
    fields = {field.name: field for field in msgspec.structs.fields(SECTIONS[section])}
    assert set(rows) == set(fields)
    for name, field in fields.items():
        default, said = default_of(field), rows[name]
        if default is msgspec.NODEFAULT:
            assert said == "required", name
        elif default is None:
            assert said == "none", name
        elif said.startswith("`"):
            value = tomllib.loads(f"x = {said.strip('`')}")["x"]
            wanted = config.Duration(default) if isinstance(default, config.Duration) else default
            assert msgspec.convert(value, field.type, dec_hook=config._hook) == wanted, name
        else:
            assert said == "this host's short name", name


def test_every_fault_class_has_a_runbook() -> None:
    """Each class of the policy that can page has a runbook of its name, as has each class that the code itself opens."""
    policy = tomllib.loads(text(TOP / "sentinel/decide/policy.toml"))
    stems = {path.stem for path in PAGES}
    for rule in policy["rule"]:
        assert rule["fault"] in stems or not rule.get("page"), f"no runbook for {rule['fault']}"
    for file in (TOP / "sentinel/decide").rglob("*.py"):
        for fault in re.findall(r'fault="([a-z-]+)"', text(file)):
            assert fault in stems, f"no runbook for {fault} of {file.name}"


def test_runbooks_are_listed() -> None:
    """The list of runbooks names each of them."""
    listed = text(TOP / "runbooks/README.md")
    for path in PAGES:
        assert f"]({path.name})" in listed, path.name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_runbook_answers_the_six_questions(path: Path) -> None:
    """Each runbook is short and says, in this order: meaning, what was done, what first, how to undo, when over, whom to tell."""
    page = text(path)
    assert page.startswith(f"# {path.stem}: ")
    heads = ["**Means.**", "**sentinel has**", "**First**", "**Undo.**", "**Over when**", "**Tell**"]
    places = [page.find(head) for head in heads]
    assert -1 not in places, [head for head, place in zip(heads, places, strict=True) if place < 0]
    assert places == sorted(places)
    assert len(page.splitlines()) <= 45, "too long for 3 a.m."
    assert commands_in(page) or "```sh" in page


def test_metrics_are_exported() -> None:
    """Every metric that docs/architecture.md promises, and every one that an alert uses, is a name in the code."""
    code = "\n".join(text(path) for path in (TOP / "sentinel").rglob("*.py"))
    written = set(re.findall(r'"(sentinel_[a-z0-9_]+)"', code))
    exported = written | {f"{name}{end}" for name in written for end in ("_total", "_bucket", "_count", "_sum")}
    promised = set(re.findall(r"`(sentinel_[a-z0-9_]+)", text(TOP / "docs/architecture.md")))
    rules = "\n".join(line for line in text(TOP / "alerts/sentinel.rules.yml").splitlines() if not line.lstrip().startswith("#"))
    used = set(re.findall(r"\b(sentinel_[a-z0-9_]+)", rules))
    assert promised and used
    assert promised <= exported, f"promised and not there: {sorted(promised - exported)}"
    assert used <= exported, f"used by an alert and not there: {sorted(used - exported)}"


def test_nothing_of_this_machine() -> None:
    """No document names a path of somebody's machine."""
    for path in DOCUMENTS:
        assert not re.search(r"/(?:home|work|root)/\w", text(path)), path.name

"""The files that the stage writes: the controller's configuration, the tokens, and a policy with shorter times.

This module exists so that the real controller runs on a real configuration file, checked like any other. What always holds:

* Every secret is random, made for this one run, and in a file that only its owner can read.
* The policy is the shipped one with some durations shortened; ``faster`` lists each of them, so that the output can say so.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sentinel.controller.auth import digest, new_token
from sentinel.decide.rules.policy_file import default_policy_text, load_policy
from sentinel.sim.rack import DOMAIN, MAIN, MODEL, NODES, OVERFLOW, PLACES
from sentinel.sim.readings import ImexDomain

OPERATOR = "demo"

# What is shortened so that a scenario fits into a minute. Left as shipped: everything else.
FASTER = {
    "timing.silent_after": "4s",
    "timing.silent_page_after": "3s",
    "timing.verify_deadline": "45s",
    "timing.retry": "1s",
    "capacity.shift_back_after": "4s",
    "capacity.shift_back_step": "0.5",
    "capacity.shift_back_every": "1s",
}
SNAPSHOT, PROBE, WATCH, TICK = "1s", "500ms", "1s", "100ms"  # shipped: 5s, 5s, 2s, 500ms
IMEX = "1s"  # shipped: 30s


@dataclass(frozen=True)
class Tokens:
    operator: str
    nodes: dict[str, str]


def private(path: Path, text: str) -> Path:
    """Write a file that only its owner can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    return path


def faster_policy(changes: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The shipped policy with ``changes`` ("table.key" → value as written), and "table.key" → "was → is" of each.

    "rule.FAULT.key" is that key of the first rule of a fault class.

    Raises ValueError when the shipped policy has no such key, PolicyError when the result is no policy.
    """
    text, told = default_policy_text(), {}
    for name, value in changes.items():
        table, key = name.rsplit(".", 1)
        head = rf'fault = "{re.escape(table[5:])}"' if table.startswith("rule.") else rf"\[{re.escape(table)}\]"
        pattern = re.compile(rf"({head}[^\[]*?\n{re.escape(key)}\s*=\s*)(\"[^\"]*\"|[^\s#]+)", re.DOTALL)
        written = value if re.fullmatch(r"[\d.]+", value) else f'"{value}"'
        text, count = pattern.subn(lambda m, w=written: m[1] + w, text, count=1)  # type: ignore[misc]
        if not count:
            raise ValueError(f"the shipped policy has no {name}")
        was = pattern.search(default_policy_text())
        told[name] = f"{was[2].strip(chr(34)) if was else '?'} → {value}"
    load_policy(text)
    return text, told


def write_proc(proc: Path, node: str, boot: int = 1) -> None:
    """What a tray's kernel would say of its name, its boot (the first, the second …) and its address."""
    texts = {
        "sys/kernel/hostname": node,
        "sys/kernel/random/boot_id": f"5e5e5e5e-0000-4000-8000-{boot:012d}",
        "net/fib_trie": f"Local:\n  |-- 10.0.1.{NODES.index(node) + 1}\n     /32 host LOCAL\n",
    }
    for name, text in texts.items():
        (proc / name).parent.mkdir(parents=True, exist_ok=True)
        (proc / name).write_text(text + "\n", "ascii")


def write_imex(folder: Path, lost: set[str]) -> None:
    """What ``nvidia-imex-ctl`` prints on every tray, and a program for each that prints it; on a lost one nothing answers."""
    domain = ImexDomain()
    for number, node in enumerate(NODES, 1):
        domain.join(node, f"10.0.1.{number}")
    domain.lost |= lost
    for node in NODES:
        tool, said = imex_tool(folder, node), folder / "imex" / f"{node}.json"
        said.parent.mkdir(exist_ok=True)
        part = said.with_suffix(".part")
        part.write_text("" if node in lost else domain.printed(), "utf-8")
        part.replace(said)
        if not tool.exists():
            tool.write_text(f"#!/bin/sh\nexec cat '{said}'\n", "utf-8")
            tool.chmod(0o700)


def imex_tool(folder: Path, node: str) -> Path:
    return folder / "imex" / f"{node}-imex-ctl"


def write_tokens(folder: Path) -> Tokens:
    """Tokens for the operator and every node; the controller's files hold only their digests, the agents' one token each."""
    tokens = Tokens(new_token(), {node: new_token() for node in NODES})
    private(folder / "operators", f"{OPERATOR} {digest(tokens.operator)}\n")
    private(folder / "nodes", "".join(f"{n} {digest(t)}\n" for n, t in tokens.nodes.items()))
    for node, token in tokens.nodes.items():
        private(folder / f"{node}.token", token)
    return tokens


def write_controller(
    folder: Path, *, listen: str, urls: Mapping[str, str], pager: str, faster: Mapping[str, str]
) -> dict[str, str]:
    """Write ``controller.toml`` and what it refers to; returns what is faster than shipped. ``urls``: worker → base URL."""
    policy, told = faster_policy(faster)
    private(folder / "policy.toml", policy)
    private(folder / "pagerduty.key", "R0SIMULATED0PAGER0ROUTING0KEY000")

    lines = [
        "# Written by sentinel demo for one run.",
        "[controller]",
        f"name = {_text('demo-controller')}",
        f"listen = {_text(listen)}",
        f"node_tokens = {_text(folder / 'nodes')}",
        f"operator_tokens = {_text(folder / 'operators')}",
        f"journal_dir = {_text(folder / 'journal')}",
        f"tick = {_text(TICK)}",
        f"watch = {_text(WATCH)}",
        f"policy = {_text(folder / 'policy.toml')}",
        "[store]",
        f"url = {_text('embedded:' + str(folder / 'store'))}",
        "[paging]",
        f"pagerduty_key_file = {_text(folder / 'pagerduty.key')}",
        f"pagerduty_url = {_text(pager)}",
        *_fleet(urls),
    ]
    private(folder / "controller.toml", "\n".join(lines) + "\n")
    told |= {"agent.snapshot": f"5s → {SNAPSHOT}", "agent probes' interval": f"5s → {PROBE}"}
    told |= {"controller.watch": f"2s → {WATCH}", "controller.tick": f"500ms → {TICK}"}
    return told


def write_gateway(
    folder: Path, name: str, *, listen: str, admin: str, store: str, urls: Mapping[str, str], slots: int, lease_s: float
) -> None:
    """Write ``NAME.toml``. ``slots``: requests that one worker takes at once, from all gateways together."""
    lines = [
        "# Written by sentinel demo for one run.",
        "[gateway]",
        f"name = {_text(name)}",
        f"listen = {_text(listen)}",
        f"admin = {_text(admin)}",
        'drain = "2s"  # the demo has cut its streams by then',
        "[gateway.admission]",
        f'lease = "{lease_s:g}s"',
        "[gateway.admission.default]",
        f"worker_requests = {slots}",
        "[store]",
        f"url = {_text(store)}",
        *_fleet(urls),
    ]
    private(folder / f"{name}.toml", "\n".join(lines) + "\n")


def _text(value: object) -> str:
    return json.dumps(str(value))


def _fleet(urls: Mapping[str, str]) -> list[str]:
    """Pools, nodes and workers, as both daemons want them."""
    lines = [
        "[[pools]]",
        f"name = {_text(MAIN)}",
        f"model = {_text(MODEL)}",
        f"overflow = [{_text(OVERFLOW)}]",
        "[[pools]]",
        f"name = {_text(OVERFLOW)}",
        f"model = {_text(MODEL)}",
        "primary = false",
    ]
    for node in NODES:
        lines += ["[[nodes]]", f"name = {_text(node)}"]
    for place in PLACES.values():
        lines += [
            "[[workers]]",
            f"name = {_text(place.name)}",
            f"pool = {_text(place.pool)}",
            f"url = {_text(urls[place.name])}",
            f"role = {_text(place.role.value)}",
            f"gpus = [{', '.join(_text(g) for g in place.gpus)}]",
            f"domain = {_text(DOMAIN)}",
            f"capacity = {place.capacity:g}",
            f"standby = {'true' if place.standby else 'false'}",
        ]
    return lines

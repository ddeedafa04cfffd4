"""What the operator's commands show: tables for a person, times in words, and never a control character.

What always holds: text that came over the network loses its control characters and is never read as markup; a pipe gets
whole lines, a terminal gets its width.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import click

NODES_SHOWN = 40  # past that only those with something to say
SILENT = 15.0  # seconds without a report that are worth showing: three snapshots missed

MODES = {  # what is not done, since whoever looks here expects it to be
    "observe": "sentinel takes nothing out and pages nobody; it writes down what it would have done (sentinel explain)",
    "advise": "sentinel takes nothing out; its pages carry the command that would",
}


def draw_status(told: dict[str, Any]) -> None:
    leader = told.get("leader") or {}
    click.echo(clean(f"leader {leader.get('name', '?')} at {leader.get('url', '?')}, epoch {leader.get('epoch', '?')}"))
    mode = told.get("mode", "enforce")
    if mode != "enforce":
        click.secho(clean(f"MODE {str(mode).upper()}: {MODES.get(mode, 'not known to this command')}"), bold=True, fg="yellow")
    for would in told.get("would_have", ()):
        click.echo(clean(f"would have: {would}"))
    nodes = told.get("nodes", ())
    shown = nodes if len(nodes) <= NODES_SHOWN else [n for n in nodes if _notable(n)]
    few = f"; the {len(shown)} with something to say are shown" if len(shown) < len(nodes) else ""
    draw(
        f"{len(nodes)} nodes{few}", ("node", "last report", "found", "clock"),
        ((n["node"], age(n.get("last_report_s")), ", ".join(n.get("present", ())), n.get("clock", "")) for n in shown),
    )  # fmt: skip
    draw_windows([n["maintenance"] for n in nodes if n.get("maintenance")])
    workers = sorted(told.get("workers", ()), key=lambda w: (w["pool"], w["role"], w["worker"]))
    draw(
        f"{len(workers)} workers", ("pool", "role", "worker", "state", "answers", "drain", "why"),
        (
            (w["pool"], w["role"], w["worker"], w["state"], _yes(w.get("reachable")), w.get("drain_state") or "", _reason(w))
            for w in workers
        ),
    )  # fmt: skip
    for pool in told.get("pools", ()):
        ready = ", ".join(f"{role} {r['ready']:g} of {r['total']:g}" for role, r in pool.get("roles", {}).items())
        weight = f", weight {pool['weight']:g}" if pool.get("weight") is not None else ""
        scarce = f"; {pool['says']}" if pool.get("scarce") else ""
        panic = "; IN PANIC: gateways try all of its workers" if pool.get("panic") else ""
        click.echo(clean(f"pool {pool['pool']}: {ready or 'nothing'} ready{weight}{scarce}{panic}"))
    if told.get("deaf"):
        click.echo("so many nodes are silent that this controller may be cut off: nothing is drained for silence")
    replicas = told.get("gateways", ())
    if replicas:
        click.echo(clean("gateways: " + ", ".join(_replica(r, told.get("routes_version", 0)) for r in replicas)))
    draw(
        "breakers", ("worker", "breaker", "why", "seen by"),
        ((w["worker"], _breaker(b), b["why"], ", ".join(b["seen_by"])) for w in workers if (b := w.get("breaker"))),
    )  # fmt: skip
    if told.get("spare"):
        click.echo(f"{sum(len(o['gpus']) for o in told['spare'])} clean GPUs of groups that are down: sentinel spare")
    draw(
        "drains", ("drain", "worker", "state", "since", "by", "reason"),
        (
            (d["id"], d["worker"], state_of_drain(d), ago(d.get("since", d["requested_at"])), d.get("by", "sentinel"), d["reason"])
            for d in told.get("drains", ())
        ),
    )  # fmt: skip
    draw(
        "open incidents", ("incident", "fault", "culprit", "opened", "paged", "summary"),
        (
            (i["id"], i["fault"], i["culprit"], ago(i["opened_at"]), i.get("paged", ""), i.get("summary", ""))
            for i in told.get("incidents", ())
        ),
    )  # fmt: skip
    draw(
        "holds", ("target", "keep", "by", "until", "reason"),
        (
            (h["target"], h["keep"], h["by"], clock(h.get("until")) or "released", h["reason"])
            for h in told.get("holds", ())
            if not h.get("planned")
        ),
    )  # fmt: skip


def draw_windows(windows: list[dict[str, Any]]) -> None:
    draw(
        "under maintenance", ("node", "by", "until", "reason", "found meanwhile"),
        ((w["node"], w["by"], clock(w["until"]), w["reason"], "; ".join(w["found"])) for w in windows),
    )  # fmt: skip


def _reason(worker: dict[str, Any]) -> str:
    behind = ", ".join(worker.get("waits_for", ()))
    return str(worker.get("why", "")) + (f"; waits for {behind} to obey the table without it" if behind else "")


def _replica(told: dict[str, Any], newest: int) -> str:
    if not told["there"]:
        return f"{told['gateway']} (not heard of)"
    return str(told["gateway"]) + (f" (goes by table {told['obeys']}, {newest} is published)" if told["obeys"] < newest else "")


def _breaker(told: dict[str, Any]) -> str:
    pin = f", held {told['pin']} by {told['by']} until {clock(told['until'])}" if told.get("pin") else ""
    return str(told["state"]) + pin


def _notable(node: dict[str, Any]) -> bool:
    age = node.get("last_report_s")
    return age is None or age > SILENT or bool(node.get("clock") or node.get("present") or node.get("maintenance"))


def draw(title: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """One table; nothing at all when it has no rows."""
    from rich.console import Console  # noqa: PLC0415  (slow to import, and not needed for most answers)
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    drawn = [[Text(clean(cell)) for cell in row] for row in rows]
    if not drawn:
        return
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in head:
        table.add_column(name, overflow="fold")
    for row in drawn:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=240)  # a pipe has no width; cutting what grep looks for would be worse than long lines
    console.print(table)


def state_of_drain(drain: dict[str, Any]) -> str:
    return str(drain.get("state", "requested"))  # values that are their default are left out of the answer


def clean(text: Any) -> str:
    return "".join(c if c.isprintable() else "\N{MIDDLE DOT}" for c in str(text))


def clock(at: float | None) -> str:
    try:
        return "" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, OSError, ValueError):  # a year that no clock has
        return f"{at:g} s since 1970"


def ago(at: float | None) -> str:
    return "" if at is None else age(max(time.time() - at, 0.0)) + " ago"


def age(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "not known"}[value]

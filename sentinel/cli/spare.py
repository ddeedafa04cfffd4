"""``sentinel spare``: the healthy GPUs of groups that are down, and what a person could make of them.

This module exists because seven good GPUs that wait for the eighth are seen by nobody. What always holds: it shows the leader's
answer and changes nothing; packing ranks anew is done by hand, with the serving system's own means.
"""

from __future__ import annotations

import json

import click

from sentinel.cli.draw import clean, draw
from sentinel.cli.leader import Leader
from sentinel.cli.operate import as_json, talks


@click.command()
@as_json
@talks
def spare(*, leader: Leader, as_json: bool) -> None:
    """List GPUs that are clean though their group is down, by pool, role and NVLink domain, and whether they make a whole group."""
    told = leader.get("/v1/status").get("spare", [])
    if as_json:
        click.echo(json.dumps(told, indent=2, ensure_ascii=False))
        return
    if not told:
        click.echo("no group is down that leaves clean GPUs over")
        return
    draw(
        f"{sum(len(o['gpus']) for o in told)} spare GPUs", ("pool", "role", "domain", "node", "gpu", "of"),
        (
            (o["pool"], o["role"], o["domain"] or "not known", g["node"], g["pci"], g["group"])
            for o in told for g in o["gpus"]
        ),
    )  # fmt: skip
    for offer in told:
        click.echo(clean(f"{offer['pool']}, {offer['role']}: {', '.join(offer['groups'])} down; {offer['could']}"))
    click.echo("sentinel packs nothing anew by itself")

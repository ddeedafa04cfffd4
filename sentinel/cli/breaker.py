"""``sentinel breaker``: the breaker that all gateways share, held by a person.

This module exists so that somebody who knows better than the gateways can say so at once, to all of them. What always holds: what
is held has a reason and an end, and sentinel itself never changes it; failures read and exit as those of every other operator's
command (``operate``).
"""

from __future__ import annotations

import time

import click

from sentinel.cli.draw import clock
from sentinel.cli.leader import Leader
from sentinel.cli.operate import DURATION, answer, as_json, talks


@click.command()
@click.argument("worker")
@click.option("--open", "keep_open", is_flag=True, help="No gateway sends it anything.")
@click.option("--closed", "keep_closed", is_flag=True, help="Gateways send it requests however many fail.")
@click.option("--auto", is_flag=True, help="Hold it no more: what the gateways see decides again.")
@click.option("--for", "lasts", type=DURATION, help='How long: "30m", "2h"; at most 7 days.')
@click.option("--reason", required=True, help="What the next person on call will read.")
@as_json
@talks
def breaker(
    *, leader: Leader, worker: str, keep_open: bool, keep_closed: bool, auto: bool, lasts: float | None, reason: str, as_json: bool
) -> None:
    """Hold the breaker of a WORKER at every gateway, until the time is over or somebody says --auto."""
    if keep_open + keep_closed + auto != 1:
        raise click.UsageError("wanted one of --open, --closed and --auto")
    if auto:
        if lasts is not None:
            raise click.UsageError("--auto holds nothing: it goes without --for")
        told = leader.post("/v1/ask", {"verb": "unpin", "target": worker, "reason": reason})
        answer(told, as_json, f"the breaker of {worker} is held no more")
        return
    if lasts is None:
        raise click.UsageError('wanted --for: how long? It ends by itself ("--for 30m"), or with --auto')
    keep, state = ("out", "open") if keep_open else ("in", "closed")
    told = leader.post("/v1/ask", {"verb": "pin", "target": worker, "reason": reason, "keep": keep, "lasts_s": lasts})
    until = clock(time.time() + lasts)  # for the eye: the controller's clock counts
    answer(told, as_json, f"the breaker of {worker} is held {state} until {until}, or until: sentinel breaker {worker} --auto")

"""``sentinel maintain``: work on a node or a rack without its looking like a fault.

This module exists so that planned work is said once and undone by one word. What always holds: a window has an end, given by the
person who opens it; failures read and exit as those of every other operator's command (``operate``).
"""

from __future__ import annotations

import time

import click

from sentinel.cli.draw import clock
from sentinel.cli.leader import Leader
from sentinel.cli.operate import DURATION, answer, as_json, talks


@click.command()
@click.argument("target")
@click.option("--for", "lasts", type=DURATION, help='How long: "30m", "2h"; at most 7 days.')
@click.option("--reason", default="", help="What the next person on call will read.")
@click.option("--deadline", type=DURATION, help='For requests in flight: "90s", "2m".')
@click.option("--force", is_flag=True, help="More than 7 days.")
@click.option("--end", is_flag=True, help="The work is done: bring it back.")
@as_json
@talks
def maintain(
    *, leader: Leader, target: str, lasts: float | None, reason: str, deadline: float | None, force: bool, end: bool, as_json: bool
) -> None:
    """Work on a node or rack: its workers leave gently, and nothing that happens there is a fault until the time is over.

    Then, or with --end, they return by themselves: started where they are not there, tested, and looked at.
    """
    if end:
        if lasts is not None or deadline is not None or force:
            raise click.UsageError("--end ends a window now: it goes with none of --for, --deadline and --force")
        told = leader.post("/v1/ask", {"verb": "maintain", "target": target, "reason": reason, "end": True})
        answer(told, as_json, f"{target} is under maintenance no more; what is still found there counts")
        return
    if lasts is None:
        raise click.UsageError('wanted --for: how long? A window ends by itself ("--for 2h"), or with --end')
    if not reason.strip():
        raise click.UsageError("wanted --reason: what will the next person on call read?")
    ask = {"verb": "maintain", "target": target, "reason": reason, "lasts_s": lasts, "deadline_s": deadline, "force": force}
    told = leader.post("/v1/ask", ask)
    until = clock(time.time() + lasts)  # for the eye: the controller's clock counts
    answer(told, as_json, f"{target} is under maintenance until {until}, or until: sentinel maintain {target} --end")

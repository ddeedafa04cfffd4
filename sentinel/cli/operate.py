"""The operator's commands: look at the fleet, and have the last word about it.

This module exists so that whoever is woken at 3 a.m. can see what sentinel did and why, and overrule it, with one line. What
always holds:

* It starts fast: only the standard library until there is something to draw.
* Every failure is one sentence. Exit status: 0 done, 1 refused or failed, 2 the command line is wrong, 3 no leader reached.
* What comes from the network is shown without its control characters, and never read as markup.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sentinel.cli.draw import ago, clean, clock, draw, draw_status, draw_windows, state_of_drain
from sentinel.cli.leader import Leader, NoLeader, Refused
from sentinel.durations import parse_duration

F = TypeVar("F", bound=Callable[..., Any])

PAST_WAITING = ("out", "repairing", "starting", "verifying", "returning", "done")
POLL = 0.3  # seconds between two looks at a drain that is waited for
PATIENCE = 60.0  # seconds without a leader that --wait bears: a standby takes over within two lease periods
_NAMED = 6  # of many names, how many a line tells


class DurationType(click.ParamType[float]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return float(parse_duration(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


DURATION = DurationType()


def talks(command: F) -> F:
    """The options of every command that speaks to the controllers; hands over ``leader``."""

    def wrapped(controller: tuple[str, ...], token_file: Path | None, ca_file: Path | None, **rest: Any) -> Any:
        leader = Leader(controller, token_file, ca_file)
        try:
            return command(leader=leader, **rest)
        except BrokenPipeError:  # whoever read has read enough; click ends it quietly
            raise
        except OSError as error:
            raise Refused(f"the answer cannot be written: {error.strerror or error}") from None
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            if not leader.answered:
                raise
            what = f"{type(error).__name__}: {error}"
            raise Refused(f"{leader.answered} answered something else than a controller of this version would ({what})") from error

    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    wrapped.__click_params__ = list(getattr(command, "__click_params__", []))  # type: ignore[attr-defined]
    for option in (
        click.option("--ca-file", envvar="SENTINEL_CA_FILE", type=click.Path(path_type=Path), help="Trust for https controllers."),
        click.option("--token-file", envvar="SENTINEL_TOKEN_FILE", type=click.Path(path_type=Path), help="Holds your token."),
        click.option(
            "--controller", envvar="SENTINEL_CONTROLLER", multiple=True, default=("http://127.0.0.1:9455",), show_default=True,
            help="Base URL of a controller; give it once for each.",
        ),
    ):  # fmt: skip
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]


as_json = click.option("--json", "as_json", is_flag=True, help="Print the controller's answer as JSON.")


@click.command()
@as_json
@talks
def status(*, leader: Leader, as_json: bool) -> None:
    """Show who leads, nodes, workers, drains, open incidents and holds."""
    told = leader.get("/v1/status")
    if as_json:
        _print_json(told)
    else:
        draw_status(told)


@click.command()
@click.option("--open", "only_open", is_flag=True, help="Only those that are not over.")
@as_json
@talks
def incidents(*, leader: Leader, only_open: bool, as_json: bool) -> None:
    """List incidents, newest first."""
    told = [i for i in leader.get("/v1/incidents") if not only_open or i.get("closed_at") is None]
    if as_json:
        _print_json(told)
        return
    draw(
        f"{len(told)} incidents", ("incident", "fault", "culprit", "opened", "state", "summary"),
        ((i["id"], i["fault"], i["culprit"], ago(i["opened_at"]), _incident_state(i), i.get("summary", "")) for i in told),
    )  # fmt: skip


@click.command()
@click.argument("target")
@as_json
@talks
def explain(*, leader: Leader, target: str, as_json: bool) -> None:
    """Tell the chain from raw line to action for a node, a worker or an incident."""
    told = leader.get("/v1/explain/" + _quoted(target))
    if as_json:
        _print_json(told)
        return
    if told.get("now"):
        click.echo(clean(told["now"]))
    for hold in told.get("holds", ()):
        click.echo(clean(f"held {hold['keep']} by {hold['by']}: {hold['reason']}"))
    draw_windows(told.get("maintenance", []))
    for incident in told.get("incidents", ()):
        click.echo(clean(_account(incident)))
        for finding in incident.get("findings", ()):
            for line in finding.get("evidence", ()):
                click.echo(clean(f"  | {line}"))
    steps = told.get("steps", ())
    if not steps:
        click.echo("nothing was ever decided about it")
        return
    draw(
        "", ("when", "of", "what", "why", "rule", "event"),
        ((clock(s["at"]), s.get("of", ""), s["what"], s.get("why", ""), s.get("rule", ""), s.get("cause", "")) for s in steps),
    )  # fmt: skip


@click.command()
@click.argument("target")
@click.option("--reason", required=True, help="What the next person on call will read.")
@click.option("--deadline", type=DURATION, help='For requests in flight: "90s", "2m".')
@click.option("--wait", is_flag=True, help="Return when it is out of service.")
@as_json
@talks
def drain(*, leader: Leader, target: str, reason: str, deadline: float | None, wait: bool, as_json: bool) -> None:
    """Take a worker, or all workers on a node or GPU, out of service until somebody says undrain."""
    told = leader.post("/v1/ask", {"verb": "drain", "target": target, "reason": reason, "deadline_s": deadline})
    drains = told["drains"]
    if not wait:
        answer(told, as_json, f"{target}: nothing to drain there" if not drains else "")
        return
    ended = [_wait(leader, d, quiet=as_json) for d in drains]
    if as_json:
        _print_json({**told, "drains": ended})
    elif not ended:
        click.echo(clean(f"{target}: nothing to drain there"))
    failed = [d for d in ended if state_of_drain(d) not in PAST_WAITING]
    if failed:
        raise Refused(f"{', '.join(d['worker'] for d in failed)}: the drain was cancelled")


@click.command()
@click.argument("target")
@click.option("--reason", required=True, help="What the next person on call will read.")
@as_json
@talks
def undrain(*, leader: Leader, target: str, reason: str, as_json: bool) -> None:
    """Bring what was drained back: start it where it was stopped, verify it, give it traffic."""
    told = leader.post("/v1/ask", {"verb": "undrain", "target": target, "reason": reason})
    answer(told, as_json, f"{target}: nothing is drained there" if not told["drains"] else "")


@click.command()
@click.argument("target")
@click.option("--in", "keep_in", is_flag=True, help="sentinel must not take it out.")
@click.option("--out", "keep_out", is_flag=True, help="Take it out, and sentinel must not put it back.")
@click.option("--reason", required=True, help="What the next person on call will read.")
@click.option("--for", "lasts", type=DURATION, help='How long: "30m", "2h". Without it: until release.')
@as_json
@talks
def hold(
    *, leader: Leader, target: str, keep_in: bool, keep_out: bool, reason: str, lasts: float | None, as_json: bool
) -> None:
    """Overrule sentinel about a worker, node or GPU until it is released or the time is over."""
    if keep_in == keep_out:
        raise click.UsageError("wanted --in or --out: which way is it held?")
    keep = "in" if keep_in else "out"
    told = leader.post("/v1/ask", {"verb": "hold", "target": target, "reason": reason, "keep": keep, "lasts_s": lasts})
    until = time.time() + lasts if lasts is not None else None  # for the eye: the controller's clock counts
    answer(told, as_json, f"{target} is held {keep}" + (f" until {clock(until)}" if until else " until it is released"))


@click.command()
@click.argument("target")
@click.option("--reason", default="", help="What the next person on call will read.")
@as_json
@talks
def release(*, leader: Leader, target: str, reason: str, as_json: bool) -> None:
    """Lift a hold."""
    told = leader.post("/v1/ask", {"verb": "release", "target": target, "reason": reason})
    out = any(state_of_drain(d) == "out" for d in told["drains"])
    answer(told, as_json, f"{target} is held no more" + ("; what is out stays out until somebody says undrain" if out else ""))


@click.command()
@click.argument("incident")
@as_json
@talks
def acknowledge(*, leader: Leader, incident: str, as_json: bool) -> None:
    """Say that you are on it: the page of an INCIDENT stops calling others."""
    told = leader.post("/v1/ask", {"verb": "acknowledge", "target": incident})
    answer(told, as_json, f"{incident} is acknowledged")


@click.command()
@click.argument("incident")
@click.option("--reason", required=True, help="What the next person on call will read.")
@as_json
@talks
def resolve(*, leader: Leader, incident: str, reason: str, as_json: bool) -> None:
    """Declare an INCIDENT over, and end its page. What is still reported for an hour opens a new one."""
    told = leader.post("/v1/ask", {"verb": "resolve", "target": incident, "reason": reason})
    answer(told, as_json, f"{incident} is over")


# ---------------------------------------------------------------------------------------------------------------------


def _wait(leader: Leader, drain: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    """Follow one drain until it is out; a change of leader in between is waited for."""
    shown = ""
    lost_at: float | None = None
    while True:
        if not quiet and state_of_drain(drain) != shown:
            shown = state_of_drain(drain)
            click.echo(clean(f"{drain['worker']}: {shown}"))
        if state_of_drain(drain) in (*PAST_WAITING, "cancelled"):
            return drain
        time.sleep(POLL)
        try:
            drain = leader.get("/v1/drains/" + _quoted(drain["id"]))
            lost_at = None
        except NoLeader:
            lost_at = lost_at or time.monotonic()
            if time.monotonic() - lost_at > PATIENCE:
                raise


def answer(told: dict[str, Any], as_json: bool, sentence: str) -> None:
    if as_json:
        _print_json(told)
        return
    for d in told["drains"]:
        click.echo(clean(f"{d['worker']}: {state_of_drain(d)} ({d['id']})"))
    if sentence:
        click.echo(clean(sentence))


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _quoted(text: str) -> str:
    from urllib.parse import quote  # noqa: PLC0415

    return quote(text, safe="/@:")


def _account(incident: dict[str, Any]) -> str:
    """Whom it blames, how sure that is, from whom it takes capacity, and who shows it without being to blame."""
    told = f"{incident['id']}: {incident['fault']} on {incident['culprit']}, {incident.get('confidence', 1.0):.0%} sure"
    for words, names in (("takes capacity from", incident.get("victims", ())), ("not to blame", incident.get("scope", ()))):
        if names:
            told += f"; {words}: {', '.join(names[:_NAMED])}" + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    return told


def _incident_state(incident: dict[str, Any]) -> str:
    if incident.get("merged_into"):
        return f"merged into {incident['merged_into']}"
    return "open" if incident.get("closed_at") is None else f"over {ago(incident['closed_at'])}"

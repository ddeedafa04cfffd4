"""``sentinel replay``: decide a recorded period again, to prove it or to try another policy on what really happened.

What always holds: nothing is read but the journal and the policy, nothing is sent; exit status 0: the same decisions (or, with
``--policy``, the comparison was made), 1: they differ or the journal cannot be used.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from sentinel.cli.draw import clean
from sentinel.controller.journal import Entry, read_journal
from sentinel.decide.decider import Decider
from sentinel.decide.replay import ASSUMED_S, Deed, Proof, prove, retry
from sentinel.decide.rules.policy_file import PolicyError, default_policy, load_policy
from sentinel.decide.state.events import AnyInstruction, Effect, Forget, Record

TOLD = 40  # lines of a comparison, each way


@click.command()
@click.argument("journal", type=click.Path(exists=True, path_type=Path))
@click.option("--policy", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Try these rules instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay(journal: Path, policy: Path | None, as_json: bool) -> None:
    """Decide a recorded period again.

    JOURNAL is a controller's journal directory (controller.journal_dir) or one file of it. Without --policy every decision must
    come out as it was recorded. With --policy it says which incidents, pages, drains and repairs that policy would add or spare.
    """
    if policy is None:
        _prove(journal, as_json)
        return
    try:
        text = policy.read_text(encoding="utf-8")
        load_policy(text)
    except (OSError, UnicodeDecodeError, PolicyError) as error:
        raise click.ClickException(f"{policy}: {error}") from None
    _compare(journal, text, policy, as_json)


def _decider() -> Decider:
    """Its rules come with the first event."""
    return Decider(default_policy())


def _lines(journal: Path) -> Iterator[Entry]:
    try:
        yield from read_journal(journal)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None


def _prove(journal: Path, as_json: bool) -> None:
    proof = prove(_lines(journal), _decider)
    if as_json:
        click.echo(json.dumps(_proof(proof)))
    else:
        click.echo(f"{proof.events} events in {proof.stretches} leaderships" + _left_out(proof.left_out))
        for event, then, now in proof.differing:
            click.echo(f"{_clock(event.at)} {event.id} {type(event).__name__}: recorded {_names(then)}; decided now {_names(now)}")
        if proof.stretches:
            same = "every decision comes out as it was recorded"
            click.echo(same if proof.same else f"{proof.differ} events are decided otherwise")
    if not proof.stretches:
        raise click.ClickException(
            f"{journal}: {proof.left_out} entries and no leader's take-over among them, so nothing can be replayed; "
            "wanted a controller's journal directory"
        )
    if not proof.same:
        raise click.exceptions.Exit(1)


def _compare(journal: Path, text: str, policy: Path, as_json: bool) -> None:
    then, now = retry(_lines(journal), _decider, text)
    before, after = {(d.what, d.of): d for d in then}, {(d.what, d.of): d for d in now}
    spared = [d for key, d in before.items() if key not in after]
    added = [d for key, d in after.items() if key not in before]
    moved = [(before[k], after[k]) for k in before if k in after and abs(before[k].at - after[k].at) >= 1.0]
    if as_json:
        sides: dict[str, Any] = {"only_then": spared, "only_under_policy": added}
        told = {side: [{"what": d.what, "of": d.of, "at": d.at, "why": d.why} for d in kept] for side, kept in sides.items()}
        told["later_or_earlier"] = [{"what": a.what, "of": a.of, "by_s": round(b.at - a.at, 3)} for a, b in moved]
        click.echo(json.dumps(told | {"both": len(before.keys() & after.keys()), "assumed_effect_s": ASSUMED_S}))
        return
    click.echo(f"as recorded: {_sum(then)}")
    click.echo(f"under {policy.name}: {_sum(now)}")
    for title, kept in (("only as recorded", spared), (f"only under {policy.name}", added)):
        if kept:
            click.echo(f"\n{title}:")
        for d in kept[:TOLD]:
            click.echo(f"  {_clock(d.at)} {d.what}: {clean(d.of)}: {clean(d.why)[:160]}")
        if len(kept) > TOLD:
            click.echo(f"  and {len(kept) - TOLD} more (--json has them all)")
    for a, b in moved[:TOLD]:
        click.echo(f"  {a.what} {clean(a.of)}: {abs(b.at - a.at):.0f} s {'later' if b.at > a.at else 'earlier'}")
    if not (spared or added or moved):
        click.echo("no difference")
    click.echo(
        "\nEffects end as they did in the record; one that was never carried out is assumed to succeed. What the fleet reported "
        "stays as it was."
    )


def _proof(proof: Proof) -> dict[str, Any]:
    return {
        "events": proof.events,
        "leaderships": proof.stretches,
        "left_out": proof.left_out,
        "same": proof.same,
        "differ": proof.differ,
        "differing": [{"event": e.id, "at": e.at, "recorded": _names(a), "decided": _names(b)} for e, a, b in proof.differing],
    }


def _left_out(count: int) -> str:
    return f"; {count} events before the first take-over that is kept were left out" if count else ""


def _names(instructions: Sequence[AnyInstruction]) -> str:
    names = [_name(n) for n in instructions]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") if names else "nothing"


def _name(n: AnyInstruction) -> str:
    if isinstance(n, Record | Forget):
        return f"{type(n).__name__} {n.kind} {n.key}"
    assert isinstance(n, Effect)  # noqa: S101  (there is no other kind)
    return f"{type(n).__name__} {n.id}"


def _sum(kept: Sequence[Deed]) -> str:
    counts: dict[str, int] = {}
    for d in kept:
        counts[d.what] = counts.get(d.what, 0) + 1
    return ", ".join(f"{n} {what}s" for what, n in sorted(counts.items())) or "nothing of weight"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))



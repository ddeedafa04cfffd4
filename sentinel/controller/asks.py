"""What an operator may ask for, and why a request is turned away before the decider hears of it.

What always holds: a request that reaches the decider names something that exists, says why, and has times that make sense;
one that is turned away is told so in a sentence that names the key or the names that come close.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from sentinel.controller.ledger import Ledger
from sentinel.decide.state.events import Asked
from sentinel.durations import LONGEST_H
from sentinel.model import Component, pci_address

REASON_MAX = 500  # characters
TARGET_MAX = 300
DEADLINE_MAX = 86_400.0  # seconds that requests in flight are waited for
LONGEST_S = LONGEST_H * 3600.0
WINDOW_MAX = 7 * 86_400.0  # seconds a maintenance window may last unless somebody insists: a forgotten one hides a rack's faults


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator asks for. Times are seconds; ``until`` since the epoch."""

    verb: Literal["drain", "undrain", "hold", "release", "maintain", "pin", "unpin", "acknowledge", "resolve"]
    target: str
    reason: str = ""
    deadline_s: float | None = None
    keep: Literal["in", "out"] = "in"
    until: float | None = None
    lasts_s: float | None = None  # instead of ``until``, where the asker's clock need not be right
    end: bool = False  # of a maintenance window: it is over now
    force: bool = False  # a maintenance window of more than WINDOW_MAX


def written(target: str) -> str:
    """A GPU in the one spelling that is used inside (people paste ``00000009:01:00.0`` too); anything else as it is."""
    try:
        named = Component.parse(target)
        return str(msgspec.structs.replace(named, device=f"gpu@{pci_address(named.gpu)}")) if named.gpu else target
    except ValueError:
        return target


def refusal(ask: Ask, now: float) -> str:
    """Why the request makes no sense by itself; "" when it does."""
    if not ask.target:
        return "target: it is empty; wanted a worker, a node or a device"
    if len(ask.target) > TARGET_MAX:
        return f"target: it has {len(ask.target)} characters; wanted {TARGET_MAX} at most"
    if ask.verb in ("drain", "undrain", "hold", "pin", "unpin") and not ask.reason.strip():
        return f"reason: {ask.verb} needs one; it is what the next person on call will read"
    if sentence := _window(ask, now) or _pin(ask, now):
        return sentence
    if len(ask.reason) > REASON_MAX:
        return f"reason: it has {len(ask.reason)} characters; wanted {REASON_MAX} at most"
    if ask.deadline_s is not None and not (0 <= ask.deadline_s <= DEADLINE_MAX):
        return f"deadline_s: wanted seconds, from 0 to {DEADLINE_MAX:g}, got {ask.deadline_s!r}"
    if ask.lasts_s is not None and not (0 < ask.lasts_s < LONGEST_S):
        return f"lasts_s: wanted seconds, more than none and within ten years, got {ask.lasts_s!r}"
    if ask.lasts_s is not None and ask.until is not None:
        return "until: it is given twice, as a time and as lasts_s; wanted one of them"
    if ask.until is not None and not (now < ask.until < now + LONGEST_S):
        return f"until: wanted a time to come, within ten years, in seconds since 1970, got {ask.until!r}"
    return ""


def _window(ask: Ask, now: float) -> str:
    """Why this is no maintenance window; "" when it is one, or is about something else."""
    if ask.verb != "maintain":
        return "end, force: they are of maintain" if ask.end or ask.force else ""
    lasts = ask.until - now if ask.until is not None else ask.lasts_s
    if ask.end:
        return "lasts_s: a window that is to end now has no time left; wanted either" if lasts is not None else ""
    if not ask.reason.strip():
        return "reason: maintain needs one; it is what the next person on call will read"
    if lasts is None:
        return "lasts_s: maintain needs one: a window that nobody ends must end by itself"
    if lasts > WINDOW_MAX and not ask.force:
        return f"lasts_s: wanted {WINDOW_MAX / 86_400:g} days at most, or force, got {lasts / 86_400:.1f} days"
    return ""


def _pin(ask: Ask, now: float) -> str:
    """Why this holds no breaker; "" when it does, or is about something else."""
    if ask.verb != "pin":
        return ""
    lasts = ask.until - now if ask.until is not None else ask.lasts_s
    if lasts is None:
        return "lasts_s: pin needs one: a breaker that nobody lets go must be free again by itself"
    return f"lasts_s: wanted {WINDOW_MAX / 86_400:g} days at most, got {lasts / 86_400:.1f} days" if lasts > WINDOW_MAX else ""


def asked(ask: Ask, *, event: str, by: str, now: float) -> Asked:
    """The event that the decider hears."""
    return Asked(
        id=event, at=now, verb=ask.verb, target=ask.target, by=by, reason=ask.reason.strip(), deadline_s=ask.deadline_s,
        keep=ask.keep, until=now + ask.lasts_s if ask.lasts_s is not None else ask.until,
    )  # fmt: skip


def unknown(
    ask: Ask, ledger: Ledger, seen: Callable[[str], Iterable[Component]], nodes_of: Callable[[str], list[str]] = lambda target: []
) -> str:
    """Why the target is none; "" when it is one. ``seen``: what a node reported about; ``nodes_of``: a node's or a rack's nodes."""
    if ask.verb == "maintain":
        nodes = nodes_of(ask.target)
        if ask.end:
            maintained = sorted(h.target for h in ledger.holds.values() if h.planned)
            hint = f"under maintenance are: {', '.join(maintained) or 'none'}"
            return "" if set(nodes) & set(maintained) else f"{ask.target!r} is not under maintenance; {hint}"
        if nodes:
            return ""
        sentence = ledger.unknown(ask.target, seen).replace("no worker, node or device", "no node or rack", 1)
        return sentence or f"{ask.target!r} is neither a node nor a rack; maintain works on whole nodes"
    if ask.verb in ("pin", "unpin"):
        worker = ledger.workers.get(ask.target)
        if worker is not None and worker.adapter == "dynamo":
            return f"{ask.target!r} has no breaker of its own: gateways ask the Dynamo frontend of its pool"
        if worker is not None:
            return ""
        sentence = ledger.unknown(ask.target, seen).replace("no worker, node or device", "no worker", 1)
        return sentence or f"{ask.target!r} is no worker; wanted one: breakers are of single workers"
    if ask.verb == "release":
        held = sorted(ledger.holds)
        if ask.target in ledger.holds:
            return ""
        return f"nothing is held under {ask.target!r}; held are: {', '.join(held) if held else 'none'}"
    if ask.verb in ("acknowledge", "resolve"):
        known = [i.id for i in ledger.open_incidents()]
        hint = f"open are: {', '.join(known) or 'none'}"
        return "" if ask.target in known else f"no open incident has the id {ask.target!r}; {hint}"
    return ledger.unknown(ask.target, seen)

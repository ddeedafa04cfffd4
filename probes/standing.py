"""Whether a worker stands still: readings folded into a state, and the state judged. Pure.

This module exists so that the probe that looks and the judgement of a recording agree by construction. What always holds:

* Times are the reading's monotonic seconds; only the numbers that an engine's own steps change reset its clock.
* What was not measured leaves the state as it was: it neither stops a clock nor starts one.
* A verdict of frozen needs both: standing still, and a request of one token that nobody answered in time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from probes.thresholds import limits as thresholds
from sentinel.model import Action, Severity, Suspect

Seen = Mapping[str, Any]
State = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What is to be said about one check; ``present`` False: measured and fine."""

    check: str
    present: bool
    severity: Severity = Severity.INFO
    action: Action = Action.NONE
    suspect: Suspect = Suspect.APP
    certainty: float = 1.0
    summary: str = ""
    evidence: tuple[str, ...] = ()


def by(own: Mapping[str, float]) -> dict[str, float]:
    """The numbers that a worker is judged by: the thresholds (``[worker]``), under what the probe's own options say."""
    return {**msgspec.structs.asdict(thresholds().worker), **own}


def who(seen: Seen) -> list[Any]:
    """Which process this is: another one starts with a clean slate."""
    return [seen.get("pid"), seen.get("started")]


def fold(before: State, seen: Seen) -> State:
    """Take one look at a worker into its state. Plain JSON values in and out."""
    now = float(seen["mono"])
    state: State = {"who": [None, None], "instance": "", "answered": False, "well": False, "made": False,
                    "mute": None, "ranks": {}, "failed": 0, "asked": None, "at": now, **before}  # fmt: skip
    state["at"] = now
    restarted = None not in (*who(seen), *state["who"]) and who(seen) != state["who"]
    restarted |= bool(seen.get("instance") and state["instance"] and seen["instance"] != state["instance"])
    if restarted:
        state |= {"well": False, "made": False, "mute": None, "ranks": {}, "failed": 0, "asked": None, "instance": ""}
    if None not in who(seen):
        state["who"] = who(seen)
    state["instance"] = seen.get("instance") or state["instance"]
    how = (seen.get("health") or {}).get("how")
    if how is None:
        return state
    state["answered"] |= how == "answered"
    state["mute"] = (now if state["mute"] is None else state["mute"]) if how == "timeout" else None
    if how == "refused":
        state |= {"ranks": {}, "failed": 0, "asked": None}
    state["well"] |= seen.get("healthy") is True
    state["made"] |= bool(seen.get("progress"))

    ranks, moved = {}, False
    for name, rank in (seen.get("ranks") or {}).items():
        last = state["ranks"].get(name)
        steps = last is None or last["moving"] != rank["moving"]
        begins = last is not None and not last["running"] and rank["running"]  # idle until now: its clock starts now
        moved |= last is not None and steps
        ranks[name] = {**rank, "since": now if steps or begins else last["since"], "at": now}
    state["ranks"] = ranks or state["ranks"]

    token = seen.get("token")
    if token:
        state["asked"] = now
    if moved or (token and token["ok"]):
        state["failed"] = 0
    elif token and token["ok"] is False and token["how"] == "timeout":
        state["failed"] += 1
    if seen["engine"] == "dynamo" and state["well"] and seen.get("healthy") is False and not moved:
        state["failed"] = max(1, state["failed"])  # Dynamo's own canary asked its engine and got no answer
    return state


def still(state: State, limits: Mapping[str, float]) -> tuple[str, float]:
    """Why it seems to stand still, as a clause for a person, and since when; ``("", 0)`` when it does not."""
    if state["mute"] is not None and state["answered"]:  # one that never answered is being started, however it keeps its port
        quiet = state["at"] - state["mute"]
        if quiet < limits["stall_s"]:
            return "", 0
        return f"has answered nothing for {quiet:.1f} s though its port is open", state["mute"]
    limit = limits["stall_s"] if state["made"] else max(limits["stall_s"], limits["warmup_s"])
    for name, rank in state["ranks"].items():
        flat = rank["at"] - rank["since"]
        if rank["running"] and rank["moving"] and flat >= limit:
            part = f"engine {name}" if len(state["ranks"]) > 1 else "its engine"
            return f"has {rank['running']} requests running but {part} made no step for {flat:.1f} s", rank["since"]
    return "", 0


def idle(state: State, limits: Mapping[str, float]) -> bool:
    """Whether nothing runs and nothing has moved for so long that only a request can tell whether the engine lives."""
    ranks = state["ranks"].values()
    enough = limits["idle_s"]
    return bool(ranks) and enough > 0 and all(not r["running"] and r["at"] - r["since"] >= enough for r in ranks)


def wants_token(state: State, limits: Mapping[str, float]) -> bool:
    """Whether it should be asked for one token now: once as soon as it stands still, then now and then."""
    why, since = still(state, limits)
    asked = state["asked"]
    if why:
        return asked is None or asked <= since or state["at"] - asked >= limits["canary_again_s"]
    if not idle(state, limits):
        return False
    # An idle engine has only this one witness, so a failure is checked at once.
    in_doubt = 0 < state["failed"] < limits["idle_unanswered"]
    return asked is None or in_doubt or state["at"] - asked >= max(limits["idle_s"], limits["canary_again_s"])


def judge(seen: Seen, state: State, limits: Mapping[str, float]) -> list[Verdict]:
    """What this look, and those folded into ``state``, say about the worker. Checks that were not measured are left out."""
    health = seen.get("health")
    if not health:
        return []
    evidence = _evidence(seen)
    said: list[Verdict] = []
    if health["how"] == "refused":
        if not seen.get("worker") and seen.get("alive") is False:
            # It was only ever found by its process, and that has ended, as a process does at every roll-out: nobody misses it.
            said += [Verdict(check, False) for check in ("worker.unreachable", "worker.dead", "worker.stalled", "worker.frozen")]
        elif state["answered"]:
            end = "its process has ended" if seen.get("alive") is False else "nothing listens at its port any more"
            said.append(Verdict("worker.unreachable", True, Severity.FATAL, Action.RESTART_WORKER,
                                summary=f"is gone: {end}", evidence=evidence))  # fmt: skip
        return said
    if health["how"] == "answered":
        said.append(Verdict("worker.unreachable", False))
        if seen.get("healthy") is True:
            said.append(Verdict("worker.dead", False))
        elif seen.get("healthy") is False and seen["engine"] == "vllm":
            said.append(Verdict("worker.dead", True, Severity.FATAL, Action.RESTART_WORKER,
                                summary="says itself that its engine has died", evidence=evidence))  # fmt: skip
    why, _ = still(state, limits)
    if why:
        said.append(Verdict("worker.stalled", True, Severity.WARNING, certainty=0.6, summary=why, evidence=evidence))
        if state["failed"]:
            said.append(Verdict("worker.frozen", True, Severity.FATAL, Action.RESTART_WORKER, certainty=0.95,
                                summary=f"{why}, and a request of one token got no answer", evidence=evidence))  # fmt: skip
    elif health["how"] == "answered" and seen.get("ranks"):
        said.append(Verdict("worker.stalled", False))
        if idle(state, limits) and state["failed"] >= limits["idle_unanswered"]:
            why = f"is idle and left {state['failed']} requests of one token unanswered"
            said.append(Verdict("worker.frozen", True, Severity.FATAL, Action.RESTART_WORKER, certainty=0.95,
                                summary=why, evidence=evidence))  # fmt: skip
        elif not state["failed"]:
            said.append(Verdict("worker.frozen", False))
    return said


def _evidence(seen: Seen) -> tuple[str, ...]:
    health, token = seen["health"], seen.get("token")
    lines = [f"health={health['status'] if health['how'] == 'answered' else health['how']}"]
    lines += [f"{k}={seen[k]}" for k in ("pid", "running", "waiting", "progress", "instance") if seen.get(k) not in (None, "")]
    if token:
        lines.append(f"one_token={'answered' if token['ok'] else token['why']} after {token['seconds']:.2f} s")
    return tuple(lines)

"""What a serving stack's log means: which line is the cause, which its echo, which is nothing, and what to do first.

This module exists because a dying worker prints hundreds of lines, most of them about its victims, and a healthy one prints
lines that look as bad. What always holds:

* It judges readings made of text (``serving_lines.parse``); no live probe makes them yet. A log proves less than a
  measurement: no rule of the shipped policy takes anything out of service for ``serving.*``.
* One fault has one cause: a line that another explains is kept, says ``caused_by`` and asks for nothing; the cause takes over
  how bad it became.
* What a process or its peer prints after it was told to stop means nothing. The same text without that is a fault.
* Who reports a lost transfer or a hung collective is its victim: the finding is about the reporter and suspects the peer.

Checks are ``serving.<kind>``; the kinds stand in ``catalog/serving_kinds.tsv``. Components are ``worker@<pod, host or pid>`` and
``router``. Pure: memory is plain JSON values.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from probes import serving_rates
from probes.serving_lines import ANY, ServingKind, kinds
from probes.thresholds import limits
from sentinel.model import Action, Component, Finding, Kind, Reading, Severity, Suspect

WR_FLUSH_ERR = "5"  # ibv_wc_status of libibverbs: flushed because the queue pair had failed before

_PEOPLE = ("noise", "context")
_CAUSES = ("engine", "cuda", "collective", "kv_transfer")
_TRACEBACKS = ("engine_dead", "engine_start_failed", "worker_exception")  # printed first, their cause at the traceback's end
_SHOWN = 8
_DERIVED = ("engine_zombie", "crash_exit_zero")  # what the server did after its engine's end
_EXITS = {
    "-6": "it aborted itself", "-7": "bus error: /dev/shm or bad memory", "-9": "it was killed: look for the OOM killer",
    "-11": "it crashed in native code",
}


@dataclass(frozen=True)
class Happening:
    """Lines of one kind at one place, folded."""

    kind: str
    where: str
    line: int
    clock: str = ""
    at: float | None = None
    last_line: int = 0
    last_at: float | None = None
    count: int = 1
    evidence: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    note: str = ""  # what its lines say together, a clause


def assess(reading: Reading, memory: dict[str, Any]) -> list[Finding]:
    """Judge what the lines of one reading say, together."""
    events = [e for e in reading.data.get("events", ()) if e[0] in kinds()]
    names = _names(reading.data, memory)
    happened = _fold(events, names)
    happened += serving_rates.happenings(reading.data, names, memory, Happening)
    happened = _together(happened)
    stops = _stops(happened, memory)
    faults = [h for h in happened if kinds()[h.kind].family != "context"]
    real = [h for h in faults if not _stopping(h, stops)]
    causes = {_key(h): cause for h in faults if (cause := _cause(h, faults if h not in real else real)) is not None}
    raised: dict[tuple[str, str], Severity] = {}
    for h in faults:
        chain = [_key(h)]
        while (cause := causes.get(chain[-1])) is not None:
            if _key(cause) in chain:  # each explains the other: the earlier one stands as the cause
                del causes[chain[-1]]
                break
            chain.append(_key(cause))
        if len(chain) > 1 and not _stopping(h, stops):
            raised[chain[-1]] = max(raised.get(chain[-1], Severity.INFO), kinds()[h.kind].severity, key=lambda s: s.rank)
    return [
        _finding(_Judged(h, causes.get(_key(h)), raised.get(_key(h)), _stopping(h, stops)), reading, memory) for h in faults
    ]


def _key(h: Happening) -> tuple[str, str]:
    return h.kind, h.where


# -- who speaks ---------------------------------------------------------------------------------------------------------------


def _names(data: dict[str, Any], memory: dict[str, Any]) -> dict[str, str]:
    """Group in the reading → the worker's name. Lines without a group belong to the only one there is, else go by their pid."""
    named = sorted({e[1] for e in data.get("events", ())} | {s[0] for s in data.get("samples", ())} - {""})
    found = {g: f"worker@{g}" for g in named if g}
    if data.get("pid"):
        memory.setdefault("pid", data["pid"])
    found[""] = next(iter(found.values())) if len(found) == 1 else f"worker@{memory.get('pid', 'pasted')}"
    return found


def _fold(events: list[list[Any]], names: dict[str, str]) -> list[Happening]:
    """One happening per kind and worker."""
    found: dict[tuple[str, str], Happening] = {}
    peers: dict[tuple[str, str], Counter[str]] = {}
    for kind, group, role, _, line, clock, at, last_line, last_at, count, text, fields in events:
        if kind == "nccl_net" and fields.get("status") == WR_FLUSH_ERR:
            kind = "ucx_flushed"  # noqa: PLW2901  (an echo, whoever prints it)
        if kind == "worker_died" and fields.get("exit") in ("-15", "0"):
            kind = "stop"  # noqa: PLW2901
        where = "router" if kinds()[kind].family == "router" else names[group]
        key = (kind, where)
        peer = ", ".join(f"{k} {fields[k]}" for k in ("engine", "host", "worker") if k in fields)
        if peer:
            peers.setdefault(key, Counter())[peer] += count
        known = found.get(key)
        facts = known.facts if known else {}
        for name in ("role", "rank", "exit", "status", "hca", "engine", "host", "port", "worker", "call", "failure", "expected"):
            value = role if name == "role" else fields.get(name)
            if value and value not in (values := facts.setdefault(name, [])) and len(values) < _SHOWN:
                values.append(value)
        if "enqueued" in fields and "rank" in fields:
            facts.setdefault("enqueued", {})[fields["rank"]] = int(fields["enqueued"])
        if known is None:
            found[key] = Happening(kind, where, line, clock, at, last_line, last_at, count, (text,), (), facts)
        else:
            same = clock == known.clock and last_at is not None
            found[key] = replace(
                known, count=known.count + count, last_line=max(known.last_line, last_line),
                last_at=max(last_at, known.last_at or last_at) if same else known.last_at,
                evidence=(*known.evidence, text)[:3],
            )
    named = {k: tuple(p for p, _ in c.most_common(_SHOWN)) for k, c in peers.items()}
    return [replace(h, peers=named.get(k, ()), note=_note(h)) for k, h in found.items()]


def _note(h: Happening) -> str:
    if enqueued := h.facts.get("enqueued"):
        least = min(enqueued.values())
        behind = sorted((r for r, n in enqueued.items() if n == least), key=int)
        if least < max(enqueued.values()):
            h.facts["behind"] = behind[:_SHOWN]
            return f"rank {', '.join(behind[:_SHOWN])} had got the least far: look there"
    if h.kind == "worker_died" and (codes := h.facts.get("exit")):
        return "; ".join(f"exit code {c}" + (f" ({_EXITS[c]})" if c in _EXITS else "") for c in codes)
    return ""


# -- what lines mean together -------------------------------------------------------------------------------------------------


def _together(happened: list[Happening]) -> list[Happening]:
    """Add what only several lines say; what has grown into something worse is replaced by it."""
    t = limits().serving_log
    found = {(h.kind, h.where): h for h in happened}

    def first(where: str, *names: str) -> Happening | None:
        there = [h for h in happened if h.kind in names and h.where == where]
        return min(there, key=lambda h: h.line, default=None)

    def anywhere(*names: str) -> Happening | None:
        return min((h for h in happened if h.kind in names), key=lambda h: h.line, default=None)

    for where in {h.where for h in happened}:
        died = min((h for h in happened if h.where == where and _ends_engine(kinds()[h.kind])), key=lambda h: h.line, default=None)
        if died is not None:
            answers = [h for n in ("answer_ok", "answer_500") if (h := first(where, n)) and h.last_line > died.line]
            ended = [h for n in ("stopped", "exit_zero") if (h := first(where, n)) and h.last_line > died.line]
            if ended:
                found["crash_exit_zero", where] = replace(ended[0], kind="crash_exit_zero", line=ended[0].last_line)
            elif answers and (answers[0].kind == "answer_ok" or died.count > 1):
                found["engine_zombie", where] = replace(answers[0], kind="engine_zombie", line=answers[0].last_line)
        notify, lost = first(where, "nixl_notify"), first(where, "nixl_disconnect", "nixl_transfer")
        if notify and lost and notify.last_line >= lost.line:
            found["kv_corruption_risk", where] = replace(lost, kind="kv_corruption_risk", evidence=lost.evidence + notify.evidence)
        failing, hanging = first(where, "nixl_transfer", "nixl_disconnect", "ucx_timeout", "nixl_handshake"), anywhere("hangs")
        if failing and hanging:
            found["kv_half_open", where] = replace(failing, kind="kv_half_open", evidence=failing.evidence + hanging.evidence)
        waited, starting, started = first(where, "shm_wait"), first(where, "starting"), first(where, "started")
        if waited and starting and starting.line < waited.line and not (started and started.line < waited.last_line):
            found["startup_noise", where] = replace(found.pop(("shm_wait", where)), kind="startup_noise")
        if (port := first(where, "nccl_port")) and (back := first(where, "peer_port_back")) and back.last_line > port.last_line:
            found["nccl_port", where] = replace(port, note="it came back: a flap")
    stale = found.get(("registry_stale", "router"))
    if stale and stale.at is not None and stale.last_at is not None and stale.last_at - stale.at > t.lease_s:
        del found["registry_stale", "router"]
        found["registry_dead", "router"] = replace(stale, kind="registry_dead", note=f"for {stale.last_at - stale.at:.0f} s")
    moved = found.get(("migration", "router"))
    if moved and moved.count >= t.moved_streams and len(moved.facts.get("worker", ())) == 1:
        found["migration_source", "router"] = replace(moved, kind="migration_source")
    for (kind, where), h in list(found.items()):
        span = (h.last_at - h.at) if h.at is not None and h.last_at is not None else None
        often = span is None or h.count * t.preemptions_window_s >= t.preemptions * span
        if kind == "kv_preempted" and h.count >= t.preemptions and often:
            found["preempt_storm", where] = replace(found.pop((kind, where)), kind="preempt_storm")
    return sorted(found.values(), key=lambda h: h.line)


def _ends_engine(kind: ServingKind) -> bool:
    return kind.severity is Severity.FATAL and kind.family in ("engine", "cuda", "collective") and kind.name not in _DERIVED


def _cause(h: Happening, faults: list[Happening]) -> Happening | None:
    """The happening that explains this one: what ends its traceback, else the first that fits."""
    kind, t = kinds()[h.kind], limits().serving_log
    found: Happening | None = None
    for other in faults:
        by = kinds()[other.kind]
        named = other.kind in kind.after
        if other is h or not (named or (ANY in kind.after and _may_cause(by) and other.kind != h.kind)):
            continue
        if other.where != h.where and by.family not in ("collective", "kv_transfer"):
            continue
        ordered = not named or (kind.severity is Severity.FATAL and kind.family != "kv_transfer")
        below = h.kind in _TRACEBACKS and 0 < other.line - h.line <= t.traceback_lines and _ends_traceback(by)
        if ordered and not other.line < h.line and not below:
            continue
        apart = h.at - other.at if h.clock == other.clock and h.at is not None and other.at is not None else 0.0
        if abs(apart) > t.echo_s:
            continue
        if below:
            return other
        found = found or other
    return found


def _ends_traceback(kind: ServingKind) -> bool:
    return kind.family == "cuda" or kind.name in ("nccl_error", "rpc_timeout", "all2all_timeout")


def _may_cause(kind: ServingKind) -> bool:
    return (
        kind.family in _CAUSES and kind.severity is not Severity.INFO and ANY not in kind.after
        and kind.name not in (*_DERIVED, "shm_wait", "stalled", "stuck_queue", "kv_expired", "crash_loop")
    )


def _stops(happened: list[Happening], memory: dict[str, Any]) -> dict[str, Happening]:
    """Where somebody asked for a stop, and no fault had come before it."""
    found: dict[str, Happening] = {}
    for h in happened:
        if h.kind == "stop":
            again = [o for o in happened if o.kind == "started" and o.where == h.where and o.last_line > h.last_line]
            before = [o for o in happened if o.where == h.where and o.line < h.line and _ends_engine(kinds()[o.kind])]
            if not before:
                found[h.where] = replace(h, last_line=again[0].last_line if again else 0)  # where it ended
    for where, (clock, at) in memory.get("stops", {}).items():
        found.setdefault(where, Happening("stop", where, 0, clock, at))
    memory["stops"] = {h.where: [h.clock, h.at] for h in list(found.values())[:64]}
    return found


def _stopping(h: Happening, stops: dict[str, Happening]) -> bool:
    """Whether what it says is what one prints while it or its peer is being stopped."""
    kind = kinds()[h.kind]
    if not kind.stop or kind.family in _PEOPLE:
        return False
    shared, stop_s = kind.family in ("kv_transfer", "collective", "router"), limits().serving_log.stop_s
    for stop in stops.values():
        late = h.clock == stop.clock and h.at is not None and stop.at is not None and h.at - stop.at > stop_s
        over = stop.last_line and h.line > stop.last_line
        if (shared or stop.where == h.where) and stop.line <= h.line and not late and not over:
            return True
    return False


class _Judged(NamedTuple):
    happening: Happening
    cause: Happening | None  # what explains it
    raised: Severity | None  # how bad its consequences are
    stopping: bool


def _finding(judged: _Judged, reading: Reading, memory: dict[str, Any]) -> Finding:
    h, cause, raised, stopping = judged
    kind = kinds()[h.kind]
    where = Component(node=reading.node, device=h.where)
    facts: dict[str, Any] = {k: v for k, v in h.facts.items() if v} | {"first": kind.first, "line": h.line}
    if h.peers and kind.suspect is Suspect.PEER:
        facts["peers"] = list(h.peers)
    severity, action, drain = kind.severity, kind.action, kind.drain
    if stopping:
        severity, action, drain = Severity.INFO, Action.NONE, "none"
        facts["while_stopping"] = True
        facts["first"] = "nothing: its owner was told to stop"
    elif cause is not None:
        severity, action, drain = Severity.INFO, Action.NONE, "none"
        facts["caused_by"] = f"serving.{cause.kind}"
        facts["first"] = f"follow serving.{cause.kind}"
    elif raised is not None and action not in (Action.NONE, Action.WAIT):
        severity = max(severity, raised, key=lambda s: s.rank)
    facts["drain"] = drain
    peer = f" ({h.peers[0]}{f' and {len(h.peers) - 1} more' if len(h.peers) > 1 else ''})" if h.peers else ""
    note = f"; {h.note}" if h.note else ""
    name = "The router" if h.where == "router" else f"Worker {h.where.partition('@')[2]}"
    counts: dict[str, int] = memory.setdefault("counts", {})
    first: dict[str, str] = memory.setdefault("ids", {})
    key = f"serving.{h.kind}@{where}"
    counts[key] = min(counts.get(key, 0) + h.count, 2**53)
    lasting = h.kind in ("stalled", "stuck_queue", "queue_growing")
    return Finding(
        id=first.setdefault(key, f"{key}@{reading.at if h.at is None or h.clock != 'y' else h.at:.3f}"),
        check=f"serving.{h.kind}", component=where, at=h.at if h.at is not None and h.clock == "y" else reading.at,
        kind=Kind.STATE if lasting else Kind.EVENT, severity=severity, action=action, suspect=kind.suspect,
        certainty=0.7 if severity is Severity.WARNING else 0.9, summary=f"{name}: {kind.says}{peer}{note}.",
        evidence=h.evidence[:3], count=counts[key], facts=facts,
    )

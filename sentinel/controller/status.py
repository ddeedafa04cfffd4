"""The fleet's picture as ``GET /v1/status`` shows it: what the decider thinks, what is durable, and who says so.

This module exists so that what the decider cannot know (who leads, when a report arrived, which clocks are not believed)
joins its picture in one place. What always holds: incidents, drains and holds shown are durable ones.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sentinel.controller.ingest import NodeHeard
from sentinel.controller.term import Term


def status_of(term: Term, *, name: str, url: str, now: float) -> dict[str, Any]:
    """Plain JSON values; times are seconds since the epoch, ages and durations seconds."""
    ledger = term.ledger
    told = term.core.decider.status()
    nodes = {n["node"]: n for n in told.get("nodes", ())}
    for node in sorted({*ledger.nodes, *term.ingest.nodes}):
        nodes[node] = {"node": node, **nodes.get(node, {}), **_heard(term.ingest.nodes.get(node), now)}
    states = ledger.states()
    workers = {w["worker"]: w for w in told.get("workers", ())}
    for w in ledger.fleet.workers:
        known = {"worker": w.name, "pool": w.pool, "role": w.role.value, "state": states[w.name].value}
        workers[w.name] = known | workers.get(w.name, {})
    return {
        **told,
        "leader": {"name": name, "url": url, "epoch": term.lease.epoch, "since": term.began_at},
        "at": now,
        "nodes": list(nodes.values()),
        "workers": list(workers.values()),
        "incidents": msgspec.to_builtins(sorted(ledger.open_incidents(), key=lambda i: (i.opened_at, i.id), reverse=True)),
        "drains": msgspec.to_builtins(sorted(ledger.open_drains(), key=lambda d: (d.requested_at, d.id))),
        "holds": msgspec.to_builtins(sorted(ledger.holds.values(), key=lambda h: h.target)),
        "effects_pending": len(ledger.pending),
        "backlog": term.core.backlog,
    }


def _heard(heard: NodeHeard | None, now: float) -> dict[str, Any]:
    if heard is None or not heard.at:
        return {"last_report_s": None, "clock": ""}
    off = heard.clock_off
    clock = "" if heard.clock_trusted else f"clock off by {off:+.0f} s: its findings carry the time of their arrival"
    age = round(max(now - heard.at, 0.0), 3)
    return {"last_report_s": age, "clock_off_s": round(off, 3), "clock": clock, "version": heard.version}

"""The table of states that every worker's way out and back moves along.

This module exists so that every way a drain can go stands in one place. What always holds: a state changes only by a move that
is here; what is not here (a late answer) changes nothing.

::

    REQUESTED ─derouted─▶ DEROUTED ─idle/deadline─▶ STOPPING ─stopped─▶ OUT ─repair─▶ REPAIRING ─repaired─▶ STARTING
        └──(evict)──────────────────────────────────────┘               │ └─(no hardware repair)──────────────▲
                                                                         └─(parked)─▶ VERIFYING ◀──started──────┘
                                        DONE ◀─rerouted─ RETURNING ◀─passed─┘

    (steer) ─▶ EASED ─passed/cancel─▶ RETURNING      (cordon) REQUESTED ─eased─▶ EASED      EASED ─again─▶ REQUESTED (worse news)
"""

from __future__ import annotations

from sentinel.model import Drain, DrainState, Response

S = DrainState

MOVES: dict[tuple[DrainState, str], DrainState] = {
    (S.REQUESTED, "derouted"): S.DEROUTED,
    (S.REQUESTED, "evicted"): S.STOPPING,
    (S.DEROUTED, "evicted"): S.STOPPING,
    (S.DEROUTED, "stop"): S.STOPPING,
    (S.DEROUTED, "park"): S.OUT,
    (S.STOPPING, "stopped"): S.OUT,
    (S.REQUESTED, "stopped"): S.OUT,  # evicted: its deroute never answered, but it is gone
    (S.STOPPING, "retired"): S.DONE,
    (S.OUT, "repair"): S.REPAIRING,
    (S.OUT, "start"): S.STARTING,
    (S.OUT, "verify"): S.VERIFYING,
    (S.OUT, "evicted"): S.STOPPING,
    (S.STARTING, "evicted"): S.STOPPING,  # worse news on the way back
    (S.VERIFYING, "evicted"): S.STOPPING,
    (S.RETURNING, "evicted"): S.STOPPING,
    (S.REPAIRING, "repaired"): S.STARTING,
    (S.REPAIRING, "next"): S.OUT,  # another part of it needs a repair of its own
    (S.REPAIRING, "failed"): S.OUT,
    (S.STARTING, "started"): S.VERIFYING,
    (S.STARTING, "failed"): S.OUT,
    (S.VERIFYING, "passed"): S.RETURNING,
    (S.VERIFYING, "failed"): S.OUT,
    (S.RETURNING, "rerouted"): S.DONE,
    (S.RETURNING, "again"): S.REQUESTED,  # it has traffic already: out the way it went before
    (S.REQUESTED, "cancel"): S.RETURNING,
    (S.REQUESTED, "eased"): S.EASED,  # cordoned: it keeps what it has
    (S.REQUESTED, "again"): S.REQUESTED,  # worse news before that was carried out
    (S.EASED, "again"): S.REQUESTED,  # worse news about a worker that serves on
    (S.EASED, "passed"): S.RETURNING,
    (S.EASED, "cancel"): S.RETURNING,
    (S.DEROUTED, "cancel"): S.RETURNING,
}

WORKING = (S.REQUESTED, S.DEROUTED, S.STOPPING, S.REPAIRING, S.STARTING, S.RETURNING)  # an effect must be outstanding

VERBS = {  # the effects that a state waits for
    S.REQUESTED: ("deroute", "stop"),
    S.DEROUTED: ("idle",),
    S.STOPPING: ("stop",),
    S.REPAIRING: ("repair",),
    S.STARTING: ("start",),
    S.VERIFYING: ("verify",),
    S.RETURNING: ("reroute",),
}

TOLD = {
    S.EASED: "eased",
    S.DEROUTED: "out of rotation",
    S.STOPPING: "stopping",
    S.OUT: "out of service",
    S.REPAIRING: "repairing",
    S.STARTING: "starting",
    S.VERIFYING: "verifying",
    S.RETURNING: "verified",
    S.DONE: "back",
}

GENTLE = (Response.STEER, Response.CORDON)  # it serves on, and nothing is done to its process
_RANK = {response: n for n, response in enumerate(Response)}  # in the order of the model: each is gentler than the next


def rank(response: Response) -> int:
    return _RANK[response]


def gentle(drain: Drain) -> bool:
    """Whether this is a worker that serves on, steered or cordoned (or about to be)."""
    return drain.kind == "drain" and drain.response in GENTLE and drain.state in (S.REQUESTED, S.EASED)

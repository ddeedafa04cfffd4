"""The scenario table, gateways: what clients feel is evidence beside what agents measure, and weighs what it is worth.

What always holds: as in the hardware's part (sentinel/sim/table_hardware.py), whose trays and names these rows use; the gateways
are simulated (sentinel/sim/relays.py).
"""

from __future__ import annotations

from collections.abc import Callable

from sentinel.decide.state.events import PinBreaker, StopWorker
from sentinel.model import Action
from sentinel.sim import faults as x
from sentinel.sim.fleet import SimFleet
from sentinel.sim.hands import Fault
from sentinel.sim.table import Case
from sentinel.sim.table_hardware import T

DECODERS = [f"r1-decode-{n}" for n in range(1, 9)]
MAIN = ["r1-prefill-1", "r1-prefill-2", *DECODERS]


def _behind(*hosts: str) -> Callable[[], SimFleet]:
    """A fleet whose clients come through these gateway hosts."""

    def fleet() -> SimFleet:
        f = SimFleet()
        f.relays.hosts = hosts
        return f

    return fleet


def fails_clients(f: SimFleet, worker: str) -> Fault:
    """Every answer to a client fails behind a green /health; a restart mends it."""
    f.relays.failing.add(worker)

    def mend() -> None:
        f.relays.failing.discard(worker)

    return f.broken("worker-failing", worker, hurts=(worker,), cured_by=frozenset({Action.RESTART_WORKER}), mend=mend)


def _for_a_while(f: SimFleet) -> None:
    fault = fails_clients(f, "r1-decode-1")
    f.at(30, lambda: f.end(fault))


def _all_fail(f: SimFleet) -> None:
    """What all workers share fails, and nothing that a restart would mend."""
    f.relays.failing |= set(MAIN)
    f.at(600, f.relays.failing.clear)


def _deaf(f: SimFleet, *, gateways: bool) -> None:
    """The agents are silent, the controller's looks come to nothing, and a worker fails."""
    x.cut_off(f, T, workers=True)
    fails_clients(f, "r1-decode-1")
    f.at(20, lambda: setattr(f.relays, "cut", not gateways))


def _pins(f: SimFleet) -> list[str]:
    return [e.state for e in f.world.did(PinBreaker) if isinstance(e, PinBreaker)]


GATEWAYS = (
    Case(
        name="fails-behind-a-green-health",
        happens="Two gateway hosts see every answer of a decoder fail; its agent sees nothing wrong: drained, restarted, back.",
        script=lambda f: fails_clients(f, "r1-decode-1"), fleet=_behind("g1", "g2"),
        incidents=("worker-failing r1-decode-1",), drains=("r1-decode-1 drain done",),
    ),
    Case(
        name="fails-in-one-hosts-eyes",
        happens="The only gateway host sees a decoder's answers fail for minutes: on record, since the host may be what is wrong.",
        script=lambda f: fails_clients(f, "r1-decode-1"), fleet=_behind("g1"), incidents=("worker-failing r1-decode-1",),
    ),
    Case(
        name="fails-for-a-while",
        happens="A decoder's answers fail for half a minute: the breaker keeps traffic away, and that was enough.",
        script=_for_a_while, fleet=_behind("g1", "g2"), incidents=("worker-failing r1-decode-1",),
    ),
    Case(
        name="dies-under-gateways",
        happens="An engine dies: the agent says so and the gateways feel it. One incident; the breaker is pinned until it is back.",
        script=lambda f: x.engine_dead(f, "r1-decode-1"), fleet=_behind("g1", "g2"),
        incidents=("worker-down r1-decode-1",), drains=("r1-decode-1 evict done",),
        also=(("it was pinned and unpinned", lambda f: _pins(f) == ["open", ""]),),
    ),
    Case(
        name="pool-panic",
        happens="All of the main pool's workers fail their clients for ten minutes: one page for the pool, and nothing is drained.",
        script=_all_fail, fleet=_behind("g1", "g2"), lasts=900, incidents=("pool-panic main",), pages=("critical pool-panic",),
    ),
    Case(
        name="silent-and-answering-clients",
        happens="A node's agent and the controller's looks are cut off; clients get answers from its decoder: the monitor's fault.",
        script=lambda f: x.cut_off(f, ["r1t05"], workers=True), fleet=_behind("g1", "g2"),
        incidents=("agent-silent r1t05",), pages=("warning agent-silent",),
    ),
    Case(
        name="deaf-with-gateways",
        happens="The controller hears no agent and reaches no worker; gateways see a decoder fail. On their word it leaves "
        "rotation, and as nobody can stop it a person is asked.",
        script=lambda f: _deaf(f, gateways=True), fleet=_behind("g1", "g2"), lasts=200,
        incidents=("agent-silent fleet", "worker-failing r1-decode-1"), pages=("warning agent-silent", "error worker-failing"),
        drains=("r1-decode-1 drain stopping",),
    ),
    Case(
        name="deaf-without-gateways",
        happens="The same, and the gateways fall silent before it has lasted: nothing is drained, by anybody's silence.",
        script=lambda f: _deaf(f, gateways=False), fleet=_behind("g1", "g2"), lasts=400,
        incidents=("agent-silent fleet", "worker-failing r1-decode-1"), pages=("warning agent-silent", "warning worker-failing"),
        also=(("nothing was stopped", lambda f: not f.world.did(StopWorker)),),
    ),
)  # fmt: skip

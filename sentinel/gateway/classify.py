"""What the end of one try on one worker means: for its breaker, for the request, and for whoever reads the metrics. Pure.

This module exists because every known gateway gets a part of this table wrong: 400s that opened the breakers of a whole fleet
(sglang#25811), 503s of busy workers that did (sglang#13894, repaired by #39464). What always holds:

* A client's mistake never counts against a worker: 4xx, and 501, which Dynamo and vLLM say to a field that they do not support.
* Back-pressure (429, 503, and 529 as Dynamo may be told to say) is neutral.
* So is a worker that does not serve what the route table says it does: a Dynamo 1.6.1 frontend answers 404, with an empty body, for
  0.4 s and more after it is up (its /health is green), and again once its last worker has gone.
* What a worker does after it left rotation is ignored: vLLM 0.32 answers 500 behind a green /health once it got SIGTERM.
* A try may be repeated elsewhere only before a byte of an answer has reached the client.
* Silence while this process did not run (stopped, starved, its machine paused) says nothing about a worker: what it said lies
  unread in the sockets, and timers ring before those are read.
"""

from __future__ import annotations

from enum import StrEnum

from sentinel.gateway.guards import Outcome

_BUSY = frozenset({429, 503, 529})
_GAVE_UP = 499  # Dynamo 1.6.1 of a worker that stopped: whoever asked is still there, and cancelled nothing
_ASKED_FOR = frozenset({501, 505})  # they say something about the request


class Trouble(StrEnum):
    """How a try ended without a complete answer."""

    REFUSED = "refused"  # no connection
    RESET = "reset"  # the connection broke
    FIRST_BYTE = "first_byte"  # connected, and nothing of an answer in time
    STALL = "stall"  # part of an answer, then nothing for too long
    EARLY = "closed_early"  # an orderly end before the answer's own end
    GARBLED = "garbled"  # not HTTP
    WORKER_ERROR = "worker_error"  # the stream itself told of an error (Dynamo and vLLM write it as an event)
    CLIENT = "client_gone"  # the client went away or takes nothing any more
    STOPPING = "stopping"  # this gateway had to end before the answer did


def of_status(status: int, *, out: bool = False) -> Outcome:
    """An answer with a status. ``out``: the route table says that the worker has left rotation."""
    if (status < 500 and status not in _BUSY and status != _GAVE_UP) or status in _ASKED_FOR:
        return Outcome.FINE
    if out:
        return Outcome.IGNORED
    return Outcome.BUSY if status in _BUSY else Outcome.FAILED


def not_here(status: int, *, own_key: bool, goes_on: bool) -> bool:
    """Whether a status says that this worker does not serve the model (yet), or not us. ``own_key``: the request carried this
    gateway's key, not its client's. ``goes_on``: it goes on from an earlier response, which is what may not be there."""
    return (status == 404 and not goes_on) or (status in (401, 403) and own_key)


def of_trouble(trouble: Trouble, *, out: bool = False) -> Outcome:
    """No complete answer."""
    return Outcome.IGNORED if out or trouble in (Trouble.CLIENT, Trouble.STOPPING) else Outcome.FAILED


LATE_S = 0.25  # what a busy loop may take to ring


def unheard(now: float, due: float, patience_s: float) -> float:
    """Seconds to wait on, once, where a timer that was ``due`` rang so late that this process can not have listened; 0: it has."""
    return min(now - due, patience_s) if now - due > LATE_S else 0.0


def elsewhere(outcome: Outcome, trouble: Trouble | None = None) -> bool:
    """Whether another worker may do better, as long as the client has seen nothing of this answer."""
    return outcome is not Outcome.FINE and trouble not in (Trouble.CLIENT, Trouble.STOPPING)


class Budget:
    """How many tries may be repeated: ``reserve`` at once, and ``share`` of the requests in the long run.

    Without one, a rack that fails under load is asked twice as much just then (retry storms; Envoy bounds them by a count,
    Finagle by this bucket).
    """

    def __init__(self, share: float, reserve: float) -> None:
        self._share, self._reserve = share, reserve
        self.left = reserve

    def earn(self) -> None:
        """One request came in."""
        if self.left < self._reserve:
            self.left = min(self._reserve, self.left + self._share)

    def spend(self) -> bool:
        """One more try; False: not now."""
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True

    def give_back(self) -> None:
        """The try was not made."""
        self.left = min(self._reserve, self.left + 1.0)

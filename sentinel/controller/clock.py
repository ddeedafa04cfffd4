"""The controller's time: the wall clock's, without its steps.

This module exists because deadlines, silences and holds are reckoned from event times, and a wall clock that is set by an
hour would end every wait for streams at once, or make every node silent, or hold every drain for an hour. What always holds:

* It never goes back, and in any stretch it passes at least 0.9 and at most 1.1 seconds per second.
* It is drawn towards the wall clock at that rate, so a step of ten seconds is made up for in less than two minutes.
* A wall clock that moved by more than a day had never been set: then, and only then, it is followed at once, forwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from sentinel.boottime import boottime

log = structlog.get_logger(__name__)

RATE = 0.1
UNSET = 86_400.0  # seconds
TOLD = 2.0  # seconds off that are worth a line in the log


class Steady:
    """Call it for the time, in seconds since the epoch. ``wall`` may step; ``passing`` counts the seconds that pass."""

    def __init__(self, wall: Callable[[], float] = time.time, passing: Callable[[], float] = boottime) -> None:
        self._wall, self._passing = wall, passing
        self._now, self._at = wall(), passing()
        self._stepped = False

    def __call__(self) -> float:
        at = self._passing()
        passed, self._at = max(at - self._at, 0.0), at
        ahead = self._wall() - self._now - passed
        self._tell(ahead)
        if ahead > UNSET:
            self._now += passed + ahead
        else:
            self._now += passed + min(max(ahead, -RATE * passed), RATE * passed)
        return self._now

    def _tell(self, ahead: float) -> None:
        if abs(ahead) > TOLD and not self._stepped:
            self._stepped = True
            log.warning("the wall clock was set; the controller's time follows it slowly", off_s=round(ahead, 1))
        elif abs(ahead) < TOLD / 2 and self._stepped:
            self._stepped = False
            log.info("the controller's time has caught up with the wall clock")

"""The pager: one page to every receiver at once, one answer to the controller, and the counting.

What always holds here: True when at least one receiver has it (or it had become pointless), False when every receiver
refused it for good, PagerError while any receiver may still take it; then handing the same page in again asks only those.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import structlog
from prometheus_client import CollectorRegistry, Counter

from sentinel.model import Page, Urgency
from sentinel.paging.delivery import Delivery
from sentinel.paging.receiver import PagerError, Verdict
from sentinel.paging.text import line, named

log = structlog.get_logger(__name__)

EVENTS = ("trigger", "acknowledge", "resolve")
OUTCOMES = ("delivered", "logged", "rejected", "cancelled", "gave_up")

_counters: WeakKeyDictionary[CollectorRegistry, Counter] = WeakKeyDictionary()


def pages_total(registry: CollectorRegistry) -> Counter:
    """``sentinel_pages_total{event,outcome}`` of this registry, per receiver asked; every child starts at 0.

    (A counter that is born at 1 never raises an alert on its increase.)
    """
    if registry not in _counters:
        counter = Counter("sentinel_pages_total", "Pages by how they ended at a receiver.", ["event", "outcome"], registry=registry)
        for event in EVENTS:
            for outcome in OUTCOMES:
                counter.labels(event, outcome)
        _counters[registry] = counter
    return _counters[registry]


class Pager:
    """Sends pages. Safe to call from many tasks; pages of one dedup key keep the order of the calls."""

    def __init__(self, deliveries: Sequence[Delivery], counter: Counter) -> None:
        self._deliveries = tuple(deliveries)
        self._counter = counter

    @property
    def receivers(self) -> tuple[str, ...]:
        return tuple(d.name for d in self._deliveries)

    async def send(self, page: Page, still: Callable[[], bool] = lambda: True) -> bool:
        """Deliver ``page`` everywhere, while ``still`` says that it is ours to send. Takes at most about a minute; see the module
        for the three answers."""
        answers = await asyncio.gather(*(self._deliver(d, page, still) for d in self._deliveries))
        failed = [a for a in answers if isinstance(a, PagerError)]
        if failed:
            raise PagerError("; ".join(map(str, failed)), max(f.retry_after_s for f in failed))
        return any(a is True for a in answers)

    async def _deliver(self, delivery: Delivery, page: Page, still: Callable[[], bool]) -> bool | PagerError:
        try:
            outcome, new = await delivery.deliver(page, still)
        except PagerError as error:
            self._counter.labels(page.event, "gave_up").inc()
            return error
        if new:
            self._counter.labels(page.event, outcome.state).inc()
        return outcome.state != "rejected"


class LogReceiver:
    """Where pages go when nobody is configured to get them: into the log, as loudly as it allows."""

    name = "log"

    async def attempt(self, page: Page) -> Verdict:
        tell = log.critical if page.event == "trigger" and page.urgency in (Urgency.CRITICAL, Urgency.ERROR) else log.warning
        tell("PAGE (no receiver is configured)", **named(page), source=line(page.source, 255), runbook=line(page.runbook, 2048))
        return Verdict(state="logged")

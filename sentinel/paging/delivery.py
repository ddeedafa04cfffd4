"""One receiver's side of delivery: order within a dedup key, the memory of what is settled, and what has become pointless.

What always holds here:

* Pages of one dedup key go out one after the other, in the order in which they were handed in; others go out beside them.
* A page that is settled (delivered, rejected, cancelled) is never sent again by this process, however often it is handed in.
* An acknowledge or resolve whose trigger is known not to have arrived is not sent, and a trigger that is handed in again
  after its resolve is not sent either: nobody is woken for what is over. Where it cannot be known, it is sent; a receiver
  ignores the resolve of what it never saw.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import structlog

from sentinel.model import Page
from sentinel.paging.receiver import Outcome, PagerError, Receiver
from sentinel.paging.retry import Retry
from sentinel.paging.text import line, named

log = structlog.get_logger(__name__)

REMEMBERED = 20_000  # settled pages, and dedup keys; the oldest are forgotten first


class _Thread:
    """What is known about one dedup key at this receiver."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.inside = 0  # pages that have or wait for their turn
        self.arrived: bool | None = None  # a trigger got through, or may have; False: known not to; None: not asked here
        self.given_up: set[str] = set()  # triggers that did not get through and may be handed in again


class Delivery:
    """Everything between the pager and one receiver."""

    def __init__(self, receiver: Receiver, retry: Retry) -> None:
        self._receiver, self._retry = receiver, retry
        self._threads: OrderedDict[str, _Thread] = OrderedDict()
        self._settled: OrderedDict[str, Outcome] = OrderedDict()

    @property
    def name(self) -> str:
        return self._receiver.name

    async def deliver(self, page: Page, still: Callable[[], bool] = lambda: True) -> tuple[Outcome, bool]:
        """How it ended, and whether that happened just now; tried while ``still`` says so. Raises PagerError when it was given up
        for now."""
        thread = self._threads.setdefault(page.dedup_key, _Thread())
        self._threads.move_to_end(page.dedup_key)
        thread.inside += 1
        try:
            async with thread.turn:
                if page.id in self._settled:
                    return self._settled[page.id], False
                outcome = self._pointless(thread, page) or await self._send(thread, page, still)
                self._settle(page.id, outcome)
                return outcome, True
        finally:
            thread.inside -= 1
            self._forget()

    def _pointless(self, thread: _Thread, page: Page) -> Outcome | None:
        if page.event == "trigger":
            return None
        if page.event == "resolve":
            for trigger in thread.given_up:
                self._settle(trigger, Outcome(state="cancelled", reason="it was over before the page got through"))
            thread.given_up.clear()
        if thread.arrived is not False:
            return None
        note = f"nothing to {page.event}: its trigger never reached {self.name}"
        if page.event == "resolve":
            thread.arrived = None
        log.warning("a page was dropped", receiver=self.name, **named(page), why=note)
        return Outcome(state="cancelled", reason=note)

    async def _send(self, thread: _Thread, page: Page, still: Callable[[], bool]) -> Outcome:
        if page.event == "trigger":
            thread.given_up.add(page.id)  # also when this task is cancelled half-way
        try:
            verdict = await self._retry.run(lambda: self._receiver.attempt(page), still)
        except asyncio.CancelledError:
            thread.arrived = True
            raise
        there = verdict.state in ("delivered", "logged")
        if page.event == "trigger":
            if there or verdict.maybe:
                thread.arrived = True
            elif thread.arrived is None:
                thread.arrived = False
        elif page.event == "resolve" and there:
            thread.arrived = None
        if verdict.state == "again":
            sentence = f"{page.event} {line(page.dedup_key, 255)} did not reach {self.name}: {verdict.reason}"
            raise PagerError(sentence, verdict.retry_after_s)
        thread.given_up.discard(page.id)
        if verdict.state == "rejected":
            log.error("a page was refused for good", receiver=self.name, **named(page), why=verdict.reason)
        return Outcome(state=verdict.state, reason=verdict.reason)

    def _settle(self, page_id: str, outcome: Outcome) -> None:
        self._settled[page_id] = outcome
        if len(self._settled) > REMEMBERED:
            self._settled.popitem(last=False)

    def _forget(self) -> None:
        while len(self._threads) > REMEMBERED:
            key, thread = next(iter(self._threads.items()))
            if thread.inside:
                return
            del self._threads[key]

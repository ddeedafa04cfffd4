"""What the controller is told, in which order, until it has acknowledged it.

This module exists so that findings reach the controller at once, in order, and at least once. What always holds:

* One report is under way at a time. A report keeps its ``seq`` and its findings until it is acknowledged or refused, so a
  controller may tell a repeated one by its ``seq``; only its time, and the states of a snapshot, are fresh at each attempt.
* News waits for nothing but the report before it; a heartbeat, or a snapshot where one is due (``told``), follows every
  ``snapshot_s`` and whenever the controller asks.
* A controller that is busy is left alone for as long as it asks for and up to twice that, by chance. A snapshot or heartbeat that
  it turned away is dropped for the news that has come since; news is kept and comes again, in order.
* A report that the controller refuses never blocks the ones behind it: it is halved until the one finding is found that is
  refused while an empty report is not; that finding is set aside, counted, and told loudly.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable

import msgspec
import structlog

from sentinel import __version__
from sentinel.agent.known import Known
from sentinel.agent.link import Link, Refused, Unreachable, backoff_s
from sentinel.agent.spool import Batch, Spool
from sentinel.agent.told import Told
from sentinel.model import Ack, Place, Report

log = structlog.get_logger()

_LEAST_PAUSE_S = 0.2  # between attempts that failed, however much news comes in
_AFTER_REFUSAL_S = 5.0
_BATCH = 500


class Reporter:
    """Sends reports from ``run`` until cancelled. ``errors(why)`` counts failed attempts; ``acked(time)`` notes successes."""

    def __init__(
        self,
        node: str,
        link: Link,
        spool: Spool,
        known: Known,
        *,
        probes: Callable[[], dict[str, bool | None]],
        clock: Callable[[], float],
        flush: Callable[[], object],
        snapshot_s: float,
        boot_id: str = "",
        place: Callable[[], Place | None] = lambda: None,
        errors: Callable[[str], None] = lambda why: None,
        acked: Callable[[float], None] = lambda at: None,
        after_refusal_s: float = _AFTER_REFUSAL_S,
    ) -> None:
        self.session = uuid.uuid4().hex[:16]
        self.seq = 0
        self.snapshot_s = snapshot_s
        self.last_ack: float | None = None
        self.trouble = ""  # why reports do not get through now
        self._node, self._boot_id = node, boot_id
        self._link, self._spool = link, spool
        self._told = Told(known, probes=probes, place=place)
        self._probes, self._clock, self._flush = probes, clock, flush
        self._errors, self._acked = errors, acked
        self._after_refusal_s = after_refusal_s
        self._wake = asyncio.Event()
        self._due = 0.0
        self._count = _BATCH

    def wake(self) -> None:
        """There is news in the spool."""
        self._wake.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        # Not all nodes of a fleet at once, and after the probes had their first look.
        self._due = loop.time() + random.uniform(0.2, 0.4) * min(self.snapshot_s, 5.0)  # noqa: S311
        sent_news = False
        while True:
            self._wake.clear()
            now = loop.time()
            batch = self._spool.batch(self._count)
            if now >= self._due and (sent_news or not batch.findings):
                self._due = now + self.snapshot_s
                await self._deliver(None)
                sent_news = False
            elif batch.findings:
                await self._deliver(batch)
                sent_news = True
            else:
                await self._pause(self._due - now)

    async def _deliver(self, batch: Batch | None) -> None:
        """Bring one report home: the findings of ``batch``, or a snapshot."""
        self.seq += 1
        attempt = 0
        while True:
            try:
                ack = await self._link.report(self._report(batch))
            except Unreachable as error:
                self._unheard(str(error), "unreachable")
                wait = (error.after_s or 0.0) * random.uniform(1.0, 2.0)  # noqa: S311
                if error.untaken and batch is None:
                    self.seq -= 1  # not taken, for certain: no gap that would ask for a snapshot of a controller that is busy
                    self._told.dropped()
                    self._due = asyncio.get_running_loop().time() + wait
                    return
                await asyncio.sleep(wait or (_LEAST_PAUSE_S if attempt else 0))
                if not wait:
                    await self._pause(backoff_s(attempt))
                attempt += 1
            except Refused as error:
                self._unheard(str(error), "refused")
                if batch is None:
                    self._told.dropped()
                await self._refused(batch, error)
                return
            else:
                self._heard(ack, batch)
                return

    def _report(self, batch: Batch | None) -> Report:
        blank = Report(
            node=self._node, session=self.session, seq=self.seq, at=self._clock(), boot_id=self._boot_id, version=__version__,
        )  # fmt: skip
        if batch is None:
            return self._told.report(blank, asyncio.get_running_loop().time())
        return msgspec.structs.replace(blank, findings=batch.findings, probes=self._probes())

    def _heard(self, ack: Ack, batch: Batch | None) -> None:
        loop = asyncio.get_running_loop()
        if self.trouble:
            log.info("the controller hears this node again", url=self._link.url)
        self.trouble = ""
        self.last_ack = self._clock()
        self._acked(self.last_ack)
        self._told.heard(ack)
        if batch is None:
            self._told.taken()
        if batch and batch.findings:
            self._spool.ack(batch.upto)
            self._count = min(_BATCH, self._count * 2)
            self._flush()
        if ack.want_snapshot:
            # Never at once after a snapshot: a controller that always wants one must not be answered in a loop.
            self._due = min(self._due, loop.time() + (1.0 if batch is None else 0.0))

    def _unheard(self, sentence: str, why: str) -> None:
        self._errors(why)
        if why == "refused":
            log.error("the controller refuses a report", error=sentence)
        elif not self.trouble:
            log.warning("no controller hears this node; findings are kept", error=sentence, waiting=len(self._spool))
        self.trouble = sentence

    async def _refused(self, batch: Batch | None, error: Refused) -> None:
        """Find out what it was about the report, without losing any of it and without asking in a loop."""
        await asyncio.sleep(self._after_refusal_s)
        if batch is None or not batch.findings or not error.about_content:
            return  # a token or a snapshot: findings stay in the spool, the next attempt comes from ``run``
        if len(batch.findings) > 1:
            self._count = len(batch.findings) // 2
            return
        self.seq += 1
        try:
            ack = await self._link.report(self._report(Batch(0, ())))
        except (Unreachable, Refused):
            return  # everything is refused: then this finding is not to blame
        log.error("a finding that the controller refuses is set aside", finding=batch.findings[0].id, error=str(error))
        self._spool.set_aside(batch.upto)
        self._heard(ack, Batch(0, ()))
        self._flush()

    async def _pause(self, seconds: float) -> None:
        """Wait, but not once there is news."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

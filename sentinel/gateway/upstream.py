"""Connections to the workers: one protocol that waits for the beginning of an answer, and a pool of idle ones per worker.

This module exists because what comes after an answer's head must cost next to nothing: the bytes of a stream go from this
protocol to whoever took the connection over, with no task, queue or parser object in between. What always holds:

* A connection carries one request at a time; it goes back to the pool only after a complete answer with nothing behind it.
* The beginning of an answer is its head and the first bytes of its body (all of it, where it is short; of a stream, those that
  ``opening`` takes for an answer or an error): until then nothing was promised to anybody, and the try can be repeated elsewhere.
* A pooled connection that turns out to be dead before it said a word is replaced once by a fresh one to the same worker: that is
  a race with the worker's own keep-alive timer (uvicorn's is 5 s), not a fault.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from math import inf
from typing import Protocol
from urllib.parse import urlsplit

from sentinel.gateway.classify import Trouble, unheard
from sentinel.gateway.framing import HEAD_MAX, Body, Garbled, Head, parse_head
from sentinel.gateway.opening import opening

LOOKS = 8  # at whether a connection is there, within the patience; a starved process takes seconds from one to the next
SHORT = 256 * 1024  # bytes of an answer that is waited for as a whole, where it has a length or is JSON in chunks


class Broken(Exception):
    """A try came to nothing before its answer began; the text is for the log."""

    def __init__(self, trouble: Trouble, why: str) -> None:
        super().__init__(why)
        self.trouble = trouble


class Taker(Protocol):
    """Whoever takes the rest of an answer: it becomes the transport's own protocol, so that nothing stands between."""

    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None:
        """Must call the Connection's."""

    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def lost(self, error: Exception | None) -> None: ...


class Connection(asyncio.Protocol):
    """One connection to a worker."""

    __slots__ = (
        "_bell", "_early", "_waiter", "closed", "error", "head", "idle_since", "origin", "taker", "told", "transport", "used",
    )  # fmt: skip

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.transport: asyncio.Transport
        self.taker: Taker | None = None
        self.head: Head | None = None
        self.told = 0  # the HTTP status of an error that a stream began with
        self.closed = self.used = False
        self.error: Exception | None = None  # what closed it, where that was not an orderly end
        self.idle_since = 0.0
        self._early = b""
        self._waiter: asyncio.Future[None] | None = None
        self._bell: asyncio.TimerHandle

    # -- as a protocol ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._early += data
        waiter = self._waiter
        if waiter is None:
            if self.head is None:  # nobody asked
                self.abort()
            elif len(self._early) > SHORT:  # begun, and kept until it is known whether another worker does better
                self.transport.pause_reading()
        elif not waiter.done():
            try:
                if self._begun():
                    waiter.set_result(None)
            except Garbled as error:
                waiter.set_exception(Broken(Trouble.GARBLED, f"what it answered is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed, self.error = True, exc
        self.origin.forget(self)
        taker, self.taker = self.taker, None
        if taker is not None:
            taker.lost(exc)
        elif self._waiter is not None and not self._waiter.done():
            if self.head is not None and exc is None and not self.head.chunked and self.head.size is None:
                self._waiter.set_result(None)  # an empty body that ends with the connection
            else:
                how = f"the connection broke: {exc}" if exc else "it closed the connection before it answered"
                self._waiter.set_exception(Broken(Trouble.RESET if exc else Trouble.EARLY, how))

    # -- one request --------------------------------------------------------------------------------------------------

    async def ask(self, request: bytes, body: bytes, patience_s: float) -> Head:
        """Send a request; returns when its answer has begun. Raises Broken."""
        if self.closed:
            raise Broken(Trouble.EARLY, "it closed the connection before it was asked")
        loop = asyncio.get_running_loop()
        self.head, self.told, self._early = None, 0, b""
        self._waiter = loop.create_future()
        self._bell = loop.call_later(patience_s, self._late, patience_s, time.monotonic() + patience_s)
        if len(body) < 16384:
            self.transport.write(request + body)
        else:
            self.transport.writelines((request, body))
        try:
            await self._waiter
        finally:
            self._bell.cancel()
            self._waiter = None
        if self.head is None:
            raise Broken(Trouble.EARLY, "it closed the connection before it answered")
        return self.head

    def _late(self, patience_s: float, due: float) -> None:
        now = time.monotonic()
        if more := unheard(now, due, patience_s):
            self._bell = asyncio.get_running_loop().call_later(more, self._late, patience_s, inf)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(Broken(Trouble.FIRST_BYTE, f"nothing of an answer came within {patience_s:g} s"))

    @property
    def early(self) -> bytes:
        """What has come of the body before anybody took it."""
        return self._early

    @property
    def silent(self) -> bool:
        """Whether not one byte of an answer has come."""
        return self.head is None and not self._early

    def _begun(self) -> bool:
        head = self.head
        while head is None:
            end = self._early.find(b"\r\n\r\n")
            if end < 0:
                if len(self._early) > HEAD_MAX:
                    raise Garbled("its head has no end")
                return False
            head = parse_head(self._early[:end])
            self._early = self._early[end + 4 :]
            if head.status < 200:
                if head.status == 101:
                    raise Garbled("it wants to speak another protocol")
                head = None
        self.head = head
        if head.sse and head.status == 200 and self._early:
            told = opening(head, self._early)
            self.told = told or 0
            return told is not None
        if head.size is None:
            if not (head.chunked and head.json) or len(self._early) > SHORT:
                return bool(self._early)
            body = Body(head)  # Dynamo 1.6.1 sends its whole answers so
            body.feed(self._early)
            return body.done
        return bool(self._early) if head.size > SHORT else len(self._early) >= head.size

    def go_on(self) -> None:
        """It is this answer that is passed on: read all of it. To be called before ``take``."""
        if not self.closed and not self.transport.is_reading():
            self.transport.resume_reading()

    def take(self, taker: Taker) -> bytes:
        """From now on everything goes to ``taker``; returns what has come already. One that is closed by now says no more."""
        early, self._early = self._early, b""
        self.taker = taker
        if not self.closed:
            self.transport.set_protocol(taker)  # type: ignore[arg-type]  # it has what a protocol needs
        return early

    def whole(self) -> bytes | None:
        """The complete body of a short answer; None when it has to be taken."""
        if self.head is None or self.head.size is None or len(self._early) != self.head.size:
            return None
        body, self._early = self._early, b""
        return body

    def done(self) -> None:
        """The answer is complete: keep the connection if it may be kept."""
        self.taker = None
        if self.head is not None and self.head.keep and not (self.closed or self._early or self.origin.left):
            self.transport.set_protocol(self)
            self.used, self.head = True, None
            self.idle_since = time.monotonic()
            self.origin.idle.append(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Nothing more is wanted of it: the worker sees the connection end at once and stops computing."""
        self.taker = None
        if not self.closed:
            self.closed = True
            self.transport.abort()


class Origin:
    """One worker's address, and the idle connections to it."""

    def __init__(self, url: str, *, connect_s: float, idle_s: float, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        self.url, self.path = url, parts.path.rstrip("/").encode()
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self.host = parts.netloc.rpartition("@")[2].encode()
        self._connect_s, self._idle_s = connect_s, idle_s
        self.idle: list[Connection] = []
        self.left = False  # nobody is sent there any more

    async def connection(self, *, fresh: bool = False) -> Connection:
        """An idle connection, the one used last, or a new one. Raises Broken."""
        oldest = time.monotonic() - self._idle_s
        while self.idle and not fresh:
            kept = self.idle.pop()
            if not kept.closed:
                if kept.idle_since > oldest:
                    return kept
                kept.abort()
        loop = asyncio.get_running_loop()
        making = loop.create_task(loop.create_connection(lambda: Connection(self), self._host, self._port, ssl=self._tls))
        try:
            for _ in range(LOOKS):  # however late each of them is: what counts is for how long anybody listened
                await asyncio.wait((making,), timeout=self._connect_s / LOOKS)
                if making.done():
                    return making.result()[1]
        except OSError as error:
            raise Broken(Trouble.REFUSED, f"no connection: {error.strerror or error}") from None
        except asyncio.CancelledError:
            making.add_done_callback(_unwanted)
            raise
        finally:
            making.cancel()
        raise Broken(Trouble.REFUSED, f"no connection within {self._connect_s:g} s")

    def forget(self, gone: Connection) -> None:
        if gone in self.idle:
            self.idle.remove(gone)

    def sweep(self) -> None:
        """Close what has been idle for too long."""
        oldest = time.monotonic() - self._idle_s
        for kept in [c for c in self.idle if c.idle_since <= oldest]:
            kept.abort()
            self.forget(kept)

    def close(self) -> None:
        """Keep no connection from now on; what is in flight goes on."""
        self.left = True
        for kept in tuple(self.idle):
            kept.abort()
        self.idle.clear()


def _unwanted(making: asyncio.Task[tuple[asyncio.Transport, Connection]]) -> None:
    """Whoever asked for it left in the moment in which it was there."""
    if not making.cancelled() and making.exception() is None:
        making.result()[1].abort()

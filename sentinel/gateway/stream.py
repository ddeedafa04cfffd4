"""One answer on its way from a worker's connection to a client's, byte for byte.

This module exists because this is the hot path: at 200 streams of 50 events a second it runs ten thousand times a second, so it
is one method on plain attributes. What always holds:

* What a client has got ends, after every write, where a chunk ends and, in an event stream, where an event ends. So whatever
  happens to the worker, an error can be told as an event of its own, and no half event was ever shown.
* A complete piece goes on as the same bytes that came; nothing in it is decoded.
* A client that takes too little holds the worker back (never more than the transport's high-water mark is kept here), and is let
  go when it has taken nothing at all for ``stall_s``. A worker that says nothing for ``stall_s`` has failed; a comment is nothing.
* ``ended`` is set once, however it ends, and whoever waits for it wakes when the last byte was written. It is set before the
  client's connection is cut: a client that is gone ends its handler, and what the handler then knew would be lost.
"""

from __future__ import annotations

import asyncio
import re
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from sentinel.gateway.classify import Trouble, unheard
from sentinel.gateway.errors import ApiError
from sentinel.gateway.framing import EVENT_MAX, LAST, LAST_CHUNK, SIZE_LINES, YES, Body, Garbled, Head, chunk, cut, plain, whole
from sentinel.gateway.front import acknowledged
from sentinel.gateway.opening import TOLD, status_told

if TYPE_CHECKING:
    from sentinel.gateway.front import Client
    from sentinel.gateway.meters import Flow
    from sentinel.gateway.upstream import Connection

_ENDS = (b"\n\n\r\n", b"\r\n\r\n\r\n")  # an event's end, then its chunk's
_SEEMS = (b"1\r\n\n\r\n", b"2\r\n\r\n\r\n")  # or a chunk that is one line's end: half of it is the size's own
_LAST_ENDS = (b"\n\n\r\n" + LAST_CHUNK, b"\r\n\r\n\r\n" + LAST_CHUNK)
_ONE = len(SIZE_LINES)
# Bytes of one chunk → what it begins with where it carries one more delta, as vLLM and Dynamo's frontend write them (chat and
# completions; responses). An error begins otherwise.
_WAYS = (b'data: {"id"', b"event: response.output_", b"event: response.reasoning_", b"event: response.function_call_")
_DELTAS = tuple(tuple(line + way for way in _WAYS for line in lines) for lines in SIZE_LINES)
_TOLD = re.compile(b"\n(?:%b)" % b"|".join(map(re.escape, TOLD)))  # no text of an answer has a line's end
_COMMENT = re.compile(rb"[0-9A-Fa-f]+\r\n(?::[^\r\n]*(?:\n\n|\r\n\r\n))+\r\n")  # a chunk of nothing else

FAILED = {
    Trouble.RESET: "the worker's connection broke in the middle of this answer",
    Trouble.EARLY: "the worker ended this answer before it was complete",
    Trouble.STALL: "the worker stopped in the middle of this answer",
    Trouble.GARBLED: "the worker's answer could not be read any further",
    Trouble.STOPPING: "this gateway is stopping and could not wait for the rest of this answer",
}


class Relay:
    """Passes one body on. ``chunked``: the client takes chunks (HTTP/1.1); ``raw``: as they come from the worker."""

    __slots__ = (
        "_before", "_body", "_chunked", "_client", "_connection", "_due", "_fast", "_gap", "_held_at", "_last", "_loop", "_mark",
        "_open", "_out", "_raw", "_recent", "_responses", "_sse", "_stall_s", "_steady", "_tail", "_taken", "_timer", "_unbounded",
        "_write", "ended", "events", "first_at",
    )  # fmt: skip

    def __init__(
        self,
        client: Client,
        connection: Connection,
        head: Head,
        flow: Flow,
        *,
        stall_s: float,
        old: bool = False,
        responses: bool = False,
    ) -> None:
        """``flow`` takes the measurements. ``old``: the client speaks HTTP/1.0, so the answer ends with its connection."""
        self._client, self._connection, self._gap = client, connection, flow.gaps.add
        self._loop = asyncio.get_running_loop()
        self._out: asyncio.Transport = client.out
        self._write = self._out.write
        self._body = Body(head)
        self._chunked = not old and head.size is None
        self._raw = self._fast = self._chunked and head.chunked  # fast: the next byte begins a chunk and an event
        self._steady = False  # fast, and events have been seen: nearly every piece is one chunk now
        self._sse, self._responses, self._stall_s = head.sse, responses, stall_s
        self._open = head.size is None  # something may be added to it
        self._unbounded = head.size is None and not head.chunked
        self._tail = b""  # an event that is not complete yet
        self._recent = self._before = b""  # what was passed on last, to see how a stream ended: an error, and then [DONE]
        self._mark = b""  # what separates its events
        self._last = self.first_at = 0.0
        self._due = 0.0  # when the timer rings; inf: it has been late once already
        self._held_at = 0.0  # since when the client takes too little, or nothing, as was seen last; 0: it takes what comes
        self._taken = 0  # what it had taken then
        self.events = 0
        self.ended: asyncio.Future[Trouble | None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Take the connection over. The head must have been written."""
        self._last = monotonic()
        self._due = self._last + self._stall_s
        self._timer = self._loop.call_later(self._stall_s, self._look)
        self._client.relay = self
        if self._client.writing_paused:
            self.hold()
        early = self._connection.take(self)
        if early:
            self.data_received(early)
        elif self._body.done:
            self._end(None)
        if self._connection.closed and not self.ended.done():  # between the last byte and now
            self.lost(self._connection.error)

    # -- from the worker ----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        now = monotonic()
        if self._steady:
            size = len(data)
            if size < _ONE and data.startswith(_DELTAS[size]) and data.endswith(_ENDS) and data.count(b"\n") < 6:
                # One chunk with one event, since two would have two lines' ends each, and the chunk has two.
                gap, write = self._gap, self._write
                gap(now - self._last)
                self._last = now
                self.events += 1
                self._recent = b""  # no error; keeping the piece itself would cost a cold line of memory each time
                write(data)
                return
        if self._fast and self._sse and _COMMENT.fullmatch(data) and whole(data) == YES:
            self._write(data)
            return
        if self._sse and self.events and data != LAST_CHUNK:
            self._gap(now - self._last)
        self._last = now
        if self._fast:
            kind = whole(data)
            if kind == YES and (not self._sse or (data.endswith(_ENDS) and not data.endswith(_SEEMS))):
                self._count(data, now)
                self._write(data)
                self._steady = self._sse
                return
            if kind == LAST and (not self._sse or data.endswith(_LAST_ENDS) or data == LAST_CHUNK):
                if data != LAST_CHUNK:
                    self._count(data[: -len(LAST_CHUNK)], now)
                self._seal(data)
                return
        self._slowly(data, now)

    def _slowly(self, data: bytes, now: float) -> None:
        """Pieces that are cut through a chunk or an event, and answers that are not in chunks."""
        try:
            payload = self._body.feed(data)
        except Garbled:
            self.fail(Trouble.GARBLED)
            return
        self._pass_on(payload, now)
        if self._body.done:
            self._flush()
            self._seal(LAST_CHUNK if self._chunked else b"")
            return
        self._fast = self._raw and not self._tail and self._body.clean
        self._steady = self._fast and self._steady

    def lost(self, error: Exception | None) -> None:
        """The worker's connection has ended."""
        if error is None and self._unbounded:  # that is how such a body ends
            self._flush()
            self._seal(LAST_CHUNK if self._chunked else b"")
            return
        self.fail(Trouble.EARLY if error is None else Trouble.RESET)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def eof_received(self) -> None:
        pass  # the transport then closes

    def pause_writing(self) -> None:
        pass  # the request has been sent

    resume_writing = pause_writing

    def _count(self, data: bytes, now: float) -> None:
        if not self._sse:
            self.events += 1
        else:
            if not self._mark:
                self._mark = next((mark for mark in (b"\n\n", b"\r\n\r\n") if mark in data), b"")
            self.events += data.count(self._mark) if self._mark else 0
        self._before, self._recent = self._recent, data
        if not self.first_at:
            self.first_at = now

    def _pass_on(self, payload: bytes, now: float) -> None:
        if self._sse:
            whole_, self._tail = cut(self._tail + payload if self._tail else payload)
            if len(self._tail) > EVENT_MAX:
                whole_, self._tail = whole_ + self._tail, b""
            payload = whole_
        if payload:
            self._count(payload, now)
            self._write(chunk(payload) if self._chunked else payload)

    def _flush(self) -> None:
        if self._tail:
            self._before, self._recent = self._recent, self._tail
            self._write(chunk(self._tail) if self._chunked else self._tail)
            self._tail = b""

    def _seal(self, last: bytes) -> None:
        """The answer is complete."""
        if last:
            self._write(last)
        told = self._sse and _TOLD.search(self._ending()) is not None
        self._end(Trouble.WORKER_ERROR if told else None)

    # -- from the client ----------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """The client takes less than comes."""
        if not self._held_at and not self._connection.closed:
            self._held_at, self._taken = monotonic(), acknowledged(self._out)
            self._connection.transport.pause_reading()

    def go_on(self) -> None:
        """The client takes again."""
        if self._held_at:
            self._held_at = 0.0
            self._last = monotonic()
            if not self._connection.closed:
                self._connection.transport.resume_reading()

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """One timer for the stream, moved on when it rings: nothing is set anew for each piece."""
        now = monotonic()
        if self._held_at and (taken := acknowledged(self._out)) != self._taken:  # slowly: the next mark may be minutes away
            self._held_at, self._taken = now, taken
        left = (self._held_at or self._last) + self._stall_s - now
        if left > 0:
            self._due = now + left + 0.001
        else:
            left, self._due = unheard(now, self._due, self._stall_s), inf
        if left > 0:
            self._timer = self._loop.call_later(left + 0.001, self._look)
        elif self._held_at:
            self._end(Trouble.CLIENT)
            self._out.abort()
        else:
            self.fail(Trouble.STALL)

    def fail(self, trouble: Trouble) -> None:
        """End the answer in a way that the client understands, or cut it where there is none."""
        if self.ended.done():
            return
        self._end(trouble)
        if self._sse and self._open and not self._out.is_closing():
            error = ApiError(502, f"{FAILED[trouble]}; send it again", kind="server_error", code=f"upstream_{trouble.value}")
            told = error.events(responses=self._responses, sequence=self.events)
            self._write(chunk(told) + LAST_CHUNK if self._chunked else told)
        else:
            self._out.abort()

    def _end(self, trouble: Trouble | None) -> None:
        if self.ended.done():
            return
        if self._timer is not None:
            self._timer.cancel()
        self._client.relay = None
        if trouble in (None, Trouble.WORKER_ERROR) and not self._body.rest:
            if self._held_at and not self._connection.closed:
                self._connection.transport.resume_reading()
            self._connection.done()
        else:
            self._connection.abort()
        self.ended.set_result(trouble)

    @property
    def told(self) -> int:
        """The HTTP status that an error which the worker itself told at the end would have been."""
        return status_told(self._ending())

    def _ending(self) -> bytes:
        return b"\n%b\n%b" % (plain(self._before), plain(self._recent))

    def leave(self) -> None:
        """The client is gone, or whoever served it: let the worker stop at once."""
        self._end(Trouble.CLIENT)

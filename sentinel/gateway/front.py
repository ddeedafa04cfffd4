"""The server's side of a connection: aiohttp reads requests, answers are written straight to the transport.

This module exists as the one place that leans on aiohttp's low-level server: its parser, keep-alive, pipelining and limits are
used as they are; its response objects are not, because building one costs more than the rest of a short request. What always holds:

* A handler that has begun to write ends the answer itself; what it returns only says whether the connection lives on.
* Whatever aiohttp refuses (a head that is too long, no HTTP at all) is answered in OpenAI's shape too.
* A client whose head, or next request, does not come within the keep-alive time is let go, however slowly it types: the timer
  runs from the connection's start or the last answer, and no byte moves it.
* A client that does not take its answers gets no more of them: the next request waits until the buffer is nearly empty. Who then,
  or when its connection has been closed, takes nothing for as long as ``sweep`` is told is let go.
* A connection ends with the answer to a request in chunks. aiohttp's parser gives the last trailer of such a body to the next
  request as its first header (its _http_parser.pyx keeps it over message_begin; seen in 3.14.5), so behind a proxy one client
  could speak with another's key.
* What is left of a body that nobody wants is read, and dropped, for a moment: a close with unread bytes is a reset, which may
  overtake the answer.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from socket import IPPROTO_TCP, TCP_INFO
from typing import Any, Protocol, cast

import structlog
from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.web_protocol import RequestHandler, _ErrInfo
from aiohttp.web_request import BaseRequest

from sentinel.gateway.classify import Trouble
from sentinel.gateway.errors import ApiError

log = structlog.get_logger(__name__)

HEAD_LINE_MAX = 16 * 1024  # bytes of one header, or of the request line
HEADERS_MAX = 100
LINGER_S = 1.0


class Sent:
    """Stands where aiohttp expects a response: everything is written already."""

    def __init__(self, keep_alive: bool) -> None:
        self.keep_alive = keep_alive

    async def prepare(self, request: BaseRequest) -> None:
        pass

    async def write_eof(self) -> None:
        pass


KEEP, CLOSE = Sent(True), Sent(False)

Handler = Callable[[BaseRequest, "Client"], Awaitable[Sent]]


class Streaming(Protocol):
    """What is being streamed to a client, as its connection sees it."""

    def hold(self) -> None:
        """The client takes nothing more for now."""

    def go_on(self) -> None:
        """The client takes more."""

    def leave(self) -> None:
        """The client is gone."""

    def fail(self, trouble: Trouble) -> None:
        """End it with an error that the client's SDK understands."""


class Client(RequestHandler):
    """One connection of a client."""

    relay: Streaming | None = None  # what is being streamed to it now
    begun = False  # part of an answer to the request of now has been written
    request_id = b""

    def __init__(self, front: Front, **kwargs: Any) -> None:
        super().__init__(front, loop=asyncio.get_running_loop(), **kwargs)
        self._front = front

    @property
    def out(self) -> asyncio.Transport:
        if self.transport is None:
            raise ConnectionResetError("the client is gone")
        return self.transport

    @property
    def idle(self) -> bool:
        """Between two requests: none is being answered, and none waits for that."""
        return self._waiter is not None and not self._waiter.done()

    @property
    def asks(self) -> BaseRequest | None:
        """The request that is being answered."""
        return self._current_request

    async def start(self) -> None:
        await super().start()  # ends when the connection has been closed, which does not mean that its last bytes are gone
        if self.transport is not None:
            self._front.wait_for(self)
            self.transport = None

    def force_close(self) -> None:
        if self.transport is not None:
            self._front.wait_for(self)
        super().force_close()

    async def taken(self) -> None:
        """Wait until it has taken most of what was written to it. Raises ConnectionError."""
        await self._drain_helper()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages and isinstance(wrong := self._messages[-1][0], _ErrInfo):
            self._loop.call_soon(self._unreadable, wrong.message)  # by then whoever reads that body has begun

    def _unreadable(self, message: str) -> None:
        """The rest of a body that has begun will never come."""
        waits = [payload for _, payload in self._messages]
        if self._current_request is not None:
            waits.append(self._current_request.content)
        for payload in waits:
            if not payload.is_eof():
                payload.set_exception(_wrong(400, message))
                payload.feed_eof()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.relay is not None:
            self.relay.hold()
        else:
            self._front.wait_for(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.relay is not None:
            self.relay.go_on()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self.relay is not None:
            self.relay.leave()  # at once; the handler's own task hears of it a moment later
        super().connection_lost(exc)
        self._front.forget(self)

    def handle_error(
        self, request: BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if status >= 500:
            log.error("a request could not be handled", status=status, exc_info=exc)
        self._front.errors[status] += 1
        answer = web.Response(status=status, body=_wrong(status, message).body(), content_type="application/json")
        answer.force_close()
        return answer


def _wrong(status: int, message: str | None) -> ApiError:
    text = "the request could not be read" + (f": {message.splitlines()[0].strip(' :')}" if message else "")
    return ApiError(status, text if status < 500 else "this gateway failed", close=True)


class Front(web.Server):
    """Makes a Client for every connection. A client that leaves ends its handler at once."""

    def __init__(self, handler: Handler, *, keepalive_s: float, errors: Counter[int]) -> None:
        """``errors``: counts, by status, what could not be handed to ``handler``."""
        super().__init__(
            cast(Any, _Bound(handler)),
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=keepalive_s,
            lingering_time=LINGER_S,
            max_line_size=HEAD_LINE_MAX,
            max_field_size=HEAD_LINE_MAX,
            max_headers=HEADERS_MAX,
        )
        self.errors = errors
        self._waits: dict[Client, tuple[asyncio.Transport, int | None, float]] = {}  # what it has taken, and for how long no more

    def __call__(self) -> Client:
        return Client(self, **self._kwargs)

    @property
    def clients(self) -> list[Client]:
        return cast(list[Client], self.connections)

    def wait_for(self, client: Client) -> None:
        """From the next ``sweep`` on it has to take what was written to it."""
        self._waits.setdefault(client, (client.out, None, 0.0))

    def forget(self, client: Client) -> None:
        self._waits.pop(client, None)

    def sweep(self, passed_s: float, patience_s: float) -> None:
        """End the connections whose clients have taken nothing for so long. ``passed_s``: since the last sweep, as its caller meant
        it: a clock would count the time, too, in which this process did not run."""
        for client, (transport, before, waited_s) in tuple(self._waits.items()):
            left = transport.get_write_buffer_size()
            if not left and not transport.is_closing():
                self.forget(client)
                continue
            now = acknowledged(transport) - left
            waits_s = waited_s + passed_s if now == before else 0.0
            self._waits[client] = (transport, now, waits_s)
            if waits_s >= patience_s:
                transport.abort()

    def _make_request(self, message: RawRequestMessage, *of: Any) -> BaseRequest:
        if message.chunked:
            message = message._replace(should_close=True)
        return super()._make_request(message, *of)


class _Bound:
    """aiohttp calls a handler with the request only; its connection is a private attribute there."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def __call__(self, request: BaseRequest) -> Awaitable[Sent]:
        client = cast(Client, request.protocol)
        return self._late(request, client) if client.writing_paused else self._handler(request, client)

    async def _late(self, request: BaseRequest, client: Client) -> Sent:
        try:
            await client.taken()
        except ConnectionError:
            return CLOSE
        return await self._handler(request, client)


def acknowledged(out: asyncio.Transport) -> int:
    """Bytes that the client's host has acknowledged (``tcpi_bytes_acked`` of linux/tcp.h, since Linux 4.1); 0: not to be known."""
    try:
        info = out.get_extra_info("socket").getsockopt(IPPROTO_TCP, TCP_INFO, 128)
    except OSError:
        return 0
    return int.from_bytes(info[120:], sys.byteorder)

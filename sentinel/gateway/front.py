"""The server's side of a connection: aiohttp reads requests, answers are written straight to the transport.

This module exists as the one place that leans on aiohttp's low-level server: its parser, keep-alive, pipelining and limits are
used as they are; its response objects are not, because building one costs more than the rest of a short request. What always holds:

* A handler that has begun to write ends the answer itself; what it returns only says whether the connection lives on.
* Whatever aiohttp refuses (a head that is too long, no HTTP at all) is answered in OpenAI's shape too.
* A client whose head, or next request, does not come within the keep-alive time is let go, however slowly it types: the timer
  runs from the connection's start or the last answer, and no byte moves it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, cast

import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest

from sentinel.gateway.classify import Trouble
from sentinel.gateway.errors import ApiError

log = structlog.get_logger(__name__)

HEAD_LINE_MAX = 16 * 1024  # bytes of one header, or of the request line
HEADERS_MAX = 100


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
    busy = False  # a request of it is being handled
    begun = False  # part of an answer to the request of now has been written
    request_id = b""

    @property
    def out(self) -> asyncio.Transport:
        if self.transport is None:
            raise ConnectionResetError("the client is gone")
        return self.transport

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.relay is not None:
            self.relay.hold()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.relay is not None:
            self.relay.go_on()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self.relay is not None:
            self.relay.leave()  # at once; the handler's own task hears of it a moment later
        super().connection_lost(exc)

    def handle_error(
        self, request: BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if status >= 500:
            log.error("a request could not be handled", status=status, exc_info=exc)
        text = "the request could not be read" + (f": {message.splitlines()[0].strip(' :')}" if message else "")
        error = ApiError(status, text if status < 500 else "this gateway failed", kind="invalid_request_error")
        answer = web.Response(status=status, body=error.body(), content_type="application/json")
        answer.force_close()
        return answer


class Front(web.Server):
    """Makes a Client for every connection. A client that leaves ends its handler at once."""

    def __init__(self, handler: Handler, *, keepalive_s: float) -> None:
        super().__init__(
            cast(Any, _Bound(handler)),
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=keepalive_s,
            lingering_time=0.0,
            max_line_size=HEAD_LINE_MAX,
            max_field_size=HEAD_LINE_MAX,
            max_headers=HEADERS_MAX,
        )

    def __call__(self) -> Client:
        return Client(self, loop=asyncio.get_running_loop(), **self._kwargs)

    @property
    def clients(self) -> list[Client]:
        return cast(list[Client], self.connections)


class _Bound:
    """aiohttp calls a handler with the request only; its connection is a private attribute there."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def __call__(self, request: BaseRequest) -> Awaitable[Sent]:
        return self._handler(request, cast(Client, request.protocol))

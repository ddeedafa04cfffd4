"""What the gateway answers by itself (the list of models, and errors), and the head of what it passes on.

What always holds: ``models`` shows what would be answered now; an error is one sentence in OpenAI's shape, with the request's id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp.web_request import BaseRequest

from sentinel.gateway.attempt import Attempt
from sentinel.gateway.errors import ApiError, rendered
from sentinel.gateway.framing import Head
from sentinel.gateway.front import CLOSE, KEEP, Client, Sent
from sentinel.gateway.guards import Outcome
from sentinel.gateway.incoming import MODELS, Incoming

if TYPE_CHECKING:
    from sentinel.gateway.desk import Desk


class Answers:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def models(self, request: BaseRequest, client: Client) -> Sent:
        self._desk.keys.tenant(request.headers.get("Authorization"))
        path = request.raw_path.partition("?")[0]
        names = self._desk.plan.models(self._desk.guards.breakers.closed)
        shown = [{"id": name, "object": "model", "created": self._desk.began, "owned_by": "sentinel"} for name in names]
        if path == MODELS:
            return self._write(msgspec.json.encode({"object": "list", "data": shown}), request, client)
        wanted = path.removeprefix(MODELS + "/")
        for model in shown:
            if model["id"] == wanted:
                return self._write(msgspec.json.encode(model), request, client)
        raise ApiError(404, f"the model {wanted[:200]!r} is not served here now", code="model_not_found", param="model")

    def _write(self, body: bytes, request: BaseRequest, client: Client) -> Sent:
        keep = request.keep_alive and not self._desk.stopping
        whole = rendered(200, body, keep=keep, old=request.version < (1, 1))
        client.begun = True
        client.out.write(whole[: len(whole) - len(body)] if request.method == "HEAD" else whole)
        return KEEP if keep else CLOSE

    def tell(self, error: ApiError, request: BaseRequest, client: Client) -> Sent:
        if client.transport is None:
            return CLOSE
        whole = request.content.is_eof()  # else its connection ends, since what is left of it is not read
        keep = request.keep_alive and whole and not error.close and not self._desk.stopping
        headers = error.headers
        if error.retry_after_s:
            headers += (b"retry-after: %d" % max(1, round(error.retry_after_s)),)
        if client.request_id:
            headers += (b"x-request-id: " + client.request_id,)
        client.begun = True
        client.out.write(rendered(error.status, error.body(), headers, keep=keep, old=request.version < (1, 1)))
        return KEEP if keep else CLOSE


def head_of(x: Incoming, head: Head, size: int | None, *, keep: bool) -> bytes:
    """The head of a worker's answer as its client gets it. ``size``: of the body in bytes; None: not known yet."""
    lines = [b"HTTP/1.1 %d %b" % (head.status, head.reason), *head.lines]
    if size is not None:
        if head.status not in (204, 304):
            lines.append(b"content-length: %d" % size)
    elif not x.old:
        lines.append(b"transfer-encoding: chunked")
    if not head.tagged:
        lines.append(b"x-request-id: " + x.request_id)
    if head.status in (429, 503) and not head.retry_after:
        lines.append(b"retry-after: 1")
    if not keep:
        lines.append(b"connection: close")
    elif x.old:
        lines.append(b"connection: keep-alive")
    return b"\r\n".join(lines) + b"\r\n\r\n"


def word_of(status: int, attempt: Attempt) -> str:
    """A word for the metrics: how a request ended whose answer was passed on whole."""
    if attempt.absent:
        return "absent"
    if status < 400:
        return "ok"
    if status in (429, 503) or attempt.outcome is Outcome.BUSY:
        return "busy"
    return "client_error" if status < 500 else "failed"

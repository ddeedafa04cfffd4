"""What the gateway answers by itself (the list of models, and errors), and the head of what it passes on.

What always holds: ``models`` shows what would be answered now; an error is one sentence in OpenAI's shape, with the request's id,
and counted; HEAD is answered without a body, which its client would take for the next answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

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
            return self._write(200, msgspec.json.encode({"object": "list", "data": shown}), (), request, client)
        wanted = unquote(path.removeprefix(MODELS + "/"))  # openai-python sends Qwen/Qwen3-0.6B as Qwen%2FQwen3-0.6B
        for model in shown:
            if model["id"] == wanted:
                return self._write(200, msgspec.json.encode(model), (), request, client)
        raise ApiError(404, f"the model {wanted[:200]!r} is not served here now", code="model_not_found", param="model")

    def tell(self, error: ApiError, request: BaseRequest, client: Client) -> Sent:
        if client.transport is None:
            return CLOSE
        headers = error.headers
        if error.retry_after_s:
            headers += (b"retry-after: %d" % max(1, round(error.retry_after_s)),)
        if client.request_id:
            headers += (b"x-request-id: " + client.request_id,)
        self._desk.meters.errors[error.status] += 1
        whole = request.content.is_eof()  # else its connection ends, since what is left of it is not read
        return self._write(error.status, error.body(), headers, request, client, keep=whole and not error.close)

    def _write(
        self, status: int, body: bytes, headers: tuple[bytes, ...], request: BaseRequest, client: Client, *, keep: bool = True
    ) -> Sent:
        keep = keep and request.keep_alive and not self._desk.stopping
        whole = rendered(status, body, headers, keep=keep, old=request.version < (1, 1))
        client.begun = True
        client.out.write(whole[: len(whole) - len(body)] if request.method == "HEAD" else whole)
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

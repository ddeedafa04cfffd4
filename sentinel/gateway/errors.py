"""Errors in OpenAI's shape, as answers and inside a stream.

This module exists so that every sentence that a client of the gateway can get is built in one place. What always holds:

* The shape is the one that the SDKs of OpenAI read: ``{"error": {"message", "type", "param", "code"}}``.
* Inside a stream an error is an event of its own. openai-python raises APIError for any event whose data has an ``error``
  (its _streaming.py), so the event carries one; chat and completions then get ``[DONE]``, as vLLM ends a stream that failed, and
  /v1/responses gets its typed ``error`` event, which has no ``[DONE]``.
* A message says what was wrong and what was wanted; it never names a worker's address or repeats a key.
"""

from __future__ import annotations

import msgspec

_REASONS = {
    400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden", 404: b"Not Found", 405: b"Method Not Allowed",
    408: b"Request Timeout", 411: b"Length Required", 413: b"Content Too Large", 415: b"Unsupported Media Type",
    429: b"Too Many Requests", 431: b"Request Header Fields Too Large", 500: b"Internal Server Error", 502: b"Bad Gateway",
    503: b"Service Unavailable", 504: b"Gateway Timeout",
}  # fmt: skip


class ApiError(Exception):
    """What a client is told instead of an answer. ``kind`` and ``code``: OpenAI's words where it has one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float = 0.0,
        headers: tuple[bytes, ...] = (),
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.code, self.param = status, message, kind, code, param
        self.retry_after_s, self.headers = retry_after_s, headers
        self.close = close  # the rest of the request was not read

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self._error()})

    def _error(self) -> dict[str, str | None]:
        return {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}

    def events(self, *, responses: bool, sequence: int = 0) -> bytes:
        """The same inside a stream. ``responses``: in the form of /v1/responses; ``sequence``: events that came before."""
        if responses:
            typed = {"type": "error", "sequence_number": sequence, "code": self.code, "message": self.message, "param": None}
            return b"event: error\ndata: " + msgspec.json.encode(typed | {"error": self._error()}) + b"\n\n"
        return b"data: " + self.body() + b"\n\ndata: [DONE]\n\n"


def rendered(status: int, body: bytes, headers: tuple[bytes, ...] = (), *, keep: bool, old: bool = False) -> bytes:
    """A whole JSON answer as bytes. ``old``: the client speaks HTTP/1.0."""
    lines = [
        b"HTTP/1.1 %d %b" % (status, _REASONS.get(status, b"OK")),
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        *headers,
    ]
    if not keep:
        lines.append(b"connection: close")
    elif old:
        lines.append(b"connection: keep-alive")
    return b"\r\n".join(lines) + b"\r\n\r\n" + body

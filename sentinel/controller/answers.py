"""Bodies in and out of the controller's HTTP face.

What always holds: a body is bounded and kept no longer than it takes to read it; an answer is JSON; a refusal is one sentence.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from aiohttp import web

BODY_MAX = 4 * 1024 * 1024  # bytes


async def read_body(request: web.Request) -> bytes:
    """The body. Not ``request.read``: aiohttp would keep each node's latest body until its next report, half a gigabyte in all."""
    body = bytearray()
    while chunk := await request.content.readany():
        body += chunk
        if len(body) > BODY_MAX:
            raise web.HTTPRequestEntityTooLarge(BODY_MAX, len(body))
    return bytes(body)


def answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, headers=headers, content_type="application/json")


def http_error(kind: type[web.HTTPError], sentence: str) -> web.HTTPError:
    return kind(text=sentence)


_NUMBER = re.compile(r"\d{1,6}(\.\d{1,6})?")


def seconds(text: str) -> float:
    if not _NUMBER.fullmatch(text):
        raise http_error(web.HTTPBadRequest, f"wait: wanted seconds such as 20, got {text[:40]!r}")
    return float(text)

"""One request as it came in: who asks for what, and the bytes that a worker is to get.

This module exists so that nothing is sent anywhere before everything that can be wrong with a request has been looked at. What
always holds:

* Headers and body go on as they came. Left out are the hop-by-hop ones, ``host``, the length (told anew) and, where this gateway
  asks for keys or has one for the workers, the client's key.
* Every request carries an ``x-request-id`` and a W3C ``traceparent`` from here on: its own where it has valid ones, else new ones.
* No more than ``body_max`` bytes of a body are ever held, and none for longer than ``receive``.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Collection
from hashlib import blake2b
from typing import TYPE_CHECKING

from aiohttp.web_request import BaseRequest

from sentinel.gateway.ask import Ask, Kind, read
from sentinel.gateway.errors import ApiError
from sentinel.gateway.framing import HOP

if TYPE_CHECKING:
    from sentinel.gateway.front import Client
    from sentinel.gateway.keys import Keys
    from sentinel.settings import GatewaySettings

PATHS = {
    "/v1/chat/completions": Kind.CHAT,
    "/v1/completions": Kind.COMPLETION,
    "/v1/responses": Kind.RESPONSE,
    "/v1/embeddings": Kind.EMBEDDING,
}
MODELS = "/v1/models"
SESSION_LENGTH = 64  # characters that are kept as they are; some clients put a page of JSON into ``user``

_OWN = frozenset({b"host", b"content-length", b"expect"})
_TRACE = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_ID = re.compile(rb"[\x21-\x7e]{1,200}")

_bits = random.SystemRandom().getrandbits(64)
_dice = random.Random(_bits)  # noqa: S311  (names, not secrets; a system call for each would be a tenth of a short request)


class Incoming:
    """``old``: the client speaks HTTP/1.0. ``keep``: it may send another request on this connection."""

    __slots__ = ("ask", "began", "body", "keep", "kind", "lines", "old", "path", "request_id", "session", "tenant")

    def __init__(self, request: BaseRequest, kind: Kind, tenant: str, *, began: float, own_keys: bool) -> None:
        self.kind, self.tenant, self.began = kind, tenant, began
        self.path = request.raw_path.encode()
        self.old = request.version < (1, 1)
        self.keep = request.keep_alive
        self.lines: list[bytes] = []
        self.request_id = b""
        self.session = ""
        self.ask: Ask
        self.body = b""
        self._headers(request, own_keys)

    def _headers(self, request: BaseRequest, own_keys: bool) -> None:
        named = ",".join(request.headers.getall("Connection", ())).lower()
        leave: Collection[bytes] = ()
        if named and named not in ("keep-alive", "close"):
            leave = {part.strip().encode(errors="surrogateescape") for part in named.split(",")}
        trace = state = b""
        for name, value in request.raw_headers:
            low = name.lower()
            if low in HOP or low in _OWN or low in leave or (own_keys and low == b"authorization"):
                continue
            if low == b"x-request-id":
                if _ID.fullmatch(value):
                    self.request_id = value
            elif low == b"traceparent":
                trace = value
            elif low == b"tracestate":
                state = state + b"," + value if state else value
            else:
                self.lines.append(b"%b: %b" % (name, value))
                if low == b"x-session-id":
                    self.session = value.decode(errors="surrogateescape")
        if not self.request_id:
            self.request_id = b"req-%032x" % _dice.getrandbits(128)
        if not _TRACE.match(trace):
            trace, state = b"00-%032x-%016x-01" % (_dice.getrandbits(128) | 1, _dice.getrandbits(64) | 1), b""
        self.lines.append(b"x-request-id: " + self.request_id)
        self.lines.append(b"traceparent: " + trace)
        if state:
            self.lines.append(b"tracestate: " + state)

    def head(self, host: bytes, prefix: bytes, key: bytes, length: int) -> bytes:
        """The head for one worker. ``prefix``: the path under which it serves. ``key``: what it wants as bearer token."""
        first = b"POST %b%b HTTP/1.1\r\nhost: %b\r\ncontent-length: %d\r\n" % (prefix, self.path, host, length)
        if key:
            first += b"authorization: Bearer %b\r\n" % key
        return first + b"\r\n".join(self.lines) + b"\r\n\r\n"


async def receive(
    request: BaseRequest, client: Client, settings: GatewaySettings, keys: Keys, *, began: float, own_key: bool = False
) -> Incoming:
    """Read one request whole. ``own_key``: this gateway has one for the workers. Raises ApiError."""
    path = request.raw_path.partition("?")[0]
    kind = PATHS.get(path)
    if kind is None:
        raise ApiError(404, f"there is no {request.method} {path[:200]} here", code="unknown_url")
    if request.method != "POST":
        raise ApiError(405, f"{path} wants POST, not {request.method}", headers=(b"allow: POST",))
    tenant = keys.tenant(request.headers.get("Authorization"))
    x = Incoming(request, kind, tenant, began=began, own_keys=keys.wanted or own_key)
    client.request_id = x.request_id
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise ApiError(415, "a compressed body cannot be read here; send it without Content-Encoding", close=True)
    x.body = await _body(request, client, settings)
    x.ask = read(x.body, kind, x.session)
    x.session = f"{x.tenant}\0{_short(x.ask.session)}" if x.ask.session else ""
    return x


async def _body(request: BaseRequest, client: Client, settings: GatewaySettings) -> bytes:
    told, most = request.headers.get("Content-Length"), settings.body_max
    if told is not None and int(told) > most:
        raise _too_large(most)
    content = request.content
    if content.is_eof():
        return content.read_nowait()
    if request.headers.get("Expect", "").lower() == "100-continue":
        client.out.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(float(settings.receive)):
            while part := await content.readany():
                size += len(part)
                if size > most:
                    raise _too_large(most)
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {float(settings.receive):g} s", close=True) from None
    return b"".join(parts)


def _short(session: str) -> str:
    """What a session is remembered by: its own name, or where a client put a page of text there, the same short one everywhere."""
    if len(session) <= SESSION_LENGTH:
        return session
    return blake2b(session.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than the {most} bytes that are taken here", close=True, code="body_too_large")

"""HTTP/1.1 as it comes from a worker: the head of an answer, and where its body ends. Pure.

This module exists apart from the connection so that what a broken or hostile worker may send is judged in one place and can be
tested without a socket. What always holds:

* A head that two readers could read differently (both lengths, a bare line feed, an unknown transfer coding) is refused:
  nothing of it reaches a client.
* Hop-by-hop headers (RFC 9110 §7.6.1) end here; every other line goes on byte for byte.
* ``whole`` only ever says yes to bytes that ``Body`` would read as complete chunks.
"""

from __future__ import annotations

import re

HEAD_MAX = 64 * 1024  # bytes; uvicorn and hyper stay far below
EVENT_MAX = 1 << 20  # bytes of one unfinished SSE event that are held back; past it they go on as they are
_LINE_MAX = 256  # bytes of a chunk's size line, extensions included
_TRAILERS_MAX = 8192
HEX = b"0123456789abcdefABCDEF"

HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
})  # fmt: skip

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([^\x00-\x08\x0a-\x1f\x7f]*))?")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEX = re.compile(rb"[0-9A-Fa-f]{1,15}")


class Garbled(Exception):
    """What arrived is not an HTTP answer that could be passed on; the text says what is wrong with it."""


class Head:
    """The head of an answer. ``lines``: what goes on to the client. ``size``: of the body in bytes; None: not told by a length."""

    __slots__ = ("chunked", "json", "keep", "lines", "reason", "retry_after", "size", "sse", "status", "tagged")

    def __init__(self, status: int, reason: bytes) -> None:
        self.status, self.reason = status, reason
        self.lines: list[bytes] = []
        self.size: int | None = None
        self.chunked = False
        self.keep = True  # the connection may be used again
        self.sse = False  # events, and not compressed: where one ends can be seen
        self.json = False  # one document: of no use before it is complete
        self.retry_after = False
        self.tagged = False  # it names a request id of its own


def parse_head(raw: bytes) -> Head:
    """``raw``: from the status line to before the empty line. Raises Garbled."""
    feeds = raw.count(b"\r\n")
    if raw.count(b"\n") != feeds or raw.count(b"\r") != feeds or b"\0" in raw:
        raise Garbled("its head has control characters")
    first, *rest = raw.split(b"\r\n")
    told = _STATUS.fullmatch(first)
    if told is None:
        raise Garbled("it does not begin with an HTTP/1 status line")
    head = Head(int(told[2]), told[3] or b"")
    head.keep = told[1] == b"1"
    named: set[bytes] = set()
    coded = False
    for line in rest:
        name, _, value = line.partition(b":")
        if not _ or not _NAME.fullmatch(name):
            raise Garbled("its head has a line that is no header")
        low = name.lower()
        if low == b"content-length":
            _length(head, value.strip())
        elif low == b"transfer-encoding":
            if head.chunked or value.strip().lower() != b"chunked":
                raise Garbled("its transfer coding is not chunked")
            head.chunked = True
        elif low == b"connection":
            named.update(part.strip() for part in value.lower().split(b","))
        elif low not in HOP:
            head.lines.append(line)
            if low == b"content-type":
                kind = value.strip().lower()
                head.sse, head.json = kind.startswith(b"text/event-stream"), kind.startswith(b"application/json")
            elif low == b"content-encoding":
                coded = coded or value.strip().lower() not in (b"", b"identity")
            elif low == b"retry-after":
                head.retry_after = True
            elif low == b"x-request-id":
                head.tagged = True
    head.sse = head.sse and not coded
    if head.chunked and head.size is not None:
        raise Garbled("it tells its length twice, by Content-Length and by chunks")
    if named:
        head.keep = (head.keep or b"keep-alive" in named) and b"close" not in named
        head.lines = [line for line in head.lines if line.partition(b":")[0].lower() not in named]
    if head.status in (204, 304):
        head.size, head.chunked = 0, False
    elif not head.chunked and head.size is None:
        head.keep = False  # its body ends with the connection
    return head


def _length(head: Head, value: bytes) -> None:
    if not value.isdigit() or len(value) > 18 or (head.size is not None and head.size != int(value)):
        raise Garbled("its Content-Length is no number")
    head.size = int(value)


NO = 0  # cut through a chunk, or anything else that needs a closer look
YES = 1  # complete chunks
LAST = 2  # complete chunks, and the body's end


def whole(data: bytes) -> int:
    """Whether these bytes, which begin where a chunk begins, are complete chunks: NO, YES or LAST. The fast way past ``Body``."""
    at, size = 0, len(data)
    while at < size:
        eol = data.find(b"\r\n", at, at + 18)
        digits = data[at:eol]
        if eol <= at or digits.translate(None, HEX):  # int() alone would take "0x1f", "+1" and "1_0"
            return NO
        count = int(digits, 16)
        if count == 0:
            return LAST if data[eol:] == b"\r\n\r\n" else NO
        at = eol + 4 + count
        if data[at - 2 : at] != b"\r\n":
            return NO
    return YES


class Body:
    """Takes the framing off. ``done``: the body is complete. ``clean``: a chunk begins with the next byte."""

    __slots__ = ("_chunked", "_held", "_left", "_trailers", "done", "rest")

    def __init__(self, head: Head) -> None:
        self._chunked = head.chunked
        self._left = (head.size or 0) if not head.chunked else 0  # bytes of the body, or of a chunk with its line end
        self._held = b""
        self._trailers = 0  # bytes of trailers seen; 0: the last chunk has not come
        self.done = head.size == 0
        self.rest = b""  # what came after the end: nobody asked for it

    @property
    def clean(self) -> bool:
        return not self._left and not self._held and not self._trailers

    def feed(self, data: bytes) -> bytes:
        """The payload in these bytes. Raises Garbled."""
        if self._chunked:
            return self._chunks(data)
        if self._left:
            taken = data[: self._left]
            self._left -= len(taken)
            self.done = not self._left
            self.rest = data[len(taken) :]
            return taken
        if self.done:
            self.rest = data
            return b""
        return data  # until the connection ends

    def _chunks(self, data: bytes) -> bytes:
        if self._held:
            data, self._held = self._held + data, b""
        out: list[bytes] = []
        at, size = 0, len(data)
        while at < size and not self.done:
            if self._left > 2:
                part = data[at : at + self._left - 2]
                out.append(part)
                at += len(part)
                self._left -= len(part)
            elif self._left:
                end = data[at : at + self._left]
                if end != b"\r\n"[2 - self._left :][: len(end)]:
                    raise Garbled("a chunk of its body is longer than it says")
                at += len(end)
                self._left -= len(end)
            else:
                at = self._line(data, at)
        self.rest = data[at:] if self.done else b""
        return b"".join(out)

    def _line(self, data: bytes, at: int) -> int:
        """One line of the framing: a chunk's size, a trailer (dropped), or the end. Returns where it ends."""
        eol = data.find(b"\r\n", at)
        if eol < 0:
            self._held = data[at:]
            if len(self._held) > (_TRAILERS_MAX if self._trailers else _LINE_MAX):
                raise Garbled("a chunk of its body has no size")
            return len(data)
        if self._trailers:
            self._trailers += eol - at + 2
            if self._trailers > _TRAILERS_MAX:
                raise Garbled("its trailers have no end")
            self.done = eol == at
            return eol + 2
        digits = data[at:eol].partition(b";")[0].strip()
        if not _HEX.fullmatch(digits):
            raise Garbled("a chunk of its body has no size")
        count = int(digits, 16)
        if count:
            self._left = count + 2
        else:
            self._trailers = 1
        return eol + 2


def _size_lines(length: int) -> tuple[bytes, ...]:
    for digits in range(1, 4):
        size = length - digits - 4
        if 16 ** (digits - 1) <= size < 16**digits:
            return tuple({b"%x\r\n" % size: None, b"%X\r\n" % size: None})
    return ()


# Bytes of one chunk → what it begins with (uvicorn writes small letters, hyper large ones). Nearly every piece of a stream is one
# chunk, and so a comparison takes the place of reading its size.
SIZE_LINES = tuple(map(_size_lines, range(1024)))


def chunk(payload: bytes) -> bytes:
    """One chunk that carries ``payload``, which must not be empty."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


LAST_CHUNK = b"0\r\n\r\n"


def plain(data: bytes) -> bytes:
    """The payload of complete chunks; anything else as it is, and so events that have no framing: none begins with a size."""
    if whole(data) != YES:
        return data
    head = Head(200, b"")
    head.chunked = True
    return Body(head).feed(data)


def cut(data: bytes) -> tuple[bytes, bytes]:
    """Complete events of a stream, and the beginning of the next one."""
    lines, crlf = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
    end = max(lines + 2 if lines >= 0 else 0, crlf + 4 if crlf >= 0 else 0)
    return data[:end], data[end:]

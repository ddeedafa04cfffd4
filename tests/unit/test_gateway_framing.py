"""What a worker may send: heads that could be read in two ways are refused, and bodies end where they say."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel.gateway.framing import LAST, LAST_CHUNK, NO, SIZE_LINES, YES, Body, Garbled, chunk, parse_head, whole


def test_a_head_is_taken_apart() -> None:
    """Status, length and kind are known; what belongs to the connection stays behind; everything else is the same bytes."""
    head = parse_head(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n"
        b"Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nX-Own:  kept as it is"
    )
    assert (head.status, head.reason, head.size, head.chunked, head.sse, head.keep) == (200, b"OK", None, True, True, True)
    assert head.lines == [b"Content-Type: text/event-stream; charset=utf-8", b"X-Own:  kept as it is"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"nonsense",
        b"HTTP/2 200 OK",
        b"HTTP/1.1 20 OK",
        b"HTTP/1.1 200 OK\r\nno colon",
        b"HTTP/1.1 200 OK\r\n folded: yes",
        b"HTTP/1.1 200 OK\r\nbad name: x",
        b"HTTP/1.1 200 OK\r\nx: a\nset-cookie: b",
        b"HTTP/1.1 200 OK\r\nx: a\rb",
        b"HTTP/1.1 200 OK\r\nx: \0",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked",
    ],
)
def test_what_two_readers_could_read_differently_is_refused(raw: bytes) -> None:
    """No such head, nor any part of it, is passed on."""
    with pytest.raises(Garbled):
        parse_head(raw)


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    """Neither a length nor chunks: the connection cannot be kept."""
    head = parse_head(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain")
    assert not head.keep
    assert Body(head).feed(b"anything") == b"anything"
    assert parse_head(b"HTTP/1.1 204 No Content").size == 0


@pytest.mark.parametrize("size", [b"0x2", b"+2", b" 2", b"2 ", b"1_0", b"", b"-1", b"\xb2"])
def test_sizes_that_only_some_readers_understand_are_never_passed_on_as_they_are(size: bytes) -> None:
    """A chunk's size is hex digits and nothing else, on the fast way."""
    assert whole(size + b"\r\nab\r\n") == NO


payloads = st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=6)
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked"


@given(payloads, st.lists(st.integers(0, 2500), max_size=8))
def test_chunks_are_read_wherever_they_are_cut(parts: list[bytes], cuts: list[int]) -> None:
    """The payload and the end are the same however the bytes arrive, and what follows the end is told apart."""
    wire = b"".join(map(chunk, parts)) + LAST_CHUNK
    body, got, at = Body(parse_head(CHUNKED)), b"", 0
    for cut in [*sorted(c for c in cuts if c < len(wire)), len(wire)]:
        got += body.feed(wire[at:cut])
        at = cut
    assert got == b"".join(parts)
    assert body.done and not body.rest
    again = Body(parse_head(CHUNKED))
    again.feed(wire + b"more")
    assert again.done and again.rest == b"more"


@given(payloads, st.booleans(), st.binary(max_size=20))
def test_the_fast_way_agrees_with_the_slow_one(parts: list[bytes], ends: bool, after: bytes) -> None:
    """What ``whole`` calls complete is complete for ``Body``, at a chunk's beginning, and ended exactly when it says so."""
    data = b"".join(map(chunk, parts)) + (LAST_CHUNK if ends else b"") + after
    kind = whole(data)
    if not after:
        assert kind == (LAST if ends else YES)
    if kind != NO:
        body = Body(parse_head(CHUNKED))
        body.feed(data)
        assert body.done == (kind == LAST)
        assert body.done or body.clean
        assert not body.rest


@pytest.mark.parametrize("form", [b"%x\r\n%b\r\n", b"%X\r\n%b\r\n"])
def test_one_chunk_is_known_by_its_length_and_its_first_line(form: bytes) -> None:
    """Every chunk below a kilobyte begins as the table says, in small and in large letters, and the body's end never does."""
    for size in range(1, 1017):
        data = form % (size, b"x" * size)
        assert data.startswith(SIZE_LINES[len(data)]) and whole(data) == YES
    assert not LAST_CHUNK.startswith(SIZE_LINES[len(LAST_CHUNK)])


@given(st.integers(0, 1023), st.binary(max_size=6))
def test_what_the_table_of_size_lines_takes_is_one_chunk(length: int, first: bytes) -> None:
    """Whatever begins with a size line of its length and ends with a line's end is one complete chunk."""
    for line in (*SIZE_LINES[length], first + b"\r\n"):
        data = line + b"x" * (length - len(line) - 2) + b"\r\n"
        if len(data) == length and data.startswith(SIZE_LINES[length]):
            assert whole(data) == YES and chunk(data[len(line) : -2]).lower() == data.lower()


@given(st.binary(max_size=200))
def test_garbage_is_garbled_or_read_and_never_anything_else(data: bytes) -> None:
    """No bytes whatever raise anything but Garbled, in a head or in a body."""
    with contextlib.suppress(Garbled):
        parse_head(data)
    with contextlib.suppress(Garbled):
        Body(parse_head(CHUNKED)).feed(data)
    if whole(data) != NO and data:
        Body(parse_head(CHUNKED)).feed(data)

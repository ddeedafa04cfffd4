"""A stream's way through the relay, whatever its events, its chunks and the pieces in which they arrive, and wherever it breaks."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from hypothesis import example, given
from hypothesis import strategies as st

from sentinel.gateway.classify import Trouble
from sentinel.gateway.framing import LAST_CHUNK, Body, chunk, parse_head
from sentinel.gateway.meters import Flow
from sentinel.gateway.stream import Relay

if TYPE_CHECKING:
    from sentinel.gateway.front import Client
    from sentinel.gateway.upstream import Connection

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked"
FINE = st.sampled_from(
    [
        b'data: {"id":"1","choices":[{"delta":{"content":"x"}}]}\n\n',
        b'data: {"id":"1","choices":[{"delta":{"content":"' + b"long " * 300 + b'"}}]}\n\n',
        b'event: response.output_text.delta\ndata: {"delta":"event: error"}\n\n',
        b'event: response.refusal.delta\ndata: {"delta":"\\ndata: {\\"error\\""}\n\n',
        b": still here\n\n",
        b":\n\n",
    ]
)
ERROR = b'data: {"error":{"message":"own words","code":500}}\n\n'
BAD = st.sampled_from(
    [
        ERROR,
        b'event: error\ndata: {"type":"error","code":null,"message":"own words"}\n\n',
        b'event: response.failed\ndata: {"type":"response.failed","response":{"error":{"code":"server_error"}}}\n\n',
    ]
)
DONE = b"data: [DONE]\n\n"


class Ends:
    """Both connections of a relay. ``writes``: what the client has got, each by itself."""

    writing_paused = closed = cut = False
    relay: Relay | None = None

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.out = self

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def take(self, relay: Relay) -> bytes:
        return b""

    def is_closing(self) -> bool:
        return False

    def done(self) -> None:
        """The worker's connection may be kept."""

    def abort(self) -> None:
        self.cut = True


def parted(data: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({0, *at, len(data)})
    return [data[a:b] for a, b in pairwise(edges)]


@st.composite
def wires(draw: st.DrawFn, *, bad: bool) -> tuple[list[bytes], list[bytes]]:
    """The events of a stream, and the pieces in which its chunks arrive. ``bad``: it may end with an error that it tells."""
    events = draw(st.lists(FINE, min_size=1, max_size=12))
    if bad and draw(st.booleans()):
        events.append(draw(BAD))
    if draw(st.booleans()):
        events.append(DONE)
    if draw(st.booleans()):
        events = [event.replace(b"\n", b"\r\n") for event in events]
    payload = b"".join(events)
    each = draw(st.booleans())  # an event is a chunk, as workers write them
    bounds = [len(b"".join(events[:n])) for n in range(len(events))] if each else draw(st.lists(st.integers(0, len(payload))))
    framed = [*map(chunk, parted(payload, bounds)), LAST_CHUNK]
    wire = b"".join(framed)
    if draw(st.booleans()):
        cuts = draw(st.lists(st.integers(0, len(wire))))
    else:  # as they were written, some together
        cuts = [len(b"".join(framed[:n])) for n in range(len(framed)) if draw(st.booleans())]
    return events, parted(wire, cuts)


def passed(pieces: list[bytes], *, old: bool, broken: bool) -> tuple[Relay, Ends]:
    async def run() -> tuple[Relay, Ends]:
        ends = Ends()
        relay = Relay(cast("Client", ends), cast("Connection", ends), parse_head(HEAD), Flow(), stall_s=60.0, old=old)
        relay.start()
        for piece in pieces:
            relay.data_received(piece)
            if not relay.ended.done():
                got = taken(ends, old=old)
                assert not got or got.endswith((b"\n\n", b"\r\n\r\n")), "half an event was shown"
        if broken:
            relay.lost(ConnectionResetError())
        return relay, ends

    return asyncio.run(run())


def taken(ends: Ends, *, old: bool) -> bytes:
    """The payload that the client has got; what it got so far has to be whole chunks."""
    if old:
        return b"".join(ends.writes)
    body = Body(parse_head(HEAD))
    payload = body.feed(b"".join(ends.writes))
    assert body.done or body.clean
    return payload


@given(wires(bad=True), st.booleans())
@example(([b":\n\n"], [b"1\r\n:\r\n1\r\n\n\r\n", b"1\r\n\n\r\n0\r\n\r\n"]), False)  # a line's end that is a chunk
@example(([ERROR], [chunk(ERROR[:9]) + chunk(ERROR[9:]), LAST_CHUNK]), False)
def test_a_stream_arrives_as_it_was_sent(wire: tuple[list[bytes], list[bytes]], old: bool) -> None:
    """The payload is the same, half an event is never shown, and an error at its end is the worker's, however it is cut."""
    events, pieces = wire
    relay, ends = passed(pieces, old=old, broken=False)
    assert taken(ends, old=old) == b"".join(events)
    told = any(b"own words" in event or b"response.failed" in event for event in events)
    assert relay.ended.result() is (Trouble.WORKER_ERROR if told else None)
    assert not told or relay.told == 500


@given(wires(bad=False), st.booleans(), st.data())
def test_a_stream_that_breaks_anywhere_ends_with_an_error(
    wire: tuple[list[bytes], list[bytes]], old: bool, data: st.DataObject
) -> None:
    """What its client has got is complete events, as they were sent, and then the error; and the worker's failure is told."""
    events, pieces = wire
    relay, ends = passed(pieces[: data.draw(st.integers(0, len(pieces) - 1))], old=old, broken=True)
    got = taken(ends, old=old)
    before, mark, error = got.partition(b'data: {"error":{"message":"the worker')
    assert mark and error.endswith(b"\n\n" + DONE) and b"".join(events).startswith(before)
    assert not before or before.endswith((b"\n\n", b"\r\n\r\n"))
    assert relay.ended.result() is Trouble.RESET

"""Properties of what the gateway decides and passes on: outcomes, sessions, and streams cut anywhere."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.gateway.ask import Kind, read
from sentinel.gateway.classify import Budget, Trouble, elsewhere, of_status, of_trouble
from sentinel.gateway.errors import ApiError
from sentinel.gateway.framing import LAST_CHUNK, Body, chunk, parse_head
from sentinel.gateway.guards import Outcome
from sentinel.gateway.meters import Flow
from sentinel.gateway.stream import Relay


@given(st.integers(200, 599), st.booleans())
def test_a_status_means_one_thing(status: int, out: bool) -> None:
    """4xx never count against a worker, nor what it says of a request that it does not support; back-pressure is neutral, and
    nothing a worker does after it left does count."""
    outcome = of_status(status, out=out)
    if (status < 500 and status not in (429, 499)) or status in (501, 505):
        assert outcome is Outcome.FINE
    elif out:
        assert outcome is Outcome.IGNORED
    else:
        assert outcome is (Outcome.BUSY if status in (429, 503, 529) else Outcome.FAILED)
    assert elsewhere(outcome) == (outcome is not Outcome.FINE)


@given(st.sampled_from(list(Trouble)), st.booleans())
def test_trouble_counts_unless_the_worker_is_not_to_blame(trouble: Trouble, out: bool) -> None:
    """A client that left and our own stop say nothing about a worker; neither is tried elsewhere."""
    blameless = trouble in (Trouble.CLIENT, Trouble.STOPPING)
    assert of_trouble(trouble, out=out) is (Outcome.IGNORED if out or blameless else Outcome.FAILED)
    assert elsewhere(of_trouble(trouble, out=out), trouble) == (not blameless)


@given(st.lists(st.booleans(), max_size=400), st.floats(0, 1), st.integers(1, 20))
def test_second_tries_stay_within_their_budget(steps: list[bool], share: float, reserve: int) -> None:
    """Never more than the reserve and the share of the requests, in any order of events."""
    budget, requests, tries = Budget(share, reserve), 0, 0
    for ask in steps:
        if ask:
            tries += budget.spend()
        else:
            requests += 1
            budget.earn()
        assert tries <= reserve + share * requests + 1e-6


words = st.text(max_size=30)


@given(st.lists(words, min_size=1, max_size=4), words, st.integers(0, 3))
def test_a_conversation_keeps_its_session(turns: list[str], system: str, cut: int) -> None:
    """Every later turn of a conversation has the session of its first, and is known to go on."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": turns[0]}]
    first = read(json.dumps({"model": "m", "messages": messages}).encode(), Kind.CHAT)
    for text in turns[1:]:
        messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": text}]
        later = read(json.dumps({"model": "m", "temperature": cut, "messages": messages}).encode(), Kind.CHAT)
        assert later.session == first.session != ""
        assert later.goes_on and not first.goes_on


@given(st.binary(max_size=80), st.sampled_from(list(Kind)))
def test_any_body_is_read_or_refused_in_one_sentence(body: bytes, kind: Kind) -> None:
    """Whatever comes, it is an Ask or a 400."""
    try:
        assert read(body, kind).model
    except ApiError as error:
        assert error.status == 400 and error.message


class Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.cut = False

    def write(self, data: bytes) -> None:
        assert not self.cut
        self.written.append(data)

    def abort(self) -> None:
        self.cut = True

    def is_closing(self) -> bool:
        return self.cut

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Ends:
    """Both ends of a relay, as far as it touches them."""

    def __init__(self, head: Any) -> None:
        self.out = self.transport = Transport()
        self.writing_paused = self.closed = False
        self.relay: Relay | None = None
        self.head, self.error = head, None
        self.kept: bool | None = None

    def take(self, _: Relay) -> bytes:
        return b""

    def done(self) -> None:
        self.kept = True

    def abort(self) -> None:
        self.kept = False


events = st.lists(st.text(alphabet="abc{}\"\\:, é", min_size=1, max_size=40), min_size=1, max_size=5)


@settings(max_examples=200)
@given(
    texts=events, seps=st.sampled_from([b"\n\n", b"\r\n\r\n"]), grouped=st.lists(st.integers(1, 60), max_size=12),
    cuts=st.lists(st.integers(1, 900), max_size=10), breaks=st.none() | st.integers(0, 900), old=st.booleans(),
)  # fmt: skip
def test_a_stream_is_passed_on_whole_events_only(
    *, texts: list[str], seps: bytes, grouped: list[int], cuts: list[int], breaks: int | None, old: bool
) -> None:
    """However a worker chunks its stream, wherever it is cut and wherever it breaks: a client that stops reading after any write
    has complete chunks of complete events, the bytes are the worker's, and a break ends in one error event. Events that are not
    cut into chunks are counted, however the pieces arrive."""

    sep = seps

    async def run() -> None:
        stream = b"".join(b"data: " + t.encode() + sep for t in texts)
        wire, at = b"", 0
        for size in grouped:
            wire += chunk(stream[at : at + size]) if stream[at : at + size] else b""
            at += size
        wire += (chunk(stream[at:]) if stream[at:] else b"") + LAST_CHUNK
        head = parse_head(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked")
        ends: Any = Ends(head)
        relay = Relay(ends, ends, head, Flow(), stall_s=60, old=old)
        relay.start()
        end, at = len(wire) if breaks is None else min(breaks, len(wire)), 0
        for cut in [*sorted(c for c in cuts if c < end), end]:
            if wire[at:cut]:
                relay.data_received(wire[at:cut])
            at = cut
            got = _payload(ends.out.written, old)
            assert relay.ended.done() or not got or got.endswith(sep)
        broken = end < len(wire)
        if broken:
            relay.lost(None)
        assert relay.ended.done() and ends.relay is None
        got = _payload(ends.out.written, old)
        if not broken:
            assert got == stream and relay.ended.result() is None and ends.kept is True
            assert grouped or relay.events == len(texts)
        else:
            shown, _, told = got.partition(b'data: {"error"')
            assert stream.startswith(shown) and (not shown or shown.endswith(sep))
            assert told.endswith(b"data: [DONE]\n\n") and ends.kept is False
            assert relay.ended.result() is Trouble.EARLY
        if not old:
            assert b"".join(ends.out.written).endswith(LAST_CHUNK)

    asyncio.run(run())


def _payload(written: list[bytes], old: bool) -> bytes:
    data = b"".join(written)
    if old:
        return data
    body = Body(parse_head(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked"))
    got = body.feed(data)
    assert body.done or body.clean, "a chunk was begun and not ended"
    assert not body.rest
    return got

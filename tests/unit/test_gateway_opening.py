"""A stream that has only announced itself, or that begins with an error, has shown nothing yet and can be saved."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from sentinel.durations import Duration
from sentinel.gateway.framing import Head
from sentinel.gateway.guards import Outcome
from sentinel.gateway.opening import opening
from tests.gateway_site import Site, piece
from tests.unit.test_gateway_failures import Heard, home_of

ANNOUNCED = b'event: response.created\ndata: {"type":"response.created"}\n\nevent: response.in_progress\ndata: {"type":"x"}\n\n'
DELTA = b'event: response.output_item.added\ndata: {"type":"response.output_item.added"}\n\n'
RESPONSE = b'event: response.failed\ndata: {"type":"response.failed","response":{"error":{"code":"server_error"}}}\n\n'
FAILED = b'data: {"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError","param":null,"code":500}}\n\n'


def read(body: bytes, *, chunks: int = 0) -> int | None:
    head = Head(200, b"OK")
    head.sse = True
    head.chunked = bool(chunks)
    if chunks:
        parts = [body[n : n + chunks] for n in range(0, len(body), chunks)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts)
    return opening(head, body)


@pytest.mark.parametrize(
    ("body", "worth"),
    [
        (b"", None), (b"ev", None), (b"da", None), (ANNOUNCED, None), (ANNOUNCED + b"event: resp", None),
        (ANNOUNCED + DELTA, 0), (b'data: {"id":"chatcmpl-1"}\n\n', 0), (b": still here\n\n", None), (b"\xff\xff", 0),
        (FAILED[:40], None), (FAILED, 500), (FAILED.replace(b"500", b"503"), 503), (FAILED.replace(b"500", b"400"), 400),
        (FAILED.replace(b"500", b"499"), 499),
        (ANNOUNCED + FAILED, 500), (b"event: error\ndata: gone\n\n", 500), (b'event: error\r\ndata: {"error":{}}\r\n\r\n', 500),
        (b'data: {"error":{"code":"engine_dead"}}\n\n', 500), (ANNOUNCED + b"x" * (1 << 20), 0),
        (ANNOUNCED + RESPONSE, 500), (ANNOUNCED + RESPONSE[:-1], None), (RESPONSE.replace(b"server_error", b"invalid_prompt"), 400),
        (RESPONSE.replace(b"server_error", b"rate_limit_exceeded"), 429), (b"event: response.incomplete\ndata: {}\n\n", 0),
        (b'event: error\ndata: {"type":"error","code":"invalid_prompt","message":"x"}\n\n', 400), (b":\n\n:\n\n" + FAILED, 500),
        (b":\r\n\r\n: x", None), (b": x\ndata: {}\n\n", 0),
    ],
)  # fmt: skip
def test_what_a_beginning_is_worth(body: bytes, worth: int | None) -> None:
    """Announcements and comments are nothing yet, an error is the status that it names, all else is an answer, in chunks too."""
    assert read(body) == worth
    assert read(body, chunks=7) == (worth if body else None)


@given(st.binary(max_size=200), st.integers(1, 300))
def test_a_beginning_is_never_worth_less_later(body: bytes, cut: int) -> None:
    """Once something is an answer or an error, more bytes do not make it anything else."""
    early = read((ANNOUNCED + body)[:cut])
    assert early is None or read(ANNOUNCED + body) == early


def stream(*events: bytes, frozen: Any = None) -> Any:
    async def handler(request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for event in events:
            await out.write(event)
        if frozen is not None:
            await frozen.wait()
        await out.write(b"data: [DONE]\n\n")
        return out

    return handler


async def test_a_stream_that_begins_with_an_error_is_tried_elsewhere() -> None:
    """vLLM tells streams that its dead engine had not begun so, behind a 200: the client gets the other worker's answer."""
    async with Site("a", "b") as site:
        home = await home_of(site, "u")
        other = "b" if home == "a" else "a"
        site.stands[home].handler = stream(FAILED)
        heard = Heard(site)
        async with site.post(user="u", stream=True) as answer:
            body = await answer.read()
        assert f"chatcmpl-{other}".encode() in body and b"error" not in body
        await site.free()
        assert sorted(heard.outcomes) == sorted([(home, Outcome.FAILED), (other, Outcome.FINE)])


@pytest.mark.parametrize(("code", "asked"), [(500, 2), (503, 2), (400, 1)])
async def test_without_a_better_answer_the_error_goes_on_as_it_is(code: int, asked: int) -> None:
    """Every worker says so: the client reads the last one's own words. A client's mistake is asked of nobody else."""
    told = FAILED.replace(b"500", b"%d" % code)
    async with Site("a", "b") as site:
        for stand in site.stands.values():
            stand.handler = stream(told)
        async with site.post(stream=True) as answer:
            assert (answer.status, await answer.read()) == (200, told + b"data: [DONE]\n\n")
        await site.free()
        assert sum(len(s.requests) for s in site.stands.values()) == asked


async def test_an_announced_response_of_a_frozen_engine_is_tried_elsewhere() -> None:
    """/v1/responses announces itself before the engine is asked; silence after it is silence before the first byte."""
    async with Site("a", "b", first_byte=Duration(0.3)) as site:
        home = await home_of(site, "u")
        other = "b" if home == "a" else "a"
        site.stands[home].handler = stream(ANNOUNCED, frozen=site.stands[home].thawed)
        said = b"data: " + json.dumps(piece("word", other)).encode() + b"\n\n"
        site.stands[other].handler = stream(ANNOUNCED, said)
        async with site.post("/v1/responses", user="u", stream=True, input="hi") as answer:
            assert await answer.read() == ANNOUNCED + said + b"data: [DONE]\n\n"
        await site.free()

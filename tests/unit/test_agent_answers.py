"""A controller's answer that is no acknowledgement, be it garbage or a refusal, loses nothing and is got over."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from sentinel.model import Ack, Report
from tests.unit.agent_stand import Answer, Controller, Scripted, agent, event, trouble, until


@pytest.mark.parametrize(
    "garbage",
    [
        lambda r: web.Response(body=b"<html>hotel wifi</html>", content_type="text/html"),
        lambda r: web.Response(body=b""),
        lambda r: web.Response(body=b'{"session": "x"'),
        lambda r: web.Response(body=b"\xff" * 100),
        lambda r: web.Response(body=b" " * (5 << 20)),
        lambda r: web.Response(body=msgspec.json.encode(Ack(session="another", seq=r.seq))),
        lambda r: web.Response(body=msgspec.json.encode(Ack(session=r.session, seq=r.seq + 1))),
        lambda r: web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}),
        lambda r: web.Response(status=503, text="store is away"),
        lambda r: web.Response(status=429, headers={"Retry-After": "0"}),
        lambda r: web.Response(status=429, headers={"Retry-After": "\u00b2"}),
        lambda r: web.Response(status=500, body=b'{"error":"caf\xe9"}'),
        lambda r: web.Response(status=500, body=b'{"error":' + b"[" * 100_000),
        lambda r: web.Response(status=421, body=b'{"leader":' + b"[" * 100_000),
    ],
    ids=["page", "empty", "half", "binary", "oversized", "other session", "other seq", "redirect", "503", "429",
         "429 until a raised two", "no UTF-8", "endless nesting", "endless nesting as leader"],
)
async def test_garbage_is_never_taken_for_an_acknowledgement(tmp_path: Path, garbage: Answer) -> None:
    """An answer that is not this report's Ack leaves the finding in the spool, does not loop hot, and is got over."""
    probe = Scripted()
    async with Controller().serving() as controller, agent(tmp_path, controller.url, probe=probe) as made:
        asked = 0

        def answer(report: Report) -> web.StreamResponse:
            nonlocal asked
            asked += 1
            return garbage(report)  # type: ignore[return-value]

        controller.answer = answer
        probe.next = [event("e")]
        await until(lambda: asked >= 2 and len(made.spool))
        assert asked < 50
        assert not made.down.is_set()
        controller.answer = lambda report: None
        await until(lambda: controller.findings and not len(made.spool))


async def test_a_refused_finding_does_not_block_the_others(tmp_path: Path) -> None:
    """The one finding that the controller refuses is found, set aside and counted; everything else arrives, in order."""
    probe = Scripted()
    async with Controller().serving() as controller:
        controller.answer = lambda r: (
            web.json_response({"error": "cannot be"}, status=400) if any(f.id == "poison" for f in r.findings) else None
        )
        async with agent(tmp_path, controller.url, probe=probe) as made:
            assert made.connection
            made.connection.reporter._after_refusal_s = 0.01
            probe.next = [event("a"), event("b"), event("poison"), event("c"), event("d")]
            await until(lambda: len(controller.findings) == 4)
            assert [f.id for f in controller.findings] == ["a", "b", "c", "d"]
            await until(lambda: made.spool.dropped["fatal"] == 1)
            assert made.metrics.registry.get_sample_value("sentinel_report_errors_total", {"why": "refused"})


async def test_a_refused_token_keeps_everything(tmp_path: Path) -> None:
    """401 drops nothing, is not asked in a loop, and a token renewed in its file is used without a restart."""
    token = tmp_path / "token"
    token.write_text("old")
    token.chmod(0o600)
    probe = Scripted()
    async with Controller().serving() as controller:

        def answer(report: Report) -> web.StreamResponse | None:
            return None if controller.tokens[-1] == "Bearer new" else web.json_response({"error": "no such token"}, status=401)

        controller.answer = answer
        async with agent(tmp_path, controller.url, probe=probe, token_file=token) as made:
            assert made.connection
            made.connection.reporter._after_refusal_s = 0.1
            probe.next = [event("e")]
            await until(lambda: "no such token" in trouble(made))
            await asyncio.sleep(0.3)
            assert len(controller.tokens) < 10
            assert len(made.spool) == 1
            token.write_text("new")
            await until(lambda: controller.findings)

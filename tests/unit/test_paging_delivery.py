"""Delivery of pages over real HTTP to a stand-in for PagerDuty: retries, refusals, order, several receivers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from sentinel.config import ConfigError, PagingSettings
from sentinel.model import Page, Urgency
from sentinel.paging import Pager, PagerError, build_pager
from sentinel.testing.pagerduty import Answer, FakePagerDuty


class Clock:
    """Time that passes only by sleeping; waits are remembered."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class Paging:
    """A pager on the stand-in, built as the controller builds it."""

    def __init__(self, pagerduty: FakePagerDuty, session: aiohttp.ClientSession, directory: Path) -> None:
        self.pagerduty, self.session, self.directory = pagerduty, session, directory
        self.clock = Clock()
        self.registry = CollectorRegistry()
        self.key = directory / "key"
        self.key.write_text("R0UT1NGKEY\n")
        self.key.chmod(0o600)

    def build(self, **settings: Any) -> Pager:
        settings = {"pagerduty_key_file": self.key, "pagerduty_url": self.pagerduty.url} | settings
        return build_pager(PagingSettings(**settings), self.session, self.registry, clock=self.clock, sleep=self.clock.sleep)

    def count(self, event: str, outcome: str) -> float | None:
        return self.registry.get_sample_value("sentinel_pages_total", {"event": event, "outcome": outcome})


@pytest_asyncio.fixture
async def paging(tmp_path: Path) -> AsyncIterator[Paging]:
    async with FakePagerDuty() as pagerduty, aiohttp.ClientSession() as session:
        yield Paging(pagerduty, session, tmp_path)


def page(event: Any = "trigger", number: int = 1, **fields: Any) -> Page:
    fields = {"id": f"{event}-{number}", "dedup_key": f"xid.79:t01-{number}", "summary": "GPU fell off the bus"} | fields
    return Page(event=event, at=1_800_000_000.0, urgency=Urgency.CRITICAL, source="t01", **fields)


async def test_an_incident_from_trigger_to_resolve(paging: Paging) -> None:
    """Trigger, acknowledge and resolve reach one alert by one dedup key, and are counted as delivered."""
    pager = paging.build()
    for event in ("trigger", "acknowledge", "resolve"):
        assert await pager.send(page(event)) is True
        assert paging.count(event, "delivered") == 1
    alert = paging.pagerduty.alerts["xid.79:t01-1"]
    assert (alert.state, alert.opened, alert.severity) == ("resolved", 1, "critical")
    assert paging.count("trigger", "gave_up") == 0, "born at 0, so that its increase can raise an alert"


async def test_server_errors_are_retried(paging: Paging) -> None:
    """503, 503, 202: delivered by the third attempt, with a growing wait between them, as one alert."""
    paging.pagerduty.answer_next(503, 500)
    assert await paging.build().send(page()) is True
    assert [r.status for r in paging.pagerduty.requests] == [503, 500, 202]
    first, second = paging.clock.waits
    assert 0 < first < second
    assert paging.pagerduty.alerts["xid.79:t01-1"].opened == 1


async def test_retry_after_is_honoured_by_all(paging: Paging) -> None:
    """After 429 with Retry-After no page of any key is sent before that time."""
    pager = paging.build()
    paging.pagerduty.answer_next(Answer(status=429, headers={"Retry-After": "17"}))
    assert await pager.send(page()) is True
    assert paging.clock.waits == [pytest.approx(17)]
    paging.pagerduty.answer_next(Answer(status=429, headers={"Retry-After": "3600"}))
    with pytest.raises(PagerError) as told:
        await pager.send(page(number=2))
    assert told.value.retry_after_s == pytest.approx(3600)
    asked = len(paging.pagerduty.requests)
    with pytest.raises(PagerError):
        await pager.send(page(number=3))
    assert len(paging.pagerduty.requests) == asked, "not asked while it wants to be left alone"
    paging.clock.now += 3600
    assert await pager.send(page(number=2)) is True


async def test_who_may_not_send_any_more_does_not_try_again(paging: Paging) -> None:
    """A controller paused during a wait, and leader no more when it is over, sends nothing; later the page goes out once."""
    pager = paging.build()
    paging.pagerduty.answer_next(Answer(status=503))
    with pytest.raises(PagerError, match="not this process's to send"):
        await pager.send(page(), lambda: not paging.clock.waits)
    assert len(paging.pagerduty.requests) == 1
    assert await pager.send(page()) is True
    assert len(paging.pagerduty.requests) == 2


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("12", 12), ("Wed, 01 Jan 2025 00:00:30 GMT", 30), ("Tue, 31 Dec 2024 00:00:00 GMT", 0), ("soon", 0), ("-5", 0), ("", 0)],
)
async def test_retry_after_in_every_spelling(paging: Paging, text: str, seconds: float) -> None:
    """Seconds and dates (against the server's own clock) are understood; anything else is as if it were not there."""
    paging.pagerduty.answer_next(Answer(status=429, headers={"Retry-After": text, "Date": "Wed, 01 Jan 2025 00:00:00 GMT"}))
    assert await paging.build().send(page()) is True
    assert paging.clock.waits[0] == (pytest.approx(seconds) if seconds else pytest.approx(0.5, abs=0.5))


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413])
async def test_a_refusal_is_final(paging: Paging, status: int) -> None:
    """Any other 4xx is asked once only, is False, is counted, and is said loudly without the key."""
    pager = paging.build()
    paging.pagerduty.answer_next(status)
    with capture_logs() as logged:
        assert await pager.send(page()) is False
    assert await pager.send(page()) is False, "the same page again is not even sent"
    assert [r.status for r in paging.pagerduty.requests] == [status]
    assert paging.count("trigger", "rejected") == 1
    assert [(entry["log_level"], entry["summary"]) for entry in logged] == [("error", "GPU fell off the bus")]
    assert f"answered {status}" in logged[0]["why"]
    assert "R0UT1NGKEY" not in str(logged)


async def test_an_echoed_key_is_not_logged(paging: Paging) -> None:
    """A receiver that repeats the key in its answer does not bring it into our log."""

    async def echo(request: web.Request) -> web.Response:
        return web.Response(status=400, text=(await request.text()))

    async with Server(echo) as url:
        with capture_logs() as logged:
            assert await paging.build(pagerduty_url=url).send(page()) is False
    assert "***" in str(logged)
    assert "R0UT1NGKEY" not in str(logged)


async def test_giving_up_for_now(paging: Paging) -> None:
    """A receiver that stays away makes PagerError within the pager's patience; handed in again, the page arrives once."""
    pager = paging.build()
    paging.pagerduty.answer_always(502)
    with pytest.raises(PagerError, match="answered 502"):
        await pager.send(page())
    assert paging.clock.now < 60
    assert paging.count("trigger", "gave_up") == 1
    paging.pagerduty.answer_always(None)
    assert await pager.send(page()) is True
    assert paging.pagerduty.actions() == ["trigger"]


async def test_nobody_listens(paging: Paging) -> None:
    """A connection that is refused is PagerError with where it was tried, not an exception of the network."""
    await paging.pagerduty.stop()
    with pytest.raises(PagerError, match=r"127\.0\.0\.1 cannot be reached"):
        await paging.build().send(page())


async def test_a_lost_answer_pages_once(paging: Paging) -> None:
    """When the event arrived and the answer did not, the retry joins the same alert."""
    paging.pagerduty.answer_next(Answer(lost=True))
    assert await paging.build().send(page()) is True
    assert paging.pagerduty.alerts["xid.79:t01-1"].opened == 1
    assert len(paging.pagerduty.events) == 2


async def test_order_under_retry(paging: Paging) -> None:
    """A resolve handed in while its trigger is being retried waits for it; other keys do not wait."""
    pager = paging.build()
    paging.pagerduty.answer_next(503, 503)
    sends = [asyncio.create_task(pager.send(page(event))) for event in ("trigger", "acknowledge", "resolve")]
    assert await asyncio.gather(*sends, pager.send(page(number=2))) == [True] * 4
    assert paging.pagerduty.actions("xid.79:t01-1") == ["trigger", "acknowledge", "resolve"]
    assert paging.pagerduty.alerts["xid.79:t01-1"].state == "resolved"


async def test_nobody_is_woken_for_what_is_over(paging: Paging) -> None:
    """A resolve whose trigger never got through is dropped, and so is that trigger when it is handed in again."""
    pager = paging.build()
    paging.pagerduty.answer_always(429)
    with pytest.raises(PagerError):
        await pager.send(page())
    paging.pagerduty.answer_always(None)
    assert await pager.send(page("acknowledge")) is True
    assert await pager.send(page("resolve")) is True
    assert await pager.send(page("trigger")) is True
    assert paging.pagerduty.events == []
    assert paging.count("resolve", "cancelled") == 1
    assert await pager.send(page("trigger", id="the next time")) is True
    assert paging.pagerduty.actions() == ["trigger"]


async def test_a_trigger_that_may_have_arrived_is_resolved(paging: Paging) -> None:
    """When it cannot be known whether the trigger arrived, the resolve is sent."""
    pager = paging.build()
    paging.pagerduty.answer_always(Answer(lost=True))
    with pytest.raises(PagerError):
        await pager.send(page())
    paging.pagerduty.answer_always(429)
    with pytest.raises(PagerError):
        await pager.send(page())
    paging.pagerduty.answer_always(None)
    assert await pager.send(page("resolve")) is True
    assert paging.pagerduty.alerts["xid.79:t01-1"].state == "resolved"


async def test_a_refused_trigger_is_not_resolved(paging: Paging) -> None:
    """A trigger that was refused for good leaves nothing to resolve; a later one of the same key is a new beginning."""
    pager = paging.build()
    paging.pagerduty.answer_next(400)
    assert await pager.send(page()) is False
    assert await pager.send(page("resolve")) is True
    assert len(paging.pagerduty.requests) == 1
    assert await pager.send(page(id="again")) is True
    assert await pager.send(page("resolve", id="again, over")) is True
    assert paging.pagerduty.actions() == ["trigger", "resolve"]


async def test_a_new_process_resolves_what_an_old_one_triggered(paging: Paging) -> None:
    """A pager that knows nothing of the trigger sends the resolve."""
    await paging.build().send(page())
    assert await paging.build().send(page("resolve")) is True
    assert paging.pagerduty.alerts["xid.79:t01-1"].state == "resolved"


async def test_a_cancelled_send_leaves_no_lock(paging: Paging) -> None:
    """A send that is cancelled half-way (shutdown) blocks nobody, and the resolve after it is sent."""
    pager = paging.build()
    paging.pagerduty.answer_next(Answer(delay_s=60))
    sending = asyncio.create_task(pager.send(page()))
    await asyncio.sleep(0.05)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    assert await pager.send(page("resolve")) is True
    assert paging.pagerduty.actions() == ["resolve"]


class Server:
    """A small HTTP server with one handler."""

    def __init__(self, handler: Any) -> None:
        app = web.Application()
        app.router.add_post("/hook", handler)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def __aenter__(self) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/hook"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


async def test_every_receiver_gets_every_page_once(paging: Paging) -> None:
    """While the webhook fails PagerDuty gets its page at once; handed in again, only the webhook is asked."""
    got: list[tuple[str | None, Page]] = []
    answers = [500] * 6 + [200] * 9

    async def hook(request: web.Request) -> web.Response:
        status = answers.pop(0)
        assert request.headers["Idempotency-Key"].startswith(("trigger", "resolve"))
        got.append((request.headers.get("Authorization"), msgspec.json.decode(await request.read(), type=Page)))
        return web.Response(status=status)

    token = paging.directory / "token"
    token.write_text("t0ken")
    token.chmod(0o640)
    async with Server(hook) as url:
        pager = paging.build(webhook_url=url, webhook_token_file=token)
        assert pager.receivers == ("pagerduty", "webhook")
        sent = page(details={"evidence": ["NVRM: Xid 79"], "n": 1})
        with pytest.raises(PagerError, match="webhook"):
            await pager.send(sent)
        assert paging.pagerduty.actions() == ["trigger"]
        assert await pager.send(sent) is True
        assert await pager.send(page("resolve")) is True
    assert paging.pagerduty.actions() == ["trigger", "resolve"]
    assert got == [("Bearer t0ken", sent)] * 7 + [("Bearer t0ken", page("resolve"))]


async def test_one_refusal_beside_a_delivery_is_delivered(paging: Paging) -> None:
    """A page that reached a person one way is True; refused everywhere it is False."""

    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=410)

    async with Server(refuse) as url:
        pager = paging.build(webhook_url=url)
        assert await pager.send(page()) is True
        paging.pagerduty.answer_next(400)
        assert await pager.send(page(number=2)) is False
    assert paging.count("trigger", "rejected") == 3


async def test_redirects_are_not_followed(paging: Paging) -> None:
    """A key goes to the configured host only: a redirect is not followed and not taken for an answer."""

    async def away(_: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": paging.pagerduty.url})

    async with Server(away) as url:
        with pytest.raises(PagerError, match="307"):
            await paging.build(pagerduty_url=url).send(page())
    assert paging.pagerduty.requests == []


async def test_without_receivers_pages_are_loud_in_the_log(paging: Paging) -> None:
    """With nothing configured a page is in the log with its summary and link, and counted as logged."""
    pager = paging.build(pagerduty_key_file=None)
    with capture_logs() as logged:
        assert await pager.send(page(runbook="https://runbooks/gpu-off-bus")) is True
    entry = logged[0]
    assert (entry["log_level"], entry["summary"], entry["runbook"]) == (
        "critical",
        "GPU fell off the bus",
        "https://runbooks/gpu-off-bus",
    )
    assert paging.count("trigger", "logged") == 1


async def test_configurations_that_cannot_page(paging: Paging) -> None:
    """A key file that is missing, empty or open to everyone, and a URL that would leak a key, are one ConfigError sentence."""
    missing, public, empty = (paging.directory / n for n in ("missing", "public", "empty"))
    public.write_text("key")
    public.chmod(0o604)
    empty.write_text("\n")
    empty.chmod(0o600)
    for settings, sentence in (
        ({"pagerduty_key_file": missing}, "paging.pagerduty_key_file: .*cannot be read"),
        ({"pagerduty_key_file": public}, "paging.pagerduty_key_file: .*everyone"),
        ({"pagerduty_key_file": empty}, "paging.pagerduty_key_file: .*empty"),
        ({"pagerduty_url": "http://events.example.com/"}, "paging.pagerduty_url: .*unencrypted"),
        ({"pagerduty_url": "events.example.com"}, "paging.pagerduty_url: expected"),
        ({"webhook_url": "ftp://x"}, "paging.webhook_url: expected"),
        ({"webhook_url": "http://hook.example.com/", "webhook_token_file": paging.key}, "paging.webhook_url: .*unencrypted"),
        ({"webhook_url": "https://hook.example.com/", "webhook_token_file": public}, "paging.webhook_token_file: .*everyone"),
        ({"webhook_token_file": paging.key}, "paging.webhook_token_file: there is no"),
    ):
        with pytest.raises(ConfigError, match=sentence) as told:
            paging.build(**settings)
        assert "\n" not in str(told.value)


async def test_the_stand_in_refuses_what_pagerduty_would(paging: Paging) -> None:
    """The stand-in answers 400 with the reasons to events that the service's documentation does not allow."""
    good = {
        "routing_key": "k", "event_action": "trigger", "dedup_key": "d",
        "payload": {"summary": "s", "source": "x", "severity": "error"},
    }  # fmt: skip
    bad: list[Any] = [
        good | {"routing_key": ""}, good | {"event_action": "page"}, good | {"payload": None}, good | {"dedup_key": "d" * 256},
        good | {"payload": {"summary": "s" * 1025, "source": "x", "severity": "error"}},
        good | {"payload": {"summary": "s", "source": "x", "severity": "fatal"}},
        {"routing_key": "k", "event_action": "resolve"}, [], "x",
    ]  # fmt: skip
    for event, status in [(good, 202), *((b, 400) for b in bad)]:
        async with paging.session.post(paging.pagerduty.url, data=json.dumps(event)) as response:
            assert response.status == status, event
            assert (await response.json()).get("errors") or status == 202
    assert paging.pagerduty.actions() == ["trigger"]

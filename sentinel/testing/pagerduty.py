"""A stand-in for PagerDuty's Events API v2, for tests and the simulator: it checks, folds and remembers events.

It speaks the documented protocol (202, 400 with ``errors``, 429, 5xx) on a loopback port of its own, keeps one alert per
``dedup_key`` as the service does (a trigger opens or joins, acknowledge and resolve of an unknown or resolved key change
nothing), and can be told to answer otherwise. It is stricter than the service where that finds mistakes: a summary over
1,024 characters, for one, is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

import msgspec
from aiohttp import web

ACTIONS = ("trigger", "acknowledge", "resolve")
SEVERITIES = ("critical", "error", "warning", "info")
BODY_MAX = 512 * 1024


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What to say instead of judging the event. ``lost``: the event is taken, but the connection breaks before the answer."""

    status: int = 503
    headers: dict[str, str] = {}
    delay_s: float = 0.0
    lost: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it came in, and the status that it was answered with (0: none)."""

    at: float
    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def event(self) -> dict[str, Any]:
        found = msgspec.json.decode(self.body)
        return found if isinstance(found, dict) else {}


class Alert(msgspec.Struct, kw_only=True):
    """One incident as a person would see it; ``opened`` counts how often it was opened, ``events`` all that joined it."""

    dedup_key: str
    state: str
    summary: str
    severity: str
    opened: int = 1
    events: list[dict[str, Any]] = []


class FakePagerDuty:
    """The stand-in server: ``async with FakePagerDuty() as pagerduty: …pagerduty.url…``."""

    def __init__(self, on_event: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.requests: list[Request] = []
        self.events: list[dict[str, Any]] = []  # accepted ones, in order
        self.alerts: dict[str, Alert] = {}
        self.url = ""
        self._on_event = on_event
        self._answers: deque[Answer] = deque()
        self._always: Answer | None = None
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        """Listen on loopback; ``url`` says where."""
        app = web.Application(client_max_size=4 * BODY_MAX)
        app.router.add_post("/v2/enqueue", self._enqueue)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v2/enqueue"

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    def answer_next(self, *answers: int | Answer) -> None:
        """Give these answers, one per request, before judging events again; 202 stands for judging as usual."""
        self._answers.extend(a if isinstance(a, Answer) else Answer(status=a) for a in answers)

    def answer_always(self, answer: int | Answer | None) -> None:
        """Give this answer to everything until told None."""
        self._always = Answer(status=answer) if isinstance(answer, int) else answer

    def actions(self, dedup_key: str | None = None) -> list[str]:
        """The accepted events' actions in order, of one key or of all."""
        return [e["event_action"] for e in self.events if dedup_key in (None, e["dedup_key"])]

    async def _enqueue(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        told = self._answers.popleft() if self._answers else self._always
        if told and told.delay_s:
            await asyncio.sleep(told.delay_s)
        if told and told.status != 202 and not told.lost:
            status, answer, headers = told.status, {"status": "told to", "message": f"answer {told.status}"}, told.headers
        else:
            status, answer, headers = *self._judge(body), {}
        lost = told is not None and told.lost
        kept = Request(at=time.time(), status=0 if lost else status, body=body, headers=dict(request.headers))
        self.requests.append(kept)
        if lost and request.transport:
            request.transport.abort()
        return web.json_response(answer, status=status, headers=headers)

    def _judge(self, body: bytes) -> tuple[int, dict[str, Any]]:
        if len(body) > BODY_MAX:
            return 413, {"status": "invalid event", "message": "Event object is too large", "errors": [f"{len(body)} bytes"]}
        try:
            event = msgspec.json.decode(body, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return 400, {"status": "invalid event", "message": "Event object is invalid", "errors": [str(error)]}
        if errors := problems(event):
            return 400, {"status": "invalid event", "message": "Event object is invalid", "errors": errors}
        event.setdefault("dedup_key", f"made-up-{len(self.events)}")
        self._fold(event)
        return 202, {"status": "success", "message": "Event processed", "dedup_key": event["dedup_key"]}

    def _fold(self, event: dict[str, Any]) -> None:
        key, action = event["dedup_key"], event["event_action"]
        alert = self.alerts.get(key)
        if action == "trigger":
            said = event["payload"]
            if alert is None:
                alert = self.alerts[key] = Alert(
                    dedup_key=key, state="triggered", summary=said["summary"], severity=said["severity"]
                )
            elif alert.state == "resolved":
                alert.state, alert.summary, alert.severity = "triggered", said["summary"], said["severity"]
                alert.opened += 1
        elif alert and alert.state != "resolved":
            alert.state = "acknowledged" if action == "acknowledge" else "resolved"
        if alert:
            alert.events.append(event)
        self.events.append(event)
        if self._on_event:
            self._on_event(event)


def problems(event: dict[str, Any]) -> list[str]:
    """What PagerDuty's documentation would not have in an event; one sentence each."""
    found: list[str] = []
    if not isinstance(event.get("routing_key"), str) or not event["routing_key"]:
        found.append("'routing_key' is missing or blank")
    action = event.get("event_action")
    if action not in ACTIONS:
        found.append(f"'event_action' must be one of {', '.join(ACTIONS)}")
    key = event.get("dedup_key")
    if (key is None and action != "trigger") or (key is not None and not (isinstance(key, str) and 0 < len(key) <= 255)):
        found.append("'dedup_key' is missing or over 255 characters")
    if action == "trigger":
        payload = event.get("payload")
        if not isinstance(payload, dict):
            return [*found, "'payload' is missing"]
        for name in ("summary", "source"):
            text = payload.get(name)
            if not isinstance(text, str) or not text.strip():
                found.append(f"'payload.{name}' is missing or blank")
            elif len(text) > 1024:
                found.append(f"'payload.{name}' is over 1024 characters")
        if payload.get("severity") not in SEVERITIES:
            found.append(f"'payload.severity' must be one of {', '.join(SEVERITIES)}")
        links = event.get("links", [])
        if not all(isinstance(link, dict) and str(link.get("href", "")).startswith(("http://", "https://")) for link in links):
            found.append("'links' need an href each")
    return found

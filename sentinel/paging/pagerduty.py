"""PagerDuty, Events API v2: a page as an event, within the limits that the service documents.

Source: developer.pagerduty.com, "Send an Alert Event" and "Events API v2 Overview": 202 is accepted, 400 is a bad event, 429
is too many, 5xx and network errors may be tried again; summary at most 1,024 characters, dedup_key at most 255, the whole
event at most 512 KB. What always holds here: an event is always valid, whatever the page holds; details that do not fit
are left out with a note that says so.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

import aiohttp
import msgspec

from sentinel.model import Page
from sentinel.paging.receiver import Verdict, post
from sentinel.paging.text import clean, cut, line, plain

SUMMARY_MAX = 1024  # characters
DEDUP_MAX = 255
FIELD_MAX = 1024  # source, component, group, class: not documented; far above what is used
LINK_MAX = 2048
BODY_MAX = 512_000  # bytes; the service says 512 KB, read here as the smaller one


class PagerDuty:
    """One service's integration, named by its routing key."""

    name = "pagerduty"

    def __init__(self, session: aiohttp.ClientSession, url: str, routing_key: str, client: str) -> None:
        self._session, self._url, self._key, self._client = session, url, routing_key, client

    async def attempt(self, page: Page) -> Verdict:
        return await post(self._session, self._url, event(page, self._key, self._client), {}, self._key)


def event(page: Page, routing_key: str, client: str) -> bytes:
    """The body of the request, at most BODY_MAX bytes."""
    body: dict[str, Any] = {"routing_key": routing_key, "event_action": page.event, "dedup_key": dedup_key(page.dedup_key)}
    if page.event != "trigger":
        return msgspec.json.encode(body)
    details = plain(page.details)
    payload: dict[str, Any] = {
        "summary": line(page.summary, SUMMARY_MAX) or line(page.fault or page.dedup_key, SUMMARY_MAX) or "sentinel: no summary",
        "source": line(page.source or page.component, FIELD_MAX) or "sentinel",
        "severity": page.urgency.value,
        "custom_details": details,
    }
    for name, text in (
        ("timestamp", _timestamp(page.at)),
        ("component", line(page.component, FIELD_MAX)),
        ("group", line(page.source.partition("/")[0], FIELD_MAX)),
        ("class", line(page.fault, FIELD_MAX)),
    ):
        if text:
            payload[name] = text
    body |= {"payload": payload, "client": cut(client, FIELD_MAX)}
    if page.runbook.startswith(("http://", "https://")) and len(page.runbook) <= LINK_MAX:
        body["links"] = [{"href": clean(page.runbook), "text": f"Runbook: {page.fault}"[:FIELD_MAX] if page.fault else "Runbook"}]
    elif page.runbook:
        payload["custom_details"] = details | {"runbook": cut(page.runbook, LINK_MAX)}
    encoded = _encode(body)
    if len(encoded) > BODY_MAX:
        note = f"left out: the event was {len(encoded)} bytes and PagerDuty takes {BODY_MAX}; see sentinel explain"
        payload["custom_details"] = {"note": note}
        encoded = _encode(body)
    return encoded


def dedup_key(key: str) -> str:
    """``key`` within PagerDuty's limit; a longer one keeps its beginning and stays distinct by a digest of the whole."""
    key = clean(key)
    if len(key) <= DEDUP_MAX:
        return key
    return f"{key[: DEDUP_MAX - 33]}#{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def _encode(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body)


def _timestamp(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return ""

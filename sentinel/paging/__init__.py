"""Paging: every page reaches every configured receiver once, in order, or says loudly why not.

This package exists so that the controller hands over a page and gets one of three answers: True (delivered), False (refused
for good), PagerError (not yet; ask again). What always holds:

* Delivery is a row of small stages, per receiver: turn (order within one dedup key) → memory (already settled?) → retry →
  one request. The receiver owns which answers are final; the retry stage owns the waiting.
* Nothing here is durable. The controller's pending effects are the outbox: a page asked for again after a crash has the
  same dedup key, so a receiver that knows it folds it into the same incident.
* One receiver that fails delays or blocks no other.
* Secrets come from files that only sentinel can read, travel encrypted (or on loopback), and are never logged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import aiohttp
from prometheus_client import CollectorRegistry

from sentinel.config import ConfigError, PagingSettings, read_secret
from sentinel.paging.delivery import Delivery
from sentinel.paging.pager import LogReceiver, Pager, pages_total
from sentinel.paging.pagerduty import PagerDuty
from sentinel.paging.receiver import Outcome, PagerError, Receiver, Verdict, carries_secret
from sentinel.paging.retry import Retry
from sentinel.paging.webhook import Webhook

__all__ = ["Outcome", "Pager", "PagerError", "Receiver", "Verdict", "build_pager"]


def build_pager(
    settings: PagingSettings,
    session: aiohttp.ClientSession,
    registry: CollectorRegistry,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Pager:
    """The pager that the configuration asks for; with no receiver configured, pages go to the log.

    ``session`` stays the caller's to close. Raises ConfigError in one sentence when a key file or a URL cannot be used.
    """
    receivers: list[Receiver] = []
    if settings.pagerduty_key_file:
        carries_secret(settings.pagerduty_url, "paging.pagerduty_url")
        key = read_secret(settings.pagerduty_key_file, "paging.pagerduty_key_file")
        receivers.append(PagerDuty(session, settings.pagerduty_url, key, settings.client))
    if settings.webhook_url:
        token = ""
        if settings.webhook_token_file:
            token = read_secret(settings.webhook_token_file, "paging.webhook_token_file")
        carries_secret(settings.webhook_url, "paging.webhook_url", secret=bool(token))
        receivers.append(Webhook(session, settings.webhook_url, token))
    elif settings.webhook_token_file:
        raise ConfigError("paging.webhook_token_file: there is no paging.webhook_url that it could be for")
    deliveries = [Delivery(r, Retry(clock=clock, sleep=sleep)) for r in receivers or [LogReceiver()]]
    return Pager(deliveries, pages_total(registry))

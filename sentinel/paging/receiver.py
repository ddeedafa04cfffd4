"""What a receiver of pages is, what one attempt can come to, and the one way of asking over HTTP.

What always holds here: 2xx is delivered; 429, 5xx and anything that is no answer may be tried again; every other 4xx is
final. A request that may have arrived although no answer came is said to be so (``maybe``), because what follows depends
on it. Redirects are not followed: a key is sent to the host in the configuration and to no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Literal, Protocol
from urllib.parse import urlsplit

import aiohttp
import msgspec

from sentinel.config import ConfigError
from sentinel.model import Page

REQUEST_S = 10.0
SAID_MAX = 300  # characters of an answer that go into a sentence


class PagerError(Exception):
    """Not delivered yet: it was given up for now, and the page should be handed in again after ``retry_after_s``."""

    def __init__(self, sentence: str, retry_after_s: float = 0.0) -> None:
        super().__init__(sentence)
        self.retry_after_s = retry_after_s


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt, or a row of them, came to."""

    state: Literal["delivered", "logged", "rejected", "again"]
    reason: str = ""
    retry_after_s: float = 0.0  # the receiver's own wish
    maybe: bool = False  # "again", but it may have arrived all the same


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a page ended at one receiver. ``cancelled``: it had become pointless before it was delivered."""

    state: Literal["delivered", "logged", "rejected", "cancelled"]
    reason: str = ""


class Receiver(Protocol):
    """Somebody who takes pages. ``attempt`` asks once and never raises for what the other side does."""

    @property
    def name(self) -> str: ...

    async def attempt(self, page: Page) -> Verdict: ...


async def post(session: aiohttp.ClientSession, url: str, body: bytes, headers: Mapping[str, str], secret: str) -> Verdict:
    """POST JSON once and judge the answer. ``secret`` is cut out of whatever the other side says."""
    where = urlsplit(url).hostname or "the receiver"
    try:
        async with session.post(
            url,
            data=body,
            headers={"Content-Type": "application/json", **headers},
            timeout=aiohttp.ClientTimeout(total=REQUEST_S),
            allow_redirects=False,
        ) as response:
            said = (await response.content.read(4096)).decode("utf-8", "replace")
            said = " ".join(said.replace(secret, "***").split() if secret else said.split())[:SAID_MAX]
            return judge(response.status, response.headers, f"{where} answered {response.status}: {said}")
    except aiohttp.ClientConnectorError as error:
        return Verdict(state="again", reason=f"{where} cannot be reached: {error}")
    except TimeoutError:
        return Verdict(state="again", reason=f"{where} did not answer within {REQUEST_S:g} s", maybe=True)
    except (aiohttp.ClientError, OSError) as error:
        return Verdict(state="again", reason=f"{where}: the connection broke: {error}", maybe=True)


def judge(status: int, headers: Mapping[str, str], reason: str) -> Verdict:
    """What an HTTP answer means for a page."""
    if 200 <= status < 300:
        return Verdict(state="delivered")
    if 400 <= status < 500 and status != 429:
        return Verdict(state="rejected", reason=reason)
    return Verdict(state="again", reason=reason, retry_after_s=retry_after(headers), maybe=status >= 500)


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds asked for by Retry-After (RFC 9110 §10.2.3: seconds or a date); 0 when there is none that can be read."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        until = parsedate_to_datetime(text)
        now = parsedate_to_datetime(headers["Date"]) if "Date" in headers else datetime.now(UTC)
        return max(0.0, (until - now).total_seconds())
    except (ValueError, TypeError):
        return 0.0


def carries_secret(url: str, key: str, *, secret: bool = True) -> None:
    """Raises ConfigError when ``url`` is no HTTP URL, or when a secret would travel over the network in the clear."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{key}: expected https://… or http://…, got {url!r}")
    local = parts.hostname in ("localhost", "::1") or parts.hostname.startswith("127.")
    if secret and parts.scheme == "http" and not local:
        raise ConfigError(f"{key}: a secret would travel to {parts.hostname} unencrypted; wanted https://")

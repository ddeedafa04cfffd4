"""A webhook: the page itself as JSON, for whatever a site has besides PagerDuty.

What always holds here: the body is the model's Page with all of its fields, so the receiver needs no other document;
``Idempotency-Key`` is the page's id, the same for each attempt; the token, where there is one, travels as a bearer token.
"""

from __future__ import annotations

import aiohttp
import msgspec

from sentinel.model import Page
from sentinel.paging.receiver import Verdict, post
from sentinel.paging.text import plain


class Webhook:
    """One URL that takes pages."""

    name = "webhook"

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str = "") -> None:
        self._session, self._url, self._token = session, url, token

    async def attempt(self, page: Page) -> Verdict:
        headers = {"Idempotency-Key": header(page.id)}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        return await post(self._session, self._url, msgspec.json.encode(plain(page)), headers, self._token)


def header(text: str) -> str:
    """``text`` as a header may carry it: visible ASCII only."""
    return "".join(c if "!" <= c <= "~" else "_" for c in text)[:255]

"""What a person may ask of the controller, asked over HTTP with the demo's operator token.

This module exists so that a story sees only what an operator can see. What always holds: whatever goes wrong on the way is a
StageError that says what was asked and what came back.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import msgspec

from sentinel.model import Drain, Incident
from sentinel.sim.crew import StageError
from sentinel.sim.files import Tokens


class Asking:
    """``url``: of the controller."""

    url: str
    tokens: Tokens
    _http: aiohttp.ClientSession

    async def get(self, path: str) -> Any:
        return await self._call("GET", path)

    async def ask(self, verb: str, target: str, reason: str, **more: Any) -> Any:
        """A person's command (``drain``, ``undrain``, ``hold`` …), with the demo's operator token."""
        return await self._call("POST", "/v1/ask", {"verb": verb, "target": target, "reason": reason, **more})

    async def status(self) -> dict[str, Any]:
        got = await self.get("/v1/status")
        if not isinstance(got, dict):
            raise StageError(f"GET /v1/status answered no object: {got!r}")
        return got

    async def incidents(self) -> list[Incident]:
        got = await self.get("/v1/incidents")
        return msgspec.convert(got.get("incidents", []) if isinstance(got, dict) else got, list[Incident])

    async def drain(self, drain_id: str) -> Drain:
        return msgspec.convert(await self.get(f"/v1/drains/{drain_id}"), Drain, strict=False)

    async def _call(self, method: str, path: str, body: object = None) -> Any:
        headers = {"Authorization": f"Bearer {self.tokens.operator}"}
        try:
            async with self._http.request(method, self.url + path, json=body, headers=headers) as answer:
                text = await answer.text()
                if answer.status >= 300:
                    raise StageError(f"{method} {path} answered {answer.status}: {text[:200]}")
                return json.loads(text) if text else None
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise StageError(f"{method} {path}: {error or type(error).__name__}") from None

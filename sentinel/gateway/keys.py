"""Whose request it is: API keys, known here only by their SHA-256, each the key of a tenant.

What always holds: without a file of keys everybody is the tenant ``anonymous`` (the configuration allows that on loopback, or
where it is said aloud); a changed file takes effect within a second; one that became wrong, or empty, keeps the keys of before, and
says so.
"""

from __future__ import annotations

import time
from pathlib import Path

import structlog

from sentinel.config import ConfigError
from sentinel.gateway.errors import ApiError
from sentinel.tokens import digest, mark, read_tokens

log = structlog.get_logger(__name__)

ANONYMOUS = "anonymous"
LOOK_S = 1.0
_KEY = "gateway.keys"


class Keys:
    def __init__(self, path: Path | None) -> None:
        """Raises ConfigError when the file is there and wrong."""
        self._path = path
        self._stamp = mark(path)
        self._known = read_tokens(path, _KEY) if path else {}
        self._look_at = time.monotonic() + LOOK_S

    @property
    def wanted(self) -> bool:
        return self._path is not None

    def tenant(self, authorization: str | None) -> str:
        """Raises ApiError (401)."""
        if self._path is None:
            return ANONYMOUS
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise ApiError(401, "this needs an API key: send 'Authorization: Bearer <key>'", code="invalid_api_key")
        now = time.monotonic()
        if now > self._look_at:
            self._look_at = now + LOOK_S
            self._refresh(self._path)
        tenant = self._known.get(digest(key))
        if tenant is None:
            raise ApiError(401, "no tenant has this API key", code="invalid_api_key")
        return tenant

    def tenants(self) -> set[str]:
        return set(self._known.values()) if self._path else {ANONYMOUS}

    def _refresh(self, path: Path) -> None:
        stamp = mark(path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._known = read_tokens(path, _KEY)
        except ConfigError as error:
            log.warning("the changed file of API keys is not used; the keys of before stay", error=str(error))
        else:
            log.info("API keys read again", keys=len(self._known))

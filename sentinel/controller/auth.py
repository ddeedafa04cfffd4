"""Who is asking: bearer tokens, known here only by their SHA-256.

This module exists so that a node's token speaks for that node only and an operator's name is on what they ask for. What
always holds:

* Without a token file nobody is let in: there is no default token and no open mode.
* The file holds ``name sha256hex`` lines; a token itself is never stored, logged or echoed.
* A changed file takes effect with the next request. A file that became unreadable, wrong or empty keeps the tokens of before, and
  says so loudly: a typing error must not lock the whole fleet out.
* A name may have several lines, so that a token can be changed without a gap.
"""

from __future__ import annotations

from pathlib import Path

import structlog

from sentinel.config import ConfigError
from sentinel.tokens import digest, mark, new_token, read_tokens

__all__ = ["Refused", "Tokens", "digest", "new_token", "read_tokens"]

log = structlog.get_logger(__name__)


class Refused(Exception):
    """The caller is not who it must be. ``status`` is 401 (nobody we know) or 403 (known, but not allowed this)."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Tokens:
    """The tokens of one file. ``who`` is "node" or "operator", for sentences."""

    def __init__(self, path: Path | None, key: str, who: str) -> None:
        """Raises ConfigError when the file is there and wrong."""
        self._path, self._key, self._who = path, key, who
        self._stamp = mark(path)
        self._known = read_tokens(path, key) if path else {}

    def name(self, header: str | None) -> str:
        """Whose token an ``Authorization`` header carries. Raises Refused."""
        if self._path is None:
            raise Refused(401, f"this controller has no {self._key}, so it lets no {self._who} in; name a file of tokens there")
        scheme, _, token = (header or "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise Refused(401, f"this needs {_an(self._who)} token: send 'Authorization: Bearer <token>'")
        self._refresh()
        # Looked up by its digest: what the time of a look-up could give away is a digest, which leads back to no token. A
        # loop of constant-time comparisons would add nothing to that but ten thousand comparisons for each report.
        name = self._known.get(digest(token))
        if name is None:
            raise Refused(401, f"no {self._who} has this token; 'sentinel token NAME' makes one and the line for {self._key}")
        return name

    def _refresh(self) -> None:
        stamp = mark(self._path)
        if stamp == self._stamp or self._path is None:
            return
        self._stamp = stamp
        try:
            self._known = read_tokens(self._path, self._key)
        except ConfigError as error:
            log.warning("the changed token file is not used; the tokens of before stay", error=str(error))
        else:
            log.info("token file read again", key=self._key, tokens=len(self._known))


def _an(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"

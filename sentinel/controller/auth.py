"""Who is asking: bearer tokens, known here only by their SHA-256.

This module exists so that a node's token speaks for that node only and an operator's name is on what they ask for. What
always holds:

* Without a token file nobody is let in: there is no default token and no open mode.
* The file holds ``name sha256hex`` lines; a token itself is never stored, logged or echoed.
* A changed file takes effect with the next request. A file that became unreadable or wrong keeps the tokens of before, and
  says so loudly: a typing error must not lock the whole fleet out.
* A name may have several lines, so that a token can be changed without a gap.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path

import structlog

from sentinel.config import ConfigError

log = structlog.get_logger(__name__)

_LINE = re.compile(r"(\S+)\s+([0-9a-fA-F]{64})")


class Refused(Exception):
    """The caller is not who it must be. ``status`` is 401 (nobody we know) or 403 (known, but not allowed this)."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def new_token() -> str:
    """A fresh random token, 256 bits."""
    return secrets.token_urlsafe(32)


def digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()  # a header may hold any bytes


def read_tokens(path: Path, key: str) -> dict[str, str]:
    """SHA-256 (hex) → name. Raises ConfigError naming the file and the line that is wrong."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.split("#", 1)[0].strip()
        if not entry:
            continue
        match = _LINE.fullmatch(entry)
        if not match:
            raise ConfigError(f"{key}: {path}, line {number}: wanted a name and the 64 hex digits of a token's SHA-256")
        name, sha = match[1], match[2].lower()
        if found.setdefault(sha, name) != name:
            raise ConfigError(f"{key}: {path}, line {number}: {name!r} has the same token as {found[sha]!r}; wanted one each")
    return found


class Tokens:
    """The tokens of one file. ``who`` is "node" or "operator", for sentences."""

    def __init__(self, path: Path | None, key: str, who: str) -> None:
        """Raises ConfigError when the file is there and wrong."""
        self._path, self._key, self._who = path, key, who
        self._stamp = self._mark()
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

    def _mark(self) -> tuple[int, int, int]:
        try:
            stat = self._path.stat() if self._path else None
        except OSError:
            return (0, 0, -1)
        return (stat.st_mtime_ns, stat.st_ino, stat.st_size) if stat else (0, 0, -1)

    def _refresh(self) -> None:
        mark = self._mark()
        if mark == self._stamp or self._path is None:
            return
        self._stamp = mark
        try:
            self._known = read_tokens(self._path, self._key)
        except ConfigError as error:
            log.warning("the changed token file is not used; the tokens of before stay", error=str(error))
        else:
            log.info("token file read again", key=self._key, tokens=len(self._known))


def _an(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"

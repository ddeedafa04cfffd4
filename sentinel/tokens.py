"""Bearer tokens and the files that know them, by their SHA-256 only: of nodes and operators at the controller, of tenants at the
gateway.

What always holds: a token itself is never stored, logged or echoed; a file holds one ``name sha256hex`` a line, and a name may have
several lines, so that a token can be changed without a gap. A file without any is wrong: it would let nobody in, and is what a
command that failed leaves behind.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path

from sentinel.config import ConfigError

_LINE = re.compile(r"(\S+)\s+([0-9a-fA-F]{64})")

Mark = tuple[int, int, int]


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
    if not found:
        raise ConfigError(f"{key}: {path} names nobody; wanted at least one line with a name and a token's SHA-256")
    return found


def mark(path: Path | None) -> Mark:
    """Differs whenever the file was written; also when it went away."""
    try:
        stat = path.stat() if path else None
    except OSError:
        return (0, 0, -1)
    return (stat.st_mtime_ns, stat.st_ino, stat.st_size) if stat else (0, 0, -1)

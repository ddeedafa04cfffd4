"""Words as a receiver can take them: valid Unicode, plain JSON values, and cut where a reader would cut.

This module exists because a page quotes raw kernel-log lines, and a page must not fail for what is quoted in it. What
always holds here: nothing raises, whatever is put in.
"""

from __future__ import annotations

import unicodedata
from typing import Any

import msgspec

from sentinel.model import Page

DEPTH = 16  # levels of nesting that are kept; what is deeper is written as text

_JOINERS = {"\u200d", "\ufe0e", "\ufe0f", *map(chr, range(0x1F3FB, 0x1F400))}  # ZWJ, variation selectors, skin tones


def clean(text: str) -> str:
    """``text`` with every lone surrogate (half a character, as undecodable bytes leave it) replaced by ``?``."""
    return text.encode("utf-8", "replace").decode("utf-8")


def cut(text: str, limit: int) -> str:
    """At most ``limit`` characters of ``text``, ending in ``…`` where some were cut, never within a composed character."""
    text = clean(text)
    if len(text) <= limit:
        return text
    end = limit - 1
    for _ in range(32):
        if end <= 0 or not (_extends(text[end]) or text[end - 1] == "\u200d"):
            break
        end -= 1
    return text[: end if end > 0 else limit - 1].rstrip() + "…"


def _extends(char: str) -> bool:
    return char in _JOINERS or unicodedata.combining(char) > 0


def line(text: str, limit: int) -> str:
    """``text`` as one line without control characters, cut to ``limit``."""
    seen = "".join(" " if unicodedata.category(c) in ("Cc", "Zl", "Zp") else c for c in clean(text))
    return cut(" ".join(seen.split()), limit)


def plain(value: Any, depth: int = 0) -> Any:
    """``value`` as JSON values with clean text only. What is no JSON value is written as its text."""
    if isinstance(value, str):
        return clean(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    if depth >= DEPTH:
        return cut(_text(value), 200)
    if isinstance(value, dict):
        return {clean(_text(k)): plain(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v, depth + 1) for v in value]
    if isinstance(value, msgspec.Struct):
        return {f: plain(getattr(value, f), depth + 1) for f in value.__struct_fields__}
    return clean(_text(value))


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


def named(page: Page) -> dict[str, str]:
    """A page as it is named in the log; safe to print wherever the log goes."""
    return {
        "page": line(page.id, 255),
        "verb": page.event,
        "urgency": page.urgency.value,
        "dedup_key": line(page.dedup_key, 255),
        "summary": line(page.summary, 1024),
    }

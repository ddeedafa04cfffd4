"""What a request's body says that the gateway has to know; everything else goes to the worker untouched. Pure.

This module exists so that a body is looked at once, without building what is in it: a message of megabytes is skipped over,
not decoded. What always holds:

* The worker gets the client's own bytes, whatever is read here.
* A body that is no JSON object, or names no model, is refused with a sentence; every other oddity is the worker's to judge.
* A request that goes on from a response (``previous_response_id``) belongs to the worker that holds it, whatever its session.
* The session is told by the first of: the header ``x-session-id``, ``prompt_cache_key``, ``user``, the conversation's beginning
  (up to its first user message, which every later turn repeats). It never leaves this process.
"""

from __future__ import annotations

from enum import StrEnum
from hashlib import blake2b
from typing import Any

import msgspec

from sentinel.gateway.errors import ApiError

BEGINNING = 1024  # bytes of a prompt without messages that tell its session
TOKENS_ELSE = 256  # of an answer whose length nobody bounded, for the estimate only


class Kind(StrEnum):
    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSE = "response"
    EMBEDDING = "embedding"


class _Body(msgspec.Struct):
    model: Any = None
    stream: Any = None
    user: Any = None
    prompt_cache_key: Any = None
    previous_response_id: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


class _Message(msgspec.Struct):
    role: Any = None


class Ask(msgspec.Struct, frozen=True):
    """``session`` "": none that could be told. ``goes_on``: the conversation was answered before, so some worker has its KV.
    ``previous``: the response that it goes on from, by its id; "": none."""

    model: str
    stream: bool
    session: str
    goes_on: bool
    tokens: int  # estimated, prompt and answer
    previous: str = ""


_BODY = msgspec.json.Decoder(_Body)
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_MESSAGE = msgspec.json.Decoder(_Message)


def read(body: bytes, kind: Kind, session: str = "") -> Ask:
    """Raises ApiError (400). ``session``: what the header says."""
    try:
        if not body.isascii():
            body.decode()  # what is skipped over is not looked into
        told = _BODY.decode(body)
        if not isinstance(told.model, str) or not told.model:
            raise ApiError(400, "this names no model; wanted a string under 'model'", param="model")
        beginning, goes_on = _beginning(told, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not a JSON object that can be read: {_sentence(error)}") from None
    if not session:
        for word in (told.prompt_cache_key, told.user):
            if isinstance(word, str) and word:
                session = word
                break
        else:
            session = blake2b(beginning, digest_size=8).hexdigest() if beginning else ""
    limit = next(
        (n for n in (told.max_completion_tokens, told.max_tokens, told.max_output_tokens) if type(n) is int and 0 <= n < 1 << 32),
        0 if kind is Kind.EMBEDDING else TOKENS_ELSE,
    )
    previous = told.previous_response_id if kind is Kind.RESPONSE and isinstance(told.previous_response_id, str) else ""
    return Ask(told.model, told.stream is True, session, goes_on, len(body) // 4 + limit, previous)


def _beginning(told: _Body, kind: Kind) -> tuple[bytes, bool]:
    """The bytes by which every later turn of the same conversation is known, and whether this is a later one."""
    if kind is Kind.EMBEDDING:
        return b"", False
    whole = bytes(told.messages or told.input or told.prompt)
    if not whole.startswith(b"["):
        return whole[:BEGINNING], False
    first: list[bytes] = []
    parts = _LIST.decode(whole)
    for part in parts:
        first.append(bytes(part))
        if not first[-1].startswith(b"{"):  # a prompt of several texts, or of token ids
            return whole[:BEGINNING], False
        if _MESSAGE.decode(part).role == "user":
            break
    return b"".join(first), len(parts) > len(first)


def _sentence(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    return str(error) or "it is nested too deeply"

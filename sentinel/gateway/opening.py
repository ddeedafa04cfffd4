"""What the first events of a stream are worth: nothing yet, an answer, or an error after which another worker is asked. Pure.

This module exists because a stream's head, and in /v1/responses its first events, come before the engine has done anything: what
follows may still be silence or an error, and as long as nothing was shown to the client the request can be saved. What always
holds: an event that is neither an announcement nor an error is an answer, and so is whatever cannot be read, or announces for ever:
what is held back is short.
"""

from __future__ import annotations

import msgspec

from sentinel.gateway.framing import EVENT_MAX, Body, Garbled, Head

# vLLM 0.32 writes these as soon as it has read the request (its entrypoints/openai/responses); the others are OpenAI's own.
_ANNOUNCED = (b"event: response.created", b"event: response.queued", b"event: response.in_progress")
_ANNOUNCED_MAX = 8  # more than there are kinds; each further piece would be read with all that came before it
_TOLD = (b'data: {"error"', b"event: error")
_WORTH_A_LOOK = (*_ANNOUNCED, *_TOLD)


class _Error(msgspec.Struct):
    code: int | str | None = None


class _Event(msgspec.Struct):
    error: _Error | None = None


def opening(head: Head, early: bytes) -> int | None:
    """Of the body's bytes so far: None: wait for more; 0: an answer has begun; else an error, as the HTTP status that it would
    have been (vLLM names one as its ``code``; 500 where none is named)."""
    body = Body(head)
    try:
        rest = body.feed(early)
    except Garbled:
        return 0
    for _ in range(_ANNOUNCED_MAX):
        if not rest:
            break
        if len(rest) > EVENT_MAX or not any(rest.startswith(word[: len(rest)]) for word in _WORTH_A_LOOK):
            return 0
        event, end, rest = rest.partition(b"\r\n\r\n" if b"\r\n" in rest else b"\n\n")
        if event.startswith(_TOLD) and (end or body.done):
            return status_told(event)
        if not end:
            break
    else:
        return 0
    return 0 if body.done else None


def status_told(event: bytes) -> int:
    """The HTTP status that the error in this event, or in one of these, would have been."""
    for line in event.splitlines():
        if line.startswith(b"data:"):
            try:
                error = msgspec.json.decode(line[5:], type=_Event).error
            except msgspec.DecodeError:
                return 500
            if error is not None and isinstance(error.code, int) and 400 <= error.code < 600:
                return error.code
    return 500

"""What the first events of a stream are worth: nothing yet, an answer, or an error after which another worker is asked. Pure.

This module exists because a stream's head, and in /v1/responses its first events, come before the engine has done anything: what
follows may still be silence or an error, and as long as nothing was shown to the client the request can be saved. It is also where
it stands how a worker tells an error within a stream. What always holds: an event that is no announcement, no comment and no error
is an answer, and so is whatever announces for ever: what is held back is short.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sentinel.gateway.framing import EVENT_MAX, Body, Head

# How an event begins that shows nothing. vLLM 0.32 (its entrypoints/openai/responses) and Dynamo 1.6.1 announce a response before
# their engine has done anything (queued is OpenAI's own); Dynamo writes comments where it is told to keep connections alive.
_NOTHING = (b"event: response.created", b"event: response.queued", b"event: response.in_progress", b":")
_NOTHING_MAX = 64  # events that show nothing; each further piece is read with all that came before it
# How one begins that tells an error: chat and completions, then /v1/responses, whose failures Dynamo and OpenAI tell by the last.
TOLD = (b'data: {"error"', b'data:{"error"', b"event: error", b"event:error", b"event: response.failed", b"event:response.failed")
_WORTH_A_LOOK = (*_NOTHING, *TOLD)

# Codes of OpenAI's ``ResponseError`` (openai-python 3.57) that speak of what was asked; of the others only one is no failure.
_ASKED_FOR = frozenset(
    {
        "invalid_prompt", "data_residency_mismatch", "bio_policy", "misalignment_policy_violation", "invalid_image",
        "invalid_image_format", "invalid_base64_image", "invalid_image_url", "invalid_image_mode", "image_too_large",
        "image_too_small", "image_parse_error", "image_content_policy_violation", "image_file_too_large", "empty_image_file",
        "unsupported_image_media_type", "failed_to_download_image", "image_file_not_found",
    }
)  # fmt: skip


class _Error(msgspec.Struct):
    code: Any = None


class _Response(msgspec.Struct):
    error: _Error | None = None


class _Event(msgspec.Struct):
    error: _Error | None = None
    response: _Response | None = None
    type: Any = None
    code: Any = None


def opening(head: Head, early: bytes) -> int | None:
    """Of the body's bytes so far: None: wait for more; 0: an answer has begun; else an error, as the HTTP status that it would
    have been (vLLM names one as its ``code``; 500 where none is named). Raises Garbled."""
    body = Body(head)
    rest = body.feed(early)
    for _ in range(_NOTHING_MAX):
        if not rest:
            break
        if len(early) > EVENT_MAX or not any(rest.startswith(word[: len(rest)]) for word in _WORTH_A_LOOK):
            return 0
        event, end, rest = rest.partition(b"\r\n\r\n" if b"\r\n" in rest else b"\n\n")
        if event.startswith(TOLD) and (end or body.done):
            return status_told(event)
        if not end:
            break
        if event.startswith(b":") and b"\n" in event:  # a comment before the lines of another event
            return 0
    else:
        return 0
    return 0 if body.done else None


def status_told(event: bytes) -> int:
    """The HTTP status that the error in this event, or in one of these, would have been."""
    for line in event.splitlines():
        if line.startswith(b"data:"):
            try:
                told = msgspec.json.decode(line[5:], type=_Event)
            except msgspec.DecodeError:
                return 500
            error = told.error or (told.response and told.response.error) or (_Error(told.code) if told.type == "error" else None)
            if error is not None:
                return _status(error.code)
    return 500


def _status(code: object) -> int:
    if isinstance(code, int):
        return code if 400 <= code < 600 else 500
    return 429 if code == "rate_limit_exceeded" else 400 if code in _ASKED_FOR else 500

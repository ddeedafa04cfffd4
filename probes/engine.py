"""How a serving engine is looked at over HTTP: its health, the few metrics that tell load and progress, one token asked of it.

This module exists because the probe on the node and the adapters over the network must see an engine the same way. What
always holds:

* Every call has a deadline and a size bound, and ends in a value, never in an exception: how it went is the measurement.
* A redirect is an answer like any other and is not followed: a worker does not decide whom its node asks next.
* Only the wanted metric families are parsed; a bad line is skipped, and a family that is absent is None, never zero.
* 429 and 503 on a request mean busy: neither right nor wrong. Only who asks ``/health`` may read a 503 as more.
* Nothing here judges: an answer that did not come is reported as that.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import aiohttp
import msgspec

RANKS_MAX = 1024  # engines of one worker; more is nonsense that would only cost time
COUNT_MAX = 1e15  # of a gauge or counter; beyond it a float no longer counts by one
BODY_MAX = 8 << 20  # bytes; vLLM 0.32 writes about 60 kB of metrics per engine, a DP16 group 1 MB
_BUSY = (429, 503)

How = Literal["answered", "refused", "timeout", "broken"]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """How one HTTP call ended. ``refused``: nothing listens there; ``broken``: a connection that ended midway, or too much."""

    how: How
    status: int | None = None
    body: bytes = b""
    seconds: float = 0.0
    why: str = ""  # one clause for a person when it was not answered


async def ask(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    deadline_s: float,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    limit: int = BODY_MAX,
) -> Answer:
    """Make one call; ``deadline_s`` covers everything from connecting to the last byte."""
    begun = time.monotonic()

    def end(how: How, why: str, status: int | None = None, content: bytes = b"") -> Answer:
        return Answer(how=how, status=status, body=content, seconds=round(time.monotonic() - begun, 6), why=why)

    try:
        call = session.request(method, url, json=body, headers=headers, allow_redirects=False)
        async with asyncio.timeout(deadline_s), call as response:
            content = bytearray()
            async for piece in response.content.iter_any():
                content += piece
                if len(content) > limit:
                    return end("broken", f"answered more than {limit} bytes", response.status)
            return end("answered", "", response.status, bytes(content))
    except TimeoutError:
        return end("timeout", f"no answer within {deadline_s:g} s")
    except aiohttp.ClientConnectorError as error:
        refused = isinstance(error.os_error, ConnectionRefusedError)
        return end("refused" if refused else "broken", "connection refused" if refused else f"cannot connect: {error.os_error}")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return end("broken", f"{type(error).__name__}: {error}".rstrip(": "))


# ---------------------------------------------------------------------------------------------------------------------
# Metrics

_FAMILIES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "generation_tokens_total", "prompt_tokens_total"),
    *("iteration_tokens_total_count", "inter_token_latency_seconds_count", "time_to_first_token_seconds_count"),
    "num_preemptions_total",
)
_DYNAMO = ("inflight_requests", "requests_total", "response_bytes_total")
_LINE = re.compile(
    rb"^(vllm:(?:%b)|dynamo_component_(?:%b))" % ("|".join(_FAMILIES).encode(), "|".join(_DYNAMO).encode())
    # Possessive: a line that does not fit fails at once instead of being tried in every other way.
    + rb'(?:\{((?:[^"{}\n]++|"(?:[^"\\\n]++|\\.)*+")*+)\})?+[ \t]++([^\s]++)[^\n]*+$',
    re.MULTILINE,
)
_ID = re.compile(r"[0-9a-fA-F]{1,16}")
_LABEL = re.compile(rb'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\\n]|\\.)*)"')


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of a worker (a data-parallel rank). ``moving``: numbers that only its own steps change.

    ``moving`` holds the cache usage too: while a long prompt is prefilled in chunks no token is counted, but every chunk
    takes more of the KV cache, so that a long prefill does not look like standing still.
    """

    running: int | None = None
    waiting: int | None = None
    tokens: float | None = None  # prompt and generated tokens since its start
    moving: tuple[float, ...] = ()


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """What one ``/metrics`` says. ``ranks`` is by vLLM's ``engine`` label; the rest is Dynamo's, None or "" elsewhere."""

    ranks: dict[str, Rank] = {}
    in_flight: int | None = None  # dynamo_component_inflight_requests of the endpoint "generate"
    answered: tuple[float, ...] = ()  # Dynamo's requests and response bytes of "generate": they move while tokens are sent
    model: str = ""  # the name it is served under, of vLLM's labels
    instance: str = ""  # hex id that Dynamo's discovery knows this process by; new at every start

    @property
    def running(self) -> int | None:
        return _sum(r.running for r in self.ranks.values()) if self.ranks else self.in_flight

    @property
    def waiting(self) -> int | None:
        return _sum(r.waiting for r in self.ranks.values())

    @property
    def progress(self) -> float | None:
        """A counter that only stands still while no token is made."""
        tokens = [r.tokens for r in self.ranks.values() if r.tokens is not None]
        return sum(tokens) if tokens else (self.answered[-1] if self.answered else None)

    @property
    def load(self) -> int | None:
        """Requests running or waiting inside the worker; None: neither was there to read."""
        engine = None if self.running is None else self.running + (self.waiting or 0)
        return engine if self.in_flight is None else max(self.in_flight, engine or 0)


def _sum(values: Iterator[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def parse(text: bytes) -> Metrics:
    """Read the wanted families out of a Prometheus exposition, whatever else is in it."""
    engines: dict[str, dict[str, float]] = {}
    dynamo: dict[str, float] = {}
    instance = model = ""
    for match in _LINE.finditer(text):
        name = match[1].decode()
        labels = {k.decode(): v.decode(errors="replace") for k, v in _LABEL.findall(match[2] or b"")}
        try:
            value = float(match[3])
        except ValueError:
            continue
        if not abs(value) <= COUNT_MAX:  # NaN is not either
            continue
        if name.startswith("vllm:"):
            seen = engines.setdefault(labels.get("engine", "0"), {})
            if len(engines) > RANKS_MAX:
                return Metrics()
            model = model or labels.get("model_name", "")
            seen[name[5:]] = seen.get(name[5:], 0.0) + value
        elif labels.get("dynamo_endpoint") == "generate":
            instance = told if _ID.fullmatch(told := labels.get("worker_id", "")) else instance
            short = name.removeprefix("dynamo_component_")
            dynamo[short] = dynamo.get(short, 0.0) + value
    in_flight = dynamo.get("inflight_requests")
    return Metrics(
        ranks={rank: _rank(seen) for rank, seen in sorted(engines.items())},
        in_flight=None if in_flight is None else int(in_flight),
        answered=tuple(dynamo[k] for k in _DYNAMO[1:] if k in dynamo),
        model=model,
        instance=instance,
    )


def _rank(seen: Mapping[str, float]) -> Rank:
    def whole(name: str) -> int | None:
        return int(seen[name]) if name in seen else None

    # The mocker of Dynamo has no token counters; it counts a latency per token instead.
    for pair in (("generation_tokens_total", "prompt_tokens_total"),
                 ("inter_token_latency_seconds_count", "time_to_first_token_seconds_count")):  # fmt: skip
        if pair[0] in seen:
            tokens: float | None = seen[pair[0]] + seen.get(pair[1], 0.0)
            break
    else:
        tokens = None
    moving = tuple(seen[name] for name in _FAMILIES[2:] if name in seen)
    return Rank(running=whole("num_requests_running"), waiting=whole("num_requests_waiting"), tokens=tokens, moving=moving)


# ---------------------------------------------------------------------------------------------------------------------
# Health, and one token


def healthy(engine: str, answer: Answer) -> bool | None:
    """What the worker's own ``/health`` says; None where it says nothing about the engine.

    vLLM: 503 only when the engine has died, and on every path while elastic expert parallelism rescales (source of
    vLLM 0.32, facts of its middleware), which the body tells. Dynamo 1.6.1: a bare worker says ``notready`` for ever while
    its endpoints are ``ready`` (measured), so the endpoint that takes requests is what counts.
    """
    if answer.how != "answered" or answer.status is None:
        return None
    if answer.status == 200:
        return True
    if engine == "dynamo":
        try:
            state = json.loads(answer.body)["endpoints"]["generate"]
        except (ValueError, KeyError, TypeError):
            return False if answer.status == 503 else None
        return bool(state == "ready")
    if answer.status == 503:
        return None if b"scaling" in answer.body.lower() else False
    return False if answer.status >= 500 else None


# The field of nvext that pins a request to a Dynamo worker of each role, and the one of nvext.worker_id that says who answered.
# Measured on 1.6.1: in a disaggregated deployment backend_instance_id finds no worker, the two others do.
_PIN = {
    "prefill": ("prefill_worker_id", "prefill_worker_id"),
    "decode": ("decode_worker_id", "decode_worker_id"),
    "both": ("backend_instance_id", "decode_worker_id"),
}


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """How a request of one token ended. ``ok`` None: it was too busy, or could not be asked; ``how`` as in Answer."""

    ok: bool | None
    how: How
    status: int | None = None
    seconds: float = 0.0
    why: str = ""


async def model_of(session: aiohttp.ClientSession, url: str, *, deadline_s: float) -> tuple[str | None, Answer]:
    """The first model that the server lists, None when it lists none; and how the question went."""
    answer = await ask(session, "GET", f"{url.rstrip('/')}/v1/models", deadline_s=deadline_s)
    try:
        return (str(json.loads(answer.body)["data"][0]["id"]) if answer.status == 200 else None), answer
    except (ValueError, KeyError, IndexError, TypeError):
        return None, answer


async def one_token(
    session: aiohttp.ClientSession,
    url: str,
    *,
    deadline_s: float,
    model: str = "",
    instance: str = "",
    role: str = "both",
) -> Token:
    """Ask the server at ``url`` for one token, from the first model that it lists unless ``model`` is given.

    ``instance`` (hex) pins the request to that Dynamo worker, which serves as ``role``, and sees that it answered.
    """
    begun = time.monotonic()
    if not model:
        listed, answer = await model_of(session, url, deadline_s=deadline_s)
        if answer.how != "answered":
            return Token(ok=False, how=answer.how, seconds=answer.seconds, why=answer.why)
        if not listed:
            return Token(ok=None, how="answered", status=answer.status, seconds=answer.seconds, why="it lists no model")
        model = listed
    body: dict[str, Any] = {"model": model, "prompt": "1", "max_tokens": 1, "temperature": 0}
    pin, attribution = _PIN[role]
    if instance:
        body["nvext"] = {pin: int(instance, 16), "extra_fields": ["worker_id"]}
    left = max(0.001, deadline_s - (time.monotonic() - begun))
    answer = await ask(session, "POST", f"{url.rstrip('/')}/v1/completions", deadline_s=left, body=body)
    seconds = round(time.monotonic() - begun, 6)
    if answer.how != "answered":
        return Token(ok=False, how=answer.how, seconds=seconds, why=answer.why)
    ok, why = _right(answer, instance, attribution)
    return Token(ok=ok, how="answered", status=answer.status, seconds=seconds, why=why)


def _right(answer: Answer, instance: str, attribution: str) -> tuple[bool | None, str]:
    if answer.status in _BUSY:
        return None, f"busy (HTTP {answer.status})"
    if answer.status != 200:
        said = answer.body[:200].decode(errors="replace")
        return (None if (answer.status or 0) < 500 else False), f"HTTP {answer.status}: {said}"
    try:
        whole = json.loads(answer.body)
        choice = whole["choices"][0]
        made = (whole.get("usage") or {}).get("completion_tokens", 1)
        if choice["finish_reason"] not in ("length", "stop") or not isinstance(choice["text"], str) or made != 1:
            return False, f"not one token: finish_reason {choice['finish_reason']!r}, {made} tokens"
        if instance:
            who = whole["nvext"]["worker_id"][attribution]
            if who != int(instance, 16):
                return False, f"worker {who:x} answered instead of {instance}"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return False, f"not a completion: {answer.body[:200].decode(errors='replace')}"
    return True, "one token answered rightly"

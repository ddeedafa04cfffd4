"""Steady streaming traffic through the gateways, and an honest account of every request.

This module exists so that whatever happens behind the gateways is judged by what clients saw. What always holds:

* A client knows nothing but the gateways' addresses. Each request begins at the next of them, as behind a load balancer that goes
  round, and is sent to another when the connection fails before a byte of an answer (openai-python does that by itself, too).
  Whatever a gateway answers is the answer: what it can save by a second try is its own business.
* Every request ends as exactly one of ok, refused (503 or 429 before anything was done) and failed, and its record says how.
  Requests that the demo itself cuts off at its end count as none of these.
* A stream that had begun and broke is blamed on the worker where the gateway tells of it, and on the gateway where the connection
  itself broke. Which worker streams is read from the answer's id, where the simulated engines write their name.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

OPENING = 400  # tokens of a session's first message
REPLY = 60  # tokens of what its user says next
REFUSALS = (429, 503)
IDLE_S = 0.05


@dataclass(frozen=True)
class Load:
    """How much traffic there is: seconds and tokens."""

    sessions: int = 24
    turns: int = 3
    tokens: tuple[int, int] = (40, 120)
    pause_s: tuple[float, float] = (0.05, 0.2)
    first_token_s: float = 20.0  # no first token for this long: failed
    stall_s: float = 20.0  # no further token for this long: failed
    seed: int = 7


@dataclass(eq=False)
class Record:
    """One request. Times are seconds since the epoch."""

    id: int
    session: str
    at: float
    gateways: list[str] = field(default_factory=list)  # tried, in order
    worker: str = ""  # that streams, from its first token on
    first_token_at: float | None = None
    ended_at: float | None = None
    tokens: int = 0
    failed: str = ""  # why
    failed_on: str = ""  # the worker or the gateway it failed on
    refused: str = ""  # why it was not let in
    retry_after_s: float = 0.0  # with a refusal; 0: it named no time
    cut: bool = False  # the demo ended first

    @property
    def ok(self) -> bool:
        return self.ended_at is not None and not self.failed and not self.refused and not self.cut

    @property
    def retried(self) -> bool:
        return len(self.gateways) > 1

    @property
    def took_s(self) -> float:
        return (self.ended_at or time.time()) - self.at


class _Unanswered(Exception):
    """The connection failed before anything of an answer came: another gateway may be asked."""


class _Broken(Exception):
    """The request has failed; ``on`` is where. The text says how."""

    def __init__(self, on: str, how: str) -> None:
        super().__init__(f"{on}: {how}")
        self.on = on


class Traffic:
    """``start`` it, let it flow, ``stop`` it; ``records`` is the account. ``gateways``: name → base URL."""

    def __init__(
        self, gateways: Mapping[str, str], load: Load, *, model: str, on_first_token: Callable[[Record], None] = lambda _: None
    ) -> None:
        self.records: list[Record] = []
        self.tokens = 0  # of all streams, as they came
        self._gateways = dict(gateways)
        self._load = load
        self._model = model
        self._on_first_token = on_first_token
        self._ids = itertools.count(1)
        self._ending = asyncio.Event()
        self._tasks: list[asyncio.Task[Any]] = []
        self._http: aiohttp.ClientSession | None = None
        self._surge_per_s = 0.0
        self._surge_ids: Iterator[int] | None = None

    @property
    def settled(self) -> list[Record]:
        return [r for r in self.records if r.ended_at is not None and not r.cut]

    def counts(self) -> dict[str, int]:
        """``sent`` = ok + refused + failed + flowing; ``retried``: sent to a second gateway, however they ended."""
        counted = [r for r in self.records if not r.cut]
        return {
            "sent": len(counted),
            "ok": sum(r.ok for r in counted),
            "refused": sum(bool(r.refused) for r in counted),
            "failed": sum(bool(r.failed) for r in counted),
            "retried": sum(r.retried for r in counted),
            "flowing": sum(r.ended_at is None for r in counted),
        }

    def first_tokens(self) -> list[float]:
        """Seconds from sending to the first token here, of every request that got one, shortest first."""
        return sorted(r.first_token_at - r.at for r in self.records if r.first_token_at is not None)

    def flowing(self, name: str) -> int:
        """Streams that this worker, or this gateway, is in the middle of, as the client sees it."""
        return sum(r.ended_at is None and r.tokens > 0 and name in (r.worker, r.gateways[-1]) for r in self.records)

    async def start(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        self._http = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        self._tasks = [asyncio.create_task(self._slot(n), name=f"traffic {n}") for n in range(self._load.sessions)]

    def surge(self, per_s: float) -> None:
        """From now on, besides, new sessions of one request each come at this even pace, whatever becomes of them; 0: none."""
        self._surge_per_s = per_s
        if self._surge_ids is None:
            self._surge_ids = itertools.count(1)
            self._tasks.append(asyncio.create_task(self._surge(self._surge_ids), name="surge"))

    async def _surge(self, ids: Iterator[int]) -> None:
        dice = random.Random(self._load.seed)
        due = time.monotonic()
        while not self._ending.is_set():
            due = due + 1 / self._surge_per_s if self._surge_per_s else time.monotonic() + IDLE_S
            await self._pause(due - time.monotonic())
            if self._surge_per_s and not self._ending.is_set():
                turn = self._turn(f"x{next(ids)}", [_message("user", OPENING)], dice.randint(*self._load.tokens))
                self._tasks.append(asyncio.create_task(turn, name="surge request"))

    async def stop(self, patience_s: float = 6.0) -> None:
        """Begin nothing new, let streams end for ``patience_s`` seconds, cut off the rest."""
        self._ending.set()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=patience_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._http:
            await self._http.close()

    async def _slot(self, number: int) -> None:
        """One seat: session after session, each of some turns with pauses for thought."""
        dice = random.Random(self._load.seed * 1000 + number)
        await self._pause(dice.uniform(0, 0.5))
        for generation in itertools.count(1):
            said = [_message("user", OPENING)]
            # The first sessions are met in their midst: steady traffic has ends and beginnings at every moment.
            turns = self._load.turns if generation > 1 else dice.randint(1, self._load.turns)
            for _ in range(turns):
                if self._ending.is_set():
                    return
                tokens = dice.randint(*self._load.tokens)
                record = await self._turn(f"s{number:02}.{generation}", said, tokens)
                said += [_message("assistant", tokens), _message("user", REPLY)]
                await self._pause(max(record.retry_after_s, dice.uniform(*self._load.pause_s)))

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), max(0.0, seconds))

    async def _turn(self, session: str, said: list[dict[str, str]], tokens: int) -> Record:
        record = Record(next(self._ids), session, time.time())
        self.records.append(record)
        body = {"model": self._model, "messages": said, "max_tokens": tokens, "stream": True}
        names = list(self._gateways)
        first = record.id % len(names)
        try:
            for name in names[first:] + names[:first]:
                record.gateways.append(name)
                with contextlib.suppress(_Unanswered):
                    await self._ask(name, record, body, tokens)
                    break
            else:
                record.failed, record.failed_on = "no gateway could be reached", name
        except _Broken as broken:
            record.failed, record.failed_on = str(broken), broken.on
        except asyncio.CancelledError:
            record.cut = True
            raise
        finally:
            record.ended_at = time.time()
        return record

    async def _ask(self, gateway: str, record: Record, body: dict[str, Any], wanted: int) -> None:
        """One try. Raises _Unanswered, or _Broken when it failed for good."""
        assert self._http is not None  # noqa: S101  (start came first)
        answered = False
        headers = {"x-session-id": record.session}
        try:
            async with asyncio.timeout(self._load.first_token_s) as patience:
                url = f"{self._gateways[gateway]}/v1/chat/completions"
                async with self._http.post(url, json=body, headers=headers) as answer:
                    answered = True
                    if answer.status != 200:
                        _not_served(record, gateway, answer, await answer.read())
                        return
                    # Counting frames is enough here; decoding a thousand of them a second would cost the demo its cores.
                    async for frame in answer.content:
                        if not frame.startswith(b"data: "):
                            continue
                        if frame.startswith(b'data: {"error"'):
                            how = f"broke after {record.tokens} of {wanted} tokens: {_told(frame[6:])}"
                            raise _Broken(record.worker or gateway, how)
                        if frame.startswith(b"data: [DONE]"):
                            break
                        self.tokens += 1
                        record.tokens += 1
                        if record.first_token_at is None:
                            record.first_token_at = time.time()
                            record.worker = _streams(frame[6:])
                            self._on_first_token(record)
                        patience.reschedule(asyncio.get_running_loop().time() + self._load.stall_s)
        except TimeoutError:
            if record.tokens:
                how = f"stalled after {record.tokens} tokens, {self._load.stall_s:g} s ago"
                raise _Broken(record.worker, how) from None
            raise _Broken(gateway, f"no first token in {self._load.first_token_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            if not answered:
                raise _Unanswered from None
            raise _Broken(gateway, f"cut after {record.tokens} of {wanted} tokens: {type(error).__name__}") from None
        if record.tokens != wanted:
            raise _Broken(record.worker or gateway, f"ended after {record.tokens} of {wanted} tokens")


def _message(role: str, tokens: int) -> dict[str, str]:
    return {"role": role, "content": "turn" * tokens}


def _not_served(record: Record, gateway: str, answer: aiohttp.ClientResponse, body: bytes) -> None:
    """A refusal is noted; every other answer that is no stream is a failure."""
    how = f"answered {answer.status}: {_told(body)}"
    if answer.status not in REFUSALS:
        raise _Broken(gateway, how)
    record.refused = f"{gateway}: {how}"
    with contextlib.suppress(ValueError):
        record.retry_after_s = float(answer.headers.get("Retry-After", "0"))


def _told(body: bytes) -> str:
    """The sentence in an error of OpenAI's shape."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:100].decode(errors="replace")


def _streams(frame: bytes) -> str:
    """The worker whose answer this is, by the id that a simulated engine gives it: ``chatcmpl-WORKER-NUMBER``."""
    try:
        return str(json.loads(frame)["id"]).partition("-")[2].rpartition("-")[0]
    except (ValueError, KeyError, TypeError):
        return ""

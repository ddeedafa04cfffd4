"""Steady streaming traffic against the simulated rack, and an honest account of every request.

This module exists so that a drain or an eviction is judged by what clients saw. What always holds:

* A turn goes to a prefill worker first (one token), then streams from a decoder, as in disaggregated serving.
* A request is tried on at most one other worker, and only before its first token: after that a broken stream has failed.
* Every request ends as exactly one of ok and failed, and its record names every worker that it touched and why it failed.
  Requests that the demo itself cuts off at its end count as neither.
* A worker is chosen only from the newest route table.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import aiohttp

from sentinel.model import Role, RouteEntry

Pick = Callable[[Role, str, frozenset[str]], RouteEntry | None]
"""(role, session, workers to leave out) → where the next request goes; None: nowhere."""


@dataclass(frozen=True)
class Load:
    """How much traffic there is: seconds and tokens."""

    sessions: int = 24
    turns: int = 3
    tokens: tuple[int, int] = (40, 120)
    pause_s: tuple[float, float] = (0.05, 0.2)
    first_token_s: float = 20.0  # no first token for this long: tried elsewhere, or failed
    stall_s: float = 20.0  # no further token for this long: failed
    seed: int = 7


@dataclass(eq=False)
class Record:
    """One request. Times are seconds since the epoch."""

    id: int
    session: str
    at: float
    prefill: list[str] = field(default_factory=list)  # workers tried, in order
    decode: list[str] = field(default_factory=list)
    first_token_at: float | None = None
    ended_at: float | None = None
    tokens: int = 0
    retried: bool = False
    failed: str = ""  # why
    failed_on: str = ""  # the worker it failed on
    cut: bool = False  # the demo ended first

    @property
    def ok(self) -> bool:
        return self.ended_at is not None and not self.failed and not self.cut


class _Broken(Exception):
    """An attempt did not work out; ``worker`` is where. The text says how."""

    def __init__(self, worker: str, how: str) -> None:
        super().__init__(f"{worker}: {how}")
        self.worker = worker
        self.how = how


class Traffic:
    """``start`` it, let it flow, ``stop`` it; ``records`` is the account."""

    def __init__(self, pick: Pick, load: Load, *, model: str, on_first_token: Callable[[Record], None] = lambda _: None) -> None:
        self.records: list[Record] = []
        self.in_flight: Counter[str] = Counter()  # worker → requests that it has from us
        self.homes: dict[str, str] = {}  # session → the decoder that holds its KV cache
        self._pick = pick
        self._load = load
        self._model = model
        self._on_first_token = on_first_token
        self._ids = itertools.count(1)
        self._ending = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._http: aiohttp.ClientSession | None = None

    @property
    def settled(self) -> list[Record]:
        return [r for r in self.records if r.ended_at is not None and not r.cut]

    def counts(self) -> dict[str, int]:
        """``sent`` = ok + failed + flowing; ``retried``: requests, however they ended."""
        counted = [r for r in self.records if not r.cut]
        return {
            "sent": len(counted),
            "ok": sum(r.ok for r in counted),
            "failed": sum(bool(r.failed) for r in counted),
            "retried": sum(r.retried for r in counted),
            "flowing": sum(r.ended_at is None for r in counted),
        }

    def flowing(self, worker: str) -> int:
        """Streams that this worker is in the middle of, as the client sees it."""
        return sum(r.ended_at is None and r.tokens > 0 and r.decode[-1:] == [worker] for r in self.records)

    async def start(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        self._http = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        self._tasks = [asyncio.create_task(self._slot(n), name=f"traffic {n}") for n in range(self._load.sessions)]

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
            session = f"s{number:02}.{generation}"
            prompt = 400
            # The first sessions are met in their midst: steady traffic has ends and beginnings at every moment.
            turns = self._load.turns if generation > 1 else dice.randint(1, self._load.turns)
            for _ in range(turns):
                if self._ending.is_set():
                    return
                tokens = dice.randint(*self._load.tokens)
                await self._turn(session, prompt, tokens)
                prompt += tokens + 60
                await self._pause(dice.uniform(*self._load.pause_s))
            self.homes.pop(session, None)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)

    async def _turn(self, session: str, prompt: int, tokens: int) -> None:
        record = Record(next(self._ids), session, time.time())
        self.records.append(record)
        left_out: frozenset[str] = frozenset()
        try:
            while True:
                try:
                    await self._attempt(record, prompt, tokens, left_out)
                except _Broken as broken:
                    if record.retried or record.tokens:
                        record.failed, record.failed_on = str(broken), broken.worker
                        break
                    record.retried = True
                    left_out = frozenset({broken.worker})
                else:
                    break
        except asyncio.CancelledError:
            record.cut = True
            raise
        finally:
            record.ended_at = time.time()

    async def _attempt(self, record: Record, prompt: int, tokens: int, left_out: frozenset[str]) -> None:
        prefill = self._choose(Role.PREFILL, record, left_out)
        record.prefill.append(prefill.worker)
        body = {"model": self._model, "messages": [{"role": "user", "content": "turn" * prompt}]}
        with self._busy(prefill.worker):
            pulled = await self._prefill(prefill, {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}})
        decode = self._choose(Role.DECODE, record, left_out)
        record.decode.append(decode.worker)
        with self._busy(decode.worker):
            await self._stream(decode, record, {**body, "max_tokens": tokens, "stream": True, "kv_transfer_params": pulled})

    @contextlib.contextmanager
    def _busy(self, worker: str) -> Iterator[None]:
        self.in_flight[worker] += 1
        try:
            yield
        finally:
            self.in_flight[worker] -= 1

    def _choose(self, role: Role, record: Record, left_out: frozenset[str]) -> RouteEntry:
        entry = self._pick(role, record.session, left_out)
        if entry is None:
            raise _Broken(f"no {role} worker", "the route table has none to give")
        return entry

    async def _prefill(self, entry: RouteEntry, body: dict[str, object]) -> object:
        assert self._http is not None  # noqa: S101  (start came first)
        try:
            async with asyncio.timeout(self._load.first_token_s):
                async with self._http.post(f"{entry.url}/v1/chat/completions", json=body) as answer:
                    got = await answer.json()
        except TimeoutError:
            raise _Broken(entry.worker, f"no answer from prefill in {self._load.first_token_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _Broken(entry.worker, f"prefill broke: {type(error).__name__}") from None
        if answer.status != 200:
            raise _Broken(entry.worker, f"prefill answered {answer.status}")
        return got.get("kv_transfer_params")

    async def _stream(self, entry: RouteEntry, record: Record, body: dict[str, object]) -> None:
        assert self._http is not None  # noqa: S101  (start came first)
        wanted = body["max_tokens"]
        try:
            async with asyncio.timeout(self._load.first_token_s) as patience:
                async with self._http.post(f"{entry.url}/v1/chat/completions", json=body) as answer:
                    if answer.status != 200:
                        raise _Broken(entry.worker, f"answered {answer.status}")
                    # Counting frames is enough here; decoding a thousand of them a second would cost the demo its cores.
                    async for frame in answer.content:
                        if not frame.startswith(b"data: "):
                            continue
                        if frame.startswith(b"data: [DONE]"):
                            break
                        record.tokens += 1
                        if record.first_token_at is None:
                            record.first_token_at = time.time()
                            self.homes[record.session] = entry.worker
                            self._on_first_token(record)
                        patience.reschedule(asyncio.get_running_loop().time() + self._load.stall_s)
        except TimeoutError:
            if record.tokens:
                raise _Broken(entry.worker, f"stalled after {record.tokens} tokens, {self._load.stall_s:g} s ago") from None
            raise _Broken(entry.worker, f"no first token in {self._load.first_token_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            how = f"broke after {record.tokens} of {wanted} tokens" if record.tokens else "broke before the first token"
            raise _Broken(entry.worker, f"{how}: {type(error).__name__}") from None
        if record.tokens != wanted:
            raise _Broken(entry.worker, f"ended after {record.tokens} of {wanted} tokens")

"""Clients as everybody has them, and a count that tells what could have been saved.

This module exists so that the tests and the benchmark of the gateway before real engines put the same load on it and count alike.
What always holds:

* The clients are OpenAI's SDK and curl, unchanged. The SDK's own second tries are off: they would save what the gateway did not.
* An answer is whole when it ended as the engine ends it, with every token; how many tokens is asked for and told.
* A request that failed *could have been saved* when its client had seen nothing of an answer (a second try was still open), when
  it was no stream (nothing is shown before the end), or when what failed was a worker behind a Dynamo frontend that lived
  (migration). A stream that plain vLLM had begun can not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import openai

from tests.e2e.gateway_serving import KEY, Front


@dataclass
class Told:
    """One request. ``seen``: pieces of an answer that its client got; ``why``: "" when it came whole; ``clean``: its failure was
    told as an error of OpenAI's shape, not by a connection that broke."""

    client: str
    stream: bool
    began: float
    seen: int = 0
    why: str = ""
    clean: bool = True
    took_s: float = 0.0


@dataclass
class Seen:
    """What clients saw of one trial."""

    told: list[Told] = field(default_factory=list)

    @property
    def failed(self) -> list[Told]:
        return [t for t in self.told if t.why]

    def savable(self, *, migrates: bool) -> list[Told]:
        """Of the failed ones, those that a second try or (``migrates``) a migration could have saved."""
        return [t for t in self.failed if migrates or not t.stream or not t.seen]

    @property
    def unclean(self) -> list[Told]:
        return [t for t in self.failed if not t.clean]

    def summary(self, *, migrates: bool) -> dict[str, Any]:
        late = max((t.took_s for t in self.told), default=0.0)
        return {
            "requests": len(self.told), "whole": len(self.told) - len(self.failed), "failed": len(self.failed),
            "could_have_been_saved": len(self.savable(migrates=migrates)), "failed_without_an_error": len(self.unclean),
            "why": dict(Counter(f"{t.why} ({'stream begun' if t.seen else 'nothing shown'})" for t in self.failed)),
            "longest_s": round(late, 1),
        }  # fmt: skip


class Load:
    """Clients, each with one request after another: ``streams`` SDK streams, and some that want whole answers or are curl."""

    def __init__(self, front: Front, *, streams: int = 100, whole: int = 8, curls: int = 2, tokens: int = 60) -> None:
        self._front, self._tokens, self.streams = front, tokens, streams
        self.told: list[Told] = []
        self.begun = 0  # streams that have shown something and are not over
        self._ended = False
        self._under_way: dict[int, float] = {}  # request → when it began
        self._number = itertools.count()
        self._sdk = sdk_of(front, timeout_s=120.0)
        kinds: list[tuple[Callable[[Told], Coroutine[Any, Any, None]], str, bool, int]] = [
            (self._sdk_stream, "sdk", True, streams), (self._sdk_whole, "sdk", False, whole),
            (self._curl, "curl", True, curls), (self._curl, "curl", False, curls),
        ]  # fmt: skip
        self._clients = [
            asyncio.create_task(self._client(ask, name, stream)) for ask, name, stream, count in kinds for _ in range(count)
        ]

    async def busy(self) -> None:
        """Wait until every client has a request under way and half of the streams have shown something: in a closed loop the
        others wait for their first token, and more of them where an engine is quick once it has begun."""
        async with asyncio.timeout(120):
            while len(self._under_way) < len(self._clients) or self.begun < self.streams // 2:
                await asyncio.sleep(0.01)

    async def turned(self) -> None:
        """Wait until every request that is under way now has ended."""
        now = monotonic()
        while min(self._under_way.values(), default=now) < now:
            await asyncio.sleep(0.05)

    def since(self, moment: float) -> Seen:
        """What began or ended after that moment (monotonic)."""
        return Seen([t for t in self.told if t.began + t.took_s >= moment])

    async def end(self) -> None:
        """No further requests; returns when the last ones have ended."""
        self._ended = True
        await asyncio.gather(*self._clients)
        await self._sdk.close()

    async def _client(self, ask: Callable[[Told], Coroutine[Any, Any, None]], name: str, stream: bool) -> None:
        await asyncio.sleep(random.random())
        while not self._ended:
            told = Told(name, stream, monotonic())
            self._under_way[id(told)] = told.began
            try:
                await ask(told)
            except openai.APIStatusError as error:
                told.why = f"{error.status_code} {error.code}"
            except (openai.APIConnectionError, openai.APITimeoutError) as error:
                told.why, told.clean = type(error).__name__, False
            except openai.APIError as error:  # an event of the stream
                told.why = f"error event {error.code}"
            except Exception as error:  # what httpx raises in the middle of a stream is the SDK's user's to see
                told.why, told.clean = type(error).__name__, False
            told.took_s = monotonic() - told.began
            del self._under_way[id(told)]
            self.told.append(told)
            if told.why:
                await asyncio.sleep(0.2)

    def _ask(self, *, stream: bool) -> dict[str, Any]:
        more = {"stream_options": {"include_usage": True}} if stream else {}
        return {
            "model": self._front.model, "max_tokens": self._tokens, "stream": stream, **more,
            "messages": [{"role": "user", "content": f"how fares rack {next(self._number)}?"}],
        }  # fmt: skip

    async def _sdk_stream(self, told: Told) -> None:
        made = 0
        try:
            ask = self._ask(stream=True)
            async for piece in await self._sdk.chat.completions.create(**ask, extra_body={"ignore_eos": True}):
                told.seen += 1
                self.begun += told.seen == 1
                made = piece.usage.completion_tokens if piece.usage else made  # one piece may be of several tokens
        finally:
            self.begun -= told.seen > 0
        if made != self._tokens:
            told.why, told.clean = f"cut short: {made} of {self._tokens} tokens", False

    async def _sdk_whole(self, told: Told) -> None:
        answer = await self._sdk.chat.completions.create(**self._ask(stream=False), extra_body={"ignore_eos": True})
        if not answer.usage or answer.usage.completion_tokens != self._tokens:
            told.why, told.clean = f"cut short: {answer.usage}", False

    async def _curl(self, told: Told) -> None:
        body = json.dumps(self._ask(stream=told.stream) | {"ignore_eos": True})
        curl = await asyncio.create_subprocess_exec(
            "curl", "-sS", "-N", "-m", "120", f"{self._front.url}/v1/chat/completions", "-H", "content-type: application/json",
            "-H", f"authorization: Bearer {KEY}", "-d", body, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out, err = await curl.communicate()
        said: dict[str, Any] = {}
        events = [e.removeprefix(b"data: ") for e in out.split(b"\n\n") if e] if told.stream else [out]
        with contextlib.suppress(ValueError):
            for event in events:
                if event != b"[DONE]":
                    said = json.loads(event)
                    told.seen += told.stream and "error" not in said
        error = said.get("error")
        whole = (said.get("usage") or {}).get("completion_tokens") == self._tokens and (events[-1] == b"[DONE]" or not told.stream)
        if error:
            told.why = f"error event {error.get('code')}" if told.seen else f"error {error.get('code')}"
        elif curl.returncode or not whole:
            told.why, told.clean = f"curl {curl.returncode}: {err.decode(errors='replace').strip()[:80]}", False


@contextlib.asynccontextmanager
async def load(front: Front, **options: int) -> AsyncIterator[Load]:
    made = Load(front, **options)
    try:
        yield made
    finally:
        await made.end()


def sdk_of(front: Front, *, timeout_s: float = 60.0) -> openai.AsyncOpenAI:
    """OpenAI's SDK as anybody would make it, its own second tries off. Each has connections of its own, to any of the processes."""
    return openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key=KEY, max_retries=0, timeout=timeout_s)


async def everyday(front: Front) -> None:
    """What any client does all day, whole and in a stream; an AssertionError says what did not come as from the engine."""
    async with sdk_of(front) as sdk:
        model, ask = front.model, [{"role": "user", "content": "how fares the rack?"}]
        forever: Any = {"ignore_eos": True}
        assert [m.id async for m in sdk.models.list()] == [model]
        whole: Any = await sdk.chat.completions.create(model=model, messages=ask, max_tokens=8, extra_body=forever)  # type: ignore[arg-type]
        assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 8 and whole._request_id
        more: Any = {"stream": True, "stream_options": {"include_usage": True}}
        stream: Any = await sdk.chat.completions.create(model=model, messages=ask, max_tokens=8, extra_body=forever, **more)  # type: ignore[arg-type]
        pieces = [piece async for piece in stream]
        assert pieces[-1].usage.completion_tokens == 8
        assert [c.finish_reason for p in pieces for c in p.choices if c.finish_reason] == ["length"]
        text: Any = await sdk.completions.create(model=model, prompt="how fares", max_tokens=8, extra_body=forever)
        assert text.choices[0].finish_reason == "length"
        parts: Any = await sdk.completions.create(model=model, prompt="how fares", max_tokens=8, stream=True, extra_body=forever)
        assert [p.choices[0].finish_reason async for p in parts if p.choices and p.choices[0].finish_reason] == ["length"]
        answer = await sdk.responses.create(model=model, input="how fares the rack?", max_output_tokens=16)
        assert answer.object == "response" and answer.status in ("completed", "incomplete")
        typed = await sdk.responses.create(model=model, input="hi", max_output_tokens=16, stream=True)
        events = [event.type async for event in typed]
        assert events[0] == "response.created" and events[-1] in ("response.completed", "response.incomplete")
        for wrong, status in (({"model": "nobody's"}, 404), ({"max_tokens": "many"}, 400)):
            try:
                await sdk.chat.completions.create(**{"model": model, "messages": ask, **wrong})  # type: ignore[arg-type]
            except openai.APIStatusError as error:
                assert error.status_code == status, (wrong, error)
            else:
                raise AssertionError(f"{wrong} was answered")

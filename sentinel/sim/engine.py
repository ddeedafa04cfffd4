"""One simulated worker: a real HTTP server that speaks vLLM's surface in front of an engine that only pretends to compute.

This module exists so that everything outside the engine (sockets, streams, probes, adapters, kills) is the real thing in
the demo. What always holds:

* The engine takes whole steps: every step gives each running request one token, at most ``slots`` run, the rest wait in
  order. Nothing is random: how long a request takes follows from its size and from who else is there.
* A frozen engine is invisible from outside, as measured on vLLM 0.32: ``/health``, ``/metrics`` and ``/v1/models`` go on
  answering, the gauges keep their last values, and only requests that need the engine hang.
* After SIGTERM, ``/health`` stays 200, what is in flight finishes, and every new request gets a 500 (vLLM 0.32, measured);
  the process ends when it is idle or when ``shutdown_s`` is over.
* A rank of a data-parallel group is its own ``engine`` label in the metrics; all ranks step together.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from prometheus_client import generate_latest

from sentinel.sim.meters import Meters

WORDS = ("the", "rack", "hums", "while", "tokens", "flow", "from", "every", "tray", "and", "none", "is", "lost")
BODY_MAX = 8 << 20


@dataclass(frozen=True)
class Shape:
    """What one worker is: seconds, tokens and counts. ``ranks``: data-parallel engines that step together."""

    name: str
    model: str = "sim-moe"
    ranks: int = 1
    slots: int = 16  # requests that run at once, over all ranks
    queue: int = 256  # requests that may wait; past it the answer is 503
    step_s: float = 0.02
    prefill_per_step: int = 4096  # prompt tokens a step works off before a request's first token
    load_s: float = 0.5  # from process start to the first answer: what loading weights would take, shortened
    shutdown_s: float = 5.0


@dataclass(eq=False)
class Request:
    prompt: int
    wanted: int
    rank: int
    prefill_steps: int
    arrived: float
    made: int = 0
    out: asyncio.Queue[str] = field(default_factory=asyncio.Queue)


class Engine:
    """The pretended computation. ``frozen`` and ``closing`` are set from outside (signals)."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.meters = Meters(shape.model, shape.ranks)
        self.frozen = False
        self.closing = False
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.idle = asyncio.Event()
        self._work = asyncio.Event()
        self._rank = itertools.cycle(range(shape.ranks))

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    def submit(self, prompt: int, wanted: int, *, prefilled: bool) -> Request:
        steps = 0 if prefilled else math.ceil(prompt / self.shape.prefill_per_step)
        request = Request(prompt, max(1, wanted), next(self._rank), steps, time.monotonic())
        self.waiting.append(request)
        self.idle.clear()
        self._work.set()
        return request

    def forget(self, request: Request) -> None:
        """The client went away: the engine drops its request at the next step (a frozen one keeps its stale gauges)."""
        for queue in (self.running, self.waiting):
            with contextlib.suppress(ValueError):
                queue.remove(request)
        if request.made < request.wanted:
            self.meters.success.labels(*self.meters.key(request.rank), "abort").inc()
        if not self.frozen:
            self._gauge()

    async def run(self) -> None:
        while True:
            if not self.running and not self.waiting:
                self.idle.set()
                self._work.clear()
                await self._work.wait()
            await asyncio.sleep(self.shape.step_s)
            if not self.frozen:
                self.step()

    def step(self) -> None:
        now = time.monotonic()
        while self.waiting and len(self.running) < self.shape.slots:
            request = self.waiting.popleft()
            self.running.append(request)
            self.meters.queued.labels(*self.meters.key(request.rank)).observe(now - request.arrived)
        for request in tuple(self.running):
            key = self.meters.key(request.rank)
            if request.prefill_steps > 0:
                request.prefill_steps -= 1
                continue
            if request.made == 0:
                self.meters.prompt.labels(*key).inc(request.prompt)
                self.meters.ttft.labels(*key).observe(now - request.arrived)
            else:
                self.meters.itl.labels(*key).observe(self.shape.step_s)
            request.out.put_nowait(WORDS[(request.prompt + request.made) % len(WORDS)])
            request.made += 1
            self.meters.generated.labels(*key).inc()
            if request.made >= request.wanted:
                self.running.remove(request)
                self.meters.success.labels(*key, "length").inc()
        self._gauge()

    def _gauge(self) -> None:
        for rank in range(self.shape.ranks):
            key = self.meters.key(rank)
            running = sum(r.rank == rank for r in self.running)
            self.meters.running.labels(*key).set(running)
            self.meters.waiting.labels(*key).set(sum(r.rank == rank for r in self.waiting))
            self.meters.cache.labels(*key).set(min(1.0, running * self.shape.ranks / self.shape.slots))


class Server:
    """The OpenAI surface over one Engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._serial = itertools.count(1)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_MAX)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ping", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._completions)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0+simulated"})

    async def _metrics(self, _: web.Request) -> web.Response:
        body = generate_latest(self.engine.meters.registry)
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"})

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self.engine.shape.model, "object": "model", "owned_by": "sentinel-simulation", "max_model_len": 262144}
        return web.json_response({"object": "list", "data": [model]})

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        engine = self.engine
        if engine.closing:
            return _error(500, "cannot schedule new futures after shutdown", "InternalServerError")
        try:
            body = await http.json()
            chat = http.path.endswith("/chat/completions")
            prompt = _prompt_tokens(body, chat=chat)
            wanted = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
            model = str(body.get("model") or engine.shape.model)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return _error(400, f"the request cannot be read: {error}", "BadRequestError")
        if model != engine.shape.model:
            return _error(404, f"The model `{model}` does not exist.", "NotFoundError")
        if engine.load >= engine.shape.slots + engine.shape.queue:
            return _error(503, "The engine is currently busy and cannot accept new requests.", "Service Unavailable")
        pulled = body.get("kv_transfer_params") or {}
        request = engine.submit(prompt, wanted, prefilled=bool(pulled.get("do_remote_prefill")))
        answer = _Answer(f"{'chatcmpl' if chat else 'cmpl'}-{engine.shape.name}-{next(self._serial)}", model, chat)
        try:
            if body.get("stream"):
                return await self._stream(http, request, answer, bool((body.get("stream_options") or {}).get("include_usage")))
            words = [word async for word in _tokens(request)]
            whole = answer.whole(" ".join(words), request)
            if pulled.get("do_remote_decode"):  # a prefill worker tells where its KV lies, as vLLM's NIXL connector does
                whole["kv_transfer_params"] = {"do_remote_prefill": True, "remote_engine_id": engine.shape.name}
            return web.json_response(whole)
        finally:
            if request.made < request.wanted:
                engine.forget(request)

    async def _stream(self, http: web.Request, request: Request, answer: _Answer, usage: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"})
        sent = 0
        async for word in _tokens(request):
            if not response.prepared:
                await response.prepare(http)
            sent += 1
            await response.write(answer.chunk(word if sent == 1 else f" {word}", "length" if sent == request.wanted else None))
        if usage:
            await response.write(answer.usage_chunk(request))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


async def _tokens(request: Request) -> AsyncIterator[str]:
    for _ in range(request.wanted):
        yield await request.out.get()


def _prompt_tokens(body: dict[str, Any], *, chat: bool) -> int:
    """About as many tokens as a tokenizer would make: four characters each, at least one."""
    text = "".join(str(m["content"]) for m in body["messages"]) if chat else str(body["prompt"])
    return max(1, len(text) // 4)


def _error(status: int, message: str, kind: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status)


@dataclass(frozen=True)
class _Answer:
    """The JSON shapes of one completion, chat or plain."""

    id: str
    model: str
    chat: bool

    def _frame(self, kind: str) -> dict[str, Any]:
        name = ("chat.completion" + kind) if self.chat else "text_completion"
        return {"id": self.id, "object": name, "created": int(time.time()), "model": self.model}

    def chunk(self, text: str, finish: str | None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice |= {"delta": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return b"data: " + json.dumps({**self._frame(".chunk"), "choices": [choice]}).encode() + b"\n\n"

    def usage_chunk(self, request: Request) -> bytes:
        return b"data: " + json.dumps({**self._frame(".chunk"), "choices": [], "usage": _usage(request)}).encode() + b"\n\n"

    def whole(self, text: str, request: Request) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return {**self._frame(""), "choices": [choice], "usage": _usage(request)}


def _usage(request: Request) -> dict[str, int]:
    return {"prompt_tokens": request.prompt, "completion_tokens": request.made, "total_tokens": request.prompt + request.made}


async def serve(shape: Shape, listener: socket.socket) -> None:
    """Run one worker on a bound (not yet listening) socket until SIGTERM and idle. SIGUSR1 freezes, SIGUSR2 thaws."""
    engine = Engine(shape)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def freeze(on: bool) -> None:
        engine.frozen = on

    def close() -> None:
        engine.closing = True
        ended.set()

    loop.add_signal_handler(signal.SIGUSR1, freeze, True)
    loop.add_signal_handler(signal.SIGUSR2, freeze, False)
    loop.add_signal_handler(signal.SIGTERM, close)
    stepping = asyncio.create_task(engine.run(), name="engine")
    runner = web.AppRunner(Server(engine).app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    with contextlib.suppress(TimeoutError):  # loading: a SIGTERM meanwhile ends it
        await asyncio.wait_for(ended.wait(), shape.load_s)
    if not ended.is_set():
        await web.SockSite(runner, listener).start()
    await ended.wait()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(engine.idle.wait(), shape.shutdown_s)
    await runner.cleanup()
    stepping.cancel()
    os._exit(0)  # a forked child must not run the zygote's exit handlers

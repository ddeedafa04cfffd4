"""Stand-ins for the world around the adapters and the worker probe: a vLLM server, a Dynamo worker and a Dynamo frontend.

Each is a small real HTTP server whose answers a test sets; none of them computes anything. What they say follows what was
measured on vLLM 0.32 and ai-dynamo 1.6.1.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from sentinel.model import CommandResult


class StandInVllm:
    """The surface of one vLLM server. ``ranks``: engine label → metric → value."""

    def __init__(self) -> None:
        self.url = ""
        self.health: tuple[int, str] = (200, "")
        self.headers: dict[str, str] = {}  # of its answer
        self.frozen = False  # the engine: requests hang, numbers stay, health stays green
        self.mute = False  # the whole process: connections are taken and nothing is answered
        self.refuses: tuple[int, str] | None = None  # what a completion gets instead of a token
        self.text: Any = "a"
        self.asked = 0
        self.extra = ""
        self.ranks: dict[str, dict[str, float]] = {
            "0": {"num_requests_running": 0, "num_requests_waiting": 0, "generation_tokens_total": 100, "prompt_tokens_total": 50,
                  "kv_cache_usage_perc": 0.1},
        }  # fmt: skip
        self._runner: web.AppRunner | None = None
        self._port = 0

    def step(self, tokens: int = 1, rank: str = "0") -> None:
        self.ranks[rank]["generation_tokens_total"] += tokens

    def running(self, count: int, rank: str = "0") -> None:
        self.ranks[rank]["num_requests_running"] = count

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        assert site._server and isinstance(site._server, asyncio.Server)
        self._port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def close(self) -> None:
        """From here on the port refuses."""
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    @property
    def port(self) -> int:
        return self._port

    async def _health(self, _: web.Request) -> web.Response:
        await self._maybe_hang(self.mute)
        return web.Response(status=self.health[0], text=self.health[1], headers=self.headers)

    async def _metrics(self, _: web.Request) -> web.Response:
        await self._maybe_hang(self.mute)
        lines = [
            f'vllm:{name}{{engine="{rank}",model_name="m"}} {value}'
            for rank, seen in self.ranks.items()
            for name, value in seen.items()
        ]
        return web.Response(text="\n".join([*lines, self.extra, ""]))

    async def _models(self, _: web.Request) -> web.Response:
        await self._maybe_hang(self.mute)
        return web.json_response({"data": [{"id": "m"}]})

    async def _completions(self, request: web.Request) -> web.Response:
        self.asked += 1
        await self._maybe_hang(self.mute or self.frozen)
        if self.refuses:
            return web.json_response({"error": {"message": self.refuses[1]}}, status=self.refuses[0])
        self.step()
        choice = {"index": 0, "text": self.text, "finish_reason": "length"}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 1}})

    async def _maybe_hang(self, hangs: bool) -> None:
        if hangs:
            await asyncio.sleep(3600)


class StandInDynamoWorker(StandInVllm):
    """The system server of a Dynamo worker: the same paths, Dynamo's families, an instance id."""

    def __init__(self, hexid: str) -> None:
        super().__init__()
        self.hexid = hexid
        self.in_flight = 0
        self.ranks = {}
        self.health = (503, '{"status":"notready","endpoints":{"generate":"ready"}}')  # a bare worker, measured

    async def _metrics(self, request: web.Request) -> web.Response:
        labels = f'dynamo_component="backend",dynamo_endpoint="{{}}",dynamo_namespace="dynamo",worker_id="{self.hexid}"'
        own, other = labels.format("generate"), labels.format("worker_kv_query_source_1")
        self.extra = (
            f"dynamo_component_inflight_requests{{{own}}} {self.in_flight}\ndynamo_component_inflight_requests{{{other}}} 7\n"
            f"dynamo_component_requests_total{{{own}}} 8\ndynamo_component_response_bytes_total{{{own}}} 194366"
        )
        return await super()._metrics(request)


class StandInFrontend(StandInVllm):
    """A Dynamo frontend over a folder of file discovery: a request pinned to a worker that is not registered gets a 400."""

    def __init__(self, kv: Path) -> None:
        super().__init__()
        self.kv = kv
        self.answers_as: int | None = None  # another worker than the one asked

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        pinned = body["nvext"]["backend_instance_id"]
        if not list((self.kv / "v1" / "instances").glob(f"*generate*{pinned:x}")):
            return web.json_response({"message": "Invalid request", "type": "Bad Request", "code": 400}, status=400)
        self.asked += 1
        await self._maybe_hang(self.frozen)
        if self.refuses:
            return web.json_response({"message": self.refuses[1]}, status=self.refuses[0])
        who = self.answers_as or pinned
        choice = {"index": 0, "text": " w1", "finish_reason": "length"}
        nvext = {"worker_id": {"prefill_worker_id": who, "decode_worker_id": who}}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 1}, "nvext": nvext})


@asynccontextmanager
async def standing(*servers: StandInVllm) -> AsyncIterator[None]:
    """Start them, and close them again whatever happens."""
    try:
        for server in servers:
            await server.start()
        yield
    finally:
        for server in servers:
            await server.close()


class RecordingHands:
    """Stands in for the agents' hands: says what was asked, and answers as told."""

    def __init__(self, *, ok: bool = True, refused: bool = False) -> None:
        self.asked: list[tuple[str, str, dict[str, str], str]] = []
        self._ok, self._refused = ok, refused

    async def run(self, node: str, action: str, args: dict[str, str], *, key: str, why: str, deadline_s: float) -> CommandResult:
        self.asked.append((node, action, args, key))
        return CommandResult(id=key, node=node, ok=self._ok, refused=self._refused)


class MemoryKeep:
    """Stands in for the store; ``fails`` makes writes fail."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.fails: Exception | None = None

    async def put(self, key: str, value: bytes) -> None:
        if self.fails:
            raise self.fails
        self.held[key] = value

    async def get(self, key: str) -> bytes | None:
        return self.held.get(key)

    async def drop(self, key: str) -> None:
        self.held.pop(key, None)

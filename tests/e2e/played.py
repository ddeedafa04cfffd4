"""The world outside the controllers, played on one port: a webhook receiver for pages, and plain vLLM workers.

Whoever uses it says how a worker stands (``running``); a worker that is not alive answers with 503.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from aiohttp import web

_METRICS = (
    'vllm:num_requests_running{{engine="0",model_name="m"}} {}\n'
    'vllm:num_requests_waiting{{engine="0",model_name="m"}} 0\nvllm:generation_tokens_total{{engine="0",model_name="m"}} 5\n'
)


class Played(ABC):
    """``status`` is what the receiver answers; ``accepted`` are the pages that it took with 200, ``refused`` counts the others."""

    def __init__(self) -> None:
        self.status = 200
        self.accepted: list[dict[str, Any]] = []
        self.refused = 0
        self.url = ""
        self._runner: web.AppRunner | None = None

    @abstractmethod
    def running(self, worker: str) -> int | None:
        """Requests that this worker has in flight; None: it is not alive."""

    async def serve(self) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.post("/page", self._page), web.get("/{worker}/health", self._health),
                web.get("/{worker}/metrics", self._metrics), web.get("/{worker}/v1/models", self._models),
                web.post("/{worker}/v1/completions", self._complete),
            ]
        )  # fmt: skip
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def unserve(self) -> None:
        if self._runner:
            await self._runner.cleanup()

    async def _page(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.status == 200:
            self.accepted.append(body)
        else:
            self.refused += 1
        return web.Response(status=self.status)

    def _of(self, request: web.Request) -> int | None:
        return self.running(request.match_info["worker"])

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self._of(request) is None else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        running = self._of(request)
        return web.Response(status=503) if running is None else web.Response(text=_METRICS.format(running))

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        if self._of(request) is None:
            return web.Response(status=503)
        return web.json_response({"choices": [{"text": "x", "finish_reason": "length"}], "usage": {"completion_tokens": 1}})

"""A gateway with real workers in one process: what the gateway's tests share.

The workers are small HTTP servers on the loopback that do what a test tells them; the gateway is the real one with the guards of a
gateway alone, so that no store is needed. ``held`` says what it has not given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from sentinel.durations import Duration
from sentinel.gateway.admission import LeaseAdmission
from sentinel.gateway.alone import AloneAdmission, AloneBreakers, BreakerRules, Limits
from sentinel.gateway.desk import Desk, Follows
from sentinel.gateway.server import Gateway
from sentinel.gateway.sessions import Holders
from sentinel.model import Fleet, Pool, Role, RouteEntry, RoutePool, Routes, Worker, WorkerState
from sentinel.settings import GatewaySettings

MODEL = "m"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Stand:
    """One worker. ``requests``: what it got (headers, body); ``gone``: requests whose client left before the end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: list[tuple[Mapping[str, str], bytes]] = []
        self.gone = 0
        self.status = 200
        self.events = 5
        self.pause_s = 0.01
        self.freeze_after: int | None = None  # events, then silence
        self.cut_after: int | None = None  # events, then the connection ends
        self.handler: Handler | None = None
        self.thawed = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.port = int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        self.thawed.set()
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((request.headers, body))
        try:
            if self.handler:
                return await self.handler(request)
            return await self._answer(request, json.loads(body))
        except (asyncio.CancelledError, ConnectionError):
            self.gone += 1
            raise

    async def _answer(self, request: web.Request, ask: dict[str, Any]) -> web.StreamResponse:
        if self.status != 200:
            return web.json_response({"error": {"message": f"{self.name} says {self.status}"}}, status=self.status)
        if self.freeze_after == 0:
            await self.thawed.wait()
        if not ask.get("stream"):
            text = "embedding" if request.path.endswith("embeddings") else "hello"
            return web.json_response(reply(text, self.name))
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await out.prepare(request)
        for number in range(self.events):
            if number == self.freeze_after:
                await self.thawed.wait()
            if number == self.cut_after:
                assert request.transport
                request.transport.abort()
                return out
            await out.write(f"data: {json.dumps(piece(f'word{number} ', self.name))}\n\n".encode())
            await asyncio.sleep(self.pause_s)
        await out.write(b"data: [DONE]\n\n")
        return out


def reply(text: str, by: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "id": f"chatcmpl-{by}", "object": "chat.completion", "created": 1, "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }  # fmt: skip


def piece(text: str, by: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{by}", "object": "chat.completion.chunk", "created": 1, "model": MODEL,
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}],
    }  # fmt: skip


class Site:
    """One gateway in front of ``stands``. Use as a context; what is not set stands at its default, but for shorter times."""

    def __init__(
        self,
        *names: str,
        keys: Path | None = None,
        limits: Limits = Limits(),  # noqa: B008
        beside: Site | None = None,
        breakers: Follows | None = None,
        admission: LeaseAdmission | None = None,
        holders: Holders | None = None,
        **settings: Any,
    ) -> None:
        """``beside``: another gateway, whose workers this one shares. ``breakers``, ``admission``, ``holders``: shared ones, which
        whoever made them starts and stops."""
        self.beside, self._holders = beside, holders
        self.stands = beside.stands if beside else {name: Stand(name) for name in names}
        times = {"first_byte": Duration(5.0), "answer": Duration(5.0), "stall": Duration(5.0), "drain": Duration(2.0)}
        self.settings = GatewaySettings(listen="127.0.0.1:0", admin="127.0.0.1:0", keys=keys, **{**times, **settings})
        self.admission = admission or AloneAdmission(limits)
        self.breakers = breakers or AloneBreakers(BreakerRules(volume=1000))
        self.gateway: Gateway
        self.http: aiohttp.ClientSession

    async def __aenter__(self) -> Site:
        for stand in () if self.beside else self.stands.values():
            await stand.start()
        workers = tuple(Worker(name=s.name, pool="p", url=s.url) for s in self.stands.values())
        fleet = Fleet(pools=(Pool(name="p", model=MODEL),), workers=workers)
        desk = Desk(self.settings, fleet, breakers=self.breakers, admission=self.admission, holders=self._holders)
        self.gateway = Gateway(desk)
        self.route()
        await self.gateway.start()
        self.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()
        await self.gateway.stop()
        for stand in () if self.beside else self.stands.values():
            await stand.stop()

    def route(self, version: int = 1, **states: WorkerState) -> None:
        """Publish a table in which each worker is ACTIVE but for ``states``."""
        entries = tuple(
            RouteEntry(worker=s.name, url=s.url, role=Role.BOTH, state=states.get(s.name, WorkerState.ACTIVE))
            for s in self.stands.values()
        )
        self.gateway.obey(Routes(version=version, pools=(RoutePool(pool="p", weight=1.0, workers=entries),)))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    @property
    def held(self) -> tuple[int, int]:
        """Slots, and requests in flight, that were not given back."""
        return self.admission.held, self.gateway.active

    async def free(self) -> None:
        """Wait until everything was given back."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                while self.held != (0, 0):
                    await asyncio.sleep(0.01)
        assert self.held == (0, 0)

    def post(self, path: str = "/v1/chat/completions", *, content: str = "hi", headers: Any = None, **more: Any) -> Any:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}
        return self.http.post(self.url + path, json=body, headers=headers)

    async def metrics(self) -> dict[str, float]:
        """The samples of /metrics by their text."""
        async with self.http.get(f"http://127.0.0.1:{self.gateway.admin_port}/metrics") as answer:
            lines = [line for line in (await answer.text()).splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    async def raw(self, request: bytes) -> bytes:
        """What a bare connection gets back until it is closed or says nothing for a second."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.gateway.port)
        writer.write(request)
        got = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while part := await asyncio.wait_for(reader.read(65536), 1.0):
                got += part
        writer.close()
        return got

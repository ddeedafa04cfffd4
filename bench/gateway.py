"""What the gateway costs and adds, beside a naive aiohttp proxy in the same run.

The gateway under test runs alone on core 0 (uvloop, API keys, breakers and admission of a gateway alone, routing over four
workers, metrics); stand-in workers and the load run on core 1, as bare protocols, so that they are not what is measured. ``bare``
passes bytes from socket to socket and looks at nothing: what this machine makes any Python proxy pay. Three things:

* short: closed loop on 32 connections, answers of 400 bytes; requests per second of wall time, and of the proxy's own CPU
* streams: 200 streams of 50 chunks a second; CPU seconds of the proxy per 1,000 chunks
* first: time to the first chunk of a further stream on a kept connection, while those 200 run, less what the worker itself took,
  through each proxy and directly; what is added is the difference of the medians and of the 99th percentiles

Medians of three rounds, the proxies in turn within each round; the last line is one JSON object. ``--quick``: one short round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

WORKERS = 4
MODEL = "bench"
TEXT = "x" * 180
ANSWER = json.dumps({"id": "c1", "object": "chat.completion", "model": MODEL, "choices": [{"message": {"content": TEXT}}]}).encode()
CHUNK = json.dumps({"id": "cmpl-1", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "token"}}]})
PAGE = os.sysconf("SC_PAGE_SIZE")
TICK = os.sysconf("SC_CLK_TCK")
CORES = sorted(os.sched_getaffinity(0))


def event(text: str) -> bytes:
    body = f"data: {text}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(body), body)


# -- stand-in workers -----------------------------------------------------------------------------------------------------


class Worker(asyncio.Protocol):
    """Answers a request at once, or with a stream: the body says ``"chunks": N, "every": seconds``."""

    def __init__(self) -> None:
        self.held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.held += data
        while (end := self.held.find(b"\r\n\r\n")) >= 0:
            head = self.held[:end].lower()
            at = head.index(b"content-length:") + 15
            size = int(head[at : head.find(b"\r\n", at) if head.find(b"\r\n", at) > 0 else None])
            if len(self.held) < end + 4 + size:
                return
            body, self.held = self.held[end + 4 : end + 4 + size], self.held[end + 4 + size :]
            if b'"stream": true' in body:
                asyncio.get_running_loop().call_soon(self.stream, json.loads(body), time.monotonic())
            else:
                self.transport.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
                )

    def stream(self, ask: dict[str, float], came: float) -> None:
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        self.left, self.every = int(ask["chunks"]), float(ask["every"])
        self.at = asyncio.get_running_loop().time()
        self.transport.write(event(json.dumps({"held": time.monotonic() - came})))
        self.tell()

    def tell(self) -> None:
        if self.transport.is_closing():
            return
        if self.left <= 0:
            self.transport.write(event("[DONE]") + b"0\r\n\r\n")
            return
        self.left -= 1
        self.at += self.every
        asyncio.get_running_loop().call_at(self.at, self.one)

    def one(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(event(CHUNK))
            self.tell()


async def workers() -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Worker, "127.0.0.1", 0, backlog=1024) for _ in range(WORKERS)]
    print(json.dumps([s.sockets[0].getsockname()[1] for s in servers]), flush=True)
    await asyncio.Event().wait()


# -- the proxies ----------------------------------------------------------------------------------------------------------


async def naive(ports: list[int]) -> None:
    import aiohttp  # noqa: PLC0415
    from aiohttp import web  # noqa: PLC0415

    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))
    turn = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal turn
        turn += 1
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length")}
        url = f"http://127.0.0.1:{ports[turn % len(ports)]}{request.path_qs}"
        async with session.request(request.method, url, headers=headers, data=body) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in ("transfer-encoding", "connection")}
            out = web.StreamResponse(status=answer.status, headers=kept)
            await out.prepare(request)
            async for part in answer.content.iter_any():
                await out.write(part)
            await out.write_eof()
            return out

    app = web.Application(client_max_size=1 << 25)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(json.dumps([runner.addresses[0][1]]), flush=True)
    await asyncio.Event().wait()


async def ours(ports: list[int], keys: Path) -> None:
    from sentinel import logs  # noqa: PLC0415
    from sentinel.gateway.alone import AloneAdmission, AloneBreakers, Limits  # noqa: PLC0415
    from sentinel.gateway.desk import Desk  # noqa: PLC0415
    from sentinel.gateway.server import Gateway  # noqa: PLC0415
    from sentinel.heap import settle  # noqa: PLC0415
    from sentinel.model import Fleet, Pool, Role, RouteEntry, RoutePool, Routes, Worker, WorkerState  # noqa: PLC0415
    from sentinel.settings import GatewaySettings  # noqa: PLC0415

    logs.configure("json", "warning")
    urls = {f"w{n}": f"http://127.0.0.1:{port}" for n, port in enumerate(ports)}
    fleet = Fleet(pools=(Pool(name="p", model=MODEL),), workers=tuple(Worker(name=w, pool="p", url=u) for w, u in urls.items()))
    entries = tuple(RouteEntry(worker=w, url=u, role=Role.BOTH, state=WorkerState.ACTIVE) for w, u in urls.items())
    settings = GatewaySettings(listen="127.0.0.1:0", admin="127.0.0.1:0", keys=keys)
    limits = AloneAdmission(Limits(pool=5000, worker=2000, tenant=5000))
    gateway = Gateway(Desk(settings, fleet, breakers=AloneBreakers(), admission=limits))
    gateway.obey(Routes(version=1, pools=(RoutePool(pool="p", weight=1.0, workers=entries),)))
    await gateway.start()
    settle()
    print(json.dumps([gateway.port]), flush=True)
    await gateway.wait()


class BareUp(asyncio.Protocol):
    def __init__(self, down: asyncio.Transport) -> None:
        self.down = down

    def data_received(self, data: bytes) -> None:
        self.down.write(data)


class BareDown(asyncio.Protocol):
    """One connection of a client, with one to a worker behind it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.up: asyncio.Task[asyncio.Transport] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.up = asyncio.get_running_loop().create_task(self.dial())

    async def dial(self) -> asyncio.Transport:
        made, _ = await asyncio.get_running_loop().create_connection(lambda: BareUp(self.transport), "127.0.0.1", self.port)
        return made

    def data_received(self, data: bytes) -> None:
        assert self.up
        if self.up.done():
            self.up.result().write(data)
        else:
            self.up.add_done_callback(lambda up: up.result().write(data))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.up and self.up.done() and not self.up.cancelled():
            self.up.result().abort()


async def bare(ports: list[int]) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: BareDown(ports[0]), "127.0.0.1", 0, backlog=1024)
    print(json.dumps([server.sockets[0].getsockname()[1]]), flush=True)
    await asyncio.Event().wait()


# -- the load -------------------------------------------------------------------------------------------------------------


def ask(number: int, **more: object) -> bytes:
    body = json.dumps({
        "model": MODEL, "messages": [{"role": "system", "content": "You help."}, {"role": "user", "content": f"question {number}"}],
        "temperature": 0.2, **more,
    }).encode()  # fmt: skip
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer bench-key\r\n"
        b"content-type: application/json\r\nuser-agent: bench\r\naccept: */*\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )


class Short(asyncio.Protocol):
    """One connection of the closed loop."""

    def __init__(self, requests: list[bytes]) -> None:
        self.requests, self.done, self.on, self.held = requests, 0, True, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.transport.write(self.requests[0])

    def data_received(self, data: bytes) -> None:
        if not self.held:
            assert data.startswith(b"HTTP/1.1 200"), data[:300]
        if data.endswith((ANSWER[-40:], b"0\r\n\r\n")):
            self.held = 0
            self.done += 1
            if self.on:
                self.transport.write(self.requests[self.done % len(self.requests)])
        else:
            self.held += len(data)


class Stream(asyncio.Protocol):
    """One connection with one stream; counts pieces."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.pieces, self.first, self.held = 0, 0.0, 0.0
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        if self.request:
            self.began = time.monotonic()
            self.transport.write(self.request)

    def again(self, request: bytes) -> None:
        """One more stream on this connection."""
        self.first, self.held = 0.0, 0.0
        self.ended = asyncio.get_running_loop().create_future()
        self.began = time.monotonic()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        if not self.first and b'"held"' in data:
            self.first = time.monotonic() - self.began
            at = data.index(b'"held": ') + 8
            self.held = float(data[at : data.index(b"}", at)])
        self.pieces += data.count(b"data: ")
        if data.endswith(b"0\r\n\r\n") and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done() and self.request:
            self.ended.set_exception(exc or ConnectionResetError("ended early"))


def cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def memory(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]) * PAGE


async def short(port: int, pid: int, seconds: float) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    made = []
    for n in range(32):
        requests = [ask(n * 50 + k) for k in range(50)]
        made.append((await loop.create_connection(lambda r=requests: Short(r), "127.0.0.1", port))[1])
    await asyncio.sleep(0.3)
    before, used, began = sum(p.done for p in made), cpu(pid), time.monotonic()
    await asyncio.sleep(seconds)
    count, spent, took = sum(p.done for p in made) - before, cpu(pid) - used, time.monotonic() - began
    for p in made:
        p.on = False
    await asyncio.sleep(0.1)
    for p in made:
        p.transport.abort()
    return {"per_s": count / took, "per_cpu_s": count / max(spent, 1e-9), "busy": spent / took}


async def firsts(port: int, count: int) -> list[float]:
    """Milliseconds to the first piece of new streams on one kept connection, one after the other, less what the worker held it."""
    loop = asyncio.get_running_loop()
    made, probe = await loop.create_connection(lambda: Stream(b""), "127.0.0.1", port)
    took = []
    for n in range(count + 1):
        probe.again(ask(100_000 + n, stream=True, chunks=1, every=0.001))
        await probe.ended
        took.append((probe.first - probe.held) * 1000)
        await asyncio.sleep(0.01)
    made.abort()
    return took[1:]  # the first opened the proxy's own connection


async def streams(port: int, direct: int, pid: int, seconds: float, probes: int) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    rss = memory(pid)
    made = []
    for n in range(200):
        request = ask(n, stream=True, chunks=100_000, every=0.02)
        made.append((await loop.create_connection(lambda r=request: Stream(r), "127.0.0.1", port))[1])
        await asyncio.sleep(0.0001)
    await asyncio.sleep(1.0)
    before, used, began = sum(p.pieces for p in made), cpu(pid), time.monotonic()
    await asyncio.sleep(seconds)
    count, spent, took = sum(p.pieces for p in made) - before, cpu(pid) - used, time.monotonic() - began
    grown = memory(pid) - rss
    through, straight = [], []
    for _ in range(probes // 25):
        through += await firsts(port, 25)
        straight += await firsts(direct, 25)
    for p in made:
        p.ended.cancel()
        p.transport.abort()
    await asyncio.sleep(0.3)
    return {
        "cpu_per_1000": spent / count * 1000, "chunks_per_s": count / took, "busy": spent / took,
        "first_p50_ms": statistics.median(through), "first_p99_ms": sorted(through)[int(len(through) * 0.99)],
        "direct_p50_ms": statistics.median(straight), "direct_p99_ms": sorted(straight)[int(len(straight) * 0.99)],
        "mib_per_1000_streams": grown / 200 * 1000 / 2**20,
    }  # fmt: skip


# -- the run --------------------------------------------------------------------------------------------------------------


class Child:
    def __init__(self, role: str, core: int, *arguments: str) -> None:
        argv = [sys.executable, __file__, "--role", role, *arguments]
        errors = None if os.environ.get("BENCH_STDERR") else subprocess.DEVNULL  # naive tells of each client that leaves
        self.process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=errors, preexec_fn=lambda: pin(core)  # noqa: PLW1509
        )
        assert self.process.stdout
        self.ports: list[int] = json.loads(self.process.stdout.readline())

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def pin(core: int) -> None:
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {CORES[core % len(CORES)]})


async def rounds(count: int, short_s: float, stream_s: float, probes: int) -> dict[str, object]:
    from sentinel.tokens import digest  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(f"bench {digest('bench-key')}\n", "utf-8")
        behind = Child("workers", 1)
        try:
            told = json.dumps(behind.ports)
            starts: dict[str, Callable[[], Child]] = {
                "naive": lambda: Child("naive", 0, told), "ours": lambda: Child("ours", 0, told, str(keys)),
                "bare": lambda: Child("bare", 0, told),
            }  # fmt: skip
            seen: dict[str, list[dict[str, float]]] = {name: [] for name in starts}
            for number in range(count):
                for name, start in starts.items():
                    child = start()
                    try:
                        one = await short(child.ports[0], child.pid, short_s)
                        many = await streams(child.ports[0], behind.ports[0], child.pid, stream_s, probes)
                    finally:
                        child.end()
                    seen[name].append({f"short_{k}": v for k, v in one.items()} | {f"streams_{k}": v for k, v in many.items()})
                    shown = ", ".join(f"{k} {v:.4g}" for k, v in seen[name][-1].items())
                    print(f"round {number + 1}, {name}: {shown}", flush=True)
        finally:
            behind.end()
    middle = {name: {k: statistics.median(r[k] for r in found) for k in found[0]} for name, found in seen.items()}
    mine, theirs = middle["ours"], middle["naive"]
    ratios = [a["short_per_s"] / b["short_per_s"] for a, b in zip(seen["ours"], seen["naive"], strict=True)]
    return {
        "short_ratio": round(statistics.median(ratios), 3),
        "short_ratio_per_cpu": round(mine["short_per_cpu_s"] / theirs["short_per_cpu_s"], 3),
        "cpu_s_per_1000_chunks": round(mine["streams_cpu_per_1000"], 4),
        "naive_cpu_s_per_1000_chunks": round(theirs["streams_cpu_per_1000"], 4),
        "added_first_p50_ms": round(mine["streams_first_p50_ms"] - mine["streams_direct_p50_ms"], 3),
        "added_first_p99_ms": round(mine["streams_first_p99_ms"] - mine["streams_direct_p99_ms"], 3),
        "bare_cpu_s_per_1000_chunks": round(middle["bare"]["streams_cpu_per_1000"], 4),
        "bare_added_first_p50_ms": round(middle["bare"]["streams_first_p50_ms"] - middle["bare"]["streams_direct_p50_ms"], 3),
        "bare_added_first_p99_ms": round(middle["bare"]["streams_first_p99_ms"] - middle["bare"]["streams_direct_p99_ms"], 3),
        "naive_added_first_p50_ms": round(theirs["streams_first_p50_ms"] - theirs["streams_direct_p50_ms"], 3),
        "mib_per_1000_streams": round(mine["streams_mib_per_1000_streams"], 1),
        "medians": {name: {k: round(v, 4) for k, v in found.items()} for name, found in middle.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("rest", nargs="*")
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    if given.role == "workers":
        uvloop.run(workers())
    elif given.role == "naive":
        uvloop.run(naive(json.loads(given.rest[0])))
    elif given.role == "bare":
        uvloop.run(bare(json.loads(given.rest[0])))
    elif given.role == "ours":
        uvloop.run(ours(json.loads(given.rest[0]), Path(given.rest[1])))
    else:
        pin(1)
        wanted = (1, 3.0, 4.0, 100) if given.quick else (3, 5.0, 8.0, 300)
        print(json.dumps(uvloop.run(rounds(*wanted))))


if __name__ == "__main__":
    main()

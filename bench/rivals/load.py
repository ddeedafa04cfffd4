"""The load of bench/gateway.py and what it measures of one proxy, from outside.

Bare protocols again: a closed loop of short requests, streams that count their pieces, and a probe that measures the time to a
stream's first piece less what the worker itself took. CPU and memory are those of every process of the proxy (its session).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Callable

from rivals.process import Process
from rivals.worker import MODEL

CONNECTIONS, STREAMS, EVERY_S = 32, 200, 0.02
PROBES_S = 30.0  # how long the probes of one proxy may take in all: a saturated one answers a few only
PROBE_S = 10.0  # after which a probe counts as that


def ask(number: int, **more: object) -> bytes:
    body = json.dumps({
        "model": MODEL, "messages": [{"role": "system", "content": "You help."}, {"role": "user", "content": f"question {number}"}],
        "temperature": 0.2, **more,
    }).encode()  # fmt: skip
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer bench-key\r\n"
        b"content-type: application/json\r\nuser-agent: bench\r\naccept: */*\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )


def missing(answer: bytes) -> int:
    """Bytes until this answer is complete; 1 where it does not say how many."""
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return 1
    assert answer.startswith(b"HTTP/1.1 200"), answer[:400]
    at = answer[:end].lower().find(b"content-length:")
    if at < 0:
        return 0 if answer.endswith(b"0\r\n\r\n") else 1
    return end + 4 + int(answer[at + 15 : end + 2].partition(b"\r\n")[0]) - len(answer)


class Short(asyncio.Protocol):
    """One connection of the closed loop."""

    def __init__(self, requests: list[bytes]) -> None:
        self.requests, self.done, self.on, self.held = requests, 0, True, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.transport.write(self.requests[0])

    def data_received(self, data: bytes) -> None:
        self.held = self.held + data if self.held else data
        if missing(self.held) <= 0:
            self.held = b""
            self.done += 1
            if self.on:
                self.transport.write(self.requests[self.done % len(self.requests)])


class Stream(asyncio.Protocol):
    """One connection with one stream at a time; counts pieces."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.pieces, self.first, self.held = 0, 0.0, 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        if self.request:
            self.again(self.request)

    def again(self, request: bytes) -> None:
        """One more stream on this connection."""
        self.first, self.held = 0.0, 0.0
        self.ended = asyncio.get_running_loop().create_future()
        self.began = time.monotonic()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        if not self.first and (at := data.find(b"held=")) >= 0:
            self.first = time.monotonic() - self.began
            self.held = float(data[at + 5 : data.index(b";", at)])
        self.pieces += data.count(b"data: ")
        if data.endswith(b"0\r\n\r\n") and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done() and self.request:
            self.ended.set_exception(exc or ConnectionResetError("ended early"))


async def once(port: int) -> bool:
    """Whether one short request is answered with 200."""
    try:
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ask(0).replace(b"\r\nuser-agent", b"\r\nconnection: close\r\nuser-agent"))
            answer = await reader.read(65536)
            writer.transport.abort()
            return answer.startswith(b"HTTP/1.1 200")
    except (OSError, TimeoutError):
        return False


async def short(port: int, proxy: Process, seconds: float) -> dict[str, float]:
    """Closed loop: requests per second of wall time and of the proxy's own CPU."""
    loop = asyncio.get_running_loop()
    made = []
    for n in range(CONNECTIONS):
        requests = [ask(n * 50 + k) for k in range(50)]
        made.append((await loop.create_connection(lambda r=requests: Short(r), "127.0.0.1", port))[1])
    await asyncio.sleep(min(1.0, seconds / 3))
    before, used, began = sum(p.done for p in made), proxy.cpu(), time.monotonic()
    await asyncio.sleep(seconds)
    count, spent, took = sum(p.done for p in made) - before, proxy.cpu() - used, time.monotonic() - began
    for p in made:
        p.on = False
    await asyncio.sleep(0.1)
    for p in made:
        p.transport.abort()
    return {"per_s": count / took, "per_cpu_s": count / max(spent, 0.01), "busy": spent / took}


async def firsts(port: int, count: int, until: float) -> list[float]:
    """Milliseconds to the first piece of new streams on one kept connection, one after the other, less what the worker held it."""
    loop = asyncio.get_running_loop()
    _, probe = await loop.create_connection(lambda: Stream(b""), "127.0.0.1", port)
    took = []
    for n in range(count + 1):
        if time.monotonic() > until:
            break
        probe.again(ask(100_000 + n, stream=True, chunks=1, every=0.001))
        try:
            async with asyncio.timeout(PROBE_S):
                await probe.ended
        except TimeoutError:
            took.append(PROBE_S * 1000)
            break
        took.append((probe.first - probe.held) * 1000)
        await asyncio.sleep(0.01)
    probe.transport.abort()
    return took[1:]  # the first opened the proxy's own connection


async def streams(port: int, proxy: Process, direct: int, seconds: float, probes: int) -> dict[str, float]:
    """Streams at their pace; CPU and memory of the proxy, and the time to first piece of further ones, through it and directly."""
    loop = asyncio.get_running_loop()
    rss = proxy.memory()
    made = []
    for n in range(STREAMS):
        request = ask(n, stream=True, chunks=100_000, every=EVERY_S)
        made.append((await loop.create_connection(lambda r=request: Stream(r), "127.0.0.1", port))[1])
        await asyncio.sleep(EVERY_S / STREAMS)
    await asyncio.sleep(1.0)
    before, used, began = sum(p.pieces for p in made), proxy.cpu(), time.monotonic()
    await asyncio.sleep(seconds)
    count, spent, took = sum(p.pieces for p in made) - before, proxy.cpu() - used, time.monotonic() - began
    grown = proxy.memory() - rss
    through: list[float] = []
    straight: list[float] = []
    until = time.monotonic() + PROBES_S
    for _ in range(probes // 25):  # in turns, so that both meet the same moments of the machine
        through += await firsts(port, 25, until)
        straight += await firsts(direct, 25, until + 5)
    for p in made:
        p.ended.cancel()
        p.transport.abort()
    await asyncio.sleep(0.3)
    through, straight = sorted(through) or [float("inf")], sorted(straight) or [0.0]
    return {
        "cpu_per_1000": spent / max(count, 1) * 1000, "chunks_per_s": count / took, "busy": spent / took,
        "first_p50_ms": statistics.median(through), "first_p99_ms": through[int(len(through) * 0.99)],
        "direct_p50_ms": statistics.median(straight), "direct_p99_ms": straight[int(len(straight) * 0.99)],
        "probes": float(len(through)), "mib_per_1000_streams": grown / STREAMS * 1000 / 2**20,
    }  # fmt: skip


async def ready(port: int, seconds: float, alive: Callable[[], bool]) -> bool:
    """Whether the proxy answers within so many seconds; False at once when it has ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and alive():
        with contextlib.suppress(AssertionError):
            if await once(port):
                return True
        await asyncio.sleep(0.1)
    return False

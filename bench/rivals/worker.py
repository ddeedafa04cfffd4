"""Stand-in workers: HTTP/1.1 as bare protocols, so that they are not what is measured.

A POST is answered at once, or with a stream where the body says ``"stream": true, "chunks": N, "every": seconds``. The first event
of a stream tells how long the worker itself held it, inside the text of the answer, so that a proxy that writes answers anew
keeps it. GETs are what routers ask before they trust a worker: /health, /v1/models. Simulated: no engine, no tokens.
Run as a script it serves ``WORKERS`` of them and prints their ports as a JSON list.
"""

from __future__ import annotations

import asyncio
import json
import time

import uvloop

WORKERS = 4
MODEL = "bench"
TEXT = "x" * 180
_MESSAGE = {"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}
_USAGE = {"prompt_tokens": 20, "completion_tokens": 20, "total_tokens": 40}
ANSWER = json.dumps(
    {"id": "c1", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [_MESSAGE], "usage": _USAGE}
).encode()
MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "bench"}]}).encode()


def event(text: str) -> bytes:
    body = f"data: {text}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(body), body)


def piece(text: str) -> bytes:
    """One chunk of a stream, as large as vLLM writes them."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return event(
        json.dumps({"id": "cmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]})
    )


CHUNK = piece("token")


def answer(status: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


class Worker(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self.held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.held += data
        while (end := self.held.find(b"\r\n\r\n")) >= 0:
            head = self.held[:end].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].partition(b"\r\n")[0]) if at >= 0 else 0
            if len(self.held) < end + 4 + size:
                return
            body, self.held = self.held[end + 4 : end + 4 + size], self.held[end + 4 + size :]
            if not head.startswith(b"post"):
                self.look(head.split(b" ", 2)[1])
            elif b'"stream": true' in body or b'"stream":true' in body:
                asyncio.get_running_loop().call_soon(self.stream, json.loads(body), time.monotonic())
            else:
                self.transport.write(answer(b"200 OK", ANSWER))

    def look(self, path: bytes) -> None:
        if path.startswith(b"/v1/models"):
            self.transport.write(answer(b"200 OK", MODELS))
        else:
            self.transport.write(answer(b"200 OK", b"{}") if path == b"/health" else answer(b"404 Not Found", b"{}"))

    def stream(self, ask: dict[str, float], came: float) -> None:
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        self.left, self.every = int(ask["chunks"]), float(ask["every"])
        self.at = asyncio.get_running_loop().time()
        self.transport.write(piece(f"held={time.monotonic() - came:.6f};"))
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
            self.transport.write(CHUNK)
            self.tell()


async def serve() -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Worker, "127.0.0.1", 0, backlog=1024) for _ in range(WORKERS)]
    print(json.dumps([s.sockets[0].getsockname()[1] for s in servers]), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve())

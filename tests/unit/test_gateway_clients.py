"""Clients that read late, or never: what a connection may cost, what it is owed, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import web

from sentinel.durations import Duration
from sentinel.gateway.front import Client
from tests.gateway_site import MODEL, Site

MODELS = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
ASK = b'{"model": "m", "messages": []}'
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n%b"
BOTH = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
SMALL = 4096  # bytes that a kernel takes along, where a test wants them to be few


def on_both_loops(test: Callable[[], Awaitable[None]]) -> Any:
    """asyncio's own, and uvloop's, which the daemon runs on where there is one: their transports are two."""

    @BOTH
    def run(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        async def awaited() -> None:
            await test()

        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(awaited())

    run.__doc__ = test.__doc__
    return run


@contextlib.asynccontextmanager
async def bare(site: Site, tls: ssl.SSLContext | None = None) -> AsyncIterator[socket.socket]:
    """A connection on which little is under way: neither kernel holds much of what is not read. With TLS it blocks."""
    before = len(clients(site))
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", site.gateway.port))
        if tls is not None:
            sock.setblocking(True)
            sock = stack.enter_context(await asyncio.to_thread(tls.wrap_socket, sock))
        while len(clients(site)) == before:
            await asyncio.sleep(0)
        own = socket.socket(fileno=os.dup(clients(site)[-1].out.get_extra_info("socket").fileno()))
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
        own.close()
        yield sock


def clients(site: Site) -> list[Client]:
    assert site.gateway._front is not None
    return site.gateway._front.clients


async def until_nobody_is_connected(site: Site) -> None:
    async with asyncio.timeout(10):
        while clients(site):
            await asyncio.sleep(0.02)


async def send(sock: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, data)


async def read_on(sock: socket.socket, slowly: int = 0) -> bytes:
    """Everything until the end. ``slowly``: how many times a little is read, and then nothing for a while."""
    got, loop = bytearray(), asyncio.get_running_loop()
    while part := await loop.sock_recv(sock, SMALL if slowly > 0 else 65536):
        got += part
        if slowly > 0:
            await asyncio.sleep(0.3)
        slowly -= 1
    return bytes(got)


async def long(_: web.Request) -> web.Response:
    return web.json_response({"id": "x" * 60_000})


@on_both_loops
async def test_a_client_that_asks_and_never_reads_costs_no_memory() -> None:
    """However much it pipelines, no more than a buffer's worth of answers waits for it, and it is let go in the end."""
    async with Site("a", stall=Duration(0.5)) as site, bare(site) as sock:
        most = 0
        asking = asyncio.create_task(send(sock, MODELS * 100_000))
        async with asyncio.timeout(20):
            while clients(site):
                most = max(most, *(c.transport.get_write_buffer_size() for c in clients(site) if c.transport is not None), 0)
                assert most < 200_000
                await asyncio.sleep(0.005)
        await asyncio.gather(asking, return_exceptions=True)
        assert most


@on_both_loops
async def test_what_is_no_request_is_no_way_round() -> None:
    """Nonsense behind answers that are not taken is answered in its turn, and waits for no longer."""
    async with Site("a", stall=Duration(0.5)) as site, bare(site) as sock:
        site.stands["a"].handler = long
        await send(sock, (POST % (len(ASK), b"", ASK)) * 2)
        while not clients(site)[0].writing_paused:
            await asyncio.sleep(0.01)
        await send(sock, b"nonsense\r\n\r\n")
        while not site.gateway.desk.meters.errors[400]:
            await asyncio.sleep(0.01)
        await until_nobody_is_connected(site)


@on_both_loops
async def test_a_client_that_reads_late_and_slowly_gets_everything() -> None:
    """Every answer, in order, though for a while it took next to nothing; what counts is that it took something."""
    async with Site("a", stall=Duration(0.9)) as site, bare(site) as sock:
        asking = asyncio.create_task(send(sock, MODELS * 3000 + b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
        await asyncio.sleep(0.5)
        got = await read_on(sock, slowly=10)
        await asking
        assert got.count(b"HTTP/1.1 200 OK") == got.count(MODEL.encode() + b'","object":"model"') == 3001


@on_both_loops
async def test_who_never_takes_the_last_bytes_is_let_go() -> None:
    """A connection that has been closed here ends though its client takes nothing more of it; one that takes it slowly gets it."""
    async with Site("a", stall=Duration(0.5)) as site:
        site.stands["a"].handler = long
        async with bare(site) as sock:
            await send(sock, POST % (len(ASK), b"Connection: close\r\n", ASK))
            await until_nobody_is_connected(site)
            assert not (await read_on(sock)).endswith(b'x"}')
        async with bare(site) as sock:
            await send(sock, POST % (len(ASK), b"Connection: close\r\n", ASK))
            assert (await read_on(sock, slowly=8)).endswith(b'x"}')


@on_both_loops
async def test_a_stop_waits_for_nobody_who_takes_nothing() -> None:
    """Neither for one that has its whole answer to take, nor for one that asks on and on; a stop takes a second or two, not the
    whole time that answers may go on."""
    async with Site("a", stall=Duration(60.0), drain=Duration(60.0)) as site:
        site.stands["a"].handler = long
        async with bare(site) as closed, bare(site) as asking:
            await send(closed, POST % (len(ASK), b"Connection: close\r\n", ASK))
            sending = asyncio.create_task(send(asking, MODELS * 100_000))
            while not any(client.writing_paused for client in clients(site)):
                await asyncio.sleep(0.01)
            async with asyncio.timeout(20):
                await site.gateway.stop()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


@BOTH
def test_a_stop_waits_for_nobody_who_takes_nothing_over_tls(
    loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path, program: Callable[[str], Path]
) -> None:
    """Nor for one that does not say good-bye, for which TLS would wait for half a minute."""
    cert, key = tmp_path / "cert", tmp_path / "key"
    new = [str(program("openssl")), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*new, "-subj", "/CN=gateway", "-keyout", key, "-out", cert], check=True, capture_output=True)
    anybody = ssl.create_default_context(cafile=cert)
    anybody.check_hostname = False

    async def run() -> None:
        async with Site("a", tls_cert=cert, tls_key=key, stall=Duration(60.0), drain=Duration(60.0)) as site:
            site.stands["a"].handler = long
            async with bare(site, anybody) as sock:
                sock.sendall(POST % (len(ASK), b"Connection: close\r\n", ASK))
                while not site.stands["a"].requests:
                    await asyncio.sleep(0.01)
                async with asyncio.timeout(20):
                    await site.gateway.stop()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


async def test_a_request_that_waits_for_its_turn_is_not_taken_for_none() -> None:
    """From the moment in which it has been read a connection is not idle, so that a stop does not close it unanswered."""
    async with Site("a") as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port)
        while not (clients(site) and clients(site)[0].idle):
            await asyncio.sleep(0)
        (client,) = clients(site)
        client.data_received(MODELS)
        assert not client.idle and client.asks is None
        stopping = asyncio.create_task(site.gateway.stop())
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        await stopping
        writer.close()


async def test_an_answer_that_a_stop_cannot_wait_for_is_503() -> None:
    """Where no byte of it had come yet its client is told so, with the request's id and when to come back, instead of nothing."""
    async with Site("a", drain=Duration(0.2)) as site:
        site.stands["a"].freeze_after = 0
        asking = asyncio.create_task(site.raw(POST % (len(ASK), b"x-request-id: mine\r\n", ASK)))
        while not site.stands["a"].requests:
            await asyncio.sleep(0.01)
        await site.gateway.stop()
        head, _, body = (await asking).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in head and b"x-request-id: mine" in head
        assert b"stopping" in body
        assert site.held == (0, 0)


async def test_the_rest_of_a_refused_body_does_not_reset_the_answer() -> None:
    """A client that still sends when it is refused can read the answer to its end: for a while the rest is read, and dropped."""
    async with Site("a", body_max=1_000_000) as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n" + b"x" * 500_000)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413")
        writer.write(b"x" * 1_500_000)
        await writer.drain()
        assert (await reader.read()).endswith(b"}}")
        writer.close()

"""A Redis that fails over, for tests and benchmarks: two servers, one replicating the other, and three Redis Sentinels.

All five are Debian's redis-server, real processes on ports of this machine, and may be killed, paused and started again. They
are quick to suspect (half a second), which in production they must not be. Nothing here stands in for anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from sentinel.config import StoreSettings
from sentinel.durations import Duration
from sentinel.store import Store, open_store

SERVICE = "fleet"
DOWN_AFTER_MS = 500
FAILOVER_TIMEOUT_MS = 2000  # Sentinels begin no second failover within twice this, nor vote again after a split vote
HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [int(one.getsockname()[1]) for one in sockets]


class RedisPair:
    """``servers`` are ports; the first is the primary at the beginning. ``sentinels`` are ports too."""

    def __init__(self, program: Path, *, sentinels: int = 3, options: tuple[str, ...] = (), query: str = "") -> None:
        """``options`` are added to the command line of every server and Sentinel, ``query`` to the URL."""
        self.directory = Path(tempfile.mkdtemp(prefix="sentinel-"))
        self._program, self._options = program, options
        ports = free_ports(2 + sentinels)
        self.servers, self.sentinels = ports[:2], ports[2:]
        self.url = f"redis+sentinel://{','.join(f'{HOST}:{p}' for p in self.sentinels)}/{SERVICE}{query}"
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    async def start(self) -> None:
        """Return once the replica is in step and every Sentinel knows the replica and the other Sentinels."""
        for port in self.servers:
            self.begin(port)
        await self._in_step()  # before the Sentinels look: they ask a primary for its replicas only every ten seconds
        for port in self.sentinels:
            file = self.directory / f"sentinel-{port}.conf"
            watch = f"{SERVICE} {HOST} {self.servers[0]} {len(self.sentinels) // 2 + 1}"
            file.write_text(
                f"port {port}\nbind {HOST}\nsentinel monitor {watch}\nsentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n"
                f"sentinel failover-timeout {SERVICE} {FAILOVER_TIMEOUT_MS}\n",
                "utf-8",
            )
            self.watch_again(port)
        await self.whole()

    def begin(self, port: int, *, replica: bool | None = None) -> None:
        """Start a server, or start it again with what its append-only file holds; not the first one: as a replica of that."""
        other = self.servers[0] if port == self.servers[1] else self.servers[1]
        follows = port != self.servers[0] if replica is None else replica
        (self.directory / str(port)).mkdir(exist_ok=True)
        argv = ["--port", str(port), "--bind", HOST, "--dir", str(self.directory / str(port)), "--appendonly", "yes", "--save", "",
                "--repl-diskless-sync-delay", "0", *(("--replicaof", HOST, str(other)) if follows else ())]  # fmt: skip
        self._spawn(port, *argv)

    def watch_again(self, port: int) -> None:
        """Start a Sentinel, or start it again with what it knew."""
        self._spawn(port, str(self.directory / f"sentinel-{port}.conf"), "--sentinel")

    async def whole(self) -> None:
        """Wait until a primary has its replica in step and all Sentinels see all of it."""
        async with asyncio.timeout(30):
            while not await self._is_whole():  # noqa: ASYNC110  (processes, not tasks)
                await asyncio.sleep(0.05)

    async def appoint(self, port: int) -> None:
        """Make it the primary as a person in need would: it follows nobody, and every Sentinel is told so."""
        await self.ask(port, "REPLICAOF", "NO", "ONE")
        for sentinel in self.sentinels:
            await self.ask(sentinel, "SENTINEL", "REMOVE", SERVICE)
            await self.ask(sentinel, "SENTINEL", "MONITOR", SERVICE, HOST, port, len(self.sentinels) // 2 + 1)

    async def primary(self) -> int:
        """The port of the server that most Sentinels call the primary."""
        named: list[int] = []
        for port in self.sentinels:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                answer = await self.ask(port, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
                named.append(int(answer[1]))
        return max(set(named), key=named.count)

    async def changed(self, since: int) -> int:
        """Wait until all Sentinels that run name another primary than ``since``, and that one takes writes."""
        async with asyncio.timeout(30):
            while True:
                now = await self.primary()
                if now != since and (await self.ask(now, "ROLE"))[0] == b"master":
                    return now
                await asyncio.sleep(0.02)

    async def ask(self, port: int, *command: str | int) -> Any:
        """One command to one process; bytes as they come."""
        async with Redis(host=HOST, port=port, protocol=2, socket_timeout=1.0) as client:
            return await client.execute_command(*command)  # type: ignore[no-untyped-call]

    def kill(self, port: int) -> None:
        process = self._processes.pop(port)
        process.kill()
        process.wait()

    def pause(self, port: int) -> None:
        os.kill(self._processes[port].pid, signal.SIGSTOP)

    def resume(self, port: int) -> None:
        os.kill(self._processes[port].pid, signal.SIGCONT)

    async def fail_over(self) -> None:
        """``SENTINEL FAILOVER``: asked for until a Sentinel takes it, as a person would."""
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(RedisError, OSError, TimeoutError):
                    await self.ask(self.sentinels[0], "SENTINEL", "FAILOVER", SERVICE)
                    return
                await asyncio.sleep(0.1)

    def runs(self, port: int) -> bool:
        return port in self._processes

    async def open(self, timeout_s: float = 1.0) -> Store:
        """One more store on it, as another process would open it; the caller closes it."""
        return await open_store(StoreSettings(url=self.url, timeout=Duration(timeout_s)))

    def close(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
        for process in self._processes.values():
            process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    async def _in_step(self) -> None:
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(RedisError, OSError, TimeoutError):
                    if (await self.ask(self.servers[1], "ROLE"))[3] == b"connected":
                        return
                await asyncio.sleep(0.02)

    async def _is_whole(self) -> bool:
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            now = await self.primary()
            role, _, replicas = await self.ask(now, "ROLE")
            others = [p for p in self.servers if p != now and self.runs(p)]
            in_step = role == b"master" and len(replicas) == len(others)
            for port in others:
                in_step = in_step and (await self.ask(port, "ROLE"))[3] == b"connected"
            for port in self.sentinels:
                told = await self.ask(port, "SENTINEL", "MASTER", SERVICE)
                state = dict(zip(told[::2], told[1::2], strict=True))
                known = int(state[b"num-slaves"]) >= len(others) and int(state[b"num-other-sentinels"]) == len(self.sentinels) - 1
                in_step = in_step and known and state[b"flags"] == b"master" and int(state[b"port"]) == now
            return in_step
        return False

    def _spawn(self, port: int, *argv: str) -> None:
        log = (self.directory / f"{port}.log").open("ab")
        self._processes[port] = subprocess.Popen([str(self._program), *argv, *self._options], stdout=log, stderr=log)
        log.close()

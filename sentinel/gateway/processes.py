"""Several gateway processes on one port, and the one that watches over them.

This module exists because one Python process uses one core. What always holds:

* Each process is a whole gateway: its own presence, leases, sessions and metrics. They share the public port (SO_REUSEPORT: the
  kernel spreads connections); process k has the admin port plus k.
* A process that ends comes back, the sooner the longer it lived. One that never came up ends them all, with status 1; one that
  cannot come up again (its file has become wrong meanwhile) leaves the others alone, and is tried on.
* No process outlives its watcher: each ends when its standard input does. systemd hears READY when all are up, and WATCHDOG while
  some serve and each of those has been heard of within the last seconds. One that stops, told so or by its own fault, is heard of
  until it has drained, so that it never takes the others along.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

import structlog

from sentinel.service import Service

log = structlog.get_logger(__name__)

PROCESS = "SENTINEL_GATEWAY_PROCESS"  # in a child's environment: its number
BEAT_S = 1.0
SILENT_S = 8.0
START_S = 30.0  # in which one that is started again has to be heard of
AGAIN_S = (0.2, 10.0)  # first and longest pause before a process is started again


class Child:
    """What a child owes to its watcher: a sign of life once a second, from when it is ``up`` to its very end."""

    def __init__(self) -> None:
        self.up = asyncio.Event()

    async def beat(self) -> None:
        """Say that the loop runs; until cancelled, so that one that drains is not taken for one that hangs."""
        await self.up.wait()
        while True:
            with contextlib.suppress(OSError):
                os.write(1, b"+")
            await asyncio.sleep(BEAT_S)

    async def alone(self) -> None:
        """Returns when the watcher is gone."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(0, lambda: gone.set() if not os.read(0, 64) else None)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(0)


class Processes:
    def __init__(self, count: int, argv: Sequence[str] = (), silent_s: float = SILENT_S) -> None:
        """``argv``: of one process; none: this very command."""
        self._count, self._argv, self._silent_s = count, argv or command(), silent_s
        self._children: dict[int, asyncio.subprocess.Process] = {}
        self._heard: dict[int, float] = {}  # running one → when it was heard of last
        self._came_up: set[int] = set()
        self._up = asyncio.Event()
        self._stopping = asyncio.Event()
        self._failed = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        service = Service()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._pass_on, signal.SIGHUP)
        keepers = [asyncio.create_task(self._keep(k), name=f"process {k}") for k in range(self._count)]
        watchdog = asyncio.create_task(service.watchdog(self.alive), name="watchdog")
        ready = asyncio.create_task(self._ready(service), name="ready")
        await asyncio.wait(keepers)
        service.stopping()
        for task in (watchdog, ready):
            task.cancel()
        await asyncio.gather(watchdog, ready, *keepers, return_exceptions=True)
        return 1 if self._failed else 0

    def alive(self) -> bool:
        now = asyncio.get_running_loop().time()
        hung = any(now - at >= self._silent_s for at in self._heard.values())
        return self._stopping.is_set() or (bool(self._heard) and not hung)

    async def _ready(self, service: Service) -> None:
        await self._up.wait()
        service.ready(f"{self._count} processes")
        log.info("all gateway processes are up", count=self._count)

    def _stop(self) -> None:
        self._stopping.set()
        self._pass_on(signal.SIGTERM)

    def _pass_on(self, number: signal.Signals) -> None:
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    @staticmethod
    def _end(child: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.kill()

    async def _keep(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        pause = AGAIN_S[0]
        while not self._stopping.is_set():
            began = loop.time()
            child = await asyncio.create_subprocess_exec(
                *self._argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env={**os.environ, PROCESS: str(number)}
            )
            self._children[number] = child
            if self._stopping.is_set():
                self._pass_on(signal.SIGTERM)
            assert child.stdout is not None  # noqa: S101  (it was asked for)
            late = loop.call_later(START_S, self._end, child) if number in self._came_up else None
            while await child.stdout.read(64):
                if late:
                    late.cancel()
                self._heard[number] = loop.time()
                self._came_up.add(number)
                if len(self._came_up) == self._count:
                    self._up.set()
            status = await child.wait()
            if late:
                late.cancel()
            del self._children[number]
            self._heard.pop(number, None)
            if self._stopping.is_set():
                self._failed = self._failed or status != 0
                return
            if number not in self._came_up:
                log.error("a gateway process did not come up", process=number, status=status)
                self._failed = True
                self._stop()
                return
            log.error("a gateway process ended by itself", process=number, status=status)
            pause = AGAIN_S[0] if loop.time() - began > AGAIN_S[1] else min(pause * 2, AGAIN_S[1])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)


def command() -> list[str]:
    """How this very command is started again."""
    return [sys.executable, "-c", "from sentinel.cli.main import main; main()", *sys.argv[1:]]

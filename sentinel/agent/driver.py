"""The parent's side of the driver child: every question has a deadline, whatever the driver does.

This module exists so that the agent reads GPUs without ever opening the driver itself. What always holds:

* Initialising has one deadline, and each GPU's answer has one, counted from when it was asked. A GPU past it is
  ``{"pci", "index", "hung_s"}``, and is not waited for again: one stuck GPU costs the others one deadline, once.
* A value is from this question or it is not given: a GPU that was not reached has its address and nothing else.
* A child that is in the middle of a call is never killed, except by ``close`` at shutdown, and then last of all.
* A child that dies is started again, with growing pauses; meanwhile ``read()`` raises ProbeError: that is about the monitor.
* What the driver itself answers to initialisation (no library, library and module differ) is a reading's ``error``, not a
  failure to look; it is tried again by a fresh child, because a loaded library stays the old one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from probes import ProbeError
from sentinel.agent.driver_heard import Heard
from sentinel.agent.driver_protocol import GRACE_S, LINE_BYTES, Opened, Pauses, Said, decode

NVML_VARIABLE = "SENTINEL_NVML"  # environment: "module:factory" of a stand-in for pynvml


@dataclass
class _Gpu:
    """What is known about one NVML index in this child."""

    data: dict[str, Any]
    owed: int = 0  # answers to come; two only while a late one and the next question cross
    asked_at: float | None = None  # the last question whose answer is owed


class ChildDriver:
    """``probes.Driver`` by a child process.

    ``deadline_s``: a GPU's answer past this is a hang. ``nvml``: what the child loads in place of ``pynvml``
    (``module:factory``); default: the environment's ``SENTINEL_NVML``, else ``pynvml``. ``clock``: seconds, monotonic.
    """

    def __init__(
        self,
        deadline_s: float = 10.0,
        *,
        nvml: str = "",
        env: dict[str, str] | None = None,
        pauses: Pauses | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deadline, self._clock, self._env = deadline_s, clock, env
        self._pauses = pauses or Pauses()
        self._nvml = nvml or os.environ.get(NVML_VARIABLE, "") or "pynvml"
        self._lock = asyncio.Lock()  # one question at a time
        self._news = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._listener: asyncio.Task[None] | None = None
        self._round = self._acked = 0  # the last question put, and the last one taken
        self._put_at = 0.0
        self._opened: Opened | None = None
        self._opening_since: float | None = None
        self._heard = Heard()
        self._gpus: dict[int, _Gpu] = {}
        self._addresses: dict[int, str] = {}  # by index, as last seen; survives the child
        self._count = 0
        self._started_at = float("-inf")
        self._not_before = float("-inf")  # no new child until then
        self._pause = 0.0
        self._said = ""  # why there is no child
        self.restarts = 0  # deaths nobody asked for

    # -- what others use ----------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def hung(self) -> tuple[str, ...]:
        """PCI addresses (or ``#index``) of GPUs that are past their deadline now."""
        return tuple(self._addresses.get(i, f"#{i}") for i, g in sorted(self._gpus.items()) if self._overdue(g.asked_at))

    async def read(self) -> dict[str, Any]:
        """Ask every GPU once: ``{"error", "driver", "nvml", "gpus": [...]}``, and ``hung_s`` when initialising hangs;
        ``xid_events`` are those that NVML told of by itself (``driver_heard``).

        Raises ProbeError when the child itself could not be asked.
        """
        async with self._lock:
            if self._process is None and self._clock() < self._not_before:
                if self._opened and self._opened.error:
                    return self._answer()
                raise ProbeError(f"{self._said}; the next one starts in {self._not_before - self._clock():.0f} s")
            if self._process and self._wants_fresh_eyes():
                await self._end("looking again with a fresh child")
            if self._process is None:
                await self._start()
            return await self._ask()

    @contextlib.asynccontextmanager
    async def released(self) -> AsyncIterator[bool]:
        """Let go of the driver while a GPU is reset: no read runs inside. Yields False when a call is stuck and still holds it."""
        async with self._lock:
            until = self._clock() + GRACE_S
            while self._heard.calling and (left := until - self._clock()) > 0:  # it makes or frees its event set, which is quick
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), left)
            if self._process and not self._owing():
                await self._end("released for a repair")
            yield self._process is None

    async def close(self, grace_s: float = GRACE_S) -> None:
        """End the child: asked first, and killed only when it has not ended after ``grace_s`` seconds."""
        async with self._lock:
            await self._end("closed", grace_s)

    # -- asking -------------------------------------------------------------------------------------------------------

    async def _ask(self) -> dict[str, Any]:
        process = self._process
        self._put_question()
        while self._process is process and (left := self._left_s()) > 0:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), left)
        if self._process is not process or process is None:
            raise ProbeError(self._said)
        if (self._acked < self._round or self._owing()) and _stopped(process.pid):
            # Nothing of it can have answered, so its silence says nothing about the driver.
            self._forgive_silence()
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            raise ProbeError(f"the driver child (pid {process.pid}) was stopped by a signal and is told to go on")
        if self._acked < self._round and not self._owing():
            # It has not even read the question, so no call is under way and ending it hurts nobody.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise ProbeError(f"the driver child (pid {process.pid}) took no question in time and is replaced")
        answer = self._answer()
        if answer["error"]:
            await self._end(str(answer["error"].get("text")))
            self._not_before = self._clock() + self._pauses.reopen
        return answer

    def _put_question(self) -> None:
        self._round, self._put_at = self._round + 1, self._clock()
        self._write({"read": self._round})

    def _left_s(self) -> float:
        """Seconds for which an answer may still come in time; 0 when all are there or overdue."""
        if not self._acked:
            since = [self._put_at + max(0.0, self._pauses.start - self._deadline)]
        elif self._acked < self._round:
            since = [self._put_at]
        elif self._opened is None:
            since = [self._opening_since or self._put_at]
        else:
            since = [g.asked_at for g in self._gpus.values() if g.asked_at is not None]
        return max((at + self._deadline - self._clock() for at in since), default=0.0)

    def _forgive_silence(self) -> None:
        """Count from now what was not overdue before this question: the child could not have answered while it was stopped."""
        now = self._clock()
        if self._opening_since is not None and self._put_at - self._opening_since < self._deadline:
            self._opening_since = now
        for gpu in self._gpus.values():
            if gpu.asked_at is not None and self._put_at - gpu.asked_at < self._deadline:
                gpu.asked_at = now

    def _answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = {"error": None, "driver": None, "nvml": self._nvml, "gpus": [], "xid_events": self._heard.answer()}
        if self._opened is None:
            if self._opening_since is not None:
                answer["hung_s"] = round(self._clock() - self._opening_since, 3)
            return answer
        answer |= {"error": self._opened.error, "driver": self._opened.driver}
        for index, gpu in sorted(self._gpus.items()):
            known = {"pci": self._addresses.get(index), "index": index}
            if gpu.asked_at is not None and self._overdue(gpu.asked_at):
                answer["gpus"].append(known | {"hung_s": round(self._clock() - gpu.asked_at, 3)})
            elif gpu.asked_at is not None or self._acked < self._round:
                answer["gpus"].append(known)
            else:
                answer["gpus"].append(gpu.data)
        return answer

    def _overdue(self, since: float | None) -> bool:
        return since is not None and self._clock() - since >= self._deadline

    def _owing(self) -> bool:
        """Whether a call into the driver is under way."""
        return self._opening_since is not None or self._heard.calling or any(g.asked_at is not None for g in self._gpus.values())

    def _wants_fresh_eyes(self) -> bool:
        """A handle opened before a GPU was lost or reset stays bad; only a new initialisation sees it as it is now."""
        old = self._clock() - self._started_at >= self._pauses.refresh
        return old and not self._owing() and any(g.data.keys() & {"error", "failed"} for g in self._gpus.values())

    # -- the child ----------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._opened, self._gpus, self._acked, self._round, self._opening_since = None, {}, 0, 0, None
        command = (sys.executable, "-P", "-m", "sentinel.agent.driver_child", self._nvml)
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=LINE_BYTES, env=self._env)
        except OSError as error:
            self._said = f"the driver child could not be started: {error.strerror or error}"
            self._hold_off()
            raise ProbeError(self._said) from None
        self._process, self._started_at = process, self._clock()
        self._listener = asyncio.create_task(self._listen(process), name="driver child")

    def _write(self, message: dict[str, Any]) -> None:
        if self._process and self._process.stdin:
            with contextlib.suppress(OSError, RuntimeError):  # it died just now; the listener tells
                self._process.stdin.write(msgspec.json.encode(message) + b"\n")

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Take what the child says until it ends; then remember how it ended."""
        assert process.stdout  # noqa: S101  (it was started with a pipe)
        broken = ""
        try:
            async for line in process.stdout:
                self._take(decode(line))
                self._news.set()
        except (ValueError, msgspec.DecodeError, KeyError, RecursionError) as error:
            broken = f" after it said what the protocol does not know ({error})"
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        code = await process.wait()
        if self._process is not process:
            return  # it was told to end
        how = f"died of signal {-code}" if code < 0 else f"ended by itself with status {code}"
        self._said = f"the driver child {how}{broken}"
        self._process = None
        self._heard.child_ended()
        self.restarts += 1
        self._hold_off()
        self._news.set()

    def _take(self, said: Said) -> None:
        now = self._clock()
        self._heard.take(said)
        if said.ack is not None:
            self._acked = said.ack
            for index in said.asked:
                gpu = self._gpus[index]
                gpu.owed, gpu.asked_at = gpu.owed + 1, now
            if self._opened is None and self._opening_since is None:
                self._opening_since = now
        elif said.opened is not None:
            self._opened, self._opening_since = said.opened, None
            self._gpus = {index: _Gpu(data={}) for index in range(said.opened.count)}
            if said.opened.count != self._count:  # one came or went, so the indices mean other GPUs now
                self._addresses.clear()
            self._count = said.opened.count
            if not said.opened.error:
                self._put_question()
        elif said.gpu is not None:
            gpu = self._gpus[said.gpu]
            gpu.owed -= 1
            gpu.asked_at = gpu.asked_at if gpu.owed else None
            if pci := said.data.get("pci"):
                self._addresses[said.gpu] = pci
            gpu.data = said.data | {"pci": self._addresses.get(said.gpu)}  # a lost GPU has no handle to ask for its address

    def _hold_off(self) -> None:
        steady = self._clock() - self._started_at >= self._pauses.steady
        self._pause = self._pauses.first if steady or not self._pause else min(self._pause * 2, self._pauses.most)
        self._not_before = self._clock() + self._pause

    async def _end(self, why: str, grace_s: float = GRACE_S) -> None:
        """Ask it to end; kill it when it does not. Only ``close`` does so while a call is under way."""
        process, self._process, self._said = self._process, None, why
        if process is None:
            return
        self._heard.child_ended()
        with contextlib.suppress(OSError, RuntimeError):
            if process.stdin:
                process.stdin.write(b'{"quit":true}\n')
                process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), grace_s)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):  # a thread in uninterruptible sleep outlives even this
                await asyncio.wait_for(process.wait(), 1.0)
        if self._listener and process.returncode is None:
            self._listener.cancel()


def _stopped(pid: int) -> bool:
    """Whether a signal or a debugger holds this child of ours."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] in (b"T", b"t")
    except OSError:
        return False

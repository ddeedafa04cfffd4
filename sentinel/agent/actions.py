"""Local actions: what the controller may have this node do, and how it is done.

This module exists so that a command from the network can never be more than one of the argument vectors that the site wrote
into this node's own file. What always holds:

* No shell, ever. A placeholder takes a value of ``[A-Za-z0-9@:._/-]{1,128}`` without ``..``; one that begins with ``-`` only
  where the vector itself puts something before it. Anything else is refused and nothing is run.
* A command's id is carried out at most once, ever (``ledger``).
* A reset and a reboot never run beside another reset or reboot.
* Past its deadline the whole process group is killed. What a program leaves behind after ending by itself is let be, since
  starting a worker is one of the actions.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import structlog

from sentinel.agent.ledger import Ledger
from sentinel.agent.link import Link, Refused, Unreachable, backoff_s
from sentinel.config import ConfigError
from sentinel.model import Command, CommandResult

log = structlog.get_logger()

Vector = tuple[str, ...]
Outcome = tuple[bool, str]  # it ended well, the tail of what it said
CarryOut = Callable[[Vector, float], Awaitable[Outcome]]
Release = Callable[[], AbstractAsyncContextManager[bool]]

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_VALUE = re.compile(r"[A-Za-z0-9@:._/-]{1,128}")
_EXCLUSIVE = ("reset", "reboot", "power")
_TAIL = 4096  # bytes of output kept
_DEADLINE_MAX_S = 3600.0
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


class NotAllowed(Exception):
    """The command is not one that this node carries out; the sentence says why."""


def check(allowed: Mapping[str, Vector]) -> None:
    """Raises ConfigError when the allow-list itself cannot be meant."""
    for name, vector in allowed.items():
        if not vector or not vector[0]:
            raise ConfigError(f"agent.actions.{name}: expected a program and its arguments, got {list(vector)}")
        if _PLACEHOLDER.search(vector[0]):
            raise ConfigError(f"agent.actions.{name}: the program itself cannot be a placeholder, got {vector[0]!r}")
        if any("\0" in token for token in vector):
            raise ConfigError(f"agent.actions.{name}: an argument cannot hold a NUL character, got {list(vector)}")


def fill(allowed: Mapping[str, Vector], command: Command) -> Vector:
    """The argument vector of a command. Raises NotAllowed."""
    if command.action not in allowed:
        raise NotAllowed(f"action {command.action!r} is not in this node's allow-list")
    filled = []
    for position, token in enumerate(allowed[command.action]):

        def value(match: re.Match[str], token: str = token, position: int = position) -> str:
            name = match[1]
            if name not in command.args:
                raise NotAllowed(f"action {command.action!r} needs the argument {name!r}")
            text = command.args[name]
            if not _VALUE.fullmatch(text) or ".." in text:
                raise NotAllowed(f"argument {name}={text[:140]!r} does not fit {_VALUE.pattern} without '..'")
            if text.startswith("-") and match.start() == 0 and position > 0:
                raise NotAllowed(f"argument {name}={text!r} would be read as an option")
            return text

        filled.append(_PLACEHOLDER.sub(value, token))
    return tuple(filled)


class _Output:
    """The read end of a program's output, for as long as anybody holds the other end.

    Our own pipe and not asyncio's: a server that the program started keeps it open, and the end of the program is what counts.
    What that server goes on saying is read and dropped, since a pipe that nobody reads would kill it at its next word.
    """

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reader, False)
        self._tail = bytearray()
        self._keep = True
        asyncio.get_running_loop().add_reader(self._reader, self._read)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(16):  # somebody may be writing without end
                chunk = os.read(self._reader, 65536)
                if not chunk:
                    self.close()  # everyone closed it
                    return
                if self._keep:
                    self._tail += chunk
                    del self._tail[:-_TAIL]

    def said(self) -> str:
        """The end of what was said up to now; nothing later is kept."""
        if self._reader >= 0:
            self._read()
        self._keep = False
        return self._tail.decode("utf-8", "replace").strip()

    def close(self) -> None:
        if self._reader >= 0:
            asyncio.get_running_loop().remove_reader(self._reader)
            os.close(self._reader)
            self._reader = -1


async def run_vector(vector: Vector, deadline_s: float) -> Outcome:
    """Run a program to its end or its deadline, in a process group of its own, with nothing of our environment."""
    output = _Output()
    try:
        process = await asyncio.create_subprocess_exec(
            *vector, stdin=asyncio.subprocess.DEVNULL, stdout=output.writer, stderr=output.writer,
            env=_ENVIRONMENT, cwd="/", start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        output.close()
        return False, f"{vector[0]} cannot be run: {getattr(error, 'strerror', None) or error}"
    finally:
        os.close(output.writer)
    try:
        async with asyncio.timeout(deadline_s):
            code = await process.wait()
        said = output.said()
        ended = f"exit status {code}" if code >= 0 else f"killed by {_signal(-code)}"
        return code == 0, f"{ended}: {said}" if said else ended
    except TimeoutError:
        return False, f"killed at its deadline of {deadline_s:g} s: {output.said()}".rstrip(": ")
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):  # one that hangs in the driver may not even die
                await asyncio.wait_for(process.wait(), 1.0)
            output.close()


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"


@asynccontextmanager
async def unreleased() -> AsyncIterator[bool]:
    """Where nobody holds the driver."""
    yield True


class Actions:
    """Fetches commands, carries them out and reports how they ended; ``run`` until cancelled.

    ``count(action, outcome)`` counts, with outcome ``ok``, ``failed`` or ``refused``. ``carry_out`` is how a vector is run.
    ``release()`` is an async context in which our own driver child does not hold the GPUs: a reset fails while anybody does.
    """

    def __init__(
        self,
        node: str,
        allowed: Mapping[str, Vector],
        link: Link,
        ledger_path: Path,
        *,
        count: Callable[[str, str], None] = lambda action, outcome: None,
        carry_out: CarryOut = run_vector,
        release: Release = unreleased,
    ) -> None:
        check(allowed)
        self.allowed = allowed
        self._node, self._link, self._count, self._carry_out, self._release = node, link, count, carry_out, release
        self._ledger = Ledger(ledger_path, node)
        self._exclusive = asyncio.Lock()
        self._slots = asyncio.Semaphore(8)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._telling: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        for result in self._ledger.untold():
            self._tell(result)
        attempt = 0
        while True:
            try:
                commands = await self._link.commands(self._node)
            except Unreachable as error:
                await asyncio.sleep(error.after_s or backoff_s(attempt, cap_s=5.0))
                attempt += 1
                continue
            except Refused as error:
                log.error("the controller refuses to hand out commands", error=str(error))
                await asyncio.sleep(10.0)
                continue
            attempt = 0
            if not [c for c in commands if self.take(c)]:
                # A command is offered until its result arrives; while it runs here, that must not become a busy loop.
                await asyncio.sleep(0.5 if commands else 0)

    def take(self, command: Command) -> bool:
        """Begin a command, or tell again how it ended. False when it was known already."""
        if command.id in self._running or command.id in self._telling:
            return False
        known = self._ledger.result(command.id)
        if known is not None:
            self._tell(known)
            return False
        task = asyncio.create_task(self._do(command), name=f"action {command.action}")
        self._running[command.id] = task
        task.add_done_callback(lambda _: self._running.pop(command.id, None))
        return True

    async def stop(self) -> None:
        """Kill what runs: nobody would be left to see how it ends. Its result says so at the next start."""
        tasks = [*self._running.values(), *self._telling.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def running(self) -> int:
        return len(self._running)

    # -----------------------------------------------------------------------------------------------------------------

    async def _do(self, command: Command) -> None:
        started = time.monotonic()
        try:
            if command.node != self._node:
                raise NotAllowed(f"it is for node {command.node!r}; this is {self._node!r}")
            vector = fill(self.allowed, command)
            if not await asyncio.to_thread(self._ledger.begin, command.id):
                return
        except NotAllowed as error:
            log.error("a command is refused", command=command.id, action=command.action, error=str(error))
            self._count(command.action if command.action in self.allowed else "unknown", "refused")
            self._tell(CommandResult(id=command.id, node=self._node, ok=False, refused=True, detail=str(error)))
            return
        except OSError as error:
            # Running it without having written that down could run it twice.
            detail = f"not run: it could not be recorded: {error.strerror or error}"
            log.error("a command is not run", command=command.id, action=command.action, error=detail)
            self._count(command.action, "refused")
            self._tell(CommandResult(id=command.id, node=self._node, ok=False, refused=True, detail=detail))
            return
        log.warning("carrying out", command=command.id, action=command.action, vector=vector, why=command.why)
        deadline_s = min(max(command.deadline_s, 0.1), _DEADLINE_MAX_S)
        exclusive = self._exclusive if command.action.startswith(_EXCLUSIVE) else contextlib.nullcontext()
        released = self._release() if command.action.startswith("reset") else unreleased()
        async with self._slots, exclusive, released as free:
            if not free:
                log.warning("our own driver child is stuck and still holds a GPU", action=command.action)
            try:
                ok, detail = await self._carry_out(vector, deadline_s)
            except Exception as error:
                ok, detail = False, f"it could not be carried out: {error}"
        result = CommandResult(id=command.id, node=self._node, ok=ok, detail=detail, seconds=time.monotonic() - started)
        log.warning("carried out", command=command.id, action=command.action, ok=ok, detail=detail)
        self._count(command.action, "ok" if ok else "failed")
        try:
            await asyncio.to_thread(self._ledger.end, result)
        except OSError as error:
            log.error("a result could not be recorded", command=command.id, error=str(error))
        self._tell(result)

    def _tell(self, result: CommandResult) -> None:
        task = asyncio.create_task(self._told(result), name=f"result {result.id}")
        self._telling[result.id] = task
        task.add_done_callback(lambda _: self._telling.pop(result.id, None))

    async def _told(self, result: CommandResult) -> None:
        for attempt in range(10_000):
            try:
                await self._link.result(result)
            except Unreachable as error:
                await asyncio.sleep(error.after_s or backoff_s(attempt, cap_s=5.0))
                continue
            except Refused as error:
                log.error("the controller refuses a result", command=result.id, error=str(error))
                if not error.about_content and error.status != 404:
                    await asyncio.sleep(10.0)
                    continue
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._ledger.told, result.id)
            return

"""The worker host: one warm process that forks the simulated workers, so that starting takes milliseconds and killing is real.

This module exists so that "killed" and "restarted" in the demo are what they say: a SIGKILLed process whose streams break
and whose port refuses, a new process on the same port. What always holds:

* The host runs no event loop and no threads; it forks only from this plain state. Each worker is one process.
* Each worker's port is bound by the host, never listened on by it: the number stays reserved, and a worker that does not
  run refuses connections like any dead server.
* Every command is idempotent: starting what runs and stopping what does not are fine.
* ``stop`` and ``kill`` answer when the process is gone, ``start`` when it is forked (it still has to load).
* No worker outlives the host, and the host does not outlive whoever holds the other end of its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import uvloop

from sentinel.sim.engine import Shape, serve

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Ask the kernel to send ``sig`` to this process when its parent ends (Linux; elsewhere nothing happens)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, sig, 0, 0, 0)


class Slot:
    """One worker's place: its shape, its reserved port, and the process in it, if any."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.pid: int | None = None
        self.broken = ""  # why it cannot start: the GPU under it is gone
        self.starts = 0
        self.last_exit = ""
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.port = int(self._reserved.getsockname()[1])

    def listener(self) -> socket.socket:
        """A second socket on the reserved port; only this one will listen, and it dies with its process."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("127.0.0.1", self.port))
        return sock

    def picture(self) -> dict[str, Any]:
        return {
            "url": f"http://127.0.0.1:{self.port}", "pid": self.pid, "starts": self.starts, "broken": self.broken,
            "last_exit": self.last_exit,
        }


class Refused(Exception):
    """The command cannot be carried out; the sentence says why."""


Reply = Callable[[dict[str, Any]], None]


class Verb(Protocol):
    def __call__(self, name: str, *rest: str, reply: Reply) -> None: ...


class Host:
    """The command loop. ``run`` returns when the lifeline closes or ``quit`` is asked."""

    def __init__(self, shapes: Iterable[Shape], door: socket.socket, lifeline: int) -> None:
        self._slots = {s.name: Slot(s) for s in shapes}
        self._door = door
        self._lifeline = lifeline
        self._leaving: dict[int, list[Reply]] = {}  # pid → who waits for its end
        self._ears: dict[socket.socket, bytes] = {}
        self._on = True
        self._select = selectors.DefaultSelector()
        self._verbs: dict[str, Verb] = {
            "start": self._start, "stop": self._stop, "kill": self._kill, "freeze": self._freeze, "thaw": self._thaw,
            "break": self._break, "mend": self._mend,
        }

    def run(self) -> None:
        woken, wakes = socket.socketpair()
        woken.setblocking(False)
        wakes.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._quit)
        self._select.register(self._door, selectors.EVENT_READ)
        self._select.register(self._lifeline, selectors.EVENT_READ)
        self._select.register(woken, selectors.EVENT_READ)
        while self._on:
            for key, _ in self._select.select():
                if key.fileobj is self._door:
                    ear, _ = self._door.accept()
                    self._ears[ear] = b""
                    self._select.register(ear, selectors.EVENT_READ)
                elif key.fileobj is woken:
                    with contextlib.suppress(BlockingIOError):
                        woken.recv(4096)
                elif key.fileobj == self._lifeline:
                    self._on = bool(os.read(self._lifeline, 4096)) and self._on
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj)
            self._reap()
        for slot in self._slots.values():
            if slot.pid is not None:
                os.kill(slot.pid, signal.SIGKILL)

    def _quit(self, *_: object) -> None:
        self._on = False

    def _reap(self) -> None:
        for slot in self._slots.values():
            if slot.pid is None:
                continue
            pid, status = os.waitpid(slot.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                slot.last_exit = f"signal {-code}" if code < 0 else f"status {code}"
                slot.pid = None
                for reply in self._leaving.pop(pid, []):
                    reply({"ok": True, "detail": f"{slot.shape.name}: process {pid} ended ({slot.last_exit})"})

    def _hear(self, ear: socket.socket) -> None:
        try:
            piece = ear.recv(65536)
        except OSError:
            piece = b""
        self._ears[ear] += piece
        if piece and not self._ears[ear].endswith(b"\n"):
            return
        self._select.unregister(ear)
        line = self._ears.pop(ear)
        if not piece:
            ear.close()
            return

        def reply(answer: dict[str, Any]) -> None:
            with ear, contextlib.suppress(OSError):  # whoever asked may have left
                ear.sendall(json.dumps(answer).encode() + b"\n")

        try:
            asked = json.loads(line)
            self._do(str(asked["do"]), [str(a) for a in asked.get("args", [])], reply)
        except Refused as refused:
            reply({"ok": False, "detail": str(refused)})
        except (ValueError, KeyError, TypeError) as error:
            reply({"ok": False, "detail": f"not a command: {error!r}"})

    def _do(self, verb: str, args: list[str], reply: Reply) -> None:
        if verb == "list":
            reply({"ok": True, "detail": "", "workers": {n: s.picture() for n, s in self._slots.items()}})
        elif verb not in self._verbs:
            raise Refused(f"no such verb: {verb!r}; wanted list, {', '.join(self._verbs)}")
        elif not args or args[0] not in self._slots:
            raise Refused(f"{verb}: no worker is called {args[0] if args else ''!r}")
        else:
            self._verbs[verb](*args, reply=reply)

    def _start(self, name: str, *_: str, reply: Reply) -> None:
        slot = self._slots[name]
        if slot.pid is not None:
            return reply({"ok": True, "detail": f"{name}: runs already as process {slot.pid}"})
        if slot.broken:
            raise Refused(f"{name}: cannot start: {slot.broken}")
        slot.pid = self._fork(slot)
        slot.starts += 1
        return reply({"ok": True, "detail": f"{name}: started as process {slot.pid}", "pid": slot.pid})

    def _fork(self, slot: Slot) -> int:
        host = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            die_with_parent()
            if os.getppid() != host:  # it died between the fork and the request
                os._exit(1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.closerange(3, 1024)  # the host's door, ears and reserved ports are not this worker's
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve(slot.shape, slot.listener()))
        except BaseException as error:  # nothing may unwind into the host's stack
            print(f"simulated worker {slot.shape.name}: {error!r}", file=sys.stderr)
        os._exit(1)

    def _stop(self, name: str, *_: str, reply: Reply) -> None:
        self._end(name, signal.SIGTERM, reply)

    def _kill(self, name: str, *_: str, reply: Reply) -> None:
        self._end(name, signal.SIGKILL, reply)

    def _end(self, name: str, sig: signal.Signals, reply: Reply) -> None:
        pid = self._slots[name].pid
        if pid is None:
            return reply({"ok": True, "detail": f"{name}: does not run"})
        self._leaving.setdefault(pid, []).append(reply)
        os.kill(pid, sig)
        return None

    def _freeze(self, name: str, *_: str, reply: Reply) -> None:
        self._signal(name, signal.SIGUSR1, "its engine stands still", reply)

    def _thaw(self, name: str, *_: str, reply: Reply) -> None:
        self._signal(name, signal.SIGUSR2, "its engine runs on", reply)

    def _signal(self, name: str, sig: signal.Signals, what: str, reply: Reply) -> None:
        pid = self._slots[name].pid
        if pid is None:
            raise Refused(f"{name}: does not run")
        os.kill(pid, sig)
        reply({"ok": True, "detail": f"{name}: {what}"})

    def _break(self, name: str, *why: str, reply: Reply) -> None:
        self._slots[name].broken = " ".join(why) or "broken by the scenario"
        reply({"ok": True, "detail": f"{name}: will not start"})

    def _mend(self, name: str, *_: str, reply: Reply) -> None:
        self._slots[name].broken = ""
        reply({"ok": True, "detail": f"{name}: may start"})


def main(argv: list[str]) -> None:
    """``workers.py SHAPES_FILE DOOR_FD``: serve until standard input closes. SHAPES_FILE: a JSON list of Shape."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the demo, which then stops everything in order
    shapes = msgspec.json.decode(Path(argv[0]).read_bytes(), type=list[Shape])
    with socket.socket(fileno=int(argv[1])) as door:
        Host(shapes, door, sys.stdin.fileno()).run()


if __name__ == "__main__":
    main(sys.argv[1:])

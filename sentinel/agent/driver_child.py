"""The driver child: the one process on a node that calls into the GPU driver, one thread per GPU, and one that listens.

This module exists because a call into the driver may never come back and cannot be killed. What always holds:

* The main thread never calls NVML, so it answers its parent whatever the driver does.
* A GPU is asked again only when its last question was answered: at most one stuck thread per GPU, ever.
* Lines of JSON on standard input and output; what NVML itself prints goes to standard error.
* SIGINT and SIGTERM are ignored (a kill in the middle of a call has frozen GPUs, dcgm-exporter#84); the parent says when to
  end, and its death is noticed as the end of standard input. Calls under way may then finish, for ``FINISH_S`` at most.

Protocol (also ``driver_protocol``). Parent: ``{"read": n}`` or ``{"quit": true}``. Child: ``{"ack": n, "asked": [indices]}`` at
once, then ``{"opened": {"error", "driver", "count"}}`` once NVML has been initialised, and ``{"gpu": index, "data": …}`` as each
GPU answers. The listener (``driver_listener``) says ``{"listens": …}`` as that changes, and ``{"xids": …}``; each ``ack`` has the
former, too.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from probes.nvml import IndexReader, open_driver
from sentinel.agent.driver_listener import Listener
from sentinel.agent.heap import settle

FINISH_S = 30.0
STACK_BYTES = 512 * 1024  # NVML's own call depth is small; 8 MiB per GPU would be reserved otherwise


class Lane:
    """A thread that does one thing at a time, again and again; a request while it is busy is dropped, never queued."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._work = work
        self._wanted = threading.Semaphore(0)
        self.busy = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def start(self) -> bool:
        """Ask for one run; False when the last one has not come back. The main thread alone asks."""
        if self.busy:
            return False
        self.busy = True
        self._wanted.release()
        return True

    def _run(self) -> None:
        while True:
            self._wanted.acquire()
            self._work()


class Child:
    """What the parent can ask for. ``nvml``: ``pynvml`` or a fake; ``send`` is safe to call from any thread."""

    def __init__(self, nvml: Any, send: Callable[[dict[str, Any]], None]) -> None:
        self._nvml, self._send = nvml, send
        self._order = threading.Lock()
        self._opened = False
        self._lanes: list[Lane] = []
        self._opening = Lane("open", self._open)
        self._listener = Listener(nvml, send)

    @property
    def busy(self) -> bool:
        return self._opening.busy or self._listener.calling or any(lane.busy for lane in self._lanes)

    def read(self, number: int) -> None:
        """Ask every GPU that is not being asked already; the acknowledgement precedes every call it announces."""
        with self._order:
            idle = [i for i, lane in enumerate(self._lanes) if not lane.busy]
            self._send({"ack": number, "asked": idle, "listens": self._listener.state()})
            opened = self._opened
        for index in idle:
            self._lanes[index].start()
        if not opened:
            self._opening.start()  # when it is done the parent asks again

    def _open(self) -> None:
        try:
            opened = open_driver(self._nvml)
        except Exception as error:  # a fault of ours must not look like a driver that hangs
            opened = {"error": {"code": None, "text": f"initialising NVML failed: {error!r}"}, "driver": None, "count": 0}
        lanes = [self._lane(index) for index in range(opened["count"])]
        with self._order:  # no question may name a GPU that the parent has not heard of, nor miss one that it has
            self._lanes, self._opened, self._opening.busy = lanes, opened["error"] is None, False
            self._send({"opened": opened})
        if opened["error"] is None:
            self._listener.start(opened["count"])

    def _lane(self, index: int) -> Lane:
        reader = IndexReader(self._nvml, index)

        def look() -> None:
            try:
                data = reader.read()
            except Exception as error:  # as above
                data = {"pci": None, "index": index, "failed": repr(error)}
            self._lanes[index].busy = False  # before the answer, so that the next question is never dropped
            self._send({"gpu": index, "data": data})

        return Lane(f"gpu{index}", look)


def sender(out: BinaryIO) -> Callable[[dict[str, Any]], None]:
    """Write whole lines, one at a time. A parent that is gone is noticed on standard input, not here."""
    lock, encode = threading.Lock(), json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

    def send(message: dict[str, Any]) -> None:
        try:
            text = encode(message)
        except (TypeError, ValueError) as error:  # no answer would look like a driver that hangs
            text = encode({"gpu": message["gpu"], "data": {"pci": None, "index": message["gpu"], "failed": repr(error)}})
        line = text.encode() + b"\n"
        with lock:
            try:
                out.write(line)
                out.flush()
            except OSError:
                return

    return send


def load(spec: str) -> Any:
    """``module`` itself, or what ``module:factory`` returns."""
    module, _, factory = spec.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, factory)() if factory else loaded


def main(spec: str = "pynvml") -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a library that prints must not break the protocol
    threading.stack_size(STACK_BYTES)
    child = Child(load(spec), sender(out))
    settle()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if "read" in request:
            child.read(request["read"])
        elif "quit" in request:
            break
    end = time.monotonic() + FINISH_S
    while child.busy and time.monotonic() < end:
        time.sleep(0.05)
    os._exit(0)  # a thread stuck in the driver would keep an ordinary exit waiting


if __name__ == "__main__":
    main(*sys.argv[1:2])

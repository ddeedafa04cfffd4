"""The driver child's ear: one thread that waits for NVML's Xid events, so that the kernel log can be checked against them.

This module exists because a kernel log that is read and says nothing looks the same as one that is not heard. What always holds:

* One thread and one event set for all GPUs, apart from the thread that answers the parent and from every GPU's own: a GPU that
  hangs in its own call stops no event of another, and a wait that hangs stops no reading.
* A GPU is listened to from ``since`` on, or not at all: not supported, not to be named, or another error is *not measured*.
* An event set that fails (a GPU is lost, an unknown error) is freed and made anew after a pause; nothing here ever spins.
* Memory is bounded: what was heard is counted by GPU and code, and told at most once a second.

NVML gives the number alone, without a time and without what happened before the registration (nvml.h, nvmlEventSetWait_v2). So
an event carries when it was heard (``at``) and when nothing was waiting before it (``after``): it happened in between. Times are
seconds of CLOCK_MONOTONIC_RAW, by which the kernel log's own stamps count too: no wall clock that is set moves one of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from sentinel.pci import pci_address

XID_EVENT = 0x8  # nvmlEventTypeXidCriticalError
TIMEOUT = 10  # NVML_ERROR_TIMEOUT: nothing happened
WAIT_MS = 1000
STUCK_S = 5.0  # a wait of a second that lasts this long is a call that hangs
EVENT_PAUSE_S = 0.001  # a storm costs a few percent of a core at most, and goes on being emptied
TELL_S = 1.0
CODES = 64  # kinds of events kept between two tellings
FIRST_PAUSE_S, MOST_PAUSE_S, STEADY_S = 5.0, 60.0, 60.0  # before a new set; doubles while sets live shorter than STEADY_S


def raw_s() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC_RAW)


class Listener:
    """``start`` once NVML is open; then ``{"xids": …}`` and ``{"listens": …}`` are sent as they change (``driver_protocol``)."""

    def __init__(self, nvml: Any, send: Callable[[dict[str, Any]], None], pause_s: float = FIRST_PAUSE_S) -> None:
        self._nvml, self._send, self._first_pause = nvml, send, pause_s
        self._gpus: dict[int | None, str] = {}  # a handle's address in memory → the GPU's PCI address
        self._since: dict[str, float] = {}
        self._waiting_from: float | None = None  # of the wait under way
        self._emptied = 0.0
        self._heard: dict[tuple[str | None, int], list[Any]] = {}  # → count, since, after, at
        self._told_at = float("-inf")
        self.calling = False  # inside a call that must not be cut off; a wait is none

    def start(self, count: int) -> None:
        if count:
            threading.Thread(target=self._run, args=(count,), name="xids", daemon=True).start()

    def state(self) -> dict[str, Any]:
        """Which GPUs are listened to since when, and whether a call into the driver is under way. For any thread."""
        waiting, since = self._waiting_from, self._since
        stuck = waiting is not None and raw_s() - waiting > STUCK_S
        return {"since": {} if stuck or waiting is None else since, "calling": self.calling or stuck}

    def _run(self, count: int) -> None:
        pause = self._first_pause
        while True:
            began = raw_s()
            # NVML's errors, a binding that lacks a function, an answer of no known shape: the next set may fare better.
            with contextlib.suppress(Exception):
                self._listen(count)
            self._tell()
            if raw_s() - began >= STEADY_S:
                pause = self._first_pause
            time.sleep(pause)
            pause = min(2 * pause, max(self._first_pause, MOST_PAUSE_S))

    def _listen(self, count: int) -> None:
        """Make a set, wait for events until that fails, free the set. Returns at once when no GPU can be listened to."""
        nvml = self._nvml
        with self._call():
            events = nvml.nvmlEventSetCreate()
        try:
            with self._call():
                for index in range(count):
                    self._register(index, events)
            if self._since:
                self._emptied = self._waiting_from = raw_s()
                self._tell_state()
            while self._since:
                self._wait(events)
        finally:
            self._waiting_from, self._since, self._gpus = None, {}, {}
            with self._call():
                nvml.nvmlEventSetFree(events)

    def _register(self, index: int, events: Any) -> None:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if not int(nvml.nvmlDeviceGetSupportedEventTypes(handle)) & XID_EVENT:
                return
            name = nvml.nvmlDeviceGetPciInfo(handle).busId
            pci = pci_address(name.decode("ascii", "replace") if isinstance(name, bytes) else name)
            nvml.nvmlDeviceRegisterEvents(handle, XID_EVENT, events)
        except (nvml.NVMLError, ValueError):
            return
        self._gpus[_place(handle)] = pci
        self._since = {**self._since, pci: raw_s()}  # a new one, since other threads look at it

    def _wait(self, events: Any) -> None:
        """Wait for one event, for a second at most. Raises NVMLError when the set is of no use any more."""
        began = self._waiting_from = raw_s()
        try:
            event = self._nvml.nvmlEventSetWait_v2(events, WAIT_MS)
        except self._nvml.NVMLError as error:
            if int(error.value) != TIMEOUT:
                raise
            now = self._emptied = raw_s()
            self._tell()
            if now - began < WAIT_MS / 2000:  # a wait that does not wait must not become a loop
                time.sleep(WAIT_MS / 1000 - (now - began))
            return
        if int(event.eventType) & XID_EVENT:
            self._hear(self._gpus.get(_place(event.device)), int(event.eventData))
        time.sleep(EVENT_PAUSE_S)

    def _hear(self, pci: str | None, xid: int) -> None:
        now = raw_s()
        entry = self._heard.setdefault((pci, xid), [0, self._since.get(pci or "", now), self._emptied, now])
        entry[0], entry[3] = entry[0] + 1, now
        if now - self._told_at >= TELL_S or len(self._heard) >= CODES:
            self._tell()

    def _tell(self) -> None:
        if self._heard:
            heard, self._heard, self._told_at = self._heard, {}, raw_s()
            self._send({"xids": [[pci, xid, *counted] for (pci, xid), counted in heard.items()]})

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Around calls that change something in the driver; the parent hears of it before and after."""
        self.calling = True
        self._tell_state()
        try:
            yield
        finally:
            self.calling = False
            self._tell_state()

    def _tell_state(self) -> None:
        self._send({"listens": self.state()})


def _place(handle: Any) -> int | None:
    """A handle is a pointer into NVML's own table, the same one in an event as the one that was registered."""
    return ctypes.cast(handle, ctypes.c_void_p).value

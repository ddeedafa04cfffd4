"""A stand-in for the ``pynvml`` module, driven by plain state that can be set, saved, and changed while somebody reads it.

This module exists so that every way in which NVML answers (and does not) can be tried without a GPU, in one process or in the
real driver child. What always holds:

* It answers through the binding's own structs, constants and error classes, so code meets the real shapes: return codes per
  field value, ``byref`` structs with versions, error classes by code.
* A function it does not know answers FunctionNotFound, as an older driver would; it never reaches a real driver.
* Event sets hear what happens after a GPU was registered, one Xid per wait, as with the driver; ``FakeGpu.raise_xid`` makes one
  happen. A GPU that is ``gone`` ends every wait of a set that it is in.
* It is a simulation; what reads through it says so (``nvml`` in the reading names this module).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from ctypes import addressof, cast, memmove
from pathlib import Path
from typing import Any

import msgspec
import pynvml

from probes import nvml as reader
from probes.nvml import LINK_STATE, IndexReader
from probes.nvml_counters import ALL_LINKS
from sentinel.testing.nvml_state import GETTERS, NOT_SUPPORTED, STATE_FILE, FakeGpu, FakeState


class _Handle:
    def __init__(self, index: int) -> None:
        self.index = index
        self._as_parameter_ = index + 1  # ctypes takes it for a pointer, which a handle of the driver is


class _EventSet:
    """A set made by ``nvmlEventSetCreate``: how many Xids of each GPU it has heard, and what waits to be told."""

    def __init__(self) -> None:
        self.heard: dict[int, int] = {}  # by index
        self.waiting: deque[tuple[int, int]] = deque()  # index, code
        self.freed = False


class _Answer:
    """A struct of a driver's answer, by attribute."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class FakeNvml:
    """The module itself: pass it wherever ``pynvml`` goes."""

    def __init__(self, state: FakeState | Callable[[], FakeState]) -> None:
        self._state: Callable[[], FakeState] = state if callable(state) else lambda: state

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or not callable(getattr(pynvml, name, None)):
            return getattr(pynvml, name)  # constants, structs, error classes: the binding's own
        if name in set(GETTERS.values()):
            return lambda handle, *args: self._getter(name, handle)

        def missing(*args: Any) -> Any:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

        return missing

    def nvmlInit(self) -> None:
        while self._state().hang_init:
            time.sleep(0.01)
        _check(self._state().init_error)

    def nvmlShutdown(self) -> None:
        """Nothing to give back."""

    def nvmlSystemGetDriverVersion(self) -> str:
        return self._state().driver

    def nvmlDeviceGetCount(self) -> int:
        return len(self._state().gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> _Handle:
        if index >= len(self._state().gpus):
            _check(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        _check(self._gpu(_Handle(index), "nvmlDeviceGetHandleByIndex").no_handle)
        return _Handle(index)

    def nvmlDeviceGetPciInfo(self, handle: _Handle) -> _Answer:
        gpu = self._gpu(handle, "nvmlDeviceGetPciInfo")
        _check(gpu.gone)
        return _Answer(busId=gpu.pci.encode())

    def nvmlDeviceGetFieldValues(self, handle: _Handle, wanted: list[Any]) -> Any:
        gpu = self._gpu(handle, "nvmlDeviceGetFieldValues")
        _check(gpu.gone)
        values = (pynvml.c_nvmlFieldValue_t * len(wanted))()
        for element, item in zip(values, wanted, strict=True):
            element.fieldId, element.scopeId = item if isinstance(item, tuple) else (item, 0)
            _fill(element, self._field(gpu, int(element.fieldId), int(element.scopeId)))
        return values

    def nvmlDeviceGetNvLinkState(self, handle: _Handle, link: int) -> int:
        gpu = self._gpu(handle, "nvmlDeviceGetNvLinkState")
        _check(gpu.gone)
        states = gpu.link_fields.get(LINK_STATE, [])
        state = states[link] if link < len(states) else {"nvml_error": pynvml.NVML_ERROR_INVALID_ARGUMENT}
        return 0 if _value(state) == 0 else 1

    def nvmlDeviceGetGpuFabricInfoV(self, handle: _Handle, reference: Any) -> int:
        gpu, info = self._gpu(handle, "nvmlDeviceGetGpuFabricInfoV"), reference._obj
        _check(gpu.gone)
        if info.version >> 24 not in gpu.fabric_versions:
            _check(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        fabric = _value(gpu.fabric or NOT_SUPPORTED)
        info.state, info.status = fabric.get("state", 0), fabric.get("status", 0)
        info.cliqueId, info.healthMask = fabric.get("clique", 0), fabric.get("health_mask", 0)
        info.clusterUuid[:] = bytes.fromhex(fabric.get("cluster", "00" * 16))
        if hasattr(info, "healthSummary"):
            info.healthSummary = fabric.get("summary", 0)
        return 0

    def nvmlDeviceGetPlatformInfo(self, handle: _Handle, reference: Any) -> int:
        gpu, info = self._gpu(handle, "nvmlDeviceGetPlatformInfo"), reference._obj
        _check(gpu.gone)
        if info.version >> 24 not in gpu.platform_versions:
            _check(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        place = _value(gpu.platform or NOT_SUPPORTED)
        numbers = bytes(place.get(name, 0) for name in ("slot", "tray", "host", "peer", "module"))
        # Written as the driver does, over the raw bytes: through the binding's fields a NUL would end it, as it does for a reader.
        memmove(addressof(info) + 20, place.get("chassis", "").encode().ljust(16, b"\0")[:16] + numbers, 21)
        return 0

    def nvmlDeviceGetSramEccErrorStatus(self, handle: _Handle, reference: Any) -> int:
        gpu = self._gpu(handle, "nvmlDeviceGetSramEccErrorStatus")
        _check(gpu.gone)
        for name, value in _value(gpu.sram or NOT_SUPPORTED).items():
            setattr(reference._obj, name, value)
        return 0

    def nvmlDeviceGetSupportedEventTypes(self, handle: _Handle) -> int:
        gpu = self._gpu(handle, "nvmlDeviceGetSupportedEventTypes")
        _check(gpu.gone)
        return int(_value(gpu.event_types))

    def nvmlEventSetCreate(self) -> _EventSet:
        return _EventSet()

    def nvmlDeviceRegisterEvents(self, handle: _Handle, types: int, events: _EventSet) -> None:
        gpu = self._gpu(handle, "nvmlDeviceRegisterEvents")
        _check(gpu.gone or (pynvml.NVML_ERROR_INVALID_ARGUMENT if events.freed else 0))
        if types & ~int(_value(gpu.event_types)):
            _check(pynvml.NVML_ERROR_NOT_SUPPORTED)
        events.heard.setdefault(handle.index, len(gpu.xids))

    def nvmlEventSetWait_v2(self, events: _EventSet, timeout_ms: int) -> Any:
        """One event in the binding's own struct; raises Timeout after ``timeout_ms`` without one."""
        end = time.monotonic() + timeout_ms / 1000
        while True:
            state = self._state()
            _check(state.wait_error or (pynvml.NVML_ERROR_INVALID_ARGUMENT if events.freed else 0))
            for index, heard in events.heard.items():
                gpu = state.gpus[index] if index < len(state.gpus) else FakeGpu(pci="", gone=pynvml.NVML_ERROR_GPU_IS_LOST)
                events.waiting.extend((index, code) for code in gpu.xids[heard:])
                events.heard[index] = max(heard, len(gpu.xids))
            if events.waiting:
                index, code = events.waiting.popleft()
                data = pynvml.c_nvmlEventData_t(eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=code)
                data.device = cast(index + 1, pynvml.c_nvmlDevice_t)
                data.gpuInstanceId = data.computeInstanceId = 0xFFFFFFFF
                return data
            _check(next((code for i in events.heard if i < len(state.gpus) and (code := state.gpus[i].gone)), 0))
            if not state.hang_wait and time.monotonic() >= end:
                _check(pynvml.NVML_ERROR_TIMEOUT)
            time.sleep(0.2)  # a driver's wait sleeps until something happens; this one must not show in what the agent costs

    def nvmlEventSetFree(self, events: _EventSet) -> None:
        _check(pynvml.NVML_ERROR_INVALID_ARGUMENT if events.freed else 0)
        events.freed = True

    def _getter(self, name: str, handle: _Handle) -> Any:
        gpu = self._gpu(handle, name)
        _check(gpu.gone)
        value = _value(gpu.answers.get(name, NOT_SUPPORTED))
        if name == GETTERS["pids"]:
            return [_Answer(pid=pid) for pid in value]
        if name == GETTERS["utilization_percent"]:
            return _Answer(gpu=value, memory=0)
        if name == GETTERS["rows_histogram"]:
            return _Answer(**value)
        if name == GETTERS["repair_pending"]:
            return value if isinstance(value, list) else [int(value), 0]
        return value

    @staticmethod
    def _field(gpu: FakeGpu, field: int, scope: int) -> Any:
        if field in gpu.totals and scope == ALL_LINKS:
            return gpu.totals[field]
        if field in gpu.link_fields:
            links = gpu.link_fields[field]
            return links[scope] if scope < len(links) else {"nvml_error": pynvml.NVML_ERROR_INVALID_ARGUMENT}
        return gpu.fields.get(field, NOT_SUPPORTED) if scope != ALL_LINKS else NOT_SUPPORTED

    def _gpu(self, handle: _Handle, name: str) -> FakeGpu:
        while True:
            gpu = self._state().gpus[handle.index]
            if name not in gpu.hang and "*" not in gpu.hang:
                return gpu
            time.sleep(0.01)


def _check(code: int) -> None:
    if code:
        raise pynvml.NVMLError(code)


def _value(answer: Any) -> Any:
    if isinstance(answer, dict) and "nvml_error" in answer:
        _check(answer["nvml_error"])
    return answer


def _fill(element: Any, answer: Any) -> None:
    if isinstance(answer, dict):
        element.nvmlReturn = answer["nvml_error"]
    elif isinstance(answer, float):
        element.valueType, element.value.dVal = 0, answer
    elif answer < 0:
        element.valueType, element.value.siVal = 5, answer
    else:
        element.valueType, element.value.ullVal = 3, answer


def from_file() -> FakeNvml:
    """The fake whose state is in the file that ``SENTINEL_FAKE_NVML_STATE`` names; the driver child can load it."""
    path = Path(os.environ[STATE_FILE])
    seen: list[Any] = [None, FakeState()]

    def state() -> FakeState:
        stat = path.stat()
        stamp = (stat.st_mtime_ns, stat.st_ino)
        if stamp != seen[0]:
            seen[:] = stamp, msgspec.json.decode(path.read_bytes(), type=FakeState)
        current: FakeState = seen[1]
        return current

    return FakeNvml(state)


class FakeDriver:
    """The way to a simulated driver without a child process: what ``ChildDriver`` answers, from a state in this process."""

    def __init__(self, state: FakeState, clock: Callable[[], float] = time.time) -> None:
        self.state, self._clock = state, clock
        self._nvml = FakeNvml(state)
        self._readers: dict[int, IndexReader] = {}
        self._hung: dict[int, float] = {}

    async def read(self) -> dict[str, Any]:
        opened = reader.open_driver(self._nvml)
        gpus = [self._read(index) for index in range(opened["count"])]
        return {"error": opened["error"], "driver": opened["driver"], "nvml": __name__, "gpus": gpus}

    def _read(self, index: int) -> dict[str, Any]:
        gpu = self.state.gpus[index]
        if gpu.hang:
            since = self._hung.setdefault(index, self._clock())
            return {"pci": gpu.pci, "index": index, "hung_s": self._clock() - since}
        self._hung.pop(index, None)
        return self._readers.setdefault(index, IndexReader(self._nvml, index)).read(self._clock())

    async def close(self) -> None:
        """Nothing to give back."""

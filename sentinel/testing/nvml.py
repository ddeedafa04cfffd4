"""A stand-in for the ``pynvml`` module, driven by plain state that can be set, saved, and changed while somebody reads it.

This module exists so that every way in which NVML answers (and does not) can be tried without a GPU, in one process or in the
real driver child. What always holds:

* It answers through the binding's own structs, constants and error classes, so code meets the real shapes: return codes per
  field value, ``byref`` structs with versions, error classes by code.
* A function it does not know answers FunctionNotFound, as an older driver would; it never reaches a real driver.
* The state is data (JSON): answers by NVML function and by field id. ``{"nvml_error": 3}`` in a value's place is that code.
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
from probes.nvml import FIELDS, FIELDS_SLOW, LINK_COUNT, LINK_SPEED, LINK_STATE, LINK_TOTALS, IndexReader
from probes.nvml_counters import (
    ALL_LINKS,
    BANKS,
    C2C,
    C2C_COUNT,
    FEC_TAIL,
    LEGACY,
    ONCE_IN_A_WHILE,
    PER_LINK,
    SLOWDOWN_NS,
    VIOLATION_NS,
)

STATE_FILE = "SENTINEL_FAKE_NVML_STATE"  # environment: the file that from_file() reads, again whenever it changes

NOT_SUPPORTED: dict[str, int] = {"nvml_error": 3}
GETTERS = {  # names in a reading → the function that answers them
    "uuid": "nvmlDeviceGetUUID",
    "name": "nvmlDeviceGetName",
    "serial": "nvmlDeviceGetSerial",
    "architecture": "nvmlDeviceGetArchitecture",
    "pcie_gen_max": "nvmlDeviceGetMaxPcieLinkGeneration",
    "pcie_width_max": "nvmlDeviceGetMaxPcieLinkWidth",
    "pcie_gen": "nvmlDeviceGetCurrPcieLinkGeneration",
    "pcie_width": "nvmlDeviceGetCurrPcieLinkWidth",
    "margin_c": "nvmlDeviceGetMarginTemperature",
    "temperature_c": "nvmlDeviceGetTemperature",
    "clocks_event_reasons": "nvmlDeviceGetCurrentClocksEventReasons",
    "utilization_percent": "nvmlDeviceGetUtilizationRates",
    "rows_histogram": "nvmlDeviceGetRowRemapperHistogram",
    "repair_pending": "nvmlDeviceGetRepairStatus",
    "pids": "nvmlDeviceGetComputeRunningProcesses_v3",
}
_VIOLATION = {f"violation_{name}": field for name, field in VIOLATION_NS.items()}
_FIELD_IDS = {**FIELDS, **FIELDS_SLOW, **SLOWDOWN_NS, **_VIOLATION, "link_count": LINK_COUNT}


class FakeGpu(msgspec.Struct, kw_only=True):
    """One GPU. Change it through ``set`` by the names of a reading, or write answers by function and field id."""

    pci: str
    answers: dict[str, Any] = {}
    fields: dict[int, Any] = {}
    link_fields: dict[int, list[Any]] = {}  # scope = link
    totals: dict[int, Any] = {}  # scope = all links
    fabric: dict[str, Any] = {}  # state, status, clique, cluster (hex), health_mask, summary; or nvml_error
    fabric_versions: tuple[int, ...] = (2, 3)  # struct versions that this driver knows
    sram: dict[str, Any] = {}  # fields of c_nvmlEccSramErrorStatus_v1_t; or nvml_error
    platform: dict[str, Any] = {}  # chassis (text), slot, tray, host, module; or nvml_error
    platform_versions: tuple[int, ...] = (1, 2)  # struct versions that this driver knows
    gone: int = 0  # this code for every call on the handle (15: GPU is lost)
    no_handle: int = 0  # this code when its handle is looked up
    hang: tuple[str, ...] = ()  # functions that do not return while this stands; "*": all of them
    event_types: Any = 0x8  # what nvmlDeviceGetSupportedEventTypes answers: a mask (0x8: critical Xids) or nvml_error
    xids: list[int] = []  # every Xid that it has ever raised, in order; see raise_xid

    def raise_xid(self, code: int) -> FakeGpu:
        """Let an Xid happen: every event set that this GPU was registered in before hears of it, once."""
        self.xids.append(code)
        return self

    def set(self, **values: Any) -> FakeGpu:
        """Set values by their names in a reading (``recovery_action=1``, ``fabric_state=2``); None: not supported."""
        for name, value in values.items():
            answer = NOT_SUPPORTED if value is None else value
            if name in _FIELD_IDS:
                self.fields[_FIELD_IDS[name]] = answer
            elif name in GETTERS:
                self.answers[GETTERS[name]] = answer
            elif name.startswith("fabric_"):
                self.fabric[name.removeprefix("fabric_")] = value
            elif name == "platform":
                self.platform = dict(answer)
            elif name == "links":
                self.link_fields[LINK_STATE] = list(value or ())
            elif name in LINK_TOTALS:
                self.totals[LINK_TOTALS[name]] = answer
            elif name == "sram_threshold_exceeded":
                self.sram["bThresholdExceeded"] = int(value)
            elif name == "sram_uncorrected_volatile":
                self.sram["volatileUncSecDed"] = value
            else:
                raise KeyError(f"a reading of a GPU has no {name!r}")
        return self

    def count(self, name: str, more: int, link: int | None = None) -> FakeGpu:
        """Let an error counter of NVLinks rise, of one link and with it in the GPU's sum; no link: of the sum alone."""
        field = (PER_LINK | FEC_TAIL | LEGACY)[name]
        if link is not None:
            self.link_fields[field][link] += more
        if field in self.totals:
            self.totals[field] += more
        return self

    def c2c(self, links: int, **values: Any) -> FakeGpu:
        """Give it that many links to its CPU, healthy but for ``values`` by name (``status=[0, 1]``); see nvml_counters.C2C."""
        healthy = {"status": 1, "mbps": 44712, "crc": 0, "replays": 0, "replays_b2b": 0, "power": 0}
        self.fields[C2C_COUNT] = links
        for name, field in C2C.items():
            self.link_fields[field] = list(values.get(name, [healthy[name]] * links))
        return self

    def link(self, number: int, state: int | None) -> FakeGpu:
        """Set one NVLink: 0 inactive, 1 active, 2 sleep, 3 traffic disabled, None not supported."""
        self.link_fields[LINK_STATE][number] = NOT_SUPPORTED if state is None else state
        return self


class FakeState(msgspec.Struct, kw_only=True):
    """What the driver of one node would answer."""

    gpus: list[FakeGpu] = []
    driver: str = "580.159.04"
    init_error: int = 0  # 12 no library, 9 no kernel module, 18 library and module differ
    hang_init: bool = False
    wait_error: int = 0  # this code for every wait on an event set, at once (10: a wait that does not wait)
    hang_wait: bool = False

    def save(self, path: Path) -> None:
        """Write it where ``from_file`` reads it; a reader sees the old state or the new one, never half."""
        part = path.with_name(path.name + ".part")
        part.write_bytes(msgspec.json.encode(self))
        os.utime(part, ns=(time.time_ns(),) * 2)  # the kernel's own stamps are some milliseconds apart at best
        part.replace(path)


def gb200(pci: str = "0008:01:00.0", number: int = 1) -> FakeGpu:
    """A healthy GPU of a GB200 NVL72 tray: NVLink5 fields, fabric completed, Hopper's link counters not supported."""
    gpu = FakeGpu(pci=pci, fabric={"state": 3, "clique": 1, "cluster": "5e" * 16, "health_mask": 0x51AA, "summary": 1})
    gpu.sram = {"bThresholdExceeded": 0}
    gpu.platform = {"chassis": "1820325000001", "slot": 11, "tray": 1, "host": 1, "peer": 1, "module": number}
    gpu.set(uuid=f"GPU-00000000-0000-4000-8000-{number:012d}", name="NVIDIA GB200", serial=f"{1650000000000 + number}")
    gpu.set(architecture=10, pcie_gen_max=5, pcie_width_max=16, pcie_gen=5, pcie_width=16, repair_pending=False)
    gpu.set(margin_c=43, temperature_c=41, memory_temperature_c=44, clocks_event_reasons=1, utilization_percent=0, pids=[])
    gpu.set(rows_histogram={"max": 6144, "high": 0, "partial": 0, "low": 0, "none": 0})
    gpu.set(power_average_mw=171_000, power_instant_mw=170_500, power_limit_mw=1_200_000)
    gpu.set(**{name: 0 for name in _FIELD_IDS if name not in ("ecc_enabled", "link_count") and _FIELD_IDS[name] not in gpu.fields})
    gpu.set(ecc_enabled=1, link_count=18, links=[1] * 18, **dict.fromkeys(LINK_TOTALS, 0))
    gpu.set(effective_ber=15 << 8 | 238, symbol_ber=15 << 8 | 238)  # the floor of an aggregated, error-free Blackwell GPU
    gpu.link_fields[LINK_SPEED] = [53125] * 18
    for field in (PER_LINK | FEC_TAIL).values():
        gpu.link_fields[field], gpu.totals[field] = [0] * 18, 0
    gpu.fields |= {ONCE_IN_A_WHILE["link_version"]: 7, ONCE_IN_A_WHILE["switch_links"]: 18}
    gpu.fields |= dict(zip(BANKS.values(), (0, 0, 96, 0, 0), strict=True))
    return gpu.c2c(10)


def h200(pci: str = "0000:00:06.0", number: int = 1) -> FakeGpu:
    """A healthy H200 behind a hypervisor, as one was measured: no NVLink5 counters, fabric health not reported."""
    gpu = gb200(pci, number)
    gpu.set(name="NVIDIA H200", architecture=9, margin_c=50, temperature_c=37, memory_temperature_c=40, fabric_cluster="00" * 16)
    gpu.set(fabric_clique=0, fabric_health_mask=0, fabric_summary=0, power_average_mw=80_326, power_instant_mw=80_131)
    gpu.set(power_limit_mw=700_000, rows_histogram={"max": 3072, "high": 0, "partial": 0, "low": 0, "none": 0})
    gpu.set(**dict.fromkeys(LINK_TOTALS, None), platform=None)
    gpu.link_fields = {LINK_STATE: [1] * 18, LINK_SPEED: [26562] * 18, **{field: [0] * 18 for field in LEGACY.values()}}
    gpu.totals = dict.fromkeys(gpu.totals, NOT_SUPPORTED)
    gpu.fields = {i: v for i, v in gpu.fields.items() if i not in (*BANKS.values(), C2C_COUNT)}
    gpu.fields[ONCE_IN_A_WHILE["link_version"]] = 6
    return gpu


def gb200_tray() -> FakeState:
    """Four healthy GPUs at the addresses of a GB200 compute tray."""
    addresses = ("0008:01:00.0", "0009:01:00.0", "0018:01:00.0", "0019:01:00.0")
    return FakeState(gpus=[gb200(pci, n) for n, pci in enumerate(addresses, 1)])


def from_recording(recording: dict[str, Any]) -> FakeState:
    """The state that answers as a recorded host did.

    ``recording``: ``{"system": {function: answer}, "gpus": [{"getters": …, "fields": {"id:name": …}, "nvlink": {link: …}}]}``,
    an answer being ``{"ok": value}`` or ``{"nvml_error": code}``, a field ``{"ret": code, "type": valueType, "ull": value}``.
    """

    def answer(raw: dict[str, Any]) -> Any:
        return raw["ok"] if "ok" in raw else {"nvml_error": raw.get("nvml_error", 3)}

    state = FakeState(driver=recording["system"]["nvmlSystemGetDriverVersion"]["ok"])
    for raw in recording["gpus"]:
        getters = raw["getters"]
        gpu = FakeGpu(pci=getters["nvmlDeviceGetPciInfo"]["ok"]["busId"])
        gpu.answers = {name: answer(a) for name, a in getters.items() if "[" not in name and name != "temp_gpu"}
        gpu.answers["nvmlDeviceGetTemperature"] = answer(getters["temp_gpu"])
        use = gpu.answers.get("nvmlDeviceGetUtilizationRates")
        if isinstance(use, dict) and "gpu" in use:
            gpu.answers["nvmlDeviceGetUtilizationRates"] = use["gpu"]
        for key, field in raw["fields"].items():
            value = field["ull"] - (1 << 32) if field["type"] == 5 and field["ull"] >= 1 << 31 else field["ull"]
            gpu.fields[int(key.split(":")[0])] = value if field["ret"] == 0 else {"nvml_error": field["ret"]}
        gpu.link_fields[LINK_STATE] = [answer(link["state"]) for link in raw["nvlink"].values()]
        gpu.link_fields[LINK_SPEED] = [gpu.fields.get(LINK_SPEED, NOT_SUPPORTED)] * len(raw["nvlink"])
        versions = []
        for version in (2, 3):
            got = getters.get(f"nvmlDeviceGetGpuFabricInfoV[c_nvmlGpuFabricInfo_v{version}_t]", NOT_SUPPORTED)
            if "struct" in got:
                s = got["struct"]
                gpu.fabric = {"state": s["state"], "status": s["status"], "clique": s["cliqueId"], "health_mask": s["healthMask"]}
                gpu.fabric |= {"cluster": bytes(s["clusterUuid"]).hex(), "summary": s.get("healthSummary", 0)}
                versions.append(version)
        gpu.fabric_versions = tuple(versions)
        gpu.fabric = gpu.fabric or dict(NOT_SUPPORTED)
        gpu.sram = dict(NOT_SUPPORTED)
        state.gpus.append(gpu)
    return state


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

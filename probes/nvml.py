"""The raw look at one GPU through an NVML binding that is handed in: what the driver said, and nothing about what it means.

This module exists so that the only code that calls into the GPU driver is small, runs in a process of its own, and runs the
same against a fake. What always holds:

* A value that could not be measured is ``None``: not supported, no such function in this driver, another struct version.
* An answer that says something is wrong with asking (``Unknown``, ``ResetRequired``, …) is kept by code under ``unread``.
* A GPU that the driver calls lost yields its identity and ``error``, never half a reading.
* Nothing is written: error counters, modes and clocks of the GPU are shared state and stay as they are.

A reading is one flat table of plain JSON values; units are in the names (``_c`` °C, ``_mw`` milliwatt, ``_mbps`` MB/s,
``_ns`` nanoseconds). Three speeds: cheap values are read every time, values that cost a round trip to the GPU's own processor
(0.4 to 1.8 ms each, measured on an idle H200) every ``SLOW_S`` seconds, links and fabric every ``LINKS_S``, and are carried
along meanwhile; ``slow_at`` and ``links_at`` say when.
"""

from __future__ import annotations

import time
from ctypes import byref
from typing import Any

from probes.nvml_counters import ALL_LINKS, SLOWDOWN_NS, Counters
from probes.nvml_platform import read_platform
from sentinel.pci import pci_address

SLOW_S = 30.0
# Link states and the fabric's word take 2.2 ms of a core per idle H200, nine tenths of a quick look: they are asked for at every
# second one of the default cadence. A link that goes down says so in the kernel log at once (Xid 149).
LINKS_S = 7.5

# NVML return codes (nvml.h). The first set means "this was not measured" and is never a statement about health.
INVALID_ARGUMENT, NOT_SUPPORTED, FUNCTION_NOT_FOUND, VERSION_MISMATCH, DEPRECATED = 2, 3, 13, 25, 26
NOT_MEASURED = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND, VERSION_MISMATCH, DEPRECATED})
UNINITIALIZED, GPU_IS_LOST = 1, 15
HOPELESS = frozenset({UNINITIALIZED, GPU_IS_LOST})  # every further call would answer the same

# Field ids (nvml.h, NVML_FI_DEV_*). One batched call per speed.
FIELDS = {
    "ecc_enabled": 1,
    "ecc_corrected_volatile": 3,
    "ecc_uncorrected_volatile": 4,
    "ecc_corrected_aggregate": 5,
    "ecc_uncorrected_aggregate": 6,
    "rows_corrected": 142,
    "rows_uncorrected": 143,
    "rows_pending": 144,
    "rows_failure": 145,
    "power_average_mw": 185,
    "power_instant_mw": 186,
    "power_limit_mw": 190,
    "recovery_action": 230,
}
FIELDS_SLOW = {"memory_temperature_c": 82, "pcie_replays": 94}
LINK_COUNT, LINK_SPEED, LINK_STATE = 91, 164, 165  # the latter two: scope = link
LINK_TOTALS = {  # NVLink5 (Blackwell); Hopper answers NotSupported
    "malformed_packets": 206,
    "buffer_overruns": 207,
    "receive_errors": 208,
    "receive_remote_errors": 209,
    "receive_general_errors": 210,
    "local_integrity_errors": 211,
    "transmit_discards": 212,
    "recovery_successful": 213,
    "recovery_failed": 214,
    "recovery_events": 215,
    "effective_errors": 219,
    "effective_ber": 220,  # packed, see ber()
    "symbol_errors": 221,
    "symbol_ber": 222,  # packed
}
_UNION = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t
_HISTOGRAM = ("max", "high", "partial", "low", "none")


class _Gone(Exception):
    """The driver has given this GPU up; carries NVML's code and text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


def ber(packed: int) -> float:
    """A bit error rate as NVLink5 packs it: mantissa in bits 11:8, exponent in bits 7:0; 15e-255 stands for zero."""
    exponent, mantissa = packed & 0xFF, (packed >> 8) & 0xF
    return 0.0 if (mantissa, exponent) == (15, 255) else float(mantissa) * 10.0**-exponent


def open_driver(nvml: Any) -> dict[str, Any]:
    """Initialise NVML: ``{"error": None | {"code", "text"}, "driver", "count"}``. Takes seconds, or for ever."""
    try:
        nvml.nvmlInit()
        count = int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError as error:
        return {"error": {"code": int(error.value), "text": str(error)}, "driver": None, "count": 0}
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        driver = None
    return {"error": None, "driver": driver, "count": count}


def read_gpu(nvml: Any, handle: Any, index: int | None = None) -> dict[str, Any]:
    """Everything about one GPU, once. ``nvml``: the ``pynvml`` module or a fake of it, initialised."""
    return GpuReader(nvml, handle, index).read()


class IndexReader:
    """Reads the GPU behind one NVML index; a handle that cannot be had (a lost GPU) is an ``error`` reading, tried again."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml, self._index = nvml, index
        self._reader: GpuReader | None = None

    def read(self, now: float | None = None) -> dict[str, Any]:
        if self._reader is None:
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(self._index)
            except self._nvml.NVMLError as error:
                return {"pci": None, "index": self._index, "error": {"code": int(error.value), "text": str(error)}}
            self._reader = GpuReader(self._nvml, handle, self._index)
        return self._reader.read(now)


class GpuReader:
    """Reads one GPU again and again; keeps what does not change and what is read slowly. Not for two threads at once."""

    def __init__(self, nvml: Any, handle: Any, index: int | None = None) -> None:
        self._nvml, self._handle = nvml, handle
        self._counters = Counters(self._fields)
        self._fixed: dict[str, Any] = {"pci": None, "index": index}
        self._slow: dict[str, Any] = {}
        self._link: dict[str, Any] = {}
        self._unread_slow: dict[str, int] = {}
        self._unread_link: dict[str, int] = {}
        self._unread: dict[str, int] = {}

    def read(self, now: float | None = None) -> dict[str, Any]:
        """One reading; ``now`` (seconds) decides whether the slow values are due."""
        now = time.time() if now is None else now
        try:
            if "uuid" not in self._fixed:
                self._unread = {}
                self._fixed = self._identity(self._fixed["index"])
            if not self._slow or not 0 <= now - float(self._slow["slow_at"]) < SLOW_S:
                self._unread = {}
                slow = self._read_slow()
                links = int(self._fixed["link_count"] or 0)
                self._slow = {**slow, **self._counters.read(links, slow["link_totals"], now), "slow_at": now}
                self._unread_slow = self._unread
            if not self._link or not 0 <= now - float(self._link["links_at"]) < LINKS_S:
                self._unread = {}
                self._link = {**self._read_links(), "links_at": now}
                self._unread_link = self._unread
            self._unread = {**self._unread_slow, **self._unread_link}
            fast = self._read_fast()
        except _Gone as gone:
            return {"pci": self._fixed["pci"], "index": self._fixed["index"], "error": {"code": gone.code, "text": gone.text}}
        return {**self._fixed, **self._slow, **self._link, **fast, "unread": self._unread}

    # -- asking -------------------------------------------------------------------------------------------------------

    def _ask(self, name: str, *args: Any) -> Any:
        """One call; None when it was not measured. Raises _Gone when the driver has given the GPU up."""
        function = getattr(self._nvml, name, None)  # an older binding may lack it
        if function is None:
            return None
        try:
            return function(self._handle, *args)
        except self._nvml.NVMLError as error:
            self._note(name, int(error.value), str(error))
            return None

    def _note(self, name: str, code: int, text: str) -> None:
        if code in HOPELESS:
            raise _Gone(code, text)
        if code not in NOT_MEASURED:
            self._unread[name] = code

    def _fields(self, wanted: list[tuple[str, int, int]]) -> dict[tuple[str, int], Any]:
        """One batched call for (name, field, scope); each element has its own return code, which is what counts."""
        got = self._ask("nvmlDeviceGetFieldValues", [(field, scope) for _, field, scope in wanted])
        values: dict[tuple[str, int], Any] = {}
        for (name, _, scope), answer in zip(wanted, got or (), strict=False):
            code = int(answer.nvmlReturn)
            if code == 0:
                values[name, scope] = getattr(answer.value, _UNION[answer.valueType]) if answer.valueType < len(_UNION) else None
            elif code != INVALID_ARGUMENT:  # InvalidArgument: a scope this GPU does not have
                self._note(f"field {name}", code, f"NVML code {code} for {name}")
        return values

    # -- what is read, by how often it changes ------------------------------------------------------------------------

    def _identity(self, index: int | None) -> dict[str, Any]:
        pci = self._ask("nvmlDeviceGetPciInfo")
        address = _text(pci.busId) if pci is not None else None
        self._fixed = {"pci": _address(address), "index": index}  # known even when a later call fails
        count = self._fields([("link_count", LINK_COUNT, 0)]).get(("link_count", 0))
        return {
            **self._fixed,
            "uuid": _text(self._ask("nvmlDeviceGetUUID")),
            "name": _text(self._ask("nvmlDeviceGetName")),
            "serial": _text(self._ask("nvmlDeviceGetSerial")),
            "architecture": self._ask("nvmlDeviceGetArchitecture"),
            "link_count": count,
            "platform": read_platform(self._nvml, self._ask),
            "pcie_gen_max": self._ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            "pcie_width_max": self._ask("nvmlDeviceGetMaxPcieLinkWidth"),
        }

    def _read_slow(self) -> dict[str, Any]:
        links = range(self._fixed["link_count"] or 0)
        wanted = [(name, field, 0) for name, field in (FIELDS_SLOW | SLOWDOWN_NS).items()]
        wanted += [("speed", LINK_SPEED, link) for link in links]
        wanted += [(name, field, ALL_LINKS) for name, field in LINK_TOTALS.items()] if links else []
        values = self._fields(wanted)
        totals = {name: values[name, ALL_LINKS] for name in LINK_TOTALS if (name, ALL_LINKS) in values}
        histogram = self._ask("nvmlDeviceGetRowRemapperHistogram")
        repair = self._ask("nvmlDeviceGetRepairStatus")
        sram = self._sram()
        return {
            **{name: values.get((name, 0)) for name in FIELDS_SLOW},
            **self._counters.slowed(values),
            "link_speed_mbps": [values.get(("speed", link)) for link in links] or None,
            "link_totals": totals or None,
            "rows_histogram": None if histogram is None else {k: int(getattr(histogram, k)) for k in _HISTOGRAM},
            "repair_pending": None if repair is None else bool(repair[0] or repair[1]),
            "sram_uncorrected_volatile": None if sram is None else int(sram.volatileUncParity + sram.volatileUncSecDed),
            "sram_threshold_exceeded": None if sram is None else bool(sram.bThresholdExceeded),
            "margin_c": self._ask("nvmlDeviceGetMarginTemperature"),
            "pcie_gen": self._ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            "pcie_width": self._ask("nvmlDeviceGetCurrPcieLinkWidth"),
        }

    def _read_links(self) -> dict[str, Any]:
        links = range(self._fixed["link_count"] or 0)
        values = self._fields([("state", LINK_STATE, link) for link in links]) if links else {}
        return {**self._fabric(), "links": self._links([values.get(("state", link)) for link in links])}

    def _read_fast(self) -> dict[str, Any]:
        values = self._fields([(n, f, 0) for n, f in FIELDS.items()])
        use = self._ask("nvmlDeviceGetUtilizationRates")
        plain = {name: values.get((name, 0)) for name in FIELDS}
        for name in ("ecc_enabled", "rows_pending", "rows_failure"):
            plain[name] = None if plain[name] is None else bool(plain[name])
        return {
            **plain,
            "clocks_event_reasons": self._ask("nvmlDeviceGetCurrentClocksEventReasons"),
            "temperature_c": self._ask("nvmlDeviceGetTemperature", 0),  # sensor 0: the GPU die
            "utilization_percent": None if use is None else int(use.gpu),
            "pids": self._pids(),
        }

    def _links(self, states: list[int | None]) -> list[int | None] | None:
        """0 inactive, 1 active, 2 sleep, 3 traffic disabled, None not measured. Older drivers only have the getter."""
        if states and all(s is None for s in states):
            states = [self._ask("nvmlDeviceGetNvLinkState", link) for link in range(len(states))]
        return states if any(s is not None for s in states) else None

    def _fabric(self) -> dict[str, Any]:
        """Version 3 of the struct adds the summary; a driver that does not know it answers by version 2."""
        for version in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"):
            kind = getattr(self._nvml, version, None)
            info = kind() if kind else None
            if info is None or self._ask("nvmlDeviceGetGpuFabricInfoV", byref(info)) is None:
                continue
            return {
                "fabric_state": int(info.state),
                "fabric_status": int(info.status),
                "fabric_clique": int(info.cliqueId),
                "fabric_cluster": bytes(info.clusterUuid).hex(),
                "fabric_health_mask": int(info.healthMask),
                "fabric_summary": int(getattr(info, "healthSummary", 0)),
            }
        return {"fabric_state": None}

    def _sram(self) -> Any:
        kind = getattr(self._nvml, "c_nvmlEccSramErrorStatus_v1_t", None)
        status = kind() if kind else None
        return status if status is not None and self._ask("nvmlDeviceGetSramEccErrorStatus", byref(status)) is not None else None

    def _pids(self) -> list[int] | None:
        names = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3")
        lists = [got for got in map(self._ask, names) if got is not None]
        return sorted({int(p.pid) for got in lists for p in got}) if lists else None


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _address(text: str | None) -> str | None:
    try:
        return pci_address(text or "")
    except ValueError:
        return None  # kept out rather than mapped to another GPU

"""What the driver of one node would answer, as data: what the simulated NVML (``sentinel.testing.nvml``) reads.

This module exists so that a test, a scenario or a file says what a GPU answers in the words of a reading. What always holds: the
state is JSON, answers by NVML function and by field id, and ``{"nvml_error": 3}`` in a value's place is that return code.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from probes.nvml import FIELDS, FIELDS_SLOW, LINK_COUNT, LINK_STATE, LINK_TOTALS
from probes.nvml_counters import C2C, C2C_COUNT, FEC_TAIL, LEGACY, PER_LINK, SLOWDOWN_NS, VIOLATION_NS

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
FIELD_IDS = {**FIELDS, **FIELDS_SLOW, **SLOWDOWN_NS, **_VIOLATION, "link_count": LINK_COUNT}


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
            if name in FIELD_IDS:
                self.fields[FIELD_IDS[name]] = answer
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

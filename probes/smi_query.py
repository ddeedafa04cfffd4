"""``nvidia-smi -q``, as text and as XML: every value that the gpu probe would read, under the probe's own names.

This module exists so that both forms are read by one table of where each value stands. What always holds:

* A part of the output is enough (``grep -A5 Fabric``, one section, a cut-off end); a block that names no GPU is an unnamed one.
* XML is read as a stream with no document type of its own: entities are refused, depth, elements and text are bounded, and
  what came before a damaged place counts.

Checked against the output of driver 580.159.04 on two H200s; rows that only other drivers print are named beside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from xml.parsers import expat  # entities are refused below, and nothing outside is ever fetched

from probes import smi_values as v
from probes.smi_values import Gpus, Make

DEPTH_MAX, ELEMENTS_MAX, CHARS_MAX = 24, 200_000, 1 << 24

# name in a reading, where -q has it, where -q -x has it, how its words become a value
_ECC, _FABRIC, _LINK = "ECC Errors/", "Fabric/", "PCI/GPU Link Info/"
ROWS: tuple[tuple[str, str, str, Make], ...] = (
    ("name", "Product Name", "product_name", lambda w: w),
    ("architecture", "Product Architecture", "product_architecture", v.architecture),
    ("serial", "Serial Number", "serial", lambda w: None if v.absent(w) else w),
    ("uuid", "GPU UUID", "uuid", lambda w: None if v.absent(w) else w),
    ("recovery_action", "GPU Reset Status/Drain and Reset Recommended", "gpu_reset_status/drain_and_reset_recommended", v.flag(4)),
    ("recovery_action", "GPU Reset Status/Reset Required", "gpu_reset_status/reset_required", v.flag(1)),  # before R565
    ("recovery_action", "GPU Recovery Action", "gpu_recovery_action", v.recovery),
    ("ecc_enabled", "ECC Mode/Current", "ecc_mode/current_ecc", lambda w: {"Enabled": True, "Disabled": False}.get(w or "")),
    ("sram_threshold_exceeded", _ECC + "Aggregate/SRAM Threshold Exceeded", "ecc_errors/aggregate/sram_threshold_exceeded", v.yes),
    ("rows_corrected", "Remapped Rows/Correctable Error", "remapped_rows/remapped_row_corr", v.whole),
    ("rows_uncorrected", "Remapped Rows/Uncorrectable Error", "remapped_rows/remapped_row_unc", v.whole),
    ("rows_pending", "Remapped Rows/Pending", "remapped_rows/remapped_row_pending", v.yes),
    ("rows_failure", "Remapped Rows/Remapping Failure Occurred", "remapped_rows/remapped_row_failure", v.yes),
    ("temperature_c", "Temperature/GPU Current Temp", "temperature/gpu_temp", v.whole),
    ("margin_c", "Temperature/GPU T.Limit Temp", "temperature/gpu_temp_tlimit", v.whole),
    ("memory_temperature_c", "Temperature/Memory Current Temp", "temperature/memory_temp", v.whole),
    ("power_average_mw", "GPU Power Readings/Average Power Draw", "gpu_power_readings/average_power_draw", v.milliwatts),
    ("power_instant_mw", "GPU Power Readings/Instantaneous Power Draw", "gpu_power_readings/instant_power_draw", v.milliwatts),
    ("power_limit_mw", "GPU Power Readings/Current Power Limit", "gpu_power_readings/current_power_limit", v.milliwatts),
    ("utilization_percent", "Utilization/GPU", "utilization/gpu_util", v.whole),
    ("pcie_gen", _LINK + "PCIe Generation/Current", "pci/pci_gpu_link_info/pcie_gen/current_link_gen", v.whole),
    ("pcie_gen_max", _LINK + "PCIe Generation/Max", "pci/pci_gpu_link_info/pcie_gen/max_link_gen", v.whole),
    ("pcie_width", _LINK + "Link Width/Current", "pci/pci_gpu_link_info/link_widths/current_link_width", v.whole),
    ("pcie_width_max", _LINK + "Link Width/Max", "pci/pci_gpu_link_info/link_widths/max_link_width", v.whole),
    ("pcie_replays", "PCI/Replays Since Reset", "pci/replay_counter", v.whole),
    ("fabric_state", _FABRIC + "State", "fabric/state", v.fabric_state),
    ("fabric_status", _FABRIC + "Status", "fabric/status", v.code),
    ("fabric_clique", _FABRIC + "CliqueId", "fabric/cliqueId", v.whole),
    ("fabric_cluster", _FABRIC + "ClusterUUID", "fabric/clusterUuid", v.cluster),
)
_UNCORRECTED = tuple(  # their sum is what NVML counts as uncorrected
    (f"{_ECC}Volatile/{text}", f"ecc_errors/volatile/{xml}") for text, xml in (
        ("SRAM Uncorrectable Parity", "sram_uncorrectable_parity"), ("SRAM Uncorrectable SEC-DED", "sram_uncorrectable_secded"),
        ("SRAM Uncorrectable", "sram_uncorrectable"), ("DRAM Uncorrectable", "dram_uncorrectable"),
    )  # "SRAM Uncorrectable": before R550
)  # fmt: skip
_HEALTH = {
    "summary": ("Summary", "summary"), "bandwidth": ("Bandwidth", "bandwidth"),
    "route_recovery": ("Route Recovery in progress", "route_recovery_in_progress"),
    "route_unhealthy": ("Route Unhealthy", "route_unhealthy"),
    "access_timeout": ("Access Timeout Recovery", "access_timeout_recovery"),
    "configuration": ("Incorrect Configuration", "incorrect_configuration"),
    "partition": ("Partition Assigned", "partition_assigned"), "manager": ("GFM State", "gfm_state"),
}  # fmt: skip
_HISTOGRAM = ("max", "high", "partial", "low", "none")
_REASONS = {  # nvml.h nvmlClocksEventReasons
    "idle": 0x1, "applications clocks setting": 0x2, "sw power cap": 0x4, "hw slowdown": 0x8, "sync boost": 0x10,
    "sw thermal slowdown": 0x20, "hw thermal slowdown": 0x40, "hw power brake slowdown": 0x80, "display clock setting": 0x100,
}  # fmt: skip
_XML_REASONS = {"gpu_idle": "idle", "display_clocks_setting": "display clock setting"}

_GPU = re.compile(r"GPU ([0-9A-Fa-f]{1,8}:[0-9A-Fa-f:.]{2,12})\s*$")
_PAIR = re.compile(r"(\s*)([A-Z][\w .()/-]{0,60}?)\s*:(?: (.{0,200}))?$")
_TITLE = re.compile(r"(\s+)([A-Z][\w .()/-]{0,60}?)\s*$")
# Rows that say something without the block they belong to, when somebody has grepped for them.
LONE = frozenset({"GPU Recovery Action", "Remapping Failure Occurred", "SRAM Threshold Exceeded"})
_LONE_PATHS = {"Remapping Failure Occurred": "Remapped Rows/Remapping Failure Occurred",
               "SRAM Threshold Exceeded": _ECC + "Aggregate/SRAM Threshold Exceeded"}  # fmt: skip
_BLOCKS = frozenset({
    "Fabric", "Remapped Rows", "ECC Errors", "Clocks Event Reasons", "Clocks Throttle Reasons", "GPU Reset Status",
})  # fmt: skip


class Query:
    """Takes the lines of a text one by one; those of ``nvidia-smi -q`` become values of GPUs."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._flat: dict[str, str] | None = None  # of the GPU whose block this is
        self._stack: list[tuple[int, str]] = []
        self._name: str | None = None  # its address as printed
        self.driver: str | None = None

    def line(self, line: str) -> bool:
        """Whether the line is one of this output."""
        if (match := _GPU.match(line)) is not None:
            self.end()
            self._flat, self._name = {}, match[1]
            return True
        if (match := _PAIR.match(line)) is not None:
            return self._pair(len(match[1]), match[2], (match[3] or "").strip())
        if (match := _TITLE.match(line)) is not None and (self._flat is not None or match[2] in _BLOCKS):
            if self._flat is None or (self._name is None and any(key.startswith(match[2] + "/") for key in self._flat)):
                self.end()
                self._flat = {}
            self._push(len(match[1]), match[2])
            return True
        return False

    def _pair(self, indent: int, key: str, value: str) -> bool:
        if key == "Driver Version" and self._flat is None:
            self.driver = value[: v.TEXT_CHARS]
            return True
        if self._flat is None and key not in LONE:
            return False
        if self._flat is None or (self._name is None and key in LONE and _LONE_PATHS.get(key, key) in self._flat):
            self.end()
            self._flat = {}
        self._push(indent, key)
        names = [name for _, name in self._stack]
        path = "/".join(names)
        if len(names) == 1 and key in _LONE_PATHS:
            path = _LONE_PATHS[key]
        if len(self._flat) < 1000:
            self._flat[path] = value
        return True

    def _push(self, indent: int, name: str) -> None:
        while self._stack and self._stack[-1][0] >= indent:
            self._stack.pop()
        if len(self._stack) < DEPTH_MAX:
            self._stack.append((indent, name))

    def end(self) -> None:
        """A block ends: give what it said to its GPU."""
        flat, name = self._flat, self._name
        self._flat, self._name, self._stack = None, None, []
        if not flat:
            return
        if name is not None:  # the address stands at the left edge, its rows below it
            pci = v.address(name)
            uuid = flat.get("GPU UUID")
            gpu = self._gpus.named(pci=pci, uuid=None if v.absent(uuid) else uuid) if pci or uuid else self._gpus.unnamed("name")
        else:
            said = {name for name, text, _, _ in ROWS if text in flat}
            gpu = self._gpus.unnamed(*said)
        fill(gpu, flat, xml=False)


def fill(gpu: dict[str, Any], flat: dict[str, str], *, xml: bool) -> None:
    """Put the values of one block, by path, under the names of a reading. A row that is absent leaves the value as it was."""
    for name, text, path, make in ROWS:
        word = flat.get(path if xml else text)
        if word is not None:
            value = make(word)
            if value is not None or name not in gpu:
                gpu[name] = value
            v.refused(gpu, name, word)
    counts = [v.whole(flat.get(path if xml else text)) for text, path in _UNCORRECTED]
    if any(c is not None for c in counts):
        gpu["ecc_uncorrected_volatile"] = sum(c for c in counts if c is not None)
        sram = [c for c in counts[:3] if c is not None]
        gpu["sram_uncorrected_volatile"] = sum(sram) if sram else None
    repairs = [v.yes(flat.get(p)) for p in (
        ("ecc_errors/channel_repair_pending", "ecc_errors/tpc_repair_pending") if xml
        else (_ECC + "Channel Repair Pending", _ECC + "TPC Repair Pending")
    )]  # fmt: skip
    if any(r is not None for r in repairs):
        gpu["repair_pending"] = any(repairs)
    banks = {
        k: v.whole(flat.get(
            f"remapped_rows/row_remapper_histogram/row_remapper_histogram_{k}" if xml
            else f"Remapped Rows/Bank Remap Availability Histogram/{k.capitalize()}"
        )) for k in _HISTOGRAM
    }  # fmt: skip
    if all(n is not None for n in banks.values()):
        gpu["rows_histogram"] = banks
    prefix = "fabric/health/" if xml else "Fabric/Health/"
    said = {name: flat.get(prefix + (path if xml else text)) for name, (text, path) in _HEALTH.items()}
    if any(word is not None for word in said.values()):
        gpu["fabric_health_mask"], gpu["fabric_summary"] = v.health(said)
    reasons = dict(_reasons(flat, xml))
    if reasons:
        gpu["clocks_event_reasons"] = sum(bit for bit, active in reasons.items() if active)


def _reasons(flat: dict[str, str], xml: bool) -> Iterator[tuple[int, bool]]:
    roots = ("clocks_event_reasons/", "clocks_throttle_reasons/") if xml else ("Clocks Event Reasons/", "Clocks Throttle Reasons/")
    for path, word in flat.items():
        if path.startswith(roots) and word in ("Active", "Not Active"):
            name = path.rpartition("/")[2]
            if xml:
                name = re.sub(r"^clocks_(?:event|throttle)_reason_", "", name)
                name = _XML_REASONS.get(name, name.replace("_", " "))
            if (bit := _REASONS.get(name.lower())) is not None:
                yield bit, word == "Active"


class _Refused(Exception):
    pass


def read_xml(text: str, gpus: Gpus) -> str | None:
    """Take every GPU of ``nvidia-smi -q -x``; returns the driver's version where said. Damage ends the reading, not the program."""
    reader = _Xml(gpus)
    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = reader.start, reader.stop
    parser.CharacterDataHandler = reader.characters
    parser.EntityDeclHandler = parser.UnparsedEntityDeclHandler = parser.ElementDeclHandler = reader.refuse
    parser.StartDoctypeDeclHandler = reader.doctype
    try:
        parser.Parse(text[:CHARS_MAX].encode("utf-8", "replace"), True)
    except (expat.ExpatError, _Refused):
        reader.finish()
    return reader.driver


class _Xml:
    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._path: list[str] = []
        self._words: list[str] = []
        self._elements = 0
        self._flat: dict[str, str] | None = None
        self._id = ""
        self.driver: str | None = None

    def refuse(self, *_: Any) -> None:
        raise _Refused

    def doctype(self, name: str, system: str | None, public: str | None, internal: int) -> None:
        if internal:
            raise _Refused

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._elements += 1
        if self._elements > ELEMENTS_MAX or len(self._path) >= DEPTH_MAX:
            raise _Refused
        self._path.append(name)
        self._words = []
        if len(self._path) == 2 and name == "gpu":
            self._flat, self._id = {}, attributes.get("id", "")

    def characters(self, data: str) -> None:
        if len(self._words) < 16:
            self._words.append(data[: v.TEXT_CHARS])

    def stop(self, name: str) -> None:
        word = "".join(self._words).strip()
        if self._flat is not None and len(self._path) > 2 and word and len(self._flat) < 1000:
            self._flat["/".join(self._path[2:])] = word[: v.TEXT_CHARS]
        if self._path == ["nvidia_smi_log", "driver_version"]:
            self.driver = word[: v.TEXT_CHARS]
        self._path.pop()
        self._words = []
        if len(self._path) == 1:
            self.finish()

    def finish(self) -> None:
        flat, self._flat = self._flat, None
        if flat:
            uuid = flat.get("uuid")
            fill(self._gpus.named(pci=v.address(self._id), uuid=None if v.absent(uuid) else uuid), flat, xml=True)

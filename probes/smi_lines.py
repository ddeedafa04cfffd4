"""The other outputs of nvidia-smi, and metrics of DCGM: table, NVLink status and errors, and the sentences of a failing tool.

This module exists so that a paste of any of them adds to the same GPUs. What always holds:

* A sentence counts where the tool prints it: at the start of a line. Inside another program's line it is quoted, not said.
* An address that is none (``000:BA:80.0``) is kept as text and mapped to no GPU.
* A number of a metric that means "blank" is None; ``DCGM_FI_DEV_XID_ERRORS`` is the last number that a monitor saw, kept as a hint.
"""

from __future__ import annotations

import re
from typing import Any

from probes import smi_values as v
from probes.smi_values import Gpus

_HEADER = re.compile(r"GPU (\d{1,4}): (.{1,80}?) \(UUID: ([\w-]{1,64})\)")
_SPEED = re.compile(r"\s*Link (\d{1,2}): (?:(\d{1,4}(?:\.\d{1,4})?) GB/s|<?(in[aA]ctive|[dD]isabled|[sS]leep)>?)\s*$")
_COUNT = re.compile(r"\s*Link (\d{1,2}): ([A-Za-z][\w -]{2,60}?): (\S{1,32})\s*$")
_ALL_DOWN = re.compile(r"\s*NVML: ?Unable to retrieve NVLink information as all links are inactive", re.IGNORECASE)
_STATES = {"inactive": 0, "disabled": 3, "sleep": 2}  # nvml.h NVML_NVLINK_STATE_*
_TOTALS = {  # rows of ``nvlink -e`` (NVLink5; "recovery errors": NVLink4 and older) → names in a reading
    "malformed packet errors": "malformed_packets", "buffer overrun errors": "buffer_overruns", "rx errors": "receive_errors",
    "rx remote errors": "receive_remote_errors", "rx general errors": "receive_general_errors",
    "local link integrity errors": "local_integrity_errors", "tx discards": "transmit_discards",
    "link recovery successful events": "recovery_successful", "link recovery failed events": "recovery_failed",
    "total link recovery events": "recovery_events", "recovery errors": "dl_recovery",
    "effective errors": "effective_errors", "symbol errors": "symbol_errors",
}  # fmt: skip
_RATES = {"effective ber": "effective_ber", "symbol ber": "symbol_ber"}
_BER = re.compile(r"(\d{1,2})e-(\d{1,3})")

_CELL = r"(?:On|Off|N/A|ERR!)"
_ROW_1 = re.compile(
    rf"\|\s*(\d{{1,4}})\s+(\S.{{0,60}}?)\s+{_CELL}\s*\|\s*([0-9A-Fa-f:.]{{7,20}})\s+{_CELL}\s*\|\s*(\S{{1,16}})\s*\|"
)
_ROW_2 = re.compile(
    r"\|\s*(\S{1,8})\s+(-?\d{1,4}C|N/A|ERR!)\s+(P\d{1,2}|N/A|ERR!|Unknown)\s+(\d{1,5}W|N/A|ERR!)\s*/\s*(\d{1,5}W|N/A|ERR!)\s*\|"
    r"[^|]{0,60}\|\s*(\d{1,3}%|N/A|ERR!)"
)
_VERSION = re.compile(r"\| NVIDIA-SMI \S+\s+(?:Kernel )?Driver Version: (\S{1,32})")

_HANDLE = re.compile(
    r"(?:[Ee]rror: |std(?:out|err): )?Unable to determine the device handle for (?i:GPU) ?"
    r"(?:\d{1,3}: )?([0-9A-Fa-f:.]{3,24}): (.{1,160})"
)
_INIT = re.compile(r"Failed to initialize NVML: (.{1,120})")
_SENTENCES = (
    ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver", 9),
    ("NVIDIA-SMI couldn't find libnvidia-ml.so", 12),
)
_NO_DEVICES = ("No devices were found", "No devices found.")
_NOT_RESET = re.compile(r"The following GPUs could not be reset", re.IGNORECASE)
_NOT_RESET_GPU = re.compile(r"\s*GPU ([0-9A-Fa-f:.]{7,20}): (.{1,120})")
_RESET_SENTENCE = re.compile(
    r"\s*(?:Resetting GPU ([0-9A-Fa-f:.]{7,20}) is not supported|GPU ([0-9A-Fa-f:.]{7,20}) is currently in use by another process"
    r"|Unable to reset (?:this )?GPU(?: ([0-9A-Fa-f:.]{7,20}))?\b|GPU Reset couldn't run because GPU ([0-9A-Fa-f:.]{7,20}) )"
)

_METRIC = re.compile(r"(DCGM_FI_DEV_[A-Z0-9_]{2,64})(?:\{([^}]{0,2000})\})?(?:\s+(\S{1,32}))?(?:\s+\d{1,16})?\s*$")
_LABEL = re.compile(r'(\w{1,32})="((?:[^"\\]|\\.){0,200})"')
_METRICS: dict[str, tuple[str, v.Make]] = {
    "DCGM_FI_DEV_FABRIC_HEALTH_MASK": ("fabric_health_mask", lambda n: n),
    "DCGM_FI_DEV_ROW_REMAP_PENDING": ("rows_pending", bool),
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": ("rows_failure", bool),
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": ("rows_uncorrected", lambda n: n),
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": ("rows_corrected", lambda n: n),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": ("ecc_uncorrected_volatile", lambda n: n),
    "DCGM_FI_DEV_GPU_RECOVERY_ACTION": ("recovery_action", lambda n: n),
    "DCGM_FI_DEV_FABRIC_MANAGER_STATUS": ("fabric_state", {0: 0, 1: 1, 2: 2, 3: 3, 4: 3}.get),
    "DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION": ("recovery_action", lambda n: n),
}
BLANK = 0x7FFFFFF0  # dcgm_structs.h: DCGM_INT32_BLANK, and DCGM_INT64_BLANK above it

# Field names of ``nvidia-smi --query-gpu``, as CSV columns and where somebody wrote them as "name = value".
QUERY_FIELDS: dict[str, tuple[str, v.Make]] = {
    "gpu_recovery_action": ("recovery_action", v.recovery),
    "remapped_rows.pending": ("rows_pending", v.yes),
    "remapped_rows.failure": ("rows_failure", v.yes),
    "remapped_rows.uncorrectable": ("rows_uncorrected", v.whole),
    "remapped_rows.correctable": ("rows_corrected", v.whole),
    "ecc.errors.uncorrected.volatile.total": ("ecc_uncorrected_volatile", v.whole),
    "temperature.gpu": ("temperature_c", v.whole),
    "temperature.gpu.tlimit": ("margin_c", v.whole),
    "fabric.state": ("fabric_state", v.fabric_state),
    "fabric.status": ("fabric_status", v.code),
}
_NAMES = frozenset({*QUERY_FIELDS, "index", "name", "gpu_name", "uuid", "gpu_uuid", "pci.bus_id", "gpu_bus_id"})
_ASSIGNED = re.compile(r"\s*([a-z][\w.]{3,48})\s*[=:]\s*([^,]{1,64}?)\s*$")


class Lines:
    """Takes the lines of a text one by one. ``error``: why NVML could not be asked; ``refused``: GPUs that were not reset."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._gpu: dict[str, Any] | None = None  # whose links follow
        self._row: dict[str, Any] | None = None  # whose second table row follows
        self._resets = self._columns = False
        self._csv: list[str] = []
        self.driver: str | None = None
        self.error: dict[str, Any] | None = None
        self.refused: list[dict[str, Any]] = []
        self.gauges: list[int] = []
        self.empty = False

    def line(self, line: str) -> bool:
        """Whether the line is one of these outputs'."""
        line = line.lstrip()
        first = line[:1]
        if first == "|":
            return self._table(line)
        if self._resets:
            if (match := _NOT_RESET_GPU.match(line)) is not None:
                self.refused.append({"pci": v.address(match[1]), "said": match[1], "why": match[2].strip()})
                return True
            self._resets = not line.strip()
        if self._csv and line.count(",") == len(self._csv) - 1:
            return self._csv_row(line)
        if first == "L":
            return self._link(line)
        if line.startswith("DCGM_FI_DEV_"):
            return self._metric(line)
        return self._sentence(line)

    def _sentence(self, line: str) -> bool:
        if (match := _HEADER.match(line)) is not None:
            self._gpu = self._gpus.named(uuid=match[3], index=int(match[1]))
            self._gpu.setdefault("name", match[2])
        elif _ALL_DOWN.match(line) is not None:
            gpu = self._gpu or self._gpus.unnamed("links")
            gpu["links"] = [0]  # how many there are is not said
        elif (match := _HANDLE.match(line)) is not None:
            self._no_handle(match[1], match[2].strip())
        elif (match := _INIT.match(line)) is not None:
            code = v.code(match[1])
            self.error = {"code": 999 if code is None else code, "text": match[1].strip()}
        elif line.startswith(_NO_DEVICES):
            self.empty = True
        elif _NOT_RESET.match(line) is not None:
            self._resets = True
        elif (match := _RESET_SENTENCE.match(line)) is not None:
            said = next((g for g in match.groups() if g), "")
            self.refused.append({"pci": v.address(said), "said": said, "why": line.strip()[: v.TEXT_CHARS]})
        elif (code := next((n for s, n in _SENTENCES if line.startswith(s)), None)) is not None:
            self.error = {"code": code, "text": line.strip()[: v.TEXT_CHARS]}
        else:
            return self._fields(line)
        return True

    def _no_handle(self, said: str, why: str) -> None:
        pci, code = v.address(said), v.code(why)
        gpu = self._gpus.named(pci=pci) if pci else self._gpus.unnamed("error")
        if code == 16:  # it waits for its reset; everything else about it is refused
            gpu["unread"]["handle"] = 16
        else:
            gpu["error"] = {"code": code, "text": f"{why} (GPU {said})"}

    def _link(self, line: str) -> bool:
        if (match := _SPEED.match(line)) is not None:
            gpu = self._gpu or self._gpus.unnamed()
            number = int(match[1])
            if self._gpu is None and number == 0 and gpu.get("links"):
                gpu = self._gpus.unnamed("links")  # the next GPU, whose name was cut off
            v.link(gpu, "links", number, 1 if match[2] else _STATES.get(match[3].lower()))
            if match[2]:
                v.link(gpu, "link_speed_mbps", number, round(float(match[2]) * 1000))
            return True
        if (match := _COUNT.match(line)) is not None:
            gpu, label = self._gpu or self._gpus.unnamed(), match[2].lower()
            if label not in _TOTALS and label not in _RATES:
                return True  # traffic, FEC history, Hopper's counters
            totals = gpu.setdefault("link_totals", {})
            if label in _TOTALS and (count := v.whole(match[3])) is not None:
                totals[_TOTALS[label]] = totals.get(_TOTALS[label], 0) + count
            elif label in _RATES and (ber := _BER.fullmatch(match[3])) is not None:
                packed = (int(ber[1]) & 0xF) << 8 | min(int(ber[2]), 255)
                worst = totals.get(_RATES[label], 0xFF)
                totals[_RATES[label]] = packed if (packed & 0xFF) < (worst & 0xFF) or worst == 0xFF else worst
            return True
        return False

    def _table(self, line: str) -> bool:
        if (match := _ROW_1.match(line)) is not None:
            pci = v.address(match[3])
            gpu = self._gpus.named(pci=pci, index=int(match[1])) if pci else self._gpus.unnamed("name")
            gpu["name"] = None if match[2] == "ERR!" else match[2].rstrip(". ") if "..." in match[2] else match[2]
            gpu["ecc_uncorrected_volatile"] = v.whole(match[4])
            self._row = gpu
            return True
        if self._row is not None and (match := _ROW_2.match(line)) is not None:
            gpu, self._row = self._row, None
            if match[2] == match[3] == match[4] == "ERR!":
                gpu["failed"] = "nvidia-smi prints ERR! for every value of this GPU"
            gpu["temperature_c"], gpu["power_instant_mw"] = v.whole(match[2]), v.milliwatts(match[4])
            gpu["power_limit_mw"], gpu["utilization_percent"] = v.milliwatts(match[5]), v.whole(match[6])
            return True
        if (match := _VERSION.match(line)) is not None:
            self.driver = match[1]
            return True
        return False

    def _fields(self, line: str) -> bool:
        names = [re.sub(r" \[.*?\]$", "", n.strip()) for n in line.split(",")] if "," in line and len(line) < 2000 else []
        if names and all(n in _NAMES or re.fullmatch(r"[a-z][\w.]*", n) for n in names) and _NAMES & set(names):
            self._csv = names
            return True
        if (match := _ASSIGNED.match(line)) is not None and match[1] in QUERY_FIELDS:
            name, make = QUERY_FIELDS[match[1]]
            self._gpus.unnamed(name)[name] = make(match[2])
            return True
        return False

    def _csv_row(self, line: str) -> bool:
        row = dict(zip(self._csv, (cell.strip() for cell in line.split(",")), strict=True))
        index = v.whole(row.get("index"))
        uuid, pci = row.get("uuid") or row.get("gpu_uuid"), v.address(row.get("pci.bus_id") or row.get("gpu_bus_id"))
        made = {QUERY_FIELDS[k][0]: QUERY_FIELDS[k][1](word) for k, word in row.items() if k in QUERY_FIELDS}
        named = pci is not None or uuid is not None or index is not None
        gpu = self._gpus.named(pci=pci, uuid=uuid, index=index) if named else self._gpus.unnamed(*made)
        gpu.update(made)
        for field, word in row.items():
            v.refused(gpu, field, word)
        return True

    def _metric(self, line: str) -> bool:
        if (match := _METRIC.match(line)) is None:
            return False
        labels = dict(_LABEL.findall(match[2] or ""))
        value = _metric_value(match[3])
        if match[1] == "DCGM_FI_DEV_XID_ERRORS":
            code = value if value is not None else v.whole(labels.get("err_code"))
            if code and len(self.gauges) < 64:
                self.gauges.append(code)
        elif match[1] in _METRICS:
            name, make = _METRICS[match[1]]
            pci, uuid, index = v.address(labels.get("pci_bus_id")), labels.get("UUID"), v.whole(labels.get("gpu"))
            named = pci is not None or uuid is not None or index is not None
            gpu = self._gpus.named(pci=pci, uuid=uuid, index=index) if named else self._gpus.unnamed(name)
            gpu[name] = None if value is None else make(value)
            if match[1] == "DCGM_FI_DEV_FABRIC_MANAGER_STATUS":  # dcgm_structs.h: 3 success, 4 failure
                gpu["fabric_status"] = {3: 0, 4: 999}.get(-1 if value is None else value)
        return True


def _metric_value(word: str | None) -> int | None:
    if word is None:
        return None
    try:
        value = int(word, 16) if word[:2].lower() == "0x" else int(float(word))
    except (ValueError, OverflowError):
        return None
    return value if 0 <= value < BLANK else None

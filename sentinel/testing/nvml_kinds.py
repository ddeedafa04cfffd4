"""Kinds of nodes for the simulated NVML: a healthy GB200 tray, a healthy H200, and whatever host was recorded.

What always holds: values that no recording gave are those of a healthy part in the vendor's documents, and a field that the part
does not have answers "not supported".
"""

from __future__ import annotations

from typing import Any

from probes.nvml import LINK_SPEED, LINK_STATE, LINK_TOTALS
from probes.nvml_counters import BANKS, C2C_COUNT, FEC_TAIL, LEGACY, ONCE_IN_A_WHILE, PER_LINK
from sentinel.testing.nvml_state import FIELD_IDS, NOT_SUPPORTED, FakeGpu, FakeState


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
    gpu.set(**{name: 0 for name in FIELD_IDS if name not in ("ecc_enabled", "link_count") and FIELD_IDS[name] not in gpu.fields})
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

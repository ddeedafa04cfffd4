"""Healthy GPUs, as recorded and as simulated, are read with their values and judged without a false word."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sentinel.testing.nvml import FakeDriver
from sentinel.testing.nvml_kinds import from_recording, gb200_tray, h200
from sentinel.testing.nvml_state import FakeState
from tests.unit.gpu_node import Node

SAMPLE: dict[str, Any] = {  # one GPU of a healthy H200 host, in the form in which everything NVML answers is recorded
    "system": {"nvmlSystemGetDriverVersion": {"ok": "580.159.04"}},
    "gpus": [
        {
            "getters": {
                "nvmlDeviceGetPciInfo": {"ok": {"busId": "00000000:00:07.0"}},
                "nvmlDeviceGetUUID": {"ok": "GPU-00000000-0000-4000-8000-00000000000a"},
                "nvmlDeviceGetName": {"ok": "NVIDIA H200"},
                "nvmlDeviceGetSerial": {"ok": "1650000000011"},
                "nvmlDeviceGetArchitecture": {"ok": 9},
                "nvmlDeviceGetMaxPcieLinkGeneration": {"ok": 5},
                "nvmlDeviceGetMaxPcieLinkWidth": {"ok": 16},
                "nvmlDeviceGetCurrPcieLinkGeneration": {"ok": 5},
                "nvmlDeviceGetCurrPcieLinkWidth": {"ok": 16},
                "nvmlDeviceGetMarginTemperature": {"ok": 49},
                "nvmlDeviceGetCurrentClocksEventReasons": {"ok": 1},
                "nvmlDeviceGetUtilizationRates": {"ok": {"gpu": 0, "memory": 0}},
                "nvmlDeviceGetRowRemapperHistogram": {"ok": {"max": 3072, "high": 0, "partial": 0, "low": 0, "none": 0}},
                "nvmlDeviceGetRepairStatus": {"ok": [0, 0]},
                "nvmlDeviceGetComputeRunningProcesses_v3": {"ok": []},
                "nvmlDeviceGetNumaNodeId": {"nvml_error": 3, "text": "Not Supported"},
                "nvmlDeviceGetGpuFabricInfoV[c_nvmlGpuFabricInfo_v2_t]": {
                    "struct": {"clusterUuid": [0] * 16, "status": 0, "cliqueId": 0, "state": 3, "healthMask": 0}
                },
                "nvmlDeviceGetGpuFabricInfoV[c_nvmlGpuFabricInfo_v3_t]": {
                    "struct": {"clusterUuid": [0] * 16, "status": 0, "cliqueId": 0, "state": 3, "healthMask": 0, "healthSummary": 0}
                },
                "temp_gpu": {"ok": 36},
            },
            "fields": {
                "1:ECC_CURRENT": {"ret": 0, "type": 3, "ull": 1},
                "3:ECC_SBE_VOL_TOTAL": {"ret": 0, "type": 3, "ull": 0},
                "4:ECC_DBE_VOL_TOTAL": {"ret": 0, "type": 3, "ull": 0},
                "82:MEMORY_TEMP": {"ret": 0, "type": 1, "ull": 39},
                "91:NVLINK_LINK_COUNT": {"ret": 0, "type": 1, "ull": 18},
                "94:PCIE_REPLAY_COUNTER": {"ret": 0, "type": 1, "ull": 0},
                "144:REMAPPED_PENDING": {"ret": 0, "type": 3, "ull": 0},
                "145:REMAPPED_FAILURE": {"ret": 0, "type": 3, "ull": 0},
                "164:NVLINK_GET_SPEED": {"ret": 0, "type": 1, "ull": 26562},
                "185:POWER_AVERAGE": {"ret": 0, "type": 1, "ull": 79811},
                "194:TEMPERATURE_SLOWDOWN_TLIMIT": {"ret": 0, "type": 5, "ull": 4294967294},
                "208:NVLINK_COUNT_RCV_ERRORS": {"ret": 3, "type": 0, "ull": 0},
                "222:NVLINK_COUNT_SYMBOL_BER": {"ret": 3, "type": 0, "ull": 0},
                "230:GET_GPU_RECOVERY_ACTION": {"ret": 0, "type": 1, "ull": 0},
                "270:HW_THERM_SLOWDOWN": {"ret": 0, "type": 3, "ull": 0},
            },
            "nvlink": {str(n): {"state": {"ok": 1}} for n in range(18)},
        }
    ],
}


def test_a_recorded_healthy_h200_has_no_finding() -> None:
    """What a healthy H200 answers, unsupported fields and all, is judged without a false word."""
    node = Node(from_recording(SAMPLE), {"gpus": 1, "nvlinks": 18, "driver": "580.159.04"})
    for _ in range(5):
        assert node.present() == {}
    fine = {f.check for f in node.look()}
    assert {"gpu.row_remap_pending", "gpu.nvlink_down", "gpu.recovery_action", "gpu.fabric_state"} <= fine
    assert "gpu.fabric_health" not in fine  # mask 0: this driver reports no health, which is no statement


def test_a_recording_is_read_with_its_values() -> None:
    """Addresses, units and unsupported fields of a recorded host come through the reader unchanged."""
    reading = asyncio.run(FakeDriver(from_recording(SAMPLE)).read())["gpus"][0]
    assert reading["pci"] == "0000:00:07.0"
    assert reading["power_average_mw"] == 79811
    assert reading["link_speed_mbps"] == [26562] * 18
    assert reading["link_totals"] is None
    assert reading["rows_uncorrected"] is None
    assert reading["sram_threshold_exceeded"] is None
    assert reading["unread"] == {}


@pytest.mark.parametrize("make", [gb200_tray, lambda: FakeState(gpus=[h200("0000:00:06.0"), h200("0000:00:07.0", 2)])])
def test_healthy_hardware_under_load_has_no_finding(make: Any) -> None:
    """A busy, power-capped GPU with a link asleep is healthy."""
    state = make()
    for gpu in state.gpus:
        gpu.set(utilization_percent=98, clocks_event_reasons=0x4, power_average_mw=690_000, pids=[4242]).link(3, 2)
    node = Node(state, {"gpus": len(state.gpus), "nvlinks": 18})
    for _ in range(5):
        assert node.present() == {}


def test_readings_are_plain_json_and_small() -> None:
    """A reading is made of JSON values and reads back equal."""
    data = asyncio.run(FakeDriver(gb200_tray()).read())
    assert json.loads(json.dumps(data)) == data

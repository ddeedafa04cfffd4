"""What the driver of a simulated tray answers: the readings half of the GPU probe, made from the rack's state.

This module exists so that only the reading is simulated: the answer goes through the real GPU probe, its judgement, the
real agent and everything behind it. What always holds:

* The answer has the shape of ``probes.nvml`` and the values of a healthy GB200, except where the rack's state differs.
* A GPU that is lost answers with NVML's GPU_IS_LOST and nothing else, as the real driver does.
* What a GPU of this kind does not report is absent, so that "not measured" is exercised as well.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any

from sentinel.sim.rack import DRIVER, GPUS, NODES, Rack

GPU_IS_LOST, LIBRARY_MISMATCH = 15, 18  # nvml.h
CLUSTER = hashlib.sha256(b"the simulated rack").hexdigest()[:32]
CHASSIS = "SIMULATED0001"
LINKS = 18
HEALTHY_MASK = 0x51AA  # every fabric health field says "fine" (nvml.h: for the first four, 2 is good and 1 is bad)


def healthy_gpu(node: str, index: int) -> dict[str, Any]:
    """One GB200 GPU as the driver would describe it. The power swings a little, so that a recording is not a flat line."""
    serial = 1_650_000_000_000 + 4 * NODES.index(node) + index
    swing = int(time.time() * 3 + serial) % 40
    return {
        "pci": GPUS[index],
        "index": index,
        "uuid": f"GPU-{hashlib.sha256(f'{node}/{index}'.encode()).hexdigest()[:8]}-simulated",
        "name": "NVIDIA GB200 (simulated)",
        "serial": str(serial),
        "link_count": LINKS,
        "platform": {"chassis": CHASSIS, "slot": 10 + NODES.index(node), "tray": NODES.index(node), "host": 1, "module": index + 1},
        "pcie_gen_max": 5,
        "pcie_width_max": 16,
        "pcie_gen": 5,
        "pcie_width": 16,
        "slow_at": time.time(),
        "memory_temperature_c": 52,
        "pcie_replays": 0,
        "slowdown_ns": {"sw_thermal": 0, "hw_thermal": 0, "power_brake": 0},
        "link_speed_mbps": [53125] * LINKS,
        "rows_histogram": {"max": 5120, "high": 0, "partial": 0, "low": 0, "none": 0},
        "sram_uncorrected_volatile": 0,
        "sram_threshold_exceeded": False,
        "margin_c": 34,
        "ecc_enabled": True,
        "ecc_corrected_volatile": 0,
        "ecc_uncorrected_volatile": 0,
        "ecc_corrected_aggregate": 2,
        "ecc_uncorrected_aggregate": 0,
        "rows_corrected": 0,
        "rows_uncorrected": 0,
        "rows_pending": False,
        "rows_failure": False,
        "power_average_mw": 780_000 + 1000 * swing,
        "power_instant_mw": 770_000 + 1500 * swing,
        "power_limit_mw": 1_200_000,
        "recovery_action": 0,
        "fabric_state": 3,
        "fabric_status": 0,
        "fabric_clique": 0,
        "fabric_cluster": CLUSTER,
        "fabric_health_mask": HEALTHY_MASK,
        "fabric_summary": 1,
        "links": [1] * LINKS,
        "clocks_event_reasons": 0,
        "temperature_c": 48 + swing // 8,
        "utilization_percent": 90,
        "unread": {},
    }


class SimDriver:
    """Implements ``probes.Driver`` for one tray."""

    def __init__(self, rack: Rack, node: str) -> None:
        self._rack = rack
        self._node = node

    async def read(self) -> dict[str, Any]:
        await asyncio.sleep(0)  # a real driver call gives the loop back as well
        whole: dict[str, Any] = {"error": None, "driver": DRIVER, "gpus": [self._gpu(i) for i in range(len(GPUS))]}
        return whole | self._rack.drivers.get(self._node, {})

    def _gpu(self, index: int) -> dict[str, Any]:
        pci = GPUS[index]
        differs = dict(self._rack.gpus.get((self._node, pci), {}))
        if differs.pop("lost", False):
            return {"pci": pci, "index": index, "error": {"code": GPU_IS_LOST, "text": "GPU is lost"}}
        return {**healthy_gpu(self._node, index), **differs}


def mismatch() -> dict[str, Any]:
    """What a driver answers whose library was upgraded under it (NVML 18): an error for everything, no GPU named."""
    return {"error": {"code": LIBRARY_MISMATCH, "text": "Driver/library version mismatch"}, "driver": None, "gpus": []}

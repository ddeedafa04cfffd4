"""``sentinel assess`` on a rack's recordings: nothing on eighteen healthy trays, and each fault of one GPU as the right finding."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from probes import Context
from probes.gpu import GpuProbe
from sentinel.cli.main import main
from sentinel.cli.recording import header, line
from sentinel.model import Reading
from sentinel.testing.nvml import FakeDriver
from sentinel.testing.nvml_kinds import gb200_tray
from sentinel.testing.nvml_state import FakeGpu

START, STEP_S = 1_800_000_000.0, 30.0
FATAL, WARN = "fatal", "warning"
TRAYS = [f"t{n:02}" for n in range(1, 19)]
Change = Callable[[FakeGpu, int], Any]


def recorded(trays: list[str], looks: int, sick: str = "", change: Change | None = None) -> bytes:
    """A recording of these trays, one look every 30 s; ``change(gpu, n)`` is done to the third GPU of ``sick`` before look n."""
    lines = [header("rack", START)]
    for node in trays:
        state, at = gb200_tray(), [START]
        driver = FakeDriver(state, lambda at=at: at[0])  # type: ignore[misc]
        probe = GpuProbe(Context(node=node, sys=Path("/nowhere"), proc=Path("/nowhere"), driver=driver))
        for n in range(looks):
            at[0] += STEP_S
            if node == sick and change and n:
                change(state.gpus[2], n)
            data = {**asyncio.run(probe.read()).data, "mono": at[0]}
            lines.append(line(Reading(probe="gpu", node=node, at=at[0], boot_id="one", data=data)))
    return b"".join(lines)


def assessed(recording: bytes) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["assess", "--json", "-"], input=recording)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_a_healthy_rack_is_assessed_without_a_finding() -> None:
    """Eighteen trays, seventy-two GPUs, each looked at over two minutes: nothing is found and nothing is to be done."""
    document = assessed(recorded(TRAYS, 5))
    assert document["judged"] == 5 * len(TRAYS)
    assert document["findings"] == []
    assert document["verdict"] == {"severity": "info", "action": "none"}


# What happens from the second look on; how many looks; the check, severity and action that follow. By the tables of NVML's values.
FAULTS: list[tuple[str, Change, int, str, str, str]] = [
    ("the fabric is not begun", lambda g, n: g.set(fabric_state=1), 14, "gpu.fabric_state", FATAL, "reset_gpu"),
    ("joining the fabric does not end", lambda g, n: g.set(fabric_state=2), 14, "gpu.fabric_state", WARN, "reset_gpu"),
    ("joining the fabric failed", lambda g, n: g.set(fabric_status=999), 2, "gpu.fabric_state", FATAL, "reset_gpu"),
    ("bandwidth is degraded", lambda g, n: g.set(fabric_health_mask=0x51A9), 2, "gpu.fabric_health", FATAL, "reset_gpu"),
    ("a route is unhealthy", lambda g, n: g.set(fabric_health_mask=0x519A), 2, "gpu.fabric_health", FATAL, "inspect"),
    ("a route recovers", lambda g, n: g.set(fabric_health_mask=0x51A6), 2, "gpu.fabric_health", WARN, "none"),
    ("the chassis is configured wrongly", lambda g, n: g.set(fabric_health_mask=0x53AA), 2, "gpu.fabric_health", FATAL, "inspect"),
    ("no partition is assigned", lambda g, n: g.set(fabric_health_mask=0x61AA), 2, "gpu.fabric_health", FATAL, "inspect"),
    ("the fabric's manager is away", lambda g, n: g.set(fabric_health_mask=0x91AA), 2, "gpu.fabric_health", WARN, "inspect"),
    ("a link is down", lambda g, n: g.link(7, 0), 2, "gpu.nvlink_down", FATAL, "reset_gpu"),
    ("a link carries no traffic", lambda g, n: g.link(7, 3), 2, "gpu.nvlink_down", FATAL, "reset_gpu"),
    ("symbol errors rise", lambda g, n: g.count("symbol_errors", 9, link=7), 4, "gpu.nvlink_symbol_errors", WARN, "inspect"),
    ("broken packets arrive", lambda g, n: g.count("malformed_packets", 1, link=7), 4, "gpu.nvlink_packet_errors", WARN, "inspect"),
    ("a peer stomps packets", lambda g, n: g.count("receive_remote_errors", 1, link=7), 4,
     "gpu.nvlink_remote_errors", WARN, "none"),
    ("a link came back", lambda g, n: n == 2 and g.count("recovery_successful", 1, link=7), 4,
     "gpu.nvlink_recovered", WARN, "none"),
    ("a link did not come back", lambda g, n: n == 2 and g.count("recovery_failed", 1, link=7), 4,
     "gpu.nvlink_recovery_failed", FATAL, "reset_gpu"),
    ("bits get past the correction", lambda g, n: g.set(symbol_ber=2 << 8 | 13), 2, "gpu.nvlink_ber", WARN, "none"),
    ("rows wait to be remapped", lambda g, n: g.set(rows_pending=1), 2, "gpu.row_remap_pending", WARN, "reset_gpu"),
    ("a row could not be remapped", lambda g, n: g.set(rows_failure=1), 2, "gpu.row_remap_failure", FATAL, "contact_support"),
    ("too many rows are remapped", lambda g, n: g.set(rows_uncorrected=600), 2, "gpu.row_remap_spares", WARN, "contact_support"),
    ("SRAM is past its threshold", lambda g, n: g.set(sram_threshold_exceeded=1), 2,
     "gpu.sram_threshold", FATAL, "contact_support"),
    ("memory errors cannot be corrected", lambda g, n: g.set(ecc_uncorrected_volatile=n), 2, "gpu.ecc_uncorrected", WARN,
     "reset_gpu"),
    ("memory errors are corrected without end", lambda g, n: g.set(ecc_corrected_volatile=90_000 * n), 5, "gpu.ecc_storm", WARN,
     "inspect"),
    ("a repair waits", lambda g, n: g.set(repair_pending=[1, 0]), 3, "gpu.repair_pending", WARN, "reset_gpu"),
    ("the driver asks for a reset", lambda g, n: g.set(recovery_action=1), 2, "gpu.recovery_action", FATAL, "reset_gpu"),
    ("the driver asks for a reboot", lambda g, n: g.set(recovery_action=2), 2, "gpu.recovery_action", FATAL, "reboot_node"),
    ("the driver asks to drain peers", lambda g, n: g.set(recovery_action=3), 2, "gpu.recovery_action", WARN, "restart_worker"),
    ("the driver asks to drain and reset", lambda g, n: g.set(recovery_action=4), 2, "gpu.recovery_action", FATAL, "reset_gpu"),
    ("the driver asks for IMEX", lambda g, n: g.set(recovery_action=5), 2, "gpu.recovery_action", WARN, "restart_imex"),
    ("the driver asks for a bus reset", lambda g, n: g.set(recovery_action=6), 2, "gpu.recovery_action", FATAL, "reset_gpu"),
    ("the driver asks for a system reboot", lambda g, n: g.set(recovery_action=7), 2, "gpu.recovery_action", FATAL, "reboot_node"),
    ("the driver asks for what nobody knows", lambda g, n: g.set(recovery_action=12), 2, "gpu.recovery_action", WARN, "inspect"),
    ("heat slows it down", lambda g, n: g.set(clocks_event_reasons=0x40), 5, "gpu.clocks_slowdown", WARN, "inspect"),
    ("no room is left before it slows", lambda g, n: g.set(margin_c=-1), 3, "gpu.thermal", WARN, "inspect"),
    ("its power is not plausible", lambda g, n: g.set(power_average_mw=0), 5, "gpu.power", WARN, "inspect"),
    ("its PCIe link is narrow", lambda g, n: g.set(pcie_width=8), 6, "gpu.pcie_width", WARN, "inspect"),
    ("PCIe sends again and again", lambda g, n: g.set(pcie_replays=80 * n), 6, "gpu.pcie_replays", WARN, "inspect"),
    ("a link to the CPU is down", lambda g, n: g.c2c(10, status=[1, 0] + [1] * 8), 11, "gpu.c2c_down", WARN, "inspect"),
    ("it is lost", lambda g, n: setattr(g, "gone", 15), 2, "gpu.lost", FATAL, "reboot_node"),
    ("its driver hangs", lambda g, n: setattr(g, "hang", ("*",)), 8, "driver.hung", FATAL, "reboot_node"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "looks", "check", "severity", "action"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_each_fault_of_one_gpu_is_found_as_what_it_is(change: Change, looks: int, check: str, severity: str, action: str) -> None:
    """One GPU of one tray has one fault: one check is found there, about that GPU, with its weight and the first thing to do."""
    document = assessed(recorded(["t06", "t07"], looks, "t07", change))
    found = [f for f in document["findings"] if f["check"] != "gpu.nvlink_recovery_history"]
    assert {f["check"] for f in found} == {check}
    assert all(f["component"].startswith("t07/gpu@0018:01:00.0") for f in found)
    assert {(f.get("severity", "info"), f.get("action", "none")) for f in found} == {(severity, action)}

"""The GPU probe: what NVML says becomes the right finding, and what it does not say becomes none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from probes import Context, ProbeError
from probes.gpu import GpuProbe
from probes.nvml import SLOW_S, GpuReader, ber, read_gpu
from probes.nvml_counters import ONCE_IN_A_WHILE
from probes.thresholds import shipped
from sentinel.model import Action, Finding, Kind, Reading, Severity, Suspect
from sentinel.testing.nvml import FakeDriver, FakeNvml
from sentinel.testing.nvml_kinds import from_recording, gb200, gb200_tray, h200
from sentinel.testing.nvml_state import FakeGpu, FakeState

PCI = "0008:01:00.0"
GPU = f"t01/gpu@{PCI}"


class Node:
    """A node under observation: a simulated driver, a clock of its own, and the probe's memory between looks."""

    def __init__(self, state: FakeState, expected: Mapping[str, Any] | None = None, sys: Path = Path("/nowhere")) -> None:
        self.state, self.expected, self.at, self.mono = state, expected or {}, 1_800_000_000.0, 5000.0
        self.memory: dict[str, Any] = {}
        self.driver = FakeDriver(state, lambda: self.at)
        self.probe = GpuProbe(Context(node="t01", sys=sys, proc=Path("/nowhere"), driver=self.driver))

    def look(self, after_s: float = SLOW_S, boot_id: str = "one", **replace: Any) -> list[Finding]:
        self.at, self.mono = self.at + after_s, self.mono + after_s
        read = asyncio.run(self.probe.read())
        reading = Reading(probe="gpu", node="t01", at=self.at, boot_id=boot_id, data={**read.data, "mono": self.mono, **replace})
        return self.probe.assess(reading, self.memory, self.expected)

    def present(self, after_s: float = SLOW_S, **replace: Any) -> dict[str, Finding]:
        """What is wrong now, by check."""
        return {f.check: f for f in self.look(after_s, **replace) if f.present}


def one(gpu: FakeGpu) -> Node:
    return Node(FakeState(gpus=[gpu]))


def bound(root: Path, devices: Mapping[str, bytes]) -> Path:
    """A sysfs with devices that the nvidia driver holds: address → the first bytes of its configuration space."""
    for pci, head in devices.items():
        device = root / "bus/pci/drivers/nvidia" / pci
        device.mkdir(parents=True)
        (device / "config").write_bytes(head + bytes(60))
    (root / "bus/pci/drivers/nvidia/bind").touch()
    return root


THERE, OFF = b"\xde\x10\x34\x12", b"\xff" * 4


# -- healthy hardware ---------------------------------------------------------------------------------------------------------

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


# -- one finding each ---------------------------------------------------------------------------------------------------------

ONE_LOOK: list[tuple[dict[str, Any], str, Severity, Action, Suspect]] = [
    ({"rows_pending": 1}, "gpu.row_remap_pending", Severity.WARNING, Action.RESET_GPU, Suspect.SELF),
    ({"rows_failure": 1}, "gpu.row_remap_failure", Severity.FATAL, Action.CONTACT_SUPPORT, Suspect.SELF),
    ({"rows_uncorrected": 513}, "gpu.row_remap_spares", Severity.WARNING, Action.CONTACT_SUPPORT, Suspect.SELF),
    ({"sram_threshold_exceeded": 1}, "gpu.sram_threshold", Severity.FATAL, Action.CONTACT_SUPPORT, Suspect.SELF),
    ({"recovery_action": 1}, "gpu.recovery_action", Severity.FATAL, Action.RESET_GPU, Suspect.SELF),
    ({"recovery_action": 2}, "gpu.recovery_action", Severity.FATAL, Action.REBOOT_NODE, Suspect.SELF),
    ({"recovery_action": 3}, "gpu.recovery_action", Severity.WARNING, Action.RESTART_WORKER, Suspect.PEER),
    ({"recovery_action": 4}, "gpu.recovery_action", Severity.FATAL, Action.RESET_GPU, Suspect.SELF),
    ({"recovery_action": 5}, "gpu.recovery_action", Severity.WARNING, Action.RESTART_IMEX, Suspect.PEER),
    ({"recovery_action": 6}, "gpu.recovery_action", Severity.FATAL, Action.RESET_GPU, Suspect.SELF),
    ({"recovery_action": 7}, "gpu.recovery_action", Severity.FATAL, Action.REBOOT_NODE, Suspect.SELF),
    ({"recovery_action": 8}, "gpu.recovery_action", Severity.WARNING, Action.INSPECT, Suspect.SELF),
    ({"fabric_status": 999}, "gpu.fabric_state", Severity.FATAL, Action.RESET_GPU, Suspect.SELF),
    ({"margin_c": 0}, "gpu.thermal", Severity.WARNING, Action.INSPECT, Suspect.SELF),
]


@pytest.mark.parametrize(("values", "check", "severity", "action", "suspect"), ONE_LOOK)
def test_one_look_is_enough(values: dict[str, Any], check: str, severity: Severity, action: Action, suspect: Suspect) -> None:
    """A value that is a fact by itself is found at once, alone, on the right GPU, and ends when it is gone."""
    state = gb200_tray()
    healthy = dict.fromkeys(values, 0) | ({"margin_c": 40} if "margin_c" in values else {})
    node = Node(state)
    state.gpus[0].set(**values)
    found = node.present()
    assert list(found) == [check]
    finding = found[check]
    assert (str(finding.component), finding.severity, finding.action, finding.suspect) == (GPU, severity, action, suspect)
    assert finding.summary
    assert finding.evidence
    state.gpus[0].set(**healthy)
    ended = [f for f in node.look() if f.check == check and str(f.component) == GPU]
    assert [f.present for f in ended] == [False]


def test_an_unknown_recovery_action_is_doubt() -> None:
    """A value newer than this program goes to a person and is no certainty."""
    assert one(gb200().set(recovery_action=42)).present()["gpu.recovery_action"].certainty < 1


def test_an_answer_that_demands_a_reset_counts_without_the_recovery_field() -> None:
    """Where a driver has no recovery field, the code ResetRequired on another call asks for the same."""
    gpu = gb200().set(recovery_action=None)
    gpu.answers["nvmlDeviceGetCurrentClocksEventReasons"] = {"nvml_error": 16}
    assert one(gpu).present()["gpu.recovery_action"].action is Action.RESET_GPU


def test_a_state_keeps_its_id_while_it_lasts() -> None:
    """The same occurrence has the same id at every look; the next occurrence has another."""
    gpu = gb200()
    node = one(gpu)
    gpu.set(rows_pending=1)
    first, again = node.present()["gpu.row_remap_pending"], node.present()["gpu.row_remap_pending"]
    assert first.id == again.id
    assert again.at > first.at
    gpu.set(rows_pending=0)
    node.look()
    gpu.set(rows_pending=1)
    assert node.present()["gpu.row_remap_pending"].id != first.id


@pytest.mark.parametrize(
    ("mask", "severity", "words"),
    [
        (0x1AA, None, ""),  # five fields, all fine
        (0x51AA, None, ""),  # and partition and controller
        (0x1A9, Severity.FATAL, "degraded_bandwidth"),
        (0x19A, Severity.FATAL, "route_unhealthy"),
        (0x1A6, Severity.WARNING, "route_recovery"),
        (0x16A, Severity.WARNING, "access_timeout_recovery"),
        (0x5AA, Severity.FATAL, "too few NVLinks"),
        (0xFAA, Severity.FATAL, "unknown value 15"),
        (0x61AA, Severity.FATAL, "partition_unassigned"),
        (0x91AA, Severity.WARNING, "fabric_manager_disconnected"),
        (0x00A, None, ""),  # two fields reported, the others not
    ],
)
def test_fabric_health_is_read_by_value_never_by_bit(mask: int, severity: Severity | None, words: str) -> None:
    """In each two-bit field only the bad value is bad; 0 is not reported."""
    found = one(gb200().set(fabric_health_mask=mask)).present()
    if severity is None:
        assert found == {}
    else:
        assert found["gpu.fabric_health"].severity is severity
        assert words in found["gpu.fabric_health"].summary


def test_a_fabric_recovery_that_lasts_becomes_fatal() -> None:
    """A recovery may take a minute; after that it is stuck."""
    node = one(gb200().set(fabric_health_mask=0x1A6))
    assert node.present(10)["gpu.fabric_health"].severity is Severity.WARNING
    assert node.present(59)["gpu.fabric_health"].severity is Severity.WARNING
    assert node.present(2)["gpu.fabric_health"].severity is Severity.FATAL


def test_a_disconnected_controller_is_the_racks_fault() -> None:
    """The node that reports it is not the one to drain."""
    assert one(gb200().set(fabric_health_mask=0x91AA)).present()["gpu.fabric_health"].suspect is Suspect.SWITCH


@pytest.mark.parametrize(("state", "severity"), [(1, Severity.FATAL), (2, Severity.WARNING)])
def test_joining_the_fabric_has_a_grace_period(state: int, severity: Severity) -> None:
    """After a boot the fabric is joined in its own time; only past the grace period is it a finding."""
    gpu = gb200().set(fabric_state=state)
    node = one(gpu)
    for after in (1.0, shipped().fabric.joining_s / 2, shipped().fabric.joining_s / 2 - 1):
        assert not [f for f in node.look(after) if f.check == "gpu.fabric_state"]
    assert node.present(2)["gpu.fabric_state"].severity is severity
    gpu.set(fabric_state=3)
    assert node.present() == {}


def test_health_is_not_asked_of_a_fabric_that_is_being_joined() -> None:
    """Right after a boot a GPU has no partition and no controller yet; only when joining should be over is that a fault."""
    gpu = gb200().set(fabric_state=2, fabric_health_mask=0xA1AA)
    node = one(gpu)
    assert [node.present(30.0) for _ in range(4)] == [{}] * 4
    assert "gpu.fabric_health" in node.present(shipped().fabric.joining_s)
    gpu.set(fabric_state=3, fabric_health_mask=0x51AA)
    assert node.present() == {}
    gpu.set(fabric_health_mask=0x61AA)
    assert set(node.present()) == {"gpu.fabric_health"}


@pytest.mark.parametrize("without", [{"fabric_state": 0}, {"fabric_cluster": "00" * 16}])
def test_a_gpu_of_a_rack_without_a_domain(without: dict[str, Any]) -> None:
    """A GPU wired to a rack's switches that belongs to no domain is a warning after the grace period; others need not belong."""
    node = one(gb200().set(**without))
    assert "gpu.fabric_state" not in node.present()
    found = node.present(shipped().fabric.joining_s)["gpu.fabric_state"]
    assert (found.severity, found.action) == (Severity.WARNING, Action.INSPECT)
    unwired = gb200().set(**without)
    unwired.fields[ONCE_IN_A_WHILE["switch_links"]] = 0
    for gpu in (unwired, h200().set(**without)):
        node = one(gpu)
        assert [node.present(shipped().fabric.joining_s) for _ in range(3)] == [{}] * 3


def test_partitions_within_a_node_are_on_record() -> None:
    """GPUs of one domain in different partitions cannot reach each other: information, since somebody may have wanted it."""
    node = Node(gb200_tray())
    assert node.present() == {}
    node.state.gpus[1].set(fabric_clique=7)
    (finding,) = node.present().values()
    assert (finding.check, finding.severity, finding.evidence) == ("gpu.clique_split", Severity.INFO, ("1", "7"))


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_makes_no_fault(step_s: float) -> None:
    """The wall clock set by an hour while the fabric is joined: the time it takes is counted by a clock that nobody sets."""
    node = one(gb200().set(fabric_state=1))
    assert "gpu.fabric_state" not in node.present(1.0)
    node.at += step_s
    assert "gpu.fabric_state" not in node.present(shipped().fabric.joining_s / 2)
    assert "gpu.fabric_state" in node.present(shipped().fabric.joining_s / 2 + 1)


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_slowdown_ends_though_the_clock_was_set(step_s: float) -> None:
    """After the clock was set by an hour either way, the share of time spent slowed is that of now, not of an hour ago."""
    gpu = gb200()
    node = one(gpu)
    for spent in range(4):
        gpu.set(hw_thermal=spent * 20_000_000_000)
        slow = node.present()
    assert "gpu.clocks_slowdown" in slow
    node.at += step_s
    for _ in range(2):
        slow = node.present()
    assert "gpu.clocks_slowdown" not in slow


def test_a_gpu_without_links_is_not_judged_by_a_fabric() -> None:
    """A GPU passed through alone has no fabric to join: every link answers NotSupported, and that is not down."""
    gpu = h200().set(fabric_state=1)
    for link in range(18):
        gpu.link(link, None)
    node = one(gpu)
    for _ in range(30):
        assert node.present() == {}


def test_a_split_node_is_found() -> None:
    """GPUs of one tray in two NVLink domains is somebody's mistake, not a GPU's."""
    state = gb200_tray()
    state.gpus[2].set(fabric_cluster="77" * 16)
    found = Node(state).present()
    assert list(found) == ["gpu.fabric_split"]
    assert str(found["gpu.fabric_split"].component) == "t01"


def test_uncorrectable_errors_are_an_event_when_they_rise() -> None:
    """Only a rise between two looks counts: not what was there before, not a counter that began anew at zero."""
    gpu = gb200().set(ecc_uncorrected_volatile=7)
    node = one(gpu)
    assert node.present() == {}
    gpu.set(ecc_uncorrected_volatile=9)
    event = node.present()["gpu.ecc_uncorrected"]
    assert (event.kind, event.count) == (Kind.EVENT, 2)
    assert node.present() == {}
    gpu.set(ecc_uncorrected_volatile=0)
    assert node.present() == {}
    gpu.set(ecc_uncorrected_volatile=1)
    assert node.present()["gpu.ecc_uncorrected"].id != event.id


def test_another_boot_starts_with_a_clean_memory() -> None:
    """Counters of an earlier boot are not compared with this one's."""
    gpu = gb200().set(ecc_uncorrected_volatile=1)
    node = one(gpu)
    node.look()
    gpu.set(ecc_uncorrected_volatile=5)
    assert not [f for f in node.look(boot_id="two") if f.present]


# -- links --------------------------------------------------------------------------------------------------------------------


def test_a_link_that_is_down_is_found_as_part_of_its_gpu_and_ends() -> None:
    """Sleep is healthy, inactive is down, NotSupported is neither."""
    gpu = gb200().link(2, 2).link(5, None).link(7, 0)
    node = one(gpu)
    found = [f for f in node.look() if f.present]
    assert [(f.check, str(f.component), f.severity) for f in found] == [("gpu.nvlink_down", f"{GPU}/nvlink7", Severity.FATAL)]
    gpu.link(7, 1)
    ended = {str(f.component): f.present for f in node.look() if f.check == "gpu.nvlink_down"}
    assert ended == {GPU: False, f"{GPU}/nvlink7": False}


def test_all_links_down_is_the_gpu() -> None:
    """No link up at all is said about the GPU, with certainty."""
    found = [f for f in one(gb200().set(links=[0] * 18)).look() if f.present and not f.component.part]
    assert [(f.check, f.certainty) for f in found] == [("gpu.nvlink_down", 1.0)]


def test_links_are_expected_only_where_somebody_says_so() -> None:
    """An H200 without an expectation may have its links off; with one, it may not; and a GB200 expects its eighteen."""
    off = h200().set(links=[0] * 18)
    assert one(off).present() == {}
    assert "gpu.nvlink_down" in Node(FakeState(gpus=[off]), {"nvlinks": 18}).present()
    assert "gpu.nvlink_down" in one(gb200().set(link_count=17, links=[1] * 17)).present()


def test_an_older_driver_is_asked_by_the_getter() -> None:
    """Where the link-state field is not supported, the older call answers."""
    gpu = gb200()
    reader = GpuReader(OldLinks(FakeState(gpus=[gpu])), FakeNvml(FakeState(gpus=[gpu])).nvmlDeviceGetHandleByIndex(0), 0)
    assert reader.read()["links"] == [1] * 18


class OldLinks(FakeNvml):
    @staticmethod
    def _field(gpu: FakeGpu, field: int, scope: int) -> Any:
        return {"nvml_error": 3} if field == 165 else FakeNvml._field(gpu, field, scope)


def test_bit_error_rates_are_unpacked() -> None:
    """Mantissa and exponent share a word; fifteen at 255 stands for zero."""
    assert ber(15 << 8 | 255) == 0.0
    assert ber(3 << 8 | 12) == pytest.approx(3e-12)


# -- values that must repeat --------------------------------------------------------------------------------------------------


def test_one_odd_sample_says_nothing() -> None:
    """Power, width and slowdown are said only when they repeat, and end at the first good sample."""
    gpu = gb200()
    node = one(gpu)
    node.look()
    gpu.set(power_average_mw=0, pcie_width=8, clocks_event_reasons=0x40)
    runs = [sorted(node.present()) for _ in range(max(shipped().gpu.power_run, shipped().gpu.slowdown_run))]
    assert runs[0] == runs[1] == []
    assert runs[-1] == ["gpu.clocks_slowdown", "gpu.pcie_width", "gpu.power"]
    gpu.set(power_average_mw=500_000, pcie_width=16, clocks_event_reasons=0)
    assert node.present() == {}


def test_a_slow_link_counts_under_load_only() -> None:
    """An idle GPU trains its PCIe generation down; a busy one must not."""
    gpu = gb200().set(pcie_gen=1)
    node = one(gpu)
    assert [node.present() for _ in range(5)] == [{}] * 5
    gpu.set(utilization_percent=95)
    assert [sorted(node.present()) for _ in range(3)][-1] == ["gpu.pcie_gen"]


def test_load_that_comes_after_a_link_was_read_says_nothing_about_it() -> None:
    """A generation read while the GPU was idle is carried along for half a minute; work that begins meanwhile accuses no link."""
    gpu = gb200().set(pcie_gen=1)
    node = one(gpu)
    node.look()
    for _ in range(3):
        gpu.set(pcie_gen=1, utilization_percent=0)
        assert node.present() == {}
        gpu.set(pcie_gen=5, utilization_percent=95)
        assert [node.present(5.0) for _ in range(5)] == [{}] * 5


def test_one_odd_reading_of_a_link_stays_one_however_often_it_is_carried_along() -> None:
    """A width that was read once does not repeat by being looked at again."""
    gpu = gb200()
    node = one(gpu)
    node.look()
    gpu.set(pcie_width=8)
    assert node.present() == {}
    gpu.set(pcie_width=16)
    assert [node.present(5.0) for _ in range(8)] == [{}] * 8


def test_time_spent_slowed_is_a_rate() -> None:
    """The driver's own counters say for how much of the time it was slowed; a one-off does not count."""
    gpu = gb200()
    node = one(gpu)
    node.look()
    gpu.set(hw_thermal=int(0.02 * SLOW_S * 1e9))
    assert node.present() == {}
    gpu.set(hw_thermal=int(0.5 * SLOW_S * 1e9))
    assert "gpu.clocks_slowdown" in node.present()
    assert node.present() == {}


def test_heat_has_hysteresis() -> None:
    """A margin that hovers at the limit is one finding, not many."""
    gpu = gb200()
    node = one(gpu)
    seen = []
    for margin in (3, 0, 3, 5, 6, 3):
        gpu.set(margin_c=margin)
        seen.append("gpu.thermal" in node.present())
    assert seen == [False, True, True, True, False, False]


def test_links_and_fabric_are_asked_for_at_every_second_look() -> None:
    """They cost most of a look; between two askings the last answer is carried, with what stood in its way."""
    gpu = gb200()
    nvml = FakeNvml(FakeState(gpus=[gpu]))
    reader = GpuReader(nvml, nvml.nvmlDeviceGetHandleByIndex(0), 0)
    reader.read(1000.0)
    gpu.link(7, 0)
    gpu.set(fabric_state=2)
    soon, later = reader.read(1005.0), reader.read(1010.0)
    assert (soon["links"][7], soon["fabric_state"], soon["links_at"]) == (1, 3, 1000.0)
    assert (later["links"][7], later["fabric_state"], later["links_at"]) == (0, 2, 1010.0)
    gpu.fabric = {"nvml_error": 16}
    assert [reader.read(at)["unread"].get("nvmlDeviceGetGpuFabricInfoV") for at in (1020.0, 1025.0)] == [16, 16]
    assert reader.read(500.0)["links_at"] == 500.0  # the clock was set back: the old answer's age is not known


def test_slow_values_are_read_now_and_then() -> None:
    """Costly values are carried along between their turns and say when they were read."""
    gpu = gb200()
    nvml = FakeNvml(FakeState(gpus=[gpu]))
    reader = GpuReader(nvml, nvml.nvmlDeviceGetHandleByIndex(0), 0)
    reader.read(1000.0)
    gpu.set(margin_c=1, rows_pending=1)
    soon, later = reader.read(1000.0 + SLOW_S / 2), reader.read(1000.0 + SLOW_S)
    assert (soon["margin_c"], soon["rows_pending"], soon["slow_at"]) == (43, True, 1000.0)
    assert later["margin_c"] == 1


# -- not measured -------------------------------------------------------------------------------------------------------------


def test_a_driver_that_supports_nothing_yields_no_word_about_hardware() -> None:
    """NotSupported, everywhere: the GPU is there, and nothing more is known."""
    found = one(FakeGpu(pci=PCI)).look()
    assert not [f for f in found if f.present]
    assert {f.check for f in found if f.component.gpu} == {"driver.hung", "gpu.lost", "gpu.unreadable"}


@pytest.mark.parametrize("code", [3, 13, 25, 26])
def test_codes_that_mean_not_measured(code: int) -> None:
    """Not supported, no such function, other struct version, deprecated: None, and not even noted as unread."""
    gpu = gb200().set(rows_pending=1, margin_c=-5)
    refused = {"nvml_error": code}
    gpu.fields = dict.fromkeys(gpu.fields, refused)
    gpu.answers = dict.fromkeys(gpu.answers, refused)
    gpu.fabric = gpu.sram = refused
    nvml = FakeNvml(FakeState(gpus=[gpu]))
    reading = read_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(0))
    assert (reading["rows_pending"], reading["margin_c"], reading["fabric_state"]) == (None, None, None)
    assert reading["unread"] == {}


def test_the_older_fabric_struct_is_used_when_the_newer_is_refused() -> None:
    """A driver that knows version 2 only still tells state and health."""
    gpu = gb200()
    gpu.fabric_versions = (2,)
    nvml = FakeNvml(FakeState(gpus=[gpu]))
    reading = read_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(0))
    assert (reading["fabric_state"], reading["fabric_health_mask"], reading["fabric_cluster"]) == (3, 0x51AA, "5e" * 16)
    assert reading["fabric_summary"] == 0
    gpu.fabric_versions = ()
    assert read_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(0))["fabric_state"] is None


def test_a_call_that_fails_oddly_is_kept_by_its_code() -> None:
    """Unknown on one call is that value not measured, and on record; nothing is said about the hardware."""
    gpu = gb200()
    gpu.answers["nvmlDeviceGetMarginTemperature"] = {"nvml_error": 999}
    node = one(gpu)
    reading = asyncio.run(node.probe.read())
    assert reading.data["gpus"][0]["unread"] == {"nvmlDeviceGetMarginTemperature": 999}
    assert node.present() == {}


# -- the driver itself --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "expected", "check", "severity", "action"),
    [
        (12, {}, "driver.missing", Severity.INFO, Action.NONE),
        (9, {"gpus": 4}, "driver.missing", Severity.WARNING, Action.FIX_MONITOR),
        (18, {"gpus": 4}, "driver.version_mismatch", Severity.WARNING, Action.REBOOT_NODE),
        (999, {"gpus": 4}, "driver.unusable", Severity.WARNING, Action.FIX_MONITOR),
    ],
)
def test_a_driver_that_cannot_be_initialised(
    code: int, expected: dict[str, Any], check: str, severity: Severity, action: Action
) -> None:
    """It is always about the monitor, never fatal, and the GPUs' own states stay as they were known."""
    state = gb200_tray()
    node = Node(state, expected)
    node.look()
    state.init_error = code
    findings = node.look()
    assert [(f.check, f.severity, f.action, f.suspect, str(f.component)) for f in findings] == [
        (check, severity, action, Suspect.MONITOR, "t01/driver")
    ]
    state.init_error = 0
    assert check in {f.check for f in node.look() if not f.present}


def test_a_hung_gpu_is_a_fact_about_the_driver_and_grows_surer() -> None:
    """A GPU past its deadline is driver.hung; the others are judged as ever."""
    state = gb200_tray()
    node = Node(state, {"gpus": 4})
    node.look()
    state.gpus[1].hang = ("*",)
    sure = []
    for after in (0.0, 61.0, shipped().gpu.hung_sure_s):
        found = node.present(after)
        assert list(found) == ["driver.hung"]
        finding = found["driver.hung"]
        assert (str(finding.component), finding.severity) == ("t01/gpu@0009:01:00.0", Severity.FATAL)
        assert finding.action is Action.REBOOT_NODE
        sure.append(finding.certainty)
    assert sure == sorted(sure)
    assert sure[0] < 1.0 == sure[-1]
    state.gpus[1].hang = ()
    assert node.present() == {}


def test_initialising_may_hang_too() -> None:
    """Then nothing is known of any GPU, and the driver alone is named."""
    node = Node(gb200_tray(), {"gpus": 4})
    assert [str(f.component) for f in node.present(gpus=[], hung_s=12.0).values()] == ["t01/driver"]


def test_another_driver_version_is_only_noted() -> None:
    """A version that differs from the expected one is information."""
    found = Node(gb200_tray(), {"driver": "590.1"}).present()
    assert {c: f.severity for c, f in found.items()} == {"driver.version": Severity.INFO}


# -- GPUs that are gone -------------------------------------------------------------------------------------------------------


def test_a_lost_gpu_is_found_at_once() -> None:
    """GpuIsLost in the middle of a reading is the GPU's end: fatal, certain, and no half reading is judged."""
    state = gb200_tray()
    node = Node(state, {"gpus": 4})
    node.look()
    state.gpus[3].gone = 15
    found = [f for f in node.look() if f.component.gpu == "0019:01:00.0"]
    assert [(f.check, f.severity, f.action, f.certainty) for f in found] == [("gpu.lost", Severity.FATAL, Action.REBOOT_NODE, 1.0)]


def test_a_gpu_without_a_handle_is_named_by_elimination(tmp_path: Path) -> None:
    """The driver cannot say which GPU is lost; the one left over among those it holds is."""
    state = gb200_tray()
    sys = bound(tmp_path, {gpu.pci: THERE for gpu in state.gpus})
    state.gpus[0].no_handle = 15
    assert str(Node(state, sys=sys).present()["gpu.lost"].component) == GPU


def test_a_lost_gpu_that_cannot_be_named_evicts_nobody_by_name() -> None:
    """With nothing to tell it by, it is another check, about the node, and it ends."""
    state = gb200_tray()
    state.gpus[0].no_handle = 15
    node = Node(state)
    found = node.present()
    assert (list(found), str(found["gpu.lost_unnamed"].component)) == (["gpu.lost_unnamed"], "t01")
    assert found["gpu.lost_unnamed"].certainty < 1
    state.gpus[0].no_handle = 0
    assert {f.present for f in node.look() if f.check == "gpu.lost_unnamed"} == {False}


def test_an_unknown_error_for_a_handle_must_repeat() -> None:
    """"Unknown Error" may be a GPU off the bus or a lost permission: doubt, and not on one look."""
    state = gb200_tray()
    node = Node(state)
    node.look()
    node.driver._readers.clear()
    state.gpus[2].no_handle = 999
    assert node.present() == {}
    found = node.present()
    assert (str(found["gpu.lost"].component), found["gpu.lost"].certainty) == ("t01/gpu@0018:01:00.0", 0.7)


def test_a_permission_is_about_the_monitor() -> None:
    """No permission for one GPU says nothing about that GPU."""
    state = gb200_tray()
    state.gpus[2].no_handle = 4
    found = Node(state).present()
    assert {c: f.suspect for c, f in found.items()} == {"gpu.unreadable": Suspect.MONITOR}


def test_a_gpu_off_the_bus_shows_in_sysfs_even_when_the_driver_hangs(tmp_path: Path) -> None:
    """A configuration space of all ones is a GPU off the bus, whatever the driver does; only of GPUs known from the driver."""
    state = gb200_tray()
    node = Node(state, sys=bound(tmp_path / "a", {PCI: THERE, "00aa:01:00.0": OFF}))
    assert node.present() == {}
    state.gpus[0].hang = ("*",)
    node.probe = GpuProbe(Context(node="t01", sys=bound(tmp_path / "b", {PCI: OFF}), proc=tmp_path, driver=node.driver))
    found = node.present()
    assert sorted(found) == ["driver.hung", "gpu.lost"]
    assert str(found["gpu.lost"].component) == GPU


def test_a_gpu_that_vanished_from_the_list_is_lost() -> None:
    """A GPU that was here and is listed no more is gone, and missing in the count."""
    state = gb200_tray()
    node = Node(state, {"gpus": 4})
    node.look()
    del state.gpus[3]
    found = node.present()
    assert sorted(found) == ["gpu.count", "gpu.lost"]
    assert str(found["gpu.lost"].component) == "t01/gpu@0019:01:00.0"
    assert found["gpu.count"].certainty == 1.0


@pytest.mark.parametrize(
    ("wanted", "severity", "suspect"), [(5, Severity.FATAL, Suspect.SELF), (3, Severity.WARNING, Suspect.MONITOR)]
)
def test_a_count_that_never_was_may_be_the_files_mistake(wanted: int, severity: Severity, suspect: Suspect) -> None:
    """Fewer GPUs than a file says is doubt until that many were seen; more is about the file."""
    finding = Node(gb200_tray(), {"gpus": wanted}).present()["gpu.count"]
    assert (finding.severity, finding.suspect) == (severity, suspect)
    assert (finding.certainty < 1) == (wanted == 5)


# -- bad input ----------------------------------------------------------------------------------------------------------------


def test_a_reading_of_another_format_is_refused_in_one_sentence() -> None:
    """A format that is not known is never half understood."""
    node = Node(gb200_tray())
    with pytest.raises(ProbeError, match="format 2; this sentinel knows format 1"):
        node.probe.assess(Reading(probe="gpu", node="t01", at=1.0, format=2), {}, {})


@pytest.mark.parametrize("value", ["four", -1, 2.5, True])
def test_an_expectation_of_the_wrong_kind_is_named(value: Any) -> None:
    """The key, what was wanted and what was found."""
    with pytest.raises(ProbeError, match=r"expected\.gpus: wanted a whole number, got"):
        Node(gb200_tray(), {"gpus": value}).look()


def test_an_option_that_does_not_exist_is_named() -> None:
    """A misspelt option is an error when the probe is made."""
    with pytest.raises(ProbeError, match="unknown option 'intervall'"):
        GpuProbe(Context(node="t01", options={"intervall": "5s"}))


def test_without_a_driver_nothing_is_read() -> None:
    """A probe that was given no way to the driver says so."""
    with pytest.raises(ProbeError, match="no way to the driver"):
        asyncio.run(GpuProbe(Context(node="t01")).read())

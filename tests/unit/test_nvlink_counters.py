"""Counters of NVLinks, C2C links and memory over time: what a rise means, through the real reader and the real probe."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from probes import Context
from probes.gpu import GpuProbe
from probes.nvlink_counters import STATES, rate_of
from probes.nvml_counters import C2C_COUNT, FEC_TAIL, LEGACY, PER_LINK, SELDOM_S
from sentinel.model import Action, Finding, Kind, Reading, Severity, Suspect
from sentinel.testing.nvml import FakeDriver, FakeNvml
from sentinel.testing.nvml_kinds import gb200, gb200_tray, h200
from sentinel.testing.nvml_state import FakeGpu, FakeState

PCI = "0008:01:00.0"
STEP_S = 30.0


class Tray:
    """A node under observation, by its own clock."""

    def __init__(self, state: FakeState, node: str = "t01", **expected: Any) -> None:
        self.state, self.node, self.expected, self.at = state, node, expected, 1_800_000_000.0
        self.memory: dict[str, Any] = {}
        self.probe = GpuProbe(Context(node=node, sys=Path("/nowhere"), proc=Path("/nowhere"),
                                      driver=FakeDriver(state, lambda: self.at)))  # fmt: skip

    @property
    def gpu(self) -> FakeGpu:
        return self.state.gpus[0]

    def look(self, after_s: float = STEP_S) -> list[Finding]:
        self.at += after_s
        read = asyncio.run(self.probe.read())
        reading = Reading(probe="gpu", node=self.node, at=self.at, boot_id="one", data={**read.data, "mono": self.at})
        return self.probe.assess(reading, self.memory, self.expected)

    def present(self, after_s: float = STEP_S) -> dict[str, Finding]:
        found = [f for f in self.look(after_s) if f.present]
        self.memory = json.loads(json.dumps(self.memory))  # plain JSON, and enough by itself
        return {f.check: f for f in found}


def one(gpu: FakeGpu | None = None) -> Tray:
    tray = Tray(FakeState(gpus=[gpu or gb200()]))
    for _ in range(2):
        assert tray.present(SELDOM_S) == {}
    return tray


# -- healthy ------------------------------------------------------------------------------------------------------------------


def test_a_healthy_rack_has_nothing_present() -> None:
    """Eighteen trays of four GPUs, all counters measured, over ten minutes: every state is fine and there are states to be fine."""
    for number in range(1, 19):
        tray = Tray(gb200_tray(), node=f"t{number:02}")
        found = [f for _ in range(5) for f in tray.look(SELDOM_S)]
        assert not [f for f in found if f.present]
        said = {f.check for f in found}
        assert {"gpu.nvlink_symbol_errors", "gpu.nvlink_fec_tail", "gpu.nvlink_ber", "gpu.c2c_down", "gpu.nvlink_speed",
                "gpu.repair_pending", "gpu.bank_remap_pending", "gpu.pcie_replays"} <= said  # fmt: skip


def test_what_one_generation_lacks_is_not_said_of_it() -> None:
    """A healthy H200 is judged by its own counters, and nothing is said of those that only Blackwell has."""
    tray = Tray(FakeState(gpus=[h200()]))
    found = [f for _ in range(3) for f in tray.look(SELDOM_S)]
    said = {f.check for f in found}
    assert not [f for f in found if f.present]
    assert {"gpu.nvlink_replays", "gpu.nvlink_crc"} <= said
    assert not said & {"gpu.nvlink_symbol_errors", "gpu.nvlink_ber", "gpu.c2c_down", "gpu.bank_remap_pending"}


def test_single_links_are_asked_only_when_a_sum_has_moved() -> None:
    """While sums stand still no link is asked; when one moves, its links are, and no other counter's."""
    asked: list[tuple[int, int]] = []

    class Spy(FakeNvml):
        def nvmlDeviceGetFieldValues(self, handle: Any, wanted: list[Any]) -> Any:
            asked.extend(wanted)
            return super().nvmlDeviceGetFieldValues(handle, wanted)

    tray = Tray(FakeState(gpus=[gb200()]))
    tray.probe._context.driver._nvml = Spy(tray.state)  # type: ignore[union-attr]
    tray.look()
    per_link = set((PER_LINK | FEC_TAIL).values())
    asked.clear()
    tray.look()
    assert not [a for a in asked if a[0] in per_link and a[1] < 18]
    tray.gpu.count("symbol_errors", 1, link=4)
    asked.clear()
    tray.look()
    assert [a for a in asked if a[0] in per_link and a[1] < 18] == [(PER_LINK["symbol_errors"], n) for n in range(18)]


# -- one finding for each fault -----------------------------------------------------------------------------------------------

Sicken = Callable[[FakeGpu, int], Any]
Fault = tuple[str, Sicken, int, Severity, Action, Suspect]
FAULTS: list[Fault] = [  # check, what happens at step n, steps until it is sure
    ("gpu.nvlink_symbol_errors", lambda g, n: g.count("symbol_errors", 7, link=4), 3, Severity.WARNING, Action.INSPECT,
     Suspect.SELF),
    ("gpu.nvlink_packet_errors", lambda g, n: g.count("malformed_packets", 1, link=2), 2, Severity.WARNING, Action.INSPECT,
     Suspect.SELF),
    ("gpu.nvlink_packet_errors", lambda g, n: g.count("buffer_overruns", 1, link=2), 2, Severity.WARNING, Action.INSPECT,
     Suspect.SELF),
    ("gpu.nvlink_packet_errors", lambda g, n: g.count("receive_errors", 3), 2, Severity.WARNING, Action.INSPECT, Suspect.SELF),
    ("gpu.nvlink_packet_errors", lambda g, n: g.count("receive_general_errors", 1, link=0), 2, Severity.WARNING, Action.INSPECT,
     Suspect.SELF),
    ("gpu.nvlink_integrity", lambda g, n: g.count("local_integrity_errors", 1, link=0), 2, Severity.WARNING, Action.INSPECT,
     Suspect.SELF),
    ("gpu.nvlink_remote_errors", lambda g, n: g.count("receive_remote_errors", 2, link=9), 2, Severity.WARNING, Action.NONE,
     Suspect.PEER),
    ("gpu.nvlink_discards", lambda g, n: g.count("transmit_discards", 2, link=9), 1, Severity.WARNING, Action.NONE, Suspect.SELF),
    ("gpu.nvlink_recovered", lambda g, n: g.count("recovery_successful", 2, link=9), 1, Severity.WARNING, Action.NONE,
     Suspect.SELF),
    ("gpu.nvlink_recovery_failed", lambda g, n: g.count("recovery_failed", 1, link=9), 1, Severity.FATAL, Action.RESET_GPU,
     Suspect.SELF),
    ("gpu.nvlink_ber", lambda g, n: g.set(symbol_ber=3 << 8 | 14), 1, Severity.WARNING, Action.NONE, Suspect.SELF),
    ("gpu.nvlink_ber", lambda g, n: g.set(effective_ber=2 << 8 | 6), 1, Severity.WARNING, Action.INSPECT, Suspect.SELF),
    ("gpu.nvlink_speed", lambda g, n: g.link_fields.update({164: [53125] * 17 + [26562]}), 3, Severity.WARNING, Action.INSPECT,
     Suspect.SELF),
    ("gpu.repair_pending", lambda g, n: g.set(repair_pending=[0, 1]), 1, Severity.WARNING, Action.RESET_GPU, Suspect.SELF),
    ("gpu.bank_remap_pending", lambda g, n: g.fields.update({307: 1}), 4, Severity.WARNING, Action.RESET_GPU, Suspect.SELF),
    ("gpu.bank_remap_spares", lambda g, n: g.fields.update({306: 2}), 4, Severity.INFO, Action.NONE, Suspect.SELF),
    ("gpu.ecc_storm", lambda g, n: g.set(ecc_corrected_volatile=60_000 * n), 3, Severity.WARNING, Action.INSPECT, Suspect.SELF),
    ("gpu.pcie_replays", lambda g, n: g.set(pcie_replays=100 * n), 3, Severity.WARNING, Action.INSPECT, Suspect.SELF),
    ("gpu.c2c_down", lambda g, n: g.c2c(10, status=[1] * 9 + [0]), 8, Severity.WARNING, Action.INSPECT, Suspect.SELF),
    ("gpu.c2c_down", lambda g, n: g.c2c(0), 8, Severity.WARNING, Action.INSPECT, Suspect.SELF),
    ("gpu.c2c_errors", lambda g, n: g.c2c(10, crc=[9000 * n] + [0] * 9), 13, Severity.WARNING, Action.NONE, Suspect.SELF),
    ("gpu.nvlink_fec_tail", lambda g, n: g.count("fec_9", 5, link=3), 13, Severity.WARNING, Action.NONE, Suspect.SELF),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{n}-{f[0]}" for n, f in enumerate(FAULTS)])
def test_each_fault_has_its_finding(fault: Fault) -> None:
    """A fault that goes on is found within the windows it needs, with its severity, first thing to do and suspect."""
    check, sicken, steps, *said = fault
    tray = one()
    tray.gpu.set(utilization_percent=90)
    found: dict[str, Finding] = {}
    for n in range(1, steps + 1):
        sicken(tray.gpu, n)
        found = tray.present()
    finding = found.pop(check)
    assert [finding.severity, finding.action, finding.suspect] == said
    assert finding.summary and finding.evidence
    assert set(found) <= {"gpu.nvlink_recovery_history"}, found


def test_one_bad_moment_is_doubt_and_many_are_not() -> None:
    """A lone rise is on record with little certainty; when it goes on, certainty grows under the same id; then it ends."""
    tray = one()
    tray.gpu.count("symbol_errors", 1, link=4)
    first = tray.present()["gpu.nvlink_symbol_errors"]
    assert first.certainty < 0.8 and first.facts["links"] == [4]
    for _ in range(2):
        tray.gpu.count("symbol_errors", 1, link=4)
        last = tray.present()["gpu.nvlink_symbol_errors"]
    assert last.certainty >= 0.8 and last.id == first.id
    for _ in range(9):
        assert "gpu.nvlink_symbol_errors" in tray.present()
    assert tray.present() == {}


def test_rises_on_different_links_do_not_add_up() -> None:
    """One symbol error on each of three links is three lone ones, not one link that gets worse."""
    tray = one()
    for link in (1, 2, 3):
        tray.gpu.count("symbol_errors", 1, link=link)
        found = tray.present()["gpu.nvlink_symbol_errors"]
    assert found.certainty < 0.8 and found.facts["links"] == [1, 2, 3]


def test_the_first_look_and_a_reset_count_nothing() -> None:
    """Errors of before the first look are history, and those that a reset GPU counts while it trains its links are nobody's."""
    gpu = gb200()
    for name in PER_LINK:
        gpu.count(name, 1000, link=5)
    tray = Tray(FakeState(gpus=[gpu]))
    history = {"gpu.nvlink_recovery_history"}
    assert set(tray.present()) == history and set(tray.present()) == history
    for name in PER_LINK:
        gpu.count(name, -999, link=5)
    assert set(tray.present()) == history
    gpu.count("recovery_failed", -1, link=5)
    assert tray.present() == {}


def test_a_recovery_is_an_event_of_its_link_with_its_count() -> None:
    """What happened once is told once, with how often, about the link where it is known and about the GPU where it is not."""
    tray = one()
    tray.gpu.count("recovery_successful", 3, link=7)
    found = tray.present()["gpu.nvlink_recovered"]
    assert (found.kind, found.count, str(found.component)) == (Kind.EVENT, 3, f"t01/gpu@{PCI}/nvlink7")
    assert tray.present() == {}
    for field in PER_LINK.values():
        tray.gpu.link_fields[field] = []
    tray.present()
    tray.gpu.count("recovery_failed", 1)
    assert str(tray.present()["gpu.nvlink_recovery_failed"].component) == f"t01/gpu@{PCI}"


@pytest.mark.parametrize(("name", "rise", "check"), [
    ("dl_replay", 1, "gpu.nvlink_replays"), ("dl_recovery", 1, "gpu.nvlink_recovered"), ("dl_crc", 13_000, "gpu.nvlink_crc"),
    ("dl_crc", 11_000, None),
])  # fmt: skip
def test_hopper_is_judged_by_its_own_counters(name: str, rise: int, check: str | None) -> None:
    """Replays and recoveries count from one on; CRC errors only from a hundred a second (120 s windows)."""
    tray = one(h200())
    tray.gpu.link_fields[LEGACY[name]][3] += rise
    assert set(tray.present(SELDOM_S)) == ({check} if check else set())


def test_a_window_is_counted_once_however_often_it_is_carried_along() -> None:
    """Readings between two slow ones repeat its values; they are no new windows."""
    tray = one()
    tray.gpu.count("symbol_errors", 1, link=4)
    tray.present()
    for _ in range(5):
        assert tray.present(5.0)["gpu.nvlink_symbol_errors"].certainty < 0.8


def test_fine_counters_are_judged_once_for_each_reading() -> None:
    """Of links that are fine nothing is said at looks that only carry their counters along; a fault stays said at each of them."""
    tray = Tray(FakeState(gpus=[gb200()]), nvlink_mbps=53125)
    assert {f.check for f in tray.look()} & set(STATES)
    for _ in range(3):
        assert not {f.check for f in tray.look(5.0)} & set(STATES)
    assert {f.check for f in tray.look()} >= {"gpu.nvlink_symbol_errors", "gpu.nvlink_speed"}
    tray.gpu.count("symbol_errors", 1, link=4)
    tray.look()
    assert all("gpu.nvlink_symbol_errors" in tray.present(5.0) for _ in range(3))


def test_a_clock_that_is_set_back_makes_no_rise() -> None:
    """Times that run backwards begin new windows and raise nothing."""
    tray = one()
    tray.gpu.count("symbol_errors", 5, link=1)
    assert tray.present(-3600.0) == {}
    assert tray.present() == {}


def test_corrected_errors_count_under_load_only() -> None:
    """An idle GPU without errors does not end a storm; a busy one without errors does. A trickle is none."""
    tray = one()
    tray.gpu.set(utilization_percent=90)
    for n in range(1, 4):
        tray.gpu.set(ecc_corrected_volatile=90_000 * n)
        found = tray.present()
    assert found["gpu.ecc_storm"].certainty == 0.9
    tray.gpu.set(utilization_percent=0)
    for _ in range(6):
        assert "gpu.ecc_storm" in tray.present()
    tray.gpu.set(utilization_percent=90)
    for _ in range(5):
        found = tray.present()
    assert found == {}
    tray.gpu.set(ecc_corrected_volatile=90_000 * 3 + 20)
    assert tray.present() == {}


def test_what_stays_fine_is_not_said_for_ever() -> None:
    """A fleet sends all that is said: a check that was never bad is said to be fine at first and then no more; one that was, is."""
    tray = one()
    for _ in range(4):
        tray.look()
    assert "gpu.nvlink_remote_errors" not in {f.check for f in tray.look()}
    tray.gpu.count("receive_remote_errors", 1, link=1)
    assert "gpu.nvlink_remote_errors" in tray.present()
    ended = [f for _ in range(12) for f in tray.look() if f.check == "gpu.nvlink_remote_errors" and not f.present]
    assert len(ended) == 1


def test_a_c2c_link_in_low_power_is_healthy() -> None:
    """Low power is a state of rest, and links that were never there are not missed."""
    tray = one()
    tray.gpu.c2c(10, power=[1] * 10)
    assert tray.present(SELDOM_S) == {} and tray.present(SELDOM_S) == {}
    other = gb200()
    other.fields[C2C_COUNT] = {"nvml_error": 3}
    assert [f for _ in range(3) for f in Tray(FakeState(gpus=[other])).look(SELDOM_S) if f.present or "c2c" in f.check] == []


@pytest.mark.parametrize(("packed", "rate"), [
    (15 << 8 | 255, 0.0), (15 << 8 | 238, 0.0), (1 << 8 | 238, 0.0), (0, 0.0), (3, 0.0), (1 << 8 | 237, 1e-237),
    (5 << 8 | 13, 5e-13), (0.0, 0.0), (2e-9, 2e-9), (7.0, None), (None, None), (-1, None), (True, None),
])  # fmt: skip
def test_bit_error_rates_have_a_floor(packed: Any, rate: float | None) -> None:
    """Packed rates at or below the floor are zero; a driver that answers with a plain number is understood; the rest is not."""
    got = rate_of(packed)
    assert got is None if rate is None else got == pytest.approx(rate)

"""Values of a GPU that are judged over several looks: one odd sample says nothing, and what lasts is said once."""

from __future__ import annotations

import pytest

from probes.nvml import SLOW_S
from probes.thresholds import shipped
from sentinel.testing.nvml_kinds import gb200
from tests.unit.gpu_node import one


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


def test_heat_has_hysteresis() -> None:
    """A margin that hovers at the limit is one finding, not many."""
    gpu = gb200()
    node = one(gpu)
    seen = []
    for margin in (3, 0, 3, 5, 6, 3):
        gpu.set(margin_c=margin)
        seen.append("gpu.thermal" in node.present())
    assert seen == [False, True, True, True, False, False]

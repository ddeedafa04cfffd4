"""Time that a GPU's clocks were held down: by whichever counters its driver has, and never by two of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from probes import Context
from probes.gpu import GpuProbe
from probes.nvml import SLOW_S
from probes.nvml_counters import SLOWDOWN_NS, VIOLATION_NS
from probes.thresholds import shipped
from sentinel.model import Finding, Reading, Severity
from sentinel.testing.nvml import FakeDriver, FakeNvml
from sentinel.testing.nvml_kinds import gb200, h200
from sentinel.testing.nvml_state import FakeGpu, FakeState

WINDOW_NS = int(SLOW_S * 1e9)
NEEDED, OF = shipped().gpu.violation_windows


class Watch:
    """One GPU looked at again and again; what it answers is set in between."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.at = gpu, 1_800_000_000.0
        self.data: dict[str, Any] = {}
        self.memory: dict[str, Any] = {}
        self.asked: list[int] = []
        self.driver = FakeDriver(FakeState(gpus=[gpu]), lambda: self.at)
        self.probe = GpuProbe(Context(node="t01", sys=Path("/nowhere"), proc=Path("/nowhere"), driver=self.driver))
        self.driver._nvml = Counting(FakeState(gpus=[gpu]), self.asked)

    def look(self, after_s: float = SLOW_S) -> dict[str, Finding]:
        self.at += after_s
        self.asked.clear()
        read = asyncio.run(self.probe.read())
        self.data = read.data["gpus"][0]
        reading = Reading(probe="gpu", node="t01", at=self.at, boot_id="one", data={**read.data, "mono": self.at})
        return {f.check: f for f in self.probe.assess(reading, self.memory, {}) if f.present}

    def spend(self, cause: str, share: float, looks: int) -> list[set[str]]:
        """That share of each of so many windows is spent held down by this cause; what is found after each."""
        found = []
        for _ in range(looks):
            field = VIOLATION_NS[cause]
            self.gpu.fields[field] += int(share * WINDOW_NS)
            found.append(set(self.look()))
        return found


class Counting(FakeNvml):
    """The fake driver, and which of its fields were asked for."""

    def __init__(self, state: FakeState, asked: list[int]) -> None:
        super().__init__(state)
        self.asked = asked

    def nvmlDeviceGetFieldValues(self, handle: Any, wanted: list[Any]) -> Any:
        self.asked += [w[0] if isinstance(w, tuple) else w for w in wanted]
        return super().nvmlDeviceGetFieldValues(handle, wanted)


def older(gpu: FakeGpu) -> FakeGpu:
    """As a driver answers that does not tell the causes of a slowdown apart."""
    return gpu.set(**dict.fromkeys(SLOWDOWN_NS, None))


@pytest.mark.parametrize("make", [gb200, h200])
def test_the_costly_counters_are_read_only_where_there_are_no_others(make: Any) -> None:
    """A driver that knows fields 269 to 271 is never asked for 74 to 79; an older one is, with the slow values only."""
    newer = Watch(make())
    for after_s in (0.0, 5.0, SLOW_S):
        newer.look(after_s)
        assert not set(newer.asked) & set(VIOLATION_NS.values())
    assert (newer.data["violation_ns"], set(newer.data["slowdown_ns"])) == (None, set(SLOWDOWN_NS))
    old = Watch(older(make()))
    times = []
    for after_s in (0.0, 5.0, SLOW_S):
        old.look(after_s)
        times.append(old.asked.count(VIOLATION_NS["thermal"]))
    assert times == [1, 0, 1]
    assert (old.data["slowdown_ns"], old.data["violation_ns"]) == (None, dict.fromkeys(VIOLATION_NS, 0))


def test_a_source_once_found_is_kept() -> None:
    """Counters that stop answering for a moment are not replaced by the other ones, whose past nobody knows."""
    watch = Watch(gb200())
    watch.look()
    older(watch.gpu)
    watch.look()
    assert (watch.data["slowdown_ns"], watch.data["violation_ns"]) == (None, None)


def test_heat_by_the_older_counters_is_the_same_word() -> None:
    """Thermal violation in three of five windows is the GPU slowing down; it ends when no window is left."""
    watch = Watch(older(h200()))
    watch.look()
    found = watch.spend("thermal", 0.4, NEEDED)
    assert found == [set()] * (NEEDED - 1) + [{"gpu.clocks_slowdown"}]
    quiet = watch.spend("thermal", 0.0, OF)
    assert quiet[0] == {"gpu.clocks_slowdown"} and quiet[-1] == set()


def test_looks_between_two_readings_are_no_windows() -> None:
    """The counters carried along from look to look count once."""
    watch = Watch(older(h200()))
    watch.look()
    watch.spend("thermal", 1.0, 1)
    assert [watch.look(5.0) for _ in range(5)] == [{}] * 5


@pytest.mark.parametrize("cause", ["board_limit", "reliability"])
def test_the_limits_of_board_and_voltage(cause: str) -> None:
    """Minutes at such a limit are a warning of their own and doubt; a moment, or a share of it that any GPU has, is nothing."""
    watch = Watch(older(h200()))
    watch.look()
    assert watch.spend(cause, 0.05, 8) == [set()] * 8
    assert watch.spend(cause, 0.9, 2) == [set()] * 2
    assert watch.spend(cause, 0.0, OF) == [set()] * OF
    assert watch.spend(cause, 0.9, NEEDED)[-1] == {f"gpu.clocks_{cause}"}
    finding = watch.look()[f"gpu.clocks_{cause}"]
    assert (finding.severity, finding.certainty < 0.8) == (Severity.WARNING, True)
    assert watch.spend(cause, 0.0, OF)[-1] == set()


@pytest.mark.parametrize("cause", ["power", "sync_boost"])
def test_what_is_normal_under_load_is_no_finding(cause: str) -> None:
    """A GPU held at its power limit, or at the pace of its peers, all day long is healthy."""
    watch = Watch(older(h200()))
    watch.look()
    assert watch.spend(cause, 1.0, 8) == [set()] * 8


def test_counters_that_began_anew_or_are_not_there_say_nothing() -> None:
    """A driver loaded again counts from zero; one that knows neither source is not measured."""
    watch = Watch(older(h200()))
    watch.gpu.fields[VIOLATION_NS["thermal"]] = 10**15
    watch.look()
    watch.gpu.fields[VIOLATION_NS["thermal"]] = 0
    assert watch.look() == {}
    silent = Watch(older(h200()).set(**{f"violation_{name}": None for name in VIOLATION_NS}))
    assert [silent.look() for _ in range(4)] == [{}] * 4
    assert (silent.data["slowdown_ns"], silent.data["violation_ns"]) == (None, None)


def test_both_sources_in_one_reading_count_once() -> None:
    """A recording that holds both is judged by the newer one, and its memory stays plain JSON."""
    watch = Watch(gb200())
    for n in range(6):
        watch.at += SLOW_S
        data = asyncio.run(watch.probe.read()).data
        data["gpus"][0]["violation_ns"] = {"thermal": n * WINDOW_NS, "reliability": n * WINDOW_NS}
        reading = Reading(probe="gpu", node="t01", at=watch.at, boot_id="one", data={**data, "mono": watch.at})
        assert not [f for f in watch.probe.assess(reading, watch.memory, {}) if f.present]
        watch.memory = json.loads(json.dumps(watch.memory))

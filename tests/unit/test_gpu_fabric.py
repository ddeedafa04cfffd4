"""A GPU's way to its peers: links and fabrics that are down, unhealthy, unjoined or split, where there should be any."""

from __future__ import annotations

from typing import Any

import pytest

from probes.nvml_counters import ONCE_IN_A_WHILE
from probes.thresholds import shipped
from sentinel.model import Action, Severity, Suspect
from sentinel.testing.nvml_kinds import gb200, gb200_tray, h200
from sentinel.testing.nvml_state import FakeState
from tests.unit.gpu_node import GPU, Node, one


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

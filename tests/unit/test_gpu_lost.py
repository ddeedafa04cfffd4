"""GPUs that are gone: found at once where it is certain, named only where it is known which, and missed in the count."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from probes import Context
from probes.gpu import GpuProbe
from sentinel.model import Action, Severity, Suspect
from sentinel.testing.nvml_kinds import gb200_tray
from tests.unit.gpu_node import GPU, PCI, Node


def bound(root: Path, devices: Mapping[str, bytes]) -> Path:
    """A sysfs with devices that the nvidia driver holds: address → the first bytes of its configuration space."""
    for pci, head in devices.items():
        device = root / "bus/pci/drivers/nvidia" / pci
        device.mkdir(parents=True)
        (device / "config").write_bytes(head + bytes(60))
    (root / "bus/pci/drivers/nvidia/bind").touch()
    return root


THERE, OFF = b"\xde\x10\x34\x12", b"\xff" * 4


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

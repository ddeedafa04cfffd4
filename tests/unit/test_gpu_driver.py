"""A driver that cannot be used, hangs, refuses or is another version: said about it or the monitor, not about hardware."""

from __future__ import annotations

from typing import Any

import pytest

from probes.thresholds import shipped
from sentinel.model import Action, Severity, Suspect
from sentinel.testing.nvml_kinds import gb200_tray
from tests.unit.gpu_node import Node


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


def test_a_permission_is_about_the_monitor() -> None:
    """No permission for one GPU says nothing about that GPU."""
    state = gb200_tray()
    state.gpus[2].no_handle = 4
    found = Node(state).present()
    assert {c: f.suspect for c, f in found.items()} == {"gpu.unreadable": Suspect.MONITOR}

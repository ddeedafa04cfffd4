"""What a GPU says once and plainly is found at that look, and found as the right thing."""

from __future__ import annotations

from typing import Any

import pytest

from sentinel.model import Action, Kind, Severity, Suspect
from sentinel.testing.nvml_kinds import gb200, gb200_tray
from tests.unit.gpu_node import GPU, Node, one

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

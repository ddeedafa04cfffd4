"""PCIe links of GPUs and adapters: read from a tree like sysfs, judged device by device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes import Context, Probe, ProbeError
from probes.pcie import PcieProbe
from sentinel.model import Finding, Reading, Severity
from sentinel.testing.sysfs import REFUSED, SysTree

FATAL, WARNING, INFO = Severity.FATAL, Severity.WARNING, Severity.INFO
GPU, NIC = "0009:01:00.0", "0009:03:00.0"


class Node:
    """A tray with one GPU and one adapter, its probe, and a clock that only the test moves."""

    def __init__(self, root: Path, expected: dict[str, Any] | None = None) -> None:
        self.tree, self.expected, self.memory, self.at = SysTree(root), expected or {}, {}, 1000.0
        self.gpu, self.nic = self.tree.pci(GPU), self.tree.nic(NIC)
        self.probe = PcieProbe(Context(node="t01", sys=self.tree.sys, proc=self.tree.proc), clock=lambda: self.at)

    async def look(self, times: int = 1) -> dict[str, Finding]:
        found: list[Finding] = []
        for _ in range(times):
            self.at += 15.0
            found = self.probe.assess(await self.probe.read(), self.memory, self.expected)
        return {f"{f.check} {f.component.device}": f for f in found if f.present}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_healthy_links_are_fine(node: Node) -> None:
    """A healthy tray yields only present=False, and the reading has every value."""
    assert isinstance(node.probe, Probe)
    assert await node.look(4) == {}
    gpu, nic = (await node.probe.read()).data["devices"]
    assert (gpu["kind"], gpu["width"], gpu["speed"], gpu["off_bus"], nic["kind"]) == ("gpu", 16, 32.0, False, "nic")
    checks = {f.check for f in node.probe.assess(await node.probe.read(), node.memory, {})}
    assert checks >= {"pcie.width", "pcie.speed", "pcie.gone"}
    assert "x16 of 16" in node.probe.describe(await node.probe.read())[0]


async def test_width_counts_always_and_after_three_looks(node: Node) -> None:
    """A link narrower than both ends allow is a warning, of GPUs and adapters alike, once it was seen three times."""
    node.gpu.set(current_link_width="8")
    node.nic.set(current_link_width="4")
    assert await node.look(2) == {}
    found = await node.look()
    assert {(k, f.severity) for k, f in found.items()} == {(f"pcie.width gpu@{GPU}", WARNING), (f"pcie.width nic@{NIC}", WARNING)}


async def test_a_narrow_slot_is_no_fault_unless_more_is_expected(tmp_path: Path) -> None:
    """What the port above cannot do is not asked of the link, except where the site expects it of its GPUs."""
    for expected, there in (({}, False), ({"pcie_width": 16}, True)):
        node = Node(tmp_path / str(there), expected)
        bridge = node.tree.pci("0018:00:00.0", vendor="0x10b5", **{"class": "0x060400"}, max_link_width="8")
        assert bridge.path.is_dir()
        node.tree.pci("0018:01:00.0", below="0018:00:00.0", current_link_width="8")
        assert (set(await node.look(4)) == {"pcie.width gpu@0018:01:00.0"}) is there


def gpu_in_a_narrow_slot(node: Node, address: str) -> None:
    bridge = address[:5] + "00:00.0"
    node.tree.pci(bridge, vendor="0x10b5", **{"class": "0x060400"}, max_link_width="8")
    node.tree.pci(address, below=bridge, current_link_width="8")


async def test_a_slot_narrower_than_its_kind_s(tmp_path: Path) -> None:
    """By the kind of node alone: on record where all GPUs are so, a fault where another has the usual width, fine where it is."""
    for hints, alone, severity in (({}, False, None), ({"pcie_width": 16}, False, WARNING), ({"pcie_width": 16}, True, INFO),
                                   ({"pcie_width": 8}, True, None), ({"pcie_width": "x"}, True, None)):  # fmt: skip
        node = Node(tmp_path / f"{hints}{alone}", {"hints": hints})
        gpu_in_a_narrow_slot(node, "0018:01:00.0")
        if alone:
            node.gpu.remove()
        found = await node.look(4)
        assert {(k, f.severity) for k, f in found.items()} == ({("pcie.width gpu@0018:01:00.0", severity)} if severity else set())


async def test_a_hint_asks_nothing_of_what_cannot_do_it(node: Node) -> None:
    """A GPU that has fewer lanes of its own, and an adapter of any width, are whole whatever is usual for GPUs."""
    node.expected = {"hints": {"pcie_width": 16}}
    node.gpu.set(current_link_width="8", max_link_width="8")
    node.nic.set(current_link_width="8", max_link_width="8")
    assert await node.look(6) == {}


async def test_speed_of_a_gpu_is_not_judged_without_its_load(node: Node) -> None:
    """An idle GPU lowers its speed; an adapter does not."""
    node.gpu.set(current_link_speed="2.5 GT/s PCIe")
    node.nic.set(current_link_speed="16.0 GT/s PCIe")
    assert set(await node.look(4)) == {f"pcie.speed nic@{NIC}"}


async def test_an_adapter_that_left_the_bus(node: Node) -> None:
    """All ones three times in a row is fatal for an adapter; for a GPU the gpu probe says it, and its dead link says nothing."""
    for device in (node.nic, node.gpu):
        device.off_bus()
        device.set(current_link_width="63", current_link_speed="Unknown")
    assert await node.look(2) == {}
    found = await node.look()
    assert {(k, f.severity) for k, f in found.items()} == {(f"pcie.gone nic@{NIC}", FATAL)}
    node.nic.off_bus(False)
    assert await node.look() == {}


async def test_a_device_that_sleeps_is_not_gone(node: Node) -> None:
    """A configuration space that reads all ones in D3cold is not measured."""
    node.nic.off_bus()
    node.nic.set(power_state="D3cold")
    assert await node.look(5) == {}


async def test_an_adapter_that_vanished(node: Node) -> None:
    """An adapter that is not listed any more is a warning after a minute, and over when it is back."""
    await node.look()
    node.nic.remove()
    assert await node.look(3) == {}
    assert {(k, f.severity) for k, f in (await node.look(3)).items()} == {(f"pcie.vanished nic@{NIC}", WARNING)}
    node.tree.nic(NIC)
    assert await node.look() == {}


async def test_uncorrectable_errors_are_events(node: Node) -> None:
    """A rise of fatal or non-fatal AER counters is an event with its count; what was there before is not."""
    node.gpu.aer(nonfatal=4, fatal=2)
    assert await node.look(2) == {}
    node.gpu.aer(nonfatal=5, fatal=5)
    found = await node.look()
    assert {(k, f.severity, f.count) for k, f in found.items()} == {
        (f"pcie.aer_fatal gpu@{GPU}", WARNING, 3), (f"pcie.aer_nonfatal gpu@{GPU}", INFO, 1),
    }
    assert await node.look() == {}


async def test_corrected_errors_have_a_limit_by_generation(node: Node) -> None:
    """Gen5 x16 may correct 31 link errors a minute; more, for longer than one burst, is a warning. Other kinds do not count."""
    await node.look()
    for i in range(1, 20):
        node.nic.aer({"RxErr": 3 * i, "BadTLP": 4 * i, "NonFatalErr": 900 * i})
        assert await node.look() == {}
    node.nic.aer({"RxErr": 900})
    assert await node.look(9) == {}
    found: dict[str, Finding] = {}
    for i in range(1, 10):
        node.nic.aer({"RxErr": 900 + 11 * i})
        found = await node.look()
    assert found[f"pcie.corrected_errors nic@{NIC}"].facts["limit"] == 31
    assert await node.look(9) == {}


async def test_what_cannot_be_read_is_not_measured(node: Node) -> None:
    """Files that are missing, refuse or hold nonsense yield None and no finding, present or not."""
    node.gpu.set(config=None, current_link_width=REFUSED, current_link_speed="Unknown", aer_dev_fatal=None, aer_dev_nonfatal="x y")
    node.gpu.set(aer_dev_correctable=REFUSED)
    node.nic.virtual()
    reading = await node.probe.read()
    (device,) = reading.data["devices"]
    assert (device["off_bus"], device["width"], device["speed"]) == (None, None, None)
    assert device["aer"] == {"correctable": None, "nonfatal": None, "fatal": None}
    assert node.probe.assess(reading, {}, {}) == []


async def test_no_pci_at_all(tmp_path: Path) -> None:
    """A machine without the tree yields an empty reading."""
    probe = PcieProbe(Context(node="t01", sys=tmp_path, proc=tmp_path))
    reading = await probe.read()
    assert (reading.data["devices"], probe.assess(reading, {}, {})) == ([], [])


def test_options_and_expectations_are_checked(tmp_path: Path) -> None:
    """A wrong option or expectation is one sentence that names it."""
    with pytest.raises(ProbeError, match="unknown option 'width'"):
        PcieProbe(Context(node="t01", options={"width": 16}))
    with pytest.raises(ProbeError, match=r"expected\.pcie_width"):
        Node(tmp_path).probe.assess(Reading(probe="pcie", node="t01", at=0.0), {}, {"pcie_width": "x16"})


DEVICE = st.fixed_dictionaries({"pci": st.sampled_from([GPU, NIC]), "kind": st.sampled_from(["gpu", "nic"])}, optional={
    "off_bus": st.sampled_from([True, False, None]), "width": st.sampled_from([None, 1, 16]),
    "width_max": st.sampled_from([None, 16]),
    "speed": st.sampled_from([None, 2.5, 64.0]), "speed_max": st.sampled_from([None, 64.0]),
    "aer": st.dictionaries(st.sampled_from(["correctable", "nonfatal", "fatal"]), st.one_of(st.none(), st.integers(0, 1 << 40))),
})


@given(st.lists(st.lists(DEVICE, max_size=3), max_size=6))
@settings(max_examples=100, deadline=None)
def test_any_reading_is_judged(looks: list[list[dict[str, Any]]]) -> None:
    """No reading raises, and nothing about a GPU is ever fatal here."""
    probe, memory = PcieProbe(Context(node="t01")), {}
    for i, devices in enumerate(looks):
        for f in probe.assess(Reading(probe="pcie", node="t01", at=i * 15.0, data={"devices": devices}), memory, {}):
            assert not (f.present and f.severity is FATAL and f.component.gpu)

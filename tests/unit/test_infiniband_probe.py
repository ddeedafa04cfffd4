"""InfiniBand ports: read from a tree like sysfs, judged port by port."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from probes import Context, Probe, ProbeError
from probes.infiniband import InfinibandProbe, rate_gbps
from probes.profile import with_hints
from sentinel.decide.rules.policy_file import default_policy
from sentinel.model import Action, Component, Finding, Reading, Response, Severity, Suspect
from sentinel.testing.sysfs import REFUSED, InfinibandDevice, SysTree

FATAL, WARNING, INFO = Severity.FATAL, Severity.WARNING, Severity.INFO


class Node:
    """A tree, its probe and a clock that only the test moves."""

    def __init__(self, root: Path, expected: dict[str, Any] | None = None, **options: Any) -> None:
        self.tree, self.expected, self.memory = SysTree(root), expected or {}, {}
        self.at = 1000.0
        self.probe = InfinibandProbe(
            Context(node="t01", sys=self.tree.sys, proc=self.tree.proc, options=options), clock=lambda: self.at, deadline_s=2.0,
        )

    async def look(self, after_s: float = 5.0) -> dict[str, Finding]:
        """One reading, judged: what is present, by check."""
        self.at += after_s
        reading = await self.probe.read()
        found = self.probe.assess(reading, self.memory, self.expected)
        assert len({f.id for f in found}) == len(found)
        return {f.check: f for f in found if f.present}

    async def settle(self, looks: int = 4, after_s: float = 5.0) -> dict[str, Finding]:
        found: dict[str, Finding] = {}
        for _ in range(looks):
            found = await self.look(after_s)
        return found


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def rails(node: Node, n: int = 4, **port: str) -> list[InfinibandDevice]:
    return [node.tree.infiniband(f"mlx5_{i}", f"000{i}:03:00.0", **port) for i in range(n)]


async def test_a_healthy_node_says_nothing_is_wrong(node: Node) -> None:
    """Healthy rails yield findings that are all present=False, and the reading names every value."""
    rails(node)
    reading = await node.probe.read()
    device = reading.data["devices"][0]
    assert isinstance(node.probe, Probe)
    assert (device["pci"], device["hca"], device["fw"]) == ("0000:03:00.0", "MT4129", "28.43.2566")
    port = device["ports"][0]
    assert (port["state"], port["phys"], port["rate_gbps"], port["lid"], port["sm_lid"]) == (4, 5, 400.0, 26, 1)
    assert port["counters"]["link_downed"] == 0
    assert await node.settle() == {}
    found = node.probe.assess(await node.probe.read(), node.memory, {})
    assert {f.check for f in found} >= {"ib.port_down", "ib.port_not_set_up", "ib.rate_low", "ib.link_flapping"}
    assert all("active" in line for line in node.probe.describe(reading))


async def test_nothing_there_is_no_finding(node: Node) -> None:
    """A node without InfiniBand yields an empty reading and no finding."""
    assert await node.settle() == {}


STATES: list[tuple[str, str, str, str, Suspect]] = [
    ("1: DOWN", "2: Polling", "0x1", "ib.port_down", Suspect.SELF),
    ("1: DOWN", "4: PortConfigurationTraining", "0x1", "ib.port_down", Suspect.SELF),
    ("1: DOWN", "6: LinkErrorRecovery", "0x1", "ib.port_down", Suspect.SELF),
    ("1: DOWN", "5: LinkUp", "0x1", "ib.port_down", Suspect.SELF),
    ("2: INIT", "5: LinkUp", "0x0", "ib.port_not_set_up", Suspect.SWITCH),
    ("3: ARMED", "5: LinkUp", "0x1", "ib.port_not_set_up", Suspect.SWITCH),
    ("1: DOWN", "3: Disabled", "0x0", "ib.port_disabled", Suspect.SELF),
]


@pytest.mark.parametrize("row", STATES, ids=lambda row: f"{row[0]} {row[1]}")
async def test_states_of_a_rail_that_was_active(node: Node, row: tuple[str, str, str, str, Suspect]) -> None:
    """state, phys_state and SM LID together say whose fault it is; only a rail that stays down is fatal."""
    state, phys, sm, check, suspect = row
    nic = rails(node)[1]
    await node.settle()
    nic.port(state=state, phys_state=phys, sm_lid=sm, rate="10 Gb/sec (4X SDR)")
    early = await node.settle(3)
    assert all(f.severity is not FATAL for f in early.values())
    late = await node.settle(8)
    assert list(late) == [check]
    assert str(late[check].component) == "t01/ib@mlx5_1/port1"
    assert late[check].suspect is suspect
    assert (late[check].severity is FATAL) == (check == "ib.port_down")
    nic.port(state="4: ACTIVE", phys_state="5: LinkUp", sm_lid="0x1", rate="400 Gb/sec (4X NDR)")
    assert await node.look() == {}


async def test_the_id_of_a_state_is_stable(node: Node) -> None:
    """A port that stays down is one occurrence, also when it turns from warning to fatal."""
    nic = rails(node)[0]
    await node.look()
    nic.port(state="1: DOWN", phys_state="2: Polling")
    await node.look()
    first = (await node.look())["ib.port_down"]
    last = (await node.settle(10))["ib.port_down"]
    assert (first.severity, last.severity, first.id) == (WARNING, FATAL, last.id)


async def test_one_odd_look_is_no_outage(node: Node) -> None:
    """A port that is down at one look only is not said to be down."""
    nic = rails(node)[0]
    await node.look()
    nic.port(state="1: DOWN", phys_state="2: Polling")
    assert await node.look() == {}
    nic.port(state="4: ACTIVE", phys_state="5: LinkUp")
    assert await node.look() == {}


async def test_unused_ports_are_not_down(node: Node) -> None:
    """A port that was never active and that nobody expects is left alone, for ever."""
    node.tree.infiniband("mlx5_0", "0000:03:00.0")
    node.tree.infiniband("mlx5_9", "0000:09:00.0", state="1: DOWN", phys_state="2: Polling", rate="10 Gb/sec (4X SDR)")
    assert await node.settle(200) == {}


async def test_expected_ports_are_judged_from_the_start(tmp_path: Path) -> None:
    """Where as many rails are expected as there are, one that never came up is fatal after the time that training may take."""
    node = Node(tmp_path, {"ib_ports": 4})
    rails(node)[2].port(state="1: DOWN", phys_state="2: Polling")
    assert all(f.severity is WARNING for f in (await node.settle(30)).values())
    found = await node.settle(40)
    assert found["ib.port_down"].severity is FATAL
    assert found["ib.ports"].facts == {"here": 3, "expected": 4}


async def test_expected_by_name(tmp_path: Path) -> None:
    """Only the named rails are meant; another unused one stays unjudged."""
    node = Node(tmp_path, {"ib_devices": ["0001:03:00.0"]})
    for nic in rails(node, 3)[1:]:
        nic.port(state="1: DOWN", phys_state="2: Polling")
    found = await node.settle(80)
    assert [str(f.component) for f in found.values()] == ["t01/ib@mlx5_1/port1"]


def default_route(node: Node, nic: InfinibandDevice) -> None:
    nic.netdev("ibp3s0")
    node.tree.default_route("ibp3s0")


def bonded(node: Node, nic: InfinibandDevice) -> None:
    nic.netdev("enp3s0")
    node.tree.default_route("bond0")
    (node.tree.sys / "class/net/bond0/lower_enp3s0").mkdir(parents=True)


LEFT_ALONE: list[Callable[[Node, InfinibandDevice], None]] = [default_route, bonded, lambda node, nic: nic.pci.virtual()]


@pytest.mark.parametrize("makes", LEFT_ALONE, ids=["default route", "bond below it", "virtual function"])
async def test_ports_of_others_are_left_alone(node: Node, makes: Callable[[Node, InfinibandDevice], None]) -> None:
    """The way to the default route and virtual functions are nobody's rail, whatever happens to them."""
    nic = node.tree.infiniband("mlx5_0", "0000:03:00.0")
    makes(node, nic)
    await node.settle()
    nic.port(state="1: DOWN", phys_state="2: Polling")
    nic.counter("link_downed", 9)
    assert await node.settle(20) == {}


async def test_bluefield_and_ignored_are_left_alone(tmp_path: Path) -> None:
    """A DPU's uplink is not a rail, nor is what the site says to ignore, by name or address."""
    node = Node(tmp_path, ignore=["mlx5_1", "0002:03:00.0"])
    nics = [*rails(node, 3)[1:], node.tree.infiniband("mlx5_7", "0007:03:00.0", hca="MT41692")]
    await node.settle()
    for nic in nics:
        nic.port(state="1: DOWN", phys_state="2: Polling")
    assert await node.settle(20) == {}


async def test_a_roce_port_tells_admin_from_carrier(node: Node) -> None:
    """RoCE says Disabled for a lost carrier too: an interface that is up without one is down, one that is not up is wanted so."""
    lost, off = rails(node, 2, link_layer="Ethernet", rate="200 Gb/sec (4X HDR)")
    lost.netdev("eth1")
    off.netdev("eth2")
    await node.settle()
    for nic, up in ((lost, True), (off, False)):
        nic.port(state="1: DOWN", phys_state="3: Disabled")
        nic.netdev(nic.name.replace("mlx5_", "eth"), up=up, carrier=False)
    lost.netdev("eth1", carrier=False)
    off.netdev("eth2", up=False)
    found = await node.settle(20)
    assert {(f.check, f.component.device, f.severity) for f in found.values()} == {
        ("ib.port_down", "ib@mlx5_0", WARNING), ("ib.port_disabled", "ib@mlx5_1", INFO),
    }


async def test_rate_below_expectation(tmp_path: Path) -> None:
    """An active port below its expected rate is a warning after three looks; a down port's default rate is none."""
    node = Node(tmp_path, {"ib_gbps": 400})
    rails(node)[3].port(rate="200 Gb/sec (2X NDR)")
    assert await node.look() == {}
    found = await node.settle()
    assert found["ib.rate_low"].facts == {"rate_gbps": 200.0, "wanted_gbps": 400}
    assert found["ib.rate_low"].severity is WARNING


async def test_rate_below_its_like_and_its_past(node: Node) -> None:
    """Without an expectation a port is measured against its like and against what it had."""
    rails(node)[3].port(rate="100 Gb/sec (4X EDR)")
    assert "ib.rate_low" in await node.settle()
    other = Node(node.tree.root / "other")
    nic = other.tree.infiniband("mlx5_0", "0000:03:00.0")
    await other.settle()
    nic.port(rate="200 Gb/sec (4X HDR)")
    assert "ib.rate_low" in await other.settle()


HINTS = {"profile": "GB200", "ib_gbps": 400}


async def test_all_rails_below_what_is_usual_are_on_record(tmp_path: Path) -> None:
    """Four rails that all run at half the rate of their kind of node: one word about the node, information and nothing more."""
    node = Node(tmp_path, {"hints": HINTS})
    nics = rails(node, rate="200 Gb/sec (4X HDR)")
    assert await node.settle(2) == {}
    finding = (await node.look())["ib.rate_usual"]
    assert (finding.severity, finding.action, str(finding.component)) == (INFO, Action.NONE, "t01/ib")
    assert finding.facts == {"rate_gbps": 200.0, "usual_gbps": 400}
    for nic in nics:
        nic.port(rate="400 Gb/sec (4X NDR)")
    assert await node.settle(8) == {}


@pytest.mark.parametrize(("rates", "hcas", "expected"), [
    ([400] * 4 + [200], ["MT4129"] * 4 + ["MT4123"], {}),  # four rails and a port for storage
    ([400] * 4 + [100] * 4, ["MT4129"] * 4 + ["MT4119"] * 4, {}),  # and four of them
    ([200, 200], ["MT4129"] * 2, {}),  # too few to be known as rails
    ([200], ["MT4123"], {}),
    ([200] * 4, ["MT41692"] * 4, {}),  # BlueField
    ([200] * 4, ["MT4129"] * 4, {"ib_gbps": 200}),  # the site said so
    ([400] * 2 + [200] * 2, ["MT4129"] * 4, {}),  # two networks
    ([800] * 4, ["MT4131"] * 4, {}),
])
async def test_a_hint_alarms_about_no_healthy_node(
    tmp_path: Path, rates: list[int], hcas: list[str], expected: dict[str, Any]
) -> None:
    """Storage, management, single ports, BlueField, and whatever the site has said: what is usual for the kind is silent."""
    memories = {"gpu": {"kind": {"profile": ["GB200"]}}}
    node = Node(tmp_path, with_hints(expected, memories))
    for i, (rate, hca) in enumerate(zip(rates, hcas, strict=True)):
        node.tree.infiniband(f"mlx5_{i}", f"000{i}:03:00.0", hca=hca, rate=f"{rate} Gb/sec")
    assert await node.settle(12) == {}


async def test_a_slow_rail_among_its_like_is_a_fault_with_hints_too(tmp_path: Path) -> None:
    """One rail of four at half the rate of the others is a warning by its like; the hint adds nothing."""
    node = Node(tmp_path, {"hints": HINTS})
    rails(node)[3].port(rate="200 Gb/sec (2X NDR)")
    assert {c: f.severity for c, f in (await node.settle(12)).items()} == {"ib.rate_low": WARNING}


async def test_flaps_between_two_looks_are_counted(node: Node) -> None:
    """Flaps below the sampling interval show in link_downed: one is a warning, more than three in three hours are fatal."""
    nic = rails(node)[0]
    await node.settle()
    nic.counter("link_downed", 1)
    once = (await node.look())["ib.link_flapping"]
    assert (once.severity, once.action, once.count) == (WARNING, Action.NONE, 1)
    nic.counter("link_downed", 4)
    often = (await node.look(600))["ib.link_flapping"]
    assert (often.severity, often.facts["times"], often.id) == (FATAL, 4, once.id)
    assert await node.look(4 * 3600) == {}


async def test_a_counter_that_began_anew(node: Node) -> None:
    """After a driver reload or perfquery -R the value itself is the rise; nothing is taken for a flood."""
    nic = rails(node)[0]
    nic.counter("link_downed", 200)
    await node.settle()
    nic.counter("link_downed", 0)
    assert await node.look() == {}
    nic.counter("link_downed", 2)
    assert (await node.look())["ib.link_flapping"].facts["times"] == 2


@pytest.mark.parametrize(("counter", "most"), [
    ("link_downed", 255), ("link_error_recovery", 255), ("symbol_error", 65535), ("port_rcv_errors", 65535),
    ("local_link_integrity_errors", 15), ("excessive_buffer_overrun_errors", 15),
])
async def test_a_counter_at_its_end_is_its_own_finding(node: Node, counter: str, most: int) -> None:
    """4-, 8- and 16-bit counters stop at their largest value; below and above it they are not stuck."""
    nic = rails(node)[0]
    for value, there in ((most - 1, False), (most, True), (most + 1, False)):
        nic.counter(counter, value)
        node.memory.clear()
        assert ("ib.counter_saturated" in await node.settle(2)) is there


async def test_congestion_is_not_a_fault(node: Node) -> None:
    """However congestion counters grow or stand at their end, nothing above info is said."""
    nic = rails(node)[0]
    for i in range(10):
        for name in ("port_xmit_wait", "port_xmit_discards"):
            nic.counter(name, min(i * 10**9, 0xFFFFFFFF if name == "port_xmit_wait" else 0xFFFF))
        for name in ("out_of_buffer", "packet_seq_err", "rnr_nak_retry_err", "local_ack_timeout_err", "roce_slow_restart"):
            nic.hw(name, i * 10**6)
        found = await node.look()
        assert all(f.severity is INFO for f in found.values()), found
        assert all(default_policy().rule_for(f) is None for f in found.values()), "nobody is paged for congestion"
    assert set(found) == {"ib.congestion", "ib.peer_timeouts"}


RATES = [
    ("symbol_error", 121, 1, "ib.symbol_errors"), ("symbol_error", 110, 1, None), ("link_error_recovery", 6, 1, "ib.link_recovery"),
    ("link_error_recovery", 4, 1, None), ("port_rcv_errors", 60, 4, "ib.receive_errors"), ("port_rcv_errors", 60, 2, None),
    ("port_rcv_errors", 40, 9, None), ("local_link_integrity_errors", 1, 1, "ib.link_integrity"),
    ("excessive_buffer_overrun_errors", 1, 1, "ib.link_integrity"),
]


@pytest.mark.parametrize(("counter", "step", "looks", "check"), RATES)
async def test_published_thresholds(node: Node, counter: str, step: int, looks: int, check: str | None) -> None:
    """Just above a published rate is a warning about the port, just below it is nothing."""
    nic = rails(node)[0]
    await node.look()
    found: dict[str, Finding] = {}
    for i in range(looks):
        nic.counter(counter, step * (i + 1))
        found = await node.look()
    assert list(found) == ([check] if check else [])
    assert all(f.severity is WARNING for f in found.values())


async def test_link_integrity_that_repeats_is_fatal(node: Node) -> None:
    """What the vendor's monitor calls fatal at once is fatal here the third time in an hour."""
    nic = rails(node)[0]
    await node.look()
    for i in range(1, 4):
        nic.counter("local_link_integrity_errors", i)
        found = await node.look(600)
        assert found["ib.link_integrity"].severity is (FATAL if i == 3 else WARNING)


async def test_a_restricted_function_is_not_measured(node: Node) -> None:
    """A function whose counters refuse to be read is named, is no fault, and is not asked again at the next look."""
    nic = rails(node)[0]
    nic.restrict()
    first = await node.probe.read()
    assert first.data["devices"][0]["restricted"] is True
    nic.counter("link_downed", 7)
    second = await node.probe.read()
    assert second.data["devices"][0]["ports"][0]["counters"] == {}
    found = await node.settle()
    assert {c: f.severity for c, f in found.items()} == {"ib.restricted": INFO}
    assert default_policy().rule_for(found["ib.restricted"]) is None, "on record only: every tray of a rack has one"


async def test_counters_without_a_number_are_not_measured(node: Node) -> None:
    """'N/A (no PMA)' and a file that refuses are None, and neither raises nor clears anything."""
    nic = rails(node)[0]
    nic.counter("link_downed", "N/A (no PMA)")
    nic.counter("symbol_error", REFUSED)
    nic.port(state="garbage", phys_state=REFUSED, rate="fast")
    reading = await node.probe.read()
    port = reading.data["devices"][0]["ports"][0]
    assert (port["counters"]["link_downed"], port["counters"]["symbol_error"], port["state"], port["rate_gbps"]) == (None,) * 4
    checks = {f.check for f in node.probe.assess(reading, {}, {}) if f.component.device == "ib@mlx5_0"}
    assert "ib.port_down" not in checks


async def test_a_lost_adapter(node: Node) -> None:
    """An adapter that carried an active rail and vanished is fatal after a minute; all at once is a driver that is not loaded."""
    nics = rails(node)
    await node.settle()
    nics[1].remove()
    assert "ib.device_lost" not in await node.settle(3)
    found = (await node.settle(15))["ib.device_lost"]
    assert (found.severity, str(found.component)) == (FATAL, "t01/ib@mlx5_1")
    for nic in (nics[0], nics[2], nics[3]):
        nic.remove()
    gone = await node.settle(20)
    assert gone["ib.driver_gone"].severity is WARNING
    assert all(f.severity is not FATAL for f in gone.values())


async def test_temperature_at_the_firmwares_limit(node: Node) -> None:
    """A module at its limit is hot after three looks and cool again five degrees below; without a limit nothing is said."""
    nic = rails(node)[0]
    nic.temperature("asic", 95.0)
    nic.temperature("Module0", 71.0, 70.0, sensor=2)
    assert "ib.hot" not in await node.look()
    assert "Module0" in (await node.settle(3))["ib.hot"].evidence[0]
    nic.temperature("Module0", 67.0, 70.0, sensor=2)
    assert "ib.hot" in await node.look()
    nic.temperature("Module0", 64.0, 70.0, sensor=2)
    assert await node.look() == {}


async def test_an_adapter_that_hangs_costs_only_itself(tmp_path: Path) -> None:
    """A read that does not come back is said about its adapter; the others are read, and no second thread is started."""
    node = Node(tmp_path)
    node.probe._deadline_s = 0.05
    nics = rails(node, 2)
    stuck = nics[1].path / "fw_ver"
    stuck.unlink()
    os.mkfifo(stuck)  # opening it waits for a writer, as a command to dead firmware waits for its answer
    for _ in range(3):
        reading = await node.probe.read()
        assert "ports" in reading.data["devices"][0]
        assert set(reading.data["devices"][1]) == {"name", "hung_s"}
    assert sum(t.name == "infiniband look" for t in threading.enumerate()) == 1
    reading.data["devices"][1]["hung_s"] = 75.0
    assert [f.check for f in node.probe.assess(reading, {}, {}) if f.present] == ["ib.hung"]
    assert "no answer for 75 s" in node.probe.describe(reading)[1]
    stuck.write_text("28.43.2566\n")


async def test_a_reboot_forgets(node: Node) -> None:
    """On another boot counters and states begin anew."""
    nic = rails(node)[0]
    nic.counter("link_downed", 2)
    await node.settle()
    (node.tree.proc / "sys/kernel/random/boot_id").write_text("another\n")
    nic.counter("link_downed", 5)
    assert await node.settle() == {}


def test_options_and_expectations_are_checked(tmp_path: Path) -> None:
    """A wrong option or expectation is one sentence that names it."""
    with pytest.raises(ProbeError, match="unknown option 'ignored'"):
        InfinibandProbe(Context(node="t01", options={"ignored": []}))
    with pytest.raises(ProbeError, match="ignore: wanted a list"):
        InfinibandProbe(Context(node="t01", options={"ignore": "mlx5_0"}))
    for key, value in (("ib_ports", "four"), ("ib_gbps", 0), ("ib_devices", "mlx5_0")):
        node = Node(tmp_path / key)
        with pytest.raises(ProbeError, match=f"expected.{key}"):
            node.probe.assess(Reading(probe="infiniband", node="t01", at=0.0), {}, {key: value})


def test_what_is_fatal_here_drains_on_a_budget() -> None:
    """Every fatal finding about a rail or an adapter meets the rule nic-fatal: a drain that spends budget, and a page."""
    for check in ("ib.port_down", "ib.link_flapping", "ib.link_integrity", "ib.device_lost", "pcie.gone", "nic.health_lost"):
        finding = Finding(
            id="x", check=check, component=Component(node="t01", device="ib@mlx5_0"), at=0.0, severity=FATAL, action=Action.INSPECT,
        )
        rule = default_policy().rule_for(finding)
        assert rule is not None
        assert (rule.fault, rule.response, rule.budgeted, bool(rule.page)) == ("nic-fatal", Response.DRAIN, True, True), check


def test_rates() -> None:
    """A rate is the number at the text's beginning, or not measured."""
    assert [rate_gbps(t) for t in ("400 Gb/sec (4X NDR)", "2.5 Gb/sec (1X SDR)", "", None, "NDR", "-1 Gb/sec", "nan Gb/sec")] == [
        400.0, 2.5, None, None, None, None, None,
    ]

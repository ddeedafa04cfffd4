"""Pasted output of InfiniBand tools and mlx5 lines: the same judgement as a live port gets."""

from __future__ import annotations

import textwrap

import pytest

from probes.decode import Decoded, decode_text
from probes.nic_text import parse
from sentinel.model import Action, Finding, Severity, Suspect

FATAL, WARNING, INFO = Severity.FATAL, Severity.WARNING, Severity.INFO


def ca(name: str, *, state: str = "Active", phys: str = "LinkUp", rate: str = "400", sm: int = 3, kind: str = "MT4129",
       layer: str = "InfiniBand") -> str:
    return textwrap.dedent(f"""\
        CA '{name}'
        \tCA type: {kind}
        \tNumber of ports: 1
        \tFirmware version: 28.43.2566
        \tHardware version: 0
        \tNode GUID: 0x0011223344556677
        \tPort 1:
        \t\tState: {state}
        \t\tPhysical state: {phys}
        \t\tRate: {rate}
        \t\tBase lid: 41
        \t\tLMC: 0
        \t\tSM lid: {sm}
        \t\tCapability mask: 0xa651e848
        \t\tLink layer: {layer}
        """)


def found(text: str) -> dict[str, Finding]:
    return {f.check: f for f in decode_text(text).findings}


def told(decoded: Decoded) -> tuple[Severity, Action]:
    return decoded.verdict.severity, decoded.verdict.action


IBSTAT = [
    (ca("mlx5_0"), None, None, None),
    (ca("mlx5_0", state="Initializing", sm=0), "ib.port_not_set_up", WARNING, Suspect.SWITCH),
    (ca("mlx5_0", state="Armed"), "ib.port_not_set_up", WARNING, Suspect.SWITCH),
    (ca("mlx5_0", state="Down", phys="Polling", rate="10"), "ib.port_down", WARNING, Suspect.SELF),
    (ca("ibp3s0", state="Down", phys="PortConfigurationTraining"), "ib.port_down", WARNING, Suspect.SELF),
    (ca("mlx5_0", state="Down", phys="LinkErrorRecovery"), "ib.port_down", WARNING, Suspect.SELF),
    (ca("mlx5_0", state="Down", phys="Disabled"), "ib.port_disabled", INFO, Suspect.SELF),
    (ca("mlx5_0", state="Down", phys="Disabled", layer="Ethernet"), "ib.port_disabled", INFO, Suspect.SELF),
    (ca("mlx5_0", state="Down", phys="Polling", kind="MT41692"), None, None, None),
    ("".join(ca(f"mlx5_{i}") for i in range(3)) + ca("mlx5_3", rate="200"), "ib.rate_low", WARNING, Suspect.SELF),
]


@pytest.mark.parametrize(("text", "check", "severity", "suspect"), IBSTAT)
@pytest.mark.parametrize("form", ["plain", "CRLF", "pdsh"])
def test_ibstat(text: str, check: str | None, severity: Severity | None, suspect: Suspect | None, form: str) -> None:
    """A port of ibstat is judged by its state, physical state, SM and rate; a paste is never fatal."""
    if form == "CRLF":
        text = text.replace("\n", "\r\n")
    if form == "pdsh":
        text = "".join(f"t07: {line}\n" for line in text.splitlines())
    checks = found(text)
    assert list(checks) == ([check] if check else [])
    if check:
        assert (checks[check].severity, checks[check].suspect) == (severity, suspect)
        assert checks[check].component.node == ("t07" if form == "pdsh" else "pasted")


def test_ibstatus_reads_as_ibstat() -> None:
    """ibstatus yields the reading that sysfs would."""
    text = textwrap.dedent("""\
        Infiniband device 'mlx5_4' port 1 status:
        \tdefault gid:\t fe80:0000:0000:0000:0011:2233:4455:6677
        \tbase lid:\t 0x29
        \tsm lid:\t\t 0x3
        \tstate:\t\t 4: ACTIVE
        \tphys state:\t 5: LinkUp
        \trate:\t\t 400 Gb/sec (4X NDR)
        \tlink_layer:\t InfiniBand

        Infiniband device 'mlx5_5' port 1 status:
        \tbase lid:\t 0x0
        \tsm lid:\t\t 0x0
        \tstate:\t\t 2: INIT
        \tphys state:\t 5: LinkUp
        \trate:\t\t 400 Gb/sec (4X NDR)
        \tlink_layer:\t InfiniBand
        """)
    (reading,) = parse(text, "t01")
    first, second = (d["ports"][0] for d in reading.data["devices"])
    assert (first["state"], first["phys"], first["rate_gbps"], first["lid"], first["sm_lid"]) == (4, 5, 400.0, 41, 3)
    assert (second["state"], second["sm_lid"]) == (2, 0)
    assert [str(f.component) for f in decode_text(text).findings] == ["pasted/ib@mlx5_5/port1"]


def test_ibv_devinfo_and_rdma_link() -> None:
    """ibv_devinfo and rdma link are read the same way."""
    text = textwrap.dedent("""\
        hca_id:\tmlx5_2
        \ttransport:\t\t\tInfiniBand (0)
        \tfw_ver:\t\t\t\t28.43.2566
        \tvendor_part_id:\t\t\t4129
        \tboard_id:\t\t\tMT_0000000838
        \tphys_port_cnt:\t\t\t1
        \t\tport:\t1
        \t\t\tstate:\t\t\tPORT_INIT (2)
        \t\t\tsm_lid:\t\t\t0
        \t\t\tport_lid:\t\t65535
        \t\t\tlink_layer:\t\tInfiniBand
        link mlx5_6/1 subnet_prefix fe80:0000:0000:0000 lid 65535 sm_lid 0 lmc 0 state DOWN physical_state POLLING
        link mlx5_7/1 state ACTIVE physical_state LINK_UP netdev eth3
        """)
    assert {(f.check, str(f.component)) for f in decode_text(text).findings} == {
        ("ib.port_not_set_up", "pasted/ib@mlx5_2/port1"), ("ib.port_down", "pasted/ib@mlx5_6/port1"),
    }


def test_ibdev2netdev_speaks_of_the_interface() -> None:
    """(Down) behind an interface is about IPoIB, not about the port; with -v the port's own word counts."""
    plain = decode_text("mlx5_3 port 1 ==> ibp60s0 (Down)\nmlx5_1 port 1 ==> enp27s0f0np0 (Up)\n")
    assert told(plain) == (INFO, Action.NONE)
    assert [f.check for f in plain.findings] == ["ib.interface_down"]
    card = "0000:9a:00.0 mlx5_4 (MT4129 - MCX75310AAS-NEAT) ConnectX-7 adapter fw 28.43.2566 port 1 (DOWN  ) ==> ib4 (Down)"
    assert [f.check for f in decode_text(card).findings] == ["ib.port_down"]
    assert decode_text(card.replace("DOWN  ", "ACTIVE")).findings == ()


def perf(lid: int = 7, **counters: int) -> str:
    values = {"SymbolErrorCounter": 0, "LinkErrorRecoveryCounter": 0, "LinkDownedCounter": 0, "PortRcvErrors": 0,
              "LocalLinkIntegrityErrors": 0, "ExcessiveBufferOverrunErrors": 0, "PortXmitWait": 0, **counters}
    lines = [f"{name + ':':.<33}{value}" for name, value in values.items()]
    return "\n".join((f"# Port counters: Lid {lid} port 1 (CapMask: 0x5300)", "PortSelect:......................1", *lines, ""))


def test_perfquery_counts_only_between_two_looks() -> None:
    """One look's absolute counters say nothing, however large congestion is; the same port twice has a rise."""
    assert decode_text(perf(PortXmitWait=4_000_000_000, LinkDownedCounter=3, SymbolErrorCounter=1200)).findings == ()
    twice = found(perf(LinkDownedCounter=1) + perf(LinkDownedCounter=2, SymbolErrorCounter=400, LocalLinkIntegrityErrors=1))
    assert set(twice) == {"ib.link_flapping", "ib.symbol_errors", "ib.link_integrity"}
    assert all(f.severity is WARNING for f in twice.values())
    assert decode_text(perf(7) + perf(8)).findings == ()


def test_perfquery_at_the_end_of_a_counter() -> None:
    """A counter that stands at its largest value is said at once; congestion's is not."""
    assert found(perf(LinkDownedCounter=255))["ib.counter_saturated"].facts["counters"] == ["link_downed"]
    assert decode_text(perf(PortXmitWait=0xFFFFFFFF)).findings == ()


def mlxlink(state: str, phys: str, opcode: int, says: str, *, speed: str = "IB-NDR", ber: str = "15E-255", hot: int = 52) -> str:
    return textwrap.dedent(f"""\
        $ mlxlink -d 0000:9a:00.0 -m -c
        Operational Info
        ----------------
        State                              : {state}
        Physical state                     : {phys}
        Speed                              : {speed}
        Width                              : 4x
        FEC                                : Standard_RS-FEC - (544,514)

        Troubleshooting Info
        --------------------
        Status Opcode                      : {opcode}
        Group Opcode                       : N/A
        Recommendation                     : {says}

        Module Info
        -----------
        Temperature [C]                    : {hot} [-5..75]

        Physical Counters and BER Info
        ------------------------------
        Raw Physical BER                   : 4E-9
        Effective Physical BER             : {ber}
        Symbol BER                         : 15E-255
        """)


MLXLINK = [
    (mlxlink("Active", "LinkUp", 0, "No issue was observed"), {}),
    (mlxlink("Polling", "Polling", 1024, "Cable is unplugged", speed="N/A"), {"ib.port_down": WARNING}),
    (mlxlink("Close port", "Disabled", 1, "The port is closed by command", speed="N/A"), {"ib.port_disabled": INFO}),
    (mlxlink("Active", "LinkUp", 0, "No issue was observed", ber="3E-10"), {"ib.bit_errors": WARNING}),
    (mlxlink("Active", "LinkUp", 0, "No issue was observed", hot=76), {"ib.hot": WARNING}),
]


@pytest.mark.parametrize(("text", "checks"), MLXLINK)
def test_mlxlink(text: str, checks: dict[str, Severity]) -> None:
    """mlxlink's state, reason, error rate after correction and module temperature are judged; raw errors are normal."""
    assert {c: f.severity for c, f in found(text).items()} == checks
    if "ib.port_down" in checks:
        assert "Cable is unplugged" in found(text)["ib.port_down"].summary


def link(*words: str, start: float = 100.0, step: float = 60.0, dev: str = "mlx5_2") -> str:
    return "".join(
        f"[{start + i * step:12.6f}] mlx5_core 0000:5d:00.0 {dev}: Port: 1 Link {word}\n" for i, word in enumerate(words)
    )


@pytest.mark.parametrize(("text", "checks"), [
    (link("INIT", "ACTIVE"), {}),
    (link("DOWN", "INIT", "ACTIVE"), {}),
    (link("INIT", "ACTIVE", "DOWN", "INIT", "ACTIVE"), {"ib.link_flapping": WARNING}),
    (link("ACTIVE", *["DOWN", "INIT", "ACTIVE"] * 4), {"ib.link_flapping": FATAL}),
    (link("ACTIVE", *["DOWN", "INIT", "ACTIVE"] * 4, step=1300.0), {"ib.link_flapping": WARNING}),
    (link("INIT", "ACTIVE", "DOWN"), {"ib.link_flapping": WARNING, "ib.port_down": WARNING}),
    (link("DOWN", dev="mlx5_9"), {}),
    ("[5.1] mlx5_core 0000:41:00.0 eth2: Link down\n[9.1] mlx5_core 0000:41:00.0 eth2: Link up\n", {}),
])
def test_link_lines_are_a_ports_history(text: str, checks: dict[str, Severity]) -> None:
    """One way up at boot is no flap; a link that was active and went down is one; four in three hours are fatal."""
    assert {c: f.severity for c, f in found(text).items()} == checks


KERNEL = [
    ("mlx5_core 0000:5d:00.0: poll_health:1151:(pid 0): PCI slot is unavailable", "nic.off_bus", FATAL),
    ("mlx5_core 0000:5d:00.0: mlx5_health_try_recover:381:(pid 9): health recovery flow aborted, PCI reads still not working",
     "nic.off_bus", FATAL),
    ("mlx5_core 0000:5d:00.0: poll_health:871:(pid 0): device's health compromised - reached miss count", "nic.health_lost", FATAL),
    ("mlx5_core 0000:5d:00.0: print_health_info:431:(pid 0): Health issue observed, firmware internal error, severity(3) ERROR:",
     "nic.firmware_error", WARNING),
    ("mlx5_core 0000:5d:00.0: print_health_info:431:(pid 0): Health issue observed, High temperature, severity(4) WARNING:",
     "nic.overheated", WARNING),
    ("mlx5_core 0000:5d:00.0: print_health_info:520:(pid 0): synd 0x10: High temperature", "nic.overheated", WARNING),
    ("mlx5_core 0000:5d:00.0: print_health_info:520:(pid 0): synd 0x1: firmware internal error", "nic.firmware_error", WARNING),
    ("mlx5_core 0000:5d:00.0: temp_warn:171:(pid 0): High temperature on sensors with bit set 0 1", "nic.overheated", WARNING),
    ("mlx5_core 0000:5d:00.0: Port module event[error]: module 1, Cable error, Bad or shorted cable/module",
     "nic.module_error", WARNING),
    ("mlx5_core 0000:5d:00.0: Port module event[error]: module 1, Cable error, High Temperature", "nic.overheated", WARNING),
    ("mlx5_core 0000:5d:00.0: Port module event: module 1, Cable unplugged", "ib.cage_empty", INFO),
    ("mlx5_core 0000:5d:00.0: mlx5_pcie_event:299:(pid 4): Detected insufficient power on the PCIe slot (27W).",
     "nic.power_low", WARNING),
    ("mlx5_core 0000:5d:00.0 ens2f0np0: NETDEV WATCHDOG: CPU: 9: transmit queue 3 timed out 5120 ms", "nic.tx_timeout", WARNING),
    ("mlx5_core 0000:5d:00.0 ens2f0np0: TX timeout detected", "nic.tx_timeout", WARNING),
    ("mlx5_core 0000:5d:00.0: AER: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Receiver ID)",
     "nic.pcie_error", WARNING),
    ("mlx5_core 0000:5d:00.0: mlx5_cmd_out_err:838:(pid 14): ACCESS_REG(0x805) op_mod(0x1) failed, status bad operation(0x2)",
     "ib.restricted", INFO),
]


@pytest.mark.parametrize(("line", "check", "severity"), KERNEL)
def test_mlx5_lines(line: str, check: str, severity: Severity) -> None:
    """Each kind of mlx5 line is named; quoted by another program it is not judged."""
    prefixed = f"Mar  3 10:00:01 t07 kernel: [  51.250000] {line}"
    checks = found(prefixed)
    assert {c: f.severity for c, f in checks.items()} == {check: severity}
    quote = f'Mar  3 10:00:02 t07 watcher[77]: {{"event": "nic", "message": "{line}"}}'
    assert found(quote) == {}


def test_health_lines_without_their_driver() -> None:
    """Health lines that lost mlx5_core are still known by the function that printed them; within a sentence they are not."""
    text = "10:02:11  Health issue observed, irisc not responding, severity(3) ERROR\n" \
        "10:02:20 poll_health:871:(pid 0): device's health compromised - reached miss count\n"
    decoded = decode_text(text)
    assert (decoded.verdict.severity, decoded.verdict.drain, decoded.verdict.incidents) == (FATAL, "node", 1)
    assert found("We grep for poll_health: device's health compromised - reached miss count\n") == {}


def test_quoted_blocks_are_not_judged() -> None:
    """A tool's output inside another program's line is that program's business."""
    for text in ("INFO: CA 'mlx5_0'\nINFO: Port 1:\nINFO: State: Down\nINFO: Physical state: Polling\n",
                 '{"ibstat": "CA \'mlx5_0\'\\n Port 1:\\n State: Down\\n Physical state: Polling"}\n'):
        assert decode_text(text).findings == ()

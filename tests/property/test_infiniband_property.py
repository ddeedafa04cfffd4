"""Whatever is pasted or read about network adapters: no crash, no false fault, bounded work."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from probes.counters import GRAINS, note, rise
from probes.infiniband import assess
from probes.nic_text import judge, parse
from sentinel.model import Reading, Severity

PIECES = st.sampled_from([
    "CA 'mlx5_0'\n", "\tPort 1:\n", "\t\tState: Down\n", "State: ", "Physical state: Polling\n", "Rate: 400\n", "SM lid: 0\n",
    "Infiniband device 'a' port 1 status:\n", "state: 4: ACTIVE\n", "rate: x Gb/sec\n", "hca_id: mlx5_1\n", "port: 1\n",
    "# Port counters: Lid 7 port 1\n", "SymbolErrorCounter:..............65535\n", "LinkDownedCounter:...", "Operational Info\n",
    "Status Opcode : 99999999999999999999\n", "Temperature [C] : 1 [2..3]\n",
    "Effective Physical BER : nan\n", "Symbol BER : 1E+400\n",
    "link mlx5_0/1 state DOWN physical_state POLLING\n", "mlx5_0 port 1 ==> ib0 (Down)\n", "t01: ", "t02: ", "\r\n", "\x00",
    "[1.5] mlx5_core 0000:5d:00.0 mlx5_2: Port: 1 Link DOWN\n", "mlx5_core 0000:5d:00.0 mlx5_2: Port: 1 Link ACTIVE\n",
    "mlx5_core 0: ACCESS_REG(0x805) failed\n", "poll_health: device's health compromised - reached miss count\n",
    "Health issue observed, ", "mlxlink -d /dev/mst/x -c\n", "٣", "²", ":",
])  # fmt: skip
TEXT = st.lists(st.one_of(PIECES, st.text(max_size=20)), max_size=40).map("".join)
VALUE = st.one_of(st.none(), st.integers(0, 1 << 64), st.sampled_from([15, 255, 65535]))
PORT = st.fixed_dictionaries({"port": st.integers(1, 2)}, optional={
    "state": st.one_of(st.none(), st.integers(0, 9)), "phys": st.one_of(st.none(), st.integers(0, 9)),
    "rate_gbps": st.one_of(st.none(), st.floats(0.1, 1e5)), "layer": st.sampled_from(["InfiniBand", "Ethernet", None]),
    "sm_lid": VALUE, "counters": st.dictionaries(st.sampled_from(["link_downed", "symbol_error", "port_xmit_wait"]), VALUE),
})
DEVICE = st.fixed_dictionaries({"name": st.sampled_from(["mlx5_0", "mlx5_1"]), "ports": st.lists(PORT, max_size=2)})


@given(TEXT)
@settings(max_examples=300, deadline=None)
def test_any_text_is_read(text: str) -> None:
    """No text raises, and every finding has a component and a sentence."""
    memory: dict[str, object] = {}
    for reading in parse(text, "t01"):
        for finding in judge(reading, memory):
            assert finding.present
            assert finding.summary
            assert finding.component.node


@given(st.lists(st.lists(DEVICE, max_size=3), max_size=6), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_reading_is_judged(looks: list[list[dict[str, object]]], alone: bool) -> None:
    """No reading raises; a port never seen active is never said to be down; a lone look is never fatal; memory stays small."""
    memory: dict[str, object] = {}
    active: set[object] = set()
    for i, devices in enumerate(looks):
        reading = Reading(probe="infiniband", node="t01", at=i * 40.0, data={"devices": devices, "present": True, "alone": alone})
        active |= {(d["name"], p["port"]) for d in devices for p in d["ports"] if p.get("state") == 4}  # type: ignore[attr-defined]
        for finding in assess(reading, memory):
            if finding.present and finding.check == "ib.port_down" and not alone:
                assert (finding.component.device[3:], int(finding.component.part[4:])) in active
            if finding.present and finding.check == "ib.port_down" and alone:
                assert finding.severity is not Severity.FATAL
    assert len(repr(memory)) < 20_000


@given(st.lists(st.integers(0, 255), max_size=50))
def test_rises_never_fall(values: list[int]) -> None:
    """Whatever a counter does, no rise is negative, and what fell within a window is at most the sum of all rises."""
    memory: dict[str, object] = {}
    total = 0
    for i, value in enumerate(values):
        rose = rise(memory, "c", value)
        assert rose is None or rose >= 0
        total += rose or 0
        assert note(memory, "all", i * 7.0, rose, 1e9)[0] == total
        assert note(memory, "some", i * 7.0, rose, 60.0)[0] <= total
        assert len(memory["some"]) <= GRAINS + 1  # type: ignore[arg-type]

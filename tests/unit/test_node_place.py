"""Where a node says it stands: out of the driver's raw bytes, the kernel's own files, and what was measured before."""

from __future__ import annotations

import asyncio
from ctypes import addressof, memmove
from pathlib import Path
from typing import Any

import pynvml
import pytest

from probes.nvml_platform import decode
from sentinel.agent.place import Whereabouts, addresses, names
from sentinel.model import GpuPlace, Place, Reading
from sentinel.testing.nvml import FakeDriver
from sentinel.testing.nvml_kinds import gb200_tray, h200
from sentinel.testing.nvml_state import FakeState

TRIE = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 10.0.1.0/24 2 0 2
        |-- 10.0.1.0
           /24 link UNICAST
        |-- 10.0.1.3
           /32 host LOCAL
        |-- 10.0.1.255
           /32 link BROADCAST
     +-- 127.0.0.0/8 2 0 2
        |-- 127.0.0.1
           /32 host LOCAL
Local:
        |-- 10.0.1.3
           /32 host LOCAL
        |-- 10.0.0.20
           /32 host LOCAL
"""
INET6 = """fd000000000000000000000000000003 04 40 00 80     eth0
00000000000000000000000000000001 01 80 10 80       lo
fe8000000000000000fc00fffe000001 04 40 20 80     eth0
"""


def proc(root: Path, hostname: str = "tray-03.example.net", trie: str = TRIE) -> Path:
    for name, text in {"sys/kernel/hostname": hostname, "net/fib_trie": trie, "net/if_inet6": INET6}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def looked(state: FakeState) -> Reading:
    """What the gpu probe's read would carry, through the binding's own structs."""
    return Reading(probe="gpu", node="t03", at=0.0, data=asyncio.run(FakeDriver(state).read()))


def rails(*devices: dict[str, Any]) -> Reading:
    return Reading(probe="infiniband", node="t03", at=0.0, data={"devices": list(devices)})


def told(state: FakeState, root: Path) -> Place:
    where = Whereabouts(root)
    where.take(looked(state))
    place = where.place()
    assert place is not None
    return place


class TestPlatform:
    """The binding's struct of chars."""

    def struct(self, raw: bytes) -> Any:
        info = pynvml.c_nvmlPlatformInfo_v2_t()
        memmove(addressof(info) + 4, raw, len(raw))
        return info

    def test_numbers_are_numbers_and_a_serial_number_is_text(self) -> None:
        """Slot 21, tray 11, host 1, module 1, as they lie in memory; by attribute the binding gives one-character strings."""
        info = self.struct(bytes(16) + b"1820325000001".ljust(16, b"\0") + bytes((0x15, 0x0B, 1, 1, 1)))
        assert info.slotNumber == "\x15"  # the trap
        assert decode(bytes(info)) == {"chassis": "1820325000001", "slot": 21, "tray": 11, "host": 1, "module": 1}

    def test_a_zero_is_a_zero(self) -> None:
        """Tray 0 is a tray; by attribute it is a string, and true."""
        info = self.struct(bytes(16) + b"S1".ljust(16, b"\0") + bytes(5))
        assert info.trayIndex == "\0"
        assert decode(bytes(info))["tray"] == 0

    def test_a_guid_is_kept_whole(self) -> None:
        """Version 1 has the rack's GUID there: raw bytes with a NUL in them are given in hex, every one of them."""
        guid = bytes.fromhex("4b00ffee00000000000000000000aa01")
        assert decode(bytes(self.struct(bytes(16) + guid + bytes(5))))["chassis"] == guid.hex()

    def test_an_older_driver_is_asked_by_version_1(self) -> None:
        """A driver that does not know version 2 still says where its GPU is."""
        state = gb200_tray()
        for gpu in state.gpus:
            gpu.platform_versions = (1,)
        assert looked(state).data["gpus"][2]["platform"]["module"] == 3

    def test_not_supported_is_not_measured(self) -> None:
        """An H200 behind a hypervisor says nothing, and nothing is made of it."""
        data = looked(FakeState(gpus=[h200()])).data["gpus"][0]
        assert data["platform"] is None
        assert "nvmlDeviceGetPlatformInfo" not in data["unread"]


class TestPlace:
    def test_a_healthy_tray_says_all(self, tmp_path: Path) -> None:
        """Chassis, slot, tray, domain, clique, GPUs with their positions, rails, names and addresses."""
        where = Whereabouts(proc(tmp_path))
        where.take(looked(gb200_tray()))
        rail = {"ports": [{}]}
        where.take(rails({"name": "mlx5_1"} | rail, {"name": "mlx5_0"} | rail, {"name": "mlx5_9", "virtual": True} | rail))
        place = where.place()
        assert place is not None
        assert (place.chassis, place.slot, place.tray, place.host) == ("1820325000001", 11, 1, 1)
        assert (place.domain, place.clique) == ("5e" * 16, 1)
        assert [(g.pci, g.module) for g in place.gpus] == [
            ("0008:01:00.0", 1), ("0009:01:00.0", 2), ("0018:01:00.0", 3), ("0019:01:00.0", 4)
        ]  # fmt: skip
        assert place.gpus[0].uuid == "GPU-00000000-0000-4000-8000-000000000001"
        assert place.ports == ("mlx5_0", "mlx5_1")
        assert place.addresses == ("tray-03.example.net", "tray-03", "10.0.0.20", "10.0.1.3", "fd00::3")

    def test_a_lost_gpu_does_not_move_the_node(self, tmp_path: Path) -> None:
        """GPUs that are lost, cannot be looked up, or hang keep the identity that they had; so does the whole node."""
        state, where = gb200_tray(), Whereabouts(proc(tmp_path))
        where.take(looked(state))
        before = where.place()
        state.gpus[0].gone, state.gpus[1].no_handle, state.gpus[2].hang = 15, 15, ("*",)
        where.take(looked(state))
        where.take(Reading(probe="gpu", node="t03", at=1.0, data={"error": {"code": 18, "text": ""}, "gpus": []}))
        where.take(Reading(probe="gpu", node="t03", at=2.0, data={"hung_s": 3.0}))
        assert where.place() == before

    def test_a_fabric_that_joins_anew_does_not_leave_its_domain(self, tmp_path: Path) -> None:
        """After a reset the GPU's fabric is in progress and its UUID zeros: the domain stays what it was."""
        state, where = gb200_tray(), Whereabouts(proc(tmp_path))
        where.take(looked(state))
        for gpu in state.gpus:
            gpu.set(fabric_state=2, fabric_cluster="00" * 16, fabric_clique=0)
        where.take(looked(state))
        place = where.place()
        assert place is not None
        assert (place.domain, place.clique) == ("5e" * 16, 1)

    @pytest.mark.parametrize(("state", "cluster"), [(3, "00" * 16), (2, "5e" * 16), (0, "5e" * 16)])
    def test_not_registered_is_no_domain(self, tmp_path: Path, state: int, cluster: str) -> None:
        """Zeros, or a fabric that is not complete, name no domain."""
        tray = gb200_tray()
        for gpu in tray.gpus:
            gpu.set(fabric_state=state, fabric_cluster=cluster)
        place = told(tray, proc(tmp_path))
        assert (place.domain, place.clique) == ("", None)

    def test_one_gpu_elsewhere_is_named(self, tmp_path: Path) -> None:
        """What most GPUs say is the node's domain; the one that says otherwise carries its own."""
        tray = gb200_tray()
        tray.gpus[0].set(fabric_cluster="77" * 16)
        place = told(tray, proc(tmp_path))
        assert place.domain == "5e" * 16
        assert [g.domain for g in place.gpus] == ["77" * 16 + ".1", "", "", ""]

    def test_without_a_chassis_its_numbers_mean_nothing(self, tmp_path: Path) -> None:
        """A platform that fills the struct with zeros has not said tray 0."""
        tray = gb200_tray()
        for gpu in tray.gpus:
            gpu.set(platform={"chassis": ""})
        place = told(tray, proc(tmp_path))
        assert (place.chassis, place.slot, place.tray) == ("", None, None)

    def test_another_gpu_at_the_same_address_is_seen(self, tmp_path: Path) -> None:
        """A GPU that was replaced changes the place."""
        state, where = gb200_tray(), Whereabouts(proc(tmp_path))
        where.take(looked(state))
        state.gpus[3].set(uuid="GPU-new")
        where.take(looked(state))
        place = where.place()
        assert place is not None
        assert place.gpus[3] == GpuPlace(pci="0019:01:00.0", uuid="GPU-new", module=4)

    def test_nothing_measured_is_no_place(self, tmp_path: Path) -> None:
        """No driver, no adapter, no procfs: None, and no empty claims."""
        assert Whereabouts(tmp_path / "nowhere").place() is None


class TestAddresses:
    def test_loopback_and_link_local_name_nobody(self, tmp_path: Path) -> None:
        """Only addresses by which another host could know this one, each once."""
        assert addresses(proc(tmp_path)) == ["10.0.0.20", "10.0.1.3", "fd00::3"]

    @pytest.mark.parametrize("text", ["", "garbage\n", "  |-- 300.1.2.3\n     /32 host LOCAL\n", "/32 host LOCAL\n"])
    def test_what_is_no_trie_is_no_address(self, tmp_path: Path, text: str) -> None:
        """A file in another form costs its addresses and nothing else."""
        assert addresses(proc(tmp_path, trie=text)) == ["fd00::3"]

    @pytest.mark.parametrize("name", ["localhost", "(none)", "", "localhost.localdomain"])
    def test_a_name_that_every_host_has_is_none(self, tmp_path: Path, name: str) -> None:
        """No host is known by the name localhost."""
        assert list(names(proc(tmp_path, hostname=name))) == []

    def test_they_are_looked_at_seldom(self, tmp_path: Path) -> None:
        """An address that is added shows within a minute or so, not at the price of a file read per report."""
        now = [0.0]
        where = Whereabouts(proc(tmp_path), clock=lambda: now[0])
        before = where.place()
        proc(tmp_path, trie=TRIE.replace("10.0.0.20", "10.0.0.21"))
        now[0] = 30.0
        assert where.place() is before
        now[0] = 61.0
        place = where.place()
        assert place is not None
        assert "10.0.0.21" in place.addresses

"""Trees that look like /sys and /proc: PCI devices, InfiniBand ports, their interfaces and sensors, changed while somebody reads.

This module exists so that every state of an adapter can be tried without one, by our tests and by a site's own probes. What
always holds: files have the names, the links and the spelling that Linux gives them; a file that refuses to be read is a
folder (reading it raises OSError, as ``EINVAL`` does); nothing outside the given root is touched. It is a simulation.

    sys = SysTree(tmp_path)
    nic = sys.infiniband("mlx5_0", pci="0000:03:00.0", rate="400 Gb/sec (4X NDR)")
    nic.port(1, state="1: DOWN", phys_state="2: Polling")
    nic.counter("link_downed", 3)
    probe = InfinibandProbe(Context(node="t01", sys=sys.sys, proc=sys.proc))
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

COUNTERS = (
    "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors", "port_xmit_discards", "port_xmit_constraint_errors", "port_rcv_constraint_errors",
    "local_link_integrity_errors", "excessive_buffer_overrun_errors", "VL15_dropped", "port_xmit_data", "port_rcv_data",
    "port_xmit_packets", "port_rcv_packets", "port_xmit_wait",
)
HW_COUNTERS = (
    "out_of_buffer", "packet_seq_err", "rnr_nak_retry_err", "local_ack_timeout_err", "roce_slow_restart", "np_cnp_sent",
)
REFUSED = object()  # a file that exists and cannot be read


class SysTree:
    """A root with ``sys`` and ``proc`` below it."""

    def __init__(self, root: Path, boot_id: str = "11111111-2222-3333-4444-555555555555") -> None:
        self.root, self.sys, self.proc = root, root / "sys", root / "proc"
        write(self.proc / "sys/kernel/random/boot_id", boot_id)
        self.default_route("eno1")

    def default_route(self, *interfaces: str) -> None:
        """/proc/net/route with these as the ways out."""
        head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"
        ways = [f"{name}\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0" for name in interfaces]
        local = "eno1\t0000000A\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0"
        write(self.proc / "net/route", "\n".join((head, *ways, local)))

    def pci(self, address: str, *, below: str | None = None, **files: Any) -> PciDevice:
        """A PCI device (default: a GPU); ``below``: address of the port it is plugged into. Files by name replace defaults."""
        device = PciDevice(self, address, below)
        device.set(**{**GPU_FILES, **files})
        return device

    def nic(self, address: str, *, below: str | None = None, **files: Any) -> PciDevice:
        """An adapter on PCI that has no InfiniBand device (yet)."""
        return self.pci(address, below=below, **{**NIC_FILES, **files})

    def infiniband(self, name: str, pci: str, *, ports: int = 1, hca: str = "MT4129", **port: str) -> InfinibandDevice:
        """An adapter with active ports. ``port``: files of each port that differ (state, phys_state, rate, link_layer, …)."""
        return InfinibandDevice(self, name, self.nic(pci), ports=ports, hca=hca, files=port)


GPU_FILES = {
    "vendor": "0x10de", "device": "0x2941", "class": "0x030200", "current_link_width": "16", "max_link_width": "16",
    "current_link_speed": "32.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe", "power_state": "D0",
}
NIC_FILES = {**GPU_FILES, "vendor": "0x15b3", "device": "0x1021", "class": "0x020700"}


class PciDevice:
    def __init__(self, tree: SysTree, address: str, below: str | None) -> None:
        self.tree, self.address = tree, address
        devices = tree.sys / "bus/pci/devices"
        top = tree.sys / f"devices/pci{address[:7]}"
        self.path = ((devices / below).resolve() if below else top) / address
        self.path.mkdir(parents=True, exist_ok=True)
        devices.mkdir(parents=True, exist_ok=True)
        (devices / address).symlink_to(self.path)
        self.off_bus(False)
        self.aer()

    def set(self, **files: Any) -> None:
        """Files by name; None removes one, REFUSED makes it unreadable."""
        for name, value in files.items():
            write(self.path / name, value)

    def off_bus(self, gone: bool = True) -> None:
        """The configuration space: all ones once the device has left the bus."""
        (self.path / "config").write_bytes(b"\xff" * 256 if gone else b"\xde\x10\x41\x29" + bytes(252))

    def aer(self, correctable: dict[str, int] | None = None, nonfatal: int = 0, fatal: int = 0) -> None:
        """``aer_dev_*``; ``correctable`` by kind, such as ``{"RxErr": 3, "BadTLP": 1}``."""
        kinds = {"RxErr": 0, "BadTLP": 0, "BadDLLP": 0, "Rollover": 0, "Timeout": 0, "NonFatalErr": 0, **(correctable or {})}
        lines = [f"{kind} {count}" for kind, count in kinds.items()]
        write(self.path / "aer_dev_correctable", "\n".join((*lines, f"TOTAL_ERR_COR {sum(kinds.values())}")))
        write(self.path / "aer_dev_nonfatal", f"Undefined 0\nCmpltTO {nonfatal}\nUnsupReq 0\nTOTAL_ERR_NONFATAL {nonfatal}")
        write(self.path / "aer_dev_fatal", f"Undefined 0\nDLP {fatal}\nTOTAL_ERR_FATAL {fatal}")

    def virtual(self) -> None:
        """Make it a virtual function."""
        (self.path / "physfn").symlink_to(self.path.parent)

    def remove(self) -> None:
        (self.tree.sys / "bus/pci/devices" / self.address).unlink()
        shutil.rmtree(self.path)


class InfinibandDevice:
    def __init__(self, tree: SysTree, name: str, pci: PciDevice, *, ports: int, hca: str, files: dict[str, str]) -> None:
        self.name, self.pci = name, pci
        self.path = pci.path / "infiniband" / name
        self.path.mkdir(parents=True)
        self._link = tree.sys / "class/infiniband" / name
        self._link.parent.mkdir(parents=True, exist_ok=True)
        self._link.symlink_to(self.path)
        (self.path / "device").symlink_to(pci.path)
        about = {"fw_ver": "28.43.2566", "board_id": "MT_0000000838", "hca_type": hca, "node_guid": "0011:22ff:fe33:4455"}
        for file, value in about.items():
            write(self.path / file, value)
        for n in range(1, ports + 1):
            self.port(n, **{
                "state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand",
                "lid": "0x1a", "sm_lid": "0x1", **files,
            })  # fmt: skip
            for counter in COUNTERS:
                self.counter(counter, 0, n)
            for counter in HW_COUNTERS:
                self.hw(counter, 0, n)

    def port(self, n: int = 1, **files: Any) -> None:
        """Files of a port, as they are spelt in sysfs."""
        for name, value in files.items():
            write(self.path / f"ports/{n}" / name, value)

    def counter(self, name: str, value: Any, n: int = 1) -> None:
        """A counter of the port; REFUSED: it cannot be read."""
        write(self.path / f"ports/{n}/counters" / name, value)

    def hw(self, name: str, value: Any, n: int = 1) -> None:
        write(self.path / f"ports/{n}/hw_counters" / name, value)

    def restrict(self) -> None:
        """Firmware refuses this function its counters."""
        for folder in (*self.path.glob("ports/*/counters"), *self.path.glob("ports/*/hw_counters")):
            for file in folder.iterdir():
                write(file, REFUSED)

    def netdev(self, name: str, *, up: bool = True, carrier: bool = True, downs: int = 0) -> None:
        """Its network interface."""
        net = self.pci.path / "net" / name
        write(net / "flags", "0x1003" if up else "0x1002")
        write(net / "carrier", str(int(carrier)) if up else REFUSED)
        write(net / "carrier_down_count", str(downs))

    def temperature(self, label: str, celsius: float, most: float | None = None, sensor: int = 1) -> None:
        """A sensor of mlx5's hwmon (``asic``, ``Module0``)."""
        chip = self.pci.path / "hwmon/hwmon7"
        write(chip / f"temp{sensor}_label", label)
        write(chip / f"temp{sensor}_input", str(int(celsius * 1000)))
        write(chip / f"temp{sensor}_crit", None if most is None else str(int(most * 1000)))

    def remove(self) -> None:
        """The adapter vanishes, as after a hot unplug or when its driver is unloaded."""
        self._link.unlink()


def write(path: Path, value: Any) -> None:
    """A file with this text and a newline; None removes it, REFUSED makes it one that exists and cannot be read."""
    if path.is_dir():
        path.rmdir()
    if value is None:
        path.unlink(missing_ok=True)
    elif value is REFUSED:
        path.unlink(missing_ok=True)
        path.mkdir(parents=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")

"""The PCIe links of GPUs and network adapters: read from sysfs, without any driver's help.

This module exists because a link that trained narrow, or a device that no longer answers, is seen here even while its driver
hangs. What always holds:

* Width counts always, against what both ends of the link can do; speed only where it is not lowered to save power: for adapters,
  never for GPUs, whose load is not known here (the ``gpu`` probe knows it).
* A configuration space that reads all ones is a device that left the bus. For GPUs that is the ``gpu`` probe's word
  (``gpu.lost``, by the same look, ``probes.pci.off_bus``); here it is said of adapters.
* AER counters count between two readings. Corrected errors are normal up to the limit of the link's generation; a fatal one is
  a warning, since what follows (the device gone, an Xid, mlx5's health) says what became of it.
* Virtual functions are not looked at; ``None`` is not measured, and nothing is said about it.

``Reading.data``: ``devices`` [{pci, kind "gpu" | "nic", device, driver, off_bus, width, width_max, speed, speed_max (GT/s),
up_width_max, up_speed_max (of the port above), aer {correctable, nonfatal, fatal}}].
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from probes import Context, ProbeError
from probes.counters import note, rise
from probes.judging import Judge, span
from probes.pci import number_of, off_bus, text_of
from probes.thresholds import limits
from probes.windows import number, table
from sentinel.model import READING_FORMAT, Action, Component, Finding, Reading, Severity, gpu_component, pci_address

# Bits of the link that had to be sent again; the others of aer_dev_correctable are about single requests.
LINK_ERRORS = ("RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout")

NVIDIA, MELLANOX = 0x10DE, 0x15B3
# (vendor, PCI class without its interface): VGA and 3D controllers; Ethernet and InfiniBand controllers.
KINDS = {(NVIDIA, 0x0300): "gpu", (NVIDIA, 0x0302): "gpu", (MELLANOX, 0x0200): "nic", (MELLANOX, 0x0207): "nic"}
OPTIONS = frozenset({"enabled", "interval"})
MOST_DEVICES = 64


class PcieProbe:
    name = "pcie"
    interval_s = 15.0

    def __init__(self, context: Context, *, clock: Callable[[], float] = time.time) -> None:
        unknown = sorted(set(context.options) - OPTIONS)
        if unknown:
            raise ProbeError(f"unknown option {unknown[0]!r}; the pcie probe knows {', '.join(sorted(OPTIONS))}")
        self._context, self._clock = context, clock

    async def read(self) -> Reading:
        """Look once: files of the PCI core only, which never wait for a driver. A missing tree is an empty reading."""
        found = [read_device(path) for path in _paths(self._context.sys / "bus/pci/devices")]
        return Reading(
            probe=self.name, node=self._context.node, at=self._clock(),
            boot_id=text_of(self._context.proc / "sys/kernel/random/boot_id") or "",
            data={"devices": [d for d in found if d is not None][:MOST_DEVICES]},
        )

    def assess(self, reading: Reading, memory: dict[str, Any], expected: Mapping[str, Any]) -> list[Finding]:
        """Judge one reading. ``expected``: ``pcie_width`` (lanes of a GPU), where known, which a narrow slot cannot excuse; under
        ``hints`` the same as what is usual for this kind of node.

        Raises ProbeError for a reading of another format and for an expectation of the wrong kind.
        """
        if reading.format != READING_FORMAT:
            raise ProbeError(f"a pcie reading of format {reading.format}; this sentinel knows format {READING_FORMAT}")
        wanted = expected.get("pcie_width")
        if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 0):
            raise ProbeError(f"expected.pcie_width: wanted a number of lanes, got {wanted!r}")
        if memory.get("boot") not in (None, reading.boot_id):
            memory.clear()
        memory["boot"] = reading.boot_id
        usual = number(table(expected.get("hints")).get("pcie_width"))
        j = Judge(reading.node, reading.at, memory)
        devices = [d for d in reading.data.get("devices", ()) if isinstance(d, dict) and d.get("pci")]
        widest = max((number(d.get("width")) or 0 for d in devices if d.get("kind") == "gpu"), default=0)
        for device in devices:
            c, gpu = _component(j.node, device["pci"], device.get("kind")), device.get("kind") == "gpu"
            gone = device.get("off_bus")
            if not gpu and gone is not None:
                there = j.steady("pcie.gone", c, gone, limits().pcie.gone_run)
                if there is not None:
                    j.state("pcie.gone", c, there, severity=Severity.FATAL, action=Action.REBOOT_NODE, certainty=0.9,
                            facts={"drain": "node"}, evidence=("its PCI configuration space reads all ones",),
                            summary=f"Network adapter {device['pci']} has left the PCIe bus.")
            if gone is not True:
                _width(j, c, device, Lanes(wanted, usual, widest) if gpu else Lanes())
                _speed(j, c, device)
                _errors(j, c, device, memory.setdefault("devices", {}).setdefault(device["pci"], {}))
        _vanished(j, devices, memory)
        return j.findings()

    def describe(self, reading: Reading) -> list[str]:
        """The reading in words, one line for each device."""
        return [_words(d) for d in reading.data.get("devices", ())] or ["no GPU and no adapter on PCI here: not measured"]

    def commit(self, reading: Reading) -> None:
        """Nothing is consumed by looking."""

    async def close(self) -> None:
        """Nothing is held open."""


# -- sysfs --------------------------------------------------------------------------------------------------------------------


def read_device(path: Path) -> dict[str, Any] | None:
    """One device below ``bus/pci/devices``; None when it is neither a GPU of NVIDIA's nor an adapter of Mellanox's."""
    vendor, kind_code = number_of(path / "vendor", 16), number_of(path / "class", 16)
    kind = KINDS.get((vendor or 0, (kind_code or 0) >> 8), "")
    if not kind or (path / "physfn").exists():
        return None
    above = path.resolve().parent
    return {
        "pci": pci_address(path.name), "kind": kind, "device": text_of(path / "device"),
        "driver": (path / "driver").resolve().name if (path / "driver").exists() else None, "off_bus": off_bus(path),
        "width": _lanes(path / "current_link_width"), "width_max": _lanes(path / "max_link_width"),
        "speed": _gts(path / "current_link_speed"), "speed_max": _gts(path / "max_link_speed"),
        "up_width_max": _lanes(above / "max_link_width"), "up_speed_max": _gts(above / "max_link_speed"),
        "aer": {kind: _aer(path / f"aer_dev_{kind}") for kind in ("correctable", "nonfatal", "fatal")},
    }


def _paths(devices: Path) -> list[Path]:
    try:
        return sorted(p for p in devices.iterdir() if p.name.count(":") == 2 and len(p.name) <= 16)
    except OSError:
        return []


def _lanes(path: Path) -> int | None:
    """1 to 32 lanes; 0, 63 and 255 are what a link that is down or a dead device reads as."""
    lanes = number_of(path)
    return lanes if lanes in (1, 2, 4, 8, 12, 16, 32) else None


def _gts(path: Path) -> float | None:
    """``32.0 GT/s PCIe`` → 32.0; ``Unknown`` → None."""
    try:
        speed = float((text_of(path) or "").split()[0][:8])
    except (ValueError, IndexError):
        return None
    return speed if 1.0 < speed < 1000.0 else None


def _aer(path: Path) -> int | None:
    """Errors of one class; of the corrected ones only those of the link itself."""
    pairs = [line.split() for line in (text_of(path) or "").splitlines()]
    counts = {p[0]: int(p[1]) for p in pairs if len(p) == 2 and p[1].isascii() and p[1].isdigit() and len(p[1]) < 20}
    if path.name == "aer_dev_correctable":
        links = [counts[name] for name in LINK_ERRORS if name in counts]
        return sum(links) if links else None
    return next((count for name, count in counts.items() if name.startswith("TOTAL_ERR_")), None)


# -- judgement ----------------------------------------------------------------------------------------------------------------


def _component(node: str, pci: str, kind: str | None) -> Component:
    return gpu_component(node, pci) if kind == "gpu" else Component(node=node, device=f"nic@{pci}")


def _least(values: Iterable[float | None]) -> float | None:
    return min((v for v in values if v), default=None)


class Lanes(NamedTuple):
    """How many lanes the link of a GPU should have."""

    wanted: int | None = None  # the site's word
    usual: int | None = None  # of this kind of node
    widest: int = 0  # of the GPUs here


def _width(j: Judge, c: Component, device: Mapping[str, Any], lanes: Lanes) -> None:
    """What the link runs at against the site's word, else against the lesser of what its ends can do.

    A slot that is narrower than its kind's is told as well: as a fault where another GPU of this node has the usual width, else for
    the record, since it may be how these machines are built.
    """
    width, best = device.get("width"), device.get("width_max")
    most = lanes.wanted or _least((best, device.get("up_width_max")))
    if not (width and best and most):
        return
    below = bool(lanes.usual and width < lanes.usual <= best) and width >= most
    there = j.steady("pcie.width", c, width < most or below, limits().pcie.link_run)
    if there is not None:
        odd = not below or lanes.widest >= (lanes.usual or 0)
        most = lanes.usual if below else most
        j.state("pcie.width", c, there, severity=Severity.WARNING if odd else Severity.INFO, evidence=_evidence(device),
                action=Action.INSPECT if odd else Action.NONE, certainty=0.5 if below else 0.8,
                summary=f"{device['pci']}: its PCIe link has {width} lanes of {most:g}{' that are usual' if below else ''}.")


def _evidence(device: Mapping[str, Any]) -> tuple[str, ...]:
    names = ("width", "width_max", "up_width_max", "speed", "speed_max", "up_speed_max")
    return tuple(f"{name}={device[name]}" for name in names if device.get(name))


def _speed(j: Judge, c: Component, device: Mapping[str, Any]) -> None:
    """Of adapters only: what the link runs at against the lesser of what its ends can do."""
    speed, most = device.get("speed"), _least((device.get("speed_max"), device.get("up_speed_max")))
    if device.get("kind") == "nic" and speed and device.get("speed_max") and most:  # adapters keep their speed when idle
        there = j.steady("pcie.speed", c, speed < most, limits().pcie.link_run)
        if there is not None:
            j.state("pcie.speed", c, there, severity=Severity.WARNING, action=Action.INSPECT, certainty=0.7,
                    evidence=_evidence(device),
                    summary=f"{device['pci']}: its PCIe link runs at {speed:g} GT/s of {most:g}.")


def _errors(j: Judge, c: Component, device: Mapping[str, Any], own: dict[str, Any]) -> None:
    aer = device.get("aer") or {}
    for kind, severity in (("fatal", Severity.WARNING), ("nonfatal", Severity.INFO)):
        rose = rise(own, kind, aer.get(kind))
        if rose:
            j.event(f"pcie.aer_{kind}", c, severity=severity, count=rose, evidence=(f"aer_dev_{kind}={aer[kind]}",),
                    action=Action.INSPECT if severity is Severity.WARNING else Action.NONE,
                    summary=f"{device['pci']}: {rose} uncorrectable PCIe errors, {kind} by their kind, since the last look.")
    rose = rise(own, "correctable", aer.get("correctable"))
    if rose is None:
        return
    t = limits().pcie
    many, _ = note(own, "corrected", j.at, rose, t.corrected_window_s)
    minutes = t.corrected_window_s / 60
    limit = math.ceil((device.get("width") or 16) * (device.get("speed") or 32.0) * t.corrected_per_minute * minutes)
    there = j.steady("pcie.corrected_errors", c, many > limit, t.corrected_run)
    if there is not None:
        j.state("pcie.corrected_errors", c, there, severity=Severity.WARNING, action=Action.INSPECT, certainty=0.8,
                evidence=(f"aer_dev_correctable={aer['correctable']}",), facts={"in_a_minute": many, "limit": limit},
                summary=f"{device['pci']}: {many} corrected PCIe link errors in the last {span(t.corrected_window_s)}; "
                        f"{limit} are the most for this link.")


def _vanished(j: Judge, devices: list[dict[str, Any]], memory: dict[str, Any]) -> None:
    """Adapters that were on the bus in this boot and are not listed any more: unplugged by software, or fallen off."""
    here = {d["pci"] for d in devices}
    known = set(memory.get("nics", ())) | {d["pci"] for d in devices if d.get("kind") == "nic"}
    memory["nics"] = sorted(known)
    for pci in sorted(known):
        c, missing = _component(j.node, pci, "nic"), pci not in here
        gone_s = j.lasts_s("pcie.missing", c, missing)
        if not missing or gone_s >= limits().pcie.vanished_s:
            j.state("pcie.vanished", c, missing, severity=Severity.WARNING, action=Action.INSPECT, certainty=0.8,
                    summary=f"Network adapter {pci} was on the PCIe bus and is not listed any more.")


def _words(d: Mapping[str, Any]) -> str:
    def shown(value: Any) -> str:
        return "?" if value is None else f"{value:g}"

    gone = {True: ", OFF THE BUS", None: ", configuration space not measured"}.get(d.get("off_bus"), "")
    return (f"{d.get('kind')} {d.get('pci')}: x{shown(d.get('width'))} of {shown(d.get('width_max'))}, "
            f"{shown(d.get('speed'))} GT/s of {shown(d.get('speed_max'))}{gone}")

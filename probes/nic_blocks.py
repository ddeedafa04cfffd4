"""The blocks that InfiniBand tools print, line by line, into the shape that the probe ``infiniband`` reads from sysfs.

What always holds: a line belongs to the last head above it; a key that is not known is skipped; a head seen again begins
another snapshot; whatever a line holds, no exception comes of it, and at most ``MOST_PORTS`` ports are kept.

Formats: the kernel's sysfs as ``grep .`` prints it, infiniband-diags (ibstat, ibstatus, perfquery), libibverbs (ibv_devinfo),
iproute2 (rdma link), MLNX_OFED (ibdev2netdev), NVIDIA MFT (mlxlink).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

from probes.infiniband import rate_gbps
from probes.infiniband_policy import WATCHED
from probes.pci import number

MOST_PORTS = 2048

HEADS = (
    "CA '", "Infiniband device '", "hca_id:", "ort counters: Lid", "ort extended counters: Lid", "Operational Info", "==>",
    "physical_state", "/sys/class/infiniband/",
)

_LEVELS = {"info", "warn", "warning", "error", "err", "debug", "fatal", "crit", "critical", "notice", "trace"}
_HOST = re.compile(r"([A-Za-z][\w.-]{0,62}): ?(?=\s*\S)")
_CA = re.compile(r"\s*CA '([\w.:-]{1,64})'\s*$")
_PORT = re.compile(r"\s*(?:Port (\d{1,3}):|port:\s+(\d{1,3}))\s*$")
_STATUS = re.compile(r"\s*Infiniband device '([\w.:-]{1,64})' port (\d{1,3}) status:\s*$")
_HCA = re.compile(r"\s*hca_id:\s*([\w.:-]{1,64})\s*$")
_PERF = re.compile(r"\s*# Port (?:extended )?counters: Lid (\d{1,6}) port (\d{1,3})\b")
_MLXLINK = re.compile(r"\s*Operational Info\s*$")
_MLXLINK_CALL = re.compile(r"\bmlxlink\b.{0,200}?\s(?:-d|--device)\s+([\w.:/-]{1,64})")
_RDMA = re.compile(
    r"\s*link ([\w.-]{1,64})/(\d{1,3}) (?:.{0,200} )?state (\w{1,32}) physical_state (\w{1,32})(?: netdev ([\w.@-]{1,32}))?\s*$"
)
_NETDEV = re.compile(
    r"\s*(?:([0-9a-fA-F:.]{7,16})\s+)?([\w.-]{1,64})(?:\s+\(([^()]{0,80})\))?.{0,160}?\bport\s+(\d{1,3})\s*(?:\((\w{1,16})\s*\))?\s*==>\s*"
    r"([\w.@-]{1,32})\s*\((Up|Down)\)\s*$"
)
_SYSFS = re.compile(r"\s*/sys/class/infiniband/([\w.-]{1,64})/ports/(\d{1,3})/(counters/)?(\w{1,40}):(.{0,64})$")
_PAIR = re.compile(r"\s*([A-Za-z#][\w \[\]()/#.-]{0,48}?)\s*:\s*(.*?)\s*$")
_COUNTER = re.compile(r"(\w{1,48}):\.*(\d{1,20})\s*$")
_RANGE = re.compile(r"(-?\d{1,4}(?:\.\d+)?)\s*\[\s*-?[\d.]{1,8}\s*\.\.\s*(-?\d{1,4}(?:\.\d+)?)\s*\]")

_STATES = {"down": 1, "initializing": 2, "initialize": 2, "init": 2, "armed": 3, "active": 4, "activedefer": 5}
_PHYS = {
    "sleep": 1, "polling": 2, "disabled": 3, "disable": 3, "training": 4, "configurationtraining": 4, "linkup": 5,
    "linkerrorrecovery": 6, "phytest": 7, "test": 7,
}
_MANAGER = {  # mlxlink's State is the port manager's → (state, phys)
    "active": (4, 5), "physicallinkup": (2, 5), "polling": (1, 2), "portplldown": (1, 2), "rxdisable": (1, 2),
    "signaldetect": (1, 2), "receiverdetect": (1, 2), "disable": (1, 3), "closeport": (1, 3), "sleep": (1, 1),
}
_PERFQUERY = {
    "SymbolErrorCounter": "symbol_error", "LinkErrorRecoveryCounter": "link_error_recovery", "LinkDownedCounter": "link_downed",
    "PortRcvErrors": "port_rcv_errors", "PortXmitDiscards": "port_xmit_discards", "PortXmitWait": "port_xmit_wait",
    "LocalLinkIntegrityErrors": "local_link_integrity_errors", "ExcessiveBufferOverrunErrors": "excessive_buffer_overrun_errors",
}
_OPCODES_FINE = (0, 1)  # mlxlink Status Opcode: no issue; closed by command


def _word(value: str) -> str:
    """``4: ACTIVE``, ``PORT_ACTIVE (4)``, ``LINK_UP`` → letters only, without the prefix."""
    word = re.sub(r"[^a-z]", "", value[:64].lower())
    return word.removeprefix("port") if word != "portplldown" else word


class Blocks:
    """Takes lines in order; ``snapshots`` are (host or "", devices) in the order in which they were printed."""

    def __init__(self) -> None:
        self._done: list[tuple[str, dict[str, dict[str, Any]]]] = []
        self._open: dict[str, dict[str, dict[str, Any]]] = {}
        self._seen: set[tuple[str, str, str, int]] = set()
        self._files: set[tuple[Any, ...]] = set()  # of sysfs, seen in this look
        self._host = ""
        self._device: dict[str, Any] | None = None
        self._port: dict[str, Any] | None = None
        self._kind, self._named, self._ports = "", "port", 0

    def snapshots(self) -> list[tuple[str, list[dict[str, Any]]]]:
        return [(host, list(devices.values())) for host, devices in (*self._done, *self._open.items()) if devices]

    def line(self, text: str) -> None:
        if self._host:
            if text.startswith(f"{self._host}:"):
                text = text[len(self._host) + 1:]
            else:
                self._host, self._device, self._port = "", None, None
        marked = any(head in text for head in HEADS)
        if self._device is None and not marked and "mlxlink" not in text:
            return  # almost every line of a long log
        if marked and not self._host and (match := _HOST.match(text)) is not None and match[1].lower() not in _LEVELS:
            rest = text[match.end():]
            if any(head.match(rest) for head in (_CA, _STATUS, _HCA, _PERF, _MLXLINK, _RDMA, _NETDEV)):
                self._host, text = match[1], rest
        if not ((marked or "ort" in text or "mlxlink" in text) and self._head(text)):
            self._value(text)

    def _enter(self, kind: str, device: str, port: int | None, **about: Any) -> None:
        if self._ports >= MOST_PORTS:
            self._device = self._port = None
            return
        if (self._host, kind, device, port or 0) in self._seen:  # the same thing printed again: another look
            self._done.append((self._host, self._open.pop(self._host, {})))
            self._seen = {s for s in self._seen if s[0] != self._host}
        self._seen.add((self._host, kind, device, port or 0))
        self._kind = kind
        devices = self._open.setdefault(self._host, {})
        self._device = devices.setdefault(device, {"name": device, "pci": None, "ports": [], "netdevs": {}, "temperatures": {}})
        self._device.update({k: v for k, v in about.items() if v})
        self._port = None
        if port is not None:
            self._port = next((p for p in self._device["ports"] if p["port"] == port), None)
            if self._port is None:
                self._ports += 1
                self._port = {"port": port}
                self._device["ports"].append(self._port)

    def _head(self, text: str) -> bool:
        if (match := _CA.match(text)) is not None:
            self._enter("ibstat", match[1], None)
        elif (match := _PORT.match(text)) is not None and self._device is not None and self._kind in ("ibstat", "devinfo"):
            self._enter(self._kind, self._device["name"], int(match[1] or match[2]))
        elif (match := _STATUS.match(text)) is not None:
            self._enter("ibstatus", match[1], int(match[2]))
        elif (match := _HCA.match(text)) is not None:
            self._enter("devinfo", match[1], None)
        elif (match := _PERF.match(text)) is not None:
            self._enter("perfquery", f"lid{match[1]}", int(match[2]))
            self._port_values(layer="InfiniBand")
        elif _MLXLINK.match(text):
            self._enter("mlxlink", self._named, 1)
        elif (match := _RDMA.match(text)) is not None:
            self._enter("rdma", match[1], int(match[2]))
            self._port_values(state=_STATES.get(_word(match[3])), phys=_PHYS.get(_word(match[4])))
        elif "/sys/" in text and (match := _SYSFS.match(text)) is not None:
            self._sysfs(*match.groups())
        elif "==>" in text and (match := _NETDEV.match(text)) is not None:
            pci, device, card, port, state, net, up = match.groups()
            self._enter("netdev", device, int(port), pci=pci, hca=(card or "").split(" ")[0])
            self._port_values(state=_STATES.get(_word(state or "")))
            if self._device is not None:
                self._device["netdevs"][net] = {"up": None, "carrier": up == "Up", "downs": None}
            self._device = self._port = None
        else:
            if (match := _MLXLINK_CALL.search(text)) is not None:
                self._named = match[1].rsplit("/", 1)[-1]
            return False
        return True

    def _sysfs(self, device: str, port: str, counter: str | None, key: str, value: str) -> None:
        """``grep .`` over sysfs: every line names its port; the same file again begins another look."""
        name = (self._host, "sysfs", device, int(port))
        if (*name, counter, key) in self._files:
            self._files = {f for f in self._files if f[0] != self._host}
        else:
            self._seen.discard(name)  # the same look at the same port goes on
        self._files.add((*name, counter, key))
        self._enter("sysfs", device, int(port))
        if self._port is None:
            return
        if counter:
            if key in WATCHED and (count := number(value)) is not None:
                self._port.setdefault("counters", {})[key] = count
        elif (known := _OF_PORT.get(key.replace("_", " "))) is not None:
            self._port[known[0]] = known[1](value.partition(": ")[2] if key.endswith("state") else value.strip())
            if key == "rate":
                self._port["rate"] = value[:64]

    def _port_values(self, **values: Any) -> None:
        if self._port is not None:
            self._port.update(values)

    def _value(self, text: str) -> None:
        if self._device is None:
            return
        if self._kind == "perfquery":
            if (match := _COUNTER.match(text.strip())) is not None and self._port is not None:
                name = _PERFQUERY.get(match[1])
                if name:
                    self._port.setdefault("counters", {})[name] = int(match[2])
            return
        if (pair := _PAIR.match(text)) is None:
            return
        key, value = re.sub(r"[\s_]+", " ", pair[1].lower()), pair[2]
        if self._kind == "mlxlink":
            self._mlxlink(key, value)
            return
        if key in _ABOUT:
            self._device[_ABOUT[key][0]] = _ABOUT[key][1](value)
        elif key in _OF_PORT and self._port is not None:
            self._port[_OF_PORT[key][0]] = _OF_PORT[key][1](value)
            if key == "rate":
                self._port["rate"] = value[:64]

    def _mlxlink(self, key: str, value: str) -> None:
        port, device = self._port, self._device
        if port is None or device is None:
            return
        if key == "state":
            port["state"], port["phys"] = _MANAGER.get(_word(value), (None, None))
        elif key == "speed":
            port["layer"] = "InfiniBand" if value.upper().startswith("IB-") else "Ethernet" if value[:1].isdigit() else ""
            port["rate"] = value[:64]
        elif key == "status opcode":
            opcode = number(value)
            if opcode is not None and opcode not in _OPCODES_FINE and port.get("state") == 1:
                port["phys"] = 2  # there is a reason, so it is not off by command
        elif key == "recommendation" and value and not value.lower().startswith("no issue") and port.get("state") != 4:
            port["reason"] = value.rstrip(".")[:160]
        elif key in ("effective physical ber", "symbol ber"):
            with contextlib.suppress(ValueError):
                port.setdefault("ber", {})[key.partition(" ")[0]] = float(value[:24])
        elif key.startswith("temperature") and (match := _RANGE.match(value)) is not None:
            device["temperatures"]["module"] = {"c": float(match[1]), "most_c": float(match[2])}


def _lid(value: str) -> int | None:
    return number(value, 0)


def _card(value: str) -> str:
    return f"MT{value}" if value.isdigit() else value[:32]


_ABOUT: dict[str, tuple[str, Callable[[str], Any]]] = {
    "ca type": ("hca", lambda v: v[:32]), "vendor part id": ("hca", _card), "firmware version": ("fw", lambda v: v[:32]),
    "fw ver": ("fw", lambda v: v[:32]), "board id": ("board", lambda v: v[:32]),
}
_OF_PORT: dict[str, tuple[str, Callable[[str], Any]]] = {
    "state": ("state", lambda v: _STATES.get(_word(v))), "physical state": ("phys", lambda v: _PHYS.get(_word(v))),
    "phys state": ("phys", lambda v: _PHYS.get(_word(v))), "rate": ("rate_gbps", rate_gbps),
    "link layer": ("layer", lambda v: v[:16]), "base lid": ("lid", _lid), "port lid": ("lid", _lid), "sm lid": ("sm_lid", _lid),
}

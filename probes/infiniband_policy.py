"""When a port of InfiniBand or RoCE is judged, by which of its counters, and what its states are called.

This module exists so that whom to judge can be read apart from the judging, which is ``infiniband_findings``; the numbers are
in ``thresholds.toml``. What always holds:

* ``None`` yields no finding. A port that nobody expects and that was never seen active is unused, not down; so are virtual
  functions, BlueField, the way to the default route, and what the site told us to ignore.
* ``state``, ``phys_state`` and the subnet manager's LID are judged together: a physical link that no subnet manager has set up
  is the fabric's, a link that does not come up is a cable's or a switch port's, a disabled one is somebody's wish.
* Counters count between two readings, restarts and saturation included (``probes.counters``). Congestion is never a fault.
* Fatal is only what keeps a rail away that was in use or is expected, or what NVSentinel calls fatal and repeats; it is doubt
  (certainty below 1), so budgets apply.

Sources: NVIDIA Health Validation for GB200 ("HV": rdma_linkflap_fatal), NVSentinel's NIC monitor ("NVS"), Azure healthagent,
leptonai/gpud, the InfiniBand architecture's PortCounters with the kernel's widths (drivers/infiniband/core/sysfs.c).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from probes import ProbeError
from probes.threshold_tables import Infiniband
from sentinel.model import Component, Severity

BLUEFIELD = ("MT41682", "MT41686", "MT41692")  # BlueField 1, 2, 3: the DPU's own uplink, not a rail (hca_type)

# counters/: name → width in bits (kernel PORT_PMA_ATTR). They stop at their largest value.
WATCHED = {
    "symbol_error": 16, "link_error_recovery": 8, "link_downed": 8, "port_rcv_errors": 16,
    "local_link_integrity_errors": 4, "excessive_buffer_overrun_errors": 4, "port_xmit_discards": 16, "port_xmit_wait": 32,
}
WATCHED_HW = {  # hw_counters/: 64 bits; all of them congestion, a receiver's software, or a peer that died
    "roce_slow_restart": 64, "local_ack_timeout_err": 64, "rnr_nak_retry_err": 64, "out_of_buffer": 64, "packet_seq_err": 64,
}
INTEGRITY = ("local_link_integrity_errors", "excessive_buffer_overrun_errors")  # NVS: any rise is fatal; here one that repeats

CONGESTION = frozenset({"port_xmit_discards", "port_xmit_wait"})


class Limit(NamedTuple):
    """More than ``most`` of a counter within ``window_s``; without a window: per second, in ``error_run`` readings in a row.

    ``says``: what they are; ``{when}`` becomes the window, or "a second".
    """

    check: str
    counter: str
    says: str
    most: Callable[[Infiniband], float]
    window_s: Callable[[Infiniband], float] | None = None
    severity: Severity = Severity.WARNING


LIMITS = (
    Limit("ib.symbol_errors", "symbol_error", "symbol errors {when}",
          lambda t: t.symbol_errors_most, lambda t: t.symbol_errors_window_s),
    Limit("ib.link_recovery", "link_error_recovery", "link recoveries {when}",
          lambda t: t.link_recoveries_most, lambda t: t.link_recoveries_window_s),
    Limit("ib.receive_errors", "port_rcv_errors", "receive errors {when}", lambda t: t.receive_errors_per_s),
    # Not faults: on record, so that a slow engine finds its reason here.
    Limit("ib.congestion", "port_xmit_discards", "discarded packets {when}", lambda t: t.discards_per_s, None, Severity.INFO),
    Limit("ib.congestion", "roce_slow_restart", "slow restarts {when}", lambda t: t.slow_restarts_per_s, None, Severity.INFO),
    Limit("ib.peer_timeouts", "local_ack_timeout_err", "acknowledgements {when} that did not come",
          lambda t: t.missing_acks_per_s, None, Severity.INFO),
)  # fmt: skip

DOWN, INIT, ARMED, ACTIVE, DEFER = 1, 2, 3, 4, 5  # enum ib_port_state
SLEEP, POLLING, DISABLED, TRAINING, LINK_UP, RECOVERY, TEST = 1, 2, 3, 4, 5, 6, 7  # enum ib_port_phys_state
PHYS_SAYS = {
    POLLING: "it hears nothing at the other end: cable, transceiver or switch port",
    TRAINING: "it trains and does not come up: cable, transceiver or switch port",
    RECOVERY: "its link is recovering from errors",
}

Device = Mapping[str, Any]
Port = Mapping[str, Any]


class Wanted(NamedTuple):
    """What a healthy node of this kind has; None and empty: nobody said."""

    ports: int | None
    rate_gbps: float | None
    devices: frozenset[str]

    @classmethod
    def of(cls, expected: Mapping[str, Any]) -> Wanted:
        ports, rate, devices = expected.get("ib_ports"), expected.get("ib_gbps"), expected.get("ib_devices", [])
        if ports is not None and (isinstance(ports, bool) or not isinstance(ports, int) or ports < 0):
            raise ProbeError(f"expected.ib_ports: wanted a whole number, got {ports!r}")
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0):
            raise ProbeError(f"expected.ib_gbps: wanted Gb/s, more than 0, got {rate!r}")
        if not isinstance(devices, list) or not all(isinstance(name, str) for name in devices):
            raise ProbeError(f"expected.ib_devices: wanted a list of adapters' names or PCI addresses, got {devices!r}")
        return cls(ports, rate, frozenset(devices))

    def names(self, device: Device) -> bool:
        return bool(self.devices & {device["name"], device.get("pci")})


class Rail(NamedTuple):
    """One port that may be judged."""

    device: Device
    port: Port
    layer: str
    where: Component

    @property
    def name(self) -> str:
        return f"{self.device['name']} port {self.port.get('port')}"

    @property
    def up(self) -> bool:
        return self.port.get("state") == ACTIVE

    def evidence(self, *more: str) -> tuple[str, ...]:
        shown = ((k, self.port.get(k)) for k in ("state", "phys", "rate", "layer", "lid", "sm_lid"))
        return (*(f"{k}={v}"[:100] for k, v in shown if v is not None), *more)


def rails(node: str, devices: list[Device], default_route: set[str], wanted: Wanted) -> Iterator[Rail]:
    """The ports that are not somebody else's: no virtual function, no way to the default route, no DPU, none to be ignored."""
    for device in devices:
        managed = default_route & set(device.get("netdevs") or {}) or str(device.get("hca") or "").startswith(BLUEFIELD)
        left_alone = device.get("virtual") or device.get("ignored") or (managed and not wanted.names(device))
        for port in () if left_alone else device.get("ports") or ():
            where = Component(node=node, device=f"ib@{device['name']}", part=f"port{port.get('port')}")
            yield Rail(device, port, port.get("layer") or "", where)

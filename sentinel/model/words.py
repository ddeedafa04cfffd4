"""The words of a judgement, and what it is about: severity, action, suspect, and the component.

What always holds: the written forms here are what goes over the wire and into journals; an order is that of declaration.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from sentinel.pci import pci_address


class Severity(StrEnum):
    """How bad a finding is for the component it names; only ``fatal`` is sent at once."""

    INFO = "info"
    WARNING = "warning"
    FATAL = "fatal"

    @property
    def rank(self) -> int:
        return ("info", "warning", "fatal").index(self.value)


class Action(StrEnum):
    """The first thing to do about a finding. The order is the ladder: a later one is the stronger one."""

    NONE = "none"
    WAIT = "wait"  # a message that decides is still to come (Xid 145 before its 154)
    UNDRAIN = "undrain"
    FIX_MONITOR = "fix_monitor"
    RESTART_WORKER = "restart_worker"
    RESTART_IMEX = "restart_imex"
    RESTART_FABRIC_MANAGER = "restart_fabric_manager"
    INSPECT = "inspect"
    RESET_GPU = "reset_gpu"
    REBOOT_NODE = "reboot_node"
    POWER_CYCLE = "power_cycle"
    CONTACT_SUPPORT = "contact_support"

    @property
    def rank(self) -> int:
        return list(Action).index(self)


class Suspect(StrEnum):
    """Who is to blame, as far as the finding itself can tell."""

    SELF = "self"
    PEER = "peer"
    SWITCH = "switch"
    APP = "app"
    MONITOR = "monitor"


class Kind(StrEnum):
    """A ``state`` is reported until it ends; an ``event`` happened once and ends only by a verified repair or by age."""

    STATE = "state"
    EVENT = "event"


class Base(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Common shape of all nouns: immutable, keyword-only, compact on the wire.

    None can be part of a cycle, so the collector need not walk the hundreds of thousands of them that a fleet makes.
    """


class Component(Base, frozen=True, kw_only=True, omit_defaults=True, order=True):
    """What a finding is about: a node, a device of it, or a part of the device.

    Written as ``node``, ``node/gpu@0009:01:00.0`` or ``node/gpu@0009:01:00.0/nvlink7``.
    """

    node: str
    device: str = ""  # "gpu@0009:01:00.0", "ib@mlx5_0", "worker@decode-03", "driver", "kernel_log"
    part: str = ""  # "nvlink7", "port1"

    def __str__(self) -> str:
        return "/".join(p for p in (self.node, self.device, self.part) if p)

    @classmethod
    def parse(cls, text: str) -> Component:
        """Read the written form back; raises ValueError when it has no node or more than three parts."""
        parts = text.split("/")
        if not parts[0] or len(parts) > 3 or "" in parts:
            raise ValueError(f"not a component: {text!r} (wanted node, node/device or node/device/part)")
        return cls(node=parts[0], device=parts[1] if len(parts) > 1 else "", part=parts[2] if len(parts) > 2 else "")

    @property
    def gpu(self) -> str | None:
        """PCI address of the GPU it names or belongs to; None when it is about something else."""
        return self.device[4:] if self.device.startswith("gpu@") else None

    @property
    def worker(self) -> str | None:
        return self.device[7:] if self.device.startswith("worker@") else None

    def covers(self, other: Component) -> bool:
        """Whether ``other`` is this component or lies inside it."""
        return (
            self.node == other.node
            and self.device in ("", other.device)
            and self.part in ("", other.part)
        )


def gpu_component(node: str, pci: str) -> Component:
    return Component(node=node, device=f"gpu@{pci_address(pci)}")

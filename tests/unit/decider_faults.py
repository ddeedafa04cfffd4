"""Faults that the tests of the decider let a node report, and a fleet with one worker changed."""

from __future__ import annotations

import msgspec

from sentinel.model import Action, Finding, Fleet, gpu_component
from sentinel.testing.decisions import PCIS, World


def remap(w: World, node: str, gpu: int = 0, present: bool = True) -> Finding:
    return w.state("gpu.row_remap_pending", gpu_component(node, PCIS[gpu]), present, action=Action.RESET_GPU)


def off_bus(w: World, node: str, gpu: int = 0) -> Finding:
    return w.xid(79, node, gpu, action=Action.REBOOT_NODE)


def changed(fleet: Fleet, name: str, **fields: object) -> Fleet:
    workers = tuple(msgspec.structs.replace(x, **fields) if x.name == name else x for x in fleet.workers)
    return msgspec.structs.replace(fleet, workers=workers)

"""What is meant to happen to a node, and is therefore no fault: a person's maintenance window, or a reboot that sentinel asked for.

This module exists so that everything that misses, judges or repairs a node asks one place whether it is meant to be as it is.
What always holds: it only reads the picture; a window that has ended counts no more, whoever has yet to notice that; a reboot
is meant from the moment it is asked for until the node reports another boot, or is given up.
"""

from __future__ import annotations

from sentinel.decide.picture import Picture
from sentinel.model import Action, Drain, DrainState, Hold

REBOOTS = (Action.REBOOT_NODE, Action.POWER_CYCLE)


def window(p: Picture, node: str) -> Hold | None:
    """The maintenance window that this node is in; None: it is in none."""
    hold = p.holds.get(node)
    if hold is None or not hold.planned or (hold.until is not None and hold.until <= p.now):
        return None
    return hold


def reboot(p: Picture, node: str) -> Drain | None:
    """The drain whose repair is rebooting this node now."""
    for worker in p.on_node(node):
        drain = p.open_drain(worker.name)
        if drain is not None and drain.state is DrainState.REPAIRING and drain.repair in REBOOTS and _node(drain) == node:
            return drain
    return None


def planned(p: Picture, node: str) -> bool:
    """Whether what happens on this node now is meant to, and counts as nothing else."""
    return window(p, node) is not None or reboot(p, node) is not None


def _node(drain: Drain) -> str:
    return drain.target.partition("/")[0]

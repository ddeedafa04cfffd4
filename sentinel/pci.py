"""How a PCI device is named everywhere here: ``dddd:bb:dd.f``, whatever spelling a program used.

This module exists apart from ``sentinel.model`` for the driver child: it names GPUs and needs nothing else of the nouns, and
each node carries what it imports in memory. What always holds: it imports nothing but ``re``.
"""

from __future__ import annotations

import re

_PCI = re.compile(r"(?:PCI:)?([0-9a-fA-F]{1,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.([0-7]))?")


def pci_address(text: str) -> str:
    """Return ``dddd:bb:dd.f`` for any usual spelling of a PCI address (``PCI:0009:01:00``, ``00000009:01:00.0``).

    Raises ValueError naming the text when it is no PCI address.
    """
    match = _PCI.fullmatch(text.strip())
    if not match:
        raise ValueError(f"not a PCI address: {text!r} (wanted dddd:bb:dd.f)")
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus.lower()}:{device.lower()}.{function or 0}"

"""Where a GPU says it is mounted: chassis, slot, tray and position on the tray, by NVML's platform information.

This module exists because the binding declares every byte of that struct as ``char``: read by attribute, a number comes back as a
one-character string and a serial number or GUID ends at its first NUL byte. What always holds: only the raw
bytes are read; what the driver does not say is None or "".

Source: nvml.h ``nvmlPlatformInfo_v2_t`` and ``_v1_t``, which have one layout: version, InfiniBand GUID (16 bytes), then 16 bytes
that are the chassis' serial number in version 2 and the rack's GUID in version 1, then one byte each for slot (switch trays
count), tray (compute trays only), host, peer type and module. "0 if not available" is said of the sixteen bytes only.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from typing import Any

_CHASSIS = slice(20, 36)
_NUMBERS = {"slot": 36, "tray": 37, "host": 38, "module": 40}  # byte 39 is the peer type, which says nothing of the place


def read_platform(nvml: Any, ask: Callable[..., Any]) -> dict[str, Any] | None:
    """``{"chassis", "slot", "tray", "host", "module"}``; None when the driver does not say. ``ask(function, *args)`` asks it."""
    for version in ("c_nvmlPlatformInfo_v2_t", "c_nvmlPlatformInfo_v1_t"):
        kind = getattr(nvml, version, None)  # an older binding may lack it
        info = kind() if kind else None
        if info is not None and ask("nvmlDeviceGetPlatformInfo", byref(info)) is not None:
            return decode(bytes(info))
    return None


def decode(raw: bytes) -> dict[str, Any]:
    """The struct's bytes in words. A serial number is text (nvidia-smi prints it so); what is no text is given in hex."""
    name = raw[_CHASSIS].rstrip(b"\0")
    printable = name.isascii() and all(0x20 < b < 0x7F for b in name)
    return {"chassis": name.decode("ascii") if printable else raw[_CHASSIS].hex(), **{k: raw[at] for k, at in _NUMBERS.items()}}

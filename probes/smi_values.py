"""The words of nvidia-smi, DCGM and their kin, as the values that the gpu probe reads from NVML.

This module exists so that text that a person pasted and a live reading have one shape and one judgement. What always holds:

* A word that is not known, ``N/A``, ``ERR!``, ``[Not Supported]`` and the like are None: not measured.
* GPUs are one table per text: what several outputs say about one GPU (by PCI address, UUID or index) comes together there;
  the later word stands. What names no GPU belongs to an unnamed one, and a value said twice begins the next.
* Work and memory are bounded: GPUs, links and the length of what is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from sentinel.model import pci_address

GPUS_MAX, LINKS_MAX = 1024, 64
TEXT_CHARS = 200

# What nvidia-smi calls NVML's return codes (nvml.h, nvmlErrorString), as far as they come up where a GPU or a fabric fails.
CODES = (
    ("success", 0), ("invalid argument", 2), ("not supported", 3), ("insufficient permissions", 4), ("not found", 6),
    ("insufficient size", 7), ("external power", 8), ("driver not loaded", 9), ("timeout", 10), ("interrupt request", 11),
    ("library not found", 12), ("corrupted inforom", 14), ("gpu is lost", 15), ("requires reset", 16), ("requires restart", 16),
    ("operating system", 17), ("version mismatch", 18), ("insufficient memory", 20), ("insufficient resources", 23),
    ("not ready", 27), ("gpu not found", 28), ("invalid state", 29), ("unknown error", 999),
)  # fmt: skip
_ARCHITECTURES = {"volta": 5, "turing": 6, "ampere": 7, "ada": 8, "hopper": 9, "blackwell": 10}  # nvml.h NVML_DEVICE_ARCH_*
_FABRIC_STATES = {"not supported": 0, "not started": 1, "in progress": 2, "completed": 3}  # nvml.h NVML_GPU_FABRIC_STATE_*
_SUMMARIES = {"healthy": 1, "unhealthy": 2, "limited capacity": 3}
_CONFIGURATION = (("none", 1), ("sys", 2), ("chassis", 3), ("partition", 4), ("nvlink", 5), ("firmware", 6), ("fw", 6),
                  ("location", 7), ("state", 8))  # fmt: skip
# Words of ``GPU Recovery Action`` in nvidia-smi and of NVML's constants, longest first; the number is NVML field 230's.
_RECOVERY = (
    ("drain and reset", 4), ("drain_and_reset", 4), ("drain p2p", 3), ("drain_p2p", 3), ("imex", 5), ("bus reset", 6),
    ("bus_reset", 6), ("system reboot", 7), ("system_reboot", 7), ("reboot", 2), ("reset", 1), ("none", 0),
)  # fmt: skip
# Boards whose every NVLink ends at a switch; on others a link without a bridge is unused, not down.
_SWITCHED = re.compile(r"GB[23]00|\bB[123]00|\bH[12]00(?! (?:PCIe|NVL))|\bH[28]0+\b(?! (?:PCIe|NVL))|SXM")

Text = str | None


def absent(word: Text) -> bool:
    """Whether the tool says that it has no value."""
    w = (word or "").strip().strip("[]").lower()
    return w in ("", "n/a", "none (n/a)", "err!", "unknown", "not supported", "unknown error", "insufficient permissions", "-") or (
        "deprecated" in w or "requires reset" in w
    )


def number(word: Text) -> float | None:
    if word is None or absent(word):
        return None
    match = re.match(r"\s*(-?\d{1,18}(?:\.\d{1,6})?)(?![\w.]*[^\s\w%.])", word)
    return float(match[1]) if match else None


def whole(word: Text) -> int | None:
    """A count; a number that runs into other text (two columns glued together) is none."""
    match = re.fullmatch(r"\s*(-?\d{1,18})\s*(?:bank\(s\)|x|C|W|%|MB/s|KB/s|us)?\s*", word or "")
    return int(match[1]) if match else None


def yes(word: Text) -> bool | None:
    return {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}.get((word or "").strip().lower())


def flag(number_: int) -> Callable[[Text], int | None]:
    """The recovery action that a yes stands for; a no says nothing about the others."""
    return lambda word: number_ if yes(word) else None


def refused(gpu: dict[str, Any], name: str, word: str) -> None:
    """Note what the tool prints instead of a value when the GPU itself is the reason."""
    w = word.strip().strip("[]").lower()
    if "requires reset" in w:
        gpu["unread"][name] = 16
    elif w == "gpu is lost":
        gpu["error"] = {"code": 15, "text": "GPU is lost"}


def milliwatts(word: Text) -> int | None:
    watts = number(word)
    return None if watts is None else round(watts * 1000)


def code(word: Text) -> int | None:
    """NVML's number for the words with which the tool names it; 999 for words that are not known."""
    w = (word or "").strip().lower()
    if w in ("", "n/a", "[n/a]"):
        return None
    return next((n for part, n in CODES if part in w), 999)


def recovery(word: Text) -> int | None:
    """The recovery action's number; -1 (a person looks) for words that are not known."""
    w = (word or "").strip().strip("[]").lower()
    if w in ("", "n/a", "not supported", "unknown error"):
        return None
    if re.fullmatch(r"\d{1,4}|0x[0-9a-f]{1,4}", w):
        return int(w, 0) if w.startswith("0x") else int(w)
    return next((n for part, n in _RECOVERY if part in w), -1)


def fabric_state(word: Text) -> int | None:
    return _FABRIC_STATES.get((word or "").strip().lower())


def cluster(word: Text) -> str | None:
    plain = re.sub(r"[^0-9a-f]", "", (word or "").lower())
    return plain if len(plain) == 32 else None


def architecture(word: Text) -> int | None:
    w = (word or "").lower()
    return next((n for part, n in _ARCHITECTURES.items() if part in w), None)


def health(said: Mapping[str, Text]) -> tuple[int, int]:
    """Mask and summary as nvml.h lays them out, from rows of the Fabric block; 0 where a row says nothing."""

    def flag(word: Text, bad: bool) -> int:
        value = yes(word)
        return 0 if value is None else 1 if value else 2

    band = (said.get("bandwidth") or "").strip().lower()
    mask = {"degraded": 1, "full": 2}.get(band) or flag(band, True)
    for name, shift in (("route_recovery", 2), ("route_unhealthy", 4), ("access_timeout", 6), ("partition", 12)):
        mask |= flag(said.get(name), True) << shift
    wrong = (said.get("configuration") or "").strip().lower()
    if wrong not in ("", "n/a", "not supported"):
        mask |= next((n for part, n in _CONFIGURATION if part in wrong), 15) << 8
    manager = (said.get("manager") or "").strip().lower()
    mask |= {"connected": 1, "disconnected": 2}.get(manager, 0) << 14
    return mask, _SUMMARIES.get((said.get("summary") or "").strip().lower(), 0)


def address(word: Text) -> str | None:
    """The PCI address; None for what cannot be one: nvidia-smi prints at least four digits of domain, and devices end at 1f."""
    try:
        plain = pci_address(word or "")
    except ValueError:
        return None
    domain, _, device = (word or "").strip().removeprefix("PCI:").split(":")
    return plain if len(domain) >= 4 and int(device[:2], 16) < 32 else None


def unused_links(name: str | None) -> bool:
    """Whether this board's links may be without a far end: only a name that says so answers yes."""
    return bool(name) and not _SWITCHED.search(name or "")


class Gpus:
    """The GPUs that one text speaks of."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self._by: dict[Any, dict[str, Any]] = {}
        self._unnamed: dict[str, Any] | None = None

    def named(self, *, pci: str | None = None, uuid: str | None = None, index: int | None = None) -> dict[str, Any]:
        """The GPU of this name; what is newly known about it is kept. An index alone counts only where nothing better is."""
        keys = [k for k in (pci, uuid, index) if k is not None]
        gpu = next((self._by[k] for k in keys if k in self._by and not self._other(self._by[k], pci, uuid)), None)
        if gpu is None:
            gpu = self._new()
        for key, value in (("pci", pci), ("uuid", uuid), ("index", index)):
            if value is not None:
                gpu[key] = value
        for name in keys:
            self._by.setdefault(name, gpu)
        self._unnamed = None
        return gpu

    def unnamed(self, *keys: str) -> dict[str, Any]:
        """A GPU that the text does not name: the last one, unless it already has one of these values."""
        if self._unnamed is None or any(key in self._unnamed for key in keys):
            self._unnamed = self._new()
        return self._unnamed

    @staticmethod
    def _other(gpu: dict[str, Any], pci: str | None, uuid: str | None) -> bool:
        return any(v is not None and gpu.get(k) not in (None, v) for k, v in (("pci", pci), ("uuid", uuid)))

    def _new(self) -> dict[str, Any]:
        gpu: dict[str, Any] = {"pci": None, "index": None, "unread": {}}
        if len(self.all) < GPUS_MAX:
            self.all.append(gpu)
        return gpu


def link(gpu: dict[str, Any], key: str, number_: int, value: Any) -> None:
    """Put one link's value in its place; links that were not said are None."""
    if 0 <= number_ < LINKS_MAX:
        values = gpu.setdefault(key, [])
        values.extend([None] * (number_ + 1 - len(values)))
        values[number_] = value


Make = Callable[[Any], Any]

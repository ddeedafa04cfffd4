"""Files of sysfs read the way every probe of PCI devices wants them: a value, or ``None`` for not measured.

What always holds: no function raises for a file that is missing, unreadable or holds something else; reads are bounded.
"""

from __future__ import annotations

from pathlib import Path

from sentinel.model import pci_address

FILE_BYTES = 4096  # sysfs shows one page at most


def text_of(path: Path) -> str | None:
    """The file's text without the white space around it; None when it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(FILE_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return None


def number_of(path: Path, base: int = 10) -> int | None:
    return number(text_of(path), base)


def number(text: str | None, base: int = 10) -> int | None:
    """A whole number that stands at the text's beginning (``16``, ``0x2a``); None for anything else."""
    try:
        return int((text or "").split()[0][:32], base)
    except (ValueError, IndexError):
        return None


def address_of(path: Path) -> str | None:
    """The PCI address of the device that a link or folder of sysfs stands for; None when it is no PCI device."""
    try:
        return pci_address(path.resolve().name)
    except (OSError, ValueError, RuntimeError):
        return None


def off_bus(device: Path) -> bool | None:
    """Whether a device answers every read of its configuration space with ones; None: not measured.

    Looking never blocks on a driver. A device that is powered down (D3cold) reads the same and is not measured.
    """
    try:
        with (device / "config").open("rb", buffering=0) as config:
            head = config.read(4)
    except OSError:
        return None
    if len(head) != 4:
        return None
    if head != b"\xff\xff\xff\xff":
        return False
    return None if text_of(device / "power_state") == "D3cold" else True

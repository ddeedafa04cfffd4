"""How far the kernel log was read, kept over restarts of the agent.

This module exists so that a restarted agent goes on where it stopped and a fresh one knows that it is fresh. What always holds:

* A position counts for the boot that it was written in, and for no other; a host that does not say its boot keeps none.
* Whatever else the file holds, or that it cannot be read, means "no position": never an error, never a guess.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

_BYTES = 4096  # it is some 60 bytes long


class _Position(msgspec.Struct):
    boot_id: str
    seq: Annotated[int, msgspec.Meta(ge=0)]


_decode = msgspec.json.Decoder(_Position).decode


class Cursor:
    def __init__(self, path: Path, boot_id: str) -> None:
        self._path, self._boot_id = path, boot_id
        self._saved: int | None = None

    def load(self) -> int | None:
        """The number of the last record that an earlier run dealt with in this boot; None: there is no telling."""
        try:
            with self._path.open("rb") as file:
                position = _decode(file.read(_BYTES))
        except (OSError, msgspec.DecodeError, RecursionError):
            return None
        if not self._boot_id or position.boot_id != self._boot_id:
            return None
        self._saved = position.seq
        return position.seq

    def save(self, seq: int) -> None:
        """Raises OSError when it cannot be written; the old position then stands."""
        if seq == self._saved or not self._boot_id:
            return
        # Replaced as a whole, not synced: it has to outlive the process, and after a crash of the machine the boot id differs.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(_Position(self._boot_id, seq)))
        fresh.replace(self._path)
        self._saved = seq

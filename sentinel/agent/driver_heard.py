"""The parent's record of the Xids that NVML told of: what a reading carries beside the GPUs' values.

This module exists so that the record outlives the child that heard it. What always holds: it only grows, by GPU and code, until
``KINDS`` are kept and the oldest goes; a GPU that is not listened to now is not in ``listening``, which is not the same as silence.
"""

from __future__ import annotations

from typing import Any

from sentinel.agent.driver_listener import raw_s
from sentinel.agent.driver_protocol import Listens, Said

KINDS = 256


class Heard:
    """``take`` what a child says; ``child_ended`` when there is none any more; ``answer`` for a reading."""

    def __init__(self) -> None:
        self._listens = Listens()
        self._record: dict[tuple[str | None, int], dict[str, Any]] = {}

    @property
    def calling(self) -> bool:
        """Whether the listener is inside a call that must not be cut off."""
        return self._listens.calling

    def child_ended(self) -> None:
        self._listens = Listens()

    def take(self, said: Said) -> None:
        if said.listens is not None:
            self._listens = said.listens
        for pci, xid, times, since, after, at in said.xids:
            before = self._record.pop((pci, xid), {"count": 0})
            count = before["count"] + times
            self._record[pci, xid] = {"pci": pci, "xid": xid, "count": count, "since": since, "after": after, "at": at}
            if len(self._record) > KINDS:
                del self._record[next(iter(self._record))]

    def answer(self) -> dict[str, Any]:
        """``now``, ``listening`` (GPU → since when) and ``heard``: per GPU and code ``count`` in all, and of the latest events
        ``since`` (their GPU was listened to), ``after`` and ``at`` (they happened in between), seconds since boot as printk counts.
        """
        return {"now": raw_s(), "listening": dict(self._listens.since), "heard": [dict(h) for h in self._record.values()]}

"""Where sessions live: session → the worker that answered it last, for as many sessions as fit.

This module exists because the order of ``routing`` moves a session only when it must, but bounded load and retries do move some;
whoever was moved stays where it went, since its KV is there now. What always holds: nothing here is shared or durable. A gateway
that does not know a session looks where it would have gone, which is the same at every gateway.
"""

from __future__ import annotations

from collections import OrderedDict

SESSIONS_MAX = 200_000  # about 40 MB; the longest unused goes first


class Homes:
    def __init__(self, most: int = SESSIONS_MAX) -> None:
        self._most = most
        self._homes: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def of(self, session: str) -> str:
        """The worker's name; "" when it is not known."""
        return self._homes.get(session, "")

    def settle(self, session: str, worker: str) -> None:
        if not session:
            return
        self._homes[session] = worker
        self._homes.move_to_end(session)
        if len(self._homes) > self._most:
            self._homes.popitem(last=False)

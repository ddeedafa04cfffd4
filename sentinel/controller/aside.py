"""A thread with an event loop of its own, for what must go on while the controller's loop is busy.

This module exists because a round of the controller's loop takes as long as all that has arrived: with ten thousand agents that is
seconds at times, and a question to the store needs several rounds. What always holds: what runs here shares no connection with the
other loop; it ends with whoever waits for it, and the thread with the process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Aside:
    """``async with`` it; work that is cancelled while it is waited for is cancelled there."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.run(_the_rest())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for ``work``, which runs in the thread."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


async def _the_rest() -> None:
    """Wait for what has been cancelled and is still letting go of its connections."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*rest, return_exceptions=True)

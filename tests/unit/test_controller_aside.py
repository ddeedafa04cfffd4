"""The thread beside the controller's loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from sentinel.controller.aside import Aside


async def test_work_goes_on_while_the_loop_is_busy() -> None:
    """What runs aside is in another thread and comes round while this loop does not; its answer and its errors come back."""
    rounds = 0

    async def count() -> int:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0.001)

    async def where() -> int:
        return threading.get_ident()

    async def fail() -> None:
        raise KeyError("told")

    async with Aside("test") as aside:
        assert await aside.run(where()) != threading.get_ident()
        with pytest.raises(KeyError, match="told"):
            await aside.run(fail())
        counting = asyncio.create_task(aside.run(count()))
        await asyncio.sleep(0.02)
        before = rounds
        time.sleep(0.1)
        assert rounds > before
        counting.cancel()


async def test_what_is_cancelled_lets_go_before_the_thread_ends() -> None:
    """Work that is cancelled where it is waited for is cancelled there, and its last steps are waited for."""
    steps: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            steps.append("closed")

    before = threading.active_count()
    async with Aside("test") as aside:
        task = asyncio.create_task(aside.run(work()))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert steps == ["closed"]
    assert threading.active_count() == before

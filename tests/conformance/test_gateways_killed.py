"""Whole gateways, as they are run, that are killed and stopped: what one held comes back, and what it knew was everybody's."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest_asyncio

from tests.gateway_rig import ASK, Rig, client, running

LIMIT, HELD, LEASE = 60, 50, 2.0
GUARDS = (
    f'queue = "300ms"\n[gateway.admission]\nlease = "{LEASE:g}s"\nmargin = "500ms"\n'
    f"[gateway.admission.pools.p]\nrequests = {LIMIT}\n"
    '[gateway.breakers]\nmin_requests = 3\nbase_open = "60s"\npoll = "60s"\n'
)


@pytest_asyncio.fixture
async def rig(store_server: Any) -> AsyncIterator[Rig]:
    await store_server.open()  # the embedded server is run by the test, not by one of the gateways
    async with running(store_server.url) as made:
        yield made


class Streams:
    """Streams without an end through one gateway, as the SDK's users hold them."""

    def __init__(self, sdk: openai.AsyncOpenAI) -> None:
        self._sdk, self._tasks = sdk, list[asyncio.Task[None]]()
        self.running = self.refused = 0

    def begin(self, count: int) -> None:
        self._tasks += [asyncio.create_task(self._one()) for _ in range(count)]

    async def _one(self) -> None:
        begun = False
        with contextlib.suppress(openai.APIConnectionError, openai.APIError):
            try:
                async for _ in await self._sdk.chat.completions.create(**ASK, stream=True):  # type: ignore[call-overload]
                    self.running += not begun
                    begun = True
            except openai.InternalServerError as error:
                self.refused += error.status_code == 503
            finally:
                self.running -= begun

    async def fill(self, count: int) -> None:
        """Ask again until so many run."""
        while self.running < count:
            await self.tried(count - self.running)

    async def tried(self, count: int) -> None:
        """Ask for so many more, and wait until each runs or is refused."""
        before = self.running + self.refused
        self.begin(count)
        while self.running + self.refused < before + count:
            await asyncio.sleep(0.005)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def streams(url: str) -> AsyncIterator[Streams]:
    async with client(url) as sdk:
        made = Streams(sdk)
        try:
            yield made
        finally:
            await made.end()


def endless(rig: Rig) -> None:
    for stand in rig.stands.values():
        stand.events, stand.pause_s = 100_000, 0.1


async def test_what_a_killed_gateway_held_comes_back_within_a_lease(rig: Rig) -> None:
    """kill -9 of a gateway with fifty streams: until then the other two get what is left and no more, then all of it."""
    endless(rig)
    (one, first, _), (_, second, _), (_, third, _) = await asyncio.gather(*(rig.gateway(more=GUARDS) for _ in range(3)))
    async with streams(first) as a, streams(second) as b, streams(third) as c:
        await a.fill(HELD)
        await c.tried(20)
        assert c.running <= LIMIT - HELD
        await b.fill(LIMIT - HELD - c.running)
        for each in (b, c):
            refused = each.refused
            await each.tried(10)
            assert (b.running + c.running, each.refused) == (LIMIT - HELD, refused + 10)
        one.send_signal(signal.SIGKILL)
        one.wait()
        killed = time.monotonic()
        await b.fill(LIMIT - c.running)
        took = time.monotonic() - killed
        print(f"all {LIMIT} slots in use again {took:.2f} s after kill -9, lease {LEASE:g} s")
        assert took < LEASE + 2.0  # and what the SDK and two tries of 300 ms in the queue take


async def test_a_gateway_that_was_stopped_lets_nobody_in_before_it_has_renewed(rig: Rig) -> None:
    """SIGSTOP for longer than its lease and every patience: another has every slot by then, what waited at the stopped one's door
    is refused, its own streams go on, and it blames no worker."""
    endless(rig)
    (one, first, _), (_, second, _) = await asyncio.gather(*(rig.gateway(more=GUARDS) for _ in range(2)))
    async with streams(first) as a, streams(second) as b, streams(first) as late:
        await a.fill(5)
        one.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            late.begin(10)  # its kernel takes the connections and what they say
            await b.fill(LIMIT)
            await asyncio.sleep(max(0.0, stopped + 4.0 - time.monotonic()))  # ``stall`` is 3 s here
            reached = sum(len(stand.requests) for stand in rig.stands.values())
        finally:
            one.send_signal(signal.SIGCONT)
        while late.running + late.refused < 10:
            await asyncio.sleep(0.01)
        assert (late.running, late.refused) == (0, 10)
        assert sum(len(stand.requests) for stand in rig.stands.values()) == reached
        await asyncio.sleep(0.5)
        assert (a.running, b.running) == (5, LIMIT)


async def test_what_fails_for_one_gateway_is_out_for_all(rig: Rig) -> None:
    """A worker whose failures one gateway saw gets nothing from two others, which by themselves look once a minute."""
    started = await asyncio.gather(*(rig.gateway(more=GUARDS) for _ in range(3)))
    bad, good = rig.stands["a"], rig.stands["b"]
    bad.status = 500
    async with contextlib.AsyncExitStack() as stack:
        one, *others = [await stack.enter_async_context(client(url)) for _, url, _ in started]
        for number in range(20):
            assert (await say(one, f"one {number}")).id == "chatcmpl-b"
        seen = len(bad.requests)
        assert 3 <= seen < 10
        for number in range(20):
            for sdk in others:
                assert (await say(sdk, f"other {number}")).id == "chatcmpl-b"
        assert len(bad.requests) == seen and len(good.requests) >= 60


async def say(sdk: openai.AsyncOpenAI, text: str) -> Any:
    return await sdk.chat.completions.create(**{**ASK, "messages": [{"role": "user", "content": text}]})  # type: ignore[call-overload]

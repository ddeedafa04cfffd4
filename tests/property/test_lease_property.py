"""Any sequence of what leaders may do and suffer, checked step by step against a model of the lease, on a real server."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from sentinel.config import StoreSettings
from sentinel.store import Put, Store, StoreError, open_store

WHO = st.integers(0, 2)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("acquire"), WHO),
        st.tuples(st.just("renew"), WHO),
        st.tuples(st.just("release"), WHO),
        st.tuples(st.just("commit"), WHO),
        st.tuples(st.just("look"), WHO),
        st.tuples(st.just("expire"), st.just(0)),
        st.tuples(st.just("flush"), st.just(0)),
    ),
    max_size=30,
)


@pytest.fixture(scope="module")
def url(program: Callable[[str], Path]) -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix="sentinel-")
    argv = [program("redis-server"), "--port", "0", "--unixsocket", "s", "--save", ""]
    server = subprocess.Popen(argv, cwd=directory, stdout=subprocess.DEVNULL)
    yield f"unix://{directory}/s"
    server.kill()
    server.wait()
    shutil.rmtree(directory)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_exactly_one_holds_the_lease(url: str, steps: list[tuple[str, int]]) -> None:
    """Whatever happens in whatever order: one holder, epochs that rise by one and never fall, and only it writes."""
    asyncio.run(Model(url).follow(steps))


class Model:
    """What must be true of the lease after each step; ``held`` is (who, epoch) or None."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.held: tuple[int, int] | None = None
        self.counter = 0  # the server's
        self.seen = [0, 0, 0]  # the highest epoch that each one knows of
        self.mine = [0, 0, 0]  # the epoch that each one believes to hold
        self.kept: bytes | None = None

    async def follow(self, steps: list[tuple[str, int]]) -> None:
        prefix = uuid.uuid4().hex
        raw = Redis.from_url(self._url)
        stores = [await open_store(StoreSettings(url=self._url, prefix=prefix)) for _ in range(3)]
        while True:
            try:
                await stores[0].ping()
                break
            except StoreError:  # only while the server starts
                await asyncio.sleep(0.01)
        for number, (what, who) in enumerate(steps):
            if what == "expire":
                await raw.pexpire(f"{{{prefix}}}:lease", 0)
                self.held = None
            elif what == "flush":
                await raw.delete(*[f"{{{prefix}}}:{name}" for name in ("lease", "epoch", "kept")])
                self.held, self.counter, self.kept = None, 0, None
            else:
                await getattr(self, what)(stores[who], who, number)
            assert await stores[0].kept.get("k") == self.kept
        for store in stores:
            await store.close()
        await raw.aclose()

    async def acquire(self, store: Store, who: int, _: int) -> None:
        epoch = await store.lease.acquire(f"c{who}", "http://c", 1000)
        if self.held and self.held[0] != who:
            assert epoch is None
            self.seen[who] = max(self.seen[who], self.held[1])  # a refusal says under which epoch the other one leads
            return
        assert epoch == max(self.counter, self.seen[who]) + 1
        self.counter = self.seen[who] = self.mine[who] = epoch
        self.held = (who, epoch)

    async def renew(self, store: Store, who: int, _: int) -> None:
        assert await store.lease.renew(self.mine[who], 1000) is (self.held == (who, self.mine[who]))

    async def release(self, store: Store, who: int, _: int) -> None:
        ours = self.held == (who, self.mine[who])
        assert await store.lease.release(self.mine[who]) is ours
        if ours:
            self.held = None

    async def commit(self, store: Store, who: int, number: int) -> None:
        ours = self.held == (who, self.mine[who])
        value = str(number).encode()
        assert await store.decisions.commit(self.mine[who], [Put("kept", "k", value)]) is ours
        if ours:
            self.kept = value

    async def look(self, store: Store, who: int, _: int) -> None:
        leader = await store.lease.leader()
        if self.held is None:
            assert leader is None
            return
        assert leader
        assert (leader.holder, leader.epoch) == (f"c{self.held[0]}", self.held[1])
        self.seen[who] = max(self.seen[who], leader.epoch)

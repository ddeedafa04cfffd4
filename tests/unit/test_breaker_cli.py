"""``sentinel breaker`` against a real controller and a real Redis: what it holds, what it refuses, and how both are told."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest_asyncio

from sentinel.decide.decider import Decider
from sentinel.decide.rules.policy_file import default_policy
from sentinel.store.breakers import BreakerRecords
from sentinel.store.gateways import Gateways
from sentinel.testing.control import Caller, RedisServer, running_controller, until
from sentinel.testing.decisions import rack

SENTINEL = Path(sys.executable).parent / "sentinel"


class Site:
    def __init__(self, url: str, caller: Caller, records: BreakerRecords, token: Path) -> None:
        self.url, self.caller, self.records, self.token = url, caller, records, token

    async def run(self, *words: str) -> tuple[int, str]:
        told = {**os.environ, "SENTINEL_CONTROLLER": self.url, "SENTINEL_TOKEN_FILE": str(self.token)}
        process = await asyncio.create_subprocess_exec(
            SENTINEL, *words, env=told, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        out, _ = await process.communicate()
        assert process.returncode is not None
        assert b"Traceback" not in out
        return process.returncode, out.decode()

    async def held(self, worker: str, pool: str = "main") -> tuple[str, str]:
        (stands,) = await self.records.listing({worker: pool})
        return stands.pin, stands.pin_by

    async def asks(self, **ask: Any) -> tuple[int, str]:
        status, told = await self.caller.post("/v1/ask", ask)
        return status, told.get("error", "")


@pytest_asyncio.fixture
async def site(program: Callable[[str], Path], tmp_path: Path) -> AsyncIterator[Site]:
    server = RedisServer(program("redis-server"))
    await server.start()
    store = await server.open()
    (token := tmp_path / "my-token").write_text("token-of-ada\n")
    fleet = rack()
    workers = tuple(msgspec.structs.replace(w, adapter="dynamo") if w.name == "spill-1" else w for w in fleet.workers)
    fleet = msgspec.structs.replace(fleet, workers=workers)
    try:
        await Gateways(store).obey("a1", "g1", 1 << 60, 600)
        async with running_controller(store, tmp_path, fleet=fleet, decider=partial(Decider, default_policy())) as (c, caller):
            await until(lambda: c.term, "it leads")
            yield Site(c.url, caller, BreakerRecords(store), token)
    finally:
        await store.close()
        server.close()


async def test_a_breaker_is_held_and_let_go(site: Site) -> None:
    """--open and --closed hold it in the person's name, status shows whose it is, --auto lets it go."""
    code, out = await site.run("breaker", "decode-1", "--open", "--for", "30m", "--reason", "wrong answers")
    assert (code, "is held open until" in out) == (0, True), out
    await _soon(site, "decode-1", ("open", "ada"))
    for _ in range(100):
        code, out = await site.run("status")
        if "held open by ada" in out:
            break
    assert "held open by ada" in out and "gateways: g1" in out
    assert (await site.run("breaker", "decode-1", "--closed", "--for", "30m", "--reason", "right again"))[0] == 0
    await _soon(site, "decode-1", ("closed", "ada"))
    code, out = await site.run("breaker", "decode-1", "--auto", "--reason", "done")
    assert (code, "held no more" in out) == (0, True), out
    await _soon(site, "decode-1", ("", ""))


async def test_what_makes_no_sense_is_refused_in_one_sentence(site: Site) -> None:
    """No way, two ways, no end, a week and a day, no worker, a whole node, and one behind a Dynamo frontend."""
    for words, status, said in (
        ((), 2, "--open, --closed and --auto"),
        (("--open", "--closed"), 2, "--open, --closed and --auto"),
        (("--open",), 2, "--for"),
        (("--auto", "--for", "1h"), 2, "without --for"),
    ):
        code, out = await site.run("breaker", "decode-1", "--reason", "x", *words)
        assert (code, said in out) == (status, True), out
    for ask, status, said in (
        ({"verb": "pin", "target": "decode-1", "lasts_s": 60}, 400, "pin needs one"),
        ({"verb": "pin", "target": "decode-1", "reason": "x"}, 400, "free again by itself"),
        ({"verb": "pin", "target": "decode-1", "reason": "x", "lasts_s": 8 * 86400}, 400, "7 days at most"),
        ({"verb": "pin", "target": "decode-11", "reason": "x", "lasts_s": 60}, 404, "no worker is called 'decode-11'; did you"),
        ({"verb": "unpin", "target": "t03", "reason": "x"}, 404, "'t03' is no worker"),
        ({"verb": "pin", "target": "spill-1", "reason": "x", "lasts_s": 60}, 404, "Dynamo frontend"),
    ):
        assert (told := await site.asks(**ask))[0] == status and said in told[1], told


async def _soon(site: Site, worker: str, pin: tuple[str, str]) -> None:
    async with asyncio.timeout(20):
        while await site.held(worker) != pin:
            await asyncio.sleep(0.01)

"""The operator's command line against real controllers: what it shows, what it refuses, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import pytest_asyncio

from sentinel.controller.seat import Controller
from sentinel.decide.decider import Decider
from sentinel.decide.rules.policy_file import default_policy
from sentinel.model import Action, Finding, GpuPlace, Kind, Place, Report, Severity, gpu_component
from sentinel.testing.control import Caller, RedisServer, ServingStandIn, running_controller, until
from sentinel.testing.decisions import PCIS, rack

SENTINEL = Path(sys.executable).parent / "sentinel"


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Site:
    def __init__(self, controller: Controller, caller: Caller, serving: ServingStandIn, directory: Path) -> None:
        self.controller, self.caller, self.serving, self.directory = controller, caller, serving, directory
        self.token = directory / "my-token"
        self.token.write_text("token-of-ada\n")

    async def run(self, *words: str, controllers: str = "", **environment: str) -> Ran:
        """Run the command as a person would, with the address and the token in the environment."""
        told = {"SENTINEL_CONTROLLER": controllers or self.controller.url, "SENTINEL_TOKEN_FILE": str(self.token), **environment}
        process = await asyncio.create_subprocess_exec(
            SENTINEL, *words, env={**os.environ, **told}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
        assert process.returncode is not None
        assert "Traceback" not in err.decode()
        return Ran(process.returncode, out.decode(), err.decode())


@pytest_asyncio.fixture
async def server(program: Callable[[str], Path]) -> AsyncIterator[RedisServer]:
    server = RedisServer(program("redis-server"))
    try:
        await server.start()
        yield server
    finally:
        server.close()


@pytest_asyncio.fixture
async def site(server: RedisServer, tmp_path: Path) -> AsyncIterator[Site]:
    store = await server.open()
    serving = ServingStandIn()
    async with running_controller(
        store, tmp_path, fleet=rack(), decider=partial(Decider, default_policy()), nodes=("t03",), serving=serving
    ) as (controller, caller):
        await until(lambda: controller.term, "the controller leads")
        yield Site(controller, caller, serving, tmp_path)
    await store.close()


async def break_decode_1(site: Site) -> None:
    """A GPU of decode-1 falls off the bus; its raw line carries what a terminal must never see."""
    finding = Finding(
        id="t03:1", check="xid.79", component=gpu_component("t03", PCIS[0]), at=time.time(), kind=Kind.EVENT,
        severity=Severity.FATAL, action=Action.REBOOT_NODE, summary="GPU has fallen off [red]the bus[/red]",
        evidence=("NVRM: Xid 79 \x1b[2J\x07",),
    )  # fmt: skip
    report = Report(node="t03", session="s", seq=1, at=time.time(), snapshot=True, findings=(finding,))
    body: Any = json.loads(msgspec.json.encode(report))
    assert (await site.caller.post("/v1/report", body, who="t03"))[0] == 200


class TestLooking:
    async def test_status_shows_leader_nodes_workers_drains_incidents(self, site: Site) -> None:
        """One screen: who leads, who reports, what is out and why; nothing of the network's text is markup or control."""
        await break_decode_1(site)
        ran = await site.run("status")
        assert ran.code == 0, ran.err
        for part in ("leader c1", "epoch 1", "t03", "decode-1", "out", "gpu-off-bus", "pool main", "[red]the bus[/red]", "never"):
            assert part in ran.out
        assert "\x1b" not in ran.out

    async def test_spare_lists_the_clean_gpus_of_a_group_that_is_down(self, site: Site) -> None:
        """Three of four GPUs of a lost decoder are offered by address, and too few for a group; before that there is nothing."""
        assert "no group is down" in (await site.run("spare")).out
        await break_decode_1(site)
        await until(lambda: site.controller.term.core.decider.status()["spare"], "its worker is out")  # type: ignore[union-attr]
        ran = await site.run("spare")
        assert (ran.code, [ran.out.count(p) for p in PCIS]) == (0, [0, 1, 1, 1]), ran.err
        assert "too few" in ran.out and "packs nothing" in ran.out
        assert "sentinel spare" in (await site.run("status")).out
        assert len(json.loads((await site.run("spare", "--json")).out)[0]["gpus"]) == 3

    async def test_status_as_json_is_the_answer(self, site: Site) -> None:
        """--json prints what the controller said, for a script."""
        told = json.loads((await site.run("status", "--json")).out)
        assert told["leader"]["name"] == "c1"
        assert len(told["workers"]) == len(rack().workers)

    async def test_explain_goes_from_the_raw_line_to_the_action(self, site: Site) -> None:
        """The evidence, what was decided, and why, for the worker and for the incident, without the terminal's controls."""
        await break_decode_1(site)
        ran = await site.run("explain", "decode-1")
        assert ran.code == 0, ran.err
        assert "NVRM: Xid 79" in ran.out
        assert "fallen off" in ran.out
        assert "gpu-off-bus on" in ran.out and "100% sure; takes capacity from: decode-1" in ran.out
        assert "\x07" not in ran.out
        listed = await site.run("incidents", "--json")
        incident = json.loads(listed.out)[0]["id"]
        assert "decode-1" in (await site.run("explain", incident)).out
        assert incident in (await site.run("incidents")).out

    async def test_topology_shows_what_shares_what(self, site: Site) -> None:
        """Rack, domain, tray, node and ranks of what was reported; what nobody said is said to be so; --json is for scripts."""
        gpus = tuple(GpuPlace(pci=p, uuid=f"GPU-{i}") for i, p in enumerate(PCIS))
        place = Place(chassis="S1", tray=3, gpus=gpus, ports=("mlx5_0",))
        report = Report(node="t03", session="s", seq=1, at=time.time(), snapshot=True, place=place)
        assert (await site.caller.post("/v1/report", json.loads(msgspec.json.encode(report)), who="t03"))[0] == 200
        shown = await site.run("topology")
        assert shown.code == 0, shown.err
        (row,) = [line.split() for line in shown.out.splitlines() if " t03 " in line and "S1" in line]
        assert row == ["S1", "rack-1", "3", "t03", "4", "decode-1", "0-3"]
        assert "0-3 on t01, 4-7 on t02" in shown.out
        assert "nobody said: leaf of mlx5_0 of t03" in shown.out
        assert "nobody said: rack of t01, t02, t04, t05, t06 and 2 more" in shown.out
        told = json.loads((await site.run("topology", "--json")).out)
        assert next(n for n in told["nodes"] if n["node"] == "t03")["gpus"][PCIS[3]] == "GPU-3"
        assert next(w for w in told["workers"] if w["worker"] == "decode-1")["ranks"][0] == f"t03/gpu@{PCIS[0]}"

    async def test_explain_an_unknown_name_says_what_is_close(self, site: Site) -> None:
        """A misspelt name ends with 1 and names the right one."""
        ran = await site.run("explain", "decode1")
        assert ran.code == 1
        assert "decode-1" in ran.err


class TestActing:
    async def test_drain_with_wait_returns_when_it_is_out(self, site: Site) -> None:
        """--wait follows the drain until nothing is in flight; then 0."""
        site.serving.busy["decode-2"] = 1
        waiting = asyncio.create_task(site.run("drain", "decode-2", "--reason", "swap a cable", "--deadline", "2m", "--wait"))
        await until(lambda: site.serving.did("in_flight"), "the drain waits for what is in flight")
        await asyncio.sleep(0.1)
        assert not waiting.done()
        site.serving.busy["decode-2"] = 0
        ran = await waiting
        assert ran.code == 0, ran.err
        assert "decode-2: out" in ran.out

    async def test_undrain_brings_it_back(self, site: Site) -> None:
        """What a person took out comes back by their word."""
        assert (await site.run("drain", "decode-2", "--reason", "x", "--wait")).code == 0
        ran = await site.run("undrain", "decode-2", "--reason", "cable swapped")
        assert ran.code == 0, ran.err
        await until(lambda: site.serving.did("reroute") == ["decode-2"], "it gets traffic again")

    async def test_hold_and_release(self, site: Site) -> None:
        """A hold says until when, shows in status, and ends by release."""
        ran = await site.run("hold", "decode-1", "--in", "--reason", "demo day", "--for", "2h")
        assert ran.code == 0, ran.err
        assert "held in until" in ran.out
        assert "demo day" in (await site.run("status")).out
        assert (await site.run("release", "decode-1")).code == 0
        again = await site.run("release", "decode-1")
        assert again.code == 1
        assert "none" in again.err

    async def test_maintain_a_node(self, site: Site) -> None:
        """Said once: the worker leaves, what breaks meanwhile is shown and is no incident, and the end is one word."""
        ran = await site.run("maintain", "t03", "--for", "2h", "--reason", "new cable")
        assert ran.code == 0, ran.err
        assert "decode-1" in ran.out and "under maintenance until" in ran.out
        await until(lambda: "decode-1" in site.serving.did("deroute"), "it leaves")
        await break_decode_1(site)
        assert json.loads((await site.run("incidents", "--json")).out) == []
        for words in (("status",), ("explain", "t03"), ("explain", "decode-1")):
            told = await site.run(*words)
            assert "under maintenance" in told.out and "new cable" in told.out and "xid.79" in told.out, told
        ran = await site.run("maintain", "t03", "--end")
        assert (ran.code, "no more" in ran.out) == (0, True)
        again = await site.run("maintain", "t03", "--end")
        assert (again.code, "under maintenance are: none" in again.err) == (1, True)

    async def test_an_incident_is_acknowledged_and_resolved(self, site: Site) -> None:
        """Whoever is on it says so, and ends it by hand; an incident that is over cannot be ended again."""
        await break_decode_1(site)
        incident = json.loads((await site.run("incidents", "--open", "--json")).out)[0]["id"]
        ran = await site.run("acknowledge", incident)
        assert (ran.code, ran.out) == (0, f"{incident} is acknowledged\n")
        assert json.loads((await site.run("incidents", "--json")).out)[0]["paged"] == "acknowledged"
        assert (await site.run("resolve", incident)).code == 2
        ran = await site.run("resolve", incident, "--reason", "tray replaced")
        assert (ran.code, ran.out) == (0, f"{incident} is over\n")
        assert json.loads((await site.run("incidents", "--open", "--json")).out) == []
        assert (await site.run("resolve", incident, "--reason", "again")).code == 1

    async def test_nothing_drained_is_said(self, site: Site) -> None:
        """undrain of something that is in service says so and is no failure."""
        ran = await site.run("undrain", "decode-1", "--reason", "x")
        assert (ran.code, ran.out.strip()) == (0, "decode-1: nothing is drained there")


class TestFailing:
    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (("drain", "decode-1"), "--reason"), (("drain", "decode-1", "--reason", "x", "--deadline", "2"), "duration"),
            (("hold", "decode-1", "--reason", "x"), "--in or --out"), (("status", "--controller", "nonsense"), "http"),
            (("status", "--token-file", "/nowhere/token"), "/nowhere/token"), (("maintain", "t03", "--reason", "x"), "--for"),
            (("maintain", "t03", "--for", "2h"), "--reason"), (("maintain", "t03", "--end", "--for", "2h"), "--end"),
        ],
    )  # fmt: skip
    async def test_a_wrong_command_line_is_2(self, site: Site, words: tuple[str, ...], says: str) -> None:
        """Usage errors end with 2 and say what was wanted."""
        ran = await site.run(*words)
        assert ran.code == 2
        assert says in ran.err

    async def test_refused_is_1(self, site: Site) -> None:
        """A token nobody knows and a target nobody knows end with 1 and the controller's sentence."""
        ran = await site.run("drain", "decode1", "--reason", "x")
        assert (ran.code, "did you mean" in ran.err) == (1, True)
        site.token.write_text("wrong")
        ran = await site.run("status")
        assert (ran.code, "token" in ran.err) == (1, True)

    async def test_no_leader_is_3(self, site: Site) -> None:
        """Nobody there ends with 3 and says who was asked."""
        ran = await site.run("status", controllers="http://127.0.0.1:1")
        assert ran.code == 3
        assert "127.0.0.1:1" in ran.err

    async def test_a_standby_leads_to_the_leader(self, site: Site, server: RedisServer, tmp_path: Path) -> None:
        """Asked of a controller that stands by, or with a dead one named first, the command still reaches the leader."""
        store = await server.open()
        async with running_controller(
            store, tmp_path, fleet=rack(), decider=partial(Decider, default_policy()), name="c2"
        ) as (standby, _):
            for controllers in (standby.url, f"http://127.0.0.1:1 {standby.url}"):
                ran = await site.run("status", controllers=controllers)
                assert ran.code == 0, ran.err
                assert "leader c1" in ran.out
        await store.close()

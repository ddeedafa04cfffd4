"""The HTTP contracts: who may say what, what a bad body costs, and what an operator gets to see. Real Redis, real decider."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from sentinel.controller.api import BODY_MAX
from sentinel.controller.journal import read_journal
from sentinel.controller.seat import Controller
from sentinel.decide.decider import Decider
from sentinel.decide.rules.policy_file import default_policy, default_policy_text
from sentinel.decide.state.brief import Brief
from sentinel.decide.state.events import AnyEvent, AnyInstruction, PolicyLoaded, Reported
from sentinel.model import Action, Finding, Kind, Report, Severity, WorkerSeen, gpu_component
from sentinel.testing.control import Caller, PagerStandIn, RedisServer, ServingStandIn, running_controller, until
from sentinel.testing.decisions import PCIS, rack

NODES = ("t01", "t02", "t03", "t04", "t05", "t06", "t07", "t08")


class Site:
    """One controller with a rack around it."""

    def __init__(self, controller: Controller, caller: Caller, directory: Path) -> None:
        self.controller, self.caller, self.directory = controller, caller, directory
        self.serving, self.pager = ServingStandIn(), PagerStandIn()

    async def status(self) -> dict[str, Any]:
        status, body = await self.caller.get("/v1/status")
        assert status == 200
        return body

    async def metric(self, line: str) -> float:
        status, text = await self.caller.get("/metrics", who=None)
        assert status == 200
        return next(float(row.rsplit(" ", 1)[1]) for row in text.splitlines() if row.startswith(line + " "))

    def reported(self) -> list[Report]:
        """What the decider was told, in order."""
        return [e.event.report for e in read_journal(self.directory / "journal-c1") if isinstance(e.event, Reported)]

    async def send(self, report: Report, who: str | None = None) -> tuple[int, Any]:
        body = json.loads(msgspec.json.encode(report))
        return await self.caller.post("/v1/report", body, who=report.node if who is None else who)


@pytest_asyncio.fixture
async def site(program: Callable[[str], Path], tmp_path: Path) -> AsyncIterator[Site]:
    server = RedisServer(program("redis-server"))
    serving, pager = ServingStandIn(), PagerStandIn()
    try:
        await server.start()
        store = await server.open()
        async with running_controller(
            store, tmp_path, fleet=rack(), decider=partial(Decider, default_policy()), nodes=NODES, serving=serving, pager=pager
        ) as (controller, caller):
            await until(lambda: controller.term, "the controller leads")
            site = Site(controller, caller, tmp_path)
            site.serving, site.pager = serving, pager
            yield site
        await store.close()
    finally:
        server.close()


def report(seq: int, node: str = "t03", session: str = "s1", **fields: Any) -> Report:
    return Report(**{"node": node, "session": session, "seq": seq, "at": time.time(), "snapshot": True, **fields})


def off_bus(node: str = "t03", at: float | None = None) -> Finding:
    return Finding(
        id=f"{node}:1", check="xid.79", component=gpu_component(node, PCIS[0]), at=at or time.time(), kind=Kind.EVENT,
        severity=Severity.FATAL, action=Action.REBOOT_NODE, summary="GPU has fallen off the bus", evidence=("NVRM: Xid … 79",),
    )  # fmt: skip


class TestReports:
    async def test_everything_it_caused_is_durable_before_the_ack(self, site: Site) -> None:
        """A fatal finding is acknowledged after its drain, incident and route table are in place; the worker is out, one page."""
        status, ack = await site.send(report(1, findings=(off_bus(),)))
        watched = [[{"node": "t03", "device": f"gpu@{PCIS[0]}"}, "xid.79"]]
        assert (status, ack) == (200, {"session": "s1", "seq": 1, "same": 1, "watch": watched})
        status, routes = await site.caller.get("/v1/routes", who=None)
        assert status == 200
        assert {e["worker"]: e["state"] for p in routes["pools"] for e in p["workers"]}["decode-1"] == "out"
        await until(lambda: "decode-1" in site.serving.did("kill"), "the dead worker is stopped")
        await until(lambda: site.pager.pages, "a person is paged")
        assert len(site.pager.pages) == 1

    async def test_a_repeated_report_is_acknowledged_without_effect(self, site: Site) -> None:
        """The same seq again, and an older one, are Ack without reaching the decider; both at once count once."""
        first = report(1, findings=(off_bus(),))
        answers = await asyncio.gather(*(site.send(first) for _ in range(4)))
        assert {(status, ack["seq"], ack["same"]) for status, ack in answers} == {(200, 1, 1)}
        await site.send(report(2))
        assert (await site.send(report(1)))[1]["seq"] == 1
        assert [r.seq for r in site.reported()] == [1, 2]
        assert await site.metric('sentinel_reports_total{outcome="repeated"}') == 4

    async def test_a_gap_or_an_unknown_session_asks_for_a_snapshot(self, site: Site) -> None:
        """What came is taken, and the answer says that more is needed; a snapshot needs nothing more."""
        assert (await site.send(report(7, snapshot=False)))[1].get("want_snapshot") is True
        assert "want_snapshot" not in (await site.send(report(8, snapshot=False)))[1]
        assert (await site.send(report(10, snapshot=False)))[1].get("want_snapshot") is True
        assert "want_snapshot" not in (await site.send(report(20, snapshot=True)))[1]
        assert (await site.send(report(1, session="s2", snapshot=False)))[1].get("want_snapshot") is True
        assert [r.seq for r in site.reported()] == [7, 8, 10, 20, 1]

    @pytest.mark.parametrize("off", [3600.0, -3600.0])
    async def test_a_wrong_clock_is_heard_shown_and_not_believed(self, site: Site, off: float) -> None:
        """A report from the future or the past is taken with its findings' times set to arrival, counted, and visible."""
        began = time.time()
        finding = off_bus(at=began + off)
        assert (await site.send(report(1, at=began + off, findings=(finding,))))[0] == 200
        (heard,) = site.reported()
        assert began <= heard.findings[0].at <= time.time()
        node = next(n for n in (await site.status())["nodes"] if n["node"] == "t03")
        assert f"clock off by {off:+.0f} s" in node["clock"]
        assert await site.metric('sentinel_reports_total{outcome="clock_off"}') == 1
        await site.send(report(2))
        assert next(n for n in (await site.status())["nodes"] if n["node"] == "t03")["clock"] == ""

    async def test_one_finding_from_the_future_is_set_to_arrival(self, site: Site) -> None:
        """A clock that is right does not vouch for a single absurd time; old times are kept, for states last for days."""
        now = time.time()
        future, old = off_bus(at=now + 1e9), msgspec.structs.replace(off_bus(), id="t03:2", at=now - 86400)
        await site.send(report(1, findings=(future, old)))
        (heard,) = site.reported()
        assert heard.findings[0].at <= time.time()
        assert heard.findings[1].at == old.at

    async def test_workers_are_learned_before_anything_is_decided(self, site: Site) -> None:
        """What an agent says of its workers reaches the adapters with the report; of another node's workers it cannot speak."""
        mine, not_mine = WorkerSeen(worker="decode-1", instance="abc"), WorkerSeen(worker="decode-2", instance="evil")
        await site.send(report(1, workers=(mine, not_mine)))
        assert [w.instance for w in site.serving.learned] == ["abc"]


class TestJournal:
    async def test_it_replays_to_the_same_decisions(self, site: Site) -> None:
        """What the shell wrote, given to a fresh decider, gives every instruction again: explain and backtests stand on this."""
        await site.send(report(1, findings=(off_bus(),)))
        await site.caller.post("/v1/ask", {"verb": "drain", "target": "decode-2", "reason": "x"})
        await until(lambda: site.pager.pages and "decode-1" in site.serving.did("kill"), "effects end")
        await site.controller.stop()
        entries = list(read_journal(site.directory / "journal-c1"))
        again, brief = Decider(default_policy()), Brief()
        assert [e.instructions for e in entries] == [brief.of(e.event, again.handle(e.event)) for e in entries]
        assert sum(len(e.instructions) for e in entries) > 10

    async def test_a_changed_policy_is_an_event_of_the_same_leadership(self, site: Site) -> None:
        """A leadership begins with its rules; others join it by an event, show in status and metrics, and replay with it."""
        epoch = site.controller.epoch
        observe = default_policy_text().replace('mode = "enforce"', 'mode = "observe"', 1)
        await site.controller.reload(site.controller.fleet, observe)
        await site.send(report(1, findings=(off_bus(),)))
        assert site.controller.epoch == epoch
        assert (await site.caller.get("/v1/status"))[1]["mode"] == "observe"
        metrics = (await site.caller.get("/metrics", who=None))[1]
        assert 'sentinel_mode{mode="observe"} 1.0' in metrics and 'sentinel_mode{mode="enforce"} 0.0' in metrics
        assert site.serving.did("kill") == [] and not site.pager.pages
        await site.controller.stop()
        entries = list(read_journal(site.directory / "journal-c1"))
        told = [e.event.text for e in entries if isinstance(e.event, PolicyLoaded)]
        assert isinstance(entries[0].event, PolicyLoaded)
        assert told == [default_policy_text(), observe]
        again, brief = Decider(default_policy()), Brief()
        assert [e.instructions for e in entries] == [brief.of(e.event, again.handle(e.event)) for e in entries]


class TestBadReports:
    async def test_another_nodes_token_is_refused(self, site: Site) -> None:
        """A node's token speaks for that node only: 403, and nothing reaches the decider."""
        status, body = await site.send(report(1, node="t03", findings=(off_bus(),)), who="t04")
        assert status == 403
        assert "t04" in body["error"]
        assert site.reported() == []
        assert site.serving.did("kill") == []

    @pytest.mark.parametrize("who", ["", "ada", "nobody"])
    async def test_no_such_node_is_401(self, site: Site, who: str) -> None:
        """No token, an operator's token, and an unknown one are 401 with a sentence."""
        status, body = await site.caller.post("/v1/report", {}, who=who or None)
        assert status == 401
        assert body["error"]
        assert await site.metric('sentinel_reports_total{outcome="no_token"}') == 1

    @pytest.mark.parametrize(
        ("body", "says"),
        [
            (b"", "truncated"), (b'{"node":"t03","session":"s","se', "truncated"), (b"[]", "object"),
            (b'{"node":"t03","session":"s","seq":1}', "`at`"), (b"\xff\xfe\x00", "malformed"),
            (b'{"node":"t03","session":"s","seq":1,"at":1,"findings":[{"id":"x","check":"c","component":{"node":"t03"},"at":"now"}]}',
             "$.findings[0].at"),
            (b"[" * 100_000, ""),
        ],
        ids=["empty", "truncated", "array", "missing", "binary", "wrong type", "deep"],
    )  # fmt: skip
    async def test_what_is_no_report_is_400_with_the_place(self, site: Site, body: bytes, says: str) -> None:
        """Truncated or wrong JSON is one sentence with msgspec's path; the controller goes on."""
        status, answer = await site.caller.call("POST", "/v1/report", "t03", data=body)
        assert status == 400
        assert "not a report" in answer["error"]
        assert says in answer["error"]
        assert (await site.send(report(1)))[0] == 200

    async def test_an_oversized_report_is_413(self, site: Site) -> None:
        """A body past 4 MiB is refused without being read to its end into memory, and counted."""
        status, answer = await site.caller.call("POST", "/v1/report", "t03", data=b"x" * (BODY_MAX + 1))
        assert status == 413
        assert str(BODY_MAX) in answer["error"]
        assert await site.metric('sentinel_reports_total{outcome="too_large"}') == 1

    async def test_a_report_the_decider_fails_on_blames_the_content(self, site: Site) -> None:
        """A bug in the decider answers 422, on which an agent isolates the finding; the report can be sent again."""
        term = site.controller.term
        assert term is not None
        handle = term.core.decider.handle

        def failing(event: AnyEvent) -> list[AnyInstruction]:
            return handle(event) if not isinstance(event, Reported) else [1 // 0]  # type: ignore[list-item]

        term.core.decider.handle = failing  # type: ignore[method-assign]
        status, body = await site.send(report(1))
        term.core.decider.handle = handle  # type: ignore[method-assign]
        assert status == 422
        assert "ZeroDivisionError" in body["error"]
        assert (await site.send(report(1)))[0] == 200


    async def test_a_full_queue_is_503_with_retry_after(self, site: Site) -> None:
        """More than fits is pushed back to the agent, counted, and taken once there is room."""
        term = site.controller.term
        assert term is not None
        term.core._capacity = 0
        status, body = await site.send(report(1))
        assert status == 503
        assert body["error"]
        assert await site.metric('sentinel_reports_total{outcome="busy"}') == 1
        term.core._capacity = 10
        assert (await site.send(report(1)))[0] == 200


class TestCommands:
    async def test_a_command_goes_to_its_agent_and_its_result_back(self, site: Site) -> None:
        """Offered on the long poll of its node, ended by the result; another node may neither fetch nor answer it."""
        desk = site.controller._desk
        run = asyncio.create_task(desk.run("t03", "reset_gpu", {"gpu": PCIS[0]}, key="k1", why="test", deadline_s=30))
        status, found = await site.caller.get("/v1/commands?node=t03&wait=20", who="t03")
        assert status == 200
        assert [(c["id"], c["action"]) for c in found] == [("k1", "reset_gpu")]
        assert (await site.caller.get("/v1/commands?node=t03&wait=0", who="t04"))[0] == 403
        result = {"id": "k1", "node": "t03", "ok": True}
        assert (await site.caller.post("/v1/results", result, who="t04"))[0] == 403
        assert (await site.caller.post("/v1/results", result, who="t03"))[0] == 204
        assert (await run).ok

    async def test_a_wait_that_is_no_number_is_400(self, site: Site) -> None:
        """The wait is checked like everything else that comes in."""
        status, body = await site.caller.get("/v1/commands?node=t03&wait=nan", who="t03")
        assert status == 400
        assert "wait" in body["error"]


class TestOperators:
    async def test_ask_drains_and_the_drain_can_be_followed(self, site: Site) -> None:
        """The answer names the event and the drain; the drain can be read until it is out; explain tells who and why."""
        status, body = await site.caller.post("/v1/ask", {"verb": "drain", "target": "decode-2", "reason": "swap a cable"})
        assert status == 200
        (drain,) = body["drains"]
        assert drain["worker"] == "decode-2"

        async def state() -> str:
            return (await site.caller.get(f"/v1/drains/{drain['id']}"))[1].get("state", "requested")

        async with asyncio.timeout(10):
            while await state() != "out":
                await asyncio.sleep(0.01)
        status, told = await site.caller.get("/v1/explain/decode-2")
        assert status == 200
        assert "swap a cable" in json.dumps(told)
        assert body["event"] in json.dumps(told)

    @pytest.mark.parametrize("verb", ["drain", "undrain", "hold"])
    @pytest.mark.parametrize(
        ("target", "close"), [("decode2", "decode-2"), ("t0", "t0"), ("t03/gpu@0008:01:00.1", "t03/gpu@0008:01:00.0")]
    )
    async def test_an_unknown_target_is_404_with_close_names(self, site: Site, verb: str, target: str, close: str) -> None:
        """A misspelt worker, node or GPU changes nothing and names what it may have meant."""
        status, body = await site.caller.post("/v1/ask", {"verb": verb, "target": target, "reason": "test"})
        assert status == 404
        assert repr(target) in body["error"]
        assert close in body["error"].split(";")[1]

    async def test_a_gpu_and_a_node_are_targets(self, site: Site) -> None:
        """A GPU drains its whole serving group; a node drains every group on it, over both trays."""
        status, body = await site.caller.post("/v1/ask", {"verb": "drain", "target": "t03/gpu@PCI:00000009:01:00", "reason": "x"})
        assert (status, [d["worker"] for d in body["drains"]]) == (200, ["decode-1"])
        status, body = await site.caller.post("/v1/ask", {"verb": "drain", "target": "t02", "reason": "x"})
        assert (status, [d["worker"] for d in body["drains"]]) == (200, ["prefill-1"])

    @pytest.mark.parametrize(
        ("body", "says"),
        [
            ({"verb": "drain", "target": "decode-1"}, "reason"), ({"verb": "drain", "target": "", "reason": "x"}, "target"),
            ({"verb": "explode", "target": "decode-1", "reason": "x"}, "$.verb"),
            ({"verb": "drain", "target": "decode-1", "reason": "x", "deadline": 5}, "deadline"),
            ({"verb": "drain", "target": "decode-1", "reason": "x", "deadline_s": -1}, "deadline_s"),
            ({"verb": "hold", "target": "decode-1", "reason": "x", "until": 5.0}, "until"),
            ({"verb": "hold", "target": "decode-1", "reason": "x" * 501}, "reason"),
            ({"verb": "maintain", "target": "t03", "lasts_s": 60}, "reason"),
            ({"verb": "maintain", "target": "t03", "reason": "x"}, "must end by itself"),
            ({"verb": "maintain", "target": "t03", "reason": "x", "lasts_s": 8 * 86400}, "7 days at most"),
            ({"verb": "maintain", "target": "t03", "end": True, "lasts_s": 60}, "wanted either"),
            ({"verb": "drain", "target": "t03", "reason": "x", "end": True}, "of maintain"),
        ],
    )  # fmt: skip
    async def test_a_request_that_makes_no_sense_is_400(self, site: Site, body: dict[str, Any], says: str) -> None:
        """The sentence names the key; nothing is decided."""
        status, answer = await site.caller.post("/v1/ask", body)
        assert status == 400
        assert says in answer["error"]
        assert (await site.status())["drains"] == []

    async def test_maintain_works_on_whole_nodes_and_racks(self, site: Site) -> None:
        """A worker, a misspelt name and a window that is not there are 404; a long one needs force; nothing else is touched."""
        for target, says in (("decode-1", "neither a node nor a rack"), ("t0", "no node or rack"), ("rack-9", "no node or rack")):
            status, body = await site.caller.post("/v1/ask", {"verb": "maintain", "target": target, "reason": "x", "lasts_s": 60})
            assert (status, says in body["error"]) == (404, True), body
        status, body = await site.caller.post("/v1/ask", {"verb": "maintain", "target": "t03", "end": True})
        assert (status, "not under maintenance" in body["error"]) == (404, True)
        ask = {"verb": "maintain", "target": "t03", "reason": "x", "lasts_s": 8 * 86400, "force": True}
        status, body = await site.caller.post("/v1/ask", ask)
        assert (status, [d["worker"] for d in body["drains"]]) == (200, ["decode-1"])
        (held,) = (await site.status())["holds"]
        assert (held["target"], held["planned"], held["keep"]) == ("t03", True, "out")

    async def test_a_hold_outranks_and_can_be_lifted(self, site: Site) -> None:
        """Held in, a doubtful fault drains nothing; the hold is listed, and release takes it away; twice is 404."""
        assert (await site.caller.post("/v1/ask", {"verb": "hold", "target": "decode-1", "reason": "demo", "keep": "in"}))[0] == 200
        assert [h["target"] for h in (await site.status())["holds"]] == ["decode-1"]
        await site.send(report(1, findings=(off_bus(),)))
        assert (await site.status())["drains"] == []
        assert (await site.caller.post("/v1/ask", {"verb": "release", "target": "decode-1"}))[0] == 200
        assert (await site.status())["holds"] == []
        status, body = await site.caller.post("/v1/ask", {"verb": "release", "target": "decode-1"})
        assert status == 404
        assert "none" in body["error"]

    async def test_incidents_can_be_listed_acknowledged_and_explained(self, site: Site) -> None:
        """An incident is found by its id; acknowledging reaches the pager under the same dedup key."""
        await site.send(report(1, findings=(off_bus(),)))
        (incident,) = (await site.caller.get("/v1/incidents"))[1]
        assert (await site.caller.get(f"/v1/explain/{incident['id']}"))[0] == 200
        assert (await site.caller.post("/v1/ask", {"verb": "acknowledge", "target": incident["id"]}))[0] == 200
        await until(lambda: [p.event for p in site.pager.pages] == ["trigger", "acknowledge"], "both pages")
        assert len({p.dedup_key for p in site.pager.pages}) == 1
        assert (await site.caller.post("/v1/ask", {"verb": "acknowledge", "target": "inc-9"}))[0] == 404

    @pytest.mark.parametrize("path", ["/v1/status", "/v1/incidents", "/v1/explain/t01", "/v1/drains/d"])
    async def test_a_nodes_token_is_not_an_operators(self, site: Site, path: str) -> None:
        """Everything of the operators needs an operator's token."""
        assert (await site.caller.get(path, who="t01"))[0] == 401

    async def test_unknown_things_are_404_with_a_sentence(self, site: Site) -> None:
        """A drain, a target, a runbook and a path that are not there each say so in JSON."""
        for path in ("/v1/drains/none", "/v1/explain/none", "/runbooks/none", "/runbooks/..%2f..%2fpyproject.toml", "/nothing"):
            status, body = await site.caller.get(path)
            assert status == 404, path
            assert body["error"], path


class TestAnyone:
    async def test_metrics_and_health_need_no_token(self, site: Site) -> None:
        """Counters that alerts use are there at 0; who leads, workers and capacity are told."""
        assert (await site.caller.get("/healthz", who=None))[1]["role"] == "leader"
        assert await site.metric("sentinel_leader") == 1
        assert await site.metric('sentinel_reports_total{outcome="wrong_node"}') == 0
        assert await site.metric('sentinel_drains_total{outcome="cancelled",response="evict"}') == 0
        assert await site.metric('sentinel_workers{pool="main",role="decode",state="active"}') == 4
        assert await site.metric('sentinel_pool_capacity_ratio{pool="main",role="decode"}') == 1
        await site.send(report(1, findings=(off_bus(),)))
        assert await site.metric('sentinel_workers{pool="main",role="decode",state="out"}') == 1
        assert await site.metric('sentinel_pool_capacity_ratio{pool="main",role="decode"}') == 0.75
        assert await site.metric('sentinel_incidents_open{fault="gpu-off-bus",severity="fatal"}') == 1
        assert await site.metric('sentinel_budget_blocked{pool="main",role="decode"}') == 0

    async def test_a_runbook_is_plain_markdown(self, site: Site) -> None:
        """The link in a page leads to text."""
        status, text = await site.caller.get("/runbooks/gpu-off-bus", who=None)
        assert status == 200
        assert text.startswith("#")


class TestSecureByDefault:
    async def test_without_token_files_nobody_changes_anything(self, program: Callable[[str], Path], tmp_path: Path) -> None:
        """No token file means nobody is let in; the sentence says which key is missing."""
        server = RedisServer(program("redis-server"))
        try:
            await server.start()
            store = await server.open()
            off = {"node_tokens": None, "operator_tokens": None}
            async with running_controller(
                store, tmp_path, fleet=rack(), decider=partial(Decider, default_policy()), settings=off
            ) as (controller, caller):
                await until(lambda: controller.term, "the controller leads")
                for path, body in (("/v1/report", {}), ("/v1/results", {}), ("/v1/ask", {})):
                    status, answer = await caller.post(path, body, who="t01")
                    assert status == 401
                    assert "_tokens" in answer["error"]
                assert (await caller.get("/v1/status"))[0] == 401
            await store.close()
        finally:
            server.close()


class TestStandby:
    async def test_it_names_the_leader(self, program: Callable[[str], Path], tmp_path: Path) -> None:
        """A controller that stands by answers 421 with the leader's address, does nothing, and takes over when asked to."""
        server = RedisServer(program("redis-server"))
        decider = partial(Decider, default_policy())
        try:
            await server.start()
            first, second = await server.open(), await server.open()
            async with running_controller(first, tmp_path, fleet=rack(), decider=decider, nodes=NODES) as (leader, caller):
                await until(lambda: leader.term, "the first controller leads")
                async with running_controller(
                    second, tmp_path, fleet=rack(), decider=decider, nodes=NODES, name="c2"
                ) as (standby, other):
                    body = {"verb": "drain", "target": "decode-1", "reason": "x"}
                    status, answer = await other.post("/v1/ask", body)
                    assert (status, answer["leader"]) == (421, leader.url)
                    status, answer = await other.post("/v1/report", {}, who="t01")
                    assert (status, answer["leader"]) == (421, leader.url)
                    assert (await other.get("/healthz", who=None))[1]["role"] == "standby"
                    assert (await caller.post("/v1/ask", body))[0] == 200
                    poll = asyncio.create_task(caller.get("/v1/commands?node=t01&wait=50", who="t01"))
                    await asyncio.sleep(0.05)
                    await leader.stop()
                    await until(lambda: standby.term, "the second controller leads")
                    assert (await other.get("/v1/status"))[1]["drains"][0]["worker"] == "decode-1"
                    async with asyncio.timeout(10):
                        await asyncio.gather(poll, return_exceptions=True)
            await first.close()
            await second.close()
        finally:
            server.close()

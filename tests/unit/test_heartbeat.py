"""Heartbeats on both ends: what they carry, what they cost, how a busy controller is left alone. Real decider, real HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from aiohttp import web

from sentinel.agent.known import Known
from sentinel.agent.link import Link
from sentinel.agent.reporter import Reporter
from sentinel.agent.spool import Spool
from sentinel.agent.told import FULL_S, Told
from sentinel.config import AgentSettings
from sentinel.controller.core import Busy
from sentinel.controller.ingest import CLOCK_LIMIT, SNAPSHOTS_AT_ONCE, Ingest
from sentinel.controller.journal import read_journal
from sentinel.controller.metrics import Metrics
from sentinel.controller.seat import Controller
from sentinel.decide.decider import Decider
from sentinel.decide.replay import prove
from sentinel.decide.rules.policy_file import default_policy
from sentinel.decide.state.events import AnyEvent, AnyInstruction, Heard, Reported
from sentinel.model import Ack, Action, Component, Finding, Kind, Place, Report, Severity, WorkerSeen, gpu_component
from sentinel.testing.control import Caller, RedisServer, running_controller, until
from sentinel.testing.decisions import PCIS, World, rack

GPU = gpu_component("t03", PCIS[0])


def state(at: float, present: bool = False, check: str = "gpu.broken", component: Component = GPU, **more: Any) -> Finding:
    weight: dict[str, Any] = {"severity": Severity.FATAL, "action": Action.RESET_GPU} if present else {}
    return Finding(id=f"{component}:{check}", check=check, component=component, at=at, present=present, **weight, **more)


def line(n: int, at: float = 1.0) -> Finding:
    return Finding(id=f"e{n}", check="xid.13", component=GPU, at=at, kind=Kind.EVENT, severity=Severity.WARNING)


# --- the agent's half ----------------------------------------------------------------------------------------------------


class Node:
    """One agent's ``Told`` and an obliging controller."""

    def __init__(self) -> None:
        self.known = Known()
        self.probes: dict[str, bool | None] = {"gpu": True}
        self.place: Place | None = Place(chassis="c1", tray=3)
        self.told = Told(self.known, probes=lambda: dict(self.probes), place=lambda: self.place)
        self.now, self.seq, self.same = 10.0, 0, 0
        self.watch: tuple[tuple[Component, str], ...] = ()

    def report(self) -> Report:
        blank = Report(node="t03", session="s", seq=self.seq, at=self.now, boot_id="b" * 36, version="1.0")
        return self.told.report(blank, self.now)

    def beat(self, **ack: Any) -> Report:
        """A report that arrives, and its answer."""
        self.seq += 1
        self.now += 5
        report = self.report()
        self.same = report.seq if report.snapshot else self.same
        self.told.heard(Ack(**{"session": "s", "seq": self.seq, "same": self.same, "watch": self.watch, **ack}))
        self.told.taken()
        return report

    def measure(self, *findings: Finding) -> None:
        self.known.take("gpu", findings)


class TestTold:
    def test_a_node_that_is_as_it_was_says_so_in_a_line(self) -> None:
        """Three hundred fine states, measured anew each time, are one snapshot and then a hundred bytes a heartbeat."""
        node = Node()
        node.known.take_workers("worker", [{"worker": "decode-1", "gpus": list(PCIS), "running": 1}])
        sizes = []
        for n in range(20):
            node.measure(*(state(node.now, check=f"gpu.check_{i}") for i in range(300)))
            node.known.take_workers("worker", [{"worker": "decode-1", "gpus": list(PCIS), "running": n, "progress": 10.0 * n}])
            sizes.append(len(msgspec.json.encode(node.beat())))
        assert sizes[0] > 10_000
        assert max(sizes[1:]) < 100

    def test_what_changes_is_told_and_nothing_else(self) -> None:
        """A state that turns, a probe that fails, a worker that restarts and a place that is learned: each once."""
        node = Node()
        node.measure(state(1.0), state(1.0, check="gpu.other"))
        node.beat()
        node.measure(state(2.0, present=True), state(2.0, check="gpu.other"))
        assert [(f.check, f.present) for f in node.beat().findings] == [("gpu.broken", True)]
        node.probes["gpu"] = False
        assert node.beat().probes == {"gpu": False}
        node.place = Place(chassis="c1", tray=4)
        assert node.beat().place == node.place
        node.known.take_workers("worker", [{"worker": "decode-1", "pid": 7}])
        assert node.beat().workers == (WorkerSeen(worker="decode-1", pid=7),)
        last = node.beat()
        assert (last.findings, last.probes, last.place, last.workers) == ((), {}, None, ())

    def test_only_what_is_measured_again_is_told_again(self) -> None:
        """A bad state is told with each measurement; when its probe has stopped, heartbeats do not make it fresh."""
        node = Node()
        node.beat()
        node.measure(state(1.0, present=True))
        assert [f.at for f in node.beat().findings] == [1.0]
        node.measure(state(2.0, present=True))
        assert [f.at for f in node.beat().findings] == [2.0]
        assert node.beat().findings == ()

    def test_what_the_controller_watches_is_told_while_fine(self) -> None:
        """A fine state that it counts samples of goes with every heartbeat that has measured it; others do not."""
        node = Node()
        node.watch = ((GPU, "gpu.broken"),)
        node.measure(state(1.0), state(1.0, check="gpu.other"))
        node.beat()
        for at in (2.0, 3.0):
            node.measure(state(at), state(at, check="gpu.other"))
            assert [(f.check, f.at, f.present) for f in node.beat().findings] == [("gpu.broken", at, False)]
        assert node.beat().findings == ()

    def test_everything_comes_again_when_asked_and_now_and_then(self) -> None:
        """A wish for a snapshot is one; so are five minutes; so is every report to a controller that does not know heartbeats."""
        node = Node()
        node.measure(state(1.0))
        assert node.beat().snapshot
        assert not node.beat(want_snapshot=True).snapshot
        assert node.beat().snapshot
        node.now += FULL_S
        assert node.beat().snapshot
        assert not node.beat(same=0).snapshot
        assert all(node.beat(same=0).snapshot for _ in range(3))

    def test_after_a_retry_nothing_is_taken_for_told(self) -> None:
        """Which of two attempts arrived cannot be known: what either carried is told again."""
        node = Node()
        node.beat()
        node.measure(state(1.0, present=True))
        node.report()
        node.measure(state(2.0, present=True))
        assert [f.at for f in node.beat().findings] == [2.0]
        assert [f.at for f in node.beat().findings] == [2.0], "told again, since it may have been the first that arrived"
        assert node.beat().findings == ()


# --- the controller's half -----------------------------------------------------------------------------------------------


class Leader:
    """An ingest before a real decider; ``events`` is what that was told."""

    def __init__(self) -> None:
        self.world, self.metrics = World(rack()), Metrics()
        self.events: list[AnyEvent] = []
        numbers = itertools.count()
        self.ingest = Ingest(
            submit=self._submit, new_id=lambda: f"in{next(numbers)}", metrics=self.metrics,
            own=lambda node, component: component.node == node, watch=self.world.decider.watch, clock=lambda: self.world.now,
            monotonic=lambda: 0.0,  # no room for snapshots comes back while a test runs
        )  # fmt: skip

    def _submit(self, event: AnyEvent) -> asyncio.Future[list[AnyInstruction]]:
        self.events.append(event)
        future: asyncio.Future[list[AnyInstruction]] = asyncio.get_running_loop().create_future()
        future.set_result(self.world.handle(event))
        self.world.settle()
        return future

    async def take(self, seq: int, *findings: Finding, same: int = 0, at: float | None = None, **more: Any) -> Ack:
        self.world.now += 5
        told = self.world.now if at is None else at
        report = Report(node="t03", session="s", seq=seq, at=told, same=same, snapshot=not same, findings=findings)
        return await self.ingest.take(msgspec.structs.replace(report, **more))

    def passed_on(self) -> list[Finding]:
        return [f for e in self.events if isinstance(e, Reported) for f in e.report.findings]


class TestIngest:
    async def test_heartbeats_without_a_word_are_one_event(self) -> None:
        """They are acknowledged at once, and their nodes are heard of together; silence ends with them."""
        leader = Leader()
        await leader.take(1)
        for seq in (2, 3, 4):
            assert (await leader.take(seq, same=1)).same == 1
        assert [type(e) for e in leader.events] == [Reported]
        leader.ingest.tell()
        leader.ingest.tell()
        assert [e.nodes for e in leader.events if isinstance(e, Heard)] == [("t03",)]
        assert leader.world.decider.p.nodes["t03"].heard_at == leader.world.now

    async def test_fine_states_that_were_never_bad_are_not_passed_on(self) -> None:
        """Of three hundred of them the decider and the journal see none; of one that was bad, each measurement."""
        leader = Leader()
        await leader.take(1, *(state(1.0, check=f"gpu.check_{i}") for i in range(300)), state(1.0))
        assert leader.passed_on() == []
        ack = await leader.take(2, state(2.0, present=True), same=1)
        assert ack.watch == ((GPU, "gpu.broken"),)
        await leader.take(3, state(3.0), same=1)
        assert [f.at for f in leader.passed_on()] == [2.0, 3.0]

    async def test_a_state_that_turns_twice_within_one_report_is_passed_on_whole(self) -> None:
        """An agent that was cut off sends what it spooled in one report: bad, then fine again."""
        leader = Leader()
        await leader.take(1)
        await leader.take(2, state(2.0, present=True), state(3.0), same=1)
        assert [(f.at, f.present) for f in leader.passed_on()] == [(2.0, True), (3.0, False)]

    async def test_one_measurement_is_one_sample(self) -> None:
        """Told in the news, in two snapshots and by an agent that knows no heartbeats, it still counts once: no drain from it."""
        leader = Leader()
        bad = state(1.0, present=True)
        await leader.take(1, bad, snapshot=False)
        for seq in (2, 3, 4):
            await leader.take(seq, bad)
        assert leader.world.drain_of("decode-1") is None
        await leader.take(5, state(2.0, present=True))
        assert leader.world.drain_of("decode-1") is not None

    async def test_a_heartbeat_upon_nothing_asks_for_a_snapshot_until_it_comes(self) -> None:
        """A new leader asks, and asks again when its first answer was lost; what the heartbeat said is taken all the same."""
        leader = Leader()
        bad = state(1.0, present=True)
        assert (await leader.take(7, bad, same=3)).want_snapshot
        assert (await leader.take(7, bad, same=3)).want_snapshot, "the answer was lost: the same report again"
        assert (await leader.take(8, same=3)).want_snapshot
        ack = await leader.take(9)
        assert (ack.want_snapshot, ack.same) == (False, 9)
        assert leader.passed_on() == [bad]

    async def test_a_new_leader_asks_for_no_more_snapshots_than_it_can_take(self) -> None:
        """Of many nodes at once a few are asked; the others' heartbeats go on upon what they have until it is their turn."""
        leader = Leader()
        acks = [
            await leader.ingest.take(Report(node=f"n{i}", session="s", seq=9, at=leader.world.now, same=4))
            for i in range(SNAPSHOTS_AT_ONCE + 20)
        ]
        assert sum(a.want_snapshot for a in acks) == SNAPSHOTS_AT_ONCE
        assert {a.same for a in acks} == {4}

    async def test_a_snapshot_that_nobody_asked_for_is_turned_away_unread(self) -> None:
        """Beyond the bound; its node is heard of all the same, news is taken, and one that was asked for is, too."""
        leader = Leader()
        asked = Report(node="asked", session="s", seq=9, at=leader.world.now, same=4)
        assert (await leader.ingest.take(asked)).want_snapshot
        leader.ingest._room = 0.0
        snapshot = partial(Report, session="s", seq=10, at=leader.world.now, snapshot=True)
        with pytest.raises(Busy):
            leader.ingest.admitted("t03", msgspec.json.encode(snapshot(node="t03")))
        leader.ingest.tell()
        assert [e.nodes for e in leader.events if isinstance(e, Heard)] == [("t03",)]
        news = Report(node="t03", session="s", seq=1, at=1.0, findings=(line(1),))
        assert leader.ingest.admitted("t03", msgspec.json.encode(news)) == news
        assert leader.ingest.admitted("asked", msgspec.json.encode(snapshot(node="asked"))).snapshot

    async def test_what_is_not_its_own_is_left_out_of_heartbeats(self) -> None:
        """A heartbeat speaks of its node only; a fine state of another node's clears nothing there."""
        leader = Leader()
        other = gpu_component("t04", PCIS[0])
        await leader.take(1)
        await leader.take(2, state(1.0, present=True, component=other), state(2.0, component=other), same=1)
        assert leader.passed_on() == []
        assert leader.metrics.registry.get_sample_value("sentinel_reports_total", {"outcome": "foreign"}) == 2

    @pytest.mark.parametrize("off", [7200.0, -7200.0])
    async def test_a_clock_off_by_hours_changes_nothing_but_the_times(self, off: float) -> None:
        """Its measurements still count once each, with the time of arrival, and a clock that is set right is news once."""
        leader = Leader()
        now = leader.world.now
        await leader.take(1, at=now + off)
        for seq in (2, 3, 4):
            await leader.take(seq, state(now + off, present=True), same=1, at=leader.world.now + 5 + off)
        (passed,) = leader.passed_on()
        assert abs(passed.at - leader.world.now) < CLOCK_LIMIT
        assert leader.world.drain_of("decode-1") is None
        before = len(leader.events)
        await leader.take(5, same=1)
        await leader.take(6, same=1)
        assert [type(e) for e in leader.events[before:]] == [Reported]


# --- both halves, over HTTP ----------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def site(program: Callable[[str], Path], tmp_path: Path) -> AsyncIterator[tuple[Controller, Caller]]:
    server = RedisServer(program("redis-server"))
    try:
        await server.start()
        store = await server.open()
        nodes = [f"t{n:02d}" for n in range(1, 9)]
        async with running_controller(
            store, tmp_path, fleet=rack(), decider=partial(Decider, default_policy()), nodes=nodes
        ) as (controller, caller):
            await until(lambda: controller.term, "the controller leads")
            yield controller, caller
        await store.close()
    finally:
        server.close()


async def send(caller: Caller, report: Report) -> tuple[int, Any]:
    return await caller.post("/v1/report", json.loads(msgspec.json.encode(report)), who=report.node)


class TestController:
    async def test_what_is_journaled_of_heartbeats_replays(self, site: tuple[Controller, Caller], tmp_path: Path) -> None:
        """Snapshots without their fine states, and heartbeats many to an event, prove to the letter."""
        controller, caller = site
        now = time.time()
        fine = tuple(state(now, check=f"gpu.check_{i}") for i in range(100))
        for seq in range(1, 6):
            more: dict[str, Any] = {"snapshot": True, "findings": fine} if seq == 1 else {"same": 1}
            status, _ = await send(caller, Report(node="t03", session="s", seq=seq, at=now, **more))
            assert status == 200
        bad = (line(1, now), state(now, present=True))
        await send(caller, Report(node="t03", session="s", seq=6, at=now, same=1, findings=bad))
        folder = tmp_path / "journal-c1"
        await until(lambda: any(isinstance(e.event, Heard) for e in read_journal(folder)), "the heartbeats are journaled")
        await controller.stop()
        entries = list(read_journal(folder))
        reports = [e.event.report for e in entries if isinstance(e.event, Reported)]
        assert not any(f.check.startswith("gpu.check") for r in reports for f in r.findings)
        assert prove(entries, partial(Decider, default_policy())).same

    async def test_a_burst_through_a_narrow_queue_loses_nothing(self, site: tuple[Controller, Caller], tmp_path: Path) -> None:
        """Ten thousand findings at once, most turned away at first: every one is decided on once, and in its node's order."""
        controller, caller = site
        assert controller.term
        controller.term.core._capacity = 2
        turned_away = 0

        async def node(name: str) -> None:
            nonlocal turned_away
            for seq in range(1, 26):
                numbers, gpu = range(seq * 50, seq * 50 + 50), gpu_component(name, PCIS[0])
                found = tuple(msgspec.structs.replace(line(n), id=f"{name}:{n}", component=gpu) for n in numbers)
                while (await send(caller, Report(node=name, session="s", seq=seq, at=1.0, findings=found)))[0] == 503:
                    turned_away += 1
                    await asyncio.sleep(0.002)

        await asyncio.gather(*(node(f"t{n:02d}") for n in range(1, 9)))
        await controller.stop()
        told: dict[str, list[int]] = {}
        for entry in read_journal(tmp_path / "journal-c1"):
            for f in entry.event.report.findings if isinstance(entry.event, Reported) else ():
                name, _, number = f.id.partition(":")
                told.setdefault(name, []).append(int(number))
        assert turned_away
        assert told == {f"t{n:02d}": list(range(50, 1300)) for n in range(1, 9)}


class TestBusy:
    @pytest.fixture
    def spool(self, tmp_path: Path) -> Iterator[Spool]:
        spool = Spool(tmp_path / "spool", 1 << 20)
        yield spool
        spool.close()

    async def test_a_heartbeat_that_is_turned_away_lets_the_news_go_first(self, spool: Spool) -> None:
        """No number is lost by it, and nothing waits behind it; news that is turned away comes again, in order."""
        taken: list[Report] = []
        busy = {"heartbeats": True, "news": 0}

        async def answer(request: web.Request) -> web.Response:
            report = msgspec.json.decode(await request.read(), type=Report)
            turned = busy["heartbeats"] if not report.findings else busy["news"] > 0
            if turned:
                busy["news"] -= bool(report.findings)
                return web.json_response({"error": "busy", "busy": True}, status=503, headers={"Retry-After": "0"})
            taken.append(report)
            return web.Response(body=msgspec.json.encode(Ack(session=report.session, seq=report.seq)))

        app = web.Application()
        app.add_routes([web.post("/v1/report", answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as http:
            settings = AgentSettings(node="t03", controllers=(f"http://127.0.0.1:{runner.addresses[0][1]}",))
            reporter = Reporter(
                "t03", Link(settings, http), spool, Known(), probes=dict, clock=time.time, flush=lambda: None, snapshot_s=0.05
            )
            task = asyncio.create_task(reporter.run())
            await until(lambda: reporter.trouble, "heartbeats are turned away")
            busy["news"] = 2
            spool.add([line(1), line(2)])
            reporter.wake()
            await until(lambda: len(taken) == 1, "the news is taken")
            spool.add([line(3)])
            reporter.wake()
            await until(lambda: len(taken) == 2, "more news is taken")
            busy["heartbeats"] = False
            await until(lambda: len(taken) == 3, "a heartbeat is taken")
            task.cancel()
        await runner.cleanup()
        assert [f.id for r in taken for f in r.findings] == ["e1", "e2", "e3"]
        assert [r.seq for r in taken] == [1, 2, 3]

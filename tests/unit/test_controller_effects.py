"""Effects: each verb reaches the world once, in order within its lane, and every outcome becomes a Done."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from sentinel.controller import effects as module
from sentinel.controller.commands import CommandDesk
from sentinel.controller.core import SteppedDown
from sentinel.controller.effects import Effects
from sentinel.decide.state.events import (
    AnyInstruction,
    AwaitIdle,
    Deroute,
    Done,
    Look,
    Repair,
    Reroute,
    SendPage,
    StartWorker,
    StopWorker,
    Verify,
)
from sentinel.model import Action, CommandResult, Page, Worker
from sentinel.paging import PagerError
from sentinel.serving import AdapterError
from sentinel.testing.control import PagerStandIn, ServingStandIn, until

NOW = 1000.0


class World:
    """Effects with stand-ins around them; ``dones`` are the events they ended in."""

    def __init__(self) -> None:
        self.serving, self.pager, self.desk = ServingStandIn(), PagerStandIn(), CommandDesk()
        self.dones: list[Done] = []
        self.leading, self.now = True, NOW
        self.gate: asyncio.Event | None = None  # a commit that takes its time
        workers = {"w": Worker(name="w", pool="p", url="http://w", nodes=("t01",))}
        numbers = itertools.count()
        self.effects = Effects(
            serving=self.serving, hands=self.desk, pager=self.pager, worker=workers.get, look=self._look, done=self._done,
            valid=lambda: self.leading, new_id=lambda: f"ev-{next(numbers)}", runbooks="http://c1/runbooks", clock=lambda: self.now,
        )  # fmt: skip

    async def _look(self, worker: Worker) -> bool | None:
        return await self.serving.look(worker) is not None

    async def _done(self, done: Done) -> list[AnyInstruction]:
        if self.gate:
            await self.gate.wait()
        if not self.leading:
            raise SteppedDown
        self.dones.append(done)
        return []

    async def end_of(self, *effects: Any) -> Done:
        """Carry out effects and return the Done of the last one."""
        self.effects.begin(effects)
        await until(lambda: [d for d in self.dones if d.instruction == effects[-1].id], f"{effects[-1]} ends")
        return next(d for d in self.dones if d.instruction == effects[-1].id)


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.effects.close()


def of(kind: type, number: int = 0, lane: str = "worker:w", **fields: Any) -> Any:
    return kind(id=f"d{number}/{kind.__name__.lower()}/0", cause="ev", lane=lane, why="test", **fields)


class TestVerbs:
    @pytest.mark.parametrize(
        ("kind", "fields", "verb"),
        [
            (Deroute, {}, "deroute"), (Reroute, {}, "reroute"), (StopWorker, {}, "stop"), (StopWorker, {"hard": True}, "kill"),
            (StartWorker, {}, "start"), (Verify, {"deadline_s": 1.0}, "verify"), (Look, {}, "look"),
            (AwaitIdle, {"until": NOW}, "in_flight"),
        ],
    )  # fmt: skip
    async def test_each_reaches_its_verb(self, world: World, kind: type, fields: dict[str, Any], verb: str) -> None:
        """Every kind of effect is carried out by its own verb on its own worker and ends well."""
        done = await world.end_of(of(kind, worker="w", **fields))
        assert done.ok is True
        assert world.serving.did(verb) == ["w"]

    async def test_a_second_try_keeps_the_key(self, world: World) -> None:
        """What stands after # in an effect's id is not part of the idempotency key that adapters and agents see."""
        await world.end_of(StopWorker(id="d1/stop/0#3", cause="ev", lane="l", worker="w"))
        assert world.serving.calls == [("stop", "w", "d1/stop/0")]

    async def test_could_not_tell_is_none_with_a_sentence(self, world: World) -> None:
        """AdapterError, and any error that nobody foresaw, end in ok=None and say what happened."""
        world.serving.trouble = {"deroute": AdapterError("etcd gave no answer"), "start": ZeroDivisionError("a bug")}
        assert (await world.end_of(of(Deroute, worker="w"))).detail == "etcd gave no answer"
        done = await world.end_of(of(StartWorker, worker="w"))
        assert done.ok is None
        assert "ZeroDivisionError" in done.detail
        assert [d.ok for d in world.dones] == [None, None]

    async def test_a_worker_that_is_configured_no_more_is_refused(self, world: World) -> None:
        """An effect for a worker that left the fleet ends as False; nothing is done to anything else."""
        done = await world.end_of(of(Deroute, worker="gone"))
        assert done.ok is False
        assert "gone" in done.detail
        assert world.serving.calls == []

    async def test_a_repair_is_a_command_to_its_node(self, world: World) -> None:
        """The agent gets the action with the GPU's address; what it says becomes the Done."""
        repair = of(Repair, lane="node:t01", node="t01", action=Action.RESET_GPU, target="t01/gpu@0008:01:00.0/nvlink3")
        world.effects.begin([repair])
        (command,) = await world.desk.poll("t01", 5.0)
        assert (command.action, command.args["gpu"]) == ("reset_gpu", "0008:01:00.0")
        world.desk.settle(CommandResult(id=command.id, node="t01", ok=False, refused=True, detail="not in the allow-list"))
        await until(lambda: world.dones, "the repair ends")
        assert (world.dones[0].ok, world.dones[0].detail, world.dones[0].facts["refused"]) == (False, "not in the allow-list", True)


class TestIdle:
    async def test_it_waits_until_nothing_is_in_flight(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """Done(ok=True) comes with the last request's end and not before."""
        monkeypatch.setattr(module, "IDLE_POLL", (0.005, 0.01))
        world.serving.busy["w"] = 2
        world.effects.begin([of(AwaitIdle, worker="w", until=NOW + 60)])
        await until(lambda: len(world.serving.did("in_flight")) > 3, "it looks more than once")
        assert world.dones == []
        world.serving.busy["w"] = 0
        await until(lambda: world.dones, "it ends")
        assert world.dones[0].ok is True

    async def test_past_the_deadline_it_says_how_many_are_left(self, world: World) -> None:
        """The deadline ends it as False with the number in flight."""
        world.serving.busy["w"] = 3
        done = await world.end_of(of(AwaitIdle, worker="w", until=NOW - 1))
        assert (done.ok, done.facts) == (False, {"in_flight": 3})

    async def test_not_measured_is_not_idle(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """A worker whose load cannot be measured, or whose adapter cannot tell, is waited for until the deadline."""
        monkeypatch.setattr(module, "IDLE_POLL", (0.005, 0.01))
        world.serving.busy["w"] = None
        world.effects.begin([of(AwaitIdle, worker="w", until=NOW + 60)])
        await until(lambda: len(world.serving.did("in_flight")) > 2, "it goes on looking")
        world.serving.trouble["in_flight"] = AdapterError("no answer")
        await asyncio.sleep(0.03)
        assert world.dones == []
        world.now = NOW + 61
        await until(lambda: world.dones, "the deadline ends it")
        assert world.dones[0].ok is False
        assert "could not be measured" in world.dones[0].detail


class TestLanes:
    async def test_one_after_the_other_within_a_lane(self, world: World) -> None:
        """The second effect of a lane begins only after the first one's Done is durable; other lanes go on."""
        world.gate = asyncio.Event()
        world.effects.begin([of(Deroute, 1, worker="w"), of(Reroute, 2, worker="w"), of(StartWorker, 3, lane="other", worker="w")])
        await until(lambda: len(world.serving.calls) == 2, "one effect of each lane")
        await asyncio.sleep(0.02)
        assert sorted(v for v, _, _ in world.serving.calls) == ["deroute", "start"]
        world.gate.set()
        await until(lambda: world.serving.did("reroute"), "the next of the lane")

    async def test_the_same_effect_twice_is_carried_out_once(self, world: World) -> None:
        """A restored effect that the decider asks for again while it is under way is the same one."""
        world.serving.gates["deroute"] = asyncio.Event()
        effect = of(Deroute, worker="w")
        world.effects.begin([effect])
        world.effects.begin([effect])
        world.serving.gates["deroute"].set()
        await until(lambda: world.dones, "it ends")
        await asyncio.sleep(0.02)
        assert world.serving.did("deroute") == ["w"]

    async def test_without_the_lease_nothing_begins(self, world: World) -> None:
        """A controller whose lease ran out carries nothing out, even before it has stepped down."""
        world.leading = False
        world.effects.begin([of(Deroute, worker="w")])
        await asyncio.sleep(0.02)
        assert world.serving.calls == []
        assert world.dones == []

    async def test_closing_leaves_effects_pending(self, world: World) -> None:
        """What is cancelled on stepping down ends in no Done, so that the next leader carries it out."""
        world.serving.busy["w"] = 1
        world.effects.begin([of(AwaitIdle, worker="w", until=NOW + 60), of(StopWorker, worker="w")])
        await until(lambda: world.serving.did("in_flight"), "it waits")
        await world.effects.close()
        assert world.dones == []
        assert world.serving.did("stop") == []


class TestPages:
    PAGE = Page(id="p1", dedup_key="xid/w", event="trigger", at=NOW, fault="gpu-off-bus", summary="test")

    async def test_a_page_carries_the_link_to_its_runbook(self, world: World) -> None:
        """The fault class is the runbook's name; the link leads to this controller unless the site has its own."""
        done = await world.end_of(of(SendPage, page=self.PAGE))
        assert done.ok is True
        assert [p.runbook for p in world.pager.pages] == ["http://c1/runbooks/gpu-off-bus"]

    async def test_a_page_that_is_over_before_it_got_through_wakes_nobody(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The receiver was away for as long as the incident lasted: its trigger is given up, and its end has its turn."""
        monkeypatch.setattr(module, "PAGE_RETRY", (0.01, 0.02))
        world.pager.trouble = PagerError("PagerDuty answered 503")
        trigger = of(SendPage, 1, "page", page=self.PAGE)
        world.effects.begin([trigger])
        await until(lambda: world.pager.tries >= 2, "it is tried")
        over = msgspec.structs.replace(self.PAGE, id="i1/resolve", event="resolve")
        world.effects.begin([of(SendPage, 2, "page", page=over)])
        await until(lambda: world.dones, "the trigger is given up")
        assert (world.dones[0].instruction, world.dones[0].ok) == (trigger.id, False)
        assert "over before it got through" in world.dones[0].detail
        world.pager.trouble = None
        await until(lambda: len(world.dones) == 2, "the pager, which knows whether there is anything to end, has the resolve")
        assert [p.event for p in world.pager.pages] == ["resolve"]

    async def test_a_page_nobody_takes_now_is_tried_again(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """PagerError is no end: the page stays pending, is tried again, and is delivered once."""
        monkeypatch.setattr(module, "PAGE_RETRY", (0.005, 0.01))
        world.pager.trouble = PagerError("PagerDuty answered 503")
        world.effects.begin([of(SendPage, lane="page", page=self.PAGE)])
        await until(lambda: world.pager.tries >= 3, "it is tried again")
        assert world.dones == []
        world.pager.trouble = None
        await until(lambda: world.dones, "it ends")
        assert world.dones[0].ok is True
        assert len(world.pager.pages) == 1

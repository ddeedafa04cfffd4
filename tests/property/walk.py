"""What every random walk of the decider has: leaders that change, a store that always equals what the leader believes, and a twin
that is told the same as JSON and must decide the same."""

from __future__ import annotations

import msgspec
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sentinel.decide.decider import Decider
from sentinel.decide.state.events import AnyEvent, AnyInstruction
from sentinel.testing.decisions import World

EVENTS = msgspec.json.Decoder(AnyEvent)


class Walk(RuleBasedStateMachine):
    """``world`` is set by the walk's own ``initialize``."""

    world: World

    def mirror(self) -> None:
        """Until ``alone`` every event is decided a second time, by a decider that reads it from the journal's JSON."""
        world = self.world
        self._handle = handle = world.handle
        self._epoch, self._twin = world._epoch, Decider(world.policy)
        for event, _ in world.journal:
            self._twin.handle(event)

        def twice(event: AnyEvent) -> list[AnyInstruction]:
            if world._epoch != self._epoch:
                self._epoch, self._twin = world._epoch, Decider(world.policy)
            out = handle(event)
            again = self._twin.handle(EVENTS.decode(msgspec.json.encode(event)))
            assert msgspec.json.encode(again) == msgspec.json.encode(out), f"decided again, {event} gives other instructions"
            return out

        world.handle = twice  # type: ignore[method-assign]

    def alone(self) -> None:
        """The walk is over: what follows is not decided twice."""
        self.world.handle = self._handle  # type: ignore[method-assign]

    @rule()
    def leader_changes(self) -> None:
        self.world.lead()
        self.world.pass_time(1)

    @invariant()
    def the_store_is_the_picture(self) -> None:
        """What is durable equals what the leader believes: a take-over at any moment loses nothing."""
        if not hasattr(self, "world"):
            return
        p = self.world.decider.p
        for kind, mine in (("drain", p.drains), ("incident", p.incidents), ("hold", p.holds)):
            assert {k: v for (kd, k), v in self.world.store.items() if kd == kind} == mine
        assert set(self.world.pending) == set(p.outstanding.values())


class WalkWithHolds(Walk):
    """A walk in which people hold workers in and out."""

    @invariant()
    def holds_win(self) -> None:
        """No worker held in has an automatic drain that began during the hold."""
        if not hasattr(self, "world"):
            return
        p = self.world.decider.p
        for worker in p.workers.values():
            hold, drain = p.held(worker, "in"), p.open_drain(worker.name)
            if hold and drain and drain.kind == "drain" and drain.by == "sentinel":
                assert drain.requested_at <= hold.at

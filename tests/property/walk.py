"""What every random walk of the decider has: leaders that change, and a store that always equals what the leader believes."""

from __future__ import annotations

from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sentinel.testing.decisions import World


class Walk(RuleBasedStateMachine):
    """``world`` is set by the walk's own ``initialize``."""

    world: World

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

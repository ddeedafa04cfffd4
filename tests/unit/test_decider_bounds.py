"""What the decider keeps stays within bounds and whole, whatever flaps and whichever event fails."""

from __future__ import annotations

import pytest

from sentinel.decide.state.events import StopWorker
from sentinel.decide.state.old import KEEP_CLOSED
from sentinel.model import WorkerState, gpu_component
from sentinel.testing.decisions import PCIS, World
from tests.unit.decider_faults import off_bus


class TestBounds:
    def test_a_flapping_check_does_not_fill_the_store(self) -> None:
        """Closed incidents are kept up to a number; the oldest go first."""
        w = World()
        where = gpu_component("t03", PCIS[0])
        for n in range(KEEP_CLOSED + 50):
            check = f"gpu.flaps_{n // 2}"  # a third time would be remembered as one that flaps, and stay open
            w.report(w.state(check, where), w.state(check, where, False), w.state(check, where, False))
            w.pass_time(1, reporting=())
        assert len([i for i in w.incidents() if i.closed_at is not None]) == KEEP_CLOSED

    def test_what_a_failing_event_decided_is_told_with_the_next(self) -> None:
        """When a bug ends an event half-way, what it changed is written down later: no drain waits for an effect nobody has."""
        w = World()
        page = w.decider.incidents.page

        def bug(*args: object, **more: object) -> None:
            raise RuntimeError("a bug")

        w.decider.incidents.page = bug  # type: ignore[assignment,method-assign]
        with pytest.raises(RuntimeError):
            w.report(off_bus(w, "t03"))
        w.decider.incidents.page = page  # type: ignore[method-assign]
        w.pass_time(5)
        assert set(w.pending) == set(w.decider.p.outstanding.values())
        assert w.state_of("decode-1") is WorkerState.OUT
        assert w.did(StopWorker)

"""The controller's time does not step with the wall clock, and does not lose it either."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel.controller.clock import RATE, Steady


class Clocks:
    """A wall clock that can be set, over seconds that pass."""

    def __init__(self, at: float = 1_800_000_000.0) -> None:
        self.wall, self.passed = at, 0.0
        self.steady = Steady(lambda: self.wall, lambda: self.passed)

    def let_pass(self, seconds: float, step: float = 0.5) -> None:
        for _ in range(round(seconds / step)):
            self.wall += step
            self.passed += step
            self.steady()


def test_it_is_the_wall_clock_while_that_is_not_set() -> None:
    """Nothing is added or lost."""
    clocks = Clocks()
    clocks.let_pass(1000)
    assert clocks.steady() == pytest.approx(clocks.wall, abs=1e-3)


@pytest.mark.parametrize("by", [-3600.0, -5.0, 5.0, 3600.0])
def test_a_step_is_not_followed_at_once(by: float) -> None:
    """Set by an hour in either direction, a deadline in a minute comes after 54 to 66 seconds, and in the end they agree."""
    clocks = Clocks()
    before = clocks.steady()
    clocks.wall += by
    assert clocks.steady() == before
    clocks.let_pass(60)
    assert 60 * (1 - RATE) <= clocks.steady() - before <= 60 * (1 + RATE)
    clocks.let_pass(abs(by) / RATE)
    assert clocks.steady() == pytest.approx(clocks.wall, abs=1e-3)


def test_a_clock_that_was_never_set_is_followed_when_it_is() -> None:
    """A machine that came up in 1970 does not stay there."""
    clocks = Clocks(at=100.0)
    clocks.wall = 1_800_000_000.0
    assert clocks.steady() == clocks.wall


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(-50_000, 50_000))))
def test_it_never_goes_back(moves: list[tuple[float, float]]) -> None:
    """Whatever is done to the wall clock, time goes on, neither much faster nor much slower."""
    clocks = Clocks()
    for passed, step in moves:
        before = clocks.steady()
        clocks.passed += passed
        clocks.wall += passed + step
        if clocks.wall - before > 80_000:
            continue  # a clock that had never been set
        assert passed * (1 - RATE) - 1e-3 <= clocks.steady() - before <= passed * (1 + RATE) + 1e-3

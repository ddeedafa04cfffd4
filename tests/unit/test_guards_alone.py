"""The breakers of a gateway alone: probes that begin, end and break, by the same rules as the shared ones."""

from __future__ import annotations

from sentinel.gateway.alone import AloneBreakers, BreakerRules
from sentinel.gateway.guards import Outcome, Permit


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def half_open(time: Time) -> tuple[AloneBreakers, list[Permit]]:
    """With every probe of a worker that failed five times taken."""
    breakers = AloneBreakers(BreakerRules(), time)
    breakers.members({"p": ("a", "b")})
    for _ in range(5):
        breakers.ended(Permit(worker="a"), Outcome.FAILED)
    assert await breakers.permit("a") is None
    time.now += 10.0
    taken = [p for p in [await breakers.permit("a") for _ in range(9)] if p]
    assert breakers.states()["a"] == "half_open" and len(taken) == BreakerRules().probes
    return breakers, taken


async def test_a_probe_is_over_with_its_first_byte() -> None:
    """Streams that have begun close the breaker, once each; their fine ends say nothing more."""
    breakers, taken = await half_open(Time())
    for permit in taken:
        assert breakers.states()["a"] == "half_open"
        breakers.begun(permit)
        breakers.begun(permit)
    assert breakers.states()["a"] == "closed"
    for permit in taken:
        breakers.ended(permit, Outcome.FINE)
    assert breakers.states()["a"] == "closed"


async def test_a_stream_that_was_a_probe_still_counts_when_it_breaks() -> None:
    """Before the breaker closed it opens it again; afterwards it is one failure among others."""
    breakers, (first, *_) = await half_open(Time())
    breakers.begun(first)
    breakers.ended(first, Outcome.FAILED)
    assert breakers.states()["a"] == "open"
    breakers, taken = await half_open(Time())
    for permit in taken:
        breakers.begun(permit)
    for permit in taken:
        breakers.ended(permit, Outcome.FAILED)
        breakers.ended(permit, Outcome.FAILED)
    assert breakers.states()["a"] == "closed", "three failures are not enough"
    for _ in range(2):
        permit = await breakers.permit("a")
        assert permit is not None
        breakers.ended(permit, Outcome.FAILED)
    assert breakers.states()["a"] == "open"

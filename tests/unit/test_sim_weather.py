"""Random weather over simulated racks: the same seed rains alike, what is broken is caught, what is well is left alone."""

from __future__ import annotations

from sentinel.sim.fleet import SimFleet
from sentinel.sim.weather import LLAMA3_NODE_DAYS, NOT_HERE, SORTS, Season, Sort, Weather, named


def season(seed: int, *, days: float = 0.12, scale: float = 500.0, sorts: tuple[Sort, ...] = SORTS) -> Season:
    """So much weather that a single day has a dozen faults."""
    fleet = SimFleet(seed=seed, idle_step=110.0, calm_step=3600.0, settles=(10.0, 60.0), replays=False)
    return Weather(fleet, scale=scale, sorts=sorts).run(days)


def test_the_published_counts_are_all_there() -> None:
    """Llama 3's causes as hardware.md lists them are 411 of its 419; what no probe sees is named and left out."""
    judged = {"imex-daemon", "application-crash", "agent-restart"}
    counts = sum(s.rate * LLAMA3_NODE_DAYS for s in SORTS if s.name not in judged)
    assert round(counts) + NOT_HERE["silent data corruption"] == 411


def test_one_seed_is_one_season() -> None:
    """The same faults at the same times, the same incidents and drains."""
    first, again = (season(3, days=0.1) for _ in range(2))
    assert first.struck
    assert [(s.sort, s.fault.where, s.fault.at, s.caught_s) for s in first.struck] == [
        (s.sort, s.fault.where, s.fault.at, s.caught_s) for s in again.struck
    ]
    assert first.fleet.drains == again.fleet.drains


def test_what_breaks_is_caught_and_what_is_well_is_left_alone() -> None:
    """Hard hours of one rack: every fault has its incident, no healthy worker is stopped, nobody is called for nothing."""
    s = season(5)
    assert len(s.struck) >= 4
    assert [x.sort for x in s.missed] == []
    assert [d for d in s.fleet.wrong_drains() if not s.fleet.called_off(d)] == []
    assert [p for p in s.false_pages() if not p.startswith("peer-fault ")] == []  # the table's row one-link-that-echoes


def test_a_fault_that_nothing_shows_is_missed() -> None:
    """The count of missed faults can rise: something that no probe can see is injected."""

    def silent(f: SimFleet, node: str) -> object:
        return f.broken("silent-corruption", node)

    s = season(1, days=0.2, sorts=(Sort("silent", 0.01, silent),))  # type: ignore[arg-type]
    assert s.struck
    assert {x.sort for x in s.missed} == {"silent"}
    assert named(s.fleet, s.struck[0].fault, s.struck[0].fault.where)

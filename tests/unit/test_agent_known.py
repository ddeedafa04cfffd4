"""What counts as news, and what a snapshot holds."""

from __future__ import annotations

from typing import Any

import pytest

from sentinel.agent.known import Known
from sentinel.model import Action, Component, Finding, Kind, Severity


def state(check: str = "c", present: bool = True, **more: Any) -> Finding:
    return Finding(**{"id": f"{check}@n", "check": check, "component": Component(node="n"), "at": 1.0, "present": present, **more})


def test_only_a_change_of_a_state_is_news() -> None:
    """A state is news when it appears, changes what must be done about it, or ends; not when it is measured again."""
    known = Known()
    steps: list[tuple[Finding, int]] = [
        (state(present=False), 0),  # measured, fine, and nobody thought otherwise
        (state(), 1),
        (state(at=2.0), 0),
        (state(severity=Severity.FATAL), 1),
        (state(severity=Severity.FATAL, action=Action.RESET_GPU), 1),
        (state(severity=Severity.FATAL, action=Action.RESET_GPU, at=3.0), 0),
        (state(present=False), 1),
        (state(present=False), 0),
    ]
    assert [len(known.take("p", [f])) for f, _ in steps] == [n for _, n in steps]


def test_an_event_is_news_once() -> None:
    """The same occurrence found twice, or found again after a restart that still had it spooled, is queued once."""
    known = Known()
    event = state("xid.79", kind=Kind.EVENT)
    assert known.take("p", [event, event]) == [(event, 1)]
    assert known.take("p", [event]) == []
    restarted = Known()
    restarted.seen([event])
    assert restarted.take("p", [event]) == []
    assert known.snapshot(1.0) == (), "an event is no state"


def test_an_event_that_goes_on_is_told_with_its_count() -> None:
    """The same occurrence with a higher count is told again, and says how many are new; a lower one is old news."""
    known = Known()
    counts = [1, 5, 5, 3, 9]
    told = [known.take("p", [state("xid.79", kind=Kind.EVENT, count=n)]) for n in counts]
    assert [n[0].times if n else 0 for n in told] == [1, 4, 0, 0, 4]


def test_not_measured_changes_nothing() -> None:
    """A state that a later reading does not speak of stays as it was last measured."""
    known = Known()
    known.take("p", [state("a"), state("b")])
    assert known.take("p", [state("a")]) == []
    assert {f.check for f in known.snapshot(5.0)} == {"a", "b"}


def test_a_fine_state_is_sent_without_its_prose() -> None:
    """A snapshot says of a fine state that it is fine, and of one that is not everything."""
    known = Known()
    bad = state("bad", summary="s", evidence=("e",))
    known.take("p", [bad, state("fine", present=False, summary="s", evidence=("e",), facts={"a": 1})])
    assert known.snapshot(1.0) == (bad, state("fine", present=False))


def test_memory_is_bounded() -> None:
    """Fine states leave when they are not measured any more; a check that invents names cannot take all memory."""
    known = Known(forget_s=10.0, limit=100)
    known.take("p", [state("old", present=False), state("bad")])
    assert {f.check for f in known.snapshot(12.0)} == {"bad"}
    for i in range(500):
        known.take("p", [state(f"x{i}", present=False)])
    assert len(known.states) == 100
    assert "bad" in {f.check for f in known.snapshot(1.0)}


def test_workers_are_the_latest_and_never_old_ones() -> None:
    """The latest list is told; when its probe could not look, none is, since what was there is not what is there."""
    known = Known()
    known.take_workers("w", [{"worker": "d0", "running": 2, "label": "of the probe's own"}])
    assert [w.worker for w in known.workers] == ["d0"]
    with pytest.raises(ValueError, match="Expected"):
        known.take_workers("w", [{"worker": 3}])
    known.forget_workers("w")
    assert known.workers == ()


def test_a_probe_that_is_configured_away_takes_its_states_along() -> None:
    """After a reload nothing is told that nobody measures any more."""
    known = Known()
    known.take("gone", [state("a")])
    known.take("stays", [state("b")])
    known.keep_only(["stays"])
    assert [f.check for f in known.snapshot(1.0)] == ["b"]

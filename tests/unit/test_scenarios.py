"""The scenario table: what happens to a simulated fleet, and exactly what comes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.sim.table import Case, play, problems
from sentinel.sim.table_page import TABLE, page

DOCS = Path(__file__).resolve().parents[2] / "docs"
ASKED = {  # by the issue: they may be renamed together with this line, never left out
    "echo-over-77-nodes", "xid45-storm", "leaf-switch", "imex-peer", "driver-upgrade", "partitioned-controller", "flapping-nvlink",
    "flapping-port", "second-fault-during-a-drain", "repair-fails-twice", "overflow-exhausted",
}  # fmt: skip


def _rows() -> list[object]:
    """A row that waits for something must fail until it is there: then its mark has to go."""
    return [pytest.param(c, id=c.name, marks=[pytest.mark.xfail(reason=c.awaits, strict=True)] if c.awaits else []) for c in TABLE]


@pytest.mark.parametrize("case", _rows())
def test_what_happens_has_exactly_the_consequences_of_its_row(case: Case) -> None:
    """Culprits, incidents, pages, drains and starts are those of the row, nothing healthy is touched, and a replay agrees."""
    assert problems(case, play(case)) == []


def test_the_table_is_whole() -> None:
    """Forty rows and more, each with a name of its own, those of the issue among them."""
    names = [c.name for c in TABLE]
    assert len(set(names)) == len(names) >= 40
    assert set(names) >= ASKED


def test_the_documentation_is_made_of_the_table() -> None:
    """docs/scenarios.md is what ``python -m sentinel.sim.table_page`` prints."""
    assert (DOCS / "scenarios.md").read_text() == page()

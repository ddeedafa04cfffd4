"""What a rack's reports are explained by does not depend on the order in which they came."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sentinel.model import Finding, Kind
from sentinel.testing.decisions import World
from tests.unit.fault_racks import APP, PEER, echo, fleet, link, lost, rail


def _reports(w: World, scenario: str) -> list[Finding]:
    match scenario:
        case "switch":
            return [link(w, f"r1t0{n}", n % 4, 7) for n in range(1, 7)]
        case "cartridge":
            return [link(w, "r1t03", g, n) for g in range(3) for n in (4, 5)]
        case "gpu":
            return [link(w, "r1t03", 1, n) for n in (2, 5, 9, 14, 15)]
        case "imex":
            return [lost(w, n, "r1t08") for n in w.fleet.nodes[:7]]
        case "leaf":
            return [rail(w, n) for n in w.fleet.nodes[:6]]
        case "echo":
            return [w.xid(150, "r1t01", 2), *echo(w, w.fleet.nodes[1:5])]
        case "two":
            own = [w.xid(95, "r1t01", 0), w.xid(95, "r1t02", 0)]
            return [*own, *(w.xid(145, n, 1, **PEER) for n in w.fleet.nodes[3:6])]
        case "storm":
            return [w.xid(45, n, g, **APP) for n in (*w.fleet.nodes[:4], "r2t01") for g in (0, 1)]
        case _:
            return [*_reports(w, "switch"), *_reports(w, "gpu"), *_reports(w, "imex"), *_reports(w, "leaf")]


def _ends(scenario: str, order: list[int]) -> list[tuple[str, str, tuple[str, ...], tuple[str, ...], float]]:
    w = World(fleet(trays=8))
    w.held = w.busy  # what is drained is still on its way
    w.pass_time(1)
    reports = _reports(w, scenario)
    for n in order:
        w.report(reports[n])
    for f in reports:
        if f.kind is Kind.STATE:
            w.report(f)
            w.report(f)
    w.pass_time(4)
    return sorted((i.fault, i.culprit, i.scope, i.victims, i.confidence) for i in w.open_incidents())


SCENARIOS = ["switch", "cartridge", "gpu", "imex", "leaf", "echo", "two", "storm", "all"]


@pytest.mark.parametrize("scenario", SCENARIOS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_order_of_the_same_reports_ends_the_same(scenario: str, data: st.DataObject) -> None:
    """Culprits, scopes, victims and confidence do not depend on who was heard first."""
    count = len(_reports(World(fleet(trays=8)), scenario))
    order = data.draw(st.permutations(range(count)))
    assert _ends(scenario, list(order)) == _ends(scenario, list(range(count)))

"""Calling is allowed again while much stands: one call for all that nobody was called for."""

from __future__ import annotations

import msgspec
import pytest

from sentinel.decide.rules.policy_file import default_policy_text
from sentinel.decide.state.events import Repair
from sentinel.model import Action, Finding, Fleet, Page, WorkerState, gpu_component
from sentinel.testing.decisions import PCIS, World, rack

SHIPPED = default_policy_text()


def mode(name: str) -> str:
    return SHIPPED.replace('mode = "enforce"', f'mode = "{name}"', 1)


def large(decoders: int = 80) -> Fleet:
    """So many nodes that twenty sick ones are no systemic fault."""
    return rack(decoders=decoders, floor=0.0)


def remap(w: World, n: int, present: bool = True) -> Finding:
    return w.state("gpu.row_remap_pending", gpu_component(f"t{n:02d}", PCIS[0]), present, action=Action.RESET_GPU)


def observed(many: int, name: str = "observe") -> World:
    """So many faults have stood for an hour while nobody might be called; one in four is a GPU off the bus."""
    w = World(large())
    w.use_policy(mode(name))
    for n in range(3, 3 + many):
        w.report(w.xid(79, f"t{n:02d}", action=Action.REBOOT_NODE) if n % 4 == 0 else remap(w, n))
    w.pass_time(3600, step=60)
    for n in range(3, 3 + many):
        if n % 4:
            w.report(remap(w, n))
    return w


def calls(w: World) -> list[Page]:
    return [p for p in w.pages if p.event == "trigger" and not p.details.get("update")]


def test_twenty_standing_faults_are_one_call() -> None:
    """From observe to enforce with twenty faults: one page, as loud as the worst, that says how many of what; all are acted on."""
    w = observed(20)
    assert calls(w) == []
    w.use_policy(mode("enforce"))
    w.pass_time(60)
    assert [(p.fault, p.urgency) for p in calls(w)] == [("standing-faults", "critical")]
    assert "20 faults" in calls(w)[0].summary
    assert "5 gpu-off-bus" in calls(w)[0].summary
    assert sum(w.state_of(x.name) is WorkerState.OUT for x in w.fleet.workers if not x.standby) >= 5
    w.pass_time(4000, step=20)
    assert len([p for p in calls(w) if p.fault == "standing-faults"]) == 1
    assert not [p for p in calls(w) if "budget-blocked" in p.summary]


def test_a_few_call_by_themselves() -> None:
    """Three faults are three pages, each with its own runbook."""
    w = World(large())
    w.use_policy(mode("observe"))
    for n in (4, 8, 12):
        w.report(w.xid(79, f"t{n:02d}", action=Action.REBOOT_NODE))
    w.pass_time(60)
    w.use_policy(mode("enforce"))
    w.pass_time(10)
    assert [p.fault for p in calls(w)] == ["gpu-off-bus"] * 3


def test_what_is_found_since_calls_by_itself() -> None:
    """A new fault elsewhere, and worse news about a part that was called for with the others, ring."""
    w = observed(20)
    w.use_policy(mode("enforce"))
    w.pass_time(60)
    before = len(calls(w))
    w.report(w.xid(79, "t60", action=Action.REBOOT_NODE))
    w.report(w.xid(79, "t03", gpu=0, action=Action.REBOOT_NODE))
    w.pass_time(5)
    assert sorted(p.source for p in calls(w)[before:]) == ["t03", "t60"]


def test_it_calls_when_sentinel_is_at_its_end() -> None:
    """A repair that fails on one of them is somebody's: it rings, since nobody knows of that."""
    w = observed(20)
    w.outcomes = lambda e: not isinstance(e, Repair)
    w.use_policy(mode("enforce"))
    w.pass_time(120)
    assert "repair-failed" in " ".join(p.summary for p in calls(w))


def test_it_ends_with_the_last_of_them() -> None:
    """The page resolves when all that it was about is over, and not before."""
    w = World(large())
    w.use_policy(mode("observe"))
    for n in range(3, 9):
        w.report(remap(w, n))
    w.pass_time(60)
    w.use_policy(mode("enforce"))
    w.pass_time(2)
    for n in range(3, 8):
        w.report(remap(w, n, False), remap(w, n, False))
    w.pass_time(900, step=5)
    assert [p.event for p in w.pages] == ["trigger"]
    w.report(remap(w, 8, False), remap(w, 8, False))
    w.pass_time(900, step=5)
    w.report(remap(w, 8, False), remap(w, 8, False))
    w.pass_time(900, step=5)
    assert [p.event for p in w.pages] == ["trigger", "resolve"]
    assert w.open_incidents() == []


@pytest.mark.parametrize("how", ["leader", "restart"])
def test_another_leader_calls_for_it_once(how: str) -> None:
    """A leader that takes over afterwards calls for none of them again; one that brings the other policy with it calls once."""
    w = observed(20)
    if how == "leader":
        w.use_policy(mode("enforce"))
        w.pass_time(5)
    else:
        w.policy, w.rules = World().policy, SHIPPED
    w.lead()
    w.pass_time(60)
    assert [p.fault for p in calls(w)] == ["standing-faults"]


def test_advise_tells_them_in_one_page_too() -> None:
    """From observe to advise: one page; the command for each stands in its incident."""
    w = observed(20)
    w.use_policy(mode("advise"))
    w.pass_time(30)
    assert [p.fault for p in calls(w)] == ["standing-faults"]


def test_to_and_fro_calls_once() -> None:
    """Lowering the mode and raising it again calls for nothing a second time."""
    w = observed(20)
    for name in ("enforce", "observe", "enforce"):
        w.use_policy(mode(name))
        w.pass_time(30)
    assert [p.fault for p in calls(w)] == ["standing-faults"]


def test_a_person_ends_the_summary() -> None:
    """Who resolves it has read it: the others stay open and do not ring for what they were, not even a day later."""
    w = observed(20)
    w.use_policy(mode("enforce"))
    w.pass_time(30)
    summary = next(i for i in w.open_incidents() if i.fault == "standing-faults")
    w.ask("resolve", summary.id, "read")
    w.pass_time(90_000, step=1000)
    assert [p.fault for p in calls(w) if "repair" not in p.summary] == ["standing-faults"]
    assert msgspec.structs.asdict(summary)["victims"] == ()

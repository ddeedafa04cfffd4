"""Sessions moved per second: who waits for a turn, in which order, who never does, and what a decision says it costs."""

from __future__ import annotations

import msgspec
import pytest

from sentinel.decide.rules.policy import Policy
from sentinel.decide.rules.policy_file import default_policy
from sentinel.decide.supply.pace import DEBT_S
from sentinel.decide.ways.waiting import PATIENCE_S
from sentinel.model import Action, Finding, Fleet, Pool, Role, Severity, Worker, WorkerState, gpu_component
from sentinel.testing.decisions import PCIS, World


def fleet(decoders: int) -> Fleet:
    """Decoders on a tray and an NVLink domain each, in a pool whose budgets hold nothing back."""
    workers = tuple(
        Worker(
            name=f"d{n}", pool="main", url=f"http://d{n}", role=Role.DECODE, nodes=(f"n{n}",), domain=f"x{n}",
            gpus=tuple(gpu_component(f"n{n}", p) for p in PCIS),
        )
        for n in range(decoders)
    )  # fmt: skip
    pools = (Pool(name="main", floor=0.0, max_doubtful_drains=1000),)
    return Fleet(pools=pools, workers=workers, nodes=tuple(f"n{n}" for n in range(decoders)))


def policy(**pace: float) -> Policy:
    own = default_policy()
    return msgspec.structs.replace(
        own,
        pace=msgspec.structs.replace(own.pace, **pace),
        systemic=msgspec.structs.replace(own.systemic, min_nodes=1000),  # these tests drain many for one check
    )


def doubt(w: World, n: int, certainty: float = 1.0, check: str = "gpu.row_remap_pending") -> Finding:
    return w.state(check, gpu_component(f"n{n}", PCIS[0]), action=Action.RESET_GPU, certainty=certainty, severity=Severity.FATAL)


def out(w: World) -> list[str]:
    return [x.name for x in w.fleet.workers if w.state_of(x.name) is WorkerState.OUT]


def stay_out(w: World) -> None:
    """Nothing that is out returns while a test looks."""
    w.held = w.busy


def test_a_burst_goes_at_once_and_the_rest_in_turn() -> None:
    """Of ten decoders of 16.5 sessions each, a burst of 50 lets three go; at 5 a second another follows every 3.3 s."""
    w = World(fleet(10), policy(burst=50, sessions_per_s=5))
    stay_out(w)
    for n in range(10):
        w.report(doubt(w, n))
    assert len(out(w)) == 3
    w.pass_time(3)
    assert len(out(w)) == 3
    w.pass_time(1)
    assert len(out(w)) == 4
    w.pass_time(10)
    assert len(out(w)) == 7
    w.pass_time(10)
    assert len(out(w)) == 10
    assert w.pages == []


def test_the_most_certain_goes_first_then_the_oldest() -> None:
    """Whose turn it is does not depend on who is tried first, and a late arrival does not jump the queue."""
    w = World(fleet(6), policy(burst=20, sessions_per_s=1))
    stay_out(w)
    for n, certainty in enumerate((0.9, 0.5, 0.5, 0.8)):
        w.report(doubt(w, n, certainty))
        w.pass_time(1)
    w.pass_time(14)
    w.report(doubt(w, 4, 0.5))
    order = out(w)
    for _ in range(80):
        w.pass_time(1)
        order += [x for x in out(w) if x not in order]
    assert order == ["d0", "d3", "d1", "d2", "d4"]


def test_facts_never_wait_but_are_counted() -> None:
    """Dead GPUs leave at once however many there are, and what is only doubted waits until that has been worked off."""
    w = World(fleet(10), policy(burst=50, sessions_per_s=5))
    stay_out(w)
    for n in range(8):
        w.report(w.xid(79, f"n{n}", action=Action.REBOOT_NODE))
    assert len(out(w)) == 8
    w.report(doubt(w, 8))
    w.pass_time(19)
    assert len(out(w)) == 8
    w.pass_time(2)
    assert len(out(w)) == 9


def test_what_facts_moved_is_forgotten_within_minutes() -> None:
    """After a loss of any size a drain on doubt waits minutes, not hours."""
    w = World(fleet(200), policy(burst=50, sessions_per_s=1))
    stay_out(w)
    for n in range(150):
        w.report(w.xid(79, f"n{n}", action=Action.REBOOT_NODE))
    w.report(doubt(w, 199))
    w.pass_time(DEBT_S + 20, step=5)
    assert "d199" in out(w)


def test_a_person_and_an_eviction_do_not_wait() -> None:
    """A person's drain and a frozen engine's eviction go with an empty bucket."""
    w = World(fleet(4), policy(burst=16.5, sessions_per_s=0.01))
    stay_out(w)
    w.report(doubt(w, 0))
    w.report(doubt(w, 1))
    assert out(w) == ["d0"]
    w.ask("drain", "d2")
    engine = msgspec.structs.replace(gpu_component("n3", PCIS[0]), device="worker@d3")
    w.report(w.state("worker.frozen", engine, severity=Severity.FATAL, action=Action.RESTART_WORKER, certainty=0.95))
    assert out(w) == ["d0", "d2", "d3"]


def test_one_that_is_worth_more_than_the_burst_goes_when_all_of_it_is_there() -> None:
    """A worker of 16.5 sessions under a burst of 10 is not stuck for ever."""
    w = World(fleet(2), policy(burst=10, sessions_per_s=1))
    stay_out(w)
    w.report(doubt(w, 0))
    w.report(doubt(w, 1))
    assert out(w) == ["d0"]
    w.pass_time(17)
    assert out(w) == ["d0", "d1"]


def test_an_idle_worker_moves_nothing() -> None:
    """Measured to run and wait on nothing, it goes with an empty bucket; its reason says so."""
    w = World(fleet(3), policy(burst=16.5, sessions_per_s=0.01))
    stay_out(w)
    w.report(doubt(w, 0))
    w.watched("d1", reachable=True, load=0)
    w.report(doubt(w, 1))
    assert out(w) == ["d0", "d1"]
    assert "moves no session" in w.drain_of("d1").reason  # type: ignore[union-attr]


@pytest.mark.parametrize(("load", "said"), [(None, "about 16.5 sessions, 132,000 tokens"), (4, "about 4 sessions, 32,000 tokens")])
def test_the_reason_says_what_it_costs(load: int | None, said: str) -> None:
    """What moves, measured or by what the worker is worth, and what has to be computed again for it."""
    w = World(fleet(2), policy())
    if load is not None:
        w.watched("d0", reachable=True, load=load)
    w.report(doubt(w, 0))
    assert said in w.drain_of("d0").reason  # type: ignore[union-attr]
    assert any(said in s["why"] for s in w.decider.explain("d0")["steps"])


def test_waiting_is_said_once_and_paged_only_after_minutes() -> None:
    """One step in the history while it waits; a person is asked when the turn does not come."""
    w = World(fleet(2), policy(burst=16.5, sessions_per_s=0.01))
    stay_out(w)
    w.report(doubt(w, 0))
    w.report(doubt(w, 1))
    w.pass_time(PATIENCE_S - 10, step=5)
    mine = [i for i in w.open_incidents() if "d1" in i.victims]
    assert [s.what for i in mine for s in i.history].count("waits its turn") == 1
    before = [p for p in w.pages if "budget-blocked" in p.summary]
    w.pass_time(20)
    after = [p for p in w.pages if "budget-blocked" in p.summary]
    assert (len(before), len(after)) == (0, 1)


def test_what_ends_by_itself_is_not_drained_in_its_turn() -> None:
    """A state that is measured fine while it waits leaves the queue."""
    w = World(fleet(2), policy(burst=16.5, sessions_per_s=1))
    stay_out(w)
    w.report(doubt(w, 0))
    w.report(doubt(w, 1))
    fine = w.state("gpu.row_remap_pending", gpu_component("n1", PCIS[0]), present=False)
    w.report(fine, fine)
    w.report(fine)
    w.pass_time(60)
    assert out(w) == ["d0"]


def test_a_new_leader_makes_no_burst_of_its_own() -> None:
    """What the leader before has just moved is counted by the next one."""
    w = World(fleet(10), policy(burst=50, sessions_per_s=1))
    stay_out(w)
    for n in range(10):
        w.report(doubt(w, n))
    assert len(out(w)) == 3
    w.lead()
    for n in range(10):
        w.report(doubt(w, n))
    w.pass_time(10)
    assert len(out(w)) == 3
    w.pass_time(8)
    assert len(out(w)) == 4

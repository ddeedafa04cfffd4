"""Where requests go: the published table is obeyed, sessions stay where their cache is, nobody is overrun."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from sentinel.gateway.routing import BOUND, candidates, idlest, shares
from sentinel.model import Role, RouteEntry, RoutePool, Routes, WorkerState

S = WorkerState


def pool(name: str, weight: float, *states: WorkerState, role: Role = Role.DECODE, capacity: float = 1.0) -> RoutePool:
    entries = (
        RouteEntry(worker=f"{name}-{n}", url=f"http://{name}-{n}", role=role, state=state, capacity=capacity)
        for n, state in enumerate(states)
    )
    return RoutePool(pool=name, weight=weight, workers=tuple(entries))


def first(routes: Routes, session: str) -> str:
    return candidates(routes, Role.DECODE, session)[0].worker


@given(
    states=st.lists(st.sampled_from(list(S)), min_size=1, max_size=8),
    weight=st.sampled_from([0.0, 0.3, 1.0]),
    session=st.text(max_size=20),
    home=st.sampled_from(["", "a-0", "b-0", "gone"]),
)
def test_only_workers_that_may_take_it_are_named(states: list[S], weight: float, session: str, home: str) -> None:
    """ACTIVE ones of pools with weight, once each; besides them only the session's own worker while it keeps its sessions."""
    routes = Routes(pools=(pool("a", weight, *states), pool("b", 1.0 - weight, *states)))
    named = candidates(routes, Role.DECODE, session, home=home)
    assert len({e.worker for e in named}) == len(named)
    weights = {"a": weight, "b": 1.0 - weight}
    for entry in named:
        if entry.worker == home:
            assert entry.state in (S.ACTIVE, S.CORDONED)
        else:
            assert entry.state is S.ACTIVE
            assert weights[entry.worker[0]] > 0
    expected = {e.worker for p in routes.pools if p.weight > 0 for e in p.workers if e.state is S.ACTIVE}
    assert expected <= {e.worker for e in named}


def test_sessions_follow_weights_and_capacity() -> None:
    """A pool of weight 0.3 gets three in ten sessions; inside a pool capacity decides."""
    routes = Routes(pools=(pool("a", 0.7, S.ACTIVE), pool("b", 0.3, S.ACTIVE)))
    got = Counter(first(routes, f"s{n}") for n in range(4000))
    assert 0.27 < got["b-0"] / 4000 < 0.33
    assert shares(routes.pools) == {"a": 0.7, "b": 0.3}
    big, small = pool("a", 1.0, S.ACTIVE, capacity=3.0).workers, pool("b", 1.0, S.ACTIVE).workers
    one = Routes(pools=(RoutePool(pool="p", weight=1.0, workers=big + small),))
    got = Counter(first(one, f"s{n}") for n in range(4000))
    assert 0.72 < got["a-0"] / 4000 < 0.78


def test_a_worker_that_leaves_moves_only_its_own_sessions() -> None:
    """Everybody else's cache stays warm, and when it is back its sessions are too."""
    before = Routes(pools=(pool("a", 1.0, *[S.ACTIVE] * 5),))
    after = Routes(pools=(pool("a", 1.0, S.ACTIVE, S.ACTIVE, S.OUT, S.ACTIVE, S.ACTIVE),))
    for n in range(500):
        was, now = first(before, f"s{n}"), first(after, f"s{n}")
        assert now == was if was != "a-2" else now != was


def test_shifting_weight_moves_sessions_one_way_only() -> None:
    """From 100:0 to 70:30, sessions move to the overflow and none moves between the primary's workers."""
    before = Routes(pools=(pool("a", 1.0, S.ACTIVE, S.ACTIVE), pool("b", 0.0, S.ACTIVE)))
    after = Routes(pools=(pool("a", 0.7, S.ACTIVE, S.ACTIVE), pool("b", 0.3, S.ACTIVE)))
    for n in range(500):
        was, now = first(before, f"s{n}"), first(after, f"s{n}")
        assert now in (was, "b-0")


@given(sessions=st.lists(st.integers(0, 30), min_size=1, max_size=120), workers=st.integers(1, 6))
def test_no_worker_exceeds_its_bound(sessions: list[int], workers: int) -> None:
    """However skewed the sessions, a worker takes at most its bounded share while another has room."""
    routes = Routes(pools=(pool("a", 1.0, *[S.ACTIVE] * workers),))
    load: Counter[str] = Counter()
    for session in sessions:
        load[candidates(routes, Role.DECODE, str(session), load=load)[0].worker] += 1
    assert max(load.values()) <= -(-BOUND * len(sessions) // workers)


def test_a_session_stays_with_a_cordoned_worker_and_new_ones_do_not_come() -> None:
    """Cordoned keeps its sessions until a turn ends; out keeps nobody."""
    routes = Routes(pools=(pool("a", 1.0, S.CORDONED, S.ACTIVE),))
    assert [e.worker for e in candidates(routes, Role.DECODE, "s", home="a-0")] == ["a-0", "a-1"]
    assert [e.worker for e in candidates(routes, Role.DECODE, "s")] == ["a-1"]
    out = Routes(pools=(pool("a", 1.0, S.OUT, S.ACTIVE),))
    assert [e.worker for e in candidates(out, Role.DECODE, "s", home="a-0")] == ["a-1"]


def test_a_home_that_is_overrun_is_left() -> None:
    """Affinity saves a prefill; waiting behind everybody else costs more."""
    routes = Routes(pools=(pool("a", 1.0, S.ACTIVE, S.ACTIVE),))
    named = candidates(routes, Role.DECODE, "s", home="a-0", load={"a-0": 9, "a-1": 0})
    assert [e.worker for e in named] == ["a-1", "a-0"]


def test_roles_are_kept_apart() -> None:
    """A decode request never goes to a prefill group; a worker that does both takes either; BOTH asks for such a one."""
    mixed = (pool("p", 1.0, S.ACTIVE, role=Role.PREFILL), pool("d", 1.0, S.ACTIVE), pool("b", 1.0, S.ACTIVE, role=Role.BOTH))
    routes = Routes(pools=mixed)
    assert {e.worker for e in candidates(routes, Role.DECODE, "s")} == {"d-0", "b-0"}
    assert {e.worker for e in candidates(routes, Role.PREFILL, "s")} == {"p-0", "b-0"}
    assert {e.worker for e in candidates(routes, Role.BOTH, "s")} == {"b-0"}


def test_nowhere_is_an_empty_list_and_the_choice_is_the_same_everywhere() -> None:
    """No table, no workers: nobody. The same table read from the wire chooses alike in every process."""
    assert candidates(Routes(), Role.DECODE, "s") == []
    routes = Routes(version=3, pools=(pool("a", 0.5, S.ACTIVE, S.ACTIVE), pool("b", 0.5, S.ACTIVE)))
    read = msgspec.json.decode(msgspec.json.encode(routes), type=Routes)
    assert candidates(read, Role.DECODE, "s") == candidates(routes, Role.DECODE, "s")


def test_the_sessions_of_a_worker_that_leaves_are_shared_by_all_others() -> None:
    """Among forty alike each gets about its fortieth, and of one that leaves each of the others about a thirty-ninth."""
    before = Routes(pools=(pool("a", 1.0, *[S.ACTIVE] * 40),))
    after = Routes(pools=(pool("a", 1.0, S.OUT, *[S.ACTIVE] * 39),))
    was = {n: first(before, f"user-{n}") for n in range(20_000)}
    got = Counter(was.values())
    assert min(got.values()) > 400 and max(got.values()) < 600
    heirs = Counter(first(after, f"user-{n}") for n, worker in was.items() if worker == "a-0")
    assert len(heirs) == 39 and max(heirs.values()) < 40


def test_a_table_with_other_rows_is_another_table() -> None:
    """What was put together for one version of a pool is not used for the next, also when it has the same name."""
    for states in ([S.ACTIVE, S.OUT], [S.OUT, S.ACTIVE], [S.OUT, S.OUT]):
        routes = Routes(pools=(pool("a", 1.0, *states),))
        assert [e.worker for e in candidates(routes, Role.DECODE, "s")] == [f"a-{n}" for n, s in enumerate(states) if s is S.ACTIVE]


@given(
    busy=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    sizes=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=8, max_size=8),
    draw=st.text(max_size=8),
)
def test_who_belongs_to_no_session_goes_to_the_idlest(busy: list[int], sizes: list[float], draw: str) -> None:
    """Everybody who takes new sessions is named once, the least busy for its capacity first."""
    load = {f"w{n}": much for n, much in enumerate(busy)}
    rows = tuple(RouteEntry(worker=w, url="http://w", role=Role.BOTH, state=S.ACTIVE, capacity=sizes[int(w[1:])]) for w in load)
    rest = pool("a", 1.0, S.OUT, S.CORDONED, S.STANDBY).workers
    routes = Routes(pools=(RoutePool(pool="a", weight=1.0, workers=rows + rest),))
    named = [e.worker for e in idlest(routes, Role.DECODE, draw, load)]
    assert sorted(named) == sorted(load)
    much = [(load[w] + 1) / sizes[int(w[1:])] for w in named]
    assert much == sorted(much)


def test_equals_without_a_session_share_what_comes() -> None:
    """Nobody is the first of equals more often than the others."""
    routes = Routes(pools=(pool("a", 1.0, *[S.ACTIVE] * 10),))
    got = Counter(next(idlest(routes, Role.DECODE, f"{n}", {})).worker for n in range(5_000))
    assert len(got) == 10 and min(got.values()) > 350 and max(got.values()) < 650

"""Steer and cordon: a worker that serves on with less, returns by itself, and is drained when the news grows worse."""

from __future__ import annotations

import msgspec
import pytest

from sentinel.decide.rules.policy_file import default_policy_text
from sentinel.decide.state.events import AwaitIdle, Deroute, Reroute, StopWorker, Verify
from sentinel.gateway.routing import candidates
from sentinel.model import (
    Action,
    DrainState,
    Finding,
    Response,
    Role,
    RouteEntry,
    Routes,
    Severity,
    Suspect,
    WorkerState,
    gpu_component,
)
from sentinel.testing.decisions import PCIS, World, rack

SLOW = "site.slow"  # a state of a probe of one's own, steered or cordoned by a rule of one's own


def eases(response: str, *more: str) -> str:
    """The shipped policy with one rule on top that eases a worker for SLOW; ``more`` lines of the rule's own."""
    rule = "\n".join(["[[rule]]", f'checks = ["{SLOW}"]', 'fault = "gpu-degraded"', f'response = "{response}"', *more])
    head, mark, rest = default_policy_text().partition("[[rule]]")
    return f"{head}{rule}\n{mark}{rest}"


def world(response: str, *more: str, floor: float = 0.5) -> World:
    w = World(rack(floor=floor))
    w.use_policy(eases(response, *more))
    return w


def slow(w: World, node: str = "t03", present: bool = True, **more: object) -> Finding:
    return w.state(SLOW, gpu_component(node, PCIS[0]), present, certainty=0.9, **more)


def lasts(w: World, seconds: float, *findings: Finding, step: float = 5.0) -> None:
    """Time in which the nodes say this again and again."""
    for _ in range(int(seconds / step)):
        w.pass_time(step, step=step)
        for f in findings:
            w.report(f)


def row(w: World, worker: str) -> RouteEntry:
    routes = w.store["routes", "routes"]
    assert isinstance(routes, Routes)
    return next(e for p in routes.pools for e in p.workers if e.worker == worker)


class TestSteer:
    def test_it_serves_on_with_its_share(self) -> None:
        """A steered worker is ACTIVE with half of its capacity; nothing is done to its process or its discovery entry."""
        w = world("steer")
        whole = row(w, "decode-1").capacity
        w.report(slow(w))
        assert w.drain_of("decode-1").state is DrainState.EASED  # type: ignore[union-attr]
        assert row(w, "decode-1").state is WorkerState.ACTIVE
        assert row(w, "decode-1").capacity == pytest.approx(whole / 2)
        assert not [e for kind in (Deroute, AwaitIdle, StopWorker, Verify) for e in w.did(kind)]

    def test_it_returns_by_itself_when_all_is_fine(self) -> None:
        """Fine for the dwell time: its whole share again, and the incident ends; not a moment earlier."""
        w = world("steer")
        w.report(slow(w))
        lasts(w, 60, slow(w))
        lasts(w, 200, slow(w, present=False))
        assert row(w, "decode-1").capacity < row(w, "decode-2").capacity
        lasts(w, 200, slow(w, present=False))
        assert w.drain_of("decode-1").state is DrainState.DONE  # type: ignore[union-attr]
        assert row(w, "decode-1").capacity == row(w, "decode-2").capacity
        assert not w.open_incidents()
        assert not w.did(Reroute)

    def test_silence_returns_nothing(self) -> None:
        """Not measured is not fine: while nobody says anything it stays eased."""
        w = world("steer")
        w.report(slow(w))
        w.pass_time(4000, step=20)
        assert w.drain_of("decode-1").state is DrainState.EASED  # type: ignore[union-attr]

    def test_it_survives_a_new_leader(self) -> None:
        """The next leader goes on with it and lets it return when the state is measured fine."""
        w = world("steer")
        w.report(slow(w))
        w.lead()
        w.pass_time(10)
        assert row(w, "decode-1").capacity < row(w, "decode-2").capacity
        lasts(w, 400, slow(w, present=False))
        assert w.drain_of("decode-1").state is DrainState.DONE  # type: ignore[union-attr]

    def test_a_gateway_sends_it_fewer_sessions(self) -> None:
        """Of new sessions it gets about half of what its neighbour gets, and some of them still."""
        w = world("steer")
        w.report(slow(w))
        routes = w.store["routes", "routes"]
        assert isinstance(routes, Routes)
        first = [candidates(routes, Role.DECODE, f"s{n}")[0].worker for n in range(2000)]
        assert 0.35 < first.count("decode-1") / first.count("decode-2") < 0.65

    def test_a_response_waits_until_a_state_has_lasted(self) -> None:
        """``after``: a burst is on record only; what goes on is eased."""
        w = world("steer", 'after = "15m"')
        lasts(w, 600, slow(w))
        assert w.drain_of("decode-1") is None
        waits = [s.why for i in w.open_incidents() for s in i.history if s.what == "waits"]
        assert waits == ["steer of decode-1 when it has lasted 900 s"]
        lasts(w, 400, slow(w))
        assert w.drain_of("decode-1").state is DrainState.EASED  # type: ignore[union-attr]

    def test_the_shipped_policy_steers_what_degrades_for_long(self) -> None:
        """gpu-degraded: nothing for a quarter of an hour, then half the traffic, never a drain."""
        w = World()
        bad = w.state("gpu.nvlink_crc", gpu_component("t03", PCIS[0]), certainty=0.9, action=Action.INSPECT)
        lasts(w, 800, bad)
        assert w.drain_of("decode-1") is None
        lasts(w, 200, bad)
        assert w.drain_of("decode-1").response is Response.STEER  # type: ignore[union-attr]
        lasts(w, 7200, bad, step=30)
        assert w.drain_of("decode-1").response is Response.STEER  # type: ignore[union-attr]
        assert not w.did(Deroute)


class TestCordon:
    def test_it_keeps_its_sessions_and_gets_no_new_ones(self) -> None:
        """CORDONED in the table; Dynamo is told by Deroute; nothing waits for idle and nothing is stopped."""
        w = world("cordon")
        w.report(slow(w))
        assert w.state_of("decode-1") is WorkerState.CORDONED
        assert w.drain_of("decode-1").state is DrainState.EASED  # type: ignore[union-attr]
        assert [e.worker for e in w.did(Deroute)] == ["decode-1"]  # type: ignore[union-attr]
        assert not w.did(AwaitIdle) and not w.did(StopWorker)
        routes = w.store["routes", "routes"]
        assert isinstance(routes, Routes)
        assert all(e.worker != "decode-1" for n in range(200) for e in candidates(routes, Role.DECODE, f"s{n}"))
        assert candidates(routes, Role.DECODE, "s1", home="decode-1")[0].worker == "decode-1"

    def test_it_returns_through_reroute(self) -> None:
        """It was taken out of discovery, so it is put back there, without a start or a test of a process nobody stopped."""
        w = world("cordon")
        w.report(slow(w))
        lasts(w, 400, slow(w, present=False))
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert [e.worker for e in w.did(Reroute)] == ["decode-1"]  # type: ignore[union-attr]
        assert not w.did(Verify)

    def test_a_deroute_without_an_answer_is_asked_for_again(self) -> None:
        """It rests only once discovery has been told."""
        w = world("cordon")
        w.outcomes = lambda effect: None
        w.report(slow(w))
        assert w.state_of("decode-1") is WorkerState.CORDONED
        assert w.drain_of("decode-1").state is DrainState.REQUESTED  # type: ignore[union-attr]
        w.outcomes = lambda effect: True
        w.pass_time(20)
        assert w.drain_of("decode-1").state is DrainState.EASED  # type: ignore[union-attr]


@pytest.mark.parametrize("response", ["steer", "cordon"])
class TestWorse:
    def test_worse_news_drains_it(self, response: str) -> None:
        """A fault that asks for a drain makes the same drain stronger, within the budget, and is repaired."""
        w = world(response)
        w.report(slow(w))
        eased = w.drain_of("decode-1")
        w.held = w.busy
        w.report(w.state("gpu.row_remap_pending", gpu_component("t03", PCIS[0]), action=Action.RESET_GPU))
        drain = w.drain_of("decode-1")
        assert drain is not None and eased is not None
        assert (drain.id, drain.response, drain.state) == (eased.id, Response.DRAIN, DrainState.DEROUTED)
        assert (drain.repair, w.state_of("decode-1")) == (Action.RESET_GPU, WorkerState.OUT)

    def test_a_dead_gpu_evicts_it(self, response: str) -> None:
        """A fact needs no budget: out and stopped at once."""
        w = world(response, floor=1.0)
        w.fleet = rack(floor=0.0)
        w.reload(w.fleet)
        w.report(slow(w))
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        assert w.drain_of("decode-1").response is Response.EVICT  # type: ignore[union-attr]
        assert [e.hard for e in w.did(StopWorker)] == [True]  # type: ignore[union-attr]
        assert w.state_of("decode-1") is WorkerState.OUT

    def test_doubtful_worse_news_waits_for_the_budget(self, response: str) -> None:
        """It stays eased, in service, when the pool cannot afford the rest of it."""
        w = world(response, floor=0.0)
        w.report(slow(w))
        eased = w.drain_of("decode-1")
        assert eased is not None and eased.state is DrainState.EASED
        w.reload(rack(floor=1.0))
        w.report(w.state("gpu.row_remap_pending", gpu_component("t03", PCIS[0]), action=Action.RESET_GPU))
        drain = w.drain_of("decode-1")
        assert drain is not None
        assert (drain.response, drain.state) == (eased.response, DrainState.EASED)
        assert any(s.what == "held back" for i in w.open_incidents() for s in i.history)

    def test_a_person_says_what_happens(self, response: str) -> None:
        """drain makes it a drain that stays; undrain returns it at once; hold --in ends it and keeps it from coming back."""
        w = world(response)
        w.report(slow(w))
        w.ask("drain", "decode-1")
        drain = w.drain_of("decode-1")
        assert drain is not None
        assert (drain.by, drain.response, w.state_of("decode-1")) == ("ann", Response.DRAIN, WorkerState.OUT)
        w = world(response)
        w.report(slow(w))
        w.ask("undrain", "decode-1")
        w.pass_time(3)
        assert row(w, "decode-1").capacity == row(w, "decode-2").capacity
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        w = world(response)
        w.report(slow(w))
        w.ask("hold", "decode-1", keep="in")
        lasts(w, 60, slow(w))
        assert w.drain_of("decode-1").state is DrainState.DONE  # type: ignore[union-attr]
        w.ask("release", "decode-1")
        lasts(w, 2000, slow(w), step=20)
        assert w.drain_of("decode-1").state is DrainState.EASED  # type: ignore[union-attr]

    def test_a_lower_mode_gives_it_back(self, response: str) -> None:
        """What is only eased returns when the mode no longer lets sentinel ease it."""
        w = world(response)
        w.report(slow(w))
        w.use_policy(eases(response).replace('mode = "enforce"', 'mode = "observe"', 1))
        w.pass_time(2)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert row(w, "decode-1").capacity == row(w, "decode-2").capacity


class TestHysteresis:
    def test_who_has_returned_is_not_eased_again_at_once(self) -> None:
        """The same doubtful check has to wait for the cool-down; then it is eased again when it still stands."""
        w = world("steer")
        w.report(slow(w))
        lasts(w, 400, slow(w, present=False))
        first = w.drain_of("decode-1")
        assert first is not None and first.state is DrainState.DONE
        lasts(w, 600, slow(w))
        assert w.drain_of("decode-1") == first
        lasts(w, 1500, slow(w), step=10)
        again = w.drain_of("decode-1")
        assert again is not None and again.id != first.id and again.state is DrainState.EASED

    def test_a_cool_down_never_holds_back_what_is_worse(self) -> None:
        """Another, stronger rule acts at once."""
        w = world("steer")
        w.report(slow(w))
        lasts(w, 400, slow(w, present=False))
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        assert w.state_of("decode-1") is WorkerState.OUT

    def test_what_came_and_went_is_kept_until_it_was_fine_for_longer(self) -> None:
        """The third time within the window a fine minute does not clear it; ten fine minutes do. One incident, not many."""
        w = World()
        where = gpu_component("t03", PCIS[0])
        bad, fine = w.state("site.flaps", where), w.state("site.flaps", where, False)
        for _ in range(3):
            lasts(w, 30, bad)
            lasts(w, 60, fine)
        assert len(w.open_incidents()) == 1
        seen = len(w.incidents())
        lasts(w, 30, bad)
        lasts(w, 60, fine)
        assert len(w.incidents()) == seen
        lasts(w, 600, fine)
        assert not w.open_incidents()

    def test_two_episodes_are_no_flapping(self) -> None:
        """A state that came back once clears as it always did."""
        w = World()
        where = gpu_component("t03", PCIS[0])
        for _ in range(2):
            lasts(w, 30, w.state("site.flaps", where))
            lasts(w, 30, w.state("site.flaps", where, False))
        assert not w.open_incidents()


class TestBudget:
    def test_a_steer_costs_its_part_and_a_cordon_all(self) -> None:
        """With a floor of 80 % one of four may be steered and another, but none may be cordoned."""
        w = world("steer", floor=0.75)
        for n in (3, 4):
            w.report(slow(w, f"t{n:02d}"))
            w.pass_time(650, step=10)
        assert [w.drain_of(f"decode-{n}") is not None for n in (1, 2)] == [True, True]
        w = world("cordon", floor=0.75)
        for n in (3, 4):
            w.report(slow(w, f"t{n:02d}"))
            w.pass_time(650, step=10)
        assert [w.drain_of(f"decode-{n}") is not None for n in (1, 2)] == [True, False]

    def test_what_is_eased_is_missing_where_it_is_needed(self) -> None:
        """A cordoned worker carries no new session: the pool is short by it when its demand needs it."""
        w = world("cordon")
        w.report(slow(w))
        w.pass_time(5)
        assert w.weight("main") < 1.0


class TestFitting:
    def test_a_drain_of_a_frozen_engine_is_an_eviction(self) -> None:
        """Waiting for streams that will never end only prolongs them: where the engine is measured frozen the drain evicts."""
        w = World(rack(floor=1.0))  # so that the frozen engine alone, which is doubt, takes nothing out
        where = msgspec.structs.replace(gpu_component("t03", PCIS[0]), device="worker@decode-1")
        doubt = {"severity": Severity.FATAL, "suspect": Suspect.APP, "action": Action.RESTART_WORKER, "certainty": 0.9}
        w.report(w.state("worker.frozen", where, **doubt))
        assert w.drain_of("decode-1") is None
        w.report(w.xid(95, "t03"))
        drain = w.drain_of("decode-1")
        assert drain is not None and drain.response is Response.EVICT
        assert "worker.frozen: nothing in flight would end" in drain.reason

    def test_an_engine_that_can_finish_is_drained(self) -> None:
        """The same kernel line with an engine that is fine waits for what is in flight."""
        w = World(rack(floor=1.0))
        w.report(w.xid(95, "t03"))
        assert w.drain_of("decode-1").response is Response.DRAIN  # type: ignore[union-attr]

    def test_an_eviction_of_an_engine_that_was_reached_since_is_a_drain(self) -> None:
        """An agent calls an engine unreachable; a hold keeps it in, and the controller itself reaches it: it may finish."""
        w = World()
        w.ask("hold", "decode-1", keep="in")
        where = msgspec.structs.replace(gpu_component("t03", PCIS[0]), device="worker@decode-1")
        w.report(w.state("worker.unreachable", where, severity=Severity.FATAL, suspect=Suspect.APP, action=Action.RESTART_WORKER))
        w.pass_time(5)
        w.watched("decode-1", True, load=3)
        w.ask("release", "decode-1")
        w.pass_time(2)
        assert w.drain_of("decode-1").response is Response.DRAIN  # type: ignore[union-attr]

"""What repeats within a day: the same unit, the same GPU, too often."""

from __future__ import annotations

import msgspec
import pytest

from probes.kernel_episodes import assess
from sentinel.decide.decider import Decider
from sentinel.decide.rules.policy_file import PolicyError, default_policy_text, load_policy
from sentinel.decide.state.events import AnyEvent, AnyInstruction, Repair, Reported
from sentinel.model import Action, DrainState, Finding, Kind, Reading, Severity, Suspect, WorkerState, gpu_component
from sentinel.testing.decisions import PCIS, World

APP = {"severity": Severity.INFO, "suspect": Suspect.APP, "action": Action.RESTART_WORKER}
PATIENT = load_policy(default_policy_text().replace("repair_tries = 2 ", "repair_tries = 9 "))  # so that only the last day speaks
GPU = f"t03/gpu@{PCIS[0]}"


def fault(w: World, code: int, node: str = "t03", gpu: int = 0, **facts: object) -> Finding:
    """An application's fault; for Xid 13 with the GPC and TPC it names."""
    return w.xid(code, node, gpu, **APP, facts={"xid": code, **facts})


def crash(w: World, *findings: Finding, then: float = 3600.0) -> None:
    w.report(*findings)
    w.pass_time(then, step=120)


def faults(w: World) -> list[str]:
    return sorted(i.fault for i in w.open_incidents())


def fatal(w: World, times: int, then: float = 3600.0, code: int = 95) -> None:
    """A GPU that fails for good, is mended and comes back, so many times."""
    for _ in range(times):
        w.report(w.xid(code, "t03"))
        w.pass_time(then, step=60)


class TestRepeatingAppFault:
    @pytest.mark.parametrize(("code", "facts"), [(31, {}), (13, {"gpc": 2, "tpc": 1, "sm": 0})])
    def test_twice_on_one_unit_is_the_units_fault(self, code: int, facts: dict[str, int]) -> None:
        """31 on one GPU, or 13 on one GPC and TPC, an hour apart: one warning that asks for diagnostics, and nothing drained."""
        w = World()
        crash(w, fault(w, code, **facts))
        assert w.pages == []
        crash(w, fault(w, code, **facts), then=600)
        assert [i.key for i in w.open_incidents() if i.fault != "app-fault"] == [f"repeating-app-fault/{GPU}"]
        assert [(p.event, p.urgency, p.fault) for p in w.pages] == [("trigger", "warning", "repeating-app-fault")]
        assert w.pages[0].details["first_thing_to_do"].startswith("inspect")
        assert w.drain_of("decode-1") is None

    @pytest.mark.parametrize(
        "places",
        [
            [(31, "t03", 0, {}), (31, "t03", 1, {})],
            [(31, "t03", 0, {}), (31, "t04", 0, {})],
            [(13, "t03", 0, {"gpc": 2, "tpc": 1}), (13, "t03", 0, {"gpc": 2, "tpc": 2})],
            [(13, "t03", 0, {"gpc": 2, "tpc": 1}), (13, "t03", 1, {"gpc": 2, "tpc": 1})],
            [(13, "t03", 0, {}), (13, "t03", 0, {})],
            [(13, "t03", 0, {"gpc": 2, "tpc": 1}), (31, "t03", 0, {})],
            [(43, "t03", 0, {}), (43, "t03", 0, {})],
            [(13, "t03", 0, {"gpc": ["x"], "tpc": 1}), (13, "t03", 0, {"gpc": ["x"], "tpc": 1, "units": [3, "y"]})],
        ],
    )
    def test_elsewhere_it_is_the_applications(self, places: list[tuple[int, str, int, dict[str, int]]]) -> None:
        """Other GPUs, other TPCs, an unnamed TPC, another code: on record, nobody is paged."""
        w = World()
        for code, node, gpu, facts in places:
            crash(w, fault(w, code, node, gpu, **facts))
        assert {i.fault for i in w.incidents()} == {"app-fault"}
        assert w.pages == []

    @pytest.mark.parametrize("apart", [0.0, 20.0])
    @pytest.mark.parametrize("ranks", [(("t03", 0), ("t03", 1)), (("t01", 0), ("t02", 0))])
    def test_a_crash_of_all_ranks_accuses_none(self, ranks: tuple[tuple[str, int], ...], apart: float) -> None:
        """A program that crashes over and over on several GPUs of its group, on one tray or on two, pages nobody."""
        w = World()
        for _ in range(4):
            for node, gpu in ranks:
                crash(w, fault(w, 31, node, gpu), then=apart)
            w.pass_time(3600, step=60)
        assert w.pages == []
        assert "repeating-app-fault" not in faults(w)

    def test_a_burst_counts_once(self) -> None:
        """However many lines within three minutes of the one before: one occurrence, and one alone says nothing."""
        w = World()
        for _ in range(8):
            crash(w, fault(w, 31), then=120)
        assert faults(w) == ["app-fault"]
        crash(w, fault(w, 31), then=200)
        crash(w, fault(w, 31), then=200)
        assert faults(w) == ["app-fault", "repeating-app-fault"]

    def test_what_is_old_or_was_there_before_us_does_not_count(self) -> None:
        """A repeat after more than a day, and lines from before the agent's first look, are no repeats."""
        w = World()
        crash(w, fault(w, 31, history=True))
        crash(w, fault(w, 31), then=90_000)
        crash(w, fault(w, 31))
        assert w.pages == []

    def test_the_same_line_sent_again_is_no_repeat(self) -> None:
        """An agent that resends an occurrence, with a count that has grown or not, has told of one."""
        w = World()
        line = fault(w, 31)
        crash(w, line)
        crash(w, line, msgspec.structs.replace(line, count=50))
        assert w.pages == []

    def test_it_ends_when_a_day_was_quiet(self) -> None:
        """A reboot does not end it; a day without a repeat does, and the page resolves."""
        w = World()
        crash(w, fault(w, 31))
        crash(w, fault(w, 31))
        w.decider.p.nodes["t03"].boot_id = "before"
        report = msgspec.structs.replace(w._report("t03"), boot_id="after")
        w.handle(Reported(id="boot", at=w.now, report=report))
        w.settle()
        assert faults(w) == ["repeating-app-fault"]
        w.pass_time(90_000, step=600)
        assert faults(w) == []
        assert [p.event for p in w.pages] == ["trigger", "resolve"]

    def test_a_person_who_closes_it_begins_the_count_anew(self) -> None:
        """After "resolve" (diagnostics ran, the card was swapped) one more fault is one, and two are a repeat again."""
        w = World()
        crash(w, fault(w, 31))
        crash(w, fault(w, 31))
        w.ask("resolve", next(i.id for i in w.open_incidents()), "swapped")
        w.pass_time(60)
        crash(w, fault(w, 31))
        assert "repeating-app-fault" not in faults(w)
        crash(w, fault(w, 31), then=300)
        assert "repeating-app-fault" in faults(w)
        assert [p.event for p in w.pages] == ["trigger", "resolve", "trigger"]

    def test_lines_of_a_crash_on_many_tpcs_reach_it_as_such(self) -> None:
        """From the kernel's own lines: Xid 13 that names another TPC within the episode is no unit's fault; one TPC alone is."""

        def told(seq: int, tpcs: list[int]) -> list[Finding]:
            text = "NVRM: Xid (PCI:0008:01:00): 13, pid=1, name=x, SM SM Warp Exception on (GPC 2, TPC {}, SM 0): Out Of Range"
            records = [[4, seq + n, (seq + n) * 1000, text.format(tpc)] for n, tpc in enumerate(tpcs)]
            return assess(Reading(probe="kernel_log", node="t03", at=w.now, boot_id="b", data={"records": records}), {})

        for tpcs, wanted in (([0, 1, 2], False), ([1, 1], True)):
            w = World()
            crash(w, *told(1, tpcs))
            crash(w, *told(9, tpcs), then=300)
            assert bool(w.pages) is wanted


class TestRecurringFatal:
    def test_the_fifth_goes_to_a_person(self) -> None:
        """Four fatal Xids in a day are mended; with the fifth the resets stop, support is called, and the worker stays out."""
        w = World(policy=PATIENT)
        fatal(w, 4)
        resets = len(w.did(Repair))
        assert resets == 4
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert "recurring-fatal" not in {i.fault for i in w.incidents()}
        fatal(w, 1)
        assert len(w.did(Repair)) == resets
        assert w.state_of("decode-1") is WorkerState.OUT
        assert "recurring-fatal" in faults(w)
        page = next(p for p in w.pages if p.fault == "recurring-fatal")
        assert (page.event, page.urgency, page.component) == ("trigger", "error", GPU)
        assert "contact support" in str(page.details["first_thing_to_do"])
        w.pass_time(60)
        assert [p.event for p in w.pages].count("trigger") == 5  # one for each time: the fifth does not page twice

    def test_only_its_own_gpu(self) -> None:
        """Fatal Xids on other GPUs, suspects elsewhere, injected tests and old lines are not this GPU's fifth."""
        w = World(policy=PATIENT)
        fatal(w, 4)
        w.report(
            w.xid(95, "t04"),
            w.xid(95, "t03", gpu=1),
            w.xid(149, "t03", suspect=Suspect.PEER),
            w.xid(149, "t03", facts={"injected": True}, severity=Severity.INFO),
            w.xid(95, "t03", facts={"history": True}),
        )
        w.pass_time(60)
        assert "recurring-fatal" not in {i.fault for i in w.incidents()}

    def test_echoes_count_once(self) -> None:
        """One fault that prints five fatal codes within seconds has happened once."""
        w = World()
        w.report(*(w.xid(code, "t03") for code in (48, 64, 95, 119, 140)))
        w.pass_time(60)
        assert "recurring-fatal" not in {i.fault for i in w.incidents()}

    def test_a_repair_that_has_not_begun_is_called_off(self) -> None:
        """The fifth while its drain still waits for streams: it leaves, is not reset, and stays out."""
        w = World(policy=PATIENT)
        fatal(w, 3)
        resets = len(w.did(Repair))
        w.held = w.busy
        w.report(w.xid(95, "t03"))
        w.now += 200
        w.report(w.xid(95, "t03"))
        w.held = lambda effect: False
        w.settle()
        w.pass_time(600, step=10)
        assert len(w.did(Repair)) == resets
        assert w.drain_of("decode-1").state is DrainState.OUT  # type: ignore[union-attr]

    def test_undrain_in_the_middle_of_a_repair_resets_no_other_gpu_that_recurs(self) -> None:
        """A person lets a worker come back while one GPU of it is reset: the other one, for a person by now, is not reset too."""
        w = World(policy=PATIENT)
        fatal(w, 4)
        resets = len(w.did(Repair))
        w.held = lambda effect: isinstance(effect, Repair)
        w.report(w.xid(95, "t03", gpu=1))
        w.pass_time(5)
        w.report(w.xid(95, "t03"))
        w.ask("undrain", "decode-1")
        w.held = lambda effect: False
        w.settle()
        w.pass_time(60)
        assert [e.target for e in w.did(Repair)[resets:]] == [f"t03/gpu@{PCIS[1]}"]  # type: ignore[union-attr]

    def test_a_person_may_still_bring_it_back(self) -> None:
        """undrain outranks it; the next fatal Xid drains it again and no reset is tried."""
        w = World(policy=PATIENT)
        fatal(w, 5)
        resets = len(w.did(Repair))
        w.ask("undrain", "decode-1", "until the part comes")
        w.pass_time(60)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        fatal(w, 1)
        assert w.state_of("decode-1") is WorkerState.OUT
        assert len(w.did(Repair)) == resets
        assert [p.event for p in w.pages if p.fault == "recurring-fatal"] == ["trigger", "trigger"]  # the fifth and the sixth


class TestLeaders:
    def test_a_new_leader_counts_what_the_old_one_did(self) -> None:
        """Occurrences outlive a change of leader after each of them; what was found stays found and is paged once."""
        w = World(policy=PATIENT)
        for _ in range(5):
            fatal(w, 1)
            crash(w, fault(w, 31, "t04"))
            w.lead()
        assert {"recurring-fatal", "repeating-app-fault"} <= set(faults(w))
        told = [(p.fault, p.event) for p in w.pages]
        assert told.count(("recurring-fatal", "trigger")) == told.count(("repeating-app-fault", "trigger")) == 1
        w.pass_time(100_000, step=600)
        assert {"recurring-fatal", "repeating-app-fault"}.isdisjoint(faults(w))

    def test_replay(self) -> None:
        """The same events, folded anew, give the same instructions."""
        w = World(policy=PATIENT)
        fatal(w, 5, then=1200)
        for _ in range(3):
            crash(w, fault(w, 13, gpc=1, tpc=3), then=1200)
        fresh = Decider(PATIENT)
        again: list[tuple[AnyEvent, list[AnyInstruction]]] = [(event, fresh.handle(event)) for event, _ in w.journal]
        assert again == w.journal


def test_memory_is_what_incidents_keep() -> None:
    """A flood of faults on one GPU leaves as much behind as its kept incidents hold, and nothing once they are dropped."""
    w = World()
    for _ in range(300):
        w.now += 30
        w.report(fault(w, 31))
    p = w.decider.p
    assert sum(len(i.findings) for i in p.incidents_on("t03")) <= 40
    w.pass_time(200_000, step=1000)
    assert p.incidents_on("t03") == []
    assert w.decider.past._standing == set()


def test_a_window_longer_than_memory_is_refused() -> None:
    """A policy that would count incidents it no longer keeps says so in one sentence."""
    text = default_policy_text().replace('window = "24h"', 'window = "48h"')
    with pytest.raises(PolicyError, match=r"history\.window of 172800 s looks further back than incidents are kept"):
        load_policy(text)


def test_a_state_is_no_occurrence() -> None:
    """The driver's standing advice (Xid 154) is repeated with every snapshot and is never five faults."""
    w = World()
    where = gpu_component("t03", PCIS[0])
    for _ in range(8):
        w.report(w.state("xid.154", where, severity=Severity.FATAL, kind=Kind.STATE, action=Action.RESET_GPU))
        w.pass_time(600, step=60)
    assert "recurring-fatal" not in {i.fault for i in w.incidents()}

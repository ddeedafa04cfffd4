"""Observe and advise: nothing is taken out, what would have been is told, and people's commands work all the same."""

from __future__ import annotations

import msgspec
import pytest

from sentinel.decide.rules.policy import Mode
from sentinel.decide.rules.policy_file import PolicyError, default_policy, default_policy_text
from sentinel.decide.state.events import Deroute, PolicyLoaded, Record, ScaleOut, SendPage, StartWorker, StopWorker
from sentinel.decide.state.mode import mode_of
from sentinel.model import Action, Drain, Incident, Severity, Suspect, WorkerState, gpu_component
from sentinel.testing.decisions import PCIS, World, rack


def rules(mode: str = "enforce", **per_fault: str) -> str:
    """The shipped policy under another mode; ``fault_class="observe"`` gives the rules of one class a mode of their own."""
    text = default_policy_text().replace('mode = "enforce"', f'mode = "{mode}"', 1)
    for fault, own in per_fault.items():
        line = f'fault = "{fault.replace("_", "-")}"\n'
        assert line in text
        text = text.replace(line, f'{line}mode = "{own}"\n')
    return text


def world(mode: str, **per_fault: str) -> World:
    w = World()
    w.use_policy(rules(mode, **per_fault))
    return w


def remap(w: World, node: str, present: bool = True, gpu: int = 0):
    return w.state("gpu.row_remap_pending", gpu_component(node, PCIS[gpu]), present, action=Action.RESET_GPU)


def would(incident: Incident) -> list[str]:
    return [s.why for s in incident.history if s.what == "would have"]


def wreck(w: World) -> None:
    """A dead GPU, a pending row remap, a frozen and a dead engine, a silent node, each on another tray."""
    w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
    w.report(remap(w, "t04"))
    for node, worker, check in (("t05", "decode-3", "worker.frozen"), ("t06", "decode-4", "worker.dead")):
        where = msgspec.structs.replace(gpu_component(node, PCIS[0]), device=f"worker@{worker}")
        w.report(w.state(check, where, severity=Severity.FATAL, suspect=Suspect.APP, action=Action.RESTART_WORKER))
    w.pass_time(60, reporting=[f"t{n:02d}" for n in range(1, 8)])


class TestObserve:
    def test_nothing_is_done_and_nobody_is_paged(self) -> None:
        """Whatever breaks, the route table is an untouched fleet's and no effect but a look leaves sentinel."""
        w = world("observe")
        before = w.store["routes", "routes"]
        wreck(w)
        assert not w.pages
        assert not [d for (kind, _), d in w.store.items() if kind == "drain"]
        assert not [e for kind in (Deroute, StopWorker, StartWorker, ScaleOut) for e in w.did(kind)]
        assert w.store["routes", "routes"].pools == before.pools  # type: ignore[union-attr]

    def test_what_would_have_been_done_is_told_once(self) -> None:
        """Each incident says once what would have been done and why, and that somebody would have been paged."""
        w = world("observe")
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        w.pass_time(30)
        (incident,) = w.incidents()
        assert len(would(incident)) == 2
        assert would(incident)[0].startswith("evict decode-1: xid.79 on t03/gpu@")
        assert would(incident)[1].startswith("page somebody: critical")

    def test_a_new_leader_tells_it_no_second_time(self) -> None:
        """What was told is durable."""
        w = world("observe")
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        for _ in range(3):
            w.lead()
            w.pass_time(5)
        assert len(would(w.incidents()[0])) == 2

    def test_the_shadow_keeps_within_the_budgets(self) -> None:
        """With a floor that lets one of four go, the shadow drains one and says of the next what would have held it back."""
        w = World(rack(floor=0.75))
        w.use_policy(rules("observe"))
        for n in (3, 4):
            w.report(remap(w, f"t{n:02d}"))
            w.pass_time(700, step=20)
        first, second = w.incidents()
        assert would(first)[0].startswith("drain decode-1: ") and not _held_back(first)
        assert _held_back(second) and not any(s.startswith("drain ") for s in would(second))
        w.report(remap(w, "t03", False), remap(w, "t03", False))
        w.pass_time(2)
        assert any(s.startswith("drain decode-2: ") for i in w.open_incidents() for s in would(i))

    def test_a_standby_is_not_started(self) -> None:
        """A shortage that a person's drain makes moves weight, and starts nothing; status says what would have been started."""
        w = world("observe")
        for n in (1, 2, 3, 4):
            w.ask("drain", f"decode-{n}")
        w.pass_time(30)
        assert not w.did(StartWorker)
        assert any(s.startswith("start spill-2: ") for s in w.decider.status()["would_have"])

    def test_people_are_obeyed(self) -> None:
        """drain, undrain and hold --out work as ever."""
        w = world("observe")
        w.ask("drain", "decode-1")
        assert w.state_of("decode-1") is WorkerState.OUT
        w.ask("undrain", "decode-1")
        w.pass_time(5)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        w.ask("hold", "decode-2", keep="out")
        assert w.state_of("decode-2") is WorkerState.OUT

    def test_what_was_paged_before_is_resolved(self) -> None:
        """Lowering the mode leaves no page hanging."""
        w = World()
        w.report(w.mismatch("t03"))
        w.pass_time(400)
        assert [p.event for p in w.pages] == ["trigger"]
        w.use_policy(rules("observe"))
        w.report(w.mismatch("t03", False), w.mismatch("t03", False))
        w.pass_time(2)
        assert [p.event for p in w.pages] == ["trigger", "resolve"]

    def test_what_was_begun_before_comes_back(self) -> None:
        """A drain of before goes on to its return; nothing makes it worse."""
        w = World()
        w.held = w.busy
        w.report(remap(w, "t03"))
        w.use_policy(rules("observe"))
        w.report(w.xid(79, "t03", 1, action=Action.REBOOT_NODE))
        drain = w.drain_of("decode-1")
        assert drain is not None and drain.response.value == "drain" and not [e for e in w.did(StopWorker) if e.hard]  # type: ignore[union-attr]
        w.held = lambda effect: False
        w.pass_time(3)
        w.report(remap(w, "t03", False), remap(w, "t03", False))
        for incident in w.open_incidents():
            w.ask("resolve", incident.id)
        w.pass_time(20)
        assert w.state_of("decode-1") is WorkerState.ACTIVE


class TestAdvise:
    def test_the_page_carries_the_command(self) -> None:
        """Nothing is taken out; a page comes at once, though the rule would wait for it to mend itself, and says what to type."""
        w = world("advise")
        w.report(remap(w, "t03"))
        (page,) = w.pages
        assert page.details["first_thing_to_do"] == f'sentinel drain decode-1 --reason "row-remap-pending, {w.incidents()[0].id}"'
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        assert w.drain_of("decode-1") is None

    def test_a_node_with_two_groups_gets_both_commands(self) -> None:
        """The blast radius is in the page: every worker that the incident takes capacity from."""
        w = world("advise")
        fleet = w.fleet
        twin = msgspec.structs.replace(next(x for x in fleet.workers if x.name == "decode-1"), name="twin", url="http://twin")
        w.reload(msgspec.structs.replace(fleet, workers=(*fleet.workers, twin)))
        w.report(w.xid(79, "t03", action=Action.REBOOT_NODE))
        told = w.pages[0].details["first_thing_to_do"]
        assert [part.split()[2] for part in told.split("; ")] == ["decode-1", "twin"]
        assert "--deadline 1s" in told

    def test_what_a_budget_holds_back_is_advised_against(self) -> None:
        """Past the budget the page says so, so that a person who types all commands does not become the outage."""
        w = World(rack(floor=0.75))
        w.use_policy(rules("advise"))
        for n in (3, 4):
            w.report(remap(w, f"t{n:02d}"))
            w.pass_time(1)
        first, second = (p.details["first_thing_to_do"] for p in w.pages)
        assert first.startswith("sentinel drain decode-1 ")
        assert second.startswith("budget-blocked: ")


class TestPerRule:
    @pytest.mark.parametrize(
        ("policy", "rule", "both"),
        [("enforce", "observe", "observe"), ("observe", "enforce", "observe"), ("advise", "observe", "observe"),
         ("advise", "enforce", "advise"), ("enforce", None, "enforce")],
    )  # fmt: skip
    def test_the_lesser_of_two_modes_counts(self, policy: str, rule: str | None, both: str) -> None:
        """A rule may say less than the policy, never more."""
        shipped = default_policy()
        own = msgspec.structs.replace(shipped.rule[0], mode=Mode(rule) if rule else None)
        assert mode_of(msgspec.structs.replace(shipped, mode=Mode(policy)), own) is Mode(both)

    def test_one_class_is_observed_and_the_others_enforced(self) -> None:
        """A rule under observation takes nothing out and pages nobody; its neighbours go on."""
        w = world("enforce", row_remap_pending="observe")
        w.report(remap(w, "t03"))
        w.report(w.xid(79, "t04", action=Action.REBOOT_NODE))
        w.pass_time(2000, step=10)
        assert w.drain_of("decode-1") is None
        assert w.drain_of("decode-2") is not None
        assert [p.fault for p in w.pages if p.event == "trigger"] == ["gpu-off-bus"]


class TestChange:
    def test_enforce_takes_up_what_is_still_there_within_the_budgets(self) -> None:
        """From observe to enforce the faults that stand are acted on: facts at once, doubt as far as the budgets go."""
        w = world("observe")
        w.report(w.xid(79, "t01", action=Action.REBOOT_NODE))
        for n in (3, 4):
            w.report(remap(w, f"t{n:02d}"))
        w.pass_time(1200, step=5)
        for n in (3, 4):
            w.report(remap(w, f"t{n:02d}"))
        w.held = w.busy
        w.use_policy(rules("enforce"))
        w.pass_time(2)
        open_drains = w.decider.p.open_drains()
        assert {d.worker for d in open_drains} >= {"prefill-1"}
        assert sum(d.doubtful for d in open_drains) <= 2
        doubtful = [d.worker for d in open_drains if d.doubtful]
        assert doubtful
        kept = {"decode-1", "decode-2"} - set(doubtful)
        assert all(w.state_of(name) is WorkerState.ACTIVE for name in kept)

    def test_what_is_over_is_not_taken_up(self) -> None:
        """A state that was measured fine meanwhile drains nothing."""
        w = world("observe")
        w.report(remap(w, "t03"))
        w.report(remap(w, "t03", False), remap(w, "t03", False))
        w.use_policy(rules("enforce"))
        w.pass_time(10)
        assert w.drain_of("decode-1") is None

    def test_a_fleet_wide_state_is_one_thing_and_not_many_drains(self) -> None:
        """What a quarter of the nodes has shown for long is systemic when it would be acted on at once: frozen, and paged once."""
        w = world("observe")
        for n in (3, 4, 5, 6):
            w.report(remap(w, f"t{n:02d}"))
            w.pass_time(700, step=20)
        for n in (3, 4, 5, 6):
            w.report(remap(w, f"t{n:02d}"))
        w.use_policy(rules("enforce"))
        w.pass_time(5)
        assert not w.decider.p.open_drains()
        assert [p.dedup_key for p in w.pages] == ["systemic/gpu.row_remap_pending"]

    def test_an_unusable_policy_changes_nothing(self) -> None:
        """The decider keeps its rules and says nothing when a text is no policy (the shell has refused it before)."""
        w = World()
        before = w.decider.p.policy
        with pytest.raises(PolicyError):
            w.use_policy(default_policy_text().replace("[pace]", "[pase]"))
        assert not w.handle(PolicyLoaded(id="bad", at=w.now, text="no policy"))
        assert w.decider.p.policy is before

    def test_counts_go_on_where_a_rule_asks_for_the_same(self) -> None:
        """Two samples on either side of a reload are two in a row; under another response the count begins anew."""
        for text, drained in (
            (default_policy_text().replace('page_after = "30m"', 'page_after = "31m"'), True),
            (default_policy_text().replace('confirm = 2                               # states', "confirm = 3  # states"), False),
        ):
            w = World()
            where = msgspec.structs.replace(gpu_component("t03", PCIS[0]), device="nic@0000:03:00.0")
            bad = w.state("ib.down", where, severity=Severity.FATAL, action=Action.INSPECT)
            w.report(bad)
            w.use_policy(text)
            w.report(bad)
            assert (w.drain_of("decode-1") is not None) is drained

    def test_every_term_begins_with_its_rules(self) -> None:
        """The first event that a leader is given is PolicyLoaded, also after a change, so that its journal replays by itself."""
        w = World()
        assert isinstance(w.journal[0][0], PolicyLoaded)
        w.use_policy(rules("observe"))
        w.journal.clear()
        w.lead()
        first = w.journal[0][0]
        assert isinstance(first, PolicyLoaded) and 'mode = "observe"' in first.text
        assert w.decider.p.policy.mode is Mode.OBSERVE

    def test_nothing_is_decided_by_loading_the_same_rules_again(self) -> None:
        """A reload of the same text has no consequence at all."""
        w = World()
        wreck(w)
        assert not w.handle(PolicyLoaded(id="same", at=w.now, text=w.rules))


def test_status_says_the_mode() -> None:
    """The mode is in status, for the command line to say loudly."""
    assert world("advise").decider.status()["mode"] == "advise"


def _held_back(incident: Incident) -> bool:
    return any(s.what == "held back" for s in incident.history)


def test_no_drain_record_leaves_an_observer() -> None:
    """Not one instruction about a drain is given, not even one that a later one takes back."""
    w = world("observe")
    w.journal.clear()
    wreck(w)
    given = [n for _, out in w.journal for n in out]
    assert not [n for n in given if isinstance(n, Record) and isinstance(n.value, Drain)]
    assert not [n for n in given if isinstance(n, SendPage)]

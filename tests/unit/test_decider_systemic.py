"""One cause on many nodes, however many checks it shows as: nobody is drained one by one for it, and nothing else is held back."""

from __future__ import annotations

import msgspec

from sentinel.decide.rules.policy_file import default_policy_text
from sentinel.model import Action, Fleet, Severity, WorkerState, gpu_component
from sentinel.testing.decisions import PCIS, World, rack

DECODERS = 13  # on t03 … t15; 17 nodes, so that five make one cause


def loose(decoders: int = DECODERS) -> Fleet:
    """A rack whose budgets hold nothing back: what is not drained here is held back by the guard."""
    fleet = rack(decoders=decoders, floor=0.0)
    wide = {"max_share": 1.0, "max_domain_share": 1.0, "max_doubtful_drains": 1000}
    return msgspec.structs.replace(fleet, pools=tuple(msgspec.structs.replace(p, **wide) for p in fleet.pools))


def show(w: World, check: str, *nodes: str, gpu: int = 0, present: bool = True) -> None:
    """Each of the nodes measures this about one GPU, twice."""
    for node in nodes:
        where = gpu_component(node, PCIS[gpu])
        found = w.state(check, where, present, severity=Severity.FATAL, certainty=0.9, action=Action.INSPECT)
        w.report(found, found)
        w.pass_time(2)


def drained(w: World) -> set[str]:
    return {x.nodes[0] for x in w.fleet.workers if w.drain_of(x.name) is not None and w.state_of(x.name) is WorkerState.OUT}


def calls(w: World) -> list[str]:
    return [p.dedup_key for p in w.pages if p.event == "trigger" and not p.details.get("update")]


FIVE = ("t03", "t04", "t05", "t06", "t07")


class TestSeveralChecks:
    def test_a_second_check_of_the_same_nodes_counts_with_the_first(self) -> None:
        """Once a check is systemic, another one that comes to the same nodes drains nobody further, whatever node it is on next."""
        w = World(loose())
        for node in FIVE[:4]:
            show(w, "gpu.thermal", node)
            show(w, "gpu.power", node, gpu=1)
        show(w, "gpu.thermal", FIVE[4])
        before = drained(w)
        assert before == set(FIVE[:4])
        show(w, "gpu.power", FIVE[4], "t08", "t09", gpu=1)
        show(w, "gpu.thermal", "t08", "t09")
        w.pass_time(30)
        assert drained(w) == before

    def test_it_is_called_for_once(self) -> None:
        """Whoever is called for the first check is told of the second by an update, and is not called again."""
        w = World(loose())
        show(w, "gpu.thermal", *FIVE)
        rung = calls(w)
        assert rung[-1] == "systemic/gpu.thermal"
        show(w, "gpu.power", "t04", "t05", "t06", "t08", gpu=1)
        w.pass_time(30)
        assert "systemic/gpu.power" not in calls(w)
        told = [p for p in w.pages if p.details.get("update") and p.dedup_key == "systemic/gpu.thermal"]
        assert "gpu.power" in told[-1].summary

    def test_two_nodes_with_both_are_enough_and_one_is_chance(self) -> None:
        """The first node that shows another check beside a systemic one is judged by itself, the second is the cause's."""
        w = World(loose())
        show(w, "gpu.thermal", *FIVE, "t08", "t09", "t10")
        before = drained(w)
        show(w, "gpu.power", "t08", gpu=1)
        assert drained(w) == before | {"t08"}
        show(w, "gpu.power", "t09", "t10", "t11", gpu=1)
        assert drained(w) == before | {"t08"}

    def test_nodes_of_both_make_one_cause(self) -> None:
        """Neither check has come to five nodes; together they have, and go together: frozen from there."""
        w = World(loose())
        show(w, "gpu.thermal", "t03", "t04", "t05")
        show(w, "gpu.power", "t03", "t04", "t06", gpu=1)
        assert not w.decider.systemic.checks()
        show(w, "gpu.power", "t07", gpu=1)
        assert w.decider.systemic.checks() == {"gpu.power"}
        assert "t07" not in drained(w)
        show(w, "gpu.thermal", "t08")
        assert w.decider.systemic.checks() == {"gpu.power", "gpu.thermal"}
        assert "t08" not in drained(w)
        w.pass_time(30)
        assert [k for k in calls(w) if k.startswith("systemic/")] == ["systemic/gpu.power"]

    def test_what_has_nothing_to_do_with_it_is_not_frozen(self) -> None:
        """While a rollout is one incident, another fault on other nodes, or on one of its nodes, is drained as ever."""
        w = World(loose())
        for node in FIVE:
            w.report(w.mismatch(node))
        w.pass_time(5)
        assert w.decider.systemic.checks() == {"driver.version_mismatch"}
        show(w, "gpu.thermal", "t09", "t03")
        assert drained(w) == {"t09", "t03"}

    def test_what_stood_for_long_joins_nothing(self) -> None:
        """A check that has been systemic for hours says nothing of what turns bad on its nodes today, however often it is told."""
        w = World(loose())
        for node in FIVE:
            w.report(w.mismatch(node))
        for _ in range(60):
            w.pass_time(15, step=5)
            for node in FIVE:
                w.report(w.mismatch(node))
        show(w, "gpu.thermal", "t03", "t04", "t05")
        assert drained(w) == {"t03", "t04", "t05"}

    def test_when_the_first_is_over_somebody_is_called_for_the_second(self) -> None:
        """What is frozen still and rings nowhere any more is called for by itself."""
        w = World(loose())
        show(w, "gpu.thermal", *FIVE)
        show(w, "gpu.power", *FIVE, gpu=1)
        show(w, "gpu.thermal", *FIVE, present=False)
        w.pass_time(120)
        assert "systemic/gpu.power" in calls(w)
        assert [i.key for i in w.open_incidents() if i.culprit == "fleet"] == ["systemic/gpu.power"]

    def test_what_is_worse_calls_by_itself(self) -> None:
        """A second check whose rule calls louder than the first one did is not silent because of that."""
        w = World(loose())
        for node in FIVE:
            w.report(w.mismatch(node))
        show(w, "gpu.power", *FIVE[:2], gpu=1)
        show(w, "gpu.power", "t05", gpu=1)
        assert "systemic/driver.version_mismatch" in calls(w)
        assert "systemic/gpu.power" in calls(w)

    def test_the_next_leader_goes_on(self) -> None:
        """What was called for with another check is not called for by the leader that takes over."""
        w = World(loose())
        show(w, "gpu.thermal", *FIVE)
        show(w, "gpu.power", *FIVE, gpu=1)
        rung = calls(w)
        w.lead()
        w.pass_time(30)
        show(w, "gpu.power", *FIVE, gpu=1)
        assert calls(w) == rung


class TestWords:
    def frozen(self, w: World) -> str:
        incident = next(i for i in w.open_incidents() if i.culprit == "fleet")
        return next(s.why for s in incident.history if s.what == "frozen")

    def test_of_doubt(self) -> None:
        """What rests on doubt is held back, and the incident says that facts leave all the same."""
        w = World(loose())
        show(w, "gpu.thermal", *FIVE)
        assert "facts" in self.frozen(w)
        assert "still leave" in self.frozen(w)
        w.report(w.xid(79, "t12", action=Action.REBOOT_NODE))
        assert w.state_of("decode-10") is WorkerState.OUT

    def test_of_facts(self) -> None:
        """Of a fact nothing is frozen but the calls, the incident and its page say so, and so it is."""
        w = World(loose())
        for node in (*FIVE, "t08"):
            w.report(w.xid(79, node, action=Action.REBOOT_NODE))
            w.pass_time(1)
        assert "still leaves" in self.frozen(w)
        assert any("still leaves" in p.details["first_thing_to_do"] for p in w.pages if p.dedup_key == "systemic/xid.79")
        assert drained(w) == {*FIVE, "t08"}


class TestModes:
    def test_what_was_only_observed_is_called_for_when_that_ends(self) -> None:
        """A check that turned systemic while observing rings once sentinel may call, and once only."""
        w = World(loose())
        w.use_policy(default_policy_text().replace('mode = "enforce"', 'mode = "observe"', 1))
        show(w, "gpu.thermal", *FIVE)
        assert calls(w) == []
        w.use_policy(default_policy_text())
        w.pass_time(10)
        assert [k for k in calls(w) if k.startswith("systemic/")] == ["systemic/gpu.thermal"]


def test_what_a_person_has_ended_does_not_ring_again_at_once() -> None:
    """Resolved while all of its nodes are bad: it is no news for the rule's time; nodes that turn bad since count from zero."""
    w = World(loose())
    show(w, "gpu.thermal", *FIVE)
    rung = calls(w)
    w.ask("resolve", next(i for i in w.open_incidents() if i.culprit == "fleet").id, "known, the chiller is being mended")
    for _ in range(10):
        show(w, "gpu.thermal", *FIVE)
    assert calls(w) == rung
    show(w, "gpu.thermal", "t08")
    assert "systemic/gpu.thermal" not in calls(w)[len(rung) :]
    show(w, "gpu.thermal", "t09", "t10", "t11", "t12")
    assert "systemic/gpu.thermal" in calls(w)[len(rung) :]


def test_what_was_reported_before_a_persons_word_may_be_judged_after_it() -> None:
    """News go first: a report that arrived a moment before a person ended the incident, and waited, counts as one node."""
    w = World(loose())
    show(w, "gpu.thermal", *FIVE)
    incident = next(i for i in w.open_incidents() if i.culprit == "fleet")
    arrived, w.now = w.now + 1, w.now + 3
    w.ask("resolve", incident.id)
    w.now = arrived
    show(w, "gpu.thermal", "t08")
    assert not w.decider.systemic.checks()
    show(w, "gpu.thermal", "t09", "t10", "t11")
    assert not w.decider.systemic.checks()
    show(w, "gpu.thermal", "t12")
    show(w, "gpu.thermal", "t13")
    assert w.decider.systemic.checks() == {"gpu.thermal"}

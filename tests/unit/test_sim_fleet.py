"""The simulated fleet: that it can be believed, and that its checks can fail."""

from __future__ import annotations

import msgspec

from sentinel.decide.rules.policy_file import default_policy_text
from sentinel.decide.state.events import Repair
from sentinel.model import Kind, Severity, Suspect, WorkerState
from sentinel.sim import faults as x
from sentinel.sim.fleet import SimFleet
from sentinel.sim.table import Case, play, problems


def decisions(f: SimFleet) -> bytes:
    return msgspec.json.encode([out for _, out in f.world.journal])


class TestBelievable:
    def test_the_same_seed_gives_the_same_decisions(self) -> None:
        """Two fleets with one seed and the same faults decide alike to the letter; another seed orders reports otherwise."""
        fleets = [SimFleet(seed=s) for s in (7, 7, 8)]
        for f in fleets:
            f.run(10)
            x.switch_asic(f, "r1", 3, [f"r1t{n:02}" for n in range(1, 7)])
            f.run(20)
        first, again, other = map(decisions, fleets)
        assert first == again != other

    def test_a_healthy_fleet_is_left_alone(self) -> None:
        """Two racks for a day: no incident, no page, no drain, and all capacity is there."""
        f = SimFleet(racks=2, idle_step=120.0)
        f.run(86_400)
        assert (f.incidents, f.pages(), f.drains, f.lost_s) == ({}, [], {}, 0.0)
        assert all(f.state(w.name) is not WorkerState.OUT for w in f.workers)

    def test_findings_are_the_probes_own(self) -> None:
        """What a tray reports after a fault carries the names and words of the real probes."""
        f = SimFleet()
        f.run(10)
        x.off_bus(f, "r1t05", 1)
        x.imex_lost(f, "r1t06")
        f.run(130)
        by_check = {c.finding.check: c.finding for c in f.world.decider.p.conditions.present()}
        assert {"xid.79", "gpu.lost", "imex.peer", "imex.slots"} <= set(by_check)
        assert (by_check["xid.79"].kind, by_check["xid.79"].severity) == (Kind.EVENT, Severity.FATAL)
        assert by_check["imex.peer"].suspect is Suspect.PEER
        assert by_check["xid.79"].evidence[0].startswith("NVRM: Xid (PCI:0009:01:00): 79")

    def test_where_trays_stand_is_learned_from_their_readings(self) -> None:
        """Chassis, tray and NVLink domain come from the reported places, and agree with the configuration."""
        f = SimFleet(racks=2)
        f.run(15)
        topology = f.world.decider.p.topology
        assert topology.reported("r2t07").tray == 7
        assert topology.reported("r1t01").domain != topology.reported("r2t01").domain
        assert topology.nodes_of_domain("r1") == frozenset(n for n in f.trays if n.startswith("r1"))

    def test_what_a_cut_agent_found_arrives_when_the_way_is_back(self) -> None:
        """A row remap on a node that nobody hears is acted on after the cut, once."""
        f = SimFleet()
        f.run(10)
        fault = x.cut_off(f, ["r1t05"])
        x.row_remap(f, "r1t05", 1)
        f.run(20)
        assert not f.drains
        f.end(fault)
        f.run(200)
        assert [d.state.value for d in f.taken()] == ["done"]
        assert len(f.world.did(Repair)) == 1


class TestChecksCanFail:
    """Each of the table's own checks, where it must speak."""

    def row(self, **more: object) -> Case:
        fields: dict[str, object] = {"name": "control", "happens": "a thermal warning", "script": lambda f: x.hot(f, "r1t05", 1)}
        return Case(**{**fields, **more})  # type: ignore[arg-type]

    def test_a_row_that_names_too_much_or_too_little(self) -> None:
        """What is missing and what was not wanted are both told."""
        case = self.row(incidents=("gpu-off-bus r1t05",), pages=("critical gpu-off-bus",))
        said = problems(case, play(case))
        assert any("missing gpu-off-bus r1t05; not wanted noted r1t05/" in s for s in said)
        assert any(s.startswith("pages: missing critical") for s in said)

    def test_a_drain_of_something_healthy(self) -> None:
        """A policy that drains what is only hot is caught, by its drain and by its repair."""
        rule = '[[rule]]\nchecks = ["gpu.thermal"]\nfault = "gpu-degraded"\nresponse = "drain"\nrepair = "reset_gpu"\n\n[[rule]]'
        rules = default_policy_text().replace("[[rule]]", rule, 1)
        case = self.row(fleet=lambda: SimFleet(rules=rules))
        said = problems(case, play(case))
        assert any("was taken out though nothing is wrong with it" in s for s in said)
        assert any("was stopped though nothing is wrong with it" in s for s in said)
        assert any("which nothing is wrong with" in s for s in said)

    def test_a_journal_that_does_not_replay(self) -> None:
        """An instruction that the events do not lead to is told."""
        case = self.row(incidents=("noted r1t05/gpu@0009:01:00.0",))
        f = play(case)
        assert problems(case, f) == []
        event, out = next((e, o) for e, o in f.world.journal if o)
        f.world.journal[f.world.journal.index((event, out))] = (event, [])
        assert any(s.startswith("decided again") for s in problems(case, f))

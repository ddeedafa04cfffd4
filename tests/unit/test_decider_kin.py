"""One fault told ever more clearly is one incident, and its page goes on."""

from __future__ import annotations

from sentinel.decide.state.events import Deroute, StopWorker
from sentinel.model import Action, Component, Finding, Incident, Severity, Suspect, gpu_component
from sentinel.testing.decisions import PCIS, World

NODE, WORKER = "t03", "decode-1"


def of_worker(w: World, check: str, **more: object) -> Finding:
    words: dict[str, object] = {"suspect": Suspect.APP, "certainty": 0.95, **more}
    return w.state(check, Component(node=NODE, device=f"worker@{WORKER}"), **words)


def gone(w: World) -> Finding:
    return of_worker(w, "worker.unreachable", severity=Severity.FATAL, action=Action.RESTART_WORKER, certainty=1.0)


def alone(w: World) -> Incident:
    told = [i for i in w.incidents() if not i.merged_into]
    assert len(told) == 1, [(i.fault, i.culprit) for i in told]
    return told[0]


def others(w: World) -> list[str]:
    return [n for n in w.fleet.nodes if n != NODE]


class TestSilence:
    def test_a_verdict_takes_the_silence_over(self) -> None:
        """An agent is silent and paged; then its worker refuses, too: one incident, node-down, and the page is updated."""
        w = World()
        w.outcomes = lambda effect: True
        w.pass_time(60, reporting=others(w))
        before = alone(w)
        assert (before.fault, before.paged) == ("agent-silent", "triggered")
        for _ in range(3):
            w.watched(WORKER, reachable=False)
        w.pass_time(10, reporting=others(w))
        after = alone(w)
        assert (after.fault, after.culprit, after.page_key) == ("node-down", NODE, before.key)
        assert [(p.dedup_key, bool(p.details.get("update"))) for p in w.pages] == [(before.key, False), (before.key, True)]

    def test_silence_goes_on_under_its_verdict(self) -> None:
        """The verdict came first: that the agent is silent for longer is no news, opens nothing and calls nobody again."""
        w = World()
        for _ in range(3):
            w.watched(WORKER, reachable=None)
        w.outcomes = lambda effect: None if effect.id.startswith("look/") else True
        w.pass_time(120, reporting=others(w))
        assert alone(w).fault == "node-unreachable"
        assert len(w.pages) == 1

    def test_it_ends_with_the_silence(self) -> None:
        """The node reports again: the one incident closes and its one page resolves."""
        w = World()
        for _ in range(3):
            w.watched(WORKER, reachable=None)
        w.outcomes = lambda effect: None if effect.id.startswith("look/") else True
        w.pass_time(60, reporting=others(w))
        w.pass_time(30)
        assert alone(w).closed_at is not None
        assert [p.event for p in w.pages] == ["trigger", "resolve"]


class TestWorse:
    def test_a_state_that_meets_a_stronger_rule_takes_its_record_along(self) -> None:
        """A port is down, on record; half a minute later that is fatal: one incident, nic-fatal."""
        w = World()
        port = Component(node=NODE, device="ib@mlx5_0", part="port1")
        w.report(w.state("ib.port_down", port))
        assert alone(w).fault == "noted"
        for _ in range(2):
            w.report(w.state("ib.port_down", port, severity=Severity.FATAL, action=Action.INSPECT, certainty=0.9))
        assert alone(w).fault == "nic-fatal"

    def test_and_stays_what_it_was_when_it_gets_milder(self) -> None:
        """The same port is a warning again: still that incident."""
        w = World()
        port = Component(node=NODE, device="ib@mlx5_0", part="port1")
        for severity in (Severity.FATAL, Severity.FATAL, Severity.WARNING, Severity.WARNING):
            w.report(w.state("ib.port_down", port, severity=severity, action=Action.INSPECT, certainty=0.9))
        assert alone(w).fault == "nic-fatal"

    def test_an_engine_that_stalls_and_then_is_frozen(self) -> None:
        """Standing still is on record; the verdict takes it along."""
        w = World()
        w.report(of_worker(w, "worker.stalled"))
        w.report(of_worker(w, "worker.frozen", severity=Severity.FATAL, action=Action.RESTART_WORKER))
        assert alone(w).fault == "engine-frozen"

    def test_other_parts_are_no_kin(self) -> None:
        """Two ports of one node are two faults, however alike."""
        w = World()
        for port in ("mlx5_0", "mlx5_1"):
            w.report(w.state("ib.rate_low", Component(node=NODE, device=f"ib@{port}", part="port1")))
        w.report(w.state("ib.port_down", Component(node=NODE, device="ib@mlx5_0", part="port1")))
        w.report(w.state("gpu.thermal", gpu_component(NODE, PCIS[0])))
        assert {i.fault for i in w.open_incidents()} == {"noted"}
        assert [i.merged_into for i in w.incidents()] == [""] * len(w.incidents())


class TestUnder:
    def test_an_engine_that_ends_because_its_gpu_is_gone(self) -> None:
        """Held in by a person, so nothing is drained: the dead engine is the lost GPU's, and nobody is called twice."""
        w = World()
        w.ask("hold", WORKER, keep="in")
        w.report(w.xid(79, NODE, action=Action.REBOOT_NODE))
        w.report(gone(w))
        w.pass_time(400, step=5)
        assert alone(w).fault == "gpu-off-bus"
        assert [p.event for p in w.pages] == ["trigger"]
        assert w.did(Deroute) == []

    def test_and_when_the_engine_is_noticed_first(self) -> None:
        """The engine is evicted; then its GPU turns out to be gone: one incident, one drain, stopped once."""
        w = World()
        w.held = lambda effect: isinstance(effect, StopWorker)
        w.report(gone(w))
        w.report(w.xid(79, NODE, action=Action.REBOOT_NODE))
        w.held = lambda effect: False
        w.pass_time(10)
        incident = alone(w)
        assert (incident.fault, incident.victims) == ("gpu-off-bus", (WORKER,))
        assert [d.incident for d in w.decider.p.drains.values()] == [incident.id]
        assert len(w.did(StopWorker)) == 1

    def test_a_dead_engine_beside_a_gpu_that_only_wants_a_reset_is_its_own(self) -> None:
        """A row remap takes no GPU away: the engine's death is another fault."""
        w = World()
        w.ask("hold", WORKER, keep="in")
        w.report(w.state("gpu.row_remap_pending", gpu_component(NODE, PCIS[1]), action=Action.RESET_GPU))
        w.report(gone(w))
        assert {i.fault for i in w.open_incidents()} == {"row-remap-pending", "worker-down"}

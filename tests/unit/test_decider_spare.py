"""What a group that is down leaves over, and what is not done on silence while the controller hears too few."""

from __future__ import annotations

from typing import Any

import msgspec

from sentinel.model import Action, Component, Fleet, Pool, Role, Severity, Suspect, Worker, WorkerState, gpu_component
from sentinel.testing.decisions import PCIS, World, rack


def two_groups(**standby: Any) -> Fleet:
    """Two prefill groups of eight over trays a, b and c, d of one NVLink domain, a decoder, and a standby where asked for."""

    def group(name: str, role: Role, *trays: str, **more: Any) -> Worker:
        gpus = tuple(gpu_component(t, p) for t in trays for p in PCIS)
        fields = {"domain": "rack-1", "gpus": gpus, "nodes": trays, **more}
        return Worker(name=name, pool="main", url=f"http://{name}", role=role, **fields)

    workers = [group("p1", Role.PREFILL, "a", "b"), group("p2", Role.PREFILL, "c", "d"), group("d1", Role.DECODE, "e")]
    if standby:
        workers.append(group("s1", Role.PREFILL, "f", "g", standby=True, **standby))
    nodes = tuple(dict.fromkeys(n for w in workers for n in w.nodes))
    return Fleet(pools=(Pool(name="main", floor=0.0),), workers=tuple(workers), nodes=nodes)


def lose(w: World, node: str, gpu: int = 0) -> None:
    w.report(w.xid(79, node, gpu, action=Action.REBOOT_NODE))
    w.pass_time(2)


def spare(w: World) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = w.decider.status()["spare"]
    return told


class TestSpare:
    def test_a_group_is_down_as_one_and_its_clean_gpus_are_offered(self) -> None:
        """One rank of eight is lost: seven are offered by node, address and domain; too few for a group of eight."""
        w = World(two_groups())
        w.pass_time(2)
        lose(w, "a", 1)
        (offer,) = spare(w)
        assert (offer["domain"], offer["role"], offer["size"], offer["groups"]) == ("rack-1", "prefill", 8, ["p1"])
        assert {(g["node"], g["pci"]) for g in offer["gpus"]} == {(n, p) for n in "ab" for p in PCIS} - {("a", PCIS[1])}
        assert "too few" in offer["could"]

    def test_two_groups_with_a_lost_rank_each_make_one(self) -> None:
        """Fourteen clean GPUs of one domain are enough for a whole group of eight."""
        w = World(two_groups())
        w.pass_time(2)
        lose(w, "a")
        lose(w, "c")
        (offer,) = spare(w)
        assert len(offer["gpus"]) == 14
        assert offer["could"] == "a whole prefill group of 8 in rack-1 out of these 14"

    def test_a_standby_of_the_role_is_counted_where_it_shares_the_domain(self) -> None:
        """A whole standby is started as it is; one with a sick rank lends its clean GPUs; one elsewhere counts for nothing."""
        w = World(two_groups(domain="rack-1"))
        w.pass_time(2)
        lose(w, "a")  # one decoder asks for no more prefill than is left, so it is not started by itself
        assert spare(w)[0]["could"].startswith("start s1, a standby in rack-1, as it is")
        w = World(two_groups(domain="rack-1"))
        w.pass_time(2)
        lose(w, "f")
        lose(w, "a")
        (offer,) = spare(w)
        assert len(offer["standby"]) == 7
        assert offer["could"] == "a whole prefill group of 8 in rack-1 out of these 7 and 7 clean GPUs of standbys"
        w = World(two_groups(domain="rack-2"))
        w.pass_time(2)
        w.ask("hold", "s1", keep="out")
        lose(w, "a")
        (offer,) = spare(w)
        assert offer["standby"] == [] and "too few" in offer["could"]

    def test_the_incident_says_it_once(self) -> None:
        """One step in the history of what took the group out, also when the leader changes."""
        w = World(two_groups())
        w.pass_time(2)
        lose(w, "a")
        w.pass_time(30)
        w.lead()
        w.pass_time(30)
        steps = [s for i in w.incidents() for s in i.history if s.what == "spare"]
        assert [s.why for s in steps] == ["7 of the 8 GPUs of p1 are clean in rack-1: sentinel spare"]

    def test_what_is_not_measured_is_not_offered(self) -> None:
        """The GPUs of a tray that went silent, and those of one whose driver hangs, are nobody's spare parts."""
        w = World(two_groups())
        w.pass_time(2)
        lose(w, "a")
        w.pass_time(20, reporting=[n for n in w.fleet.nodes if n != "b"])
        (offer,) = spare(w)
        assert {g["node"] for g in offer["gpus"]} == {"a"}
        w.pass_time(5)
        hung = w.state("driver.hung", Component(node="a", device="driver"), severity=Severity.FATAL, action=Action.REBOOT_NODE)
        for _ in range(2):
            w.report(hung)
        (offer,) = spare(w)
        assert {g["node"] for g in offer["gpus"]} == {"b"}

    def test_a_warning_about_a_gpu_keeps_it_out_and_somebody_elses_fault_does_not(self) -> None:
        """What is said against the GPU itself counts; what its link says of a peer does not."""
        w = World(two_groups())
        w.pass_time(2)
        lose(w, "a")
        w.report(w.state("gpu.ecc_storm", gpu_component("b", PCIS[0]), certainty=0.5))
        w.report(w.state("gpu.nvlink_peer", gpu_component("b", PCIS[1]), suspect=Suspect.PEER))
        (offer,) = spare(w)
        assert [g["pci"] for g in offer["gpus"] if g["node"] == "b"] == list(PCIS[1:])

    def test_what_a_person_took_out_is_theirs(self) -> None:
        """A drain by hand, and a group that only restarts its engine, offer nothing."""
        w = World(two_groups())
        w.pass_time(2)
        w.ask("drain", "p1")
        lose(w, "a")
        w.report(w.state("worker.frozen", Component(node="e", device="worker@d1"), severity=Severity.FATAL,
                         action=Action.RESTART_WORKER, suspect=Suspect.APP, certainty=0.95))  # fmt: skip
        w.pass_time(2)
        assert spare(w) == []


class TestDeaf:
    def test_a_verdict_that_a_budget_kept_waiting_is_not_carried_out_while_deaf(self) -> None:
        """node.down waits for the floor; when the controller goes deaf and the floor frees, it goes on waiting."""
        w = World(rack(floor=1.0))
        others = [n for n in w.fleet.nodes if n != "t03"]
        for _ in range(5):
            w.pass_time(5, reporting=others)
            w.watched("decode-1", reachable=False)
        w.pass_time(5, reporting=others)
        assert "decode-1" in w.decider.held_back()
        w.pass_time(20, reporting=["t01"])
        w.reload(rack(floor=0.0))
        w.pass_time(5, reporting=["t01"])
        assert w.decider.status()["deaf"]
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        for _ in range(3):
            w.pass_time(5, reporting=others)
            w.watched("decode-1", reachable=False)
        assert not w.decider.status()["deaf"]
        assert w.state_of("decode-1") is WorkerState.OUT

    def test_a_new_leader_hears_the_silence_itself_first(self) -> None:
        """A verdict found in the store is no reason to drain: the node may report to this leader in a moment."""
        w = World(rack(floor=1.0))
        others = [n for n in w.fleet.nodes if n != "t03"]
        for _ in range(6):
            w.pass_time(5, reporting=others)
            w.watched("decode-1", reachable=False)
        assert "decode-1" in w.decider.held_back()
        w.fleet = rack(floor=0.0)
        w.lead()
        w.pass_time(5, reporting=others)
        assert w.state_of("decode-1") is WorkerState.ACTIVE
        w.pass_time(5)
        w.pass_time(60)
        assert w.state_of("decode-1") is WorkerState.ACTIVE

    def test_two_nodes_that_are_both_silent_are_not_both_down(self) -> None:
        """In a fleet too small for a share, hearing nobody at all is being deaf."""
        fleet = rack(decoders=2, floor=0.0)
        workers = tuple(x for x in fleet.workers if x.name in ("decode-1", "decode-2"))
        pools = (msgspec.structs.replace(fleet.pools[0], overflow=()),)
        w = World(msgspec.structs.replace(fleet, pools=pools, workers=workers, nodes=("t03", "t04")))
        for _ in range(12):
            w.pass_time(5, reporting=[])
            for x in workers:
                w.watched(x.name, reachable=False)
        assert [w.state_of(x.name) for x in workers] == [WorkerState.ACTIVE, WorkerState.ACTIVE]

    def test_what_is_measured_counts_while_deaf(self) -> None:
        """A budgeted finding of a node that is heard drains within the budget; a fact is acted on as ever."""
        w = World(rack(floor=0.5))
        w.pass_time(30, reporting=["t04", "t05"])
        assert w.decider.status()["deaf"]
        w.report(w.state("gpu.row_remap_pending", gpu_component("t04", PCIS[0]), action=Action.RESET_GPU))
        w.report(w.xid(79, "t05", action=Action.REBOOT_NODE))
        assert [w.state_of(f"decode-{n}") for n in (1, 2, 3, 4)] == [
            WorkerState.ACTIVE, WorkerState.OUT, WorkerState.OUT, WorkerState.ACTIVE,
        ]  # fmt: skip

"""Doubt gives way to facts: a drain on suspicion that can still be called off never costs a pool its floor."""

from __future__ import annotations

import msgspec
import pytest

from sentinel.decide.decider import Decider
from sentinel.decide.state.events import AnyEvent, AwaitIdle, Deroute, StopWorker
from sentinel.model import Action, Drain, DrainState, WorkerState, gpu_component
from sentinel.testing.decisions import PCIS, World, rack

EVENTS = msgspec.json.Decoder(AnyEvent)
SERVES = WorkerState.ACTIVE


def doubts(w: World, node: str, present: bool = True) -> None:
    """A GPU there wants its rows remapped: a reason to drain, within the budget."""
    found = w.state("gpu.row_remap_pending", gpu_component(node, PCIS[0]), present, action=Action.RESET_GPU, certainty=0.9)
    w.report(found)


def dies(w: World, *nodes: str) -> None:
    for node in nodes:
        w.report(w.xid(79, node, action=Action.REBOOT_NODE))


def leaving(floor: float = 0.5, *nodes: str, held: type = AwaitIdle) -> World:
    """Four decoders on t03 … t06, and a doubtful drain of those on these nodes that has not got further than ``held``."""
    w = World(rack(decoders=4, floor=floor))
    w.held = lambda effect: isinstance(effect, held) and not getattr(effect, "hard", False)
    for node in nodes or ("t03",):
        doubts(w, node)
        w.pass_time(1)
    return w


def serving(w: World) -> list[str]:
    return [f"decode-{n}" for n in range(1, 5) if w.state_of(f"decode-{n}") is SERVES]


@pytest.mark.parametrize(("held", "state"), [(Deroute, DrainState.REQUESTED), (AwaitIdle, DrainState.DEROUTED)])
def test_it_comes_back_when_facts_take_the_floor(held: type, state: DrainState) -> None:
    """With two of four dead under a floor of two, the one that was leaving on doubt serves again, unstopped, in the same event."""
    w = leaving(0.5, held=held)
    drain = w.drain_of("decode-1")
    assert drain is not None and drain.state is state
    dies(w, "t04")
    assert serving(w) == ["decode-3", "decode-4"]
    dies(w, "t05")
    assert serving(w) == ["decode-1", "decode-4"]
    w.held = lambda effect: False
    w.pass_time(30)
    assert "decode-1" in serving(w)
    assert "decode-1" not in {e.worker for e in w.did(StopWorker) if isinstance(e, StopWorker)}
    assert any("below its floor" in p.summary for p in w.pages if p.fault == "row-remap-pending")
    assert "decode-1" in w.decider.held_back()


def test_it_is_tried_again_when_there_is_capacity() -> None:
    """Once the dead ones serve again the doubt stands as ever, and drains, also under a new leader."""
    for new_leader in (False, True):
        w = leaving(0.5)
        dies(w, "t04", "t05")
        w.held = lambda effect: False
        w.pass_time(5)
        assert "decode-1" in serving(w)
        if new_leader:
            w.lead()
            w.pass_time(5)
            assert "decode-1" in serving(w)
        for name in ("decode-2", "decode-3"):
            w.ask("undrain", name)
        for incident in w.open_incidents():
            if incident.fault != "row-remap-pending":
                w.ask("resolve", incident.id)
        w.pass_time(900, step=5)
        drains = [v for v in w.store.values() if isinstance(v, Drain) and v.worker == "decode-1"]
        assert [(d.doubtful, d.stopped or d.verified) for d in drains] == [(True, False), (True, True)]


def test_no_more_than_the_floor_needs_the_latest_first() -> None:
    """Of two that leave on doubt, the one decided last yields, and the other goes on."""
    fleet = rack(decoders=4, floor=0.5)
    wide = {"max_share": 1.0, "max_domain_share": 1.0, "max_doubtful_drains": 9}
    w = World(msgspec.structs.replace(fleet, pools=tuple(msgspec.structs.replace(p, **wide) for p in fleet.pools)))
    w.held = lambda effect: isinstance(effect, AwaitIdle)
    for node in ("t03", "t04"):
        doubts(w, node)
        w.pass_time(30)
    assert serving(w) == ["decode-3", "decode-4"]
    dies(w, "t05")
    assert serving(w) == ["decode-2", "decode-4"]
    dies(w, "t06")
    assert serving(w) == ["decode-1", "decode-2"]


def test_what_is_stopped_or_a_persons_goes_on() -> None:
    """Nothing is given back whose process has been stopped, or that a person drains."""
    w = World(rack(decoders=4, floor=0.5))
    w.held = lambda effect: isinstance(effect, StopWorker) and not effect.hard
    doubts(w, "t03")
    w.pass_time(1)
    dies(w, "t04", "t05")
    drain = w.drain_of("decode-1")
    assert drain is not None and drain.state is DrainState.STOPPING and serving(w) == ["decode-4"]
    w = leaving(0.5)
    w.ask("drain", "decode-1")
    dies(w, "t04", "t05")
    assert serving(w) == ["decode-4"]


def test_a_serving_layer_without_an_answer_brings_no_stop() -> None:
    """While whatever routes to it does not confirm that it is back, what asks for it waits: it is not evicted for that."""
    w = leaving(0.5)
    dies(w, "t04", "t05")
    w.held = lambda effect: False
    w.outcomes = lambda effect: None if type(effect).__name__ == "Reroute" else True
    w.pass_time(60)
    doubts(w, "t03")
    w.pass_time(60)
    assert "decode-1" in serving(w)
    assert "decode-1" not in {e.worker for e in w.did(StopWorker) if isinstance(e, StopWorker)}


def test_it_replays() -> None:
    """The same events as JSON give the same instructions."""
    w = leaving(0.5)
    dies(w, "t04", "t05")
    w.held = lambda effect: False
    w.pass_time(60)
    again = Decider(w.policy)
    for event, out in w.journal:
        assert msgspec.json.encode(again.handle(EVENTS.decode(msgspec.json.encode(event)))) == msgspec.json.encode(out)

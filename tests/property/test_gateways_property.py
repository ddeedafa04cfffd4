"""What holds of the decider whatever gateways tell, agents say, people ask and leaders do, in any order."""

from __future__ import annotations

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from sentinel.decide.decider import Decider
from sentinel.decide.state.events import (
    AnyEvent,
    AnyInstruction,
    PinBreaker,
    PolicyLoaded,
    Record,
    Relay,
    SendPage,
    StopWorker,
)
from sentinel.decide.state.relayed import FAILING
from sentinel.model import Action, Component, Drain, Severity, Suspect
from sentinel.testing.decisions import World, rack
from tests.property.walk import WalkWithHolds

WORKERS = ["prefill-1", "decode-1", "decode-2", "decode-3", "decode-4", "spill-1"]
NODES = [f"t{n:02d}" for n in range(1, 9)]
EVENTS = msgspec.json.Decoder(AnyEvent)


class Gateways(WalkWithHolds):
    """Gateways that come, go and tell of breakers, beside agents, looks, people, failing effects and changing leaders."""

    @initialize(floor=st.sampled_from([0.0, 0.5, 1.0]))
    def begin(self, floor: float) -> None:
        self.world = World(rack(floor=floor))
        self.floor, self.seen, self.panics = floor, 0, ()

    # -- what happens -------------------------------------------------------------------------------------------------

    @rule(
        relay=st.builds(
            Relay,
            worker=st.sampled_from(WORKERS),
            breaker=st.sampled_from(["closed", "open", "open", "half_open"]),
            hosts=st.sampled_from([(), ("g1",), ("g1", "g2"), ("g1", "g2")]),
            answers=st.booleans(),
            pin=st.sampled_from(["", "", "", "open", "closed"]),
            pin_by=st.sampled_from(["sentinel", "ann"]),
        ),
        gateways=st.sampled_from([0, 1, 2, 2]),
        panics=st.sampled_from([(), (), (), ("main",), ("main", "overflow")]),
        seconds=st.sampled_from([2, 2, 70]),
    )
    def tell(self, relay: Relay, gateways: int, panics: tuple[str, ...], seconds: int) -> None:
        for n in range(seconds // 2):
            self.world.relayed(*([relay] if n == 0 else []), gateways=gateways, panics=panics)
            self.world.pass_time(2)

    @rule(worker=st.sampled_from(WORKERS), check=st.sampled_from(["worker.frozen", "worker.unreachable"]), present=st.booleans())
    def engine(self, worker: str, check: str, present: bool) -> None:
        node = next(w.nodes[0] for w in self.world.fleet.workers if w.name == worker)
        where = Component(node=node, device=f"worker@{worker}")
        doubt = {"severity": Severity.FATAL, "suspect": Suspect.APP, "action": Action.RESTART_WORKER, "certainty": 0.95}
        self.world.report(self.world.state(check, where, present, **doubt))

    @rule(worker=st.sampled_from(WORKERS), reachable=st.sampled_from([True, False, False, None]))
    def look(self, worker: str, reachable: bool | None) -> None:
        for _ in range(3):
            self.world.watched(worker, reachable)

    @rule(verb=st.sampled_from(["drain", "undrain", "hold", "release", "pin", "unpin"]), whom=st.sampled_from(WORKERS),
          keep=st.sampled_from(["in", "out"]))  # fmt: skip
    def person(self, verb: str, whom: str, keep: str) -> None:
        self.world.ask(verb, whom, keep=keep, until=self.world.now + 300 if verb in ("hold", "pin") else None)

    @rule(seconds=st.sampled_from([1, 20, 300]), silent=st.sets(st.sampled_from(NODES)))
    def time(self, seconds: int, silent: set[str]) -> None:
        """Nobody hears of the gateways meanwhile."""
        self.world.pass_time(seconds, step=max(1, seconds // 20), reporting=[n for n in NODES if n not in silent])

    @rule(outcome=st.sampled_from([True, True, False, None]))
    def effects_go(self, outcome: bool | None) -> None:
        self.world.outcomes = lambda effect: outcome

    # -- what always holds ----------------------------------------------------------------------------------------------

    @invariant()
    def only_gateways_that_are_heard_take_anybody_out(self) -> None:
        """A drain begins for a breaker only while two hosts' breaker is open, unpinned, in a pool without panic, freshly told; and
        what sentinel pins it pins only while a gateway is heard."""
        if not hasattr(self, "world"):
            return
        for event, out in self.world.journal[self.seen :]:
            if type(event).__name__ == "Relayed":
                self.told_at = event.at if event.replicas else float("-inf")
                self.panics = event.panics
            if isinstance(event, PolicyLoaded):
                self.told_at, self.panics = float("-inf"), ()  # another leader has heard nothing yet
            fresh = event.at - self.told_at <= 15.0
            for i in out:
                drain = i.value if isinstance(i, Record) and isinstance(i.value, Drain) else None
                begins = drain is not None and drain.requested_at == event.at and drain.by == "sentinel"
                if drain is not None and begins and drain.reason.startswith(f"{FAILING} on "):
                    pool = next(w.pool for w in self.world.fleet.workers if w.name == drain.worker)
                    assert fresh and pool not in self.panics and drain.doubtful, drain
                if isinstance(i, PinBreaker) and i.by == "sentinel":
                    assert i.state == "" or (fresh and i.state == "open"), i
        self.seen = len(self.world.journal)

    @invariant()
    def one_incident_for_one_worker(self) -> None:
        """Whatever is said of it by agents and gateways, no worker has two open incidents of which one is only its breaker and the
        other would take it out."""
        if not hasattr(self, "world"):
            return
        decider = self.world.decider
        for incident in self.world.open_incidents():
            if {f.check for f in incident.findings} == {FAILING} and incident.culprit in WORKERS:
                others = [i for i in decider.incidents.about(incident.culprit) if i.id != incident.id]
                told = [i for i in others if any(f.check != FAILING for f, _ in decider.incidents.demands(i, eases=False))]
                assert not told or decider.incidents.drains_of(incident), (incident.id, [i.key for i in told])

    @invariant()
    def doubt_never_crosses_the_floor(self) -> None:
        """Doubt alone leaves at least the floor in service."""
        if not hasattr(self, "world"):
            return
        p = self.world.decider.p
        decoders = [w for w in p.workers.values() if w.pool == "main" and w.role.value == "decode"]
        drains = [d for w in decoders if (d := p.open_drain(w.name)) is not None]
        if drains and all(d.doubtful for d in drains):
            assert len(decoders) - len(drains) >= self.floor * len(decoders) - 1e-9

    @invariant()
    def a_key_rings_once(self) -> None:
        """Between a call and its resolve the same dedup key calls nobody again."""
        if not hasattr(self, "world"):
            return
        calling: set[str] = set()
        for page, ok in ((e.page, ok) for e, ok in self.world.told if isinstance(e, SendPage)):
            if page.event == "resolve":  # also one that nobody took: sentinel has done its part
                calling.discard(page.dedup_key)
            elif ok and page.event == "trigger" and not page.details.get("update"):
                assert page.dedup_key not in calling, page
                calling.add(page.dedup_key)

    # -- how it ends --------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """The same events as JSON give the same decisions; and once all is well and people let go, everything serves again."""
        if not hasattr(self, "world"):
            return
        w = self.world
        w.outcomes = lambda effect: True
        w.pass_time(20)
        for hold in list(w.decider.p.holds):
            w.ask("release", hold)
        well = [Relay(worker=name, answers=True) for name in WORKERS]
        for _ in range(3):
            for condition in w.decider.p.conditions.present():
                f = condition.finding
                if f.check.startswith("worker."):
                    fine = w.state(f.check, f.component, False)
                    w.report(fine, fine)
            for worker in (*WORKERS, "spill-2"):
                w.watched(worker, True)
                w.ask("undrain", worker)
            for incident in w.open_incidents():
                if not incident.findings:  # a person was asked for, and has come
                    w.ask("resolve", incident.id)
            for _ in range(20):
                w.relayed(*well)
                w.pass_time(3)
        for _ in range(250):
            w.relayed(*well)
            w.pass_time(10, step=5)
        assert w.decider.p.open_drains() == []
        assert w.open_incidents() == []
        again: Decider | None = None
        for event, out in w.journal:
            if isinstance(event, PolicyLoaded):
                again = Decider(w.policy)
            assert again is not None
            replayed: list[AnyInstruction] = again.handle(EVENTS.decode(msgspec.json.encode(event)))
            assert msgspec.json.encode(replayed) == msgspec.json.encode(out)


Gateways.TestCase.settings = settings(
    max_examples=10, stateful_step_count=14, deadline=None, suppress_health_check=list(HealthCheck)
)  # fmt: skip
TestGateways = Gateways.TestCase


def test_panic_that_comes_and_goes_drains_nothing() -> None:
    """Panic that comes and goes for an hour beside open breakers stops nobody, and calls a person a few times at most."""
    w = World(rack(decoders=4, floor=0.75))
    relays = [Relay(worker=f"decode-{n}", breaker="open", hosts=("g1", "g2")) for n in (1, 2)]
    for n in range(360):
        w.relayed(*relays, panics=("main",) if n % 10 < 5 else ())
        w.pass_time(10, step=5)
    assert w.did(StopWorker) == []
    calls = [p for p in w.pages if p.event == "trigger" and not p.details.get("update") and p.fault == "pool-panic"]
    assert len(calls) <= 4  # flap memory: not one for each time

"""A world for the decider: keeps its own time, carries effects out as told, and remembers everything that was decided.

This stands where the controller's shell, the store and the fleet would; the decider itself is the real one. Use it to ask
what a policy would do: feed findings, let time pass, look at what was recorded, sent and carried out. What always holds:
every effect ends, in lane order, with the outcome that ``outcomes`` gives for it (True unless told otherwise); every id is
made from a counter, so that the same calls give the same decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from sentinel.decide.decider import Decider
from sentinel.decide.rules.policy import Policy
from sentinel.decide.rules.policy_file import default_policy, default_policy_text, load_policy
from sentinel.decide.state.events import (
    AnyEffect,
    AnyEvent,
    AnyInstruction,
    Asked,
    AwaitIdle,
    Done,
    Effect,
    FleetLoaded,
    Forget,
    Look,
    PolicyLoaded,
    Record,
    Relay,
    Relayed,
    Replica,
    Reported,
    Restored,
    SendPage,
    Tick,
    Watched,
)
from sentinel.model import (
    Action,
    Component,
    Drain,
    Finding,
    Fleet,
    Hold,
    Incident,
    Kind,
    Page,
    Place,
    Pool,
    Report,
    Role,
    Routes,
    Severity,
    Suspect,
    Worker,
    WorkerSeen,
    WorkerState,
    gpu_component,
)

PCIS = ("0008:01:00.0", "0009:01:00.0", "0018:01:00.0", "0019:01:00.0")  # the four GPUs of a GB200 tray


def rack(decoders: int = 4, standby: int = 1, floor: float = 0.5) -> Fleet:
    """One rack: a prefill group over t01 and t02, a decoder per following tray, an overflow pool of one active worker and
    ``standby`` stopped ones on trays of their own."""
    workers = [
        Worker(
            name="prefill-1",
            pool="main",
            url="http://prefill-1",
            role=Role.PREFILL,
            gpus=tuple(gpu_component(t, p) for t in ("t01", "t02") for p in PCIS),
            nodes=("t01", "t02"),
            domain="rack-1",
        )
    ]
    names = [(f"decode-{n}", "main", False) for n in range(1, decoders + 1)]
    names += [("spill-1", "overflow", False)] + [(f"spill-{n}", "overflow", True) for n in range(2, 2 + standby)]
    for tray, (name, pool, is_standby) in enumerate(names, 3):
        node = f"t{tray:02d}"
        workers.append(
            Worker(
                name=name,
                pool=pool,
                url=f"http://{name}",
                role=Role.BOTH if pool == "overflow" else Role.DECODE,
                gpus=tuple(gpu_component(node, p) for p in PCIS),
                nodes=(node,),
                domain="rack-1" if pool == "main" else "rack-2",
                capacity=16.5 if pool == "overflow" else 1.0,  # stands in for one decoder
                standby=is_standby,
            )
        )
    return Fleet(
        pools=(Pool(name="main", floor=floor, overflow=("overflow",)), Pool(name="overflow", floor=0.0, primary=False)),
        workers=tuple(workers),
        nodes=tuple(sorted({n for w in workers for n in w.nodes})),
    )


class World:
    """The decider with a fleet around it. ``outcomes(effect)`` gives True, False or None (could not be told)."""

    def __init__(self, fleet: Fleet | None = None, policy: Policy | None = None) -> None:
        self.fleet = fleet or rack()
        self.policy = policy or default_policy()
        self.rules = "" if policy else default_policy_text()  # their text, where it is known: told first by every leader
        self.now = 1_000_000.0
        self.outcomes: Callable[[AnyEffect], bool | None] = lambda effect: True
        self.held: Callable[[AnyEffect], bool] = lambda effect: False  # effects that have not ended yet
        self.seen: Callable[[Look], WorkerSeen | None] = lambda effect: None  # what a look at a worker shows of its load
        self.journal: list[tuple[AnyEvent, list[AnyInstruction]]] = []
        self.store: dict[tuple[str, str], Incident | Drain | Hold | Routes] = {}
        self.pending: dict[str, AnyEffect] = {}
        self.pages: list[Page] = []
        self.done: list[AnyEffect] = []
        self.told: list[tuple[AnyEffect, bool | None]] = []  # every end of an effect, with its outcome
        self._n = 0
        self._epoch = 0
        self.lead()

    # -- time and events ----------------------------------------------------------------------------------------------

    def lead(self) -> None:
        """A (new) leader takes over from what is in the store; soft state is lost."""
        self._epoch += 1
        self.decider = Decider(self.policy)
        if self.rules:
            self.handle(PolicyLoaded(id=self._id(), at=self.now, text=self.rules))
        self.handle(FleetLoaded(id=self._id(), at=self.now, fleet=self.fleet))
        kinds = {kind: tuple(v for (k, _), v in self.store.items() if k == kind) for kind in ("incident", "drain", "hold")}
        self.handle(
            Restored(
                id=self._id(),
                at=self.now,
                epoch=self._epoch,
                incidents=kinds["incident"],  # type: ignore[arg-type]
                drains=kinds["drain"],  # type: ignore[arg-type]
                holds=kinds["hold"],  # type: ignore[arg-type]
                routes=self.store.get(("routes", "routes")),  # type: ignore[arg-type]
                pending=tuple(self.pending),
            )
        )
        self.settle()

    def reload(self, fleet: Fleet) -> None:
        """The configuration changed under the leader."""
        self.fleet = fleet
        self.handle(FleetLoaded(id=self._id(), at=self.now, fleet=fleet))
        self.settle()

    def use_policy(self, text: str) -> None:
        """The rules changed under the leader. Raises PolicyError, as the shell would, when they cannot be used."""
        self.policy, self.rules = load_policy(text), text
        self.handle(PolicyLoaded(id=self._id(), at=self.now, text=text))
        self.settle()

    def handle(self, event: AnyEvent) -> list[AnyInstruction]:
        """One event, its records and its effects made pending; nothing is carried out yet."""
        out = self.decider.handle(event)
        self.journal.append((event, out))
        if isinstance(event, Done):
            self.pending.pop(event.instruction, None)
        for instruction in out:
            match instruction:
                case Record():
                    self.store[(instruction.kind, instruction.key)] = instruction.value
                case Forget():
                    self.store.pop((instruction.kind, instruction.key), None)
                case _:
                    self.pending[instruction.id] = instruction
        return out

    def settle(self) -> None:
        """Carry out every pending effect that is not held, lane by lane, until nothing moves."""
        for _ in range(1000):
            lanes: dict[str, deque[AnyEffect]] = {}
            for effect in self.pending.values():
                lanes.setdefault(effect.lane, deque()).append(effect)
            ready = [lane[0] for lane in lanes.values() if not self.held(lane[0])]
            if not ready:
                return
            for effect in ready:
                self._carry_out(effect)
        raise AssertionError("the decider asks without end")

    def _carry_out(self, effect: AnyEffect) -> None:
        ok = self.outcomes(effect)
        self.done.append(effect)
        self.told.append((effect, ok))
        if isinstance(effect, SendPage) and ok:
            self.pages.append(effect.page)
        if isinstance(effect, Look):
            self.handle(Watched(id=self._id(), at=self.now, worker=effect.worker, reachable=ok, seen=self.seen(effect)))
        self.handle(Done(id=self._id(), at=self.now, instruction=effect.id, ok=ok, detail="" if ok else "told so by the test"))

    def pass_time(self, seconds: float, step: float = 1.0, reporting: Sequence[str] | None = None) -> None:
        """Let time pass in ticks; every node (or those named) goes on reporting that it is there."""
        end = self.now + seconds
        while self.now < end:
            self.now += min(step, end - self.now)
            for node in self.fleet.nodes if reporting is None else reporting:
                self.handle(Reported(id=self._id(), at=self.now, report=self._report(node)))
            self.handle(Tick(id=self._id(), at=self.now))
            self.settle()

    # -- what nodes, workers and people say -----------------------------------------------------------------------------

    def report(
        self, *findings: Finding, node: str = "", workers: Sequence[WorkerSeen] = (), place: Place | None = None
    ) -> None:
        """One report of the node that the findings are about."""
        node = node or findings[0].component.node
        report = msgspec.structs.replace(self._report(node, findings, workers), place=place)
        self.handle(Reported(id=self._id(), at=self.now, report=report))
        self.settle()

    def watched(self, worker: str, reachable: bool | None, load: int | None = None) -> None:
        seen = WorkerSeen(worker=worker, running=load) if load is not None else None
        self.handle(Watched(id=self._id(), at=self.now, worker=worker, reachable=reachable, seen=seen))
        self.settle()

    def relayed(
        self, *workers: Relay, gateways: int = 2, panics: Sequence[str] = (), obey: int | None = None, window: float = 10.0
    ) -> None:
        """What the gateways g1, g2, … tell of workers. ``obey``: the table's version that they go by; None: the newest."""
        version = self.decider.p.routes.version if obey is None else obey
        replicas = tuple(Replica(name=f"g{n}", version=version) for n in range(1, gateways + 1))
        event = Relayed(
            id=self._id(), at=self.now, window=window, replicas=replicas, workers=workers, panics=tuple(panics)
        )  # fmt: skip
        self.handle(event)
        self.settle()

    def ask(self, verb: str, target: str, reason: str = "because", **more: object) -> None:
        self.handle(Asked(id=self._id(), at=self.now, verb=verb, target=target, by="ann", reason=reason, **more))  # type: ignore[arg-type]
        self.settle()

    def xid(self, code: int, node: str, gpu: int = 0, **more: object) -> Finding:
        """A kernel line's finding; every call is a new occurrence."""
        fields: dict[str, object] = {
            "severity": Severity.FATAL,
            "action": Action.RESET_GPU,
            "kind": Kind.EVENT,
            "summary": f"Xid {code}",
            "facts": {"xid": code},
        }
        where = gpu_component(node, PCIS[gpu])
        return Finding(id=f"{node}:{self._id()}", check=f"xid.{code}", component=where, at=self.now, **{**fields, **more})  # type: ignore[arg-type]

    def state(self, check: str, component: Component, present: bool = True, **more: object) -> Finding:
        """A measured state, warning unless told otherwise."""
        fields: dict[str, object] = {"severity": Severity.WARNING, "summary": check, "present": present, **more}
        return Finding(id=f"{component}:{check}", check=check, component=component, at=self.now, **fields)  # type: ignore[arg-type]

    def mismatch(self, node: str, present: bool = True) -> Finding:
        where = Component(node=node, device="driver")
        return self.state("driver.version_mismatch", where, present, suspect=Suspect.MONITOR, action=Action.REBOOT_NODE)

    # -- looking -------------------------------------------------------------------------------------------------------

    def drain_of(self, worker: str) -> Drain | None:
        """The latest drain of a worker, open or ended."""
        mine = [v for (kind, _), v in self.store.items() if kind == "drain" and isinstance(v, Drain) and v.worker == worker]
        return mine[-1] if mine else None

    def incidents(self) -> list[Incident]:
        return [v for (kind, _), v in self.store.items() if kind == "incident" and isinstance(v, Incident)]

    def open_incidents(self) -> list[Incident]:
        return [i for i in self.incidents() if i.closed_at is None]

    def state_of(self, worker: str) -> WorkerState:
        routes = self.store[("routes", "routes")]
        assert isinstance(routes, Routes)  # noqa: S101
        return next(e.state for pool in routes.pools for e in pool.workers if e.worker == worker)

    def weight(self, pool: str) -> float:
        routes = self.store[("routes", "routes")]
        assert isinstance(routes, Routes)  # noqa: S101
        return next(r.weight for r in routes.pools if r.pool == pool)

    def did(self, kind: type[Effect]) -> list[AnyEffect]:
        """What was carried out, of one kind, in order."""
        return [e for e in self.done if isinstance(e, kind)]

    def busy(self, effect: AnyEffect) -> bool:
        """For ``held``: requests stay in flight."""
        return isinstance(effect, AwaitIdle)

    def _report(self, node: str, findings: Sequence[Finding] = (), workers: Sequence[WorkerSeen] = ()) -> Report:
        self._n += 1
        return Report(node=node, session="s", seq=self._n, at=self.now, findings=tuple(findings), workers=tuple(workers))

    def _id(self) -> str:
        self._n += 1
        return f"e{self._n}"

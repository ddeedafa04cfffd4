"""Racks under observation, for the tests of correlation: what their nodes say of a shared fault, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from sentinel.model import (
    Action,
    Component,
    Finding,
    Fleet,
    Incident,
    NodePlace,
    Pool,
    Role,
    Severity,
    Suspect,
    Worker,
    WorkerState,
    gpu_component,
)
from sentinel.testing.decisions import PCIS, World

APP = {"severity": Severity.INFO, "suspect": Suspect.APP, "action": Action.RESTART_WORKER}
PEER = {"suspect": Suspect.PEER, "severity": Severity.WARNING, "action": Action.WAIT}


def fleet(racks: int = 2, trays: int = 18, *, leaves: bool = True, placed: bool = True, floor: float = 0.0) -> Fleet:
    """Racks of trays, a TP4 decoder on each, rail N of every node at leaf switch N of its rack."""
    names = [f"r{r}t{t:02d}" for r in range(1, racks + 1) for t in range(1, trays + 1)]
    workers = tuple(
        Worker(
            name=f"decode-{n}",
            pool="main",
            url=f"http://{n}",
            role=Role.BOTH,
            gpus=tuple(gpu_component(n, p) for p in PCIS),
            nodes=(n,),
        )
        for n in names
    )
    places = tuple(
        NodePlace(
            node=n,
            domain=n.partition("t")[0],
            addresses=(f"imex-{n}",),
            leaves={f"mlx5_{k}": f"leaf-{n.partition('t')[0]}-{k}" for k in range(4)} if leaves else {},
        )
        for n in names
    )
    spare = Worker(name="spare", pool="spare", url="http://spare", nodes=("s01",), capacity=1e6)  # what is drained is never short
    main = Pool(name="main", floor=floor, max_doubtful_drains=100, max_share=1.0, max_domain_share=1.0, overflow=("spare",))
    pools = (main, Pool(name="spare", primary=False, floor=0.0))
    return Fleet(pools=pools, workers=(*workers, spare), nodes=(*names, "s01"), places=places if placed else ())


def link(w: World, node: str, gpu: int, n: int, present: bool = True) -> Finding:
    where = msgspec.structs.replace(gpu_component(node, PCIS[gpu]), part=f"nvlink{n}")
    words = {"severity": Severity.FATAL, "action": Action.RESET_GPU, "certainty": 0.9, "facts": {"link": n}}
    return w.state("gpu.nvlink_down", where, present, **words)


def rail(w: World, node: str, device: str = "mlx5_1", present: bool = True, **more: object) -> Finding:
    where = Component(node=node, device=f"ib@{device}", part="port1")
    words = {"severity": Severity.FATAL, "action": Action.INSPECT, "certainty": 0.9, **more}
    return w.state("ib.port_down", where, present, **words)


def lost(w: World, node: str, peer: str, present: bool = True) -> Finding:
    where = Component(node=node, device=f"imex@imex-{peer}")
    words = {"action": Action.INSPECT, "suspect": Suspect.PEER, "certainty": 0.9, "facts": {"peer": f"imex-{peer}"}}
    return w.state("imex.peer", where, present, **words)


def confirmed(w: World, *findings: Finding) -> None:
    """Each said twice by its node: the rules for states ask for that."""
    for _ in range(2):
        for f in findings:
            w.report(f)


def open_of(w: World) -> list[tuple[str, str]]:
    return sorted((i.fault, i.culprit) for i in w.open_incidents())


def one(w: World) -> Incident:
    found = w.open_incidents()
    assert len(found) == 1, [(i.fault, i.culprit, i.scope) for i in found]
    return found[0]


def out(w: World) -> set[str]:
    return {x.name for x in w.fleet.workers if w.state_of(x.name) is not WorkerState.ACTIVE}


def notified(w: World) -> set[str]:
    """Dedup keys under which somebody was called."""
    return {p.dedup_key for p in w.pages if p.event == "trigger"}


def echo(w: World, nodes: Iterable[str]) -> list[Finding]:
    """What the peers of a broken GPU say: lost packets, a link whose far side went down, torn channels, recovery action 3."""
    found = []
    for k, n in enumerate(nodes):
        found += [
            w.xid(145, n, k % 4, **PEER, facts={"unit": "RLW"}),
            w.xid(149, n, k % 4, suspect=Suspect.PEER, facts={"reason": 0x20, "links": [k % 18]}),
            w.xid(45, n, k % 4, **APP),
            w.state("gpu.recovery_action", gpu_component(n, PCIS[k % 4]), **PEER, facts={"value": 3}),
        ]
    return found

"""The decider under a fleet: CPU per report, and a storm. No I/O: this is the pure part's share of the controller's cost.

N nodes, each with one TP4 decoder and a snapshot of 60 fine states; then a share of them turns fatal at once. Prints one JSON
object as its last line: CPU microseconds per report (median of rounds), the share of one core that reports every five
seconds would take, milliseconds per tick, and how long the decider needs for the storm.

usage: controller.py [--nodes 1000] [--storm 75]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import msgspec

from sentinel.decide.events import Reported, Tick
from sentinel.model import Action, Component, Finding, Fleet, Pool, Report, Role, Worker, gpu_component
from sentinel.testing.decisions import PCIS, World


def fleet(nodes: int) -> Fleet:
    names = [f"n{i:05d}" for i in range(nodes)]
    workers = [
        Worker(
            name=f"decode-{n}",
            pool="main",
            url=f"http://{n}",
            role=Role.DECODE,
            gpus=tuple(gpu_component(n, p) for p in PCIS),
            nodes=(n,),
            domain=f"rack-{i // 18}",
        )
        for i, n in enumerate(names)
    ]
    spare = Worker(name="spare", pool="overflow", url="http://spare", nodes=(names[0],))
    pools = (Pool(name="main", overflow=("overflow",)), Pool(name="overflow", floor=0.0, primary=False))
    return Fleet(pools=pools, workers=(*workers, spare), nodes=tuple(names))


def fine(node: str, at: float) -> tuple[Finding, ...]:
    """A healthy node's snapshot: 15 states for each of four GPUs."""
    return tuple(
        Finding(id=f"{node}:{p}:{n}", check=f"gpu.check{n}", component=gpu_component(node, p), at=at, present=False)
        for p in PCIS
        for n in range(15)
    )


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--nodes", type=int, default=1000)
    ap.add_argument("--storm", type=int, default=75)
    a = ap.parse_args()
    world = World(fleet(a.nodes))
    decoder = msgspec.json.Decoder(Report)
    bodies = [
        msgspec.json.encode(Report(node=n, session="s", seq=1, at=world.now, snapshot=True, findings=fine(n, world.now)))
        for n in world.fleet.nodes
    ]
    rounds, ticks = [], []
    for _ in range(5):
        world.now += 5
        began = time.process_time()
        for i, body in enumerate(bodies):
            world.decider.handle(Reported(id=f"r{i}", at=world.now, report=decoder.decode(body)))
        rounds.append((time.process_time() - began) / len(bodies))
        began = time.process_time()
        world.decider.handle(Tick(id="t", at=world.now))
        ticks.append(time.process_time() - began)
    sick = [
        Reported(
            id=f"s{i}",
            at=world.now,
            report=Report(
                node=n, session="s", seq=2, at=world.now, findings=(world.xid(79, n, action=Action.REBOOT_NODE),)
            ),
        )
        for i, n in enumerate(world.fleet.nodes[: a.storm])
    ]
    began = time.perf_counter()
    for event in sick:
        world.handle(event)
    storm = time.perf_counter() - began
    out = sum(world.decider.p.open_drain(f"decode-{n}") is not None for n in world.fleet.nodes[: a.storm])
    per_report = statistics.median(rounds)
    print(
        json.dumps(
            {
                "nodes": a.nodes,
                "states_per_report": 60,
                "report_bytes": len(bodies[0]),
                "cpu_us_per_report": round(per_report * 1e6, 1),
                "core_share_at_5s": round(per_report * a.nodes / 5, 3),
                "tick_ms": round(statistics.median(ticks) * 1e3, 2),
                "storm_nodes": a.storm,
                "storm_decided_s": round(storm, 3),
                "storm_out": out,
                "status_ms": round(_timed(world) * 1e3, 1),
                "first_component": str(Component(node=world.fleet.nodes[0])),
            }
        )
    )


def _timed(world: World) -> float:
    began = time.perf_counter()
    world.decider.status()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

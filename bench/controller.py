"""The whole controller under a fleet: a real one over HTTP with its journal and embedded store, and the decider alone.

N agents (load/agents.py, one process) report every five seconds over connections of their own and hold their long polls, as
agents do; a node in a hundred has a warning that stands. The controller (load/served.py) is one process, whose CPU is read
from the kernel. Then a share of the nodes turns fatal within a second, more of them become doubtful, and 100,000 findings come at
once. Simulated: what agents measure, the workers and the pager. Real: every byte between agent and controller, and all of it.

Prints what it measures as it goes, and one JSON object as its last line. ``cpu`` is of one core. The load's own CPU is there
too: where it nears 1.0 the figures are the load's, not the controller's. ``p50``/``p99`` of ``decision``: from the arrival in the
queue until what was decided is durable; of ``ack``: from the agent's write to the answer read.

usage: controller.py [--nodes 10000] [--storm 750] [--burst 100000] [--seconds 20] [--sizes 100,1000] [--profile FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvloop
from load.agents import Fleet, event, heartbeat, snapshot, states
from load.served import fleet, names

from sentinel.controller.journal import read_journal
from sentinel.decide.state.events import Heard, Reported, Tick
from sentinel.model import Action, Finding, Report, Severity, Suspect, gpu_component
from sentinel.testing.decisions import PCIS, World

EVERY = 5.0  # seconds between two heartbeats of a node


class Served:
    """The controller's process: one line asks, one line answers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, verb: str) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{verb}\n".encode())
        answer: dict[str, Any] = json.loads(await self.process.stdout.readline())
        return answer


@asynccontextmanager
async def serving(nodes: int, directory: Path, *, lease: float, profile: bool = False) -> Any:
    argv = [sys.executable, str(Path(__file__).parent / "load/served.py"), "--nodes", str(nodes), "--directory", str(directory),
            "--lease", str(lease)]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *argv, *(["--profile"] if profile else []), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    try:
        yield Served(process)
    finally:
        assert process.stdin
        process.stdin.close()
        await process.wait()


def own_cpu() -> float:
    use = resource.getrusage(resource.RUSAGE_SELF)
    return use.ru_utime + use.ru_stime


def ms(seconds: list[float], share: float) -> float:
    ordered = sorted(seconds)
    return round(1e3 * ordered[min(int(len(ordered) * share), len(ordered) - 1)], 1) if ordered else 0.0


async def steady(served: Served, agents: Fleet, seconds: float) -> dict[str, Any]:
    """What it costs while nothing happens."""
    before, load, began = await served.ask("spent"), own_cpu(), dict(agents.count)
    agents.took.clear()
    await asyncio.sleep(seconds)
    after = await served.ask("spent")
    took = after["at"] - before["at"]
    rate = {kind: round((n - began.get(kind, 0)) / took, 1) for kind, n in agents.count.items()}
    return {
        "cpu": round((after["cpu"] - before["cpu"]) / took, 3), "load_cpu": round((own_cpu() - load) / took, 3),
        "rss_mib": round(after["rss_mib"]), "per_s": rate, "looks_per_s": round((after["looks"] - before["looks"]) / took, 1),
        "decision_p50_ms": round(after["p50_ms"], 2), "decision_p99_ms": round(after["p99_ms"], 2),
        "ack_p50_ms": ms(agents.took.get("beat", []), 0.5), "ack_p99_ms": ms(agents.took.get("beat", []), 0.99),
        "journal_mb_per_s": round((after["journal"] - before["journal"]) / took / 1e6, 3),
    }  # fmt: skip


async def storm(served: Served, agents: Fleet, nodes: list[str]) -> dict[str, Any]:
    """These nodes lose a GPU within a second: facts, no budget holds them back."""
    await served.ask("spent")
    began = time.time()
    for number, node in enumerate(nodes):
        await asyncio.sleep(max(0.0, began + number / len(nodes) - time.time()))
        agents.tell(node, event(node, "xid.79", 1, severity=Severity.FATAL, action=Action.REBOOT_NODE, facts={"xid": 79}))
    last = time.time()
    await agents.all_taken()
    durable = agents.last_ack
    while (told := await served.ask("decided"))["derouted"] < len(nodes) and time.time() - last < 60:
        await asyncio.sleep(0.05)
    spent = await served.ask("spent")
    return {
        "nodes": len(nodes), "out": told["out"], "lines_in_s": round(last - began, 3),
        "last_line_to_last_out_of_route_table_s": round(durable - last, 3),
        "last_line_to_last_derouted_s": round(told["last_derouted"] - last, 3), "decision_p99_ms": round(spent["p99_ms"], 1),
        "incidents": told["incidents"],
    }  # fmt: skip


async def doubt(served: Served, agents: Fleet, nodes: list[str]) -> dict[str, Any]:
    """These nodes become doubtful, twice measured: budgets and floors hold, whatever their number."""
    before = await served.ask("decided")
    for _ in range(2):
        for node in nodes:
            where, now = gpu_component(node, PCIS[1]), time.time()
            odd = Finding(
                id=f"{node}:odd", check="gpu.odd", component=where, at=now, severity=Severity.FATAL, certainty=0.7,
                action=Action.RESET_GPU,
            )  # fmt: skip
            agents.tell(node, odd)
        await agents.all_taken()
    await asyncio.sleep(2.0)
    after = await served.ask("decided")
    floor = 0.5
    return {
        "nodes": len(nodes), "drained_on_doubt": after["doubtful"] - before["doubtful"],
        "active_share": round(after["active"] / after["workers"], 4), "floor": floor,
        "floor_kept": after["active"] >= floor * after["workers"],
    }  # fmt: skip


async def burst(served: Served, agents: Fleet, findings: int, directory: Path) -> dict[str, Any]:
    """Everything at once: programs crash on all nodes, ten lines on each. All must be taken, and each one once."""
    nodes = list(agents.agents)
    each = max(1, findings // len(nodes))
    began = time.time()
    for node in nodes:
        crash = {"severity": Severity.WARNING, "suspect": Suspect.APP, "facts": {"xid": 13}}
        agents.tell(node, *(event(node, "xid.13", 1000 + n, n % 4, **crash) for n in range(each)))
    await agents.all_taken()
    took = time.time() - began
    spent, told = await served.ask("spent"), await served.ask("decided")
    ids: dict[str, int] = {}
    for entry in read_journal(directory / "journal"):
        if isinstance(entry.event, Reported):
            for f in entry.event.report.findings:
                if f.check == "xid.13":
                    ids[f.id] = ids.get(f.id, 0) + 1
    return {
        "findings": each * len(nodes), "taken": len(ids), "twice": sum(n > 1 for n in ids.values()), "seconds": round(took, 2),
        "turned_away": dict(agents.turned_away), "decision_p99_ms": round(spent["p99_ms"], 1), "incidents": told["incidents"],
    }  # fmt: skip


async def whole(a: argparse.Namespace, nodes: int, *, everything: bool) -> dict[str, Any]:
    directory = Path(tempfile.mkdtemp(prefix="sentinel-bench-"))
    try:
        async with serving(nodes, directory, lease=a.lease, profile=bool(a.profile)) as served:
            told = await served.ask("decided")
            agents = Fleet(names(nodes), EVERY)
            at = urlsplit(told["url"])
            polls = min(nodes, 9000)  # two connections each; this machine allows 20,000 open files
            wait = 50.0 * polls / nodes  # as many polls as if all had one
            before, began = await served.ask("spent"), time.monotonic()
            beating = asyncio.create_task(agents.beat())
            await agents.connect("127.0.0.1", at.port or 0, polls=polls, wait=wait)
            while any(agent.wants for agent in agents.agents.values()):
                await asyncio.sleep(0.1)
            after = await served.ask("spent")
            result: dict[str, Any] = {
                "lease_s": a.lease,
                "first_snapshots": {"s": round(time.monotonic() - began, 1), "cpu_s": round(after["cpu"] - before["cpu"], 2),
                                    "turned_away": dict(agents.turned_away)},
            }  # fmt: skip
            for node in names(nodes)[::100]:
                where = gpu_component(node, PCIS[2])
                agents.agents[node].kept = lambda w=where: Finding(
                    id=f"{w}:ecc", check="gpu.ecc_storm", component=w, at=time.time(), severity=Severity.WARNING, certainty=0.8,
                    summary="corrected ECC errors at 900 a second", evidence=("volatile_sram_corrected=12345",),
                )  # fmt: skip
            await asyncio.sleep(EVERY)
            if a.profile:
                await served.ask("profile")
            result["steady"] = await steady(served, agents, a.seconds)
            if a.profile:
                await served.ask("profiled")
                shutil.copy(directory / "profile", a.profile)
            print(f"{nodes} nodes: {json.dumps(result)}", flush=True)
            if everything:
                each: tuple[tuple[str, Callable[[], Any]], ...] = (
                    ("storm", lambda: storm(served, agents, names(nodes)[1::2][: a.storm])),
                    ("doubt", lambda: doubt(served, agents, names(nodes)[2::2][: a.storm])),
                    ("burst", lambda: burst(served, agents, a.burst, directory)),
                )
                for what, run in each:
                    result[what] = await run()
                    print(f"{what}: {json.dumps(result[what])}", flush=True)
            result["leaderships"] = (await served.ask("decided")).get("epoch")
            beating.cancel()
            for agent in agents.agents.values():
                if agent.transport is not None:
                    agent.transport.abort()
        return result
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def sizes() -> dict[str, Any]:
    """Bytes of one report of a GB200 tray."""
    now = 1_760_000_000.123456
    full = msgspec.structs.replace(snapshot("n00001", 1000, now), findings=states("n00001", now))
    quiet = heartbeat("n00001", 1000, now, 960)
    heard = Heard(id="ev-1-123456", at=now, nodes=tuple(names(1000)))
    return {
        "snapshot_states": len(full.findings), "snapshot_bytes": len(msgspec.json.encode(full)),
        "heartbeat_bytes": len(msgspec.json.encode(quiet)),
        "journal_bytes_per_heartbeat": round(len(msgspec.json.encode(heard)) / 1000, 1),
    }  # fmt: skip


def decider(nodes: int, sick: int) -> dict[str, Any]:
    """The pure part alone: snapshots as they arrive when every state is passed on, ticks, and the storm."""
    world = World(fleet(nodes))
    decode = msgspec.json.Decoder(Report).decode
    bodies = [
        msgspec.json.encode(Report(node=n, session="s", seq=1, at=world.now, snapshot=True, findings=states(n, world.now)[:60]))
        for n in world.fleet.nodes
    ]
    rounds, ticks = [], []
    for _ in range(3):
        world.now += 5
        began = time.process_time()
        for i, body in enumerate(bodies):
            world.decider.handle(Reported(id=f"r{i}", at=world.now, report=decode(body)))
        rounds.append((time.process_time() - began) / len(bodies))
        began = time.process_time()
        world.decider.handle(Tick(id="t", at=world.now))
        ticks.append(time.process_time() - began)
    began = time.perf_counter()
    for i, n in enumerate(world.fleet.nodes[:sick]):
        lost = world.xid(79, n, action=Action.REBOOT_NODE)
        world.handle(Reported(id=f"s{i}", at=world.now, report=Report(node=n, session="s", seq=2, at=world.now, findings=(lost,))))
    took = time.perf_counter() - began
    began = time.perf_counter()
    world.decider.status()
    return {
        "cpu_us_per_report_of_60_states": round(statistics.median(rounds) * 1e6, 1),
        "tick_ms": round(statistics.median(ticks) * 1e3, 2), "storm_decided_s": round(took, 3),
        "status_ms": round((time.perf_counter() - began) * 1e3, 1),
    }  # fmt: skip


async def run(a: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"nodes": a.nodes, "sizes": sizes(), "decider_alone": decider(a.nodes, a.storm)}
    print(json.dumps(result), flush=True)
    result["by_nodes"] = {n: await whole(a, n, everything=False) for n in map(int, filter(None, a.sizes.split(",")))}
    return result | await whole(a, a.nodes, everything=True)


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--nodes", type=int, default=10_000)
    ap.add_argument("--storm", type=int, default=750)
    ap.add_argument("--burst", type=int, default=100_000)
    ap.add_argument("--seconds", type=float, default=20.0)
    ap.add_argument("--sizes", default="100,1000")
    ap.add_argument("--lease", type=float, default=3.0, help="seconds; more where other work takes this machine's cores away")
    ap.add_argument("--profile", default="")
    a = ap.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    print(json.dumps(uvloop.run(run(a))))


if __name__ == "__main__":
    main()

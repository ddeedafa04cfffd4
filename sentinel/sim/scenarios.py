"""The scripted faults: what each does to the rack, and what must then hold.

This module exists so that a scenario is a table entry with a short script. What always holds: a script touches the rack only
through the stage's handles, waits only through its story, and states what it expects in sentences; whether they held is for
the story to count.
"""

from __future__ import annotations

from sentinel.model import DrainState, Response, WorkerState
from sentinel.sim.expect import (
    Scenario,
    fails_only_on,
    left_by,
    ms,
    none_fails,
    only,
    reporters,
    responses,
    served_on,
    stopped,
    told,
    xid,
)
from sentinel.sim.expect import faults as faults_of
from sentinel.sim.expect import pages as pages_of
from sentinel.sim.probes import mismatch
from sentinel.sim.rack import GPUS, NODES, PLACES
from sentinel.sim.scenarios_gateway import GATEWAYS
from sentinel.sim.scenarios_rack import RACK
from sentinel.sim.story import Story


async def gpu_off_bus(s: Story) -> None:
    victim, pci = "decode-03", GPUS[1]
    node = PLACES[victim].nodes[0]
    await s.until(lambda: s.stage.traffic.flowing(victim) > 0, 10)
    s.timeline.inject(f"{node}/gpu@{pci} falls off the bus; {victim}, a TP4 group, stands still without it")
    await s.stage.freeze(victim)
    await s.stage.set_gpu(node, pci, lost=True)
    await s.stage.worker_host("break", victim, f"CUDA error: {node}/gpu@{pci} is lost")
    await s.stage.inject_kernel_line(node, xid(pci, 79, "pid='<unknown>', name=<unknown>, GPU has fallen off the bus."))
    left = await s.until(lambda: s.state(victim) is WorkerState.OUT)
    killed = await s.until(lambda: s.drain_of(victim, DrainState.OUT) is not None)
    paged = await s.until(lambda: bool(s.pages()))
    overflow = await s.until(lambda: s.timeline.first("overflow serves") is not None, 30)
    await s.flow(3)
    s.expect(f"{victim} left the rotation", left and s.state(victim) is WorkerState.OUT, ms(s, "out of rotation"))
    s.expect(f"{victim} was evicted and stays out", killed and await stopped(s, victim), responses(s))
    only(s, {victim})
    s.expect("the overflow pool takes load", overflow, ms(s, "overflow serves"))
    s.expect("one critical page", paged and [p["urgency"] for p in s.pages()] == ["critical"], pages_of(s))
    fails_only_on(s, victim)
    served_on(s)


async def row_remap_pending(s: Story) -> None:
    victim, pci = "decode-05", GPUS[2]
    node = PLACES[victim].nodes[0]
    await s.until(lambda: s.stage.traffic.flowing(victim) > 0, 10)
    s.timeline.inject(f"{node}/gpu@{pci}: the driver says that a row remap is pending")
    await s.stage.set_gpu(node, pci, rows_pending=True, rows_uncorrected=1)
    left = await s.until(lambda: s.state(victim) is WorkerState.OUT)
    back = await s.until(lambda: s.drain_of(victim, DrainState.DONE) is not None and s.active(victim), 40)
    served = await s.until(lambda: s.stage.traffic.flowing(victim) > 0, 15)
    drain = s.drain_of(victim)
    s.expect(f"{victim} left the rotation", left, ms(s, "out of rotation"))
    s.expect("it was drained, not evicted", drain is not None and drain.response is Response.DRAIN, responses(s))
    s.expect("the GPU was reset and the worker verified", told(drain, "repairing", "verified"), ms(s, "repaired"))
    s.expect(f"{victim} is back and takes requests", back and served, ms(s, "back"))
    only(s, {victim})
    none_fails(s)
    s.expect("nobody was paged", not s.pages(), pages_of(s))
    served_on(s)


async def app_fault(s: Story) -> None:
    misaligned = "pid=4711, name=python3, Graphics SM Warp Exception on (GPC 2, TPC 1, SM 0): Misaligned Address"
    unmapped = (
        "pid=4712, name=python3, channel 0x0000000a, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC1 GPCCLIENT_T1_0 faulted @ "
        "0x7f42_00000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE"
    )
    trapped = "pid=4713, name=python3, channel 0x00000010"
    faults = (("t05", GPUS[0], 13, misaligned), ("t08", GPUS[1], 31, unmapped), ("t11", GPUS[3], 43, trapped))
    s.timeline.inject("an application makes Xid 13 on t05, 31 on t08 and 43 on t11")
    for node, pci, code, rest in faults:
        await s.stage.inject_kernel_line(node, xid(pci, code, rest))
    wanted = {f"{node}/gpu@{pci}" for node, pci, _, _ in faults}

    def on_record() -> set[str]:
        return {str(f.component) for i in s.new_incidents() for f in i.findings} & wanted

    recorded = await s.until(lambda: on_record() == wanted, 15)
    await s.flow(6)
    s.expect("all three are on record", recorded, ", ".join(sorted(on_record())) or "nothing")
    s.expect("each is judged an application's fault", {i.fault for i in s.new_incidents()} == {"app-fault"}, faults_of(s))
    only(s, set())
    s.expect("every worker stays in rotation", all(s.active(p.name) for p in PLACES.values() if not p.standby))
    s.expect("nobody was paged", not s.pages(), pages_of(s))
    none_fails(s)
    served_on(s)


async def engine_frozen(s: Story) -> None:
    victim = "decode-02"
    await s.until(lambda: s.stage.traffic.flowing(victim) > 0, 10)
    s.timeline.inject(f"{victim}: the engine hangs with {s.stage.traffic.flowing(victim)} streams running; /health stays green")
    await s.stage.freeze(victim)
    left = await s.until(lambda: s.state(victim) is WorkerState.OUT)
    back = await s.until(lambda: s.drain_of(victim, DrainState.DONE) is not None and s.active(victim), 40)
    served = await s.until(lambda: s.stage.traffic.flowing(victim) > 0, 15)
    found = [f for i in s.new_incidents("engine-frozen") for f in i.findings if f.check == "worker.frozen"]
    host = (await s.stage.worker_host("list"))["workers"][victim]
    s.expect("found as a frozen engine", bool(found), found[0].summary if found else faults_of(s))
    s.expect(f"{victim} left the rotation", left, ms(s, "out of rotation"))
    restarted = host["starts"] == 2 and left_by(s, victim, Response.EVICT)
    s.expect("it was evicted and restarted", restarted, f"{host['starts']} starts; {responses(s)}")
    s.expect(f"{victim} is back and takes requests", back and served, ms(s, "back"))
    only(s, {victim})
    fails_only_on(s, victim)
    served_on(s)


async def agent_silent(s: Story) -> None:
    node = "t08"
    worker = next(p.name for p in PLACES.values() if node in p.nodes)
    s.timeline.inject(f"{node}: the agent dies; {worker} serves on")
    await s.stage.silence_agent(node)
    paged = await s.until(lambda: bool(s.pages()), 30)
    kept = all(s.active(p.name) for p in PLACES.values() if not p.standby)
    await s.flow(1)
    s.timeline.mark("agent returns", f"{node}: the agent runs again")
    await s.stage.revive_agent(node)
    over = await s.until(lambda: bool(s.pages("resolve")) and all(i.closed_at for i in s.new_incidents("agent-silent")), 20)
    urgencies = [p["urgency"] for p in s.pages()]
    s.expect("one page of low urgency", paged and urgencies in (["warning"], ["info"]), pages_of(s))
    s.expect("it names the silent agent", [i.fault for i in s.new_incidents()] == ["agent-silent"], faults_of(s))
    only(s, set())
    s.expect("every worker stayed in rotation", kept and all(s.active(p.name) for p in PLACES.values() if not p.standby))
    s.expect("the return was noticed: incident closed, page resolved", over, ms(s, "closed"))
    none_fails(s)
    served_on(s)


async def driver_upgrade(s: Story) -> None:
    nodes = NODES[: len(NODES) // 2]
    s.timeline.inject(f"a driver upgrade without a reboot rolls over {nodes[0]}…{nodes[-1]}: the library no longer matches")
    for node in nodes:
        await s.stage.set_driver(node, **mismatch())
        await s.flow(0.6)
    seen = await s.until(lambda: len(reporters(s)) == len(nodes), 20)
    paged = await s.until(lambda: bool(s.pages()), 20)
    await s.flow(4)
    systemic = [i for i in s.new_incidents() if i.culprit == "fleet"]
    s.expect("every node's mismatch was noticed", seen, f"{len(reporters(s))} of {len(nodes)} nodes")
    s.expect("one systemic incident, and no other left open", len(systemic) == 1 and not s.open_incidents(systemic), faults_of(s))
    s.expect("one page for all of them", paged and len(s.pages()) == 1, pages_of(s))
    only(s, set())
    s.expect("every worker stays in rotation", all(s.active(p.name) for p in PLACES.values() if not p.standby))
    none_fails(s)
    served_on(s)


SCENARIOS = {
    s.name: s
    for s in (
        Scenario("gpu-off-bus", "Xid 79 on one GPU of a decoder: evict, overflow takes the load, page", gpu_off_bus),
        Scenario("row-remap-pending", "a row remap is pending: drain, reset, verify, return; no request fails", row_remap_pending),
        Scenario("app-fault", "Xid 13, 31 and 43 are an application's: on record, nothing drained, nobody paged", app_fault),
        Scenario("engine-frozen", "an engine hangs behind a green /health: found, evicted, restarted, returned", engine_frozen),
        Scenario("agent-silent", "an agent dies while its workers serve on: no drain, one page of low urgency", agent_silent),
        Scenario("driver-upgrade", "half of the nodes report driver/library mismatch: one systemic incident", driver_upgrade),
        *RACK,
        *GATEWAYS,
    )
}
DEFAULT = "gpu-off-bus"

__all__ = ["DEFAULT", "SCENARIOS", "Scenario", "xid"]

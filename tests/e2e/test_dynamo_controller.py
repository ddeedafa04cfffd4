"""The whole system on real Dynamo: from a driver's value or a kernel line to a worker out of rotation, repaired, and back.

Frontend, discovery, workers' processes, ``sentinel controller`` and ``sentinel agent`` are real; the GPUs' answers, the kernel
log, the engines and PagerDuty are simulated (see ``dynamo_site``). ``test_a_pending_row_remap_is_mended`` runs in CI; the rest
needs minutes and runs with ``make test-long``.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from sentinel.decide.rules.policy_file import default_policy_text
from tests.e2e.dynamo import Mocker
from tests.e2e.dynamo_site import NODE, Site, site, traffic

Discovery = Literal["file", "etcd"]
MENDED = [
    "decided", "out of rotation", "stopping", "out of service", "repairing", "starting", "verifying", "active test passed",
    "verified", "back",
]  # fmt: skip


def steps(drain: dict[str, Any]) -> list[str]:
    """The drain's own story, without what was noted between its steps."""
    return [s["what"] for s in drain["history"] if s["what"] in MENDED]


async def mend(place: Site, victim: Mocker) -> dict[str, Any]:
    """A row remap becomes pending on one worker's GPU; returns the drain once the worker is back."""
    before = len(place.deeds)
    await place.until(lambda: place.in_flight(victim), "requests run on the worker")
    place.set_gpu(victim.name, rows_pending=1)
    await place.gone(victim.hexid)
    ident = (await place.drains())[victim.name]["id"]
    drain = await place.back(victim.name, ident)
    assert steps(drain) == MENDED
    stop, reset, start = place.deeds[before:]
    assert (stop.action, stop.target, stop.routable, stop.in_flight) == ("stop_worker", victim.name, False, 0)
    assert (reset.action, reset.target) == ("reset_gpu", place.pci[victim.name])
    assert (start.action, start.target) == ("start_worker", victim.name)
    await place.over(drain["incident"])
    return drain


async def test_a_pending_row_remap_is_mended(tmp_path: Path) -> None:
    """Under 20 streams: drained to nothing in flight, stopped, reset, started, verified, back; no request fails, no page."""
    async with site(tmp_path) as place:
        async with traffic(place.dynamo) as counts:
            await mend(place, place.dynamo.workers[0])
        assert (counts.failed, dict(counts.errors)) == (0, {})
        assert counts.ok == counts.sent > 20
        assert place.pagerduty.events == []


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("discovery", ["file", "etcd"])
async def test_ten_row_remaps_fail_no_request(tmp_path: Path, discovery: Discovery, program: Callable[[str], Path]) -> None:
    """Ten repairs in a row, worker after worker, without a pause in the traffic: no request fails, the frontend runs on."""
    # The shipped policy hands the third repair of one worker in a week to a person, and a pool's third drain in ten minutes too.
    policy, changed = re.subn(r"(?m)^repair_tries = 2\b", "repair_tries = 100", default_policy_text())
    assert changed == 1
    etcd = program("etcd") if discovery == "etcd" else None
    async with site(tmp_path, discovery, etcd=etcd, policy=policy, doubtful=100) as place:
        front = place.dynamo.frontend_process
        async with traffic(place.dynamo) as counts:
            for n in range(10):
                await mend(place, place.dynamo.workers[n % 3])
        print(f"\nten row remaps, {discovery} discovery: {counts.sent} requests sent, {counts.failed} failed")
        assert (counts.failed, dict(counts.errors)) == (0, {})
        assert counts.ok == counts.sent
        assert place.dynamo.frontend_process == front == (front[0], None)
        assert place.pagerduty.events == []


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("discovery", ["file", "etcd"])
async def test_a_gpu_off_the_bus_costs_its_worker_and_no_stream(
    tmp_path: Path, discovery: Discovery, program: Callable[[str], Path]
) -> None:
    """Xid 79: out of rotation, killed, paged once; its streams move; ``sentinel undrain`` brings it back; the frontend runs on."""
    etcd = program("etcd") if discovery == "etcd" else None
    async with site(tmp_path, discovery, etcd=etcd) as place:
        front, victim = place.dynamo.frontend_process, place.dynamo.workers[1]
        first, moved = victim.pid, await place.migrated()
        async with traffic(place.dynamo, tokens=300) as counts:
            await place.until(lambda: place.in_flight(victim), "requests run on the worker")
            place.line(victim.name, 79, "GPU has fallen off the bus.")
            await place.gone(victim.hexid)
            drain = await place.drain_of(victim.name, "out")
            assert not victim.running
            assert [(d.action, d.target) for d in place.deeds] == [("kill_worker", victim.name)]
            assert place.pagerduty.actions() == ["trigger"]
            assert place.pagerduty.events[0]["payload"]["severity"] == "critical"
            await asyncio.sleep(2)  # it stays out: what mends it is for a person
            assert (await place.drains())[victim.name]["state"] == "out"
            status, said = await place.cli("undrain", victim.name, "--reason", "GPU reseated, tray rebooted")
            assert status == 0, said
            await place.back(victim.name, drain["id"])
            assert victim.pid != first
            await place.over(drain["incident"])
            assert await place.migrated() > moved or not place.deeds[0].in_flight
            await place.until(lambda: place.in_flight(victim), "requests run on the worker again")
        print(f"\nXid 79, {discovery} discovery: {counts.sent} requests sent, {counts.failed} failed")
        assert (counts.failed, dict(counts.errors)) == (0, {})
        assert place.dynamo.frontend_process == front == (front[0], None)
        assert place.pagerduty.actions() == ["trigger", "resolve"]
        status, told = await place.cli("explain", victim.name)
        assert status == 0, told
        assert "GPU has fallen off the bus" in told
        assert "GPU reseated" in told


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_leader_killed_between_deciding_and_acting(tmp_path: Path, program: Callable[[str], Path]) -> None:
    """SIGKILL after the eviction was decided and before anything was done: the standby does it, once, and there is one page."""
    async with site(tmp_path, "etcd", etcd=program("etcd"), redis=program("redis-server"), controllers=2) as place:
        front, victim = place.dynamo.frontend_process, place.dynamo.workers[2]
        async with traffic(place.dynamo, tokens=300) as counts:
            await place.until(lambda: place.in_flight(victim), "requests run on the worker")
            place.dynamo.signal_etcd(signal.SIGSTOP)  # so that the decision cannot be carried out
            place.line(victim.name, 79, "GPU has fallen off the bus.")
            decided = await place.drain_of(victim.name, "requested")
            place.signal("agent", signal.SIGSTOP)  # nor can the worker be killed

            async def told() -> bool:  # and that this is durable, which keeps the standby from sending it again
                metrics = (await place.callers["c1"].get("/metrics", who=None))[1]
                return bool(place.pagerduty.events) and 'sentinel_effects_pending{effect="SendPage"} 0.0' in metrics

            await place.until(told, "the page is sent")
            await place.kill("c1")
            place.dynamo.signal_etcd(signal.SIGCONT)
            assert victim.running
            assert victim.hexid in await place.dynamo.routable()
            assert place.deeds == []
            standby = await place.plays("c2", "leader")
            await place.gone(victim.hexid)
            place.signal("agent", signal.SIGCONT)
            drain = await place.drain_of(victim.name, "out", standby)
            assert drain["id"] == decided["id"]
            assert not victim.running
            status, said = await place.cli("undrain", victim.name, "--reason", "GPU reseated, tray rebooted")
            assert status == 0, said
            await place.back(victim.name, drain["id"], standby)
            await place.over(drain["incident"], standby)
            incidents = (await standby.get("/v1/incidents"))[1]
            about_gpus = [i["key"] for i in incidents if "/gpu@" in i["culprit"]]  # this host may have faults of its own
            assert about_gpus == [f"gpu-off-bus/{NODE}/gpu@{place.pci[victim.name]}"]
        print(f"\na leader killed before it acted: {counts.sent} requests sent, {counts.failed} failed")
        assert (counts.failed, dict(counts.errors)) == (0, {})
        assert [d.action for d in place.deeds] == ["kill_worker", "start_worker"]
        assert place.pagerduty.actions() == ["trigger", "resolve"]
        assert place.dynamo.frontend_process == front == (front[0], None)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_leader_killed_while_a_drain_waits(tmp_path: Path, program: Callable[[str], Path]) -> None:
    """SIGKILL while requests are still in flight on a drained worker: the standby waits on, then stops, resets and returns it."""
    async with site(tmp_path, redis=program("redis-server"), controllers=2) as place:
        victim = place.dynamo.workers[0]
        async with traffic(place.dynamo, tokens=1000) as counts:
            await place.until(lambda: place.in_flight(victim), "requests run on the worker")
            place.set_gpu(victim.name, rows_pending=1)
            decided = await place.drain_of(victim.name, "derouted")
            await place.kill("c1")
            assert await place.in_flight(victim)
            standby = await place.plays("c2", "leader")
            drain = await place.back(victim.name, decided["id"], standby)
            assert steps(drain) == MENDED
            await place.over(drain["incident"], standby)
        print(f"\na leader killed while a drain waited: {counts.sent} requests sent, {counts.failed} failed")
        assert (counts.failed, dict(counts.errors)) == (0, {})
        assert [d.action for d in place.deeds] == ["stop_worker", "reset_gpu", "start_worker"]
        assert place.deeds[0].in_flight == 0
        assert place.pagerduty.events == []


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("out_by", ["drain", "evict"])
async def test_a_worker_that_is_out_stays_out_when_somebody_restarts_it(tmp_path: Path, out_by: str) -> None:
    """A person, or systemd after a kill, starts it anew and Dynamo routes to it: it leaves again, and undrain returns it."""
    async with site(tmp_path) as place:
        victim = place.dynamo.workers[0]
        async with traffic(place.dynamo) as counts:
            if out_by == "drain":
                status, said = await place.cli("drain", victim.name, "--reason", "swap a cable", "--wait")
                assert status == 0, said
                await place.dynamo.kill(victim.name)
            else:
                place.line(victim.name, 79, "GPU has fallen off the bus.")
            drain = await place.drain_of(victim.name, "out")
            await place.dynamo.spawn(victim.name)

            async def noticed() -> bool:  # Dynamo takes it in by itself, perhaps too briefly to be seen from here
                return "came back by itself" in (place.folder / "c1.log").read_text()

            await place.until(noticed, "the controller sees that it came back")
            await place.stays_out(victim, 5)
            status, said = await place.cli("undrain", victim.name, "--reason", "done")
            assert status == 0, said
            await place.back(victim.name, drain["id"])
        assert (counts.failed, dict(counts.errors)) == (0, {})


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_reset_that_does_not_help_leaves_the_worker_out(tmp_path: Path) -> None:
    """It answers its one token, but the driver still says pending: it gets no request, and at the deadline a person is asked."""
    policy, changed = re.subn(r'(?m)^verify_deadline = "15m"', 'verify_deadline = "12s"', default_policy_text())
    assert changed == 1
    async with site(tmp_path, policy=policy) as place:
        victim, place.reset_helps = place.dynamo.workers[0], False
        async with traffic(place.dynamo) as counts:
            place.set_gpu(victim.name, rows_pending=1)
            drain = await place.drain_of(victim.name, "verifying")

            async def passed() -> bool:
                return bool((await place.drains())[victim.name].get("verified"))

            await place.until(passed, "the active test passed")
            await place.stays_out(victim, 3)
            await place.drain_of(victim.name, "out")
            await place.stays_out(victim, 3)
            assert place.pagerduty.actions() == ["trigger"]
            place.set_gpu(victim.name, rows_pending=0)  # another GPU
            status, said = await place.cli("undrain", victim.name, "--reason", "GPU replaced")
            assert status == 0, said
            await place.over(drain["incident"])
            await place.until(lambda: place.in_flight(victim), "requests run on the worker again")
        assert (counts.failed, dict(counts.errors)) == (0, {})
        assert place.pagerduty.actions() == ["trigger", "resolve"]


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_gpu_that_fails_again_on_the_way_back(tmp_path: Path) -> None:
    """Undrained too early: the new process hangs and the kernel says 79 again; it is ended, stays out, and no request fails."""
    async with site(tmp_path) as place:
        victim, place.starts_hung = place.dynamo.workers[0], True
        async with traffic(place.dynamo) as counts:
            place.line(victim.name, 79, "GPU has fallen off the bus.")
            await place.drain_of(victim.name, "out")
            status, said = await place.cli("undrain", victim.name, "--reason", "looks fine to me")
            assert status == 0, said
            await place.drain_of(victim.name, "verifying")
            await asyncio.sleep(6)  # a line of the same kind within five seconds is the same occurrence
            place.line(victim.name, 79, "GPU has fallen off the bus.")
            await place.drain_of(victim.name, "out")
            assert not victim.running
            place.starts_hung = False
            status, said = await place.cli("undrain", victim.name, "--reason", "GPU reseated, tray rebooted")
            assert status == 0, said
            await place.until(lambda: place.in_flight(victim), "requests run on the worker again")
        assert (counts.failed, dict(counts.errors)) == (0, {})
        assert [d.action for d in place.deeds] == ["kill_worker", "start_worker"] * 2
        assert place.pagerduty.actions().count("trigger") == 1

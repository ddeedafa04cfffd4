"""What the agent costs its node: CPU of one core and resident memory, of the daemon and its driver child together.

The real daemon runs as a process of its own with the installed probes at their default cadence, reports to a controller
stand-in in this process, and is read from /proc as any other program would be. Without a GPU the driver child reads a
simulated GB200 tray (4 GPUs x 18 links) through the fake NVML; the result then says ``"simulated": true``. The last line is
one JSON object; figures to reach: CPU <= 0.5 % of a core, memory <= 90 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from aiohttp import web

from sentinel.model import Ack, Report

TICK = os.sysconf("SC_CLK_TCK")
WARM_UP_S = 8.0


def has_gpu() -> bool:
    """Whether the real driver answers; asked in a process of its own, since it may hang."""
    ask = "import pynvml; pynvml.nvmlInit(); raise SystemExit(pynvml.nvmlDeviceGetCount() < 1)"
    try:
        return subprocess.run([sys.executable, "-c", ask], capture_output=True, timeout=30, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(p for c in children for p in family(int(c)))]


def cpu_s(pid: int) -> float:
    """Seconds on a core, of all threads: to the nanosecond where the kernel keeps schedstat, else in ticks."""
    try:
        return sum(int(f.read_text().split()[0]) for f in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
    except (OSError, IndexError):
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / TICK


def memory_mib(pid: int) -> dict[str, float]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    pss = next(line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    return {"rss_mib": round(int(status["VmRSS"].split()[0]) / 1024, 1), "pss_mib": round(int(pss.split()[1]) / 1024, 1)}


async def measure(seconds: float, folder: Path) -> dict[str, object]:
    simulated = not has_gpu()
    environment = dict(os.environ)
    if simulated:
        from sentinel.testing.nvml_kinds import gb200_tray  # noqa: PLC0415
        from sentinel.testing.nvml_state import STATE_FILE  # noqa: PLC0415

        gb200_tray().save(folder / "nvml.json")
        environment |= {"SENTINEL_NVML": "sentinel.testing.nvml:from_file", STATE_FILE: str(folder / "nvml.json")}
    reports: list[int] = []
    latest: list[Report] = []

    async def report(request: web.Request) -> web.Response:
        body = await request.read()
        got = msgspec.json.decode(body, type=Report)
        if got.snapshot:
            reports.append(len(body))
            latest[:] = [got]
        return web.Response(body=msgspec.json.encode(Ack(session=got.session, seq=got.seq)))

    async def commands(_: web.Request) -> web.Response:
        await asyncio.sleep(20)
        return web.Response(body=b"[]")

    app = web.Application()
    app.add_routes([web.post("/v1/report", report), web.get("/v1/commands", commands)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    (folder / "agent.toml").write_text(
        f'[agent]\nnode = "t01"\nlisten = "127.0.0.1:0"\nstate_dir = "{folder}/state"\n'
        f'controllers = ["http://127.0.0.1:{runner.addresses[0][1]}"]\n'
    )
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from sentinel.cli.main import main; main()", "agent", "--config", str(folder / "agent.toml"),
            env=environment, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        await asyncio.sleep(WARM_UP_S)
        pids = family(process.pid)
        before, began = {p: cpu_s(p) for p in pids}, time.monotonic()
        await asyncio.sleep(seconds)
        took = time.monotonic() - began
        used = {p: cpu_s(p) - before[p] for p in pids}
        memory = [memory_mib(p) for p in pids]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        await runner.cleanup()
    child_s = sum(used[p] for p in pids[1:])
    return {
        "bench": "agent_cost",
        "simulated": simulated,
        "seconds": round(took, 1),
        "cpu_percent_of_core": round(100 * sum(used.values()) / took, 3),
        "cpu_percent_agent": round(100 * used[process.pid] / took, 3),
        "cpu_percent_child": round(100 * child_s / took, 3),
        "rss_mib": round(sum(m["rss_mib"] for m in memory), 1),
        "pss_mib": round(sum(m["pss_mib"] for m in memory), 1),
        "processes": memory,
        "states": len(latest[0].findings) if latest else None,
        "probes": latest[0].probes if latest else None,
        "snapshots": len(reports),
        "snapshot_bytes": max(reports, default=None),
        "log_tail": None if process.returncode == 0 else (folder / "log").read_text()[-1000:],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to measure, after a warm-up (default 60)")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(seconds, Path(folder)))))


if __name__ == "__main__":
    main()

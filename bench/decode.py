"""How fast kernel-log lines are read and judged on one core, and what a flood of one line costs.

Three measurements: pasted text of a realistic mix (dmesg form); the same mix as raw records through the live probe; and a
flood of 800,000 identical Xid lines through the live probe's descriptor, then one new fault. The writer of the flood is
another process; the kernel log is the simulator's (a socket with one record per read), not /dev/kmsg. The first two are
lines per second of CPU time, so that a busy machine does not change them much, and medians of three runs; the flood is wall
time, writer included. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from probes import Context
from probes.decode import decode_text
from probes.kernel_log import KernelLogProbe
from sentinel.testing.kmsg import KernelLog, record

LINES = 200_000
FLOOD = int(sys.argv[1]) if len(sys.argv) > 1 else 800_000
ORDINARY = (
    "audit: type=1400 audit(1737434504.283:{n}): apparmor=\"ALLOWED\" operation=\"open\" pid={n} comm=\"python3\"",
    "mlx5_core 0000:41:00.0 enp65s0f0np0: Link up",
    "nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping further processing",
    "docker0: port {n}(veth{n}) entered forwarding state",
    "NVRM: GPU0 nvCheckOkFailedNoLog: Check failed: State in use [NV_ERR_STATE_IN_USE] (0x00000063) returned from pRmApi->Control",
    "perf: interrupt took too long ({n} > 2500), lowering kernel.perf_event_max_sample_rate to 79000",
)
FAULTS = (
    "NVRM: Xid (PCI:0009:01:00): 13, pid={n}, name=python3, Graphics Exception: channel 0x0000000a, Class 0000cbc0, Offset 0510",
    "NVRM: Xid (PCI:0018:01:00): 145, RLW_SRC_TRACK Nonfatal XC1 i0 Link {link:02} (0x04084507 0x00000004 0x00000000 0x00000000)",
    "NVRM: Xid (PCI:0008:01:00): 45, pid={n}, name=VLLM::Worker, Ch 0000000c",
    "NVRM: Xid (PCI:0019:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link {link:02} (0x004505c6 0x00000000 0x00000000 0x00000000)",
)
DUPLICATE = "NVRM: Xid (PCI:0009:01:00): 95, pid=13978, name=VLLM::Worker, Uncontained: LTC TAG (0x2,0x1). RST: Yes, D-RST: No"
NEXT = "NVRM: Xid (PCI:0018:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def mix(count: int) -> list[str]:
    """Mostly other subsystems; one line in a hundred is the driver's fault report."""
    rng = random.Random(7)
    return [
        rng.choice(FAULTS if rng.random() < 0.01 else ORDINARY).format(n=rng.randrange(1000, 90_000), link=rng.randrange(18))
        for _ in range(count)
    ]


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def pasted(lines: list[str]) -> float:
    text = "\n".join(f"[{100 + i / 1000:12.6f}] {line}" for i, line in enumerate(lines))
    start = time.process_time()
    decoded = decode_text(text)
    assert decoded.verdict.severity == "fatal"
    return len(lines) / (time.process_time() - start)


async def live(lines: list[str], folder: Path) -> float:
    log = folder / "kmsg"
    log.write_bytes(b"".join(record(line, i, usec=i * 1000) for i, line in enumerate(lines, 1)))
    probe = KernelLogProbe(Context(node="bench", kmsg=log, state=folder / "state"))
    memory: dict[str, Any] = {}
    seen, start = 0, time.process_time()
    while seen < len(lines):
        reading = await probe.read()
        probe.assess(reading, memory, {})
        probe.commit(reading)
        seen += reading.data["lines"]
    took = time.process_time() - start
    await probe.close()
    return len(lines) / took


async def flood(count: int) -> dict[str, Any]:
    """A writer process sends the flood as fast as it is taken, waits a moment, then sends the new fault and says when."""
    log = KernelLog(buffer_bytes=1 << 22)
    probe = KernelLogProbe(Context(node="bench", options={"fd": log.fd}))
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        raw = record(DUPLICATE, 0).partition(b";")[2]
        log.block()
        for seq in range(1, count + 1):
            log.write_raw(b"4,%d,%d,-;%s" % (seq, time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW) // 1000, raw))
        os.write(tell, str(time.monotonic_ns()).encode())
        log.write_raw(record(NEXT, count + 1))
        os._exit(0)
    memory: dict[str, Any] = {}
    reading = await probe.read()
    probe.assess(reading, memory, {})
    lines = reading.data["lines"]
    before, peak, findings, seen_at = rss(), 0, 0, 0
    start = time.perf_counter()
    while not seen_at:
        reading = await probe.read()
        lines += reading.data["lines"]
        for found in probe.assess(reading, memory, {}):
            findings += 1
            if found.check == "xid.79":
                seen_at = time.monotonic_ns()
        if not reading.data["lines"]:
            await asyncio.sleep(0)
        peak = max(peak, rss())
    took = time.perf_counter() - start
    os.waitpid(child, 0)
    written_at = int(os.read(told, 64))
    log.close()
    growth = round((peak - before) / 2**20, 2)
    return {
        "flood_lines": lines - 1, "flood_lines_per_s": round(lines / took), "flood_findings": findings,
        "flood_rss_growth_mib": growth, "next_fault_seen_after_s": round((seen_at - written_at) / 1e9, 4),
    }


def main() -> None:
    lines = mix(LINES)
    text = [pasted(lines) for _ in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        stream = []
        for run in range(3):
            place = Path(folder) / str(run)
            place.mkdir()
            stream.append(asyncio.run(live(lines, place)))
    print(f"pasted text: {statistics.median(text):,.0f} lines per CPU second; live: {statistics.median(stream):,.0f}")
    result = {
        "bench": "decode", "lines": LINES, "pasted_lines_per_cpu_s": round(statistics.median(text)),
        "live_lines_per_cpu_s": round(statistics.median(stream)), **asyncio.run(flood(FLOOD)), "kernel_log": "simulated",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

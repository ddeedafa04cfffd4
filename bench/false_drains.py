"""Ten million generated kernel-log lines that must take nothing out of service, judged and put to the shipped policy.

The lines are what a busy healthy fleet prints and what looks like a fault without being one: other subsystems, driver noise,
transaction ids called xid, other programs quoting fatal Xids, application faults, teardowns, corrected and non-fatal NVLink
events, injected ones, recoveries, peers' faults. Counted is every finding for which the policy would drain or evict. The last
line is one JSON object. The lines are generated from a seed; none is recorded from a machine.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter

from probes.decode import decode_text
from sentinel.decide.rules.policy_file import default_policy
from sentinel.model import Response

LINES = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
BLOCK = 100_000

QUIET = (
    'audit: type=1400 audit(1737434504.{a}:{b}): apparmor="ALLOWED" operation="open" pid={b} comm="python3"',
    "docker0: port {a}(veth{b}) entered forwarding state",
    "mlx5_core 0000:{x}:00.0: Port module event: module {a}, Cable unplugged",
    "mlx5_core 0000:{x}:00.0: mlx5_cmd_out_err:816:(pid {b}): ACCESS_REG(0x805) op_mod(0x1) failed, status bad parameter(0x3)",
    "NVRM: GPU{a} nvCheckOkFailedNoLog: Check failed: State in use [NV_ERR_STATE_IN_USE] (0x000000{x}) @ kern_profiler.c:{b}",
    "nvidia-peermem nv_get_p2p_free_callback:{b} ERROR detected invalid context, skipping further processing",
    "pcieport 0000:00:01.1: AER: Corrected error received: 0000:{x}:00.0",
    "nfs: server 192.0.2.{a} not responding, still trying (xid 0x{x}{x})",
    "perf: interrupt took too long ({b} > 2500), lowering kernel.perf_event_max_sample_rate to 79000",
)
LOOKS_BAD = (
    "NVRM: Xid (PCI:0009:01:00): 13, pid={b}, name=python3, Graphics Exception: ESR 0x57c7{x}=0xc04000b 0x57c734=0x24",
    "NVRM: Xid (PCI:0018:01:00): 31, pid={b}, name=VLLM::Worker, Ch {a:08x}, MMU Fault: ENGINE GRAPHICS faulted @ 0x7f{x}_00000000",
    "NVRM: Xid (PCI:0008:01:00): 43, pid={b}, name=python3, Ch {a:08x}",
    "NVRM: Xid (PCI:0019:01:00): 45, pid={b}, name=python3, Ch {a:08x}",
    "NVRM: Xid (PCI:0019:01:00): 45, pid={b}, name=python3, Ch {a:08x} caused by previous Xid 145",
    "NVRM: Xid (PCI:0008:01:00): 63, pid={b}, name=python3, Row Remapper: New row marked for remapping, reset gpu to activate.",
    "NVRM: Xid (PCI:0008:01:00): 94, pid={b}, name=python3, Contained: SM (0x1). RST: No, D-RST: No",
    "NVRM: Xid (PCI:0009:01:00): 121, pid={b}, name=python3, corrected",
    "NVRM: Xid (PCI:0009:01:00): 137, NVLink: illegal access on link {a}",
    "NVRM: Xid (PCI:0018:01:00): 145, RLW_SRC_TRACK Nonfatal XC1 i0 Link {a:02} (0x04084507 0x00000004 0x{b:08x} 0x00000000)",
    "NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i1 Link {a:02} (0x004505c6 0x00000000 0x{b:08x})",
    "NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link {a:02} (0x020005c6 0x00000000 0x{b:08x})",
    "NVRM: Xid (PCI:0018:01:00): 154, GPU recovery action changed from 0x3 (Drain P2P) to 0x0 (None)",
    "NVRM: Xid (PCI:0018:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)",
    "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link {a} egress non-posted PRIV error (First)",
    "NVRM: Xid (PCI:0008:01",
)
QUOTED = (
    '{{"level":"INFO","msg":"GPU has fallen off the bus (XID 79)","line":"NVRM: Xid (PCI:0009:01:00): 79, pid={b}"}}',
    'time="2026-03-06T09:34:{a:02}Z" level=error msg="NVRM: Xid (PCI:0009:01:00): 79, GPU has fallen off the bus."',
    "Mar 06 09:34:{a:02} t07 gpu-monitor[{b}]: NVRM: Xid (PCI:0009:01:00): 95, Uncontained: LTC TAG. RST: Yes, D-RST: No",
    "12,{b},{b},-;NVRM: Xid (PCI:0009:01:00): 79, GPU has fallen off the bus.",
    'logger -t kernel -p kern.err "[{b}.5] NVRM: Xid (PCI:0009:01:00): 74, NVLink: fatal error detected on link {a}"',
)


def block(rng: random.Random, count: int) -> str:
    lines = []
    for i in range(count):
        pick = rng.random()
        a, b = rng.randrange(18), rng.randrange(1000, 900_000)
        template = rng.choice(QUIET if pick < 0.9 else LOOKS_BAD if pick < 0.97 else QUOTED)
        prefix = "" if pick >= 0.97 else f"[{1000 + i / 1000:12.6f}] "
        lines.append(prefix + template.format(a=a, b=b, x=f"{b & 0xFF:02x}"))
    return "\n".join(lines)


def main() -> None:
    rng, policy = random.Random(20), default_policy()
    drained: Counter[str] = Counter()
    findings = skipped = done = 0
    judging = 0.0
    while done < LINES:
        text = block(rng, min(BLOCK, LINES - done))
        start = time.perf_counter()
        decoded = decode_text(text)
        judging += time.perf_counter() - start
        done += decoded.lines
        findings += sum(f.count for f in decoded.findings)
        skipped += sum(decoded.skipped.values())
        for f in decoded.findings:
            rule = policy.rule_for(f) if f.present else None
            if rule and rule.response is not Response.NONE:
                drained[f"{f.check}: {f.evidence[0]}"] += 1
    for line, times in drained.most_common(10):
        print(f"would drain {times} times: {line}")
    print(json.dumps({
        "bench": "false_drains", "lines": done, "false_drains": sum(drained.values()), "lines_judged": findings,
        "lines_quoted_or_from_user_space": skipped, "lines_per_s": round(done / judging), "input": "generated",
    }))


if __name__ == "__main__":
    main()

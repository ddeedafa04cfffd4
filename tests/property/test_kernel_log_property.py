"""Whatever the kernel log or a paste holds: no crash, nothing from user space, and a real fault never hides."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from probes import Context
from probes.decode import decode_text
from probes.kernel_log import KernelLogProbe, assess
from probes.kmsg import parse_record
from probes.xid import read_line
from sentinel.model import Action, Finding, Reading, Severity, Suspect
from sentinel.testing.kmsg import KernelLog, record

GPUS = st.sampled_from(["0008:01:00", "0009:01:00", "0018:01:00", "00000019:01:00.0"])
PROCESS = st.sampled_from(["", ", pid=4711, name=python3", ", pid='<unknown>', name=<unknown>", ", pid=0"])
TAIL = st.sampled_from(["", ", ", ", Ch 0000000c", ", NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x0", ", 0003 00000000"])
XID_LINES = st.builds(
    lambda gpu, code, process, tail, form: f"NVRM: Xid ({form}{gpu}): {code}{process}{tail}",
    GPUS, st.integers(1, 400), PROCESS, TAIL, st.sampled_from(["PCI:", ""]),
)
PREFIXES = st.sampled_from([
    "", "kernel: ", "[   12.345678] ", "<4>[ 12.3] ", "[Fri Aug 30 11:43:09 2024] ", "4,1201,178065274761,-;",
    "kern  :warn  : 2025-01-21T04:41:44,283302+00:00 ", "Sep 19 10:30:06 gpu-node-01 kernel: ", "t07: [ 1.5] ",
    "10.0.0.1: kern: warning: [2026-04-22T21:25:20.466440686Z]: ", "2025-01-21T04:41:44.283302+0000 t07 kernel: ",
])  # fmt: skip
FAULTY = st.sampled_from(
    [b"NVRM: Xid (", b"NVRM: Xid (PCI:0009:01:00): 79, ", b"SXid (", b"fallen off the bus", b";", b",", b"\\x0a", b"\n"]
)
BYTES = st.lists(st.one_of(st.binary(max_size=40), FAULTY), max_size=12).map(b"".join)


def read(records: list[bytes]) -> list[Finding]:
    """All records through the live probe."""
    log = KernelLog()
    probe = KernelLogProbe(Context(node="t07", proc=Path("/nowhere"), options={"fd": log.fd}), uptime=lambda: 0.0)
    for raw in records:
        if raw:
            log.write_raw(raw)
    memory: dict[str, Any] = {}
    try:
        return probe.assess(asyncio.run(probe.read()), memory, {})
    finally:
        log.close()


@given(st.lists(BYTES, max_size=8))
def test_any_bytes(records: list[bytes]) -> None:
    """Any bytes at all are read without an exception, live and pasted."""
    read(records)
    decode_text(b"\n".join(records).decode("utf-8", "replace"))
    for raw in records:
        parse_record(raw)


@given(st.text(max_size=300))
def test_any_text(text: str) -> None:
    """Any text is read without an exception, also where a fault's own words stand before it."""
    for start in ("", "NVRM: Xid (PCI:0009:01:00): 149, ", "NVRM: Xid (", "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, "):
        read_line(start + text)
        decode_text(start + text)


@given(st.lists(st.tuples(XID_LINES, st.integers(1, 127)), min_size=1, max_size=6))
def test_user_space_raises_nothing(lines: list[tuple[str, int]]) -> None:
    """No line of a facility other than the kernel's ever becomes a finding, whatever it says."""
    assert read([record(text, seq, usec=seq, facility=facility) for seq, (text, facility) in enumerate(lines, 1)]) == []


@given(XID_LINES, PREFIXES, st.sampled_from(["\n", "\r\n", ""]))
def test_a_fault_survives_any_prefix(line: str, prefix: str, end: str) -> None:
    """A well-formed Xid line gives the same finding bare, prefixed, and live."""
    def essence(f: Finding) -> tuple[Any, ...]:
        return f.check, f.component.gpu, f.component.part, f.severity, f.action, f.suspect, f.facts

    (bare,), (pasted,) = decode_text(line).findings, decode_text(prefix + line + end).findings
    (live,) = read([record(line, 1, usec=1)])
    assert essence(bare) == essence(pasted) == essence(live)


@given(st.lists(st.tuples(XID_LINES, st.integers(0, 20)), max_size=30))
def test_recording_replays(lines: list[tuple[str, int]]) -> None:
    """Judging is pure: the same reading and memory give the same findings, and ids are never given twice to different faults."""
    records, usec = [], 0
    for seq, (text, gap) in enumerate(lines, 1):
        usec += gap * 1_000_000
        records.append([4, seq, usec, text])
    reading = Reading(probe="kernel_log", node="t07", at=1e6, boot_id="b", data={"records": records, "booted_at": 0.0})
    first, second = assess(reading, {}), assess(reading, {})
    assert first == second
    assert len({f.id for f in first}) == len(first)
    assert sum(f.count for f in first) == len(lines)


@settings(max_examples=300)
@given(st.lists(XID_LINES, max_size=12))
def test_application_faults_never_drain(lines: list[str]) -> None:
    """Whatever else is in the log, a finding that blames the application never asks for anything but a new worker."""
    for f in decode_text("\n".join(lines)).findings:
        if f.suspect is Suspect.APP:
            assert f.severity is Severity.INFO
            assert f.action in (Action.NONE, Action.RESTART_WORKER)

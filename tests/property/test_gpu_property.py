"""Whatever a GPU's driver leaves out or says, the judgement keeps its word."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from probes import Context
from probes.gpu import GpuProbe
from probes.gpu_policy import CONFIGURATION
from sentinel.model import Finding, Reading
from sentinel.testing.nvml import FakeDriver
from sentinel.testing.nvml_kinds import gb200_tray, h200
from sentinel.testing.nvml_state import FakeState

HEALTHY = asyncio.run(FakeDriver(gb200_tray()).read())
VALUES = sorted(HEALTHY["gpus"][0].keys() - {"pci", "index", "unread"})
PROBE = GpuProbe(Context(node="t01"))

numbers = st.integers(min_value=-(2**33), max_value=2**65)
flags = st.booleans()
KINDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("ecc_enabled", "rows_pending", "rows_failure", "sram_threshold_exceeded", "repair_pending"), flags),
    "links": st.lists(st.none() | st.integers(0, 5), max_size=36),
    "link_speed_mbps": st.lists(st.none() | numbers, max_size=36),
    "link_totals": st.dictionaries(st.sampled_from(["receive_errors", "symbol_ber"]), numbers),
    "rows_histogram": st.fixed_dictionaries(dict.fromkeys(("max", "high", "partial", "low", "none"), numbers)),
    "slowdown_ns": st.dictionaries(st.sampled_from(["sw_thermal", "hw_thermal", "power_brake"]), st.integers(0, 2**64)),
    "violation_ns": st.dictionaries(st.sampled_from(["thermal", "reliability", "power"]), st.none() | numbers),
    "slow_at": st.floats(0, 2e9),
    "fabric_cluster": st.binary(min_size=16, max_size=16).map(bytes.hex),
    "fabric_health_mask": st.integers(0, 2**32 - 1),
    **dict.fromkeys(("uuid", "name", "serial"), st.sampled_from(["NVIDIA GB200", "NVIDIA H200", ""])),
    "pids": st.lists(st.integers(1, 2**22), max_size=4),
}


@st.composite
def gpus(draw: st.DrawFn) -> list[dict[str, Any]]:
    """GPUs of one node: answered with anything of the right kind, hung, lost, or silent."""
    found = []
    for index, pci in enumerate(("0008:01:00.0", "0009:01:00.0")):
        known: dict[str, Any] = {"pci": draw(st.sampled_from([pci, pci, None])), "index": index}
        how = draw(st.sampled_from(["answered"] * 4 + ["hung", "error", "failed", "silent"]))
        if how == "answered":
            known |= {"pci": pci, "unread": draw(st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from([2, 16, 999])))}
            known |= {name: draw(st.none() | KINDS.get(name, numbers)) for name in draw(st.sets(st.sampled_from(VALUES)))}
        elif how == "hung":
            known["hung_s"] = draw(st.floats(0, 1e6))
        elif how == "error":
            known["error"] = {"code": draw(st.sampled_from([1, 4, 15, 28, 999])), "text": "no"}
        elif how == "failed":
            known["failed"] = "a fault of ours"
        found.append(known)
    return found


def judge(at: float, found: list[dict[str, Any]], memory: dict[str, Any], **expected: Any) -> list[Finding]:
    data = {"error": None, "driver": "580.159.04", "gpus": found, "bound": None}
    return PROBE.assess(Reading(probe="gpu", node="t01", at=at, data=data), memory, expected)


@given(st.lists(st.sets(st.sampled_from(VALUES)), min_size=4, max_size=4), st.booleans())
def test_leaving_values_out_never_raises_anything(missing: list[set[str]], absent: bool) -> None:
    """Of a healthy node, any set of values may be missing or None: nothing is found, and nothing unmeasured is called fine."""
    found = []
    for gpu, names in zip(HEALTHY["gpus"], missing, strict=True):
        kept = {k: v for k, v in gpu.items() if k not in names}
        found.append(kept if absent else {**gpu, **dict.fromkeys(names)})
    memory: dict[str, Any] = {}
    for at in (100.0, 1000.0):
        findings = judge(at, found, memory, gpus=4, nvlinks=18)
        assert not [f for f in findings if f.present]
    for gpu, names in zip(HEALTHY["gpus"], missing, strict=True):
        said = {f.check for f in findings if f.component.gpu == gpu["pci"]}
        for value, check in {"rows_pending": "gpu.row_remap_pending", "margin_c": "gpu.thermal", "links": "gpu.nvlink_down",
                             "recovery_action": "gpu.recovery_action", "fabric_state": "gpu.fabric_state"}.items():  # fmt: skip
            assert (check in said) == (value not in names)


@settings(max_examples=200)
@given(st.lists(gpus(), min_size=1, max_size=4), st.lists(st.floats(-10, 1e4), min_size=4, max_size=4))
def test_any_course_of_readings_is_judged_the_same_from_its_memory(course: list[list[dict[str, Any]]], steps: list[float]) -> None:
    """No reading breaks the judgement; memory is plain JSON, and the judgement after a round trip through it is the same."""
    memory: dict[str, Any] = {}
    copy: dict[str, Any] = {}
    at = 1_000_000.0
    for found, step in zip(course, steps, strict=False):
        at += step
        findings = judge(at, json.loads(json.dumps(found)), memory, gpus=2)
        copy = json.loads(json.dumps(copy))
        assert judge(at, found, copy, gpus=2) == findings
        assert copy == memory
        places = [(f.check, f.component, f.kind) for f in findings]
        assert len(set(places)) == len(places)  # one word about one state
        assert len({f.id for f in findings}) == len(findings)
        for finding in findings:
            if finding.present:
                assert finding.summary
                assert 0 < finding.certainty <= 1


@given(st.integers(0, 0xFFFF))
def test_every_health_mask_is_judged_by_its_fields(mask: int) -> None:
    """Against a reading of the mask field by field: bad exactly where a field has its bad value."""
    fields = {shift: mask >> shift & 3 for shift in (0, 2, 4, 6, 12, 14)}
    bad = any(fields[s] == 1 for s in (0, 2, 4, 6)) or fields[12] == 2 or fields[14] == 2 or (mask >> 8 & 0xF) > 1
    found = [f for f in judge(1.0, [{**HEALTHY["gpus"][0], "fabric_health_mask": mask, "fabric_summary": 0}], {}) if f.present]
    assert [f.check for f in found] == (["gpu.fabric_health"] if bad else [])
    for value, name in CONFIGURATION.items():
        assert (name in (found[0].summary if found else "")) == (mask >> 8 & 0xF == value)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=12))
def test_uncorrectable_errors_are_counted_once(values: list[int]) -> None:
    """Whatever the counter does, resets included, the events count what was added since the first look and nothing twice."""
    gpu = h200().set(ecc_uncorrected_volatile=0)
    reading = asyncio.run(FakeDriver(FakeState(gpus=[gpu])).read())["gpus"][0]
    memory: dict[str, Any] = {}
    counted = added = 0
    for n, value in enumerate(values):
        findings = judge(float(n), [{**reading, "ecc_uncorrected_volatile": value}], memory)
        counted += sum(f.count for f in findings if f.check == "gpu.ecc_uncorrected")
        if n:
            added += value - values[n - 1] if value >= values[n - 1] else value
    assert counted == added

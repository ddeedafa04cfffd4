"""Whatever is pasted, the readers of NVIDIA's tools survive it, stay bounded, and blame nobody for noise."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from probes import fabric_log, imex, imex_text, monitors, pasted_imex, smi
from probes.decode import decode_text
from sentinel.model import Finding, Reading

READERS = (
    (smi.read, smi.judge),
    (pasted_imex.read, pasted_imex.judge),
    (fabric_log.read, fabric_log.judge),
    (monitors.read, monitors.judge),
)

# Pieces that these tools print, so that noise gets past the first look at the text.
PIECES = [
    "GPU 00000000:00:06.0\n",
    "GPU 0: NVIDIA GB200 (UUID: GPU-1)\n",
    "    Fabric\n",
    "        State : Completed\n",
    "        Status : ",
    "    GPU Recovery Action : ",
    "Reset\n",
    "None\n",
    "\t Link 0: 53.125 GB/s\n",
    "\t Link 63: <inactive>\n",
    "Link 99: Symbol Errors: 5\n",
    "NVML: Unable to retrieve NVLink information as all links are inActive\n",
    "|   0  NVIDIA H200  On  |   00000000:00:06.0 Off |  0 |\n",
    "| N/A   37C    P0   ERR! /  700W |       0MiB / 143771MiB |      0%      Default |\n",
    "Failed to initialize NVML: ",
    "Unknown Error\n",
    "Unable to determine the device handle for GPU ",
    "000:BA:80.0: ",
    "The following GPUs could not be reset:\n",
    "  GPU 00000000:1A:00.0: x\n",
    "DCGM_FI_DEV_FABRIC_HEALTH_MASK",
    "DCGM_FI_DEV_XID_ERRORS",
    '{gpu="0",UUID="GPU-1"} ',
    "0x1AA\n",
    "1e400\n",
    "nan\n",
    "9" * 40 + "\n",
    "<?xml version='1.0'?>",
    "<!DOCTYPE a [<!ENTITY b 'c'>]>",
    "<nvidia_smi_log>",
    "<gpu id='00000000:01:00.0'>",
    "<fabric><state>",
    "</gpu>",
    "&b;",
    "<![CDATA[",
    "]]>",
    "</nvidia_smi_log>",
    "Node #0   - a - READY - Version: 1\n",
    "Node #1   - b - UNAVAILABLE\n",
    " Nodes From\\To  0  1\n",
    "       0        C  D\n",
    "       1        I  I\n",
    "!V! ",
    "Domain State: DEGRADED\n",
    '{"nodes":{"0":{"status":"READY","connections":',
    '{"0":',
    '{"status":"INVALID"}',
    "}}}}",
    '{"fabric_states":[',
    '{"gpu_uuid":"GPU-1","health":{}}]}\n',
    "index, gpu_recovery_action\n",
    "0, Reset\n",
    "[Sep 01 2026 09:11:40] [ERROR] [tid 1] ",
    "Node disconnect event detected for node 7",
    "version mismatch",
    "\r\n",
    "\x1b[4m",
    "\ufeff",
    "\x00",
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=30), max_size=40).map("".join)


def judged(text: str) -> list[Finding]:
    found: list[Finding] = []
    for read, judge in READERS:
        memory: dict[str, Any] = {}
        for reading in read(text, "t01"):
            json.dumps(reading.data)
            found += judge(reading, memory)
            json.dumps(memory)
    return found


@given(texts)
@settings(max_examples=400, deadline=None)
def test_any_text(text: str) -> None:
    """Any text ends in findings that are present, bounded and writable; the same text gives the same."""
    found = judged(text)
    assert all(f.present and len(f.evidence) <= 18 and sum(map(len, f.evidence)) < 20_000 for f in found)
    assert len(found) == len({f.id for f in found})
    assert [f.id for f in judged(text)] == [f.id for f in found]


@given(st.binary(max_size=2000))
@settings(max_examples=200, deadline=None)
def test_any_bytes(raw: bytes) -> None:
    """Bytes that are no text of these tools say nothing and raise nothing."""
    text = raw.decode("utf-8", "replace")
    if not any(piece.strip() and piece.strip() in text for piece in PIECES):
        assert judged(text) == []


@given(st.text(alphabet='xid79NVRM: nvlinkGPU fabric0:.()<>|{}"=,\n', max_size=400))
@settings(max_examples=200, deadline=None)
def test_lookalikes_are_never_fatal(text: str) -> None:
    """Words of the trade in any order are no fault."""
    assert all(f.severity.value != "fatal" for f in judged(text))


@given(
    st.dictionaries(st.sampled_from(["tool", "answered", "domain", "own", "why"]), st.none() | st.booleans() | st.text(max_size=5)),
    st.integers(0, 5),
    st.data(),
)
@settings(max_examples=100, deadline=None)
def test_any_domain(extra: dict[str, Any], n: int, data: st.DataObject) -> None:
    """Any domain of any states is judged without a fault of ours, never as fatal, and never against all who report."""
    cell = st.sampled_from(["CONNECTED", "INVALID", "NEVER_CONNECTED", "DISCONNECTED", "RECOVERING", "VERSION_MISMATCH", "UNKNOWN"])
    status = st.sampled_from(["READY", "UNAVAILABLE", "INITIALIZING", None])
    nodes = {str(i): {"host": f"h{i}", "name": None, "status": data.draw(status), "version": None} for i in range(n)}
    links = {str(i): {str(k): data.draw(cell) for k in range(n)} for i in range(n) if data.draw(st.booleans())}
    value = {"tool": "x", "answered": True, "own": None, "domain": "DEGRADED", "nodes": nodes, "links": links}
    if extra.get("answered") is False:
        value = {"tool": "x", "answered": False, "why": "no"}
    memory: dict[str, Any] = {}
    found: list[Finding] = []
    for at in range(4):
        found = imex.assess(Reading(probe="imex", node="t01", at=float(at), data=value), memory, {"imex_nodes": n})
        memory = json.loads(json.dumps(memory))
    present = [f for f in found if f.present]
    assert all(f.severity.value == "warning" for f in present)
    ready = sum(node["status"] == "READY" for node in nodes.values())
    accused = [f for f in present if f.check == "imex.peer" and nodes[f.facts["index"]]["status"] == "READY"]
    assert len(accused) * 2 <= ready


def test_long_lines_and_many() -> None:
    """A line of two million characters and a hundred thousand lines pass through every reader."""
    for text in (
        "Node #0 - " + "a" * 2_000_000,
        "Fabric \n" * 50_000,
        "| " * 300_000,
        "GPU Recovery Action : Reset\n" * 30_000,
        "DCGM_FI_DEV_XID_ERRORS 79\n" * 50_000,
        "{" * 100_000 + '"nodes" "connections"',
        '"connections"\n' * 50_000,
    ):
        found = judged(text)
        assert len(found) < 20_000
    assert decode_text("x" * 1_000_000).findings == ()
    assert len(imex_text.parse("Domain State: UP\n" * 1000)) == imex_text.OUTPUTS_MAX

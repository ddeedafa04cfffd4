"""Whatever a serving log holds: no crash, a bounded reading of plain values, and a fault is never explained away by echoes."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from probes import serving_lines, serving_log, serving_prefix
from probes.decode import decode_text
from sentinel.model import Action, Severity

MARKS = st.sampled_from(sorted({row.mark for row in serving_lines.lines()}))
KINDS = st.sampled_from(["engine_dead", "cuda_app", "nccl_timeout", "nixl_disconnect", "worker_died", "shm_wait", "kv_expired"])
PREFIXES = st.sampled_from([
    "", "(EngineCore_DP0 pid=77) ERROR 02-30 25:61:61 [core.py:1] ", "[pod/decode-1/vllm] ", "2026-05-01T10:00:00.1Z ERROR ",
    "[1745700389.902821] [tray:6274 :0] ", "tray-1:1:2 [3] ", "{\"message\": \"", "Jan 99 00:00:00 host x[1]: ", "│ ", "\x1b[0;36m",
    "E0612 04:00:01.25 612 f.cpp:48] ", "[rank3]:[E612 04:10:02 P.cpp:629] ",
])  # fmt: skip
PIECES = st.one_of(
    MARKS, st.binary(max_size=30).map(lambda b: b.decode("utf-8", "replace")), st.text(max_size=30),
    st.sampled_from(["Avg prompt throughput: ", "9.9.9 tokens/s, Avg generation throughput: ", "Running: 3 reqs, Waiting: 9 reqs",
                     "vllm:corrupted_requests_total", '{engine="0"} 3e', "status=12", "remote_engine_id': '", "{" * 40, "(" * 60]),
)  # fmt: skip
LINES = st.lists(st.builds(lambda p, rest, end: p + "".join(rest) + end, PREFIXES, st.lists(PIECES, max_size=5),
                           st.sampled_from(["\n", "\r\n", ""])), max_size=12)  # fmt: skip
SAYS = {
    "engine_dead": "EngineCore encountered a fatal error", "cuda_app": "CUDA error: an illegal memory access was encountered",
    "nccl_timeout": "[Rank 1] Watchdog caught collective operation timeout", "nixl_disconnect": "NIXL_ERR_REMOTE_DISCONNECT",
    "worker_died": "Worker proc VllmWorker-0 died unexpectedly", "kv_expired": "Releasing expired KV blocks for request "
                                                                               "a which were "
    "retrieved by 0 decode worker(s)", "shm_wait": "No available shared memory broadcast block found in 60 seconds",
}  # fmt: skip


@given(LINES)
def test_any_text(lines: list[str]) -> None:
    """Any text is read and judged without an exception; readings, memory and findings are plain values."""
    memory: dict[str, object] = {}
    for reading in serving_lines.parse("".join(lines), "t07"):
        assert msgspec.json.decode(msgspec.json.encode(reading), type=type(reading)).data == json.loads(json.dumps(reading.data))
        for _ in range(2):
            msgspec.json.encode(serving_log.assess(reading, memory))
        json.dumps(memory)
    decode_text("".join(lines))


@given(st.binary(max_size=400))
def test_any_bytes(raw: bytes) -> None:
    """Any bytes at all are taken apart."""
    for line in raw.decode("utf-8", "replace").split("\n"):
        serving_prefix.take_apart(line)


@given(st.lists(KINDS, min_size=1, max_size=8))
@settings(max_examples=60)
def test_someone_is_the_cause(kinds: list[str]) -> None:
    """However faults follow one another, one of them is unexplained and asks for something; it is as bad as the worst of them."""
    decoded = decode_text("\n".join(SAYS[k] for k in kinds))
    assert decoded.verdict.action is not Action.NONE
    worst = max((serving_lines.kinds()[k].severity for k in kinds), key=lambda s: s.rank)
    assert decoded.verdict.severity.rank >= worst.rank or decoded.verdict.severity is Severity.FATAL
    assert any("caused_by" not in f.facts for f in decoded.findings)


def test_a_flood_stays_small() -> None:
    """A flood of lines that all differ leaves a reading of bounded size that still counts them."""
    text = "\n".join(
        f"(Worker_TP0 pid={n}) NIXL transfer failure: transfer_x | 'remote_engine_id': 'e-{n}', " + "x" * 50 for n in range(6000)
    )
    text += "\n" + "\n".join(
        f"INFO 01-01 00:{n // 60 % 60:02}:{n % 60:02} Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: "
        f"{n}.0 tokens/s"
        for n in range(6000)
    )
    (reading,) = serving_lines.parse(text, "t07")
    assert len(reading.data["events"]) <= serving_lines.EVENTS
    assert len(reading.data["samples"]) <= serving_lines.SAMPLES
    assert reading.data["skipped"]["over"] == 6000 - serving_lines.EVENTS + 6000 - serving_lines.SAMPLES
    assert len(serving_log.assess(reading, {})) == 1

"""Whatever is pasted, in whatever wrapping: an answer, never an exception, and no line lost on the way."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from probes.decode import decode_text
from probes.pasted_carried import carried
from probes.pasted_prefix import KERNEL, QUOTED, USER_SPACE, origin

PIECES = (
    "NVRM: Xid (PCI:0019:01:00): 119, Timeout", "NVRM: Xid (", "fallen off the bus", "nvidia-nvswitch1: SXid (PCI:", "MESSAGE=",
    "_TRANSPORT=kernel", '{"MESSAGE": "', '"msg": "NVRM: Xid (PCI:0019:01:00): 79', '{"dmesg":[', '[{"line": "', "}", "]", '"',
    "\n", "\r", "\x1b[31m", "\u00a0", "\ufeff", "\0", "[pod/a-b2c4d/e] ", "t07: ", "t08: ", "2026-03-04T05:06:07.1Z stdout F ",
    "name-1  | ", '{"log": "x\\n"}', "Mar  4 05:06:07 ", "kernel: ", "<12>", "/sys/class/infiniband/mlx5_0/ports/1/state:",
    "4: ACTIVE", "GPU 00000019:01:00.0", "    Fabric", "CA 'mlx5_0'", "Node #0 - a - READY", ": ", "x" * 90,
)  # fmt: skip
TEXT = st.lists(st.sampled_from(PIECES) | st.text(max_size=12), max_size=40).map("".join)


@settings(max_examples=300, deadline=None)
@given(TEXT)
def test_any_text_gets_an_answer(text: str) -> None:
    """No text of any make-up raises, and the answer can be printed as JSON."""
    decoded = decode_text(text)
    assert json.loads(json.dumps(decoded.to_json()))["verdict"]["severity"] in ("info", "warning", "fatal")


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=400) | TEXT)
def test_a_prefix_has_one_author(prefix: str) -> None:
    """Any prefix has one of three authors; a quotation has no host."""
    author, host = origin(prefix)
    assert author in (KERNEL, USER_SPACE, QUOTED)
    assert author == KERNEL or not host


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["t07", "t08", "t09"]), st.text("abc 12\t=", max_size=20)), min_size=12, max_size=60),
    st.sampled_from(["[pod/{}/main] {}", "{}  | {}", "2026-03-04T05:06:07Z [pod/{}/main] {}"]),
)
def test_carried_lines_are_all_there(lines: list[tuple[str, str]], way: str) -> None:
    """What several hosts printed in turns comes apart into each host's own lines, in order."""
    parts = dict(carried("".join(way.format(host, f"={line}") + "\n" for host, line in lines)))
    assert {h: p.splitlines() for h, p in parts.items()} == {
        h: [f"={line}" for host, line in lines if host == h] for h in {host for host, _ in lines}
    }

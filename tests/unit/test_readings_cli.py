"""``sentinel probe``, ``record`` and ``assess``: what a person at a node, or with a file from one, gets to see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sentinel.agent.driver import NVML_VARIABLE
from sentinel.cli.main import main
from sentinel.cli.recording import FORMAT, header, line
from sentinel.model import Reading
from sentinel.testing.nvml_kinds import gb200_tray
from sentinel.testing.nvml_state import STATE_FILE, FakeState


@pytest.fixture
def tray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeState:
    """A simulated tray behind the real driver child; save it after a change."""
    state = gb200_tray()
    state.save(tmp_path / "nvml.json")
    monkeypatch.setenv(NVML_VARIABLE, "sentinel.testing.nvml:from_file")
    monkeypatch.setenv(STATE_FILE, str(tmp_path / "nvml.json"))
    return state


def run(*args: str, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(main, args, input=stdin)


def gpu(**values: Any) -> dict[str, Any]:
    return {"pci": "0008:01:00.0", "index": 0, "unread": {}, **values}


def recorded(*gpus: dict[str, Any], node: str = "t01") -> bytes:
    """A recording of one GPU, five seconds apart."""
    lines = [header(node, 1_800_000_000.0)]
    for n, values in enumerate(gpus):
        data = {"error": None, "driver": "580.159.04", "gpus": [values]}
        lines.append(line(Reading(probe="gpu", node=node, at=1_800_000_000.0 + 5 * n, data=data)))
    return b"".join(lines)


# -- probe --------------------------------------------------------------------------------------------------------------------


def test_probe_shows_what_it_sees_and_thinks(tray: FakeState, tmp_path: Path) -> None:
    """The table names each GPU, what is wrong with it and what to do, and says that the driver is simulated."""
    tray.gpus[1].set(rows_pending=1)
    tray.save(tmp_path / "nvml.json")
    result = run("probe", "--once", "--only", "gpu")
    assert result.exit_code == 0
    thinks = ("gpu.row_remap_pending", "reset_gpu", "measured and fine")
    for words in ("0009:01:00.0", "NVIDIA GB200", "NVLinks 18/18", "SIMULATED", *thinks):
        assert words in result.output


def test_probe_as_json(tray: FakeState) -> None:
    """The whole reading and every finding, present and not, in one document."""
    result = run("probe", "--once", "--only", "gpu", "--json")
    (probe,) = json.loads(result.stdout)["probes"]
    assert (probe["probe"], probe["ok"], probe["error"]) == ("gpu", True, None)
    assert len(probe["reading"]["data"]["gpus"]) == 4
    assert {f["present"] for f in probe["findings"]} == {False}


def test_a_probe_that_cannot_look_is_said_in_its_place(tmp_path: Path) -> None:
    """A kernel log that cannot be read is one sentence in its row; exit status 1 says that nothing was looked at."""
    config = tmp_path / "host.toml"
    config.write_text(f'[agent]\nnode = "t01"\nkmsg = "{tmp_path / "no-such-kmsg"}"\n')
    result = run("probe", "--once", "--only", "kernel_log", "--config", str(config))
    assert result.exit_code == 1
    assert "could not look" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["probe"], "wanted --once"),
        (["probe", "--once", "--only", "gpuu"], "no probe is called 'gpuu'"),
        (["probe", "--once", "--config", "/no/such.toml"], "/no/such.toml: cannot be read"),
        (["record", "/no/such/folder/out.jsonl"], "cannot be written"),
        (["record", "out.jsonl", "--for", "5"], "expected a duration"),
        (["assess", "/no/such.jsonl"], "/no/such.jsonl: cannot be read: No such file"),
        (["assess", "/"], "/: cannot be read"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(args: list[str], words: str) -> None:
    """What was wrong and what was wanted, never a traceback."""
    result = run(*args)
    assert result.exit_code in (1, 2)
    assert words in result.output
    assert result.exc_info is None or result.exc_info[0] is SystemExit


# -- record and assess --------------------------------------------------------------------------------------------------------


def test_what_is_recorded_can_be_judged(tray: FakeState, tmp_path: Path) -> None:
    """A recording has a header, holds readings, and judges to what was wrong when it was made."""
    tray.gpus[2].link(7, 0)
    tray.save(tmp_path / "nvml.json")
    out = tmp_path / "out.jsonl"
    assert run("record", str(out), "--only", "gpu", "--for", "300ms", "--every", "100ms").exit_code == 0
    lines = [json.loads(x) for x in out.read_text().splitlines()]
    assert lines[0]["sentinel_recording"] == FORMAT
    assert {x["probe"] for x in lines[1:]} == {"gpu"}
    assert len(lines) > 1
    document = json.loads(run("assess", "--json", str(out)).stdout)
    assert document["judged"] == len(lines) - 1
    (finding,) = document["findings"]
    assert finding["check"] == "gpu.nvlink_down"
    assert finding["component"].endswith("gpu@0018:01:00.0/nvlink7")
    assert document["verdict"] == {"severity": "fatal", "action": "reset_gpu"}


def test_a_recording_is_not_overwritten_by_accident(tray: FakeState, tmp_path: Path) -> None:
    """An existing file is kept unless --force says otherwise."""
    out = tmp_path / "out.jsonl"
    out.write_text("precious")
    result = run("record", str(out), "--only", "gpu")
    assert (result.exit_code, out.read_text()) == (1, "precious")
    assert "exists; wanted a new file, or --force" in result.output
    assert run("record", str(out), "--only", "gpu", "--force").exit_code == 0
    assert run("assess", str(out)).exit_code == 0


def test_a_recording_tells_when_things_began_and_ended() -> None:
    """States have a beginning and an end in the recording's own time, whatever the time is now."""
    course = [gpu(rows_pending=False), gpu(rows_pending=True), gpu(rows_pending=True), gpu(rows_pending=False)]
    document = json.loads(run("assess", "--json", "-", stdin=recorded(*course)).stdout)
    (finding,) = document["findings"]
    assert (finding["first_at"], finding["last_at"], finding["ended"]) == (1_800_000_005.0, 1_800_000_015.0, True)
    shown = run("assess", "-", stdin=recorded(*course)).output
    assert "10 s" in shown
    assert "verdict: warning, reset_gpu" in shown


def test_a_recording_that_was_cut_off_loses_its_last_line_only() -> None:
    """Truncation is a counted, visible skip."""
    whole = recorded(gpu(rows_pending=True), gpu(rows_pending=True))
    result = run("assess", "-", stdin=whole[:-20])
    assert result.exit_code == 0
    assert "1 readings judged" in result.output
    assert "skipped line 3: cut off" in result.output
    assert "gpu.row_remap_pending" in result.output


def test_lines_that_cannot_be_used_are_counted_and_named() -> None:
    """Garbage, another format, a probe that is not installed here, a shape that no probe writes: the rest is still judged."""
    odd = [
        b"\xff\xfe garbage\n",
        b'{"probe":"gpu"}\n',
        line(Reading(probe="gpu", node="t01", at=1.0, format=9)),
        line(Reading(probe="of_another_site", node="t01", at=1.0)),
        line(Reading(probe="gpu", node="t01", at=1.0, data={"gpus": "none"})),
        b"\n",
        b'{"could_not_look":"permission denied","probe":"kernel_log","at":1.0}\n',
    ]
    document = json.loads(run("assess", "--json", "-", stdin=recorded(gpu(recovery_action=2)) + b"".join(odd)).stdout)
    assert [s["line"] for s in document["skipped"]] == [3, 4, 5, 6, 7]
    assert "format 9" in document["skipped"][2]["why"]
    assert "not installed" in document["skipped"][3]["why"]
    assert document["judged"] == 1
    assert document["could_not_look"][0]["probe"] == "kernel_log"
    assert document["verdict"]["action"] == "reboot_node"


def test_a_recording_of_garbage_is_told_in_bounds() -> None:
    """However many lines cannot be used, the first of them are told one by one and all are counted; nesting without end is one."""
    nested = b'{"probe":"gpu","node":"t01","at":1,"data":{"x":' + b"[" * 100_000 + b"\n"
    missed = b'{"could_not_look":"away","probe":"gpu","at":1.0}\n'
    document = json.loads(run("assess", "--json", "-", stdin=recorded(gpu()) + nested + b"x\n" * 5000 + missed * 3000).stdout)
    assert (document["judged"], document["skipped_lines"], document["missed"]) == (1, 5001, 3000)
    assert (len(document["skipped"]), len(document["could_not_look"])) == (1000, 1000)
    assert document["skipped"][0]["line"] == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a recording"),
        (b'{"sentinel_recording":1,"x":' + b"[" * 100_000, "not a recording"),
        (b"[ 12.3] NVRM: Xid (PCI:0008:01:00): 79\n", "not a recording"),
        (bytes(range(256)) * 64, "not a recording"),
        (b'{"sentinel_recording":"1"}\n', "not a recording"),
        (b'{"sentinel_recording":2,"version":"9.0"}\n', "of format 2 (written by sentinel 9.0); this sentinel reads format 1"),
        (header("t01", 0.0), "no reading in it could be judged"),
    ],
)
def test_what_is_no_recording_is_refused(content: bytes, words: str) -> None:
    """One clear error, for a file of another kind and of another version."""
    result = run("assess", "-", stdin=content)
    assert result.exit_code == 1
    assert words in result.output


def test_foreign_text_does_not_reach_the_terminal_as_commands() -> None:
    """Escape sequences and markup inside a recording are shown as text."""
    evil = gpu(margin_c=-1, name="\x1b[2J[bold]x")
    result = run("assess", "-", stdin=recorded(evil, node="t\x1b[31m01[/]"))
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    assert "[/]" in result.output


def test_expectations_come_from_the_configuration(tmp_path: Path) -> None:
    """A recording is judged against what the configuration says a healthy node looks like."""
    config = tmp_path / "host.toml"
    config.write_text('[agent]\nnode = "t01"\n[agent.expected]\ngpus = 4\n')
    document = json.loads(run("assess", "--json", "--config", str(config), "-", stdin=recorded(gpu())).stdout)
    assert [f["check"] for f in document["findings"]] == ["gpu.count"]


def test_a_recording_s_own_kind_of_node_is_its_hint() -> None:
    """What its GPUs show of the kind of node serves the judgement of the node's other readings, as it does in the agent."""
    kind = gpu(name="NVIDIA H200", architecture=9, link_version=6)
    narrow = {"pci": "0008:01:00.0", "kind": "gpu", "width": 8, "width_max": 16, "up_width_max": 8}
    readings = [
        line(Reading(probe="pcie", node=node, at=1_800_000_015.0 + 15 * n, data={"devices": [narrow]}))
        for n in range(3) for node in ("t01", "t02")
    ]  # fmt: skip
    document = json.loads(run("assess", "--json", "-", stdin=recorded(kind) + b"".join(readings)).stdout)
    assert [(f["check"], f["component"]) for f in document["findings"]] == [("pcie.width", "t01/gpu@0008:01:00.0")]
    assert document["verdict"] == {"severity": "info", "action": "none"}

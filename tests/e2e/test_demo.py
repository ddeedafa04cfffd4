"""``sentinel demo`` as a user runs it: every scenario headless, and nothing left behind however it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel.sim.scenarios import SCENARIOS

DEMO = [sys.executable, "-c", "from sentinel.cli.main import main; main()", "demo"]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A short folder for the demo's own; whatever happened, no process may still live in it and no file lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="sd"))
    yield folder
    last = time.monotonic() + 20
    while (living(folder) or any(folder.iterdir())) and time.monotonic() < last:
        time.sleep(0.05)
    left, files = living(folder), sorted(p.name for p in folder.iterdir())
    shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"processes left behind: {left}"
    assert not files, f"files left behind: {files}"


def living(folder: Path) -> list[str]:
    """Command lines of the processes that work in this folder: the demo starts all of its own there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str((process / "cwd").readlink()).startswith(str(folder)):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120])
        except OSError:
            continue
    return found


def start(scratch: Path, *args: str) -> subprocess.Popen[str]:
    env = {**os.environ, "TMPDIR": str(scratch), "COLUMNS": "200"}
    pipe = subprocess.PIPE
    return subprocess.Popen([*DEMO, *args], stdout=pipe, stderr=pipe, text=True, env=env, start_new_session=True)


def run(scratch: Path, *args: str) -> tuple[int, str, str]:
    process = start(scratch, *args)
    out, err = process.communicate(timeout=110)
    return process.returncode, out, err


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"the demo ended without saying {text!r}")


def whats(document: dict[str, Any]) -> list[str]:
    return [mark["what"] for mark in document["timeline"]]


STORY = {
    "gpu-off-bus": ["injected", "found", "decided", "out of rotation", "traffic shifted"],
    "row-remap-pending": ["injected", "found", "decided", "out of rotation", "repairing", "repaired", "verified", "back"],
    "app-fault": ["injected", "found"],
    "engine-frozen": ["injected", "found", "decided", "out of rotation", "restarted", "verified", "back"],
    "agent-silent": ["injected", "found", "paged", "agent returns", "closed"],
    "driver-upgrade": ["injected", "found", "paged"],
    "switch-asic": ["injected", "found", "paged"],
    "imex-peer": ["injected", "found", "paged"],
    "budget-exhausted": ["injected", "found", "held back", "paged", "repaired", "back"],
    "gateway-killed": ["injected", "slots are back", "gateway returns"],
    "overload": ["injected", "peak", "overload", "plateau"],
    "pool-lost": ["injected", "found", "decided", "restarted", "back", "page resolved"],
}
# imex-peer runs eighteen tools a second, and what it shows is a row of the table, too; overload wants both cores for itself.
LONG = {"imex-peer", "overload"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] if n in LONG else []) for n in SCENARIOS])
def test_a_scenario_ends_as_it_should(scratch: Path, name: str) -> None:
    """Headless, one JSON document: every expectation held, the timeline tells the story in order, the counts add up."""
    status, out, err = run(scratch, "--headless", "--json", "--scenario", name)
    document = json.loads(out)
    missed = [e for e in document["expectations"] if not e["held"]]
    assert status == 0, f"{missed}\n{err[-3000:]}"
    assert document["ok"]
    assert len(document["expectations"]) >= 5
    assert not missed
    assert document["scenario"] == name
    assert document["simulated"]
    told = whats(document)
    firsts = [told.index(what) for what in STORY[name]]
    assert firsts == sorted(firsts), told
    assert [m["ms"] for m in document["timeline"]] == sorted(m["ms"] for m in document["timeline"])
    requests = document["requests"]
    assert requests["sent"] == requests["ok"] + requests["refused"] + requests["failed"]
    assert requests["failed"] == len(requests["failures"])
    assert all(r["why"] and r["on"] for r in requests["failures"])
    assert 0 < requests["first_token_ms"]["p50"] <= requests["first_token_ms"]["p99"]
    assert set(document["gateways"]) == {"tries repeated on another worker", "streams that broke", "breakers opened"}
    assert "Simulated:" in err


def test_what_was_expected_and_did_not_happen_exits_1_and_says_so(scratch: Path) -> None:
    """Cut off before the page can come, the run says which expectation did not hold, in its document and in a sentence."""
    status, out, err = run(scratch, "--json", "--scenario", "agent-silent", "--duration", "10s")
    document = json.loads(out)
    assert status == 1
    assert not document["ok"]
    missed = [e["name"] for e in document["expectations"] if not e["held"]]
    assert "one page of low urgency" in missed
    assert "one page of low urgency" in err.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_in_the_middle_it_cleans_up(scratch: Path, number: signal.Signals) -> None:
    """Ctrl-C or SIGTERM in the middle of a run ends it within seconds, with one sentence and no traceback."""
    process = start(scratch, "--headless", "--scenario", "engine-frozen")
    wait_for(process, "injected")
    assert living(scratch)
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "stopped before the scenario had ended" in err
    assert "Traceback" not in err


def test_killed_outright_it_leaves_nothing_behind(scratch: Path) -> None:
    """Even SIGKILL of the demo leaves no controller, gateway, agent, worker, store or folder."""
    process = start(scratch, "--headless", "--scenario", "gpu-off-bus")
    wait_for(process, "injected")
    assert len(living(scratch)) >= 8
    assert sum("gateway" in line for line in living(scratch)) == 3
    process.kill()
    process.communicate(timeout=20)


def test_bad_arguments_are_one_sentence(scratch: Path) -> None:
    """An unknown scenario and a duration that is none cost a sentence that names what is wanted, and start nothing."""
    for args, wanted in (
        (("--scenario", "gpu-on-fire"), "gpu-off-bus"),
        (("--duration", "soon"), "5s"),
        (("--duration", "1s"), "between 10s and 1h"),
    ):
        status, out, err = run(scratch, *args)
        assert (status, out) == (2, "")
        assert wanted in err
        assert "Traceback" not in err
    status, out, _ = run(scratch, "--list")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == list(SCENARIOS)

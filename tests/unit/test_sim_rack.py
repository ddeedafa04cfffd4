"""The simulated rack's shape and state, the files written for it, its timeline, and who cleans up after it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from probes import Context
from probes.gpu import GpuProbe
from sentinel.config import load
from sentinel.decide.rules.policy_file import default_policy, load_policy
from sentinel.model import Role
from sentinel.sim import janitor
from sentinel.sim.files import FASTER, faster_policy, write_controller, write_tokens
from sentinel.sim.probes import SimDriver, healthy_gpu, mismatch
from sentinel.sim.rack import GPUS, NODES, PLACES, NoSuchGpu, Rack
from sentinel.sim.timeline import Timeline


def test_the_rack_is_an_nvl72_with_every_gpu_in_one_worker() -> None:
    """18 trays of 4 GPUs; each GPU belongs to exactly one worker; a prefill group spans two trays, a decoder is one."""
    assert (len(NODES), len(GPUS)) == (18, 4)
    owners = Counter(gpu for place in PLACES.values() for gpu in place.gpus)
    assert len(owners) == 72
    assert set(owners.values()) == {1}
    assert all(len(p.nodes) == (2 if p.role is Role.PREFILL else 1) for p in PLACES.values())
    assert {p.ranks for p in PLACES.values() if p.role is Role.PREFILL} == {8}
    assert any(p.standby for p in PLACES.values())


def test_state_is_what_differs_and_mending_forgets_it() -> None:
    """A fault changes one GPU's reading only; a reboot makes the whole tray healthy again; a wrong name says what exists."""
    rack = Rack()
    rack.set_gpu("t03", "PCI:0009:01:00", {"lost": True})
    rack.set_driver("t03", mismatch())
    assert rack.lost("t03", GPUS[1])
    assert not rack.lost("t03", GPUS[0])
    assert not rack.lost("t04", GPUS[1])
    rack.mend_node("t03")
    assert rack == Rack()
    for node, pci in (("t19", GPUS[0]), ("t01", "0001:01:00.0"), ("t01", "nonsense")):
        with pytest.raises(NoSuchGpu):
            rack.set_gpu(node, pci, {})


async def test_the_driver_answers_as_the_rack_stands() -> None:
    """Healthy, differing, lost and mismatched trays answer in the real driver's shape."""
    rack = Rack()
    driver = SimDriver(rack, "t02")
    whole = await driver.read()
    assert whole["error"] is None
    assert [g["pci"] for g in whole["gpus"]] == list(GPUS)
    rack.set_gpu("t02", GPUS[2], {"rows_pending": True})
    rack.set_gpu("t02", GPUS[3], {"lost": True})
    gpus = (await driver.read())["gpus"]
    assert [g.get("rows_pending") for g in gpus] == [False, False, True, None]
    assert gpus[3]["error"]["code"] == 15
    assert "temperature_c" not in gpus[3], "a lost GPU measures nothing"
    rack.set_driver("t02", mismatch())
    assert (await driver.read())["error"]["code"] == 18
    assert healthy_gpu("t01", 0)["uuid"] != healthy_gpu("t02", 0)["uuid"]


async def test_a_healthy_rack_gives_the_real_probe_nothing_to_find(tmp_path: Path) -> None:
    """Judged by the real GPU probe, every healthy tray measures dozens of states and not one is present."""
    for node in NODES:
        probe = GpuProbe(Context(node=node, sys=tmp_path, driver=SimDriver(Rack(), node)))
        memory: dict[str, Any] = {}
        for _ in range(3):
            found = probe.assess(await probe.read(), memory, {"gpus": 4, "nvlinks": 18})
        assert len(found) > 40
        assert not [f for f in found if f.present]


def test_the_faster_policy_differs_only_where_it_says(tmp_path: Path) -> None:
    """Each shortened duration is told with its shipped value; rules, budgets and everything else stay as shipped."""
    text, told = faster_policy(FASTER)
    fast, shipped = load_policy(text), default_policy()
    assert set(told) == set(FASTER)
    assert told["timing.silent_after"].startswith("15s → ")
    assert (fast.rule, fast.budget, fast.systemic, fast.repair) == (shipped.rule, shipped.budget, shipped.systemic, shipped.repair)
    with pytest.raises(ValueError, match=r"timing\.nothing"):
        faster_policy({"timing.nothing": "1s"})


def test_the_written_configuration_passes_the_real_check(tmp_path: Path) -> None:
    """What the stage writes is a configuration like any other: checked, private, and with a token for every node."""
    tokens = write_tokens(tmp_path)
    urls = {name: f"http://127.0.0.1:{20000 + n}" for n, name in enumerate(PLACES)}
    write_controller(tmp_path, listen="127.0.0.1:1", urls=urls, pager="http://127.0.0.1:2", faster=FASTER)
    fleet = load(tmp_path / "controller.toml").fleet()
    assert {w.name for w in fleet.workers} == set(PLACES)
    assert {w.name: w.url for w in fleet.workers} == urls
    assert set(fleet.nodes) == set(tokens.nodes) == set(NODES)
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.iterdir())
    assert tokens.operator not in (tmp_path / "operators").read_text()


def test_marks_are_ordered_by_when_they_happened_and_made_once() -> None:
    """The timeline sorts by the time a thing happened, counts from the injection, and takes the same thing only once."""
    heard: list[str] = []
    timeline = Timeline(on_mark=lambda mark: heard.append(mark.what))
    timeline.inject("fault")
    assert timeline.zero is not None
    timeline.mark("decided", "later heard", at=timeline.zero + 0.002)
    timeline.mark("found", "sooner", at=timeline.zero + 0.001)
    timeline.mark("found", "sooner", at=timeline.zero + 9)
    assert [(m["ms"], m["what"]) for m in timeline.document()] == [(0.0, "injected"), (1.0, "found"), (2.0, "decided")]
    assert heard == ["injected", "decided", "found"]


def test_the_janitor_ends_what_it_was_told_of_and_removes_the_folder(tmp_path: Path) -> None:
    """When its input closes it ends the group of each process, stubborn ones too, and leaves no folder behind."""
    folder = tmp_path / "stage"
    (folder / "deep").mkdir(parents=True)
    stubborn = "import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    victims = [
        subprocess.Popen([sys.executable, "-I", "-S", "-c", code], start_new_session=True, stdout=subprocess.PIPE)
        for code in ("import time; print('up', flush=True); time.sleep(60)", stubborn)
    ]
    for victim in victims:
        assert victim.stdout is not None
        victim.stdout.readline()
    bystander = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
    source = Path(janitor.__file__).read_text().replace("PATIENCE_S = 5.0", "PATIENCE_S = 0.3")
    quick = tmp_path / "janitor.py"
    quick.write_text(source)
    process = subprocess.Popen([sys.executable, "-I", "-S", str(quick), str(folder)], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write("".join(f"{v.pid}\n" for v in victims).encode() + b"nonsense\n999999999\n")
    process.stdin.close()
    assert process.wait(10) == 0
    assert [v.wait(5) for v in victims] == [-15, -9]
    assert bystander.poll() is None
    assert not folder.exists()
    bystander.kill()
    bystander.wait()


def test_the_janitor_acts_when_its_master_is_killed(tmp_path: Path) -> None:
    """SIGKILL of whoever holds the pipe is enough: nothing needs to be said."""
    folder = tmp_path / "stage"
    folder.mkdir()
    master = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c",
         "import subprocess, sys, time; subprocess.Popen([sys.executable, '-I', '-S', *sys.argv[1:]], stdin=subprocess.PIPE); "
         "print('up', flush=True); time.sleep(60)", janitor.__file__, str(folder)], stdout=subprocess.PIPE,
    )  # fmt: skip
    assert master.stdout is not None
    master.stdout.readline()
    os.kill(master.pid, 9)
    master.wait()
    last = time.monotonic() + 10
    while folder.exists() and time.monotonic() < last:
        time.sleep(0.01)
    assert not folder.exists()

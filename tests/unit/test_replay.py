"""Replay: a recorded period comes out the same under its own rules, and shows what other rules would change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sentinel.cli.main import main
from sentinel.controller.journal import Entry, Journal, read_journal
from sentinel.decide.decider import Decider
from sentinel.decide.replay import deeds, prove, retry
from sentinel.decide.rules.policy_file import default_policy, default_policy_text
from sentinel.decide.state.events import PolicyLoaded, Restored
from sentinel.model import Action, Component, Severity, Suspect, gpu_component
from sentinel.testing.decisions import PCIS, World

DRAINS = 'fault = "row-remap-pending"\nresponse = "drain"'


def fresh() -> Decider:
    return Decider(default_policy())


def eventful() -> World:
    """A remap that is drained and repaired, a GPU off the bus, a frozen engine, a person's hold, and a change of leaders."""
    w = World()
    w.pass_time(5)
    w.report(w.state("gpu.row_remap_pending", gpu_component("t03", PCIS[0]), action=Action.RESET_GPU))
    w.pass_time(20)
    w.report(*[w.state("gpu.row_remap_pending", gpu_component("t03", PCIS[0]), False)] * 2)
    w.pass_time(30)
    w.report(w.xid(79, "t04", action=Action.REBOOT_NODE))
    w.pass_time(10)
    w.lead()
    where = Component(node="t05", device="worker@decode-3")
    doubt = {"severity": Severity.FATAL, "suspect": Suspect.APP, "action": Action.RESTART_WORKER, "certainty": 0.95}
    w.report(w.state("worker.frozen", where, **doubt))
    w.ask("hold", "decode-4", keep="in")
    w.pass_time(60)
    return w


def written(world: World, at: Path, max_bytes: int = 1 << 30) -> Path:
    journal = Journal(at, max_bytes)
    for event, instructions in world.journal:
        journal.write([Entry(event=event, instructions=tuple(instructions))])
    journal.close()
    return at


def gentler() -> str:
    text = default_policy_text()
    assert DRAINS in text
    return text.replace(DRAINS, 'fault = "row-remap-pending"\nresponse = "none"')


class TestProof:
    def test_it_comes_out_the_same(self, tmp_path: Path) -> None:
        """Every instruction of every leadership is decided again to the letter, from the file."""
        proof = prove(read_journal(written(eventful(), tmp_path)), fresh)
        assert (proof.stretches, proof.left_out, proof.differing) == (2, 0, [])

    @pytest.mark.parametrize("seed", ["1", "2"])
    def test_it_comes_out_the_same_in_another_process(self, tmp_path: Path, seed: str) -> None:
        """No decision rests on the order of a set: a process with other hashes decides alike."""
        at = written(eventful(), tmp_path)
        run = subprocess.run(
            [sys.executable, "-c", "from sentinel.cli.main import main; main()", "replay", str(at), "--json"],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert json.loads(run.stdout)["same"] is True, run.stdout
        assert run.returncode == 0

    def test_what_differs_is_named(self, tmp_path: Path) -> None:
        """A record that the rules do not bear out is told by event, and the exit status says so."""
        world = eventful()
        index = next(i for i, (_, out) in enumerate(world.journal) if len(out) > 2)
        world.journal[index] = (world.journal[index][0], [])
        run = CliRunner().invoke(main, ["replay", str(written(world, tmp_path))])
        assert run.exit_code == 1
        assert f" {world.journal[index][0].id} " in run.output
        assert "recorded nothing; decided now" in run.output

    def test_a_journal_without_its_beginning_proves_nothing(self, tmp_path: Path) -> None:
        """Where no take-over is kept, it says so in one sentence instead of calling it the same."""
        world = eventful()
        world.journal = world.journal[5:9]
        run = CliRunner().invoke(main, ["replay", str(written(world, tmp_path))])
        assert run.exit_code == 1
        assert "no leader's take-over" in run.output


class TestOtherRules:
    def test_a_rule_that_takes_nothing_out_spares_the_drain(self, tmp_path: Path) -> None:
        """The comparison names the drain and the repair that the other policy would have spared, and nothing else of weight."""
        then, now = retry(read_journal(written(eventful(), tmp_path)), fresh, gentler())
        spared = {(d.what, d.of) for d in then} - {(d.what, d.of) for d in now}
        assert spared == {("drain", "drain decode-1 (row-remap-pending)"), ("repair", f"reset_gpu of t03/gpu@{PCIS[0]}")}
        assert {d.of for d in now if d.what == "drain"} == {"evict decode-2 (gpu-off-bus)", "evict decode-3 (engine-frozen)"}

    def test_the_same_rules_make_no_difference(self, tmp_path: Path) -> None:
        """Trying the policy of that time finds every deed again, at the same moment."""
        then, now = retry(read_journal(written(eventful(), tmp_path)), fresh, default_policy_text())
        assert [(d.what, d.of, d.at) for d in then] == [(d.what, d.of, d.at) for d in now]

    def test_the_command_prints_what_differs(self, tmp_path: Path) -> None:
        """Both ways are told in words, and as JSON."""
        at, policy = written(eventful(), tmp_path / "journal"), tmp_path / "gentler.toml"
        policy.write_text(gentler())
        said = CliRunner().invoke(main, ["replay", str(at), "--policy", str(policy)])
        assert said.exit_code == 0, said.output
        assert "drain decode-1 (row-remap-pending)" in said.output.partition("only as recorded:")[2]
        told = json.loads(CliRunner().invoke(main, ["replay", str(at), "--policy", str(policy), "--json"]).output)
        assert {d["what"] for d in told["only_then"]} == {"drain", "repair"}
        assert told["only_under_policy"] == []

    def test_a_policy_that_is_none_is_refused(self, tmp_path: Path) -> None:
        """One sentence names the file and what is wrong with it."""
        at, policy = written(eventful(), tmp_path / "journal"), tmp_path / "broken.toml"
        policy.write_text("mode = 3")
        run = CliRunner().invoke(main, ["replay", str(at), "--policy", str(policy)])
        assert run.exit_code == 1
        assert "broken.toml" in run.output
        assert "Traceback" not in run.output


class TestCheckpoints:
    def test_a_later_file_begins_with_what_was_durable(self, tmp_path: Path) -> None:
        """When the first files have been given up, what is left can still be tried under other rules, and is not proven."""
        world, journal = eventful(), Journal(tmp_path, 400_000)
        lines = [Entry(event=e, instructions=tuple(i)) for e, i in world.journal]
        starts = [line.event for line in lines[:3]]
        assert isinstance(starts[0], PolicyLoaded)
        assert isinstance(starts[2], Restored)
        journal.write(lines[:3])
        journal.checkpoint = lambda: starts
        for line in lines[3:]:
            journal.write([line])
        journal.close()
        files = sorted(tmp_path.iterdir())
        assert len(files) > 2
        whole = prove(read_journal(tmp_path), fresh)
        assert (whole.stretches, whole.differing) == (2, [])
        files[0].unlink()
        assert prove(read_journal(tmp_path), fresh).left_out > 0
        then, _ = retry(read_journal(tmp_path), fresh, default_policy_text())
        assert ("drain", "evict decode-3 (engine-frozen)") in {(d.what, d.of) for d in then}

    def test_deeds_are_told_once(self) -> None:
        """However often a decision is written again, it is one deed."""
        world = eventful()
        told = deeds((e, i) for e, i in world.journal)
        assert len({(d.what, d.of) for d in told}) == len(told)

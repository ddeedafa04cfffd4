"""A policy that does something else than its author reads in it is refused, one sentence for each thing that is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sentinel.cli.draw import draw_status
from sentinel.cli.main import main
from sentinel.cli.policy import is_known, known_checks
from sentinel.decide.rules.policy_file import PolicyError, default_policy, default_policy_text, examine, load_policy

SHIPPED = default_policy_text()


def rule(checks: str, fault: str = "mine", response: str = "none", *more: str) -> str:
    names = ", ".join(f'"{c}"' for c in checks.split())
    return "\n".join(["[[rule]]", f"checks = [{names}]", f'fault = "{fault}"', f'response = "{response}"', *more, ""])


def on_top(*rules: str) -> str:
    head, mark, rest = SHIPPED.partition("[[rule]]")
    return head + "\n".join(rules) + mark + rest


def check(tmp_path: Path, text: str) -> Result:
    file = tmp_path / "policy.toml"
    file.write_text(text, "utf-8")
    return CliRunner().invoke(main, ["policy", "check", str(file)])


WRONG = [
    # what is written, what the sentence says
    (SHIPPED.replace("share = 0.25", "share = 1.25"), r"policy: systemic: share: Expected `float` <= 1\.0"),
    (SHIPPED.replace("steer_share = 0.5", "steer_share = 0.0"), r"policy: pace: steer_share: "),
    (SHIPPED.replace("[pace]", "[pase]"), r"policy: unknown key 'pase'; wanted 'pace'"),
    (SHIPPED.replace('mode = "enforce"', 'mode = "enforced"'), r"policy: mode: 'enforced'; wanted one of observe, advise, enforce"),
    (on_top(rule("site.a", "mine", "drain", "confrm = 2")), r"policy: rule 1 \(mine\): unknown key 'confrm'; wanted 'confirm'"),
    (on_top(rule("site.a", "x", "restart")), r"1 \(x\): response: 'restart'; wanted one of none, steer, cordon, drain, evict"),
    (on_top('[[rule]]\nchecks = ["site.a"]\nfault = "mine"\n'), r"policy: rule 1 \(mine\): response is missing"),
    (on_top('[[rule]]\nchecks = []\nfault = "mine"\nresponse = "none"\n'), r"1 \(mine\): checks is empty, so it can never match"),
    (on_top(rule("site.a", "mine", "drain", "certainty = 1.5")), r"rule 1 \(mine\): certainty: "),
    (on_top(rule("site.a", "mine", "drain", 'repair = "hope"')), r"rule 1 \(mine\): repair 'hope' is no repair"),
    (on_top(rule("site.a", "mine", "drain", 'page = "loud"')), r"rule 1 \(mine\): page 'loud'; wanted one of"),
    (on_top(rule("site.a", "mine", "cordon", 'repair = "reset_gpu"')), r"a worker that serves on is not repaired"),
    (on_top(rule("site.*"), rule("site.a", "yours")), r"rule 2 \(yours\) can never match: rule 1 \(mine\) takes all it would take"),
    (on_top(rule("site.a"), rule("site.a")), r"rule 2 \(mine\) can never match: rule 1 \(mine\) is the same rule"),
    (
        on_top(rule("site.a site.b"), rule("site.b site.a", "yours", "drain")),
        r"rule 2 \(yours\) contradicts rule 1 \(mine\): both match the same, one says response 'none' and the other 'drain'",
    ),
    (
        on_top(
            rule("site.*", "one", "none", 'severity = ["fatal"]'),
            rule("site.*", "two", "none", 'severity = ["info", "warning"]'),
            rule("site.a", "three"),
        ),
        r"rule 3 \(three\) can never match: rule 1 \(one\) and rule 2 \(two\) take all it would take",
    ),
    (
        re.sub(r'(\[repair\.reset_gpu\]\n(?:.*\n)*?then = )"\w*"', r'\1"hope"', SHIPPED, count=1),
        r"policy: \[repair\.reset_gpu\] then: 'hope' is no repair; wanted one of",
    ),
    ("mode = ", r"policy is not valid TOML"),
]


@pytest.mark.parametrize(("text", "says"), WRONG, ids=[says[:40] for _, says in WRONG])
def test_each_mistake_has_its_sentence(text: str, says: str, tmp_path: Path) -> None:
    """It is refused on load by the first sentence, and ``policy check`` exits 1 with it."""
    with pytest.raises(PolicyError):
        load_policy(text)
    assert any(re.search(says, problem) for problem in examine(text)[1]), examine(text)[1]
    result = check(tmp_path, text)
    assert result.exit_code == 1
    assert re.search(says, result.stderr)
    assert "Traceback" not in result.output


def test_repairs_do_not_go_in_a_circle() -> None:
    """A ladder that leads back to where it began is refused with the way round."""
    text = re.sub(r"(?m)^then = .*\n", "", SHIPPED)
    for one, other in (("reboot_node", "power_cycle"), ("power_cycle", "reboot_node")):
        text = text.replace(f"[repair.{one}]\n", f'[repair.{one}]\nthen = "{other}"\n')
    (problem,) = examine(text)[1]
    assert "goes in a circle: reboot_node then power_cycle then reboot_node" in problem


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    """Two mistakes are two sentences, each naming its rule."""
    result = check(tmp_path, on_top(rule("site.a", "one", "hope"), rule("site.b", "two", "none", "x = 1")))
    lines = result.stderr.splitlines()
    assert result.exit_code == 1
    assert [re.search(r"rule (\d)", line)[1] for line in lines] == ["1", "2"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (rule("site.?"), rule("site.*", "yours")),  # one letter is not any number of them
        (rule("site.[ab]"), rule("site.[bc]", "yours")),
        (rule("site.*", "mine", "none", "certainty = 0.5"), rule("site.a", "yours")),  # below 0.5 the later one matches
        (rule("site.*", "mine", "none", 'severity = ["fatal"]'), rule("site.a", "yours")),
        (rule("site.a"), rule("site.a site.b", "yours", "drain")),
    ],
)
def test_a_rule_that_can_match_is_not_refused(earlier: str, later: str) -> None:
    """What an earlier rule leaves over may be little, but it is something."""
    load_policy(on_top(earlier, later))


def test_the_shipped_policy_is_fine(tmp_path: Path) -> None:
    """``policy show`` prints it byte for byte, and ``policy check`` finds nothing to say about it."""
    shown = CliRunner().invoke(main, ["policy", "show"])
    assert shown.exit_code == 0 and shown.stdout == SHIPPED
    result = check(tmp_path, shown.stdout)
    assert result.exit_code == 0
    assert not result.stderr
    assert re.search(rf"can be used; mode {default_policy().mode}, {len(default_policy().rule)} rules", result.stdout)


def test_a_check_that_nobody_makes_is_a_warning(tmp_path: Path) -> None:
    """Sites add probes, so an unknown name is said and not refused; a name with a wildcard is not even said."""
    result = check(tmp_path, on_top(rule("gpu.losst"), rule("site.*", "yours"), rule("serving.kv_invalid xid.79 sxid.20034", "kv")))
    assert result.exit_code == 0
    assert result.stderr.count("Warning") == 1
    assert "rule 1 (mine): no probe of sentinel's own makes the check 'gpu.losst'" in result.stderr


def test_known_checks_are_known() -> None:
    """Names that the probes, the decider and the catalogs make are found; made-up ones are not."""
    known = known_checks()
    assert {"gpu.row_remap_pending", "worker.frozen", "agent.silent", "serving.engine_dead"} <= known
    assert not [name for name in ("gpu.losst", "serving.nothing", "xid.seventy") if is_known(name, known)]


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    """No file, or one that is no text, is exit status 1; no argument is 2."""
    runner = CliRunner()
    assert runner.invoke(main, ["policy", "check", str(tmp_path / "none.toml")]).exit_code == 1
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert runner.invoke(main, ["policy", "check", str(tmp_path / "binary")]).exit_code == 1
    assert runner.invoke(main, ["policy", "check"]).exit_code == 2


def test_status_is_loud_when_nothing_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    """The second line of ``sentinel status`` says the mode in capitals; under enforce it says nothing about it."""
    for mode, loud in (("observe", True), ("advise", True), ("enforce", False)):
        draw_status({"mode": mode, "would_have": ["start spill-2: short"] if loud else []})
        out = capsys.readouterr().out
        assert (f"MODE {mode.upper()}" in out) is loud
        assert ("would have: start spill-2" in out) is loud

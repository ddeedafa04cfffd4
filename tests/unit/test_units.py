"""The systemd side: units that verify, are hardened, and grant what the daemons need; examples that the daemons accept.

systemd-analyze, systemd-sysusers and systemd-tmpfiles are the real programs. No manager runs here, so how the units behave
(watchdog, restarts, polkit) is not tested.
"""

from __future__ import annotations

import pwd
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from sentinel.agent.actions import check as check_actions
from sentinel.cli.main import main
from sentinel.config import load
from sentinel.tokens import digest
from tests.conftest import leave_out

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").rglob("*.service"))
# exposure allowed, tenths; a unit without settings: 96
DAEMONS = {"sentinel-agent.service": 25, "sentinel-controller.service": 20, "sentinel-gateway.service": 20}


def values(unit: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", (DEPLOY / "systemd" / unit).read_text("utf-8"), flags=re.MULTILINE)


def rendered(unit: Path, folder: Path) -> Path:
    """The unit with programs that exist here in place of those it starts, which is all that verify wants to know of them."""
    text = re.sub(r"^(Exec\w+=)/\S+", r"\1/bin/true", unit.read_text("utf-8"), flags=re.MULTILINE)
    target = folder / unit.name
    target.write_text(text.replace("file:///usr/share/doc", "file:///usr/share"), "utf-8")
    return target


@pytest.mark.needs("systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_verify(unit: Path, tmp_path: Path) -> None:
    """systemd finds nothing to complain about in any unit."""
    file = rendered(unit, tmp_path)
    ran = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    # Words about this machine's other units are not about ours.
    assert not [line for line in ran.stderr.splitlines() if file.name in line], ran.stderr


@pytest.mark.needs("systemd-analyze")
@pytest.mark.parametrize("name", DAEMONS)
def test_units_are_hardened(name: str, tmp_path: Path) -> None:
    """Each daemon stays below its allowed exposure, as systemd counts it."""
    file = rendered(DEPLOY / "systemd" / name, tmp_path)
    gate = ["systemd-analyze", "security", "--no-pager", "--offline=true", f"--threshold={DAEMONS[name]}", str(file)]
    ran = subprocess.run(gate, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-600:] + ran.stderr


@pytest.mark.parametrize("name", DAEMONS)
def test_daemons_are_watched_and_brought_back(name: str) -> None:
    """Both say when they are ready, feed a watchdog, come back after a failure however often, and run as an ordinary user."""
    assert values(name, "Type") == ["notify"]
    assert re.fullmatch(r"\d+s", values(name, "WatchdogSec")[0])
    assert values(name, "Restart") == ["on-failure"]
    assert values(name, "StartLimitIntervalSec") == ["0"]
    assert values(name, "User") == ["sentinel"]
    assert values(name, "NoNewPrivileges") == ["yes"]
    assert values(name, "ProtectSystem") == ["strict"]


def test_agent_may_read_the_kernel_log_and_nothing_more() -> None:
    """Of root's capabilities the agent keeps one; the controller and the gateway keep none."""
    assert values("sentinel-agent.service", "AmbientCapabilities") == ["CAP_SYSLOG"]
    assert values("sentinel-agent.service", "CapabilityBoundingSet") == ["CAP_SYSLOG"]
    assert "/dev/kmsg r" in values("sentinel-agent.service", "DeviceAllow")
    for unit in ("sentinel-controller.service", "sentinel-gateway.service"):
        assert values(unit, "CapabilityBoundingSet") == [""]


@pytest.mark.parametrize("name", DAEMONS)
def test_units_start_commands_that_exist(name: str) -> None:
    """What a unit starts is a command of sentinel with options that it has."""
    words = values(name, "ExecStart")[0].split()
    assert words[0] == "/usr/bin/sentinel"
    shown = CliRunner().invoke(main, [words[1], "--help"])
    assert shown.exit_code == 0
    assert all(word in shown.output for word in words[2:] if word.startswith("--"))


def example(name: str, folder: Path) -> Path:
    """The example configuration with every file that it names laid out under ``folder``."""
    text = (DEPLOY / "config" / name).read_text("utf-8")
    for named in re.findall(r'"/etc/sentinel/([\w.]+)"', text):
        (folder / named).touch(mode=0o640)
        if named.endswith("tokens"):
            (folder / named).write_text(f"somebody {digest('key')}\n", "utf-8")
    file = folder / name
    file.write_text(text.replace("/etc/sentinel/", f"{folder}/"), "utf-8")
    return file


@pytest.mark.parametrize("name", ["agent.toml", "controller.toml", "gateway.toml"])
def test_examples_pass_the_check(name: str, tmp_path: Path) -> None:
    """`sentinel config check` accepts the examples as they stand, once the files that they name are there."""
    file = example(name, tmp_path)
    ran = CliRunner().invoke(main, ["config", "check", str(file)])
    assert ran.exit_code == 0, ran.output
    assert f"can be used by {file.stem}" in ran.output


def test_agent_example_allows_nothing_by_itself(tmp_path: Path) -> None:
    """Local actions are off in the example; its commented list, once switched on, is one that the agent accepts."""
    file = example("agent.toml", tmp_path)
    agent = load(file).agent
    assert agent is not None
    assert agent.actions == {}
    switched = re.sub(r"^# (\[agent\.actions\]|\w+ = \[)", r"\1", file.read_text("utf-8"), flags=re.MULTILINE)
    file.write_text(switched, "utf-8")
    agent = load(file).agent
    assert agent is not None
    assert set(agent.actions) == {"reset_gpu", "start_worker", "stop_worker", "kill_worker"}
    check_actions(agent.actions)


def test_controller_example_is_a_fleet(tmp_path: Path) -> None:
    """The example's pools, roles, groups over two trays and standby are read as they are meant."""
    fleet = load(example("controller.toml", tmp_path)).fleet()
    workers = {w.name: w for w in fleet.workers}
    assert workers["prefill-01"].nodes == ("t01", "t02")
    assert workers["decode-01"].nodes == ("t03",)
    assert workers["overflow-01"].standby
    assert {p.name: p.overflow for p in fleet.pools} == {"chat": ("chat-overflow",), "chat-overflow": ()}
    assert {node for w in fleet.workers for node in w.nodes} == set(fleet.nodes)


@pytest.mark.needs("systemd-analyze")
def test_users_and_folders(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """The user is made without a shell, and the folders with the rights that the secrets in them need."""
    if not shutil.which("systemd-sysusers") or pwd.getpwuid(Path("/proc/self").stat().st_uid).pw_name != "root":
        leave_out(pytestconfig, "needs root: only root may give files to another user")
    (tmp_path / "etc").mkdir()
    for program, conf in (("systemd-sysusers", "sentinel.sysusers.conf"), ("systemd-tmpfiles", "sentinel.tmpfiles.conf")):
        create = ["--create"] if program == "systemd-tmpfiles" else []
        argv = [program, f"--root={tmp_path}", *create, str(DEPLOY / "systemd" / conf)]
        ran = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
    user = next(line for line in (tmp_path / "etc/passwd").read_text("utf-8").splitlines() if line.startswith("sentinel:"))
    assert user.endswith(":/var/lib/sentinel:/usr/sbin/nologin")
    assert (tmp_path / "etc/sentinel").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "etc/sentinel").stat().st_uid == 0
    assert (tmp_path / "var/lib/sentinel/journal").stat().st_uid != 0

"""A program that is missing here: its tests are named as left out, never counted as passed, and are errors in CI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
TESTS = '''
import pytest

@pytest.mark.needs("no-such-program")
def test_by_mark():
    """Needs it."""

@pytest.mark.needs("etcd", "no-such-program")
def test_by_two():
    """Needs it too."""

def test_by_fixture(program):
    """Needs it while it runs."""
    program("no-such-program")

def test_of_nothing():
    """Needs nothing."""
'''


@pytest.fixture
def run(tmp_path: Path) -> object:
    """Runs the little suite above under this project's conftest, on a machine that has no program at all."""
    (tmp_path / "deploy/dev").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    shutil.copy(TOP / "deploy/dev/packages.txt", tmp_path / "deploy/dev")
    shutil.copy(TOP / "tests/conftest.py", tmp_path / "tests")
    (tmp_path / "tests/test_little.py").write_text(TESTS, "utf-8")

    def ran(ci: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "CI": ci}
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "markers=needs(name)", "tests"]
        return subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    return ran


def test_left_out_by_name(run: object) -> None:
    """Three tests are skipped, one passes, and the end of the output says what is missing and for how many."""
    assert callable(run)
    ran = run("")
    assert ran.returncode == 0, ran.stdout
    last = ran.stdout.strip().splitlines()
    assert "1 passed, 3 skipped" in last[-1]
    told = [line for line in last if line.startswith("left out: ")]
    # Where etcd is missing as well, the test that needs both is told by the first of them.
    assert any(line.endswith("needs no-such-program") for line in told)
    assert sum(int(line.split()[2]) for line in told) == 3


def test_in_ci_it_is_an_error(run: object) -> None:
    """With CI=true nothing is left out: the run fails."""
    assert callable(run)
    ran = run("true")
    assert ran.returncode == 1
    assert "in CI nothing is left out" in ran.stdout
    assert "1 passed" in ran.stdout
    assert "skipped" not in ran.stdout.strip().splitlines()[-1]


def test_packages_are_known() -> None:
    """Every program that a test says it needs is in the list that `make test` installs from."""
    lines = (TOP / "deploy/dev/packages.txt").read_text("utf-8").splitlines()
    listed = {line.split()[0] for line in lines if line and line[0] != "#"}
    for file in sorted((TOP / "tests").rglob("test_*.py")):
        if file.name == Path(__file__).name:
            continue
        for line in file.read_text("utf-8").splitlines():
            if "mark.needs(" in line or " program(" in line:
                named = {part for n, part in enumerate(line.split('"')) if n % 2}
                assert named <= listed, f"{file.name}: {line.strip()}"

"""What is inside the wheel, and that the shipped files are found in a checkout and in a wheel alike."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sentinel.shipped import KINDS, runbook, shipped

TOP = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this very checkout, built by hatchling as installed here: no network, no isolation."""
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)], cwd=TOP, check=True, capture_output=True
    )
    return next(out.glob("sentinel-*.whl"))


def committed(*folders: str) -> set[str]:
    """The files under these folders as git knows them; where there is no git, the files that are there."""
    listed = subprocess.run(["git", "ls-files", "-z", "--", *folders], cwd=TOP, capture_output=True, check=False)
    if listed.returncode == 0:
        return {name for name in listed.stdout.decode().split("\0") if name and (TOP / name).is_file()}
    return {str(p.relative_to(TOP)) for f in folders for p in (TOP / f).rglob("*") if p.is_file() and "__pycache__" not in p.parts}


def test_wheel_carries_every_shipped_file(wheel: Path) -> None:
    """Every committed runbook, dashboard, alert rule and unit is in the wheel under sentinel/share, with the same bytes."""
    with zipfile.ZipFile(wheel) as inside:
        names = set(inside.namelist())
        for name in committed(*KINDS):
            assert f"sentinel/share/{name}" in names, f"{name} is missing from the wheel"
            assert inside.read(f"sentinel/share/{name}") == (TOP / name).read_bytes()


def test_wheel_carries_data_beside_code(wheel: Path) -> None:
    """Lua scripts, decode tables, the policy and every other data file beside the code travel with it."""
    with zipfile.ZipFile(wheel) as inside:
        names = set(inside.namelist())
    missing = {name for name in committed("sentinel", "probes") if name not in names}
    assert not missing


def test_wheel_carries_nothing_else(wheel: Path) -> None:
    """Tests, benchmarks, caches and the tools of a checkout stay out."""
    with zipfile.ZipFile(wheel) as inside:
        tops = {name.split("/")[0] for name in inside.namelist()}
        assert not [name for name in inside.namelist() if "__pycache__" in name or name.endswith(".pyc")]
    assert {t for t in tops if not t.endswith(".dist-info")} == {"sentinel", "probes"}


def test_wheel_names_its_command_and_probes(wheel: Path) -> None:
    """Installing the wheel leaves the command ``sentinel`` and the built-in probes behind."""
    with zipfile.ZipFile(wheel) as inside:
        entry = next(name for name in inside.namelist() if name.endswith("entry_points.txt"))
        text = inside.read(entry).decode()
    assert "sentinel = sentinel.cli.main:main" in text
    assert "[sentinel.probes]" in text


def test_shipped_finds_files_of_an_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    """In an installation without a checkout around it, each kind is found inside the package."""
    with zipfile.ZipFile(wheel) as inside:
        inside.extractall(tmp_path)
    code = (
        "from sentinel.shipped import KINDS, runbook, shipped\n"
        "for kind in KINDS: print(shipped(kind))\n"
        "print(runbook('gpu-off-bus'))\n"
    )
    # -S and an own path: neither the editable install nor the checkout can be what is found.
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [Path(line) for line in ran.stdout.split("\n") if line]
    assert len(paths) == len(KINDS) + 1
    assert all(path.is_relative_to(tmp_path / "sentinel" / "share") for path in paths)


def test_shipped_finds_files_of_a_checkout() -> None:
    """In a checkout the files at its root are the shipped ones."""
    assert shipped("runbooks", "gpu-off-bus.md") == TOP / "runbooks" / "gpu-off-bus.md"
    assert runbook("gpu-off-bus").read_text("utf-8").startswith("# gpu-off-bus")
    assert shipped("deploy", "systemd/sentinel-agent.service").is_file()


@pytest.mark.parametrize(
    "name", ["../README.md", "/etc/passwd", "a/../../README.md", "no-such.md", "gpu-off-bus.md/", "\0", "x" * 5000, ".."]
)
def test_shipped_never_leads_outside(name: str) -> None:
    """A name from a URL that is not a shipped file is refused with a sentence, whatever it tries."""
    with pytest.raises(FileNotFoundError, match="no runbooks file is called"):
        shipped("runbooks", name)


def test_shipped_names_its_kinds() -> None:
    """An unknown kind is the caller's mistake, and the sentence lists the known ones."""
    with pytest.raises(ValueError, match="wanted one of runbooks, dashboards, alerts, deploy"):
        shipped("secrets")

"""What every test shares: the honest handling of programs that this machine does not have.

Tests run real servers (redis-server, prometheus, …). Where one is missing, the tests that need it are skipped by name and
listed at the end of the run with the package to install; they are never counted as passed. In CI (``CI=true``) a missing
program is an error. A test says what it needs in one of two ways: ``@pytest.mark.needs("etcd")`` or, inside a fixture,
``program("etcd")``, which also answers where the program is.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

LIST = Path(__file__).parent.parent / "deploy/dev/packages.txt"
PACKAGE = dict(line.split() for line in LIST.read_text("utf-8").splitlines() if line and not line.startswith("#"))
LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = Counter()


def require(config: pytest.Config, name: str) -> Path:
    """Where the program is. Skips the running test when it is missing, or fails it in CI."""
    # Debian keeps daemons in sbin, which an ordinary user's PATH leaves out.
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"]))
    if found:
        return Path(found)
    sentence = f"needs {name} (apt-get install {PACKAGE[name]})" if name in PACKAGE else f"needs {name}"
    if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
        pytest.fail(f"{sentence}; in CI nothing is left out", pytrace=False)
    config.stash[LEFT_OUT][sentence] += 1
    pytest.skip(sentence)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            require(item.config, name)


@pytest.fixture(scope="session")
def program(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """``program("etcd")`` is its path; where it is missing the test is skipped by name, or fails in CI."""
    return lambda name: require(pytestconfig, name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = config.stash[LEFT_OUT]
    if left_out:
        terminalreporter.section("left out on this machine")
        for sentence, count in sorted(left_out.items()):
            terminalreporter.line(f"left out: {count} {'test' if count == 1 else 'tests'}: {sentence}")

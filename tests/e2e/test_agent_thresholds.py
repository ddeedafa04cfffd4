"""The agent judges by its site's thresholds: from its start, and anew after a reload."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

FULL, ROOMY = "[host]\nspool_free_mib = 900_000_000\n", "[host]\nspool_free_mib = 0\n"  # more than any disk has; less than any
OTHERS = ("gpu", "imex", "infiniband", "kernel_log", "pcie", "worker")


class Site:
    """A host's configuration and thresholds, and the agent that runs on them with the host probe alone."""

    def __init__(self, folder: Path) -> None:
        self.site, self.log = folder / "site.toml", folder / "log"
        off = "".join(f"[agent.probes.{name}]\nenabled = false\n" for name in OTHERS)
        (folder / "agent.toml").write_text(
            f'[agent]\nnode = "t01"\nlisten = "127.0.0.1:0"\nstate_dir = "{folder}/state"\nthresholds = "{self.site}"\n'
            f'{off}[agent.probes.host]\ninterval = "100ms"\n'
        )
        sentinel = "from sentinel.cli.main import main; main()"
        self.command = [sys.executable, "-c", sentinel, "agent", "--config", str(folder / "agent.toml")]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(self.command, stdout=out, stderr=out)
        return self.process

    def said(self, event: str) -> list[dict[str, str]]:
        lines = [msgspec.json.decode(line) for line in self.log.read_bytes().splitlines() if line.startswith(b"{")]
        return [line for line in lines if line["event"].startswith(event)]

    def spool_is_full(self) -> bool | None:
        """As /metrics has it; None: nothing is said of it yet."""
        started = self.said("agent started")
        if not started:
            return None
        with urllib.request.urlopen(f"http://127.0.0.1:{started[0]['port']}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        found = [line for line in lines if line.startswith("sentinel_finding_present") and "host.spool_space" in line]
        return found[0].endswith(" 1.0") if found else False


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    if made.process and made.process.poll() is None:
        made.process.kill()
        made.process.wait()


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_reload_takes_the_new_numbers_and_refuses_wrong_ones(site: Site) -> None:
    """A finding by a site's number ends when the number is changed and the agent reloaded; a wrong file changes nothing."""
    site.site.write_text(FULL)
    process = site.start()
    until(lambda: site.spool_is_full() is True)
    site.site.write_text("[host]\nspool_free_mib = -1\n")
    process.send_signal(signal.SIGHUP)
    until(lambda: site.said("the new configuration is not used"))
    assert "host.spool_free_mib: wanted a whole number >= 0, found -1" in site.said("the new configuration is not used")[0]["error"]
    assert site.spool_is_full() is True
    site.site.write_text(ROOMY)
    process.send_signal(signal.SIGHUP)
    until(lambda: site.spool_is_full() is False)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


def test_wrong_numbers_keep_the_agent_from_starting(site: Site) -> None:
    """It ends with one sentence that names the file, the key, what was wanted and what was found."""
    site.site.write_text("[gpu]\nmargin_cold_c = 5\n")
    ran = subprocess.run(site.command, capture_output=True, text=True, timeout=30, check=False)
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"Error: {site.site}: gpu.margin_cold_c: no such threshold; wanted one of hung_likely_s,")
    assert "Traceback" not in ran.stderr

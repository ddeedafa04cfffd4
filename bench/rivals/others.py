"""How each proxy is configured and started: one small function each, from a folder, a port and the workers' ports to a command.

What always holds: each gets one core and one worker thread or process, no access log, retries and timeouts that do not touch the
load, and the cheapest routing it has; none asks for API keys or has limits to keep but ours. Whoever is not installed raises
``Absent`` with a sentence; that is a gap in the result, never a failure. ``python bench/rivals/install.py`` fetches the wheels.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from rivals.install import HOME, pin
from rivals.process import free_port, script
from rivals.worker import MODEL


class Absent(Exception):
    """Cannot be measured on this machine; the text says what is missing."""


class Start(msgspec.Struct, frozen=True):
    argv: list[str]
    env: dict[str, str] = {}
    patience_s: float = 30.0  # until it must answer


Make = Callable[[Path, int, list[int]], Start]


def wheel(name: str, file: str) -> str:
    path = HOME / name / file
    found = next(iter(sorted((HOME / name).glob(file))), path)
    if not found.exists():
        raise Absent(f"{pin(name)} is not installed: python bench/rivals/install.py")
    return str(found)


def urls(behind: list[int]) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in behind]


def naive(folder: Path, port: int, behind: list[int]) -> Start:
    return Start(script("plain.py", "naive", str(port), json.dumps(behind)))


def bare(folder: Path, port: int, behind: list[int]) -> Start:
    return Start(script("plain.py", "bare", str(port), json.dumps(behind)))


def nginx(folder: Path, port: int, behind: list[int]) -> Start:
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin")
    if program is None:
        raise Absent("nginx is not installed: apt-get install nginx-light")
    servers = "".join(f"server 127.0.0.1:{p};" for p in behind)
    (folder / "nginx.conf").write_text(
        f"""daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr error; worker_rlimit_nofile 65536;
        events {{ worker_connections 8192; }}
        http {{
          access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
          uwsgi_temp_path {folder}; scgi_temp_path {folder}; keepalive_requests 1000000000; client_max_body_size 32m;
          client_body_buffer_size 64k;
          upstream workers {{ {servers} keepalive 512; keepalive_requests 1000000000; }}
          server {{
            listen 127.0.0.1:{port} backlog=1024;
            location / {{
              proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
              proxy_read_timeout 600s;
            }}
          }}
        }}""",
        "utf-8",
    )
    return Start([program, "-c", str(folder / "nginx.conf"), "-p", str(folder), "-e", "stderr"])


def envoy(folder: Path, port: int, behind: list[int]) -> Start:
    """Routed round robin; as many requests at once as are asked for (its own limit is 1,024)."""
    program = wheel("envoy", "lib/python3*/site-packages/envoy/_bin/envoy")
    Path(program).chmod(0o755)
    kind = "type.googleapis.com/envoy.extensions.filters"
    address = [{"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": p}}}} for p in behind]
    route = {"match": {"prefix": "/"}, "route": {"cluster": "workers", "timeout": "0s"}}
    manager = {
        "@type": f"{kind}.network.http_connection_manager.v3.HttpConnectionManager", "stat_prefix": "in",
        "http_filters": [{"name": "router", "typed_config": {"@type": f"{kind}.http.router.v3.Router"}}],
        "route_config": {"virtual_hosts": [{"name": "v", "domains": ["*"], "routes": [route]}]},
    }  # fmt: skip
    listener = {
        "name": "l", "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [{"name": "m", "typed_config": manager}]}],
    }  # fmt: skip
    cluster = {
        "name": "workers", "type": "STATIC", "connect_timeout": "2s",
        "circuit_breakers": {"thresholds": [{"max_connections": 5000, "max_requests": 5000, "max_pending_requests": 5000}]},
        "load_assignment": {"cluster_name": "workers", "endpoints": [{"lb_endpoints": address}]},
    }  # fmt: skip
    file = folder / "envoy.json"
    file.write_text(json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}}), "utf-8")
    return Start([program, "-c", str(file), "--concurrency", "1", "--disable-hot-restart", "-l", "error"])


def _rust(port: int, behind: list[int]) -> list[str]:
    """What vllm-router and smg, which have one ancestor, call alike."""
    ports = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    return [*ports, "--log-level", "error", "--worker-urls", *urls(behind)]


def vllm_router(folder: Path, port: int, behind: list[int]) -> Start:
    argv = [wheel("vllm-router", "bin/python"), "-m", "vllm_router.launch_router", "--policy", "round_robin"]
    return Start([*argv, *_rust(port, behind)])


def smg(folder: Path, port: int, behind: list[int]) -> Start:
    argv = [wheel("smg", "bin/python"), "-m", "smg", "launch", "--policy", "round_robin", "--disable-tokenizer-autoload"]
    return Start([*argv, *_rust(port, behind)])


def litellm(folder: Path, port: int, behind: list[int]) -> Start:
    program = wheel("litellm", "bin/litellm")
    models = [
        {"model_name": MODEL, "litellm_params": {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}}
        for url in urls(behind)
    ]
    file = folder / "litellm.json"  # JSON is YAML
    settings = {
        "model_list": models, "litellm_settings": {"telemetry": False, "num_retries": 0},
        "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
    }  # fmt: skip
    file.write_text(json.dumps(settings), "utf-8")
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION"}
    argv = [program, "--config", str(file), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    return Start([*argv, "--telemetry", "False"], env, 120.0)


OTHERS: dict[str, Make] = {
    "naive": naive, "bare": bare, "nginx": nginx, "envoy": envoy, "vllm-router": vllm_router, "smg": smg, "litellm": litellm,
}  # fmt: skip

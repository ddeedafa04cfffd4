"""The simulated workers: what a vLLM shows from outside, and processes that really start, die and come back."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sentinel.sim.ctl import ask

SHAPES = [
    {"name": "decode-01", "load_s": 0.02, "step_s": 0.01, "slots": 2, "queue": 2},
    {"name": "prefill-1", "load_s": 0.02, "step_s": 0.01, "ranks": 8},
]


class Host:
    """A worker host as the stage starts it."""

    def __init__(self, folder: Path) -> None:
        self.sock = str(folder / "workers.sock")
        (folder / "shapes.json").write_text(json.dumps(SHAPES))
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(self.sock)
            door.listen()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sentinel.sim.workers", str(folder / "shapes.json"), str(door.fileno())],
                stdin=subprocess.PIPE, pass_fds=[door.fileno()],
            )  # fmt: skip

    def ask(self, verb: str, *args: str) -> dict[str, Any]:
        return ask(self.sock, verb, *args, timeout_s=10)

    def up(self, name: str) -> str:
        """Start a worker and wait until it answers; its base URL."""
        assert self.ask("start", name)["ok"]
        url = str(self.ask("list")["workers"][name]["url"])
        last = time.monotonic() + 10
        while time.monotonic() < last:
            with suppress(OSError):
                get(f"{url}/health")
                return url
            time.sleep(0.01)
        raise AssertionError(f"{name} does not answer")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    running = Host(tmp_path)
    yield running
    assert running.process.stdin is not None
    running.process.stdin.close()
    running.process.wait(10)


def get(url: str) -> tuple[int, str]:
    with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310  (a URL of our own host)
        return answer.status, answer.read().decode()


def post(url: str, body: object, path: str = "/v1/chat/completions", timeout: float = 5) -> tuple[int, str]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"Content-Type": "application/json"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def raw(body: object) -> bytes:
    """A request as bytes, for tests that hold the connection in their own hands."""
    text = json.dumps(body).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)


def metric(url: str, name: str) -> float:
    """The sum of one family over its engines."""
    text = get(f"{url}/metrics")[1]
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))


def chat(tokens: int, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "tell me about the rack"}], "max_tokens": tokens, **more}


def test_answers_like_an_openai_server(host: Host) -> None:
    """Chat and plain completions, streamed or not, carry exactly the tokens asked for and their usage."""
    url = host.up("decode-01")
    status, whole = post(url, chat(5))
    assert status == 200
    assert json.loads(whole)["usage"]["completion_tokens"] == 5
    status, plain = post(url, {"prompt": "x" * 40, "max_tokens": 2}, "/v1/completions")
    assert len(json.loads(plain)["choices"][0]["text"].split()) == 2
    _, stream = post(url, chat(4, stream=True, stream_options={"include_usage": True}))
    frames = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert frames[-1] == "[DONE]"
    chunks = [json.loads(f) for f in frames[:-1]]
    assert [bool(c["choices"]) for c in chunks] == [True] * 4 + [False]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:4]] == [None, None, None, "length"]
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert metric(url, "generation_tokens_total") == 11
    assert metric(url, "request_success_total") == 3


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"no": "messages"}, 400),
        ([1], 400),
        ({"messages": "text"}, 400),
        ({**chat(1), "max_tokens": "many"}, 400),
        (chat(1, model="other"), 404),
    ],
)
def test_bad_requests_are_refused_in_one_sentence(host: Host, body: object, status: int) -> None:
    """A request that cannot be served is answered with its status and an OpenAI error object, and costs nothing else."""
    url = host.up("decode-01")
    got, text = post(url, body)
    assert got == status
    assert json.loads(text)["error"]["code"] == status
    assert post(url, chat(1))[0] == 200


def test_prefill_hands_its_cache_to_a_decoder(host: Host) -> None:
    """A prefill group answers one token with transfer parameters, and counts it under one of its eight ranks."""
    url = host.up("prefill-1")
    _, text = post(url, chat(1, kv_transfer_params={"do_remote_decode": True}))
    assert json.loads(text)["kv_transfer_params"] == {"do_remote_prefill": True, "remote_engine_id": "prefill-1"}
    exposed = get(f"{url}/metrics")[1]
    assert all(f'vllm:num_requests_running{{engine="{rank}"' in exposed for rank in range(8))


def test_a_frozen_engine_hides_behind_a_green_health(host: Host) -> None:
    """Frozen: /health and /metrics answer, running stays above zero, no token comes; thawed, the stream ends whole."""
    url = host.up("decode-01")
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=5) as link:
        link.sendall(raw(chat(30, stream=True)))
        got = link.recv(65536)
        assert host.ask("freeze", "decode-01")["ok"]
        time.sleep(0.05)
        before = metric(url, "generation_tokens_total")
        with pytest.raises(TimeoutError):
            post(url, chat(1), timeout=0.3)
        assert get(f"{url}/health")[0] == 200
        assert metric(url, "num_requests_running") == 1
        assert metric(url, "generation_tokens_total") == before
        assert host.ask("thaw", "decode-01")["ok"]
        while piece := link.recv(65536):
            got += piece
    assert got.count(b"data: ") == 31


def test_overload_is_503_and_waits_are_counted(host: Host) -> None:
    """Past its slots requests wait and are counted as waiting; past its queue they are answered 503."""
    url = host.up("decode-01")
    port = int(url.rpartition(":")[2])
    links = []
    for _ in range(4):
        link = socket.create_connection(("127.0.0.1", port), timeout=5)
        link.sendall(raw(chat(200, stream=True)))
        links.append(link)
    last = time.monotonic() + 5
    while metric(url, "num_requests_waiting") != 2 and time.monotonic() < last:
        time.sleep(0.01)
    assert metric(url, "num_requests_running") == 2
    assert post(url, chat(1))[0] == 503
    for link in links:
        link.close()
    while metric(url, "num_requests_running") != 0 and time.monotonic() < last:
        time.sleep(0.01)
    assert post(url, chat(1))[0] == 200, "clients that leave give their slots back"


def test_kill_is_real_and_a_restart_takes_the_same_port(host: Host) -> None:
    """A killed worker refuses connections; started again, it is another process on the same port with fresh counters."""
    url = host.up("decode-01")
    post(url, chat(1))
    pid = host.ask("list")["workers"]["decode-01"]["pid"]
    assert "signal 9" in host.ask("kill", "decode-01")["detail"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(urllib.error.URLError):
        post(url, chat(1))
    assert host.ask("kill", "decode-01")["ok"], "killing what does not run is fine"
    assert host.up("decode-01") == url
    assert host.ask("start", "decode-01")["ok"], "starting what runs is fine"
    again = host.ask("list")["workers"]["decode-01"]
    assert again["pid"] != pid
    assert again["starts"] == 2
    assert metric(url, "generation_tokens_total") == 0


def test_a_stop_lets_streams_end_and_refuses_new_requests(host: Host) -> None:
    """After SIGTERM what is in flight ends whole, a new request gets a 500 behind a green /health, then the process is gone."""
    url = host.up("decode-01")
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=5) as link:
        link.sendall(raw(chat(40, stream=True)))
        got = link.recv(65536)
        os.kill(host.ask("list")["workers"]["decode-01"]["pid"], signal.SIGTERM)
        time.sleep(0.05)
        assert post(url, chat(1))[0] == 500
        assert get(f"{url}/health")[0] == 200
        while piece := link.recv(65536):
            got += piece
    assert got.count(b"data: ") == 41
    assert "does not run" in host.ask("stop", "decode-01")["detail"] or host.ask("list")["workers"]["decode-01"]["pid"] is None


def test_a_worker_on_a_lost_gpu_does_not_start(host: Host) -> None:
    """A broken place refuses to start, saying why, until it is mended."""
    host.ask("break", "decode-01", "CUDA error: the GPU is lost")
    refused = host.ask("start", "decode-01")
    assert not refused["ok"]
    assert "the GPU is lost" in refused["detail"]
    host.ask("mend", "decode-01")
    host.up("decode-01")


@pytest.mark.parametrize(
    "line", [b"\n", b"{}\n", b"[1]\n", b'{"do": "start"}\n', b'{"do": "fly", "args": ["decode-01"]}\n', b"\xff\xfe\n"]
)
def test_a_bad_command_is_answered_and_changes_nothing(host: Host, line: bytes) -> None:
    """Whatever is said on the control channel, the answer is one JSON line that says no, and the host lives on."""
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(5)
        link.connect(host.sock)
        link.sendall(line)
        assert json.loads(link.recv(65536))["ok"] is False
    assert host.ask("list")["ok"]


def test_workers_die_with_their_host(tmp_path: Path) -> None:
    """When the host is killed, none of its workers lives on."""
    host = Host(tmp_path)
    host.up("decode-01")
    pid = host.ask("list")["workers"]["decode-01"]["pid"]
    host.process.kill()
    host.process.wait(5)
    last = time.monotonic() + 5
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < last:
            os.kill(pid, 0)
            time.sleep(0.01)

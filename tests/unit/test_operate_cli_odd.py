"""The operator's commands against what is no controller, or one of another version: one sentence each, never a traceback."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sentinel.cli.main import main

COMMANDS = (
    ("status",), ("incidents",), ("explain", "x"), ("drain", "x", "--reason", "r"), ("drain", "x", "--reason", "r", "--wait"),
    ("undrain", "x", "--reason", "r"), ("hold", "x", "--in", "--reason", "r"), ("release", "x"), ("acknowledge", "i"),
    ("resolve", "i", "--reason", "r"),
)  # fmt: skip


class Answers(http.server.BaseHTTPRequestHandler):
    """Says the same to everybody."""

    status, body = 200, b"{}"

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def says() -> Iterator[Any]:
    """``says(status, body)`` is the address of a server that answers so."""
    servers = []

    def serve(status: int, body: bytes) -> str:
        handler = type("Handler", (Answers,), {"status": status, "body": body})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def run(*words: str, url: str, **more: str) -> Result:
    return CliRunner().invoke(main, [*words, "--controller", url, *(w for k, v in more.items() for w in (f"--{k}", v))])


def is_a_sentence(ran: Result) -> bool:
    ended = ran.exception is None or isinstance(ran.exception, SystemExit)
    return ended and "Traceback" not in ran.output and len([x for x in ran.output.splitlines() if x.startswith("Error")]) <= 1


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"{}"), (200, b"[]"), (200, b'"x"'), (200, b"null"), (200, b""), (200, b"<html>"), (200, b"[" * 50_000),
        (500, b"<html>"), (302, b""),
        (421, b'{"error": ["x"], "leader": "http://h:99999"}'), (421, b'{"error": "x", "leader": "nonsense"}'),
        (200, json.dumps({"nodes": [5], "workers": [{}], "pools": [[]], "incidents": [{}], "steps": [{}]}).encode()),
    ],
    ids=["object", "list", "text", "null", "nothing", "page", "deep", "failed", "redirect", "odd leader", "no leader", "parts"],
)  # fmt: skip
def test_what_no_controller_says_is_one_sentence(says: Any, status: int, body: bytes) -> None:
    """Whatever a server at that address answers, each command ends with a sentence."""
    url = says(status, body)
    for words in COMMANDS:
        ran = run(*words, url=url)
        assert is_a_sentence(ran), (words, ran.output, ran.exception)


def test_times_that_no_clock_has_are_shown_all_the_same(says: Any) -> None:
    """One absurd time does not hide the rest of the picture."""
    hold = {"target": "decode-1", "keep": "in", "by": "ann", "until": 1e300, "reason": "r"}
    drain = {"id": "drain-1", "worker": "decode-2", "requested_at": -1e300, "reason": "r"}
    ran = run("status", url=says(200, json.dumps({"holds": [hold], "drains": [drain]}).encode()))
    assert ran.exit_code == 0
    assert "decode-1" in ran.output
    assert "decode-2" in ran.output


@pytest.mark.parametrize("url", ["http://h:99999", "http://[::1", "http://", "ftp://h", "h:9455", "http://h:0"])
def test_an_address_that_is_none_is_a_wrong_command_line(url: str) -> None:
    """It is said before anything is sent."""
    ran = run("status", url=url)
    assert ran.exit_code == 2
    assert "--controller" in ran.output


@pytest.mark.parametrize("content", [b"tok\xe2\x82\xacen", b"\xff", b"", b"\n\n"])
def test_a_token_file_without_a_token_is_a_wrong_command_line(tmp_path: Path, content: bytes) -> None:
    """It is named, and what is in it is not repeated."""
    file = tmp_path / "token"
    file.write_bytes(content)
    ran = run("status", url="http://127.0.0.1:1", **{"token-file": str(file)})
    assert ran.exit_code == 2
    assert "--token-file" in ran.output
    assert "\u20ac" not in ran.output


def test_in_and_out_at_once_is_a_wrong_command_line() -> None:
    """A hold that says both says nothing."""
    assert run("hold", "x", "--in", "--out", "--reason", "r", url="http://127.0.0.1:1").exit_code == 2


def test_a_full_disk_is_a_sentence(says: Any) -> None:
    """An answer that cannot be written is said, without a traceback."""
    url = says(200, b'{"leader": {"name": "c1"}}')
    with Path("/dev/full").open("wb") as full:
        words = [Path(sys.executable).parent / "sentinel", "status", "--json", "--controller", url]
        ran = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, check=False)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[0].startswith(b"Error: the answer cannot be written")
    assert b"Traceback" not in ran.stderr

"""The command line's way to the controller that leads, with nothing but the standard library.

This module exists so that ``sentinel status`` answers before an HTTP library would have been imported. What always holds:

* The token goes to the controllers that were named and to whom they name as leader, never from https to plain http.
* Every failure is Refused (exit status 1) or NoLeader (exit status 3) with one sentence.
"""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

ANSWER_MAX = 64 * 1024 * 1024
TIMEOUT = 10.0  # seconds; a leader answers within the store's deadline


class Refused(click.ClickException):
    """The controller said no."""

    exit_code = 1


class NoLeader(click.ClickException):
    """No controller that leads could be reached."""

    exit_code = 3


class Leader:
    """Calls to whichever controller leads. Raises click.UsageError when the token or a URL cannot be used."""

    def __init__(self, controllers: tuple[str, ...], token_file: Path | None, ca_file: Path | None = None) -> None:
        self._urls = [u.rstrip("/") for given in controllers for u in given.replace(",", " ").split()]
        for url in self._urls:
            if not _usable(url):
                raise click.UsageError(f"--controller: expected http://host:port or https://host:port, got {url!r}")
        self._token = _token(token_file)
        self._ca_file = ca_file
        self.answered = ""  # who did, last
        self._trust: Any = None  # made when the first https controller is asked

    def get(self, path: str) -> Any:
        return self._call("GET", path, None)

    def post(self, path: str, body: Any) -> Any:
        return self._call("POST", path, json.dumps(body).encode())

    def _call(self, method: str, path: str, body: bytes | None) -> Any:
        said: list[str] = []
        asked: set[str] = set()
        queue = list(self._urls)
        while queue:
            url = queue.pop(0)
            if url in asked:
                continue
            asked.add(url)
            try:
                status, answer = self._ask(method, url, path, body)
            except (OSError, http.client.HTTPException) as error:
                said.append(f"{url}: {_plain(error)}")
                continue
            if status < 300:
                self._urls = [url, *(u for u in self._urls if u != url)]  # the next call starts with who answered
                self.answered = url
                return answer
            sentence = answer.get("error", f"answered {status}") if isinstance(answer, dict) else f"answered {status}"
            if status in (421, 502, 503, 504):
                said.append(f"{url}: {sentence}")
                leader = answer.get("leader") if isinstance(answer, dict) else None
                if isinstance(leader, str) and _usable(leader) and (leader.startswith("https:") or not url.startswith("https:")):
                    queue.insert(0, leader.rstrip("/"))
                continue
            raise Refused(str(sentence))
        raise NoLeader("no controller that leads was reached: " + ("; ".join(said) or "none was named"))

    def _ask(self, method: str, url: str, path: str, body: bytes | None) -> tuple[int, Any]:
        parts = urlsplit(url)
        host = parts.hostname or ""
        connection = http.client.HTTPConnection(host, parts.port, timeout=TIMEOUT)
        if parts.scheme == "https":
            self._trust = self._trust or _trusted(self._ca_file)
            connection = http.client.HTTPSConnection(host, parts.port, timeout=TIMEOUT, context=self._trust)
        headers = {"Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, parts.path + path, body, headers)
            response = connection.getresponse()
            raw = response.read(ANSWER_MAX)
        finally:
            connection.close()
        try:
            return response.status, json.loads(raw) if raw else None
        except (ValueError, RecursionError):
            if response.status < 300:
                raise Refused(f"{url}{path} answered something that is not JSON; is that a controller?") from None
            return response.status, None


def _usable(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, a bracket that does not close
        return False


def _trusted(ca_file: Path | None) -> Any:
    import ssl  # noqa: PLC0415  (reads every certificate of the machine, which plain http does not need)

    try:
        return ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
    except (OSError, ssl.SSLError) as error:
        raise click.UsageError(f"--ca-file: {ca_file} holds no usable certificate: {error}") from None


def _token(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        lines = path.read_text("utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--token-file: {path} cannot be read: {error}") from None
    if not lines:
        raise click.UsageError(f"--token-file: {path} is empty")
    if not lines[0].isascii() or not lines[0].isprintable():
        raise click.UsageError(f"--token-file: {path} holds no token; wanted the first line that 'sentinel token' printed")
    return lines[0]


def _plain(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {TIMEOUT:g} s"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
